"""How far a process of a job is, as it tells the others."""

from __future__ import annotations

import dataclasses

from monsess.joint import NO_CALL, JointCall, Position, position


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
        joint: The newest call, beside programs, that all have to make at the same point.
    """

    dispatched: int = 0
    step: int = 0
    doing: str = "starting"
    left: int | None = None
    ended: int | None = None
    waits: bool = False
    joint: JointCall = NO_CALL

    @property
    def position(self) -> Position:
        """Where in its program the process is."""
        return position(self.dispatched, self.left, self.ended)
