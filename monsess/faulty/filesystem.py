"""A filesystem of fsspec whose operations fail, stall, lie or kill where `Faults` says so."""

from __future__ import annotations

import errno
import io
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem

from monsess.faulty.faults import Faults
from monsess.faulty.files import BreakingReader, Target, Writer, told
from monsess.faulty.operations import Running
from monsess.faulty.shelves import Folder, Memory, Shelf, absent, parent

_SLASHES = re.compile("/+")


class FaultyFileSystem(AbstractFileSystem):
    """A filesystem of fsspec, ``faulty://<store>/<path>``, in which what `Faults` describes goes wrong.

    It is for tests of code that stores something. Without ``root`` a store lives in memory, under the name that is
    the first part of the URL, and all filesystem objects of the process share it. With ``root`` it is the folder of
    that name in the local folder ``root``, so that its content survives the process, be it killed. What a killed
    write leaves there is what a store would keep: half of an object, or with ``Faults(atomic=True)`` nothing.

    Names are taken literally. A doubled slash counts where the store has no directories, as with S3. Listings are
    never cached, unless fsspec's ``use_listings_cache=True`` asks for it; a trailing slash of a path is dropped, and
    a user and password in the URL are ignored. Objects are held in memory while they are read.

    Args:
        root: A local folder; None for memory.
        faults: What goes wrong; a mapping is taken as the arguments of `Faults`, and all filesystem objects of the
            process that get an equal one, with the same ``root``, share the `Faults` made of it. None: an object
            store without faults.
        **options: As for any filesystem of fsspec; others, such as a ``key`` and a ``secret``, are ignored.

    Raises:
        TypeError: ``faults`` is neither.

    Example:
        >>> import monsess as ms
        >>> faults = ms.testing.Faults()
        >>> store = ms.testing.FaultyFileSystem(faults=faults)
        >>> store.pipe_file("guide/1/data", b"abc")
        >>> faults.truncate("read", keep_bytes=2)
        >>> store.cat_file("guide/1/data"), store.cat_file("guide/1/data")
        (b'ab', b'abc')
        >>> ms.CheckpointStore("faulty://guide", {"faults": faults}).steps()
        []
    """

    protocol = "faulty"
    root_marker = ""
    _memories: ClassVar[dict[str, Memory]] = {}
    _described: ClassVar[dict[str, Faults]] = {}  # those that were given as a mapping
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        faults: Faults | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**{"use_listings_cache": False, **options})
        self._root = None if root is None else os.path.abspath(os.fspath(root))
        if faults is None:
            faults = Faults()
        elif isinstance(faults, Mapping):
            made, key = Faults(**faults), repr((self._root, sorted(faults.items())))
            with self._making:  # what one object writes late, the listings of the others show late
                faults = self._described.setdefault(key, made)
        if not isinstance(faults, Faults):
            raise TypeError(f"faults is a monsess.testing.Faults or a mapping of its arguments, found {faults!r}.")
        self.faults: Faults = faults
        self._number = faults._join()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        path = os.fspath(path)
        if path.startswith("faulty://"):
            path = path.removeprefix("faulty://")
            name, slash, rest = path.partition("/")
            path = name.rpartition("@")[2] + slash + rest
        return path.strip("/") if path.strip("/") == "" else path.lstrip("/").rstrip("/")

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        """List a directory or prefix; see fsspec."""
        shelf, path = self._at(path)
        entries = self._ls_from_cache(path)
        if entries is None:
            entries = self._do("list", path, lambda: self._entries(shelf, path))
            self.dircache[path] = entries
        return entries if detail else [entry["name"] for entry in entries]

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget listings, where they are cached."""
        self.dircache.clear()

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Tell size and type of an object, directory or prefix; see fsspec."""
        shelf, path = self._at(path)

        def look() -> dict[str, Any]:
            size = shelf.size(path)
            if size is None and not self._is_directory(shelf, path):
                raise absent(path)
            return _entry(path, size)

        return self._do("info", path, look)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Read an object; see fsspec."""
        with self._open(path, "rb") as reader:
            return reader.read()[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write an object; see fsspec."""
        with self._open(path, "xb" if mode == "create" else "wb") as writer:
            writer.write(value)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Make a directory; nothing happens where the store has none."""
        shelf, path = self._at(path)

        def make() -> None:
            if not self.faults.directories:
                return
            if shelf.size(path) is not None or self._is_directory(shelf, path):
                raise FileExistsError(errno.EEXIST, "exists already", path)
            if not create_parents and not self._is_directory(shelf, parent(path)):
                raise absent(parent(path))
            shelf.make_directory(path)

        self._do("mkdir", path, make)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory and those above it; nothing happens where the store has none."""
        try:
            self.mkdir(path, create_parents=True)
        except FileExistsError:
            shelf, path = self._at(path)
            if not exist_ok or shelf.size(path) is not None:
                raise

    def rmdir(self, path: str) -> None:
        """Remove an empty directory; counted as a delete."""
        shelf, path = self._at(path)

        def remove() -> None:
            if not self._is_directory(shelf, path):
                raise absent(path)
            if shelf.children(path, self.faults.directories):
                raise OSError(errno.ENOTEMPTY, "directory not empty", path)
            if "/" in path:
                shelf.remove_directory(path)

        self._do("delete", path, remove)

    def rm_file(self, path: str) -> None:
        """Delete one object, its name taken literally."""
        shelf, path = self._at(path)

        def remove() -> None:
            time.sleep(self.faults.slow_delete_secs)
            size = self._size(shelf, path)
            shelf.remove(path, self.faults.directories)
            self.faults._note_change(path, size)

        self._do("delete", path, remove)

    _rm = rm_file

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete objects, with what lies below them if ``recursive``; names are taken literally."""
        for one in path if isinstance(path, list) else [path]:
            shelf, one = self._at(one)
            if not recursive or shelf.size(one) is not None:
                self.rm_file(one)
                continue
            for entry in self.ls(one):
                self.rm(entry["name"], recursive=True)
            if self.faults.directories and "/" in one:
                self.rmdir(one)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy one object."""
        shelf, source = self._at(path1)
        running = self._begin("copy", source)
        with told(running):
            self._size(shelf, source)
            target = Target(self, path2, "wb")
            if not running.lost:
                target.store(shelf.load(source), running)
        running.done()

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Rename an object or directory, where the store can do that; an object that is in the way is replaced."""
        shelf, source = self._at(path1)
        _, target = self._at(path2)

        def rename() -> None:
            if not self.faults.rename:
                raise NotImplementedError("This store cannot rename: Faults(rename=False).")
            size = shelf.size(source)
            if size is None and not (self.faults.directories and shelf.is_directory(source, True)):
                raise absent(source)
            before = shelf.size(target)
            shelf.move(source, target, self.faults.directories)
            if size is not None:
                self.faults._note_change(source, size)
                self.faults._note_change(target, before)

        self._do("rename", source, rename)

    def created(self, path: str) -> Any:
        """Not known here."""
        raise NotImplementedError

    modified = created

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: Any = None,
        autocommit: bool = True,
        cache_options: Any = None,
        **kwargs: Any,
    ) -> Any:
        shelf, at = self._at(path)
        if mode == "rb":
            running = self._begin("read", at)
            with told(running):
                self._size(shelf, at)
                data = running.arriving(shelf.load(at))
                if running.has_middle:
                    return BreakingReader(data, running)
            running.done()
            return io.BytesIO(data)
        if mode not in ("wb", "xb", "ab") or (mode == "ab" and not self.faults.append):
            raise NotImplementedError(f"This store cannot open an object in mode {mode!r}: Faults(append=False).")
        running = self._begin("write", at)
        with told(running):
            return Writer(Target(self, path, mode), running)

    def _at(self, path: str) -> tuple[Shelf, str]:
        """Where the objects lie, and the path as it counts there."""
        path = self._strip_protocol(path)
        if self.faults.directories:
            path = _SLASHES.sub("/", path)
        if self._root is not None:
            return Folder(self._root), path
        with self._making:
            return self._memories.setdefault(path.partition("/")[0], Memory()), path

    def _begin(self, kind: str, path: str) -> Running:
        if kind in ("write", "delete", "rename", "copy", "mkdir"):
            self.invalidate_cache()
        return self.faults._begin(kind, path, self._number)

    def _do(self, kind: str, path: str, act: Callable[[], Any]) -> Any:
        running = self._begin(kind, path)
        with told(running):
            result = None if running.lost else act()
        running.done()
        return result

    def _size(self, shelf: Shelf, path: str) -> int:
        size = shelf.size(path)
        if size is not None:
            return size
        if self.faults.directories and self._is_directory(shelf, path):
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        raise absent(path)

    def _is_directory(self, shelf: Shelf, path: str) -> bool:
        return shelf.is_directory(path, self.faults.directories)

    def _entries(self, shelf: Shelf, path: str) -> list[dict[str, Any]]:
        size = shelf.size(path)
        if size is not None:
            return [_entry(path, size)]
        empty = self.faults.directories
        found = {f"{path}/{name}": size for name, size in shelf.children(path, empty).items()}
        changes = self.faults._as_listed(path)
        for changed, before in changes.items():
            child = f"{path}/{changed[len(path) + 1 :].partition('/')[0]}"
            if before is not None:
                found[child] = before if child == changed else None
            elif child == changed or (not empty and all(changes.get(one, 0) is None for one in _below(shelf, child))):
                found.pop(child, None)
        if not found and not self._is_directory(shelf, path):
            raise absent(path)
        if changes and not found and not empty and "/" in path:
            raise absent(path)
        return [_entry(name, size) for name, size in sorted(found.items())]


def _below(shelf: Shelf, path: str) -> Iterator[str]:
    for name, size in shelf.children(path, False).items():
        if size is None:
            yield from _below(shelf, f"{path}/{name}")
        else:
            yield f"{path}/{name}"


def _entry(path: str, size: int | None) -> dict[str, Any]:
    return {"name": path, "size": size or 0, "type": "directory" if size is None else "file"}


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
