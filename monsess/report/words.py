"""Numbers, moments and durations as a page and a live view say them."""

from __future__ import annotations

import math
from datetime import UTC, datetime


def number_text(value: float) -> str:
    """A value with six figures."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.6g}"


def whole_text(value: int) -> str:
    """A whole number with its thousands apart."""
    return f"{value:,}"


def moment_text(seconds: float) -> str:
    """A moment in UTC."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return repr(seconds)


def duration_text(seconds: float) -> str:
    """How long something took, in at most two units.

    Example:
        >>> [duration_text(s) for s in (0.0123, 1.234, 42.1, 200, 7500, 200_000)]
        ['12 ms', '1.23 s', '42.1 s', '3 min 20 s', '2 h 5 min', '2 d 8 h']
    """
    if not math.isfinite(seconds):
        return f"{number_text(seconds)} s"
    if seconds < 0.9995:
        return "<1 ms" if 0 < seconds < 0.001 else f"{seconds * 1000:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    for big, small, length, unit in ((60, 1, "min", "s"), (3600, 60, "h", "min"), (86400, 3600, "d", "h")):
        limit = {60: 3600, 3600: 86400}.get(big, math.inf)
        total = round(seconds / small) * small
        if total < limit:
            rest = total % big // small
            return f"{total // big} {length} {rest:.0f} {unit}" if rest else f"{total // big} {length}"
    raise AssertionError("unreachable")


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 step``, ``3 steps``."""
    return f"{whole_text(number)} {one if number == 1 else many or f'{one}s'}"
