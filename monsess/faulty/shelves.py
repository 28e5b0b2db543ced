"""Where a faulty filesystem keeps its objects: in memory, or in a local folder.

Objects go by their path, the store's name first. ``empty`` says that directories exist without an object below them,
and have to be made.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from typing import TypeAlias

_TEMPORARY = ".faulty-tmp-"


def parent(path: str) -> str:
    """The directory that ``path`` lies in; the store's name is its own."""
    return path.rpartition("/")[0] or path


def absent(path: str) -> FileNotFoundError:
    """The error for what does not exist."""
    return FileNotFoundError(errno.ENOENT, "no such object", path)


_Node: TypeAlias = "dict[str, _Node | bytearray]"


class Memory:
    """A tree of dictionaries; shared by threads."""

    def __init__(self) -> None:
        self._tree: _Node = {}
        self._lock = threading.RLock()

    def size(self, path: str) -> int | None:
        """The size of an object; None for what is not one."""
        found = self._find(path)
        return len(found) if isinstance(found, bytearray) else None

    def is_directory(self, path: str, empty: bool) -> bool:
        """Whether it is one."""
        return "/" not in path or isinstance(self._find(path), dict)

    def children(self, path: str, empty: bool) -> dict[str, int | None]:
        """What a directory holds."""
        with self._lock:
            found = self._find(path)
            nodes = found if isinstance(found, dict) else {}
            return {name: len(node) if isinstance(node, bytearray) else None for name, node in nodes.items()}

    def load(self, path: str) -> bytes:
        """The bytes of an object."""
        with self._lock:
            return bytes(self._object(path))

    def store(self, path: str, data: bytes, *, empty: bool, new: bool = False, atomic: bool = False) -> None:
        """Write an object."""
        with self._lock:
            folder = self._folder(parent(path), make=not empty)
            name = path.rpartition("/")[2]
            if new and name in folder:
                raise FileExistsError(errno.EEXIST, "exists already", path)
            if isinstance(folder.get(name), dict):
                raise IsADirectoryError(errno.EISDIR, "is a directory", path)
            folder[name] = bytearray(data)

    def append(self, path: str, data: bytes) -> None:
        """Write on at the end of an object."""
        with self._lock:
            self._object(path).extend(data)

    def write_at(self, path: str, offset: int, data: bytes) -> None:
        """Write over a part of an object, or beyond its end."""
        with self._lock:
            found = self._object(path)
            found.extend(bytes(max(0, offset - len(found))))
            found[offset : offset + len(data)] = data

    def remove(self, path: str, empty: bool) -> None:
        """Delete an object."""
        with self._lock:
            self._object(path)
            self._drop(path, empty)

    def make_directory(self, path: str) -> None:
        """Make a directory and those above it."""
        with self._lock:
            self._folder(path, make=True)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        with self._lock:
            self._drop(path, empty=True)

    def move(self, source: str, target: str, empty: bool) -> None:
        """Rename an object or directory."""
        with self._lock:
            node = self._find(source)
            folder = self._folder(parent(target), make=not empty)
            name = target.rpartition("/")[2]
            if node is None:
                raise absent(source)
            if isinstance(folder.get(name), dict):
                raise FileExistsError(errno.EEXIST, "a directory is in the way", target)
            folder[name] = node
            self._drop(source, empty)

    def _find(self, path: str) -> _Node | bytearray | None:
        node: _Node | bytearray | None = self._tree
        for name in path.split("/"):
            if not isinstance(node, dict):
                return None
            node = node.get(name)
        return node

    def _object(self, path: str) -> bytearray:
        node = self._find(path)
        if not isinstance(node, bytearray):
            raise absent(path)
        return node

    def _folder(self, path: str, make: bool) -> _Node:
        node = self._tree
        for depth, name in enumerate(path.split("/")):
            if name not in node and (make or not depth):
                node[name] = {}
            below = node.get(name)
            if below is None:
                raise absent(path)
            if isinstance(below, bytearray):
                raise NotADirectoryError(errno.ENOTDIR, "an object is in the way", path)
            node = below
        return node

    def _drop(self, path: str, empty: bool) -> None:
        folder = self._folder(parent(path), make=False)
        del folder[path.rpartition("/")[2]]
        if not folder and not empty and "/" in parent(path):
            self._drop(parent(path), empty)


