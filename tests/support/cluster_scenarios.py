"""What the processes of a job run instead of the usual training: `Options.call` names one of these functions."""

from __future__ import annotations

import collections
import os
import re
import signal
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cluster_child import Options

import monsess as ms

_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)


def count_collectives(options: Options) -> dict[str, Any]:
    """Train with every built-in hook that may be the chief's alone; what ran on several devices between the ends.

    XLA dumps every program that it compiles, so that one which holds a collective shows up, whoever made it.
    """
    from jax.experimental import multihost_utils

    from monsess.dispatch import Dispatcher

    folder = os.path.join(options.folder, f"dump{options.index}")
    runs: collections.Counter[str] = collections.Counter()
    calls: list[str] = []
    before: set[str] = set()
    dispatch = Dispatcher.run

    def counted(self: Any, step: Any, *args: Any) -> Any:
        runs[f"{step.kind}_step_{step.name}"] += 1
        return dispatch(self, step, *args)

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return call

    class Between(ms.SessionRunHook):
        def after_create_session(self, session: Any, coord: Any) -> None:
            before.update(os.listdir(folder))
            calls.clear()

    Dispatcher.run = counted  # type: ignore[method-assign]
    for name in ("broadcast_one_to_all", "process_allgather", "sync_global_devices", "assert_equal"):
        setattr(multihost_utils, name, noted(name, getattr(multihost_utils, name)))

    @ms.train_step
    def step(state: Any, batch: Any) -> Any:
        mean = jax.lax.pmean(batch.mean(), "data")
        return {"w": state["w"] - mean, "n": state["n"] + 1}, {"loss": mean, "w": state["w"].sum()}

    @ms.eval_step
    def look(state: Any) -> Any:
        return {"w": state["w"].sum()}

    other = iter([None, 3]).__next__
    chief_only = [
        ms.LoggingTensorHook(["loss"], every_n_iter=2),
        ms.LoggingTensorHook({"w": lambda state, outputs: state["w"][0]}, every_n_secs=0.01),
        ms.StepCounterHook(every_n_steps=3),
        ms.NanTensorHook("loss"),
        ms.FinalOpsHook("loss"),
        ms.GlobalStepWaiterHook(3, step_fn=other),
    ]
    with ms.MonitoredTrainingSession(
        lambda: {"w": jnp.arange(4.0), "n": 0},
        data=[np.full((4,), 0.5 + options.index, np.float32) for _ in range(20)],
        checkpoint_dir=options.url,
        save_checkpoint_steps=3,
        chief_only_hooks=chief_only,
        hooks=[ms.StopAtStepHook(last_step=10), Between()],
    ) as sess:
        while not sess.should_stop():
            sess.run(step)
            if sess.global_step in (4, 7):
                sess.run(look)
        jax.block_until_ready(sess.state)
        programs = _with_collectives(folder, set(os.listdir(folder)) - before)
        return {"programs": programs, "runs": dict(runs), "calls": list(calls)}


def _with_collectives(folder: str, names: set[str]) -> dict[str, int]:
    """By name, how many compiled programs of several devices are among the files that XLA has dumped."""
    found: collections.Counter[str] = collections.Counter()
    for name in names:
        match = re.fullmatch(r"module_\d+\.(?:jit_|pmap_)?(.*)\.cpu_after_optimizations\.txt", name)
        if match is None:
            continue
        with open(os.path.join(folder, name)) as file:
            text = file.read()
        found[match[1]] += any(f" {kind}{form}(" in text for kind in _COLLECTIVES for form in ("", "-start"))
    return dict(+found)


def every_leaf(options: Options) -> dict[str, Any]:
    """Begin with the chief's state of every kind of leaf, or the stored one; the others' own init_fn gives zeros."""
    import leaf_matrix

    jax.config.update("jax_enable_x64", True)
    wanted = leaf_matrix.expected()
    fresh = options.arguments["last_step"] == 1 and options.index == 0

    @ms.train_step(engine=options.engine)
    def handed_through(state: Any) -> Any:
        return state, {}

    with ms.MonitoredTrainingSession(
        lambda: wanted if fresh else jax.tree.map(leaf_matrix._zero, wanted),
        checkpoint_dir=options.url,
        checkpoint=ms.CheckpointOptions(check_finite=False),
        hooks=[ms.StopAtStepHook(last_step=options.arguments["last_step"])],
    ) as sess:
        leaves = leaf_matrix.compare(sess._dispatcher.state, wanted)
        while not sess.should_stop():
            sess.run(handed_through)
        leaf_matrix.compare(sess._dispatcher.state, wanted)
    return {"leaves": leaves, "dtypes": len(wanted["dtype"]), "restored_from": sess.restored_from}


