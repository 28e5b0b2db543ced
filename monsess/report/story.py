"""What happened in a run: its attempts, what each restart cost, and where the time went.

It is told by the records alone, in the order in which they were written, so that a run that was killed without a word
is told as well as one that ended. Nothing here looks at a store.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from monsess.checkpoint.commit import StepRecord

Record = Mapping[str, Any]
#: The parts of a rounded account add up to its whole but for so much of it.
_ROUNDING = 5e-4

#: How the parts of the time are called in the records, in the order in which they are shown, and what they mean.
PARTS = {
    "step": "dispatching steps, and waiting for the devices",
    "input": "waiting for the next batch",
    "compile": "compiling the steps",
    "hooks": "hooks, evaluation and logging among them",
    "save": "saving, as far as training waited for it",
    "loop": "the loop's own code, where outputs are waited for",
    "start": "restoring or initialising the state",
    "lost": "what a restart had to do again",
    "down": "from a kill to the next start",
    "other": "everything else",
}


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One stretch of training, from a start to an end, a kill or a recovery.

    Args:
        number: 1 for the first.
        name: What the session calls the attempt, or None.
        start: The event of its start; empty where the records do not begin with one.
        begun: When, in seconds since the epoch.
        restored_from: The step that it went on from, or None.
        last_step: The highest step that it is known to have reached.
        last_time: When it was heard of last.
        end: The event of its end; None where it is not over, or was killed.
        lost_steps: Steps of it that a later attempt did again.
        lost_seconds: How long they had taken.
        pause: Seconds until the next attempt began; None for the last one.
    """

    number: int
    name: str | None
    start: Record
    begun: float
    restored_from: int | None
    last_step: int
    last_time: float
    end: Record | None
    lost_steps: int = 0
    lost_seconds: float = 0.0
    pause: float | None = None

    @property
    def first_step(self) -> int:
        """The step that it began at."""
        return int(self.start.get("step") or self.restored_from or 0)

    @property
    def seconds(self) -> float:
        """How long it is known to have run."""
        return max(0.0, self.last_time - self.begun)


@dataclasses.dataclass(frozen=True)
class Commit:
    """A checkpoint, as the records tell of it.

    Args:
        step: Global step.
        time: Of its commit, in seconds since the epoch.
        seconds: From the snapshot to the commit; None if unknown.
        size: In bytes; None if unknown.
        attempt: The number of the attempt that wrote it; 0 where that is unknown.
    """

    step: int
    time: float
    seconds: float | None
    size: int | None
    attempt: int


@dataclasses.dataclass(frozen=True)
class TimeSpent:
    """Where the time went.

    Args:
        parts: Seconds by part, those of `PARTS` first, in their order; they add up to ``wall``.
        wall: Seconds altogether.
        source: "goodput" if a GoodputHook counted, "ends" if only the attempts that came to an end are in it.
    """

    parts: dict[str, float]
    wall: float
    source: str


@dataclasses.dataclass(frozen=True)
class Story:
    """What the records of a run tell.

    Args:
        attempts: In order.
        commits: In order of time; a step that was committed twice is there twice.
        time: Where it went; None if nothing is known of it.
        hooks: Seconds by hook, the slowest first.
        events: Those of other kinds.
    """

    attempts: tuple[Attempt, ...]
    commits: tuple[Commit, ...]
    time: TimeSpent | None
    hooks: dict[str, float]
    events: tuple[Record, ...]

    @property
    def last(self) -> Attempt | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def lost_steps(self) -> int:
        """Steps that were done more than once."""
        return sum(attempt.lost_steps for attempt in self.attempts)

    @property
    def lost_seconds(self) -> float:
        """How long they had taken the first time."""
        return sum(attempt.lost_seconds for attempt in self.attempts)


def tell(records: Iterable[Record], kept: Iterable[StepRecord] = ()) -> Story:
    """Read the story of a run out of its records.

    Args:
        records: All lines, in the order in which they were written; unknown ones are skipped.
        kept: Checkpoints that are there; a killed attempt may have had no time to record its last ones.

    Example:
        >>> story = tell([
        ...     {"event": "start", "step": 0, "time": 10.0, "restored_from": None},
        ...     {"step": 8, "time": 18.0, "scalars": {"loss": 1.0}},
        ...     {"event": "start", "step": 5, "time": 20.0, "restored_from": 5},
        ... ])
        >>> [(one.last_step, one.lost_steps) for one in story.attempts]
        [(8, 3), (5, 0)]
    """
    stretches: list[list[Record]] = []
    for record in records:
        if not isinstance(record.get("time"), (int, float)) or not isinstance(record.get("step"), int):
            continue
        if record.get("event") == "start" or not stretches:
            stretches.append([])
        stretches[-1].append(record)
    nobodys = _add_untold(stretches, kept)
    attempts = [_attempt(number, stretch) for number, stretch in enumerate(stretches, 1)]
    for i, following in enumerate(attempts[1:]):
        attempts[i] = _overtaken(attempts[i], stretches[i], following)
    commits = [
        Commit(record["step"], record["time"], _number(record.get("seconds")), _whole(record.get("bytes")), number)
        for number, stretch in enumerate(stretches, 1)
        for record in stretch
        if record.get("event") == "checkpoint"
    ] + nobodys
    everything = [record for stretch in stretches for record in stretch]
    others = [r for r in everything if r.get("event") not in (None, "start", "end", "checkpoint", "goodput")]
    return Story(
        tuple(attempts),
        tuple(sorted(commits, key=lambda commit: commit.time)),
        _time_spent(attempts, everything),
        _hooks(everything),
        tuple(others),
    )


