"""SIGTERM and Ctrl-C become the wish for a clean stop: a common last step, its checkpoint, a telling exit code."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from monsess.log import logger

#: What a process ends with that was stopped by a signal: 128 + its number, as a shell shows it.
EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}

_sessions: weakref.WeakSet[Signals] = weakref.WeakSet()


class Signals:
    """The signal handlers of one session, from `install` to `restore`.

    They can be installed in the main thread only; elsewhere `request_preemption` is the way in. A thread reads what
    Python's signal module writes at once, since the handler itself has to wait until the main thread returns from XLA.

    Args:
        stop: A method; called, from any thread, with the signal that asks for a clean stop, once.
    """

    def __init__(self, stop: Callable[[int], None]) -> None:
        self._stop = weakref.WeakMethod(stop)  # a handler must not keep a session alive that nobody holds
        self._lock = threading.RLock()  # a handler may run while its own thread holds it
        self._received: int | None = None
        self._interrupts = 0
        self._previous: dict[int, Any] = {}
        self._wakeup: tuple[socket.socket, socket.socket] | None = None
        self._previous_wakeup = -1

    def install(self) -> None:
        """Take over SIGTERM and SIGINT, where that is possible."""
        _sessions.add(self)
        if threading.current_thread() is not threading.main_thread():
            return
        for number in EXIT_CODES:
            self._previous[number] = signal.signal(number, self._handle)
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._wakeup = (reader, writer)
        self._previous_wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._read, args=(reader,), name="monsess-signals", daemon=True).start()

    def restore(self) -> None:
        """Give the handlers back that were there before."""
        _sessions.discard(self)
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._previous_wakeup)
            _, writer = self._wakeup
            writer.close()  # the thread reads the end and closes its side
            self._wakeup = None
        for number, handler in self._previous.items():
            # A handler that was not set from Python cannot be put back from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def received(self, number: int) -> None:
        """A signal has come, or somebody says so; only the first one counts."""
        with self._lock:
            if self._received is not None:
                return
            self._received = number
        stop = self._stop()
        if stop is not None:
            logger.warning("%s: stopping cleanly after the current step", signal.Signals(number).name)
            stop(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._stop() is None:  # the session was never closed, and is gone
            self.restore()
            signal.raise_signal(number)
            return
        self._interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self._interrupts > 1:
            raise KeyboardInterrupt  # somebody does not want to wait for the clean end
        self.received(number)

    def _read(self, reader: socket.socket) -> None:
        with contextlib.closing(reader):
            while data := reader.recv(64):
                for number in data:
                    if number in EXIT_CODES:
                        self.received(number)


def request_preemption() -> None:
    """Do what SIGTERM does: all open sessions of this process stop cleanly after a common step.

    For launchers that learn of a preemption in another way, and for sessions outside the main thread, which no signal
    reaches. It may be called from any thread; with several processes one call in one of them is enough.

    Example:
        >>> import monsess as ms
        >>> ms.request_preemption()
    """
    for one in list(_sessions):
        one.received(signal.SIGTERM)
