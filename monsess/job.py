"""The processes of a job as one session sees them: alone, or several that decide together and watch each other."""

from __future__ import annotations

import contextlib
import itertools
import json
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from monsess.agreement import Agreement
from monsess.ballot import AHEAD, fingerprint_of
from monsess.binding import Call
from monsess.channel import Channel
from monsess.errors import ClusterError, LeftAloneError, ProcessesDivergedError, ReplicasDifferError
from monsess.peers import Peers
from monsess.step import Step
from monsess.together import ClusterAgreement

_KEPT_SAVES = 8  # a second try of a final save asks for the same step again
#: What the errors of a collective say whose other side is gone: Gloo's are a bare ValueError.
_OF_COLLECTIVES = ("Gloo", "NCCL", "Connection closed by peer", "UNAVAILABLE", "ABORTED")
#: Dispatches between two at which the processes wait for each other because another program follows.
_MEET_EVERY = 50


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

    def begin(self, batches: int) -> None:
        """Tell how many batches, at most `AHEAD`, this process surely has before the first dispatch."""

    def ballot(
        self, step: Step, call: Call, batches: int, step_after: int, with_hooks: bool = True
    ) -> np.ndarray | None:
        """What the next dispatch, which leads to ``step_after``, carries: int32 ``[slots]``; None alone."""
        return None

    def sent(self, took_batch: bool, total: Any) -> None:
        """A program was dispatched."""

    def settle(self) -> None:
        """Hear the last wishes of all processes."""

    def hand_in(self, step: int, value: Any) -> None:
        """Give the chief a JSON-able value for its save of ``step``."""

    def handed_in(self, step: int) -> list[Any] | None:
        """The chief's writer thread: what all processes gave for the save of ``step``; None alone."""
        return None

    def vouch(self) -> Callable[[], None]:
        """A function that the writer thread calls before a commit: raises unless all processes did the same so far."""
        return _nothing

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
        save_secs: How long the others wait for the chief's final commit.
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
        self._saved_steps: deque[int] = deque()
        self._fingerprint = 0
        self._programs: dict[Any, int] = {}
        self._met = False
        self._met_before = 0  # the newest dispatch before which all processes met
        self._met_for: set[int] = set()  # the programs for which they did

    @property
    def data_ended(self) -> bool:
        """Whether some process has no further batch."""
        return self._together.data_ended

    def start(self) -> None:
        """Begin to watch the others."""
        self._peers.start()
        _open_jobs.add(self)

    def check(self) -> None:
        """Raise what is known about the others, if anything."""
        self._peers.check()

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

    def begin(self, batches: int) -> None:
        """Exchange how many batches each process surely has."""
        self._together.begin(self.gathered("batches at the start", min(batches, AHEAD)))

    def ballot(self, step: Step, call: Call, batches: int, step_after: int, with_hooks: bool = True) -> np.ndarray:
        """What the next dispatch carries for this process."""
        self._peers.check()
        self._peers.progress.step = step_after
        self._peers.progress.doing = f"running {step.name}"
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves((call.args, call.named)))
        key = (step, shapes, with_hooks)
        if key not in self._programs:
            parts = (step.kind, step.name, step.engine, step.steps_per_run, shapes, with_hooks)
            self._programs[key] = fingerprint_of(*parts)
        before, self._fingerprint = self._fingerprint, self._programs[key]
        number = self._together.dispatched + 1
        self._peers.dispatching(number, self._fingerprint)
        long_ago = number >= self._met_before + _MEET_EVERY
        if self._fingerprint not in self._met_for or (self._fingerprint != before and long_ago):
            self._meet_before(number)
        return self._together.ballot(self._fingerprint, batches)

    def _meet_before(self, number: int) -> None:
        """Wait until all processes are about to run the same program as dispatch ``number``.

        Collectives that do not match are no error: Gloo mixes them up, or aborts a process. So a program is met for
        at its first run, and when it follows another one, but not more often than steps that alternate can bear. All
        that agree so far meet at the same dispatches; one that runs something else there is found by the watch.
        """
        before, self._met_before = self._met_before, number
        self._met_for.add(self._fingerprint)
        what = f"program/{number}"
        with self._waiting():
            told = self._channel.gather(what, str(self._fingerprint), self._stall_secs, self.check)
        if self.is_chief:
            self._channel.forget(f"program/{before}")  # all have passed that one
        differing = [index for index, one in enumerate(told) if one != told[self.process_index]]
        if differing:
            raise ProcessesDivergedError(
                f"The processes run different programs: at dispatch {number} process {differing[0]} is not about to "
                f"do what process {self.process_index} does. Every train step, eval step and run_without_hooks has to "
                "be called by all processes, in the same order and with batches of the same shape."
            )

    def sent(self, took_batch: bool, total: Any) -> None:
        """A program was dispatched: act on what was agreed earlier."""
        self._together.sent(self._fingerprint, took_batch, total)

    def settle(self) -> None:
        """Hear the last wishes of all processes."""
        self._together.settle()

    def hand_in(self, step: int, value: Any) -> None:
        """Give the chief a value for its save of ``step``."""
        self._channel.post(f"save/{step}/{self.process_index}", json.dumps(value))

    def handed_in(self, step: int) -> list[Any]:
        """What all processes gave for the save of ``step``."""
        found = self._channel.collect(f"save/{step}", self._save_secs, self._peers.check)
        self._saved_steps.append(step)
        if len(self._saved_steps) > _KEPT_SAVES:
            self._channel.forget(f"save/{self._saved_steps.popleft()}")
        return [json.loads(one) for one in found]

    def vouch(self) -> Callable[[], None]:
        """Before a commit: every program so far was the same on all processes, and all of them are there."""
        number = self._together.dispatched

        def confirm() -> None:
            self._together.confirm(number)
            self._peers.check()

        return confirm

    def leave(self, step: int) -> None:
        """All processes have to leave the loop after the same step."""
        self._peers.progress.doing = "leaving the loop"
        dispatched = self._together.dispatched
        self._peers.progress.left = dispatched
        key = f"{next(self._questions)} the end of the loop"
        with self._waiting():
            told = self._channel.gather(key, json.dumps([dispatched, step]), self._stall_secs, self.check)
        ends = [json.loads(one) for one in told]
        if any(one != ends[0] for one in ends):
            steps = ", ".join(f"process {index}: step {at}" for index, (_, at) in enumerate(ends))
            raise LeftAloneError(
                f"The processes left the loop after different steps ({steps}). What ends the loop has to be the same "
                "on all: ask with request_stop(), which all hear, instead of break. Nothing is saved at this end."
            )
        self._peers.meet_at_end()

    def part(self) -> None:
        """Wait until the session has ended on all processes."""
        self._peers.progress.doing = "ending"
        self._peers.progress.ended = self._together.dispatched
        key = f"{next(self._questions)} the end of the session"
        with self._waiting():
            self._channel.gather(key, "", self._stall_secs, self.check)

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
