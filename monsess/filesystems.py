"""Fresh fsspec filesystems that take names literally; what their libraries make of a name is put right here."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, TypeVar, cast

from monsess.localfiles import CHUNK_BYTES, Entry, pump

T = TypeVar("T")

#: Servers with real directories whose libraries take even a bare path for a URL, and cut it at the first ? or #.
_PARSING = {"hdfs", "viewfs", "sftp", "ssh"}
_DOUBLED = re.compile(r"(?<!:)/{2,}")
#: Stores whose first part of the path is a bucket or container and that have no directories.
_BUCKETS = {"s3", "gs", "abfs"}


class FsspecFiles:
    """Single objects below ``url`` in a fresh filesystem, made by and for one thread; names are as in `LocalFiles`.

    Args:
        url: Any fsspec URL.
        options: For the filesystem.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        filesystem, root = open_filesystem(url, options)
        self._fs: Any = filesystem
        self._root = _DOUBLED.sub("/", root).rstrip("/")  # some stores write a//b as a/b, and list nothing in a//b
        self._in_bucket = not _BUCKETS.isdisjoint(_protocols(filesystem))
        self.keeps_halves = not self._in_bucket
        #: An object up to this size is written by one request, which spares it the copies that a file object makes.
        self.one_request_bytes = CHUNK_BYTES if self._in_bucket else 0
        #: An asynchronous filesystem works in one thread of its own, whoever calls it.
        self.for_all_threads = bool(getattr(filesystem, "async_impl", False))
        cache = getattr(filesystem, "dircache", None)
        if cache is not None and hasattr(cache, "use_listings_cache"):
            cache.use_listings_cache = False  # one thread's listing must not answer another thread's later question

    def _path(self, rel: str) -> str:
        return f"{self._root}/{rel}" if rel else self._root

    def _uncache(self) -> None:
        filesystem = self._fs
        while filesystem is not None:
            filesystem.invalidate_cache()
            filesystem = getattr(filesystem, "fs", None)

    def ls(self, rel: str) -> list[Entry]:
        """The names in one directory."""
        self._uncache()
        path = self._path(rel)
        own = path.strip("/")
        found = []
        for entry in self._fs.ls(path, detail=True):
            full = str(entry["name"]).rstrip("/")
            is_dir = entry.get("type") == "directory"
            if full.strip("/") == own:  # a file lists as itself; some stores list a directory's marker object
                if is_dir or str(entry["name"]).endswith("/") or not entry.get("size"):
                    continue
                raise NotADirectoryError(errno.ENOTDIR, "is an object, not a directory", path)
            found.append(Entry(full.rsplit("/", 1)[-1], is_dir, None if is_dir else entry.get("size")))
        return found

    def size(self, rel: str) -> int | None:
        """The size of one object in bytes, if the store tells it."""
        self._uncache()
        return self._fs.info(self._path(rel)).get("size")

    def read(self, rel: str) -> bytes:
        """All bytes of one object."""
        self._uncache()
        return self._fs.cat_file(self._path(rel))

    def write(self, rel: str, data: bytes) -> None:
        """Replace one object; its directory is made."""
        self._with_parent(rel, lambda path: self._fs.pipe_file(path, data))

    def open_read(self, rel: str) -> BinaryIO:
        """Open one object for reading."""
        self._uncache()
        # Every file is read once, from its beginning to its end, several at a time: a cache of parts only takes memory.
        plain = {"cache_type": "none"} if self._in_bucket else {}
        return self._fs.open(self._path(rel), "rb", **plain)

    def open_write(self, rel: str) -> BinaryIO:
        """Open one object for writing; its directory is made."""
        # A part of an upload to a bucket gives no sign of life until it is done, so it has to be a small one.
        size = {"block_size": CHUNK_BYTES} if self._in_bucket else {}
        return self._with_parent(rel, lambda path: self._fs.open(path, "wb", **size))

    def copy(self, source: str, target: str) -> None:
        """Copy one object."""
        try:
            if not can_copy(self._fs):
                raise NotImplementedError
            self._with_parent(target, lambda path: self._fs.cp_file(self._path(source), path))
        except NotImplementedError:
            with self.open_read(source) as reader, whole_or_nothing(self.open_write(target)) as writer:
                pump(reader, writer, may_end=False)

    def rm(self, rel: str) -> None:
        """Delete one object."""
        self._fs.rm_file(self._path(rel))

    def rmdir(self, rel: str) -> None:
        """Remove one empty directory, where the store has any."""
        if rel:  # the root may be a bucket
            remove_directory(self._fs, self._path(rel))

    def _with_parent(self, rel: str, write: Callable[[str], T]) -> T:
        path = self._path(rel)
        try:
            return write(path)
        except FileNotFoundError:  # a store with real directories: made only when they are found missing
            if self._in_bucket:
                raise  # there are none; makedirs would make a bucket of whatever name was mistyped
            self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            return write(path)


