"""What a look at a checkpoint directory finds: its names, and what is under each number."""

from __future__ import annotations

import dataclasses
import enum

from monsess.checkpoint.commit import StepRecord

#: How the name of a local directory begins in which a step is made.
STAGING_PREFIX = ".staging-"
#: How the name begins under which a step is deleted on a local path, where it is renamed first.
DELETING_PREFIX = ".deleting-"
#: How the name begins of the mark of a step that is being written or deleted on a store that may keep half of it.
PENDING_PREFIX = ".pending-"


@dataclasses.dataclass
class Listing:
    """The names in a checkpoint directory, in one request.

    Args:
        numbers: Those that are step numbers, in ascending order.
        pending: Steps that are marked as being written or deleted.
        staging: Names of local staging directories.
        odd: Names of directories that begin with a digit and are no steps.
        moving: Marks of steps that are being moved aside.
        remembered: What run.json says of the steps, once somebody has asked.
        evaluated: Whether there are values that came after a commit.
    """

    numbers: list[int]
    pending: set[int]
    staging: list[str]
    odd: list[str]
    moving: list[str]
    remembered: dict[int, StepRecord] | None = None
    evaluated: bool = False


class Standing(enum.Enum):
    """What a step is that is not a committed checkpoint."""

    #: It has no commit.json.
    UNCOMMITTED = "not committed"
    #: Its commit.json was never whole.
    UNFINISHED = "not finished"
    #: Its commit.json is not valid, or somebody took it away: damage.
    BROKEN = "damaged"


@dataclasses.dataclass(frozen=True)
class Survey:
    """What is under each number of a checkpoint directory.

    Args:
        listing: The names.
        committed: What is known of each committed step.
        others: What each other number is.
    """

    listing: Listing
    committed: dict[int, StepRecord]
    others: dict[int, Standing]

    def those(self, *standings: Standing) -> list[int]:
        """The numbers that are one of ``standings``, in ascending order."""
        return sorted(step for step, standing in self.others.items() if standing in standings)
