"""Files of the operating system: replaced atomically, forced to disk, and named literally."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from monsess.workers import sign_of_life

CHUNK_BYTES = 8 << 20
_BUFFER_BYTES = 1 << 20  # stays in the processor's cache between being filled and being hashed
#: str: how the name of a file that is still being written begins; the file is renamed when it is whole.
TEMPORARY_PREFIX = ".monsess-tmp-"


class Entry(NamedTuple):
    """One name in a directory: its last component, whether it is a directory, and its size in bytes if known."""

    name: str
    is_dir: bool
    size: int | None


class Digest(NamedTuple):
    """Size in bytes and sha256 (hex) of what was moved."""

    size: int
    sha256: str


class LocalFiles:
    """The operating system's files."""

    def __init__(self, root: str) -> None:
        self._root = root
        #: bool: small files are replaced as a whole, and a directory of many appears and disappears by its name.
        self.keeps_halves = False
        #: int: an object up to this size is written by one request; here it costs nothing to write it piece by piece.
        self.one_request_bytes = 0

    def _path(self, rel: str) -> str:
        return os.path.join(self._root, *rel.split("/")) if rel else self._root

    def ls(self, rel: str) -> list[Entry]:
        """The names in one directory."""
        found = []
        with os.scandir(self._path(rel)) as entries:
            for entry in entries:
                is_dir = entry.is_dir(follow_symlinks=not rel)  # a whole step may be a link, nothing inside one is
                try:
                    size = None if is_dir else entry.stat().st_size
                except FileNotFoundError:  # a dangling link, or gone since
                    size = None
                found.append(Entry(entry.name, is_dir, size))
        return found

    def size(self, rel: str) -> int | None:
        """The size of one file."""
        return os.stat(self._path(rel)).st_size

    def read(self, rel: str) -> bytes:
        """All bytes of one file."""
        with open(self._path(rel), "rb") as file:
            return file.read()

    def write(self, rel: str, data: bytes) -> None:
        """Replace one file atomically and durably; its directory is made."""
        path = self._path(rel)
        folder, name = os.path.split(path)
        os.makedirs(folder, exist_ok=True)
        temporary = os.path.join(folder, f"{TEMPORARY_PREFIX}{os.getpid()}-{threading.get_ident()}-{name}")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            _unlink_quietly(temporary)
            raise
        fsync_dir(folder)

    def open_read(self, rel: str) -> BinaryIO:
        """Open one file for reading."""
        return open(self._path(rel), "rb", buffering=0)

    def open_write(self, rel: str) -> BinaryIO:
        """Open one file for writing; its directory is made."""
        path = self._path(rel)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return open(path, "wb")

    def copy(self, source: str, target: str) -> None:
        """Copy one file."""
        with self.open_read(source) as reader, self.open_write(target) as writer:
            pump(reader, writer, may_end=False)

    def rm(self, rel: str) -> None:
        """Delete one file or link."""
        os.unlink(self._path(rel))

    def rmdir(self, rel: str) -> None:
        """Delete one empty directory, or a link to one."""
        path = self._path(rel)
        os.unlink(path) if os.path.islink(path) else os.rmdir(path)


def fsync_dir(path: str) -> None:
    """Force the names in the local directory ``path`` to disk, where the system can do that."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def fsync_tree(path: str) -> None:
    """Force all files and names below the local directory ``path`` to disk."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                os.fsync(file.fileno())
        fsync_dir(folder)


def _unlink_quietly(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def pump(reader: BinaryIO | io.FileIO, writer: BinaryIO | None, may_end: bool = True) -> Digest:
    """Move all bytes from ``reader`` to ``writer``, or nowhere, in bounded memory, and say what they were.

    Args:
        reader: Where from.
        writer: Where to.
        may_end: As for `monsess.workers.sign_of_life`.
    """
    digest = hashlib.sha256()
    size = 0
    for chunk in _chunks(reader):
        sign_of_life(may_end)
        digest.update(chunk)
        size += len(chunk)
        if writer is not None:
            writer.write(chunk)
    return Digest(size, digest.hexdigest())


def _chunks(reader: BinaryIO | io.FileIO) -> Iterator[bytes | memoryview]:
    """What is left in ``reader``; a chunk is valid until the next one is asked for."""
    if not isinstance(reader, io.FileIO):
        while data := reader.read(CHUNK_BYTES):
            yield data
        return
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    while size := reader.readinto(buffer):
        yield buffer[:size]
