"""Which checkpoints stay."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, final

from monsess.checkpoint.commit import CommitRecord


class Retention(Protocol):
    """A policy that says which committed steps of a run to keep; policies are combined with ``|``.

    Whatever it says, the newest step, the one restored from, pinned and damaged ones, and those of other runs stay.

    Example:
        >>> import monsess as ms
        >>> class KeepEven(ms.Retention):
        ...     def keep(self, records):
        ...         return {record.step for record in records if record.step % 2 == 0}
        >>> policy = ms.KeepLast(3) | KeepEven()
    """

    def keep(self, records: Sequence[CommitRecord]) -> Collection[int]:
        """Choose.

        Args:
            records: The commit records of the run's committed steps, in order of step.

        Returns:
            The steps to keep.
        """
        ...

    def __or__(self, other: Retention) -> Retention:
        """A policy that keeps what either of the two keeps."""
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
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"KeepLast needs a whole number of checkpoints from 1 on, found {n!r}.")
        self.n = n

    def keep(self, records: Sequence[CommitRecord]) -> Collection[int]:
        """The steps of the last ``n`` records."""
        return {record.step for record in records[-self.n :]}

    def __repr__(self) -> str:
        return f"KeepLast({self.n})"


@final
class _Either(Retention):
    def __init__(self, one: Retention, other: Retention) -> None:
        self._both = (one, other)

    def keep(self, records: Sequence[CommitRecord]) -> Collection[int]:
        return set().union(*(policy.keep(records) for policy in self._both))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self._both))
