"""Local directories for files on their way, held by a lock that dies with its process."""

from __future__ import annotations

import os
import shutil
import tempfile
from types import TracebackType
from typing import IO

try:
    import fcntl
except ImportError:  # no such locks there: directories of dead processes stay
    fcntl = None

_PREFIX = "monsess-staging-"
_LOCK = ".lock"


class StagingDirectory:
    """A fresh local directory, removed on leaving the ``with`` block.

    Args:
        parent: Where to make it; None for the system's directory for temporary files.
    """

    def __init__(self, parent: str | None) -> None:
        self._parent = parent
        self._lock: IO[bytes] | None = None
        self.path = ""

    def __enter__(self) -> StagingDirectory:
        if self._parent is not None:
            os.makedirs(self._parent, exist_ok=True)
        while True:
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent)
            try:
                self._lock = open(os.path.join(self.path, _LOCK), "wb")
                if fcntl is not None:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.exists(os.path.join(self.path, _LOCK)):
                    return self
            except OSError:
                if os.path.exists(self.path):
                    raise
            # Somebody who cleans up took it for a dead one before it was locked.
            self._release()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def remove_dead(parent: str | None) -> None:
    """Remove the staging directories in ``parent`` whose processes are gone."""
    folder = parent or tempfile.gettempdir()
    if fcntl is None or not os.path.isdir(folder):
        return
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if not name.startswith(_PREFIX):
            continue
        try:
            with open(os.path.join(path, _LOCK), "rb+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # its process is alive, or it is somebody else's
