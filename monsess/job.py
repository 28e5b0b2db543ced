"""The processes of a job as one session sees them: alone, or several that decide together and watch each other."""

from __future__ import annotations

import contextlib
import itertools
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from monsess.agreement import Agreement
from monsess.binding import Call
from monsess.channel import Channel
from monsess.errors import ClusterError, LeftAloneError, ProcessesDivergedError, ReplicasDifferError
from monsess.handing_in import HandingIn
from monsess.last_words import last_words
from monsess.peers import Peers
from monsess.programs import Programs
from monsess.step import Step
from monsess.together import ClusterAgreement

#: Of the time that a save may take: less than all of it, after which only that it is over would be known, and not why.
_PART_OF_SAVE = 0.8
#: What the errors of a collective say whose other side is gone: Gloo's are a bare ValueError.
_OF_COLLECTIVES = ("Gloo", "NCCL", "Connection closed by peer", "UNAVAILABLE", "ABORTED")


class Job:
    """A job of this process alone: what it decides is decided, and nobody has to be waited for."""

    process_index: int = 0
    process_count: int = 1

    def __init__(self) -> None:
        self.agreement: Agreement = Agreement()

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints."""
        return self.process_index == 0

    @property
    def data_ended(self) -> bool:
        """Whether some process has no further batch."""
        return False

    def start(self) -> None:
        """Begin to watch the others."""

    def check(self) -> None:
        """Raise what is known about the others, if anything."""

    def doing(self, what: str) -> None:
        """Note what this process does, for the others' messages."""

    def wait_for(self, value: Any) -> None:
        """Wait for a value of the device."""
        value.block_until_ready()

    def decided(self, what: str, decide: Callable[[], Any]) -> Any:
        """What the chief decides, on all processes.

        Args:
            what: In words.
            decide: Called on the chief only; returns something JSON-able.
        """
        return decide()

    def gathered(self, what: str, value: Any) -> list[Any]:
        """A JSON-able value of each process, on all of them, in the order of the processes."""
        return [value]

    def compare(self, what: str, names: list[str], hashes: Callable[[], np.ndarray]) -> None:
        """Make sure that all processes hold the same; called by all at the same point.

        Args:
            what: Is compared, in words.
            names: Of its parts.
            hashes: Gives a number for each part.

        Raises:
            ReplicasDifferError: They do not; names the parts.
        """

    def broadcast(self, data: bytes | None) -> bytes:
        """The chief's bytes, on all processes."""
        assert data is not None
        return data

    def begin(self, batches: int, schedules: Mapping[str, str]) -> None:
        """Tell what this process wishes before the first dispatch, and how many batches, at most `AHEAD`, it has.

        Args:
            batches: So many.
            schedules: When the hooks are due that have to be so on all processes.

        Raises:
            ProcessesDivergedError: They are due at other steps on other processes.
        """

    def ballot(
        self, step: Step, call: Call, batches: int, step_after: int, with_hooks: bool = True
    ) -> np.ndarray | None:
        """What the next dispatch, which leads to ``step_after``, carries: float32 ``[slots]``; None alone."""
        return None

    def unsent(self) -> None:
        """The program of the newest ballot could not be dispatched: as if there had been no ballot."""

    def under_way(self) -> None:
        """The program of the newest ballot is on its way to the devices."""

    def sent(self, took_batch: bool, total: Any) -> None:
        """A program was dispatched."""

    def settle(self) -> None:
        """Hear the last wishes of all processes."""

    def hand_in(self, step: int, value: Any, late: Callable[[], Any]) -> None:
        """Give the chief, for its save of ``step``, a JSON-able value and what ``late`` returns, without waiting."""

    def handed_in(self, step: int, value: Any, late: Callable[[], Any]) -> list[Any]:
        """The chief's writer thread: ``[value, late()]`` of each process for the save of ``step``, in their order."""
        return [[value, late()]]

    def vouch(self) -> Callable[[], None]:
        """A function that the writer thread calls before a commit: raises unless all processes did the same so far."""
        return _nothing

    def joint(self, what: str, counted: bool) -> contextlib.AbstractContextManager[float]:
        """Around a call beside the steps that all processes make at the same point; gives how long to wait for them.

        Args:
            what: Its name.
            counted: Whether the training thread makes it; other threads keep no order with the steps.
        """
        return contextlib.nullcontext(0.0)

    def leave(self, step: int) -> None:
        """The loop was left after ``step``; all processes have to leave it there."""

    def part(self) -> None:
        """The session has ended here; wait until it has on all processes."""

    def report(self, error: BaseException) -> None:
        """Tell the others that this process fails."""

    def preempted(self, number: int) -> None:
        """The signal ``number`` asks for a clean stop, which must not take for ever."""

    def explained(self, error: Exception) -> BaseException:
        """Who is behind an error of a step, where another process is."""
        return error

    def close(self) -> None:
        """Stop watching."""


