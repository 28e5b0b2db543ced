"""The one clock that monsess reads, so that tests can replace it (`monsess.testing.FakeClock`)."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """What monsess asks of a clock: two readings and a way to wait."""

    def monotonic(self) -> float:
        """Seconds that never go back; the base of every ``*_secs`` schedule."""
        ...

    def time(self) -> float:
        """Seconds since the epoch; only ever shown to people."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait for ``seconds``."""
        ...

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """Wait until ``event`` is set or ``seconds`` have passed; return whether it is set."""
        ...


class SystemClock:
    """The machine's own clock."""

    monotonic = staticmethod(time.monotonic)

    def sleep(self, seconds: float) -> None:
        """Wait for ``seconds``."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """Wait until ``event`` is set or ``seconds`` have passed; return whether it is set."""
        return event.wait(seconds)

    time = staticmethod(time.time)  # last: the name hides the module from what follows


_current: Clock = SystemClock()


def monotonic() -> float:
    """Seconds of the current clock that never go back."""
    return _current.monotonic()


def wall() -> float:
    """Seconds since the epoch by the current clock."""
    return _current.time()


def sleep(seconds: float) -> None:
    """Wait for ``seconds`` of the current clock."""
    _current.sleep(seconds)


def wait(event: threading.Event, seconds: float | None) -> bool:
    """Wait until ``event`` is set or ``seconds`` of the current clock have passed."""
    return _current.wait(event, seconds)


def install(clock: Clock) -> Clock:
    """Make ``clock`` the current one and return the one it replaces."""
    global _current
    previous, _current = _current, clock
    return previous
