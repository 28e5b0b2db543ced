"""Checks that wait for the device without making the training thread wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Watches:
    """Checks of values that are still being computed, in the order of their steps.

    The training thread runs those of steps known to be finished; the thread that writes a checkpoint runs those of
    its step and earlier before it commits. Each check runs once, in whichever thread comes first.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[int, Any, Callable[[Any], None]]] = deque()
        self._lock = threading.RLock()

    def add(self, step: int, value: Any, check: Callable[[Any], None]) -> None:
        """Have ``check(value)`` called once step ``step`` is finished."""
        self._pending.append((step, value, check))

    def run_through(self, step: float) -> None:
        """Run the checks of all steps up to ``step``; waits for their values. What a check raises is passed on."""
        if not self._pending:
            return
        with self._lock:
            while self._pending and self._pending[0][0] <= step:
                _, value, check = self._pending.popleft()
                check(value)

    def clear(self) -> None:
        """Forget all checks: their steps have been rolled back."""
        with self._lock:
            self._pending.clear()
