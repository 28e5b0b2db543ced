"""What the processes of an attempt write: line by line onto the launcher's screen, byte by byte into files."""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import threading
import time
from typing import BinaryIO, NamedTuple

from monsess.launch.screen import Screen

_TICK_SECS = 0.2
#: An unfinished line is shown after this many seconds; a progress bar so often.
_PATIENCE_SECS = 1.0
_LONGEST_LINE = 1 << 16
_TAIL_LINES = 30
#: How long what still writes after the end of its process is listened to.
_DRAIN_SECS = 2.0
#: So long at most the news of the end of a process wait for its last lines.
_LAST_LINES_SECS = 0.5


class _Pipe:
    """One stream of one process."""

    def __init__(self, rank: int, stream: int, fd: int) -> None:
        self.rank = rank
        self.stream = stream
        self.fd = fd
        self.over = False  # nothing more comes
        self._pending = b""
        self._begun = time.monotonic()  # the line that is not finished

    def feed(self, data: bytes) -> list[bytes]:
        """Add what was read and return the lines that are whole now."""
        before = self._pending
        *lines, self._pending = (before + data).split(b"\n")
        if len(self._pending) > _LONGEST_LINE:
            lines.append(self._pending)
            self._pending = b""
        if lines or not before:
            self._begun = time.monotonic()
        return lines

    def overdue(self, at_the_end: bool = False) -> list[bytes]:
        """The line that is not finished, if it has waited for long enough."""
        if not self._pending or not (at_the_end or time.monotonic() - self._begun > _PATIENCE_SECS):
            return []
        line, self._pending = self._pending, b""
        return [line]


class _News(NamedTuple):
    """A note that is to come after the last lines of a process."""

    rank: int
    due: float
    text: str


class Output:
    """Reads what the processes of one attempt write, in a thread of its own.

    Args:
        screen: Where lines go, each with the number of its process in front.
        files: Per process a file for the bytes as they come, or nothing.
    """

    def __init__(self, screen: Screen, files: dict[int, BinaryIO]) -> None:
        self._screen = screen
        self._files = files
        self._pipes: list[_Pipe] = []
        self._tails: dict[int, collections.deque[str]] = {}
        self._news: collections.deque[_News] = collections.deque()
        self._finishing: float | None = None
        self._thread = threading.Thread(target=self._read, name="monsess-output", daemon=True)

    def add(self, rank: int, out: int, err: int) -> None:
        """Take over two descriptors to read from; before `start`."""
        self._pipes += [_Pipe(rank, 1, out), _Pipe(rank, 2, err)]
        self._tails[rank] = collections.deque(maxlen=_TAIL_LINES)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def note_after(self, rank: int, text: str) -> None:
        """Have a note shown after the last lines of a process, which has ended; does not wait for that."""
        self._news.append(_News(rank, time.monotonic() + _LAST_LINES_SECS, text))
        if not self._thread.is_alive():
            self._tell_news()

    def finish(self) -> None:
        """Read what there still is, and close everything; for after the end of the processes."""
        self._finishing = time.monotonic() + _DRAIN_SECS
        if self._thread.ident is not None:
            self._thread.join()
        self._tell_news()
        for pipe in self._pipes:
            os.close(pipe.fd)
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def tail(self, rank: int) -> list[str]:
        """The last lines of one process."""
        return list(self._tails.get(rank, ()))

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            for pipe in self._pipes:
                selector.register(pipe.fd, selectors.EVENT_READ, pipe)
            while selector.get_map():
                ready = selector.select(_TICK_SECS)
                for key, _ in ready:
                    if data := os.read(key.fd, 1 << 16):
                        self._keep(key.data.rank, data)
                        self._show(key.data, key.data.feed(data))
                    else:
                        selector.unregister(key.fd)
                        key.data.over = True
                for pipe in self._pipes:
                    self._show(pipe, pipe.overdue(pipe.over))
                self._tell_news()
                if self._finishing is not None and (not ready or time.monotonic() > self._finishing):
                    break
        for pipe in self._pipes:
            pipe.over = True
            self._show(pipe, pipe.overdue(at_the_end=True))

    def _tell_news(self) -> None:
        for news in list(self._news):
            if time.monotonic() > news.due or all(pipe.over for pipe in self._pipes if pipe.rank == news.rank):
                self._news.remove(news)
                self._screen.note(news.text)

    def _keep(self, rank: int, data: bytes) -> None:
        if (file := self._files.get(rank)) is None:
            return
        try:
            file.write(data)
        except OSError as error:
            del self._files[rank]
            self._screen.note(f"the log of process {rank} is given up: {error}")

    def _show(self, pipe: _Pipe, lines: list[bytes]) -> None:
        for line in lines:
            # What a terminal would have left standing of a line that was written over.
            text = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "backslashreplace")
            self._tails[pipe.rank].append(text)
            # Who writes more than is read has to wait, as without a launcher; at the end it is little enough.
            while self._finishing is None and not self._screen.has_room(_TICK_SECS):
                self._tell_news()
            self._screen.line(pipe.stream, f"[{pipe.rank}] {text}")
