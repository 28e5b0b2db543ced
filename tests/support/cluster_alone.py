"""Programs in which one process does, or asks for, something that the others do not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cluster_child import Options

import monsess as ms

BATCH = {"x": np.ones(2, np.float32)}


@ms.train_step
def step(state: Any, batch: Any) -> Any:
    return state + 1, {"loss": jax.lax.pmean(batch["x"].mean(), "data")}


@ms.eval_step
def look(state: Any, batch: Any) -> Any:
    return {"mean": jax.lax.pmean(batch["x"].mean(), "data")}


def stopped_by_a_thread(options: Options) -> dict[str, Any]:
    """A thread of process 1 asks for a stop while a batch is waited for, which comes late, or never."""
    from monsess.feeding import Feeding

    asked, seen = threading.Event(), threading.Event()
    coordinators: list[ms.Coordinator] = []
    look_at_threads = Feeding._look_at_threads

    def noted(self: Any) -> None:
        try:
            look_at_threads(self)
        finally:
            if asked.is_set():
                seen.set()

    class Knows(ms.SessionRunHook):
        def after_create_session(self, session: Any, coord: Any) -> None:
            coordinators.append(coord)

    def batches() -> Iterator[Any]:
        for number in range(20):
            if options.index == 1 and number == options.arguments["batch"]:
                coordinators[0].request_stop()
                asked.set()
                seen.wait(60)
                if options.arguments["comes"] == "never":
                    threading.Event().wait()
            yield BATCH

    Feeding._look_at_threads = noted  # type: ignore[method-assign]
    with ms.MonitoredTrainingSession(
        lambda: jnp.zeros(()), data=batches(), checkpoint_dir=options.url, hooks=[Knows()]
    ) as sess:
        while not sess.should_stop():
            sess.run(step)
    reason = sess.stop_reason
    return {
        "global_step": sess.global_step,
        "name": reason.name,
        "reason": str(reason),
        "last_committed": sess.summary()["last_committed"],
    }


class Unreadable:
    """An input whose state cannot be read."""

    def __iter__(self) -> Unreadable:
        return self

    def __next__(self) -> Any:
        return BATCH

    def get_state(self) -> Any:
        raise OSError("no state today")

    def set_state(self, state: Any) -> None:
        pass


def a_session_that_cannot_be_made(options: Options) -> None:
    """Process 1 cannot make its session, for the reason that the arguments say."""
    arguments: dict[str, Any] = {"data": [BATCH] * 8, "hooks": [ms.StopAtStepHook(last_step=3)]}
    if options.index == 1:
        hook = ms.StepCounterHook()
        arguments |= {
            "data": {"data": Unreadable()},
            "hooks": {"hooks": [hook, hook]},
            "store": {"checkpoint_dir": ""},
        }[options.arguments["what"]]
    with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), **arguments) as sess:
        while not sess.should_stop():
            sess.run(step)


def compared_by_the_chief(options: Options) -> None:
    """A hook that compares the state of all processes, on the chief alone."""
    hook = ms.ReplicaCheckHook(every_n_steps=3)
    with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), data=[BATCH] * 20, chief_only_hooks=[hook]) as sess:
        while not sess.should_stop():
            sess.run(step)


def refused_to_the_chief(options: Options) -> dict[str, Any]:
    """What a hook that runs on the chief alone tries, and what it is told; then all go on to step 6."""
    told: dict[str, str] = {}

    def attempt(what: str, call: Any) -> None:
        try:
            call()
        except ms.HookError as error:
            told[what] = str(error)

    class Tries(ms.SessionRunHook):
        def after_create_session(self, session: Any, coord: Any) -> None:
            attempt("broadcast at the start", lambda: ms.broadcast(1))
            attempt("compare at the start", session.compare_replicas)

        def after_run(self, run_context: Any, run_values: Any) -> None:
            session = run_context.session
            if run_context.global_step != 3:
                return
            attempt("request_stop", lambda: session.request_stop(everywhere=True))
            attempt("request_save", lambda: session.request_save(everywhere=True))
            attempt("run_context.request_stop", lambda: run_context.request_stop(everywhere=True))
            attempt("stop_at_step", lambda: session.stop_at_step(4))
            attempt("compare_replicas", session.compare_replicas)
            attempt("run", lambda: session.run(look, BATCH))
            attempt("allreduce", lambda: ms.allreduce(1.0))
            session.evaluate(lambda state, outputs: state)
            session.request_save()  # a wish, as any process may have

    with ms.MonitoredTrainingSession(
        lambda: jnp.zeros(()),
        data=[BATCH] * 20,
        checkpoint_dir=options.url,
        chief_only_hooks=[Tries()],
        hooks=[ms.StopAtStepHook(last_step=8)],
    ) as sess:
        while not sess.should_stop():
            sess.run(step)
    return {"told": told, "global_step": sess.global_step}


def fed_by_the_chief(options: Options) -> None:
    """A hook on the chief alone feeds the step."""

    class Feeds(ms.SessionRunHook):
        def before_run(self, run_context: Any) -> Any:
            return ms.SessionRunArgs(feed_dict={"batch": BATCH})

    with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), data=[BATCH] * 20, chief_only_hooks=[Feeds()]) as sess:
        while not sess.should_stop():
            sess.run(step)


def called_by_one(options: Options) -> None:
    """One process alone calls something that all have to call, at some place of the program."""
    place, what, who = (options.arguments[name] for name in ("place", "what", "who"))

    def call(session: Any) -> None:
        if options.index == who:
            session.compare_replicas() if what == "compare_replicas" else ms.allreduce(1.0)

    class Calls(ms.SessionRunHook):
        def end(self, session: Any) -> None:
            if place == "end":
                call(session)

    with ms.MonitoredTrainingSession(
        lambda: jnp.zeros(()), data=[BATCH] * 50, hooks=[ms.StopAtStepHook(last_step=20), Calls()]
    ) as sess:
        if place == "start":
            call(sess)
        while not sess.should_stop():
            sess.run(step)
            if place == "body" and sess.global_step == 5:
                call(sess)
        if place == "left":
            call(sess)


def called_by_all(options: Options) -> dict[str, Any]:
    """All call the helpers at every place of the program, one of them late now and then; the limits of their waits."""
    import random
    import time

    from monsess.channel import Channel

    limits: set[float] = set()
    gather = Channel.gather
    chance = random.Random(options.index)

    def noted(self: Any, what: str, value: str, limit_secs: float, check: Any) -> Any:
        if "allreduce" in what:
            limits.add(limit_secs)
        return gather(self, what, value, limit_secs, check)

    def late() -> None:
        if chance.random() < 0.3:
            time.sleep(chance.choice((0.01, 0.3, 0.8)))

    found: list[float] = []

    def call(session: Any) -> None:
        late()
        found.append(float(ms.allreduce(float(options.index), "sum")))
        session.compare_replicas()
        session.run(look, BATCH)

    class Calls(ms.SessionRunHook):
        def after_create_session(self, session: Any, coord: Any) -> None:
            found.append(float(ms.broadcast(3.0)))

        def after_run(self, run_context: Any, run_values: Any) -> None:
            if run_context.global_step % 4 == 0:
                call(run_context.session)

        def end(self, session: Any) -> None:
            call(session)
            late()

    Channel.gather = noted  # type: ignore[method-assign]
    with ms.MonitoredTrainingSession(
        lambda: jnp.zeros(()),
        data=[BATCH] * 50,
        hooks=[Calls(), ms.ReplicaCheckHook(every_n_steps=3), ms.StopAtStepHook(last_step=12)],
        max_wait_secs=1234,
    ) as sess:
        call(sess)
        while not sess.should_stop():
            sess.run(step)
            late()
        call(sess)
    inside, _ = sorted(limits), limits.clear()
    found.append(float(ms.allreduce(1.0)))
    return {"found": found, "inside": inside, "outside": sorted(limits)}
