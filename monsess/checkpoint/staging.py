"""Local directories for files on their way, held by a lock that dies with its process."""

from __future__ import annotations

import contextlib
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
            except BlockingIOError:
                pass
            except OSError:
                if os.path.exists(self.path):
                    self._release()
                    raise
            # Somebody who cleans up took it for a dead one before it was locked, and removes it.
            self._release()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _remove(self.path)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _remove(path: str) -> None:
    """Remove a staging directory, its lock last: one that is cut off half-way can still be told for a dead one."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            inside = os.path.join(path, name)
            if name == _LOCK:
                continue
            if os.path.isdir(inside) and not os.path.islink(inside):
                shutil.rmtree(inside, ignore_errors=True)
            else:
                os.unlink(inside)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, _LOCK))
        os.rmdir(path)


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
                _remove(path)
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                os.rmdir(path)  # an empty one only: whoever is about to lock it makes another
        except OSError:
            continue  # its process is alive, or it is somebody else's
