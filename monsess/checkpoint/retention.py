"""Which checkpoints stay."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Sequence
from typing import Any, Literal, Protocol, final

from monsess.checkpoint.commit import StepRecord
from monsess.timer import check_steps

_HOUR_SECS = 3600.0


class Retention(Protocol):
    """A policy that says which committed steps of a run to keep; policies are combined with ``|``.

    A policy is asked after each commit, with everything that is there, and remembers nothing: a run that was stopped
    and started again keeps the same steps. Whatever it says, the newest step, the one restored from, pinned and damaged
    ones, and those of other runs stay.

    Example:
        >>> import monsess as ms
        >>> class KeepEven(ms.Retention):
        ...     def keep(self, records):
        ...         return {record.step for record in records if record.step % 2 == 0}
        >>> policy = ms.KeepLast(3) | KeepEven()
    """

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the outputs that `keep` looks up in `StepRecord.metrics`; the session stores them at each save."""
        return ()

    def keep(self, records: Sequence[StepRecord]) -> Collection[int]:
        """Choose.

        Args:
            records: Those of the run's committed steps, in order of step.

        Returns:
            The steps to keep.
        """
        ...

    def __or__(self, other: Retention) -> Retention:
        """A policy that keeps what either of the two keeps."""
        if isinstance(other, type) or not callable(getattr(other, "keep", None)):
            return NotImplemented
        return _Either(self, other)


@final
class KeepLast(Retention):
    """Keep the last ``n`` steps.

    Args:
        n: How many, at least 1.

    Raises:
        ValueError: ``n`` is not a whole number from 1 on.

    Example:
        >>> import monsess as ms
        >>> ms.KeepLast(5)
        KeepLast(5)
    """

    def __init__(self, n: int = 5) -> None:
        self.n = _count("KeepLast", n)

    def keep(self, records: Sequence[StepRecord]) -> Collection[int]:
        """The steps of the last ``n`` records."""
        return {record.step for record in records[-self.n :]}

    def __repr__(self) -> str:
        return f"KeepLast({self.n})"


@final
class KeepBest(Retention):
    """Keep the ``n`` steps with the best value of a metric.

    A step that has no such value, or one that is NaN or infinite, has no rank: this policy does not keep it, and it
    displaces none that has one. Of steps with equal values the earlier one is the better, so that a value that stays
    the same replaces nothing. The newest step stays in any case, whatever its rank.

    Args:
        n: How many, at least 1.
        metric: Which output of the step, by its name or its path such as ``"losses/total"``, or ``"eval/<name>"`` for
            a value of an evaluation.
        mode: ``"min"``: the lowest value is the best; ``"max"``: the highest.

    Raises:
        ValueError: ``n`` is not a whole number from 1 on, ``metric`` no name, or ``mode`` none of the two.

    Example:
        >>> import monsess as ms
        >>> policy = ms.KeepLast(2) | ms.KeepBest(3, "loss") | ms.KeepBest(1, "accuracy", mode="max")
        >>> policy.metrics
        ('loss', 'accuracy')
    """

    def __init__(self, n: int, metric: str, mode: Literal["min", "max"] = "min") -> None:
        self.n = _count("KeepBest", n)
        if not isinstance(metric, str) or not metric:
            raise ValueError(f'KeepBest needs the name of an output, such as "loss", found {metric!r}.')
        if mode not in ("min", "max"):
            raise ValueError(f'mode of KeepBest must be "min" or "max", found {mode!r}.')
        self.metric = metric
        self.mode = mode

    @property
    def metrics(self) -> tuple[str, ...]:
        """The one metric."""
        return (self.metric,)

    def keep(self, records: Sequence[StepRecord]) -> Collection[int]:
        """The steps of the ``n`` best records."""
        ranked = [(value, record.step) for record in records if (value := self._value(record)) is not None]
        return {step for _, step in sorted(ranked)[: self.n]}

    def _value(self, record: StepRecord) -> float | None:
        """The smaller, the better; None without a rank."""
        value = record.metrics.get(self.metric)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
        return float(value) if self.mode == "min" else -float(value)

    def __repr__(self) -> str:
        mode = "" if self.mode == "min" else f", mode={self.mode!r}"
        return f"KeepBest({self.n}, {self.metric!r}{mode})"


@final
class KeepEvery(Retention):
    """Keep one step of each stretch of ``steps`` steps, or of ``hours`` hours, for good.

    Of each stretch the first step is kept that was saved in it. ``steps=1000``: the first at or after 1000, at or after
    2000, and so on. ``hours=6``: the first saved 6 hours or more after the run began, 12 hours or more, and so on. The
    beginning of a run is stored with its checkpoints, so it stays the same however often the run is started again.

    Hours are told by the clock of the machine that saved, as it was at the time. If that clock is put forward, the next
    step saved counts as the first of its stretch and is kept. If it is put back, nothing more is kept by this policy
    until the clock reaches a stretch that has no step yet. Neither takes away what is kept already.

    Args:
        steps: Length of a stretch in steps, at least 1.
        hours: Length of a stretch in hours, above 0.

    Raises:
        ValueError: Neither or both were given, or what was given is not such a number.

    Example:
        >>> import monsess as ms
        >>> ms.KeepLast(5) | ms.KeepEvery(hours=6)
        KeepLast(5) | KeepEvery(hours=6)
    """

    def __init__(self, *, steps: int | None = None, hours: float | None = None) -> None:
        if (steps is None) == (hours is None):
            raise ValueError(f"KeepEvery needs either steps= or hours=, found steps={steps!r} and hours={hours!r}.")
        self.steps = None if steps is None else check_steps("steps", steps)
        self.hours = None if hours is None else _check_hours(hours)

    def keep(self, records: Sequence[StepRecord]) -> Collection[int]:
        """The first step of each stretch after the first."""
        first: dict[int, int] = {}
        for record in records:
            first.setdefault(self._stretch(record), record.step)
        return {step for stretch, step in first.items() if stretch > 0}

    def _stretch(self, record: StepRecord) -> int:
        if self.steps is not None:
            return record.step // self.steps
        assert self.hours is not None
        # A set of stretches seen, not the highest of them: one step from a clock years ahead would end all keeping.
        return math.floor((record.time - record.started) / (self.hours * _HOUR_SECS))

    def __repr__(self) -> str:
        return f"KeepEvery(steps={self.steps})" if self.steps is not None else f"KeepEvery(hours={self.hours:g})"


@final
class _Either(Retention):
    def __init__(self, one: Retention, other: Retention) -> None:
        self._both = (one, other)

    @property
    def metrics(self) -> tuple[str, ...]:
        names = [name for policy in self._both for name in getattr(policy, "metrics", ())]
        return tuple(dict.fromkeys(names))

    def keep(self, records: Sequence[StepRecord]) -> Collection[int]:
        return set().union(*(policy.keep(records) for policy in self._both))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self._both))


def _count(policy: str, n: Any) -> int:
    try:
        return check_steps("n", n)
    except ValueError:
        raise ValueError(f"{policy} needs a whole number of checkpoints from 1 on, found {n!r}.") from None


def _check_hours(hours: Any) -> float:
    real = isinstance(hours, numbers.Real) and not isinstance(hours, bool)
    if not real or not math.isfinite(hours) or hours <= 0:
        raise ValueError(f"invalid hours={hours!r}: expected a finite number of hours, above 0.")
    return float(hours)
