"""Bytes on their way into a directory: appended to a file of the operating system, sealed in parts anywhere else.

Each byte is written once. What could not be written is kept, within bounds, and tried again.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable

from monsess.errors import StorageError
from monsess.log import logger
from monsess.storage import Storage

_MOST_BYTES = 64 << 20


class Stream:
    """One sequence of bytes; used by one thread.

    Args:
        storage: The directory.
        name: Gives the name of the file (for None), or of the sealed part of that number.
        header: What the file of this attempt, or each part, begins with.
        lines: Whether the bytes are lines: if the file that is appended to ends within one, a new one is begun.
    """

    def __init__(self, storage: Storage, name: Callable[[int | None], str], header: bytes = b"", lines: bool = False):
        self._storage = storage
        self._name = name
        self._header = header
        self._lines = lines
        self._pending: deque[bytes] = deque()
        self._part = b""  # the part that is being written
        self._number = 0
        self._file: int | None = None
        self._begun = False
        self._end_of_line = True
        #: int: bytes that wait to be written.
        self.size = 0
        #: int: how many pieces had to be given up, because too much waited.
        self.lost = 0

    def add(self, data: bytes, needed: bool = False) -> None:
        """Have ``data`` written by the next `flush`; where too much waits already, it is given up.

        Args:
            data: One piece.
            needed: It is kept all the same: what others mean depends on it.
        """
        if not data:
            return
        if self.size > _MOST_BYTES and not needed:
            self.lost += 1
            return
        self._pending.append(data)
        self.size += len(data)

    def flush(self, durable: bool = False) -> None:
        """Write what waits.

        Args:
            durable: A local file is forced to disk.

        Raises:
            StorageError: It could not be written; it still waits.
        """
        if self._storage.local_path is None:
            self._seal()
            return
        try:
            self._append(self._storage.local_path, durable)
        except OSError as error:
            raise StorageError(f"Could not write {self._name(None)!r} in {self._storage.shown} ({error})") from error

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _seal(self) -> None:
        while self.size:
            # A write that was given up may reach the store after the next try: it has to hold the same bytes.
            if not self._part:
                self._part = b"".join(self._pending)
                self._pending.clear()
            self._storage.write(self._name(self._number), self._header + self._part)
            self._number += 1
            self.size -= len(self._part)
            self._part = b""

    def _append(self, folder: str, durable: bool) -> None:
        if self._pending:
            file = self._open(folder)
            if not self._begun:
                self._put(file, self._header)
                self._begun = True
            while self._pending:
                if not self._end_of_line:
                    self._put(file, b"\n")
                    self._end_of_line = True
                self._put(file, self._pending[0])
                self.size -= len(self._pending.popleft())
        if durable and self._file is not None:
            os.fsync(self._file)

    def _open(self, folder: str) -> int:
        if self._file is None:
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, self._name(None))
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o666)
            self._file = file
            size = os.fstat(file).st_size
            if self._lines and size:
                os.lseek(file, -1, os.SEEK_END)
                self._end_of_line = os.read(file, 1) == b"\n"
        return self._file

    def _put(self, file: int, data: bytes) -> None:
        """Append ``data`` in one call, or, where the disk is full in the middle of it, take it away again."""
        before = os.fstat(file).st_size
        written = os.write(file, data)
        if written == len(data):
            return
        try:
            os.ftruncate(file, before)
        except OSError as error:
            self._end_of_line = not self._lines
            logger.debug("half a record stays in %s: %s", self._storage.shown, error)
        raise OSError(errno.ENOSPC, "only a part of it was written")
