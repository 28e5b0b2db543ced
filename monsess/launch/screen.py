"""The launcher's own standard output and error: a thread writes them, so that nobody waits for whoever reads them."""

from __future__ import annotations

import collections
import contextlib
import io
import itertools
import math
import os
import select
import threading
import time
from typing import TextIO

_TICK_SECS = 0.2
#: How long, at the end, somebody who does not read is waited for.
_DRAIN_SECS = 2.0
#: So many characters may wait to be read before `Screen.has_room` says no.
_AHEAD = 1 << 16
#: A pipe that has room at all takes so many bytes at once.
_PIECE = select.PIPE_BUF


class Screen:
    """Standard output and error, shared by threads; one whose reader is gone is given up.

    Whoever has a line written does not wait for that: a pipe that nobody reads, or a terminal after Ctrl-S, must not
    keep the launcher from ending processes. Lines come in the order in which they were given; only where one stream is
    not read and the other one leads elsewhere, they go on there.

    Args:
        out: Standard output.
        err: Standard error.
    """

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._streams = [_Stream(out), _Stream(err)]
        self._in_one_place = self._streams[0].leads_to_where(self._streams[1])
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._moved = 0.0  # when something was written last
        self._closed = False
        self._thread: threading.Thread | None = None

    def line(self, stream: int, text: str) -> None:
        """Have one line, or several, written to standard output (1) or error (2)."""
        with self._changed:
            if self._closed or self._streams[stream - 1].lost:
                return
            self._streams[stream - 1].add(next(self._numbers), text + "\n")
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="monsess-screen", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def note(self, text: str) -> None:
        """Have a line of the launcher's own, or several, written to standard error."""
        self.line(2, "\n".join(f"monsess: {line}" for line in text.split("\n")))

    def has_room(self, seconds: float) -> bool:
        """Whether little enough waits to be read; waits for that, so long at most."""
        with self._changed:
            return self._changed.wait_for(lambda: self._size() < _AHEAD, seconds)

    def close(self) -> None:
        """Wait until everything is written, as long as somebody reads, and take nothing more."""
        with self._changed:
            self._moved = time.monotonic()
            while self._size() and (left := self._moved + _DRAIN_SECS - time.monotonic()) > 0:
                self._changed.wait(left)
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(5 * _TICK_SECS)  # it may be in the middle of a write that does not end

    def _size(self) -> int:
        return sum(stream.size for stream in self._streams)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._size())
                if self._closed:
                    return
                waiting = sorted((one for one in self._streams if one.size), key=lambda one: one.number)
            for stream in waiting[:1] if self._in_one_place else waiting:
                # Of two that are not read, one is waited for.
                if stream.is_ready(0.0 if stream.stuck and stream is not waiting[-1] else _TICK_SECS):
                    self._write_some(stream)
                    break

    def _write_some(self, stream: _Stream) -> None:
        with self._changed:
            if self._closed:
                return
            stream.take(min(other.number for other in self._streams if other is not stream))
        stream.write()
        with self._changed:
            stream.forget_what_is_written()
            self._moved = time.monotonic()
            self._changed.notify_all()


class _Stream:
    """One of the two, and what waits to be written to it.

    Args:
        target: The stream.
    """

    def __init__(self, target: TextIO) -> None:
        self._target = target
        self._fd = _descriptor(target)
        self._lines: collections.deque[tuple[int, str]] = collections.deque()
        self._taken = (-1, "")
        self._rest = b""
        #: int: how many characters wait.
        self.size = 0
        #: bool: whether its reader is gone.
        self.lost = False
        #: bool: whether it had no room when it was looked at last.
        self.stuck = False

    @property
    def number(self) -> float:
        """That of the line to go on with; infinite where there is none."""
        if self._rest:
            return self._taken[0]
        return self._lines[0][0] if self._lines else math.inf

    def leads_to_where(self, other: _Stream) -> bool:
        """Whether both lead to the same terminal, pipe or file."""
        if self._fd is None or other._fd is None:
            return False
        with contextlib.suppress(OSError):
            return os.path.sameopenfile(self._fd, other._fd)
        return False

    def add(self, number: int, text: str) -> None:
        """Have more wait."""
        self._lines.append((number, text))
        self.size += len(text)

    def is_ready(self, seconds: float) -> bool:
        """Whether a write would not wait; waits for that, so long at most."""
        ready = True
        if self._fd is not None:
            with contextlib.suppress(OSError, ValueError):  # closed, or not to be asked about: the write will tell
                ready = bool(select.select([], [self._fd], [], seconds)[1])
        self.stuck = not ready
        return ready

    def take(self, before: float) -> None:
        """Take up what is to be written: lines one after the other, and none but the first after ``before``."""
        if self._rest:
            return
        number, text = self._lines.popleft()
        while self._lines and self._lines[0][0] < before and len(text) < _PIECE:
            text += self._lines.popleft()[1]
        self._taken = number, text

    def write(self) -> None:
        """Write that, or a part of it."""
        try:
            if self._fd is None:
                self._hand_over(self._taken[1])
                return
            if not self._rest:
                self._target.flush()  # what was there before
                self._rest = self._encoded(self._taken[1])
            self._rest = self._rest[os.write(self._fd, self._rest[:_PIECE]) :]
        except Exception:
            # Who only watched is no reason to end the training; what is buffered must not fail once more at exit.
            self.lost = True
            with contextlib.suppress(OSError, ValueError):
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self._target.fileno())
                os.close(nothing)

    def forget_what_is_written(self) -> None:
        """Count it no longer."""
        if self.lost:
            self._lines.clear()
            self._rest, self.size = b"", 0
        elif not self._rest:
            self.size -= len(self._taken[1])

    def _hand_over(self, text: str) -> None:
        try:
            self._target.write(text)
        except UnicodeEncodeError:
            self._target.write(text.encode("ascii", "backslashreplace").decode())
        self._target.flush()

    def _encoded(self, text: str) -> bytes:
        try:
            return text.encode(self._target.encoding, self._target.errors or "strict")
        except UnicodeEncodeError:
            return text.encode(self._target.encoding, "backslashreplace")


def _descriptor(target: TextIO) -> int | None:
    """That of a stream which is nothing but a file; what is behind another one is not known."""
    if not isinstance(target, io.TextIOWrapper) or not isinstance(
        getattr(target.buffer, "raw", target.buffer), io.FileIO
    ):
        return None
    with contextlib.suppress(OSError, ValueError):
        return target.fileno()
    return None
