"""Fresh fsspec filesystems that take names literally; what their libraries make of a name is put right here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: Servers with real directories whose libraries take even a bare path for a URL, and cut it at the first ? or #.
_PARSING = {"hdfs", "viewfs", "sftp", "ssh"}
_SLASHES = re.compile("/+")


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
        return filesystem, _SLASHES.sub("/", f"/{path}")
    for inner in url.split("::")[1:]:  # dir::s3://…: the filesystems further in have to be fresh as well
        protocol = inner.split("://")[0]
        options = {**options, protocol: {"skip_instance_cache": True, **options.get(protocol, {})}}
    filesystem, root = url_to_fs(url, skip_instance_cache=True, **options)
    while isinstance(filesystem, CachingFileSystem):
        filesystem = filesystem.fs  # a cache of contents would hide what another process wrote
    return filesystem, str(root)


def protocols(filesystem: Any) -> set[str]:
    """All names of a filesystem's protocol."""
    return {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)


def can_copy(filesystem: Any) -> bool:
    """Whether to let the filesystem copy an object: hdfs-native makes a path that HDFS refuses, sshfs runs a shell."""
    return _PARSING.isdisjoint(protocols(filesystem))


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