def _add_untold(stretches: Sequence[list[Record]], kept: Iterable[StepRecord]) -> list[Commit]:
    """Add the checkpoints that are there to the records of the attempts that made them; returns those of no attempt."""
    named = {name: stretch for stretch in stretches if isinstance(name := stretch[0].get("attempt"), str)}
    nobodys = []
    for one in kept:
        stretch = named.get(one.attempt)
        if stretch is None:
            nobodys.append(Commit(one.step, one.time, None, one.size, 0))
        elif not any(r.get("event") == "checkpoint" and r["step"] == one.step for r in stretch):
            stretch.append({"event": "checkpoint", "step": one.step, "time": one.time, "bytes": one.size})
    return nobodys


def _attempt(number: int, stretch: Sequence[Record]) -> Attempt:
    start: Record = stretch[0] if stretch[0].get("event") == "start" else {}
    ends = [record for record in stretch if record.get("event") == "end"]
    restored = start.get("restored_from")
    return Attempt(
        number=number,
        name=start.get("attempt"),
        start=start,
        begun=float(stretch[0]["time"]),
        restored_from=restored if isinstance(restored, int) else None,
        last_step=max(record["step"] for record in stretch),
        last_time=float(max(record["time"] for record in stretch)),
        end=ends[-1] if ends else None,
    )


def _overtaken(attempt: Attempt, stretch: Sequence[Record], following: Attempt) -> Attempt:
    """``attempt``, now that another one has followed, which may have begun further back than it had come."""
    kept = following.first_step  # records of later steps are void from here on
    return dataclasses.replace(
        attempt,
        lost_steps=max(0, attempt.last_step - kept),
        lost_seconds=max(0.0, attempt.last_time - _when(attempt, stretch, kept)),
        pause=max(0.0, following.begun - attempt.last_time),
    )


def _when(attempt: Attempt, stretch: Sequence[Record], step: int) -> float:
    """When ``attempt`` was at ``step``, between the two moments that the records know around it."""
    if step >= attempt.last_step:
        return attempt.last_time
    # The last word of a step counts: what hooks did in it is saved with it. A commit is recorded when it is seen, long
    # after its step was run.
    known = {r["step"]: float(r["time"]) for r in stretch if r.get("event") in (None, "goodput")}
    known.setdefault(attempt.first_step, attempt.begun)
    steps = sorted(known)
    at = bisect_left(steps, step)
    if at >= len(steps) or steps[at] == step:
        return known[steps[min(at, len(steps) - 1)]]
    if at == 0:
        return attempt.begun
    before, after = steps[at - 1], steps[at]
    share = (step - before) / (after - before)
    return known[before] + share * (known[after] - known[before])


def _time_spent(attempts: Sequence[Attempt], records: Sequence[Record]) -> TimeSpent | None:
    counted = [r["totals"] for r in records if r.get("event") == "goodput" and isinstance(r.get("totals"), Mapping)]
    if counted:
        seconds = _seconds(counted[-1])
        wall = seconds.pop("wall", None)
        return _made_whole(seconds, sum(seconds.values()) if wall is None else wall, "goodput")
    total: dict[str, float] = {}
    wall = 0.0
    for attempt in attempts:
        seconds = _seconds((attempt.end or {}).get("seconds"))
        wall += attempt.seconds if seconds else 0.0
        for name, value in seconds.items():
            total[name] = total.get(name, 0.0) + value
    return _made_whole(total, wall, "ends") if total else None


def _made_whole(seconds: dict[str, float], wall: float, source: str) -> TimeSpent:
    missing = wall - sum(seconds.values())
    if missing > wall * _ROUNDING:
        seconds["other"] = seconds.get("other", 0.0) + missing
    order = [*PARTS, *(name for name in seconds if name not in PARTS)]
    parts = {name: seconds[name] for name in order if seconds.get(name, 0.0) > 0}
    return TimeSpent(parts, max(wall, sum(parts.values())), source)


def _hooks(records: Sequence[Record]) -> dict[str, float]:
    """Seconds by hook over all attempts that said so; a count that survives restarts is taken as it is."""
    counted = [r["hooks"] for r in records if r.get("event") == "goodput" and isinstance(r.get("hooks"), Mapping)]
    total: dict[str, float] = {}
    for told in counted[-1:] or [record.get("hooks") for record in records if record.get("event") == "end"]:
        for name, value in _seconds(told).items():
            total[name] = total.get(name, 0.0) + value
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _seconds(told: Any) -> dict[str, float]:
    """The finite numbers among ``told``, by name."""
    if not isinstance(told, Mapping):
        return {}
    return {str(n): number for n, value in told.items() if (number := _number(value)) is not None and number >= 0}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
