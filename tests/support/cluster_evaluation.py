"""Programs of jobs that evaluate, stop early, and are killed in between."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
from cluster_child import Options

import monsess as ms

LIMIT = 60


@ms.train_step
def add(state: Any, batch: Any, mask: Any) -> Any:
    """Sum up what all devices see."""
    return {"sum": state["sum"] + ms.masked_mean(batch, mask)}, {}


@ms.eval_step(reduce={"rows": "sum"})
def evaluate(state: Any, batch: Any, mask: Any) -> Any:
    """How far the batch is from the state, and how many rows there were."""
    return {"away": ms.masked_mean(batch - state["sum"], mask), "rows": mask.sum()}


@ms.eval_step
def flat(state: Any, batch: Any) -> Any:
    """A loss that never falls, whatever is learnt."""
    return {"loss": 1.0 + 0.0 * batch.mean() * state["sum"]}


def init_fn() -> Any:
    """The state at the start."""
    return {"sum": jnp.zeros(())}


def numbers(options: Options) -> list[np.ndarray]:
    """More batches than are used."""
    return [np.full(options.devices, number, np.float32) for number in range(LIMIT)]


class Hears(ms.SessionRunHook):
    """Writes down the values of evaluations."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, scalars: Any) -> None:
        """An evaluation is over."""
        found = {name: float(value) for name, value in scalars.items() if name.startswith("eval/")}
        if found:
            self.heard.append((step, found))


def different_shares(options: Options) -> dict[str, Any]:
    """Process 0 has more rows in the last batch, and one batch more, than process 1; the chief counts seconds."""
    rows = [4, 4, 3 if options.index == 0 else 4, *([4] if options.index == 0 else [])]
    data = [np.arange(count, dtype=np.float32) + 100 * options.index + 10 * n for n, count in enumerate(rows)]
    by_steps = ms.EvaluationHook(evaluate, data, every_n_steps=5, at_start=True)
    by_saves = ms.EvaluationHook(evaluate, data[:1], with_saves=True, at_end=False, name="saved")
    by_secs = ms.EvaluationHook(evaluate, data[:1], every_secs=0.05, at_end=False, name="often")
    hears = Hears()
    with ms.MonitoredTrainingSession(
        init_fn,
        data=numbers(options),
        checkpoint_dir=options.url,
        save_checkpoint_steps=3,
        keep=ms.KeepBest(1, "eval/away", mode="max"),
        remainder="pad",
        hooks=[by_steps, by_saves, by_secs, hears, ms.StopAtStepHook(last_step=12)],
    ) as session:
        while not session.should_stop():
            session.run(add)
    return {"heard": hears.heard, "results": by_steps.results, "step": session.global_step}


def wishes(options: Options) -> list[Any]:
    """Process 1 alone logs the values that stop, or has the predicate that does; the chief's time comes first."""
    asked = ms.make_early_stopping_hook(lambda: options.index == 1 and ended[-1:] == [4], run_every_steps=1)
    ends: list[Any] = []
    for hook in (
        ms.stop_if_lower_hook("loss", 0.5),
        ms.stop_if_lower_hook("eval/loss", 0.5),
        asked,
        ms.StopAtTimeHook(100 if options.index else 0.2, margin_secs=0),
    ):
        ended: list[int] = []
        with ms.MonitoredTrainingSession(
            init_fn, data=numbers(options), hooks=[hook, ms.StopAtStepHook(last_step=LIMIT - 5)]
        ) as session:
            while not session.should_stop():
                session.run(add)
                ended.append(session.global_step)
                if options.index == 1 and session.global_step == 4:
                    session.log({"loss": 0.25, "eval/loss": 0.25})
                if isinstance(hook, ms.StopAtTimeHook):
                    time.sleep(0.02)
        reason = session.stop_reason
        ends.append([session.global_step, None if reason is None else reason.name])
    return ends


def long_evaluation(options: Options) -> dict[str, Any]:
    """An evaluation that would take half a minute, of step 3."""
    seen = []

    def slowly() -> Any:
        for number in range(300):
            seen.append(number)
            print(f"batch {number}", flush=True)
            time.sleep(options.arguments["secs"])
            yield np.ones(options.devices, np.float32)

    hears = Hears()
    with ms.MonitoredTrainingSession(
        init_fn,
        data=numbers(options),
        checkpoint_dir=options.url,
        hooks=[ms.EvaluationHook(flat, slowly, every_n_steps=3, at_end=False), hears, ms.StopAtStepHook(last_step=5)],
    ) as session:
        while not session.should_stop():
            session.run(add)
    return {"heard": [step for step, _ in hears.heard], "step": session.global_step}


def early(options: Options) -> dict[str, Any]:
    """Evaluates every second step and stops after three values without a better one; may kill itself on the way."""
    hears = Hears()
    store = ms.CheckpointStore(options.url or "")
    stops = ms.EarlyStoppingHook("eval/loss", patience=options.arguments.get("patience", 3))
    data = [np.ones(options.devices, np.float32)] * 2
    steps = 0
    with ms.MonitoredTrainingSession(
        init_fn,
        data=numbers(options),
        checkpoint_dir=options.url,
        save_checkpoint_steps=1,
        hooks=[ms.EvaluationHook(flat, data, every_n_steps=2), stops, hears],
    ) as session:
        while not session.should_stop():
            session.run(add)
            steps += 1
            if len(hears.heard) == options.arguments.get("kill_after"):
                while session.global_step not in store.steps():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
    reason = session.stop_reason
    return {
        "steps": steps,
        "global_step": session.global_step,
        "restored_from": session.restored_from,
        "reason": None if reason is None else reason.name,
        "heard": [step for step, _ in hears.heard],
    }


def evaluator(options: Options) -> dict[str, Any]:
    """A job of its own that evaluates the checkpoints of the directory, each process its share."""
    data = [np.full(2 * options.devices, 10.0 * options.index, np.float32)]
    results: list[Any] = []
    ms.Evaluator(evaluate, data, init_fn).evaluate_repeatedly(
        options.url,
        timeout=0,
        newest_only=False,
        on_result=lambda one: results.append([one.step, one.metrics]) and False,
    )
    evaluator = ms.Evaluator(evaluate, lambda: data * 9, init_fn, hooks=[ms.StopAfterNEvalsHook(3)])
    once = evaluator.evaluate_once(options.url or "")
    return {"results": results, "once": [once.step, once.metrics, once.batches]}
