"""Curves as they are drawn: which of them share a picture, and how many of their points are needed for it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

Point = tuple[int, float, float]
#: A curve of more points is thinned: a picture is at most some thousand dots wide.
MOST_POINTS = 1500
_MOST_ODD = 200
_FIRST = ("loss", "accuracy", "acc", "error", "perplexity")
_LAST = ("global_step/sec", "steps_per_second")
_RATES = ("learning_rate", "lr")


@dataclasses.dataclass(frozen=True)
class Curve:
    """One tag.

    Args:
        tag: Its name.
        points: What is drawn of it: step, seconds since the epoch, finite value.
        odd: Points that are NaN or infinite.
        count: How many points the records hold.
    """

    tag: str
    points: tuple[Point, ...]
    odd: tuple[Point, ...]
    count: int


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What a table says of a tag; None where no value is finite.

    Args:
        tag: Its name.
        count: How many points the records hold.
        first: The first point.
        last: The last point, finite or not.
        low: The point with the lowest value.
        high: The point with the highest value.
    """

    tag: str
    count: int
    first: Point
    last: Point
    low: Point | None
    high: Point | None


def is_rate(tag: str) -> bool:
    """Whether a tag is that of steps per second."""
    return tag in _LAST


def natural(tag: str) -> list[tuple[int, str]]:
    """A key by which ``layer2`` comes before ``layer10``."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", tag) if part]


def groups(tags: Sequence[str]) -> dict[str, list[str]]:
    """Which tags share a picture: those that end in the same name, as ``loss`` and ``eval/loss``.

    Example:
        >>> groups(["lr", "eval/loss", "global_step/sec", "loss"])
        {'loss': ['loss', 'eval/loss'], 'lr': ['lr'], 'global_step/sec': ['global_step/sec']}
    """
    found: dict[str, list[str]] = {}
    for tag in sorted(tags, key=lambda tag: (tag.count("/"), natural(tag))):
        name = tag if is_rate(tag) else tag.rpartition("/")[2] or tag
        found.setdefault(name, []).append(tag)

    def place(name: str) -> tuple[int, int]:
        if name in _FIRST:
            return 0, _FIRST.index(name)
        if any(tag.startswith("eval/") for tag in found[name]):
            return 1, 0
        return (3, _LAST.index(name)) if name in _LAST else (2, 0 if name in _RATES else 1)

    return {name: found[name] for name in sorted(sorted(found, key=natural), key=place)}


def thinned(tag: str, points: Sequence[Point], most: int = MOST_POINTS) -> Curve:
    """A curve with at most about ``most`` points that looks the same.

    Of each of many short stretches the lowest and the highest point stay, and the first and last of all, so that no
    spike is lost.

    Args:
        tag: Its name.
        points: All of it, in order of step.
        most: How many points are enough.
    """
    finite = [point for point in points if math.isfinite(point[2])]
    odd = [point for point in points if not math.isfinite(point[2])]
    if len(finite) > most:
        stretches = max(1, most // 2)
        kept = {0, len(finite) - 1}
        for i in range(stretches):
            inside = range(i * len(finite) // stretches, (i + 1) * len(finite) // stretches)
            kept.add(min(inside, key=lambda k: finite[k][2]))
            kept.add(max(inside, key=lambda k: finite[k][2]))
        finite = [finite[k] for k in sorted(kept)]
    if len(odd) > _MOST_ODD:
        odd = [odd[k * (len(odd) - 1) // (_MOST_ODD - 1)] for k in range(_MOST_ODD)]
    return Curve(tag, tuple(finite), tuple(odd), len(points))


def numbers(curves: Mapping[str, Sequence[Point]]) -> list[Numbers]:
    """A row for the table of each tag that has a point."""
    rows = []
    for tag in sorted(curves, key=natural):
        points = curves[tag]
        if points:
            finite = [point for point in points if math.isfinite(point[2])]
            low = min(finite, key=lambda point: point[2], default=None)
            high = max(finite, key=lambda point: point[2], default=None)
            rows.append(Numbers(tag, len(points), points[0], points[-1], low, high))
    return rows
