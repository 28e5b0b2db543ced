"""Watches the other processes of a job: one that fails, leaves, diverges or falls silent ends the job in bounded time.

Nothing here enters a collective or a barrier. Each process tells twice a second, through the coordination service, how
far it is; a thread reads what the others tell. Trouble is raised in the training thread where that thread looks; where
it is stuck, in a collective whose other side is gone, the thread ends the process.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from monsess.agreement import StopReason
from monsess.channel import Channel, processes
from monsess.errors import LeftAloneError, MonsessError, PeerFailedError, ProcessesDivergedError
from monsess.joint import JointCall, Place, difference, position
from monsess.last_words import say_goodbye, those_who_left
from monsess.launch.records import write_record
from monsess.log import logger
from monsess.process_name import ProcessName, is_alive, is_here, this_process
from monsess.progress import Progress
from monsess.without_barrier import end_without_barrier

_BEAT_SECS = 0.25
#: Between two looks whether the device is done.
_LOOK_SECS, _LONGEST_LOOK_SECS = 0.00005, 0.02
#: After a collective has failed, a peer that tells nothing for so long is the one that is gone.
_SILENT_SECS = 2.5
#: One of the same machine, which can be looked at.
_SILENT_HERE_SECS = 1.0
#: Without such an error, this part of the failure limit: a process that holds Python's lock for seconds is not dead.
_SILENT_PART = 0.6
#: Said at this part of it: JAX, which misses two of its heartbeats, may abort this process before it can say more.
_TOLD_PART = 0.3
_RAISE_SECS = 2.0
_PREEMPTION_SECS = 40.0
_REMEMBERED = 64
#: What is no failure of the process that finds it, but of all.
_OF_ALL = {kind.__name__: kind for kind in (LeftAloneError, ProcessesDivergedError)}


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
        self._usual_wait = 0.0  # for a value of the device
        self._trouble: MonsessError | None = None
        self._raised = threading.Event()
        self._closed = threading.Event()
        self._programs: deque[tuple[int, int, bool]] = deque(maxlen=_REMEMBERED)  # number, program, whether it is sure
        self._ends_at: float | None = None
        self._suspicious = False  # a collective has failed: somebody is gone
        self._failure_told = False
        self._unexplained: BaseException | None = None  # the newest error that nobody else is behind
        self._told_of: set[int] = set()  # peers whose silence people have been told of
        self._dead: set[int] = set()  # peers that were found to be dead, for whom nobody has to wait
        self._give_up_at: float | None = None
        self._give_up_code = 0
        self._stop: Callable[[], StopReason | None] = lambda: None
        self._training = threading.get_ident()
        self._beat = 0
        self._met_at_end = False
        self._beats: dict[int, tuple[int, float]] = {}  # of each peer: the newest beat, and when it was first seen
        self._doubted: dict[tuple[str, int], int] = {}  # what a peer seems to miss: the beat that first told so
        self._moved = time.monotonic()
        self._seen: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._watch, name="monsess-peers", daemon=True)

    def start(self, stop: Callable[[], StopReason | None]) -> None:
        """Begin to watch; the others know of this process from now on, so that they can miss it.

        Args:
            stop: Gives the stop that was agreed on, or None.
        """
        self._stop = stop
        self._channel.post(f"process/{self._channel.index}", json.dumps(dataclasses.asdict(this_process())))
        self._tell()
        self._thread.start()

    def dispatching(self, number: int, program: int, sure: bool) -> None:
        """Note the program that is about to be dispatched.

        Args:
            number: How many there are with it.
            program: Its fingerprint.
            sure: Whether it surely will be: one that never was may fail while it is compiled, on all processes alike.
        """
        self._programs.append((number, program, sure))
        self.progress.dispatched = number

    def joint(self, what: str) -> None:
        """Note a call, beside programs, that all processes have to make at the same point."""
        now = self.progress
        now.doing = f"calling {what}"
        now.joint = JointCall(now.joint.number + 1, now.position, what)

    def all_met(self) -> None:
        """All are about to dispatch this one; nobody has left before it, and it may still fail."""
        self.progress.dispatched = self._programs[-1][0] - 1

    def under_way(self) -> None:
        """The newest program was dispatched."""
        number, program, _ = self._programs.pop()
        self._programs.append((number, program, True))
        self.progress.dispatched = number

    def take_back(self) -> None:
        """The newest program was not dispatched after all."""
        self.progress.dispatched = self._programs.pop()[0] - 1

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
        if ready is not None and not ready():
            begun = time.monotonic()
            pause = min(_LONGEST_LOOK_SECS, 0.85 * self._usual_wait)  # every look costs what a step might use
            while not ready():
                self.check()
                time.sleep(pause)
                pause = min(_LONGEST_LOOK_SECS, max(_LOOK_SECS, self._usual_wait / 32))
            self._usual_wait = min(time.monotonic() - begun, 2 * self._usual_wait + _LOOK_SECS)
        try:
            value.block_until_ready()
        except Exception as error:
            raise self.blame(error) from error

    def blame(self, error: BaseException) -> BaseException:
        """Who is behind an error of a collective: waits a moment for what the others tell, or stop telling."""
        patience = 0.0 if error is self._unexplained else min(_SILENT_SECS + 2.0, self._failure_secs / 2)
        self._suspicious = True
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and self._trouble is None and not self._closed.is_set():
            time.sleep(0.05)
        if self._trouble is None:
            self._suspicious = False  # everybody is still there
            self._unexplained = error
            return error
        if threading.get_ident() == self._training:
            self._raised.set()
        return self._trouble

    def report(self, error: BaseException) -> None:
        """Tell the others that this process fails, and see to it that it ends in time."""
        self._raised.set()  # even where the watch knows: the training thread has it in hand, and hooks are told
        end_without_barrier.arm(self, error)
        write_record(error)
        if self._ends_at is not None:
            return
        self._ends_at = time.monotonic() + 0.8 * self._failure_secs
        if isinstance(error, PeerFailedError):
            return  # the culprit has told itself, or somebody else has told of it
        self._tell_failure(error)

    def _tell_failure(self, error: BaseException) -> None:
        """Tell the others, once, how this process fails, or in what all of them do."""
        if self._failure_told:
            return
        self._failure_told = True
        record = {"process": self._channel.index, "step": self.progress.step, "error": _shown(error)}
        if isinstance(error, tuple(_OF_ALL.values())):
            record |= {"kind": type(error).__name__, "message": str(error)}
        self._post_failure(record, "".join(traceback.format_exception(error)))

    def _post_failure(self, record: dict[str, Any], text: str | None) -> None:
        """Tell of a failure of this process, or, without the ``text`` of a traceback, that another one is dead."""
        key = f"failed/{record['process']}" + ("" if text is not None else f" silent for {self._channel.index}")

        def post() -> None:
            known = len(self._channel.under("failed"))  # whoever knows of another failure was not the first
            self._channel.post(key, json.dumps({**record, "text": text, "order": [known, time.time()]}))

        self._try(post)

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
        say_goodbye(self._failure_secs, self._dead)

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
                end_without_barrier.arm(self, found)
            self._end_if_due()

    def _end_if_due(self) -> None:
        """End the process where the training thread does not."""
        now = time.monotonic()
        give_up_at = self._give_up_at  # the training thread may take it back at any moment
        if give_up_at is not None and now > give_up_at and self._ends_at is None and not self._met_at_end:
            self._give_up()
        if self._ends_at is None:
            return
        stuck = not self._raised.is_set() and now > self._ends_at - 0.8 * self._failure_secs + _RAISE_SECS
        if stuck or now > self._ends_at:
            if self._trouble is not None and not self._raised.is_set():
                where = f"the training thread does not answer ({self.progress.doing})"
                sys.stderr.write(f"{type(self._trouble).__module__}.{type(self._trouble).__name__}: {self._trouble}\n")
                logger.error("process %d ends itself: %s\n%s", self._channel.index, where, self._where())
                write_record(self._trouble)
            end_without_barrier()

    def _give_up(self) -> None:
        """End the process, which a signal asks for, unless all have reached an end that counts more than the signal."""
        if len(self._seen) == self._channel.count and all(one[8] for one in self._seen.values()):
            return
        stop = self._stop()
        logger.error(
            "process %d ends itself: %s within %g s of the signal (%s); the newest checkpoint is the last periodic "
            "one\n%s",
            self._channel.index,
            "the processes came to no common step"
            if stop is None
            else f"the processes were to stop at step {self.progress.step} ({stop}), but did not all leave the loop",
            _PREEMPTION_SECS,
            self.progress.doing,
            self._where(),
        )
        end_without_barrier.arm(self, SystemExit(self._give_up_code))
        end_without_barrier()

    def _where(self) -> str:
        """What the training thread is in the middle of."""
        frame = sys._current_frames().get(self._training)
        stack = [] if frame is None else traceback.format_stack(frame)
        return "".join(["Stack of the training thread (most recent call last):\n", *stack]).rstrip()

    def _tell(self) -> None:
        self._beat += 1
        now = self.progress
        code = 0 if self._give_up_at is None else self._give_up_code
        programs = list(self._programs)[-8:]
        stop = self._stop()
        outranked = stop is not None and stop.outranks(StopReason.PREEMPTED)
        status = [now.dispatched, now.step, now.doing, now.left, programs, now.waits, now.ended, code, outranked]
        status.append(now.joint)  # read last: whoever has passed a call tells of it
        self._channel.post(f"status/{self._channel.index}", json.dumps([self._beat, *status]))

    def _look(self) -> MonsessError | None:
        failed = [json.loads(value) for value in self._channel.under("failed").values()]
        if failed:
            self._dead.update(one["process"] for one in failed if one["text"] is None and "lives" not in one)
            return _failure(min(failed, key=lambda record: record["order"]))
        now = time.monotonic()
        status = {int(index): json.loads(value) for index, value in self._channel.under("status").items()}
        if len(status) < self._channel.count:
            for index, why in those_who_left().items():
                if index not in status:
                    self._dead.add(index)
                    return PeerFailedError(why)
        if any(one[1:] != self._seen.get(index) for index, one in status.items()):
            self._moved = now
            self._seen = {index: one[1:] for index, one in status.items()}
        for index, (beat, *rest) in status.items():
            if index == self._channel.index:
                continue
            if self._beats.get(index, (None,))[0] != beat:
                self._beats[index] = (beat, now)
            if rest[7]:
                self.end_soon(rest[7])
            found = self._compare(index, *rest[:4]) or self._compare_programs(index, beat, rest[4], rest[5])
            found = found or self._compare_endings(index, rest[0], rest[6]) or self._compare_calls(index, beat, rest)
            if found is not None:
                self._tell_failure(found)  # whose training thread is stuck in a collective cannot
                return found
        return self._look_for_silence(status, now) or self._look_for_a_stall(status, now)

    def _look_for_silence(self, status: dict[int, list[Any]], now: float) -> MonsessError | None:
        if not self._beats:
            return None
        index, (_, heard) = min(self._beats.items(), key=lambda item: item[1][1])
        silent = now - heard
        _, _, step, doing, *_ = status[index]
        patience = _SILENT_SECS if self._suspicious else _SILENT_PART * self._failure_secs
        if silent <= patience and not (silent > _SILENT_HERE_SECS and self._is_gone(index)):
            if silent > _TOLD_PART * self._failure_secs and index not in self._told_of:
                self._told_of.add(index)
                logger.warning(
                    "process %d has been silent for %.0f s; it was at step %d (%s)", index, silent, step, doing
                )
            return None
        text = (
            f"Process {index} has been silent for {silent:.0f} s; it was at step {step} ({doing}). It was killed, or "
            "its machine is gone or stopped. All processes end; start the job again."
        )
        self._dead.add(index)
        self._post_failure({"process": index, "step": step, "error": text}, None)
        return PeerFailedError(text)

    def _is_gone(self, index: int) -> bool:
        """Whether a process of this machine is provably dead."""
        named = self._channel.under("process").get(str(index))
        name = None if named is None else ProcessName(**json.loads(named))
        return name is not None and is_here(name) and not is_alive(name)

    def _look_for_a_stall(self, status: dict[int, list[Any]], now: float) -> MonsessError | None:
        if now - self._moved <= self._stall_secs:
            return None
        # Who only waits is not the cause, however little it has dispatched.
        behind, (_, _, step, doing, _, _, waits, *_) = min(status.items(), key=lambda item: (item[1][6], item[1][1]))
        missing = [index for index in range(self._channel.count) if index not in status]
        if missing and waits:
            return None  # all wait for one that has not come yet, and that wait has a limit of its own
        late = f" {processes(missing).capitalize()} did not come so far." if missing else ""
        text = (
            f"No process has made any progress for {self._stall_secs:g} s (stall_timeout_secs). Process {behind} is "
            f"furthest behind: step {step}, {doing}.{late}"
        )
        # The others may take what this process does from here on for progress, and would have to wait once more.
        self._post_failure({"process": behind, "step": step, "error": text, "lives": True}, None)
        return PeerFailedError(text)

    def _compare(self, index: int, dispatched: int, step: int, doing: str, left: int | None) -> MonsessError | None:
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
        return None

    def _compare_programs(self, index: int, beat: int, programs: list[list[Any]], waits: bool) -> MonsessError | None:
        """Whether another process dispatched, or waits for all to dispatch, what this one did not.

        A program that is compiled for the first time may still fail, on all processes alike, one of which has gone on
        to another one by then. So it counts only where its process waits for the others to begin it, which will not
        come, and only if that is told again: what is read may be from before it was taken back.
        """
        own_waits = self.progress.waits
        mine = {number: (program, sure) for number, program, sure in self._programs}
        pairs = [(number, theirs, surely, *mine.get(number, (theirs, True))) for number, theirs, surely in programs]
        differing = [
            (number, sure and surely)
            for number, theirs, surely, program, sure in pairs
            if program != theirs and (sure or surely) and (sure or own_waits) and (surely or waits)
        ]
        if not self._persists("program", index, beat, bool(differing)) and not any(certain for _, certain in differing):
            return None
        return ProcessesDivergedError(
            f"The processes run different programs: at dispatch {differing[0][0]} process {index} did not do what "
            f"process {self._channel.index} did. Every train step, eval step and run_without_hooks has to be called by "
            "all processes, in the same order and with batches of the same shape."
        )

    def _persists(self, what: str, index: int, beat: int, seems_so: bool) -> bool:
        """Whether something that process ``index`` tells was so before; the first telling may have been composed early.

        The second may have been as well, by a thread that was held up, but then was composed after the first was read.
        """
        if not seems_so:
            self._doubted.pop((what, index), None)
            return False
        return beat > self._doubted.setdefault((what, index), beat) + 1

    def _compare_endings(self, index: int, dispatched: int, ended: int | None) -> MonsessError | None:
        own = self.progress
        if not (_went_on(own.ended, ended, dispatched) or _went_on(ended, own.ended, own.dispatched)):
            return None
        return self.ended_differently(index, dispatched)

    def _compare_calls(self, index: int, beat: int, status: list[Any]) -> MonsessError | None:
        dispatched, _, doing, left, _, _, ended, _, _, (number, at, what) = status
        own_at = self.progress.position  # before the call is read, as in what the other tells
        own = Place(own_at, self.progress.joint, f"process {self._channel.index} ({self.progress.doing})")
        call = JointCall(number, (at[0], at[1]), what)
        found = difference(own, Place(position(dispatched, left, ended), call, f"process {index} ({doing})"))
        # Only what it tells again: the first may be from before a program that it has taken back since.
        return ProcessesDivergedError(str(found)) if self._persists("call", index, beat, found is not None) else None

    def ended_differently(self, index: int, dispatched: int) -> ProcessesDivergedError:
        """The error where process ``index`` has run another number of programs at the end."""
        return ProcessesDivergedError(
            f"At the end of the session process {self._channel.index} has run {self.progress.dispatched} programs and "
            f"process {index} {dispatched}. An eval step that a hook runs in `end` has to be run by all processes."
        )

    def _try(self, call: Any) -> None:
        try:
            call()
        except Exception as error:  # the service may be gone already
            logger.debug("the coordination service does not answer: %s", error)


def _went_on(left: int | None, others_left: int | None, others_dispatched: int) -> bool:
    """Whether another process ran more programs before it left the loop, if it has, than one that has."""
    return left is not None and left < (others_dispatched if others_left is None else others_left)


def _failure(record: dict[str, Any]) -> MonsessError:
    if record["text"] is None:
        return PeerFailedError(record["error"])
    if "kind" in record:
        return _OF_ALL[record["kind"]](record["message"])
    error = PeerFailedError(
        f"Process {record['process']} failed at step {record['step']}: {record['error']} All processes end; its own "
        "log has more."
    )
    error.add_note(f"Traceback of process {record['process']}:\n{record['text']}")
    return error


def _shown(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."