@contextlib.contextmanager
def whole_or_nothing(writer: BinaryIO) -> Iterator[BinaryIO]:
    """Close a file at the end; after an error fsspec's own ``with`` would store what has come so far."""
    try:
        yield writer
    except BaseException:
        with contextlib.suppress(Exception):
            getattr(writer, "discard", writer.close)()
        with contextlib.suppress(AttributeError):
            cast("Any", writer).closed = True  # or its destructor does what ``with`` would have done
        raise
    writer.close()


def open_filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Make a filesystem that shares nothing with any other one.

    Args:
        url: Any fsspec URL.
        options: For the filesystem.

    Returns:
        The filesystem, and the path of ``url`` in it.
    """
    from fsspec.core import url_to_fs
    from fsspec.implementations.cached import CachingFileSystem

    scheme, _, rest = url.partition("://")
    if scheme in _PARSING:
        host, _, path = rest.partition("/")
        filesystem, _ = url_to_fs(f"{scheme}://{host}/", skip_instance_cache=True, **options)
        filesystem._strip_protocol = _as_it_is  # its methods ask this object before its class
        return filesystem, f"/{path}"
    for inner in url.split("::")[1:]:  # dir::s3://…: the filesystems further in have to be fresh as well
        protocol = inner.split("://")[0]
        options = {**options, protocol: {"skip_instance_cache": True, **options.get(protocol, {})}}
    filesystem, root = url_to_fs(url, skip_instance_cache=True, **options)
    while isinstance(filesystem, CachingFileSystem):
        filesystem = filesystem.fs  # a cache of contents would hide what another process wrote
    return filesystem, str(root)


def _protocols(filesystem: Any) -> set[str]:
    """All names of a filesystem's protocol."""
    return {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)


def can_copy(filesystem: Any) -> bool:
    """Whether to let the filesystem copy an object: hdfs-native makes a path that HDFS refuses, sshfs runs a shell."""
    return _PARSING.isdisjoint(_protocols(filesystem))


def remove_directory(filesystem: Any, path: str) -> None:
    """Remove one empty directory, also where the library has this under its private name only (sshfs)."""
    from fsspec.asyn import sync
    from fsspec.spec import AbstractFileSystem

    private = getattr(filesystem, "_rmdir", None)
    if private is not None and type(filesystem).rmdir is AbstractFileSystem.rmdir:
        sync(filesystem.loop, private, path)
    else:
        filesystem.rmdir(path)


def _as_it_is(path: str) -> str:
    return path


def import_protocol(url: str) -> None:
    """Import what serves ``url``; no store is asked.

    Raises:
        ImportError: A package is missing.
        ValueError: fsspec does not know the protocol.
    """
    from fsspec import get_filesystem_class

    for part in url.split("::"):
        scheme, found, _ = part.partition("://")
        if found:
            get_filesystem_class(scheme)
