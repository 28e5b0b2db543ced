"""Objects of a faulty filesystem while they are read or written."""

from __future__ import annotations

import contextlib
import errno
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from monsess.faulty.operations import Running
from monsess.faulty.shelves import absent, parent

if TYPE_CHECKING:
    from monsess.faulty.filesystem import FaultyFileSystem


class Target:
    """The object that a write or a copy makes."""

    def __init__(self, filesystem: FaultyFileSystem, path: str, mode: str) -> None:
        faults = self._faults = filesystem.faults
        self._shelf, self._path = filesystem._at(path)
        self.atomic = faults.atomic
        self.append_to = mode == "ab"
        self._new = (mode == "xb" and faults.exclusive_create) or not (faults.overwrite or self.append_to)
        self._before = self._shelf.size(self._path)
        if self._new and self._before is not None:
            raise FileExistsError(errno.EEXIST, "exists already", self._path)
        if self._before is None and faults.directories and filesystem._is_directory(self._shelf, self._path):
            raise IsADirectoryError(errno.EISDIR, "is a directory", self._path)
        if faults.directories and not filesystem._is_directory(self._shelf, parent(self._path)):
            raise absent(parent(self._path))

    def store(self, data: bytes, running: Running) -> None:
        """Store all of it, with what is to happen in the middle."""
        data = running.arriving(data)
        if running.has_middle:
            if not self.atomic:
                self.put(data[: len(data) // 2])
            running.meet("middle")
        self.put(data)

    def put(self, data: bytes) -> None:
        """Store these bytes as the object."""
        if self.append_to and self._before is not None:
            data = self._shelf.load(self._path)[: self._before] + data
        self._shelf.store(self._path, data, empty=self._faults.directories, new=self._new, atomic=self.atomic)
        self._new = False  # it is this one's own from here on
        self._faults._note_change(self._path, self._before)

    def grow(self, offset: int, data: bytes) -> None:
        """Store these bytes, of which the first one is number ``offset`` of those that this write brings."""
        if self.append_to:
            self._shelf.append(self._path, data)
        else:  # at their place, whatever another write to the same object does, as every file system does it
            self._shelf.write_at(self._path, offset, data)


class Writer(io.BufferedIOBase):
    """A file that is open for writing; as with fsspec's own, leaving a ``with`` by an error stores what has come."""

    def __init__(self, target: Target, running: Running) -> None:
        self._target = target
        self._running = running
        self._pieces: list[bytes] | None = None
        self._size = 0
        self._failed = False
        if target.atomic or running.changes_bytes or running.lost or running.has_middle:
            self._pieces = []
        else:
            target.put(b"")

    def writable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """How many bytes were taken."""
        return self._size

    def write(self, data: Any) -> int:
        """Take bytes, and say how many."""
        piece = bytes(data)
        if self._running.short and not self._size:
            piece = piece[: len(piece) // 2]
        with self._told():
            if self._pieces is None:
                self._target.grow(self._size, piece)
            else:
                self._pieces.append(piece)
        self._size += len(piece)
        return len(piece)

    def close(self) -> None:
        """Store what was taken; from then on the operation is over."""
        if self.closed:
            return
        super().close()
        if self._failed:
            return
        with self._told():
            if self._pieces is not None and not self._running.lost:
                self._target.store(b"".join(self._pieces), self._running)
        self._running.done()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            with told(self._running):
                yield
        except BaseException:
            self._failed = True
            raise


class BreakingReader(io.BytesIO):
    """Meets what is to happen in the middle of the bytes."""

    def __init__(self, data: bytes, running: Running) -> None:
        super().__init__(data)
        self._half = len(data) // 2
        self._running: Running | None = running

    def read(self, size: int | None = -1, /) -> bytes:
        """Hand out bytes."""
        running = self._running
        if running is not None:
            if self.tell() < self._half and size is not None and 0 <= size <= self._half - self.tell():
                return super().read(size)
            self._running = None
            running.meet("middle")
            running.done()
        return super().read(size)


@contextlib.contextmanager
def told(running: Running) -> Iterator[None]:
    """Have an error inside be the outcome of the operation."""
    try:
        yield
    except BaseException as error:
        running.failed(error)
        raise
