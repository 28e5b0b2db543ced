"""Real stores on loopback for the tests that need one; each ends with the process that started it, however it ends.

`STORES` has them by name. ``with STORES["hdfs"](folder) as store:`` starts one with its data in ``folder``, or skips
the test by naming what is not installed; ``store.url`` and ``store.options`` are what monsess is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from servers.ceph import Ceph
from servers.gcs import Gcs
from servers.hdfs import Hdfs
from servers.process import KEY, REQUIRED, SECRET, Server, free_ports, require
from servers.s3 import S3
from servers.sftp import Sftp

__all__ = ["KEY", "REQUIRED", "SECRET", "STORES", "Server", "free_ports", "require", "s3_server"]

STORES: dict[str, type[Server]] = {store.name: store for store in (S3, Hdfs, Sftp, Gcs, Ceph)}


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, Any]]:
    """SeaweedFS, an S3 server with the bucket ``smoke`` and its data in ``folder``; yields the options for s3fs."""
    with S3(folder) as store:
        yield store.options
