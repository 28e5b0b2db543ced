"""What the processes tell each other inside every step: a small vector, whose sum over them all can read.

The numbers are whole, and float32 all the same, so that they travel in one collective with the loss: one more costs
more than all else that a session does in a step. They and their sums stay below 2**24, where float32 is exact.

The sum of dispatch k is read right after dispatch k + `LAG`, by every process at the same point of its program, so that
nobody waits for it and all draw the same conclusion at the same step.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Hashable

import numpy as np

#: Dispatches between a wish and its effect.
LAG = 2
#: Batches that a process has to have beyond the one that it dispatches, to vouch for those that follow.
AHEAD = LAG + 1

_REASONS = ("ERROR", "LAST_STEP", "END_OF_DATA", "EARLY_STOPPING", "REQUESTED", "PREEMPTED", "BODY_LEFT")
#: The fingerprint goes in this many parts of so many bits, whose sum over 8,192 processes is exact.
_PARTS, _BITS = 3, 11
_SAVE, _WHO, _INTERRUPT, _LOG, _STOP = range(_PARTS, _PARTS + 5)
_BATCHES = _STOP + len(_REASONS)
#: Length of the vector.
SLOTS = _BATCHES + AHEAD + 1


@dataclasses.dataclass(frozen=True)
class Ballot:
    """One process's part of the vector.

    Args:
        fingerprint: Of the program that is dispatched, see `fingerprint_of`.
        stop: Name of the `StopReason` that it wishes for, or None.
        save: Whether it wishes for a checkpoint.
        batches: How many batches it surely has after this dispatch, at most `AHEAD`.
        interrupted: Whether it was Ctrl-C that preempts it.
        log: Whether it wishes that all log.
    """

    fingerprint: int
    stop: str | None = None
    save: bool = False
    batches: int = AHEAD
    interrupted: bool = False
    log: bool = False

    def encode(self, process_index: int) -> np.ndarray:
        """The vector, float32 ``[SLOTS]``, not to be written to: mostly it is that of the run before.

        Args:
            process_index: Who votes.
        """
        return _encoded(self, process_index)

    def _vector(self, process_index: int) -> np.ndarray:
        vector = np.zeros(SLOTS, np.float32)
        vector[:_PARTS] = _parts(self.fingerprint)
        vector[_SAVE] = self.save
        vector[_INTERRUPT] = self.interrupted
        vector[_LOG] = self.log
        if self.stop is not None:
            vector[_STOP + _REASONS.index(self.stop)] = 1
            vector[_WHO] = process_index
        vector[_BATCHES + min(self.batches, AHEAD)] = 1
        vector.flags.writeable = False
        return vector


@functools.lru_cache(64)
def _encoded(ballot: Ballot, process_index: int) -> np.ndarray:
    return ballot._vector(process_index)


@dataclasses.dataclass(frozen=True)
class Tally:
    """What the sum over all processes says.

    Args:
        same_program: Whether every process dispatched what this one did.
        stop: Name of the highest-ranking `StopReason` that anybody wished for, or None.
        by: The process that wished for it, where it was one alone.
        save: Whether anybody wished for a checkpoint.
        batches: The smallest number of batches that anybody surely had, at most `AHEAD`.
        interrupted: Whether anybody was preempted by Ctrl-C.
        log: Whether anybody wished that all log.
    """

    same_program: bool
    stop: str | None
    by: int | None
    save: bool
    batches: int
    interrupted: bool
    log: bool


def count(total: np.ndarray, fingerprint: int, process_count: int) -> Tally:
    """Read the sum of all vectors of one dispatch.

    Args:
        total: float32 ``[SLOTS]``.
        fingerprint: That of this process's program at that dispatch.
        process_count: How many vectors were summed.
    """
    return _counted(total.tobytes(), fingerprint, process_count)


@functools.lru_cache(64)  # mostly nobody wishes for anything
def _counted(content: bytes, fingerprint: int, process_count: int) -> Tally:
    total = np.frombuffer(content, np.float32)
    expected = _parts(fingerprint) * process_count
    votes = total[_STOP:_BATCHES]
    wished = [name for name, number in zip(_REASONS, votes, strict=True) if number]
    had = np.flatnonzero(total[_BATCHES:])
    return Tally(
        same_program=np.array_equal(total[:_PARTS], expected) and int(total[_BATCHES:].sum()) == process_count,
        stop=wished[0] if wished else None,
        by=int(total[_WHO]) if int(votes.sum()) == 1 else None,
        save=bool(total[_SAVE]),
        batches=int(had[0]) if had.size else 0,
        interrupted=bool(total[_INTERRUPT]),
        log=bool(total[_LOG]),
    )


def _parts(fingerprint: int) -> np.ndarray:
    return np.array([fingerprint >> _BITS * part & 2**_BITS - 1 for part in range(_PARTS)], np.float32)


def fingerprint_of(*parts: Hashable) -> int:
    """A number from 1 to 2**31 - 1 that tells programs apart; the same in every process.

    Args:
        *parts: Things whose ``repr`` says what they are.
    """
    return zlib.crc32(repr(parts).encode()) % (2**31 - 1) + 1
