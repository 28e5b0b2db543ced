"""SIGTERM and Ctrl-C become the wish for a clean stop: a common last step, its checkpoint, a telling exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from monsess.log import logger

#: What a process ends with that was stopped by a signal: 128 + its number, as a shell shows it.
EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


class Signals:
    """What the signals ask of one session, from `install` to `restore`.

    Handlers can be installed in the main thread only; while only other threads have sessions, `request_preemption` is
    the way in.

    Args:
        stop: A method; called, from any thread, with the first signal that asks for a clean stop, twice perhaps.
    """

    def __init__(self, stop: Callable[[int], None]) -> None:
        self._stop = weakref.WeakMethod(stop)  # a handler must not keep a session alive that nobody holds
        self._lock = threading.RLock()  # a handler may run while its own thread holds it
        self._received: int | None = None
        self._stopping = False
        self._told = False
        self.holds_handlers = False

    @property
    def is_open(self) -> bool:
        """Whether its session still exists."""
        return self._stop() is not None

    def install(self) -> None:
        """Take over SIGTERM and SIGINT, where that is possible."""
        _sessions[id(self)] = self
        if threading.current_thread() is threading.main_thread():
            self.holds_handlers = True
            _handlers.install()

    def restore(self) -> None:
        """Give the handlers back that were there before, unless another session needs them."""
        _sessions.pop(id(self), None)
        if not any(one.holds_handlers for one in _open_sessions()):
            _handlers.restore()

    def received(self, number: int) -> None:
        """A signal has come, or somebody says so; only the first one counts."""
        with self._lock:
            if self._received is None:
                self._received = number
        stop = self._stop()
        if stop is not None and not self._stopping:
            # Another thread may be about to do so, and wait for a lock of whoever this handler has interrupted.
            stop(self._received)
        self._stopping = True

    def is_news(self) -> bool:
        """Whether people have not been told yet that it stops; they are told once."""
        with self._lock:
            told, self._told = self._told, True
        return not told


# The lists that it gives are made at once: a handler, and other threads, look at it in the middle of a change.
_sessions: weakref.WeakValueDictionary[int, Signals] = weakref.WeakValueDictionary()


def _open_sessions() -> list[Signals]:
    found = [ref() for ref in _sessions.valuerefs()]
    return [one for one in found if one is not None and one.is_open]


def _stop(sessions: Sequence[Signals], number: int) -> None:
    """Ask sessions for a clean stop; not from a handler, which may have interrupted a write to the log."""
    for one in sessions:
        one.received(number)
    if [one for one in sessions if one.is_news()]:
        logger.warning("%s: stopping cleanly after the current step", signal.Signals(number).name)


class _Handlers:
    """The handlers of this process, for all its sessions: installed with the first one, given back with the last one.

    A thread reads what Python's signal module writes at once, since a handler itself has to wait until the main thread
    returns from XLA.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._wakeup: tuple[socket.socket, socket.socket] | None = None
        self._previous_wakeup = -1
        self._interrupts = 0
        self._forking = threading.local()

    def install(self) -> None:
        if self._wakeup is not None:
            return
        self._interrupts = 0
        for number in EXIT_CODES:
            if signal.getsignal(number) != signal.SIG_IGN:  # a job in the background of a shell ignores Ctrl-C
                self._previous[number] = signal.signal(number, self._handle)
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._wakeup = (reader, writer)
        self._previous_wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_read, args=(reader,), name="monsess-signals", daemon=True).start()

    def hears(self, reader: socket.socket) -> bool:
        """Whether what comes from ``reader`` is meant for the sessions of today."""
        wakeup = self._wakeup
        return wakeup is not None and wakeup[0] is reader

    def restore(self) -> None:
        """Only the main thread can; after any other one the next signal finds no session, and then does it."""
        if self._wakeup is None or threading.current_thread() is not threading.main_thread():
            return
        try:
            signal.set_wakeup_fd(self._previous_wakeup)
        except (OSError, ValueError):  # whoever had it has closed it meanwhile
            signal.set_wakeup_fd(-1)
        _, writer = self._wakeup
        self._wakeup = None
        writer.close()  # the thread reads the end and closes its side
        self._put_back()

    def _put_back(self) -> None:
        for number, handler in self._previous.items():
            # A handler that was not set from Python cannot be put back from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        sessions = _open_sessions()
        if not sessions:  # the last one was never closed, and is gone
            self.restore()
            signal.raise_signal(number)
            return
        self._interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self._interrupts > 1:
            raise KeyboardInterrupt  # somebody does not want to wait for the clean end
        for one in sessions:
            one.received(number)

    def before_fork(self) -> None:
        """A signal to the child must not reach the thread of this process through the descriptor that both have."""
        if self._wakeup is not None:
            self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_CODES)

    def after_fork_in_parent(self) -> None:
        mask = self._forking.__dict__.pop("mask", None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def after_fork_in_child(self) -> None:
        """A worker of whatever kind has no session, and ends as it would have without one."""
        _sessions.clear()
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            for end in self._wakeup:
                end.close()
            self._wakeup = None
            self._put_back()
        self.after_fork_in_parent()


def _read(reader: socket.socket) -> None:
    with contextlib.closing(reader):
        while data := reader.recv(64):
            for number in data:
                sessions = _open_sessions()  # before the question: one that begins after it has nothing to do with it
                if number in EXIT_CODES and _handlers.hears(reader):
                    _stop(sessions, number)


_handlers = _Handlers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_handlers.before_fork,
        after_in_parent=_handlers.after_fork_in_parent,
        after_in_child=_handlers.after_fork_in_child,
    )


def request_preemption() -> None:
    """Do what SIGTERM does: all open sessions of this process stop cleanly after a common step.

    For launchers that learn of a preemption in another way, and for sessions outside the main thread, which no signal
    reaches unless the main thread has one too. It may be called from any thread; with several processes one call in one
    of them is enough.

    Example:
        >>> import monsess as ms
        >>> ms.request_preemption()
    """
    _stop(_open_sessions(), signal.SIGTERM)
