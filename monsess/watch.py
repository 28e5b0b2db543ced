"""Checks that wait for the device without making the training thread wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Watches:
    """Checks of values that are still being computed, in the order of their steps.

    The training thread runs those of steps known to be finished; the thread that writes a checkpoint runs those of
    its step and earlier before it commits. Each check runs once, in whichever thread comes first, and the other one
    waits for it. What failed stays failed, so that a save already on its way does not commit a step after the
    training thread has found it bad.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[int, Any, Callable[[Any], None] | None]] = deque()
        self._standing: tuple[Callable[[int, Any], None], ...] = ()
        self._failed: tuple[int, Exception] | None = None
        self._lock = threading.RLock()

    def add(self, step: int, value: Any, check: Callable[[Any], None]) -> None:
        """Have ``check(value)`` called once step ``step`` is finished."""
        self._pending.append((step, value, check))

    def add_standing(self, check: Callable[[int, Any], None]) -> bool:
        """Have ``check(step, count)`` called for each run once it is finished, until `clear`; whether that is new."""
        if check in self._standing:
            return False
        self._standing += (check,)
        return True

    @property
    def each_run(self) -> bool:
        """Whether there are standing checks, so that `ran` is to be called."""
        return bool(self._standing)

    def ran(self, step: int, count: Any) -> None:
        """Have the standing checks called once step ``step`` is finished: they cost a run hardly more than this."""
        self._pending.append((step, count, None))

    def run_through(self, step: float) -> None:
        """Run the checks of all steps up to ``step``; waits for their values.

        Raises:
            Exception: What the first check that failed raised, also if that was in an earlier call.
        """
        if self._has_nothing(step):
            return
        with self._lock:
            self._raise_failure(step)
            while self._pending and self._pending[0][0] <= step:
                at, value, check = self._pending[0]
                try:
                    if check is not None:
                        check(value)
                    else:
                        for standing in self._standing:
                            standing(at, value)
                except Exception as error:
                    self._failed = (at, error)
                    self._pending.popleft()
                    raise
                self._pending.popleft()  # only now: until there is a verdict the other thread has to wait

    def clear(self) -> None:
        """Forget all checks and what they found: their steps have been rolled back."""
        with self._lock:
            self._pending.clear()
            self._standing = ()
            self._failed = None

    def _has_nothing(self, step: float) -> bool:
        """Whether `run_through` has nothing to do; without the lock, which a check that waits may hold for long."""
        try:
            waiting = self._pending[0][0] <= step
        except IndexError:
            waiting = False
        # Looked at second: a check that fails is noted as failed before it leaves the queue.
        return not waiting and (self._failed is None or self._failed[0] > step)

    def _raise_failure(self, step: float) -> None:
        if self._failed is not None and self._failed[0] <= step:
            raise self._failed[1]
