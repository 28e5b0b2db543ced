"""What all processes call at the same point of their programs beside steps, such as `allreduce`.

Whoever calls it waits for the others, and one that went past that point would never come: so each tells which such call
was its newest, and where.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

#: Programs dispatched, and whether the loop (1) and the session (2) have come to their end.
Position: TypeAlias = tuple[int, int]


class JointCall(NamedTuple):
    """The newest of these calls of one process.

    Args:
        number: How many there were with it.
        at: Where in the program it was made.
        what: Its name.
    """

    number: int
    at: Position
    what: str


NO_CALL = JointCall(0, (0, 0), "")


class Place(NamedTuple):
    """Where a process is, and its newest call.

    Args:
        at: Where it was, when or before it made the call.
        call: The call.
        name: The process, and what it does, for people.
    """

    at: Position
    call: JointCall
    name: str


def position(dispatched: int, left: int | None, ended: int | None) -> Position:
    """Where a process is that tells this of itself."""
    return dispatched, (left is not None) + (ended is not None)


def difference(one: Place, other: Place) -> str | None:
    """Why two processes cannot come to make the same call, or None if they still can."""
    first, second = (one, other) if one.call.number >= other.call.number else (other, one)
    call = first.call
    if call.number == second.call.number and call != second.call:
        found = f"{second.name} calls {second.call.what} after {second.call.at[0]}"
    elif call.number > second.call.number and second.at > call.at:
        found = f"{second.name} went on without that"
    else:
        return None
    return (
        f"The processes run different programs: {first.name} calls {call.what} after {call.at[0]} runs, {found}. "
        "allreduce, allgather, broadcast and compare_replicas have to be called by all processes at the same point, "
        "as every train step and eval step has to be run."
    )
