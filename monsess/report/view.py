"""What a page is about, gathered."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from monsess.checkpoint.commit import StepRecord
from monsess.report.curves import Point
from monsess.report.standing import Standing, is_failure, reason_of
from monsess.report.story import Attempt, Commit, Story


@dataclasses.dataclass(frozen=True)
class View:
    """What a page is about; no credentials are in it.

    Args:
        url: The directory, as it may be shown.
        run_id: The lineage, or None.
        standing: How the run stands.
        story: What its records tell.
        curves: By tag, all points in order of step.
        kept: The checkpoints that are there, by step.
        pinned: Those of them that are pinned.
        made: When the page was made, in seconds since the epoch.
        version: Of monsess.
    """

    url: str
    run_id: str | None
    standing: Standing
    story: Story
    curves: Mapping[str, Sequence[Point]]
    kept: Mapping[int, StepRecord]
    pinned: frozenset[int]
    made: float
    version: str

    @property
    def state(self) -> str:
        """How the run stands, in a few words."""
        return f"{self.standing.state}: {self.standing.why}" if self.standing.why else self.standing.state

    @property
    def name(self) -> str:
        """A short name for a title."""
        return self.url.rstrip("/").rpartition("/")[2] or self.url

    def is_kept(self, commit: Commit) -> bool:
        """Whether that checkpoint is still there; of a step that was committed twice, the later one may be."""
        record = self.kept.get(commit.step)
        return record is not None and not any(
            other.step == commit.step and other.time > commit.time for other in self.story.commits
        )

    def outcome(self, attempt: Attempt) -> str:
        """``stopped``, ``failed``, ``killed``, ``recovered``, or how the run stands, for the last one."""
        if attempt.end is not None:
            return "failed" if is_failure(attempt) else "stopped"
        if attempt is self.story.last:
            return "died" if self.standing.state in ("stopped", "failed") else self.standing.state
        following = self.story.attempts[attempt.number]
        return "recovered" if following.name is not None and following.name == attempt.name else "killed"

    def how_it_ended(self, attempt: Attempt) -> str:
        """The reason of an attempt's end, or what else became of it."""
        outcome = self.outcome(attempt)
        if attempt.end is not None:
            return reason_of(attempt) or outcome
        words = {"killed": "killed", "recovered": "went back to a checkpoint by itself", "running": "still running"}
        return words.get(outcome) or self.standing.why or outcome
