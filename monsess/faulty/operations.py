"""One operation of a faulty filesystem: its entry in the log, and what it is to meet on its way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a `FaultyFileSystem`, as `Faults.log` tells it.

    Args:
        number: 1 for the first operation of all kinds, in the order in which they began.
        kind: ``"list"``, ``"info"``, ``"read"``, ``"write"``, ``"delete"``, ``"rename"``, ``"copy"`` or ``"mkdir"``.
        path: Which object or directory, the store's name first; of a copy or rename where from.
        outcome: ``"running"``, ``"done"``, ``"lost"`` (it answered and did nothing), or the name of the error's class.
        instance: 1 for the first filesystem object that got this `Faults`, in the order in which they were made.

    Example:
        >>> import monsess as ms
        >>> faults = ms.testing.Faults()
        >>> store = ms.testing.FaultyFileSystem(faults=faults)
        >>> store.pipe_file("example/a", b"1")
        >>> faults.log
        [Operation(number=1, kind='write', path='example/a', outcome='done', instance=1)]
    """

    number: int
    kind: str
    path: str
    outcome: str
    instance: int


@dataclasses.dataclass
class Rule:
    """The ``n``-th to ``n + times - 1``-th operation of a kind meet an effect."""

    kind: str
    path: str | None
    n: int
    times: int | None
    when: str
    effect: Callable[[], None] | None = None
    keep: Callable[[bytes], bytes] | None = None  # what of the bytes arrives
    short: bool = False
    lose: bool = False
    seen: int = 0

    def meets(self, kind: str, path: str) -> bool:
        """Count an operation, and say whether it is one that is hit."""
        if self.kind not in ("any", kind) or (self.path is not None and self.path not in path):
            return False
        self.seen += 1
        return self.seen >= self.n and (self.times is None or self.seen < self.n + self.times)


class Running:
    """An operation that was begun: its entry in the log and what it is to meet."""

    def __init__(self, operation: Operation, rules: list[Rule], end: Callable[[int, str], None]) -> None:
        self._operation = operation
        self._rules = rules
        self._end = end
        #: bool: it is to answer without having done anything.
        self.lost = any(rule.lose for rule in rules)
        #: bool: it is to take fewer bytes than it is given, and say so.
        self.short = any(rule.short for rule in rules)
        #: bool: something happens when half of it is done.
        self.has_middle = any(rule.when == "middle" for rule in rules)

    def meet(self, when: str) -> None:
        """Apply what is to happen at this point; what it raises is the outcome."""
        for rule in self._rules:
            if rule.when == when and rule.effect is not None:
                try:
                    rule.effect()
                except BaseException as error:
                    self.failed(error)
                    raise

    def arriving(self, data: bytes) -> bytes:
        """What of the bytes arrives at the other end."""
        for rule in self._rules:
            if rule.keep is not None:
                data = rule.keep(data)
        return data

    @property
    def changes_bytes(self) -> bool:
        """Whether not all bytes arrive as they are."""
        return any(rule.keep is not None for rule in self._rules)

    def failed(self, error: BaseException) -> None:
        """Note that it ended with an error."""
        self._end(self._operation.number, type(error).__name__)

    def done(self) -> None:
        """Note that it ended; what is to happen after it happens now."""
        self._end(self._operation.number, "lost" if self.lost else "done")
        self.meet("after")
