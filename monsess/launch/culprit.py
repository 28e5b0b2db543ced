"""Which process of a failed attempt is the cause, and what is known of it."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from monsess.launch.records import Record

#: A peer's record of what a SIGKILL did to it may be older than the moment at which the launcher saw the death.
_SLACK_SECS = 1.0


class Exit(NamedTuple):
    """The end of one process.

    Args:
        rank: Its number.
        status: Exit status, or minus the signal that killed it.
        seen: When the launcher saw it, in seconds since the epoch.
        sent: The last signal that the launcher had sent to it, or None.
    """

    rank: int
    status: int
    seen: float
    sent: int | None = None

    @property
    def is_answer(self) -> bool:
        """Whether it ended as it was told to."""
        return self.sent is not None and self.status in (-self.sent, 128 + self.sent)

    @property
    def code(self) -> int:
        """The status as a shell shows it."""
        return self.status if self.status >= 0 else 128 - self.status

    def __str__(self) -> str:
        if self.status >= 0:
            return f"exit status {self.status}"
        unexplained = -self.status == signal.SIGKILL and not self.is_answer
        return f"killed by {_name(-self.status)}{' (out of memory?)' if unexplained else ''}"


class Verdict(NamedTuple):
    """What an attempt came to.

    Args:
        code: Exit status of the launcher, were it to end now.
        rank: The process that is the cause; None where all ended well or as they were told to.
        end: How that process ended.
        record: What it wrote down.
    """

    code: int
    rank: int | None = None
    end: Exit | None = None
    record: Record | None = None

    def __str__(self) -> str:
        error = "" if self.record is None else f": {self.record.error.splitlines()[0].rstrip('.')}"
        return f"process {self.rank} failed, {self.end}{error}"


def judge(exits: Sequence[Exit], records: Mapping[int, Record], signals: Sequence[int] = ()) -> Verdict:
    """Name the first cause.

    A process that fails may stay for a while to tell the others, who leave before it, and one that is killed takes
    others with it that then die of their own errors. So neither the order of the exits nor a single exit says enough.

    Args:
        exits: In the order in which they were seen.
        records: What processes wrote down.
        signals: What the launcher was told to pass on.

    Returns:
        The cause, or a verdict without one where every process ended well or as it was told to.

    Example:
        >>> judge([Exit(0, -signal.SIGABRT, 5.0), Exit(1, 3, 5.1)], {}).rank
        1
    """
    ends = {end.rank: end for end in exits}
    causes: list[tuple[bool, float, int]] = []
    for end in exits:
        record = records.get(end.rank)
        if end.status == 0 or end.is_answer or (record is not None and not record.blames_a_peer):
            continue
        # JAX aborts the processes that are left when one is lost.
        is_consequence = record is not None or end.status == -signal.SIGABRT
        causes.append((is_consequence, end.seen - (_SLACK_SECS if end.status < 0 else 0.0), end.rank))
    for rank, record in records.items():
        if record.blames_a_peer or rank not in ends or ends[rank].status == 0:
            continue
        # JAX aborts whom the others leave while it follows the same Ctrl-C.
        is_aborted = ends[rank].sent == signal.SIGINT and ends[rank].status == -signal.SIGABRT
        if not (record.is_interrupt and (ends[rank].is_answer or is_aborted)):
            causes.append((False, record.time, rank))
    if not causes:
        first = next((end.code for end in exits if end.status != 0), 0)
        was_killed = first in (128 + signal.SIGKILL, 128 + signal.SIGABRT)
        return Verdict(128 + signals[0] if signals and was_killed else first)
    rank = min(causes)[2]
    end = ends[rank]
    return Verdict(1 if end.is_answer else end.code, rank, end, records.get(rank))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
