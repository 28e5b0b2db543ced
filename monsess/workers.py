"""Daemon threads that do what may block for ever, so that whoever waits for them never does.

`concurrent.futures` joins its threads when the interpreter exits; one stuck call to a store would then hold the exit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_IDLE_SECS = 10.0
_POLL_SECS = 0.2
_local = threading.local()


class StalledError(Exception):
    """A job gave no sign of life for its whole limit; its thread is left behind."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:g} s")
        self.seconds = seconds


class AbandonedError(BaseException):
    """Raised inside a job that nobody waits for any more, at its next sign of life."""


class _Job:
    __slots__ = ("abandoned", "beat", "done", "error", "function", "lost", "result", "started")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.done = threading.Event()
        self.started = False
        self.abandoned = False
        self.lost = False
        self.beat = 0.0
        self.result: Any = None
        self.error: BaseException | None = None


def inside_worker() -> bool:
    """Whether the caller runs in a worker thread, where calls are made directly."""
    return getattr(_local, "job", None) is not None


def sign_of_life(may_end: bool = True) -> None:
    """Tell whoever waits for the current job that it moves; a job that was given up ends here.

    Args:
        may_end: False where a job must not end half-way that nobody waits for any more: somebody may have done the same
            once more meanwhile.
    """
    job: _Job | None = getattr(_local, "job", None)
    if job is not None:
        if job.abandoned and (may_end or not job.lost):
            raise AbandonedError
        job.beat = time.monotonic()


class Workers:
    """At most ``count`` daemon threads, started when needed and gone when idle.

    Args:
        count: How many jobs run at the same time.
        name: Thread name.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # None: a thread that takes it ends
        self._lock = threading.Lock()
        self._alive = 0
        self._idle = 0
        self._untaken = 0  # jobs, by the same lock: a thread that has just taken one still counts as idle

    def call(self, function: Callable[[], T], stall_secs: float) -> T:
        """Run ``function`` in a worker and return its result.

        Raises:
            StalledError: No `sign_of_life` for ``stall_secs`` seconds.
            Exception: What ``function`` raised.
        """
        return self.map([function], stall_secs)[0]

    def map(self, functions: Sequence[Callable[[], T]], stall_secs: float) -> list[T]:
        """Run all ``functions`` and return their results in order.

        The first error is raised after the jobs that already run have ended; the others are not started.

        Raises:
            StalledError: A job gave no sign of life for ``stall_secs`` seconds.
            Exception: The first error, in the order of ``functions``.
        """
        if inside_worker():
            return [function() for function in functions]
        jobs = [_Job(function) for function in functions]
        self._staff(jobs)
        try:
            failure = self._first_failure(jobs, stall_secs)
        except BaseException:  # Ctrl-C: nobody waits for these any more
            for job in jobs:
                job.abandoned = True
            raise
        if failure is None:
            return [job.result for job in jobs]
        try:
            raise failure
        finally:
            del failure, jobs  # the traceback holds this frame, which must not hold the error in return

    def _first_failure(self, jobs: Sequence[_Job], stall_secs: float) -> BaseException | None:
        failure: BaseException | None = None
        for job in jobs:
            if failure is not None:
                job.abandoned = True
                if not job.started:
                    continue
            stalled = self._wait(job, stall_secs)
            error = stalled or job.error
            if failure is None and error is not None:
                failure = error
                for other in jobs:
                    other.abandoned = True
        return failure

    def close(self) -> None:
        """End the threads that wait for a job, and the others after theirs; called when nobody has further ones.

        It takes no lock: the garbage collector calls it at any point of any thread.
        """
        for _ in range(self._count):
            self._jobs.put(None)

    def _wait(self, job: _Job, stall_secs: float) -> StalledError | None:
        begun = time.monotonic()
        while not job.done.wait(min(_POLL_SECS, stall_secs)):
            if time.monotonic() - max(begun, job.beat) > stall_secs:
                with self._lock:
                    if job.started:  # its thread is lost: another one may take its place
                        job.lost = True
                        self._alive -= 1
                    job.abandoned = True
                return StalledError(stall_secs)
        return None

    def _staff(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            self._jobs.put(job)
        with self._lock:
            self._untaken += len(jobs)
            missing = min(self._untaken - self._idle, self._count - self._alive)
            for _ in range(missing):
                self._alive += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while True:
            job = self._next()
            if job is None:
                return
            _local.job = job
            try:
                sign_of_life()
                job.result = job.function()
            except BaseException as error:  # handed to whoever waits
                job.error = error
            _local.job = None
            job.done.set()
            with self._lock:
                if job.lost:
                    return  # the place is taken
            del job  # while this thread waits for the next one, it keeps nothing of the caller's alive

    def _next(self) -> _Job | None:
        with self._lock:
            self._idle += 1
        closed = False
        try:
            job = self._jobs.get(timeout=_IDLE_SECS)
            closed = job is None
        except queue.Empty:
            job = None
        with self._lock:
            self._idle -= 1
            if job is not None:
                self._untaken -= 1
                job.started = True
                return job
            if closed or self._jobs.empty():
                self._alive -= 1
                return None
        return self._next()
