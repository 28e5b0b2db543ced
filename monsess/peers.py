"""Watches the other processes of a job: one that fails, leaves, diverges or falls silent ends the job in bounded time.

Nothing here enters a collective or a barrier. Each process tells twice a second, through the coordination service, how
far it is; a thread reads what the others tell. Trouble is raised in the training thread where that thread looks; where
it is stuck, in a collective whose other side is gone, the thread ends the process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from typing import Any

from monsess.channel import Channel
from monsess.errors import LeftAloneError, MonsessError, PeerFailedError, ProcessesDivergedError
from monsess.launch.records import write_record
from monsess.log import logger

_BEAT_SECS = 0.25
#: After a collective has failed, a peer that tells nothing for so long is the one that is gone.
_SILENT_SECS = 2.5
#: Without such an error, this part of the failure limit: a process that holds Python's lock for seconds is not dead.
_SILENT_PART = 0.6
_RAISE_SECS = 2.0
_LINGER_SECS = 3.0
_PREEMPTION_SECS = 40.0
_REMEMBERED = 64


@dataclasses.dataclass
class Progress:
    """How far this process is; written by the training thread, told to the others.

    Args:
        dispatched: Programs dispatched so far.
        step: Global step.
        doing: In words, for people.
        left: After how many programs the loop was left, or None; hooks may run eval steps after that.
        ended: After how many programs, those of hooks included, the session came to its end, or None.
        waits: Whether it only waits for the others.
    """

    dispatched: int = 0
    step: int = 0
    doing: str = "starting"
    left: int | None = None
    ended: int | None = None
    waits: bool = False


class Peers:
    """The other processes of a job, as one session sees them.

    Args:
        channel: Of this session.
        failure_secs: From any failure to the end of this process.
        stall_secs: How long the job may make no progress at all.
    """

    def __init__(self, channel: Channel, failure_secs: float, stall_secs: float) -> None:
        self.progress = Progress()
        self._channel = channel
        self._failure_secs = failure_secs
        self._stall_secs = stall_secs
        self._trouble: MonsessError | None = None
        self._raised = threading.Event()
        self._closed = threading.Event()
        self._programs: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self._ends_at: float | None = None
        self._suspicious = False  # a collective has failed: somebody is gone
        self._dead = 0  # peers that were found to be dead, for whom nobody has to wait
        self._give_up_at: float | None = None
        self._give_up_code = 0
        self._training = threading.get_ident()
        self._beat = 0
        self._met_at_end = False
        self._beats: dict[int, tuple[int, float]] = {}  # of each peer: the newest beat, and when it was first seen
        self._moved = time.monotonic()
        self._seen: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._watch, name="monsess-peers", daemon=True)

    def start(self) -> None:
        """Begin to watch; the others know of this process from now on, so that they can miss it."""
        self._tell()
        self._thread.start()

    def dispatching(self, number: int, program: int) -> None:
        """Note the program that is about to be dispatched."""
        self._programs.append((number, program))
        self.progress.dispatched = number

    def check(self) -> None:
        """Raise what is known about the others, if anything.

        Raises:
            PeerFailedError: One failed, or is dead.
            LeftAloneError: One left the loop at another step.
            ProcessesDivergedError: One runs another program.
        """
        if self._trouble is not None:
            if threading.get_ident() == self._training:
                self._raised.set()
            raise self._trouble

    def wait_for(self, value: Any) -> None:
        """Wait for a value of the device, as long as the others are there to compute it.

        Raises:
            MonsessError: As `check`.
        """
        ready = getattr(value, "is_ready", None)
        if ready is not None:
            pause = 0.0
            while not ready():
                self.check()
                time.sleep(pause)
                pause = min(0.001, pause + 0.00005)
        try:
            value.block_until_ready()
        except Exception as error:
            raise self.blame(error) from error

    def blame(self, error: BaseException) -> BaseException:
        """Who is behind an error of a collective: waits a moment for what the others tell, or stop telling."""
        self._suspicious = True
        deadline = time.monotonic() + min(_SILENT_SECS + 2.0, self._failure_secs / 2)
        while time.monotonic() < deadline and self._trouble is None and not self._closed.is_set():
            time.sleep(0.05)
        if self._trouble is None:
            return error
        if threading.get_ident() == self._training:
            self._raised.set()
        return self._trouble

    def report(self, error: BaseException) -> None:
        """Tell the others that this process fails, and see to it that it ends in time."""
        if self._ends_at is not None:
            return
        self._ends_at = time.monotonic() + 0.8 * self._failure_secs
        self._raised.set()
        _end_without_barrier.arm(self, error)
        write_record(error)
        if isinstance(error, PeerFailedError):
            return  # the culprit has told itself, or cannot
        text = "".join(traceback.format_exception(error))
        record = {"process": self._channel.index, "step": self.progress.step, "error": _shown(error), "text": text}
        self._try(lambda: self._channel.post(f"failed/{self._channel.index}", json.dumps(record)))

    def end_soon(self, code: int) -> None:
        """A signal asks all processes for a clean end: end this one with ``code`` if there is no common step in time.

        The others hear of it, and do the same: a signal that one of them gets is meant for the job.
        """
        if self._give_up_at is None and not self._met_at_end:
            self._give_up_at = time.monotonic() + _PREEMPTION_SECS
            self._give_up_code = code

    def meet_at_end(self) -> None:
        """All processes have left the loop after the same step: what follows has limits of its own."""
        self._met_at_end = True
        self._give_up_at = None

    def say_goodbye(self) -> None:
        """Before this process ends: process 0, which holds the coordination service, lets the others read first."""
        self._try(lambda: self._channel.post(f"gone/{self._channel.index}", ""))
        deadline = time.monotonic() + min(_LINGER_SECS, self._failure_secs / 4)
        while self._channel.index == 0 and time.monotonic() < deadline:
            gone: dict[str, str] = {}
            self._try(lambda: gone.update(self._channel.under("gone")))  # noqa: B023
            if len(gone) + self._dead >= self._channel.count:
                return
            time.sleep(0.05)

    def close(self) -> None:
        """Stop watching, where the session has ended cleanly; after a failure this process still has to end in time.

        What is left to run may be a thread that Python's exit waits for, or a handler that waits for another process.
        """
        if self._ends_at is not None:
            return
        self._closed.set()
        self._thread.join(2.0)

    def _watch(self) -> None:
        while not self._closed.wait(_BEAT_SECS):
            try:
                self._tell()
                found = self._look()
            except Exception as error:  # the coordination service is gone, and with it process 0
                found = PeerFailedError(f"The coordination service, in process 0, does not answer: {_shown(error)}")
            if self._closed.is_set():
                return
            if found is not None and self._trouble is None and self._ends_at is None:
                self._trouble = found
                self._ends_at = time.monotonic() + 0.8 * self._failure_secs
                _end_without_barrier.arm(self, found)
            self._end_if_due()

    def _end_if_due(self) -> None:
        """End the process where the training thread does not."""
        now = time.monotonic()
        if self._give_up_at is not None and now > self._give_up_at and self._ends_at is None:
            logger.error(
                "process %d ends itself: the processes came to no common step within %g s of the signal (%s); the "
                "newest checkpoint is the last periodic one\n%s",
                self._channel.index,
                _PREEMPTION_SECS,
                self.progress.doing,
                self._where(),
            )
            _end_without_barrier.arm(self, SystemExit(self._give_up_code))
            _end_without_barrier()
        if self._ends_at is None:
            return
        stuck = not self._raised.is_set() and now > self._ends_at - 0.8 * self._failure_secs + _RAISE_SECS
        if stuck or now > self._ends_at:
            if self._trouble is not None and not self._raised.is_set():
                where = f"the training thread does not answer ({self.progress.doing})"
                sys.stderr.write(f"{type(self._trouble).__module__}.{type(self._trouble).__name__}: {self._trouble}\n")
                logger.error("process %d ends itself: %s\n%s", self._channel.index, where, self._where())
                write_record(self._trouble)
            _end_without_barrier()

    def _where(self) -> str:
        """What the training thread is in the middle of."""
        frame = sys._current_frames().get(self._training)
        stack = [] if frame is None else traceback.format_stack(frame)
        return "".join(["Stack of the training thread (most recent call last):\n", *stack]).rstrip()

    def _tell(self) -> None:
        self._beat += 1
        now = self.progress
        code = 0 if self._give_up_at is None else self._give_up_code
        programs = list(self._programs)
        self._channel.post(
            f"status/{self._channel.index}",
            json.dumps(
                [self._beat, now.dispatched, now.step, now.doing, now.left, programs[-8:], now.waits, now.ended, code]
            ),
        )

    def _look(self) -> MonsessError | None:
        failed = self._channel.under("failed")
        if failed:
            return _failure(min((json.loads(value) for value in failed.values()), key=lambda r: r["process"]))
        now = time.monotonic()
        status = {int(index): json.loads(value) for index, value in self._channel.under("status").items()}
        if any(one[1:] != self._seen.get(index) for index, one in status.items()):
            self._moved = now
            self._seen = {index: one[1:] for index, one in status.items()}
        for index, (beat, *rest) in status.items():
            if index == self._channel.index:
                continue
            if self._beats.get(index, (None,))[0] != beat:
                self._beats[index] = (beat, now)
            if rest[-1]:
                self.end_soon(rest[-1])
            found = self._compare(index, *rest[:5]) or self._compare_endings(index, rest[0], rest[6])
            if found is not None:
                return found
            silent = now - self._beats[index][1]
            if silent > (_SILENT_SECS if self._suspicious else _SILENT_PART * self._failure_secs):
                self._dead += 1
                return PeerFailedError(
                    f"Process {index} has been silent for {silent:.0f} s; it was at step {rest[1]} ({rest[2]}). It was "
                    "killed, or its machine is gone or stopped. All processes end; start the job again."
                )
        if now - self._moved > self._stall_secs:
            # Who only waits is not the cause, however little it has dispatched.
            behind = min(status.items(), key=lambda item: (item[1][6], item[1][1]))
            return PeerFailedError(
                f"No process has made any progress for {self._stall_secs:g} s (stall_timeout_secs). Process "
                f"{behind[0]} is furthest behind: step {behind[1][2]}, {behind[1][3]}."
            )
        return None

    def _compare(
        self, index: int, dispatched: int, step: int, doing: str, left: int | None, programs: list[list[int]]
    ) -> MonsessError | None:
        own = self.progress
        if _went_on(own.left, left, dispatched) or _went_on(left, own.left, own.dispatched):
            here = own.left is not None and (left is None or own.left < left)  # this process left first
            who, other = (self._channel.index, index) if here else (index, self._channel.index)
            at, further = (own.step, step) if here else (step, own.step)
            return LeftAloneError(
                f"Process {who} left the loop after step {at} while process {other} went on to step {further}. What "
                "ends the loop has to be the same on all processes: ask with request_stop(), which all hear, instead "
                "of break. Nothing is saved at this end."
            )
        mine = dict(self._programs)
        for number, program in programs:
            if number in mine and mine[number] != program:
                return ProcessesDivergedError(
                    f"The processes run different programs: at dispatch {number} process {index} did not do what "
                    f"process {self._channel.index} did. Every train step, eval step and run_without_hooks has to be "
                    "called by all processes, in the same order and with batches of the same shape."
                )
        return None

    def _compare_endings(self, index: int, dispatched: int, ended: int | None) -> MonsessError | None:
        own = self.progress
        if not (_went_on(own.ended, ended, dispatched) or _went_on(ended, own.ended, own.dispatched)):
            return None
        return ProcessesDivergedError(
            f"At the end of the session process {self._channel.index} has run {own.dispatched} programs and process "
            f"{index} {dispatched}. An eval step that a hook runs in `end` has to be run by all processes."
        )

    def _try(self, call: Any) -> None:
        try:
            call()
        except Exception as error:  # the service may be gone already
            logger.debug("the coordination service does not answer: %s", error)


class _EndWithoutBarrier:
    """Ends the process at its exit with `os._exit`: JAX's own exit waits for all processes, which will not come."""

    def __init__(self) -> None:
        self._peers: Peers | None = None
        self._code = 1
        self._once = threading.Lock()

    def arm(self, peers: Peers, error: BaseException) -> None:
        """From now on this process ends that way."""
        if self._peers is None:
            import atexit

            self._peers = peers
            atexit.register(self)
        if isinstance(error, SystemExit):
            self._code = error.code if isinstance(error.code, int) else 1
        elif isinstance(error, KeyboardInterrupt):
            self._code = 130

    def __call__(self) -> None:
        if not self._once.acquire(blocking=False):
            return
        assert self._peers is not None
        self._peers.say_goodbye()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass
        os._exit(self._code or 1)


_end_without_barrier = _EndWithoutBarrier()


def _went_on(left: int | None, others_left: int | None, others_dispatched: int) -> bool:
    """Whether another process ran more programs before it left the loop, if it has, than one that has."""
    return left is not None and left < (others_dispatched if others_left is None else others_left)


def _failure(record: dict[str, Any]) -> PeerFailedError:
    error = PeerFailedError(
        f"Process {record['process']} failed at step {record['step']}: {record['error']} All processes end; its own "
        "log has more."
    )
    error.add_note(f"Traceback of process {record['process']}:\n{record['text']}")
    return error


def _shown(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."
