"""What the processes of a job run where a hook watches them: `Options.call` names one of these functions."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cluster_child import Options, _threads

import monsess as ms

LIMIT = 5.0


def _for_ever() -> None:
    while True:
        time.sleep(0.5)


def hang(options: Options) -> None:
    """Train with a `WatchdogHook`; one process hangs at step 4, in ``where``."""
    where, mine = options.arguments["where"], options.arguments["process"] == options.index

    def batches() -> Iterator[Any]:
        for index in range(100):
            if where == "input" and mine and index == 6:
                _for_ever()
            yield np.ones(2, np.float32)

    def wait(count: Any) -> np.ndarray:
        if where == "step" and mine and count == 4:
            _for_ever()
        return np.float32(0)

    @ms.train_step
    def step(state: Any, batch: Any) -> Any:
        late = jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), state)
        return state + 1, {"loss": jax.lax.pmean(batch.mean() + late, "data")}

    class Hangs(ms.SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            if where == "hook" and mine and run_context.global_step == 4:
                _for_ever()

        def on_error(self, session: Any, error: BaseException) -> None:
            print("told of the error", flush=True)

    def check_finite(path: str, array: Any) -> bool:
        if where == "save":
            _for_ever()
        return True

    last_step = 6 if where == "save" else 100
    hooks = [ms.WatchdogHook(LIMIT, startup_timeout_secs=40), Hangs(), ms.StopAtStepHook(last_step=last_step)]
    with ms.MonitoredTrainingSession(
        lambda: jnp.zeros(()),
        data=batches(),
        checkpoint_dir=options.url,
        save_checkpoint_steps=None,
        save_checkpoint_secs=None,
        checkpoint=ms.CheckpointOptions(check_finite=check_finite),
        hooks=hooks,
    ) as sess:
        while not sess.should_stop():
            sess.run(step)
            if where == "loop" and mine and sess.global_step == 4:
                _for_ever()


def watched(options: Options) -> dict[str, Any]:
    """Train with all the hooks that watch; process 1 is slow, and the run may kill itself."""
    last_step, dies_at = options.arguments["last_step"], options.arguments.get("dies_at")

    @ms.train_step
    def step(state: Any, batch: Any) -> Any:
        return state + 1, {"loss": jax.lax.pmean(batch.mean(), "data")}

    goodput = ms.GoodputHook(every_n_steps=4)
    profiler = ms.ProfilerHook(window=(3, 4))
    hooks = [goodput, profiler, ms.ProgressBarHook(line_secs=0.01), ms.WatchdogHook(60)]
    if options.arguments.get("chief_only"):
        more: dict[str, Any] = {"chief_only_hooks": hooks, "hooks": [ms.StopAtStepHook(last_step=last_step)]}
    else:
        more = {"hooks": [*hooks, ms.StopAtStepHook(last_step=last_step)]}
    begun = time.monotonic()
    with ms.MonitoredTrainingSession(
        lambda: jnp.zeros(()),
        data=[np.full(2, index, np.float32) for index in range(50)],
        checkpoint_dir=options.url,
        save_checkpoint_steps=5,
        **more,
    ) as sess:
        while not sess.should_stop():
            sess.run(step)
            if sess.global_step == dies_at:
                assert options.url is not None
                while ms.CheckpointStore(options.url).steps() != [5]:
                    time.sleep(0.02)
                os.kill(os.getpid(), signal.SIGKILL)
            if options.index == 1:
                time.sleep(0.02)
        report = {"began": sess.restored_from, "wall": time.monotonic() - begun}
    report |= {"step": sess.global_step, "totals": goodput.totals, "traces": profiler.traces}
    report["threads"] = _threads(3.0)
    return report | {"lost_steps": goodput.lost_steps, "restarts": goodput.restarts, "seconds": sess.seconds}


def not_finite(options: Options) -> None:
    """Train with batches of which one, of process 1 only, holds a value that is not finite, until that is noticed."""
    value, reduce = float(options.arguments["value"]), options.arguments["reduce"]

    @ms.train_step(reduce={"n": "max", "other": reduce})
    def step(state: Any, batch: Any) -> Any:
        bad = {"loss": batch.mean()} if options.arguments["in_the_loss"] else {"loss": state["w"], "other": batch}
        bad.setdefault("other", state["w"])
        return {"w": state["w"] + 1, "n": state["n"] + 1}, {**bad, "n": state["n"]}

    data = [np.ones(2, np.float32) for _ in range(40)]
    if options.index == 1:
        data[5 - 1][0] = value
    with ms.MonitoredTrainingSession(
        lambda: {"w": jnp.zeros(()), "n": jnp.zeros((), jnp.int32)},
        data=data,
        checkpoint_dir=options.url,
        save_checkpoint_steps=2,
        hooks=[ms.NanTensorHook()],
    ) as sess:
        while not sess.should_stop():
            sess.run(step)
