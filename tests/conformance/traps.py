"""The mark that ties a test to a trap of TensorFlow 1 (``W-01`` …), and what the tests of the traps share.

A test marked ``@trap("W-05")`` shows that monsess does not have that trap. The ids must be plain strings, since
``test_traps_complete.py`` reads them from the source.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import monsess as ms


def trap(*ids: str) -> pytest.MarkDecorator:
    """Mark a test with the traps that it shows monsess not to have.

    Args:
        ids: Such as ``"W-05"``.
    """
    return pytest.mark.traps(*ids)


def init_fn() -> dict[str, Any]:
    """A state that counts its own updates."""
    return {"n": 0.0}


@ms.train_step
def count(state: Any) -> Any:
    """One update: the state and the output both say how many there were."""
    return {"n": state["n"] + 1.0}, {"n": state["n"] + 1.0}


@ms.eval_step
def look(state: Any) -> Any:
    """An eval step without a batch."""
    return {"n": state["n"]}


class Passing(Exception):
    """An error that passes by itself, by `recovery` below."""


def recovery(**changes: Any) -> ms.Recovery:
    """A policy that takes `Passing` for transient and does not wait."""
    return ms.Recovery(**{"is_transient": lambda error: isinstance(error, Passing), "backoff_secs": 0, **changes})


class FailsAt(ms.SessionRunHook):
    """Raises `Passing` in ``after_run`` of the given steps, each once."""

    def __init__(self, *steps: int) -> None:
        self.steps = list(steps)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if run_context.global_step in self.steps:
            self.steps.remove(run_context.global_step)
            raise Passing(f"at {run_context.global_step}")


class Recorder(ms.SessionRunHook):
    """Writes down every call as ``name.method@step``; raises ``raises[method]`` once, at ``at_step`` if given."""

    def __init__(self, name: str = "A", trace: list[str] | None = None, at_step: int | None = None, **raises: Any):
        self.name = name
        self.trace = [] if trace is None else trace
        self.at_step = at_step
        self.raises = raises
        self.errors: list[BaseException] = []

    def called(self, method: str, step: int | None = None) -> None:
        self.trace.append(f"{self.name}.{method}" + ("" if step is None else f"@{step}"))
        if method in self.raises and (step is None or self.at_step in (None, step)):
            raise self.raises.pop(method)

    def begin(self) -> None:
        self.called("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.called("after_create_session", session.global_step)

    def before_run(self, run_context: Any) -> None:
        self.called("before_run", run_context.global_step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.called("after_run", run_context.global_step)

    def end(self, session: Any) -> None:
        self.called("end")

    def on_error(self, session: Any, error: BaseException) -> None:
        self.errors.append(error)
        self.called("on_error")


def endings(trace: list[str]) -> list[str]:
    """The lines of a trace that are endings."""
    return [line for line in trace if line.endswith((".end", ".on_error"))]


def drive(session: Any, step: Any = count) -> None:
    """The loop of every user."""
    while not session.should_stop():
        session.run(step)


def steps_of(directory: Any) -> list[int]:
    """The committed steps of a directory, all of them sound."""
    store = ms.CheckpointStore(directory)
    assert all(store.verify(step) == [] for step in store.steps())
    return store.steps()


class Listener(ms.CheckpointSaverListener):
    """Writes down what it is told and asks for a stop after the save of ``stop_after``."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.calls: list[str] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def before_save(self, session: Any, step: int) -> None:
        self.calls.append(f"before@{step}")

    def after_save(self, session: Any, step: int) -> bool:
        self.calls.append(f"after@{step}")
        return step == self.stop_after

    def end(self, session: Any, step: int) -> None:
        self.calls.append(f"end@{step}")


def session(directory: Any, *hooks: Any, **more: Any) -> ms.MonitoredSession:
    """A session that saves in ``directory`` by steps or on request only."""
    more = {"save_checkpoint_secs": None, **more}
    return ms.MonitoredTrainingSession(init_fn, checkpoint_dir=directory, hooks=hooks, **more)


def until(predicate: Callable[[], Any]) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + 30
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def fresh() -> str:
    """A URL of the filesystem of `refusing` where nothing is yet."""
    return f"refusing://{time.monotonic_ns()}"


class WithThread(ms.SessionRunHook):
    """Starts a thread of the session that waits for the stop, or raises ``error`` at once."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.coord = coord
        self.thread = threading.Thread(target=self.work, args=(coord,), daemon=True)
        coord.register_thread(self.thread)
        self.thread.start()
        if self.error is not None:
            self.thread.join()

    def work(self, coord: Any) -> None:
        with coord.stop_on_exception():
            if self.error is not None:
                raise self.error
            coord.wait_for_stop()


def run(*hooks: Any, step: Any = count, initial: Any = init_fn, **more: Any) -> ms.MonitoredSession:
    """Run a session to its stop and return it."""
    with ms.MonitoredTrainingSession(initial, hooks=hooks, **more) as sess:
        drive(sess, step)
    return sess


class Lines(list[int]):
    """The steps at which a LoggingTensorHook logged."""

    def hook(self, **cadence: Any) -> ms.LoggingTensorHook:
        """A hook that appends the step, as the output ``n`` says it, for every line."""
        return ms.LoggingTensorHook(["n"], formatter=lambda values: self.append(int(values["n"])) or "", **cadence)
