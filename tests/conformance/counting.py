"""What the tests of TensorFlow's session behaviours share: a model that counts, errors that pass, hooks that watch."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

import monsess as ms

EIGHT = np.ones(8, np.float32)  # a batch for four devices


def init_fn() -> dict[str, Any]:
    """Nothing has been counted."""
    return {"count": 0.0}


@ms.train_step
def count(state: Any) -> Any:
    """Counts the run."""
    new = {"count": state["count"] + 1}
    return new, {"count": new["count"]}


@ms.train_step
def add(state: Any, batch: Any, scale: Any = 1.0, shift: Any = 0.0) -> Any:
    """Counts the run; its output tells what it was given."""
    given = batch.sum() * scale + shift
    return {"count": state["count"] + 1}, {"given": given, "scale": scale + 0.0, "shift": shift + 0.0}


@ms.eval_step
def read(state: Any) -> Any:
    """Only looks."""
    return state["count"]


def session(**arguments: Any) -> ms.MonitoredSession:
    """A session that counts; arguments as for `MonitoredTrainingSession`."""
    return ms.MonitoredTrainingSession(init_fn, **arguments)


def counted(outputs: Any) -> float:
    """The count that a run returned."""
    return float(outputs["count"])


def train_to_the_end(sess: ms.MonitoredSession) -> None:
    """The usual loop."""
    while not sess.should_stop():
        sess.run(count)


class AbortedError(Exception):
    """What TensorFlow calls by that name: the runtime was preempted."""


class UnavailableError(Exception):
    """The other error that TensorFlow recovers from."""


class CancelledError(Exception):
    """An error that is not transient in itself."""


def recovery(**arguments: Any) -> ms.Recovery:
    """TensorFlow's policy, which starts again from nothing where there is no checkpoint."""
    policy = {"backoff_secs": 0.0, "allow_reinit": True, **arguments}
    return ms.Recovery(is_transient=lambda error: isinstance(error, (AbortedError, UnavailableError)), **policy)


class CountedInit:
    """An ``init_fn`` that counts its calls: each is one creation of the session's state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, Any]:
        self.calls += 1
        return init_fn()


class Recorder(ms.SessionRunHook):
    """Writes every callback down."""

    def __init__(self, name: str = "A", trace: list[str] | None = None) -> None:
        self.name = name
        self.trace = [] if trace is None else trace

    def begin(self) -> None:
        self._note("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._note("acs")

    def before_run(self, run_context: Any) -> Any:
        self._note("before")

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._note("after")

    def end(self, session: Any) -> None:
        self._note("end")

    def on_error(self, session: Any, error: BaseException) -> None:
        self._note("on_error")

    def called(self, callback: str) -> int:
        """How often a callback was called."""
        return self.trace.count(f"{self.name}.{callback}")

    def _note(self, callback: str) -> None:
        self.trace.append(f"{self.name}.{callback}")


class Raising(Recorder):
    """A recorder that raises at given calls of one callback, counted from 1."""

    def __init__(
        self, callback: str, error: BaseException, *at: int, name: str = "B", trace: list[str] | None = None
    ) -> None:
        super().__init__(name, trace)
        self._callback, self._error, self._at = callback, error, at or (1,)

    def _note(self, callback: str) -> None:
        raises = callback == self._callback and self.called(callback) + self.called(f"{callback}!") + 1 in self._at
        super()._note(f"{callback}!" if raises else callback)
        if raises:
            raise self._error


class Threads(ms.SessionRunHook):
    """Starts threads of the session that run until the coordinator stops."""

    def __init__(self, number: int = 3) -> None:
        self._number = number

    def begin(self) -> None:
        self.threads: list[threading.Thread] = []

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.coord = coord
        for _ in range(self._number):
            thread = threading.Thread(target=coord.wait_for_stop, args=(60,), daemon=True)
            coord.register_thread(thread)
            thread.start()
            self.threads.append(thread)

    def alive(self) -> int:
        """How many of the threads live."""
        return sum(thread.is_alive() for thread in self.threads)


class ReportingThread(ms.SessionRunHook):
    """Starts a thread of the session that reports an error during a run; only in the first session.

    Args:
        error: What the thread reports.
        at_run: In which run.
        stuck: What that run raises once the error is reported; None: the run goes well.
    """

    def __init__(self, error: BaseException, at_run: int = 2, stuck: BaseException | None = None) -> None:
        self._error, self._at_run, self._stuck = error, at_run, stuck
        self.creations = 0
        self.runs = 0

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.coord = coord
        self.creations += 1
        if self.creations == 1:
            self._go = threading.Event()
            thread = threading.Thread(target=self._report, daemon=True)
            coord.register_thread(thread)
            thread.start()

    def _report(self) -> None:
        with self.coord.stop_on_exception():
            assert self._go.wait(60)
            raise self._error

    def report(self) -> None:
        """Have the thread report, and wait until it has; raises if the run is to be stuck."""
        self.runs += 1
        if self.creations == 1 and self.runs == self._at_run:
            self._go.set()
            assert self.coord.wait_for_stop(60)
            if self._stuck is not None:
                raise self._stuck

    def before_run(self, run_context: Any) -> None:
        self.report()
