"""A job that trains with every public hook at once, and may be killed on the way."""

from __future__ import annotations

import logging
import os
import signal
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cluster_child import Options

import monsess as ms

LAST_STEP = 24
#: The base class, and `StopAfterNEvalsHook`, which belongs to an evaluator.
ELSEWHERE = {"SessionRunHook", "StopAfterNEvalsHook"}
#: Multiples of which the hooks are due.
EVERY = 4


class Service:
    """Stands for MLflow and wandb: takes everything, and notes what was logged."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, list[str]]] = []

    def mlflow(self) -> types.ModuleType:
        """A module with as much of MLflow as the hook uses."""
        module: Any = types.ModuleType("mlflow")
        module.entities = types.SimpleNamespace(Metric=lambda tag, value, at, step: (step, tag), Param=None)
        found = types.SimpleNamespace(experiment_id="0", info=types.SimpleNamespace(run_id="run"))
        module.MlflowClient = lambda tracking_uri: types.SimpleNamespace(
            get_experiment_by_name=lambda name: found,
            search_runs=lambda *given, **named: [],
            create_run=lambda *given, **named: found,
            log_batch=lambda run, metrics: self.logged.append((metrics[0][0], sorted(tag for _, tag in metrics))),
            set_terminated=lambda run, status: None,
        )
        return module

    def wandb(self) -> types.ModuleType:
        """A module with as much of wandb as the hook uses."""
        module: Any = types.ModuleType("wandb")

        def log(values: dict[str, Any]) -> None:
            self.logged.append((values["global_step"], sorted(values.keys() - {"global_step"})))

        run = types.SimpleNamespace(define_metric=lambda *given, **named: None, log=log, finish=lambda exit_code: None)
        module.init = lambda **given: run
        return module


@ms.train_step
def learn(state: Any, batch: Any, rate: Any) -> Any:
    """A straight line through the batch."""
    error = (state["w"] * batch - 3.0).mean()
    return {"w": state["w"] - rate * jax.lax.pmean(error, "data")}, {"loss": error**2}


@ms.eval_step
def evaluate(state: Any, batch: Any) -> Any:
    """How far the line is from another batch."""
    return {"loss": ((state["w"] * batch - 3.0) ** 2).mean()}


class Dies(ms.SessionRunHook):
    """Kills this process after a step, once the checkpoint before it is there."""

    def __init__(self, step: int | None, url: str) -> None:
        self.step, self.url = step, url

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Die, if it is time."""
        if run_context.global_step == self.step:
            while max(ms.CheckpointStore(self.url).steps(), default=0) < self.step - self.step % EVERY:
                pass
            os.kill(os.getpid(), signal.SIGKILL)


def train(options: Options) -> dict[str, Any]:
    """Train to `LAST_STEP`, and say what each hook did."""
    assert options.url is not None
    dies_at = options.arguments.get("dies_at")
    services = {"mlflow": Service(), "wandb": Service()}
    sys.modules["mlflow"], sys.modules["wandb"] = services["mlflow"].mlflow(), services["wandb"].wandb()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("monsess").addHandler(handler)
    fed: list[int] = []
    compared: list[int] = []
    compare = ms.MonitoredSession.compare_replicas

    def counted(session: Any) -> None:
        compared.append(session.global_step)
        compare(session)

    ms.MonitoredSession.compare_replicas = counted  # type: ignore[method-assign]

    def feed() -> dict[str, Any]:
        fed.append(1)
        return {"rate": np.float32(0.1)}

    rows = [np.full(2, 1.0 + number + options.index, np.float32) / 20 for number in range(LAST_STEP + 5)]
    hooks: dict[str, Any] = {
        "StopAtStepHook": ms.StopAtStepHook(last_step=LAST_STEP),
        "StopAtTimeHook": ms.StopAtTimeHook(36_000),
        "CheckpointSaverHook": ms.CheckpointSaverHook(save_steps=EVERY),
        "SummarySaverHook": ms.SummarySaverHook(save_steps=EVERY, summaries=["loss"]),
        "StepCounterHook": ms.StepCounterHook(every_n_steps=EVERY),
        "LoggingTensorHook": ms.LoggingTensorHook(["loss"], every_n_iter=EVERY),
        "NanTensorHook": ms.NanTensorHook(),
        "EvaluationHook": ms.EvaluationHook(evaluate, [rows[0], rows[5]], every_n_steps=EVERY + 2),
        "EarlyStoppingHook": ms.EarlyStoppingHook("eval/loss", patience=100),
        "ProfilerHook": ms.ProfilerHook(window=(LAST_STEP - 2, LAST_STEP - 1)),
        "ProgressBarHook": ms.ProgressBarHook(["loss"], total=LAST_STEP, line_secs=0.001),
        "WatchdogHook": ms.WatchdogHook(600),
        "GoodputHook": ms.GoodputHook(every_n_steps=EVERY),
        "ReplicaCheckHook": ms.ReplicaCheckHook(every_n_steps=EVERY),
        "FinalOpsHook": ms.FinalOpsHook("loss"),
        "FeedFnHook": ms.FeedFnHook(feed),
        "GlobalStepWaiterHook": ms.GlobalStepWaiterHook(0),
        "BroadcastGlobalVariablesHook": ms.BroadcastGlobalVariablesHook(0),
        "MLflowHook": ms.MLflowHook(),
        "WandbHook": ms.WandbHook(),
    }
    with ms.MonitoredTrainingSession(
        lambda: {"w": jnp.zeros(())},
        data=rows,
        checkpoint_dir=options.url,
        hooks=[*hooks.values(), Dies(dies_at if options.index == 1 else None, options.url)],
        keep=ms.KeepLast(100),
        save_checkpoint_secs=None,
        save_checkpoint_steps=None,
        save_summaries_steps=None,
        log_step_count_steps=None,
    ) as sess:
        began = sess.global_step
        while not sess.should_stop():
            sess.run(learn)
    states = sess._hooks.state_dicts()
    return {
        "hooks": sorted(hooks),
        "began": began,
        "step": sess.global_step,
        "reason": str(sess.stop_reason),
        "bits": np.asarray(sess.state_copy()["w"]).tobytes().hex(),
        "states": {name: state for name, state in states.items() if name != "GoodputHook"},
        "lines": lines,
        "rate": hooks["StepCounterHook"].last_rate,
        "fed": len(fed),
        "compared": compared,
        "evaluated": [hooks["EvaluationHook"].evaluated_step, hooks["EvaluationHook"].results],
        "final": float(hooks["FinalOpsHook"].final_ops_values),
        "traces": len(hooks["ProfilerHook"].traces),
        "goodput": [hooks["GoodputHook"].restarts, hooks["GoodputHook"].lost_steps],
        "services": {name: service.logged for name, service in services.items()},
    }
