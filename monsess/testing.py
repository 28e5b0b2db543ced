"""What monsess's own tests use, public: emulated devices, a clock that moves when told to, a store that fails."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

from monsess import clock as _clock
from monsess import emulation
from monsess.errors import ClusterError
from monsess.faulty.faults import Faults as Faults
from monsess.faulty.operations import Operation as Operation

if TYPE_CHECKING:
    from monsess.faulty.filesystem import FaultyFileSystem as FaultyFileSystem

__all__ = ["FakeClock", "Faults", "FaultyFileSystem", "Operation", "emulate_devices"]


def __getattr__(name: str) -> Any:
    if name == "FaultyFileSystem":  # when it is asked for: fsspec is not imported along with monsess
        from monsess.faulty.filesystem import FaultyFileSystem

        return FaultyFileSystem
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def emulate_devices(count: int) -> None:
    """Make JAX show ``count`` CPU devices in this process; call it before JAX is first used.

    It sizes the thread pool so that collectives of all devices can meet on a machine with few cores (jax 0.10 dies in
    a rendezvous otherwise) and gives them minutes rather than 40 seconds to do so. Environment variables are set, so
    that child processes inherit the thread pool.

    Args:
        count: Number of devices, at least 1.

    Raises:
        ValueError: ``count`` is not a positive integer.
        ClusterError: JAX has already been used in this process, so that its devices are fixed.

    Example:
        >>> import monsess as ms
        >>> ms.testing.emulate_devices(0)
        Traceback (most recent call last):
            ...
        ValueError: emulate_devices needs a positive integer, found 0.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"emulate_devices needs a positive integer, found {count!r}.")
    import jax

    found = emulation.environment(count, os.environ)
    found["XLA_FLAGS"] = emulation.flags(os.environ.get("XLA_FLAGS", ""))  # children choose their own number
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise ClusterError(
            f"emulate_devices({count}) comes too late: JAX has already been used in this process and its devices are "
            "fixed. Call it at the top of the script, before the first array is made."
        ) from error
    jax.config.update("jax_platforms", "cpu")
    os.environ.update(found)


class FakeClock:
    """Replaces monsess's clock inside a ``with`` block; time stands still until `advance` or a sleep moves it.

    Both readings move together. Waits of monsess's own schedules return at once and move the clock by what they
    would have waited.

    Args:
        start: First reading in seconds.

    Example:
        >>> import monsess as ms
        >>> with ms.testing.FakeClock(start=10.0) as clock:
        ...     clock.advance(2.5)
        ...     clock.monotonic()
        12.5
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = float(start)
        self._lock = threading.Lock()
        self._previous: list[_clock.Clock] = []
        #: list of float: every sleep that was asked for, in seconds.
        self.slept: list[float] = []

    def monotonic(self) -> float:
        """The current reading in seconds."""
        with self._lock:
            return self._now

    time = monotonic

    def advance(self, seconds: float) -> None:
        """Move the clock forward by ``seconds`` (>= 0)."""
        if seconds < 0:
            raise ValueError(f"A clock cannot be moved back: advance({seconds}).")
        with self._lock:
            self._now += seconds

    def sleep(self, seconds: float) -> None:
        """Return at once, having moved the clock by ``seconds``."""
        self.slept.append(seconds)
        self.advance(max(0.0, seconds))

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """Return whether ``event`` is set; if it is not, move the clock by ``seconds``."""
        if not event.is_set() and seconds is not None:
            self.sleep(seconds)
        return event.is_set()

    def __enter__(self) -> FakeClock:
        self._previous.append(_clock.install(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _clock.install(self._previous.pop())