def _nothing() -> None:
    pass


class ClusterJob(Job):
    """A job of several processes that have joined through `jax.distributed`.

    Args:
        max_wait_secs: How long the others wait for the chief's initialised or restored state.
        failure_secs: From any failure to the end of this process.
        stall_secs: How long a peer may keep the others waiting.
        save_secs: How long a save may take.
    """

    _numbers = itertools.count()

    def __init__(self, max_wait_secs: float, failure_secs: float, stall_secs: float, save_secs: float) -> None:
        self._channel = Channel(f"session{next(ClusterJob._numbers)}")
        self.process_index = self._channel.index
        self.process_count = self._channel.count
        self._limit = max_wait_secs
        self._stall_secs = stall_secs
        self._save_secs = save_secs
        self._peers = Peers(self._channel, failure_secs, stall_secs)
        self._together = ClusterAgreement(self.process_index, self.process_count, self._peers.wait_for)
        self.agreement = self._together
        self._questions = itertools.count()
        self._handing_in = HandingIn(self._channel, _PART_OF_SAVE * self._save_secs)
        self._programs = Programs()
        self._met = False
        self._meetings = 0

    @property
    def data_ended(self) -> bool:
        """Whether some process has no further batch."""
        return self._together.data_ended

    def start(self) -> None:
        """Begin to watch the others."""
        together = self._together  # not self, which the watch would keep alive
        self._peers.start(lambda: together.stop)
        _open_jobs.add(self)

    def check(self) -> None:
        """Raise what is known about the others, if anything."""
        self._peers.check()
        self._handing_in.check()

    def doing(self, what: str) -> None:
        """Note what this process does, for the others' messages."""
        self._peers.progress.doing = what

    def wait_for(self, value: Any) -> None:
        """Wait for a value of the device, as long as the others are there to compute it."""
        self._peers.wait_for(value)

    def decided(self, what: str, decide: Callable[[], Any]) -> Any:
        """What the chief decides, on all processes."""
        key = f"{next(self._questions)} {what}"
        if self.is_chief:
            value = decide()
            self._channel.tell(key, json.dumps(value))
            return value
        with self._waiting():
            return json.loads(self._channel.hear(key, self._limit, self.check))

    def gathered(self, what: str, value: Any) -> list[Any]:
        """A value of each process, on all of them."""
        key = f"{next(self._questions)} {what}"
        with self._waiting():
            told = self._channel.gather(key, json.dumps(value), self._limit, self.check)
        return [json.loads(one) for one in told]

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """This process does nothing of its own here: whoever keeps the job waiting is another one."""
        before, self._peers.progress.waits = self._peers.progress.waits, True
        try:
            yield
        finally:
            self._peers.progress.waits = before

    def compare(self, what: str, names: list[str], hashes: Callable[[], np.ndarray]) -> None:
        """Make sure that all processes hold the same."""
        told = np.asarray(self.gathered(what, hashes().tolist()))
        differing = [name for name, column in zip(names, told.T, strict=True) if (column != column[0]).any()]
        if differing:
            shown = ", ".join(differing[:8]) + (f" and {len(differing) - 8} more" if len(differing) > 8 else "")
            raise ReplicasDifferError(
                f"The {self.process_count} processes hold different values in {what}: {shown}. Most often the "
                'gradients were not averaged over all devices: add grads = jax.lax.pmean(grads, "data") to the step.'
            )

    def broadcast(self, data: bytes | None) -> bytes:
        """The chief's bytes, on all processes, through the devices, as bytes: nothing is rounded or narrowed."""
        from jax.experimental import multihost_utils

        self._meet()
        size = self.decided("a part of the state", lambda: len(data or b""))
        whole = np.zeros(size, np.uint8) if data is None else np.frombuffer(data, np.uint8)
        with self._waiting():
            try:
                return np.asarray(multihost_utils.broadcast_one_to_all(whole)).tobytes()
            except Exception as error:
                explained = self.explained(error)
                if explained is error:
                    raise
                raise explained from error

    def _meet(self) -> None:
        """Before the first collective: wait until all processes are here, and connect them.

        Gloo gives them 30 s to connect, for each set of devices anew, and then fails, or aborts the process. One that
        loads its data for a minute, or compiles for a minute longer than another, must not end the job.
        """
        if self._met:
            return
        self._met = True
        self.gathered("the start of the session", None)
        with self._waiting():
            connected = jax.pmap(lambda x: jax.lax.psum(x, "all"), "all")(np.ones(jax.local_device_count(), np.int32))
            self.wait_for(connected)

    def begin(self, batches: int, schedules: Mapping[str, str]) -> None:
        """Exchange what each process wishes, how many batches it surely has, and when its hooks are due."""
        told = self.gathered("the first run", [self._together.ballot(0, batches).tolist(), dict(schedules)])
        for index, (_, theirs) in enumerate(told):
            self._compare_schedules(theirs, index, told[0][1])
        self._together.begin(np.asarray([ballot for ballot, _ in told], np.float32).sum(axis=0))

    @staticmethod
    def _compare_schedules(theirs: Mapping[str, str], index: int, chiefs: Mapping[str, str]) -> None:
        differing = [name for name in {**chiefs, **theirs} if theirs.get(name) != chiefs.get(name)]
        if differing:
            name = differing[0]
            raise ProcessesDivergedError(
                f"{name} is to act on all processes at the same steps, but on process 0 it is due "
                f"{chiefs.get(name, 'never, for it is not there')}, and on process {index} "
                f"{theirs.get(name, 'never, for it is not there')}. Give all processes the same arguments."
            )

    def ballot(self, step: Step, call: Call, batches: int, step_after: int, with_hooks: bool = True) -> np.ndarray:
        """What the next dispatch carries for this process."""
        self.check()
        self._peers.progress.step = step_after
        self._peers.progress.doing = f"running {step.name}"
        number = self._together.dispatched + 1
        program = self._programs.choose(step, call, with_hooks)
        self._peers.dispatching(number, program, self._programs.is_sure)
        if self._programs.needs_meeting(number):
            self._meet_before(number)
        return self._together.ballot(program, batches)

    def _meet_before(self, number: int) -> None:
        """Wait until all processes are about to run the same program as dispatch ``number``; see `Programs`."""
        self._meetings += 1  # what is waited for at a dispatch may be one more program, after one that failed
        own = f"{number} {self._programs.newest}"
        with self._waiting():
            told = self._channel.gather(f"program/{self._meetings}", own, self._stall_secs, self.check)
        if self.is_chief:
            self._channel.forget(f"program/{self._meetings - 1}")  # all have passed that one
        if not self._programs.is_sure:
            self._peers.all_met()
        differing = [index for index, one in enumerate(told) if one != told[self.process_index]]
        if differing:
            raise ProcessesDivergedError(
                f"The processes run different programs: at dispatch {number} process {differing[0]} is not about to "
                f"do what process {self.process_index} does. Every train step, eval step and run_without_hooks has to "
                "be called by all processes, in the same order and with batches of the same shape."
            )

    def unsent(self) -> None:
        """The program of the newest ballot could not be dispatched: as if there had been no ballot.

        Where that happened on all processes alike, and is caught there, they go on with another program.
        """
        self._peers.take_back()
        self._together.unsent()
        self._programs.take_back()

    def under_way(self) -> None:
        """The program of the newest ballot is on its way to the devices."""
        if self._programs.started():
            self._peers.under_way()

    def sent(self, took_batch: bool, total: Any) -> None:
        """A program was dispatched: act on what was agreed earlier."""
        self._together.sent(self._programs.newest, took_batch, total)

    def settle(self) -> None:
        """Hear the last wishes of all processes."""
        self._together.settle()

    def hand_in(self, step: int, value: Any, late: Callable[[], Any]) -> None:
        """Give the chief what its save of ``step`` needs."""
        if not self.is_chief:
            self._handing_in.give(step, value, late)

    def handed_in(self, step: int, value: Any, late: Callable[[], Any]) -> list[Any]:
        """What all processes gave for the save of ``step``."""
        return self._handing_in.take(step, value, late, self._peers.check)

    def vouch(self) -> Callable[[], None]:
        """Before a commit: every program so far was the same on all processes, and all of them are there."""
        number = self._together.dispatched

        def confirm() -> None:
            self._together.confirm(number)
            self._peers.check()

        return confirm

    @contextlib.contextmanager
    def joint(self, what: str, counted: bool) -> Iterator[float]:
        """Around a call that all processes make at the same point."""
        if not counted:
            yield self._limit
            return
        before = self._peers.progress.doing
        self._peers.joint(what)
        with self._waiting():
            yield self._limit
        self._peers.progress.doing = before

    def leave(self, step: int) -> None:
        """All processes have to leave the loop after the same step."""
        self._peers.progress.doing, self._peers.progress.step = "leaving the loop", step
        dispatched = self._together.dispatched
        self._peers.progress.left = dispatched
        key = f"{next(self._questions)} the end of the loop"
        with self._waiting():
            own = json.dumps([dispatched, step, self._together.received])
            told = self._channel.gather(key, own, self._stall_secs, self.check)
        ends = [json.loads(one) for one in told]
        if any(one[:2] != ends[0][:2] for one in ends):
            steps = ", ".join(f"process {index}: step {at}" for index, (_, at, _) in enumerate(ends))
            raise LeftAloneError(
                f"The processes left the loop after different steps ({steps}). What ends the loop has to be the same "
                "on all: ask with request_stop(), which all hear, instead of break. Nothing is saved at this end."
            )
        self._together.hear_at_end([one[2] for one in ends])
        self._peers.meet_at_end()

    def part(self) -> None:
        """Wait until the session has ended on all processes, which may take their time to close from now on."""
        self._peers.progress.doing = "ending"
        self._peers.progress.ended = dispatched = self._together.dispatched
        key = f"{next(self._questions)} the end of the session"
        with self._waiting():
            told = self._channel.gather(key, str(dispatched), self._stall_secs, self.check)
        for index, other in enumerate(told):
            if int(other) != dispatched:
                raise self._peers.ended_differently(index, int(other))
        self.check()
        self.close()
        last_words.parted()

    def report(self, error: BaseException) -> None:
        """Tell the others that this process fails."""
        self._peers.report(error)

    def preempted(self, number: int) -> None:
        """A clean stop is asked for, which must not take for ever."""
        self._peers.end_soon(128 + number)

    def explained(self, error: Exception) -> BaseException:
        """Who is behind an error of a step, where another process is."""
        lost = isinstance(error, jax.errors.JaxRuntimeError) or any(word in str(error) for word in _OF_COLLECTIVES)
        return self._peers.blame(error) if lost else error

    def close(self) -> None:
        """Stop watching."""
        _open_jobs.discard(self)
        self._peers.close()


_open_jobs: weakref.WeakSet[ClusterJob] = weakref.WeakSet()


def check_all() -> None:
    """Raise what the open sessions of this process know about the other processes, if anything."""
    for job in list(_open_jobs):
        job.check()


def the_job(max_wait_secs: float, failure_secs: float, stall_secs: float, save_secs: float) -> Job:
    """The job that this process belongs to.

    Raises:
        ClusterError: The processes have different numbers of devices.
    """
    if jax.process_count() == 1:
        return Job()
    devices = Counter(device.process_index for device in jax.devices())
    if len(set(devices.values())) > 1:
        shown = ", ".join(f"process {index}: {number}" for index, number in sorted(devices.items())[:8])
        more = ", ..." if len(devices) > 8 else ""
        raise ClusterError(f"Every process of a job needs the same number of devices, found {shown}{more}.")
    return ClusterJob(max_wait_secs, failure_secs, stall_secs, save_secs)