def early_stopping(options: Options) -> dict[str, Any]:
    """Train until a process's own metric stops falling; that of process 1 does so first."""
    import toy

    class Stops(ms.SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            step = run_context.global_step
            metric = max(30.0 - step, (0.0, 23.0)[options.index])
            if metric == max(31.0 - step, (0.0, 23.0)[options.index]):
                run_context.request_stop(ms.StopReason("EARLY_STOPPING", "own metric stopped falling", by="Stops"))

    rows = slice(4 * options.index, 4 * options.index + 4)
    with ms.MonitoredTrainingSession(
        toy.init_fn,
        data=[{name: leaf[rows] for name, leaf in batch.items()} for batch in toy.batches(60)],
        checkpoint_dir=options.url,
        save_checkpoint_steps=100,
        hooks=[Stops()],
    ) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
    return {"global_step": sess.global_step, "reason": str(sess.stop_reason), "name": sess.stop_reason.name}


def waiting(options: Options) -> None:
    """Wait for another run that never comes; one process dies meanwhile, or the wait has a limit of 3 s."""
    dies = options.arguments["dies"]
    dying = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGKILL))

    def other_run() -> None:
        if options.index == dies and dying.ident is None:
            dying.start()

    @ms.train_step
    def step(state: Any) -> Any:
        return state + 1, {}

    hook = ms.GlobalStepWaiterHook(100, timeout_secs=3 if dies is None else 600, step_fn=other_run)
    with ms.MonitoredTrainingSession(lambda: 0, hooks=[hook, ms.StopAtStepHook(last_step=3)]) as sess:
        while not sess.should_stop():
            sess.run(step)


def alternating(options: Options) -> dict[str, Any]:
    """Run two train steps in turn; how often the processes waited for each other, and the milliseconds per step."""
    from monsess.channel import Channel

    meetings: list[str] = []
    gather = Channel.gather

    def noted(self: Any, what: str, *args: Any) -> Any:
        meetings.append(what)
        return gather(self, what, *args)

    Channel.gather = noted  # type: ignore[method-assign]

    @ms.train_step
    def forth(state: Any) -> Any:
        return state + jax.lax.pmean(1.0, "data"), {}

    @ms.train_step
    def back(state: Any) -> Any:
        return state - jax.lax.pmean(0.5, "data"), {}

    with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), hooks=[ms.StopAtStepHook(last_step=402)]) as sess:
        sess.run(forth)
        sess.run(back)
        begun = time.monotonic()
        while not sess.should_stop():
            sess.run(forth)
            sess.run(back)
        seconds = time.monotonic() - begun
    at = sum(what.startswith("program/") for what in meetings)
    return {"meetings": at, "ms": round(1000 * seconds / 400, 2), "state": float(sess.state)}


def several_sessions(options: Options) -> dict[str, Any]:
    """Three sessions, one after the other, in one job; the last one of them ends in an error of process 1."""
    import toy

    reports = []
    rows = slice(4 * options.index, 4 * options.index + 4)
    data = [{name: leaf[rows] for name, leaf in batch.items()} for batch in toy.batches(20)]

    def session(last_step: int) -> Any:
        return ms.MonitoredTrainingSession(
            toy.init_fn,
            data=data,
            checkpoint_dir=options.url,
            save_checkpoint_steps=3,
            hooks=[ms.StopAtStepHook(last_step=last_step)],
        )

    for last_step in (4, 7):
        with session(last_step) as sess:
            while not sess.should_stop():
                sess.run(toy.train)
            reports.append([sess.restored_from, sess.global_step, np.asarray(sess.state["w"]).tobytes().hex()])
    try:
        with session(20) as sess:
            while not sess.should_stop():
                sess.run(toy.train)
                if options.index == 1 and sess.global_step == 9:
                    raise ValueError("planned")
    except (ValueError, ms.PeerFailedError) as error:
        return {"sessions": reports, "error": f"{type(error).__name__}: {error}"}
    return {"sessions": reports}


def on_given_devices(options: Options) -> dict[str, Any]:
    """Run a step that says on which devices it runs."""
    devices = {"one": jax.local_devices()[:1], "local": jax.local_devices(), "all": jax.devices()}[
        options.arguments["devices"]
    ]

    @ms.train_step(devices=devices, engine=options.engine)
    def step(state: Any) -> Any:
        return state + jax.lax.psum(1.0, "data"), {}

    with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), hooks=[ms.StopAtStepHook(last_step=3)]) as sess:
        while not sess.should_stop():
            sess.run(step)
        return {"state": float(sess.state)}


