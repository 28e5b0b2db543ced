"""A lock on a local directory that dies with its process, where the file system has such locks."""

from __future__ import annotations

import os
import time
from types import TracebackType

from monsess.storage import Storage

try:
    import fcntl
except ImportError:  # no such locks there
    fcntl = None

_PATIENCE_SECS = 5.0


class DirectoryLock:
    """Held inside a ``with`` block, if it can be had; the directory is made for it.

    Args:
        storage: The directory; one that is not local has no lock.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._descriptor: int | None = None
        #: bool: whether the directory was not there.
        self.made = False

    @property
    def held(self) -> bool:
        """Whether other processes of this machine are kept out."""
        return self._descriptor is not None

    def __enter__(self) -> DirectoryLock:
        path = self._storage.local_path
        if path is None or fcntl is None:
            return self
        try:
            # In a worker: a file system that does not answer holds nobody.
            ((self.made, descriptor),) = self._storage.map([lambda: _open(path)])
        except OSError:
            return self
        deadline = time.monotonic() + _PATIENCE_SECS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._descriptor = descriptor
                return self
            except OSError as error:
                if not isinstance(error, BlockingIOError) or time.monotonic() > deadline:
                    os.close(descriptor)  # a file system without such locks, or somebody is frozen with it
                    return self
            time.sleep(0.01)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._descriptor is not None and fcntl is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also for a child that was forked meanwhile
            os.close(self._descriptor)
            self._descriptor = None


def _open(path: str) -> tuple[bool, int]:
    made = not os.path.isdir(path)
    os.makedirs(path, exist_ok=True)
    return made, os.open(path, os.O_RDONLY)