class Folder:
    """Files below a local folder, named as the objects are wherever the operating system allows it.

    Args:
        root: The folder; made when something is written.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def size(self, path: str) -> int | None:
        """The size of an object; None for what is not one."""
        local = self._local(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if not os.path.isdir(local):
                return os.stat(local).st_size
        return None

    def is_directory(self, path: str, empty: bool) -> bool:
        """Whether it is one."""
        return "/" not in path or (os.path.isdir(self._local(path)) and (empty or _holds_files(self._local(path))))

    def children(self, path: str, empty: bool) -> dict[str, int | None]:
        """What a directory holds."""
        found: dict[str, int | None] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._local(path)) as entries:
            for entry in entries:
                name = entry.name[1:] if entry.name.startswith("%") else entry.name
                if entry.name.startswith(_TEMPORARY):
                    continue
                with contextlib.suppress(FileNotFoundError):  # gone since
                    if not entry.is_dir():
                        found[name] = entry.stat().st_size
                    elif empty or _holds_files(entry.path):
                        found[name] = None
        return found

    def load(self, path: str) -> bytes:
        """The bytes of an object."""
        with open(self._local(path), "rb") as file:
            return file.read()

    def store(self, path: str, data: bytes, *, empty: bool, new: bool = False, atomic: bool = False) -> None:
        """Write an object."""
        local = self._local(path)
        with self._in_its_folder(path, empty):
            if not atomic:
                with open(local, "xb" if new else "wb", buffering=0) as file:
                    _write_all(file.fileno(), data)
                return
            folder, name = os.path.split(local)
            temporary = os.path.join(folder, f"{_TEMPORARY}{os.getpid()}-{threading.get_ident()}-{hash(name)}")
            with open(temporary, "wb") as file:
                file.write(data)
            try:
                if new:
                    os.link(temporary, local)
                else:
                    os.replace(temporary, local)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)

    def append(self, path: str, data: bytes) -> None:
        """Write on at the end of an object."""
        with open(self._local(path), "ab", buffering=0) as file:
            _write_all(file.fileno(), data)

    def write_at(self, path: str, offset: int, data: bytes) -> None:
        """Write over a part of an object, or beyond its end."""
        with open(self._local(path), "r+b", buffering=0) as file:
            file.seek(offset)
            _write_all(file.fileno(), data)

    def remove(self, path: str, empty: bool) -> None:
        """Delete an object."""
        os.unlink(self._local(path))
        self._prune(path, empty)

    def make_directory(self, path: str) -> None:
        """Make a directory and those above it."""
        os.makedirs(self._local(path), exist_ok=True)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(self._local(path))

    def move(self, source: str, target: str, empty: bool) -> None:
        """Rename an object or directory."""
        with self._in_its_folder(target, empty):
            if os.path.isdir(self._local(target)):
                raise FileExistsError(errno.EEXIST, "a directory is in the way", target)
            os.rename(self._local(source), self._local(target))
        self._prune(source, empty)

    @contextlib.contextmanager
    def _in_its_folder(self, path: str, empty: bool) -> Iterator[None]:
        """Make what has to be there, and keep it from being pruned for as long as it is empty."""
        folder = self._local(parent(path))
        if empty and "/" in parent(path):
            yield
            return
        with _PRUNING:
            os.makedirs(folder, exist_ok=True)
            yield

    def _prune(self, path: str, empty: bool) -> None:
        if empty:
            return
        with _PRUNING, contextlib.suppress(OSError):
            while "/" in (path := parent(path)):
                os.rmdir(self._local(path))

    def _local(self, path: str) -> str:
        return os.path.join(self._root, *map(_file_name, path.split("/"))) if path else self._root


_PRUNING = threading.RLock()


def _file_name(name: str) -> str:
    """What no file can be called gets a ``%`` in front, and so does what begins with one."""
    return f"%{name}" if name in ("", ".", "..") or name[0] == "%" else name


def _holds_files(folder: str) -> bool:
    return any(not name.startswith(_TEMPORARY) for _, _, names in os.walk(folder) for name in names)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


Shelf: TypeAlias = Memory | Folder