def closing_slowly(options: Options) -> dict[str, Any]:
    """Train to a clean end; what the chief cleans up after its last commit takes longer than a silence may."""
    import toy

    from monsess.checkpoint.upkeep import Upkeep

    close = Upkeep.close

    def slowly(self: Any, seconds: float) -> Any:
        time.sleep(options.failure_secs)
        return close(self, seconds)

    Upkeep.close = slowly  # type: ignore[method-assign]
    rows = slice(4 * options.index, 4 * options.index + 4)
    with ms.MonitoredTrainingSession(
        toy.init_fn,
        data=[{name: leaf[rows] for name, leaf in batch.items()} for batch in toy.batches(20)],
        checkpoint_dir=options.url,
        failure_timeout_secs=options.failure_secs,
        hooks=[ms.StopAtStepHook(last_step=6)],
    ) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
    return sess.summary()


def told_of_a_failure_by_the_saver(options: Options) -> dict[str, Any]:
    """Process 1 fails while the chief's save waits for it; a hook of the chief takes its time to hear of it."""
    heard: list[str] = []

    @ms.train_step
    def step(state: Any, batch: Any) -> Any:
        return state + jax.lax.pmean(batch.mean(), "data"), {}

    class Hook(ms.SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            if options.index == 1 and run_context.global_step == 4:
                time.sleep(1.0)  # the chief's save of this step needs what this process hands in after its hooks
                raise ValueError("planned")

        def on_error(self, session: Any, error: BaseException) -> None:
            heard.append(type(error).__name__)
            if options.index == 0:
                time.sleep(4.0)
                print("the hook was told", flush=True)

    with ms.MonitoredTrainingSession(
        lambda: jnp.zeros(()),
        data=[np.ones(2, np.float32)] * 50,
        checkpoint_dir=options.url,
        save_checkpoint_steps=4,
        hooks=[Hook()],
    ) as sess:
        while not sess.should_stop():
            sess.run(step)
            if options.index == 0 and sess.global_step == 4:
                time.sleep(2.0)
    return {"heard": heard}


def falling_back(options: Options) -> dict[str, Any]:
    """A step fails on all processes while it is compiled, later on one of them, and all go on with another one."""
    ending = options.arguments["ending"]

    @ms.train_step
    def too_big(state: Any, batch: Any) -> Any:
        time.sleep(1.5 * options.index)
        raise MemoryError("does not fit")

    @ms.train_step
    def smaller(state: Any, batch: Any) -> Any:
        return state + jax.lax.pmean(batch.mean(), "data"), {}

    @ms.train_step
    def smallest(state: Any) -> Any:
        return state, {}

    failed: list[str] = []
    with ms.MonitoredTrainingSession(
        lambda: jnp.zeros(()),
        checkpoint_dir=options.url,
        save_checkpoint_steps=100,
        stall_timeout_secs=20,
        hooks=[ms.StopAtStepHook(last_step=13)],
    ) as sess:
        for step in (too_big, smaller, too_big):  # the first one of all, and one that follows others
            if options.index == 1 and step is too_big:
                sess.request_save()  # goes with the step that follows
            try:
                sess.run(step, np.ones(4, np.float32))
            except MemoryError as error:
                failed.append(str(error))
                if ending:
                    break
        while not sess.should_stop() and not ending:
            sess.run(smaller, np.ones(2, np.float32))
            sess.run(smallest)
    store = ms.CheckpointStore(options.url)
    return {"failed": failed, "step": sess.global_step, "state": float(sess.state_copy()), "saved": store.steps()}


def preempting_itself(options: Options) -> dict[str, Any]:
    """Ask for the end that a signal would bring about."""

    @ms.train_step
    def step(state: Any) -> Any:
        return state + 1, {}

    try:
        with ms.MonitoredTrainingSession(lambda: 0, hooks=[ms.StopAtStepHook(last_step=20)]) as sess:
            while not sess.should_stop():
                sess.run(step)
                if sess.global_step == 3 and options.index == options.count - 1:
                    sess.request_stop(ms.StopReason.PREEMPTED)
    except SystemExit as leaving:
        return {"code": leaving.code, "step": sess.global_step, "reason": sess.stop_reason.name}
    return {}
