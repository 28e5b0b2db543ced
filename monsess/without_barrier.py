"""The end of a process whose job has failed, which must not wait for the other processes."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monsess.peers import Peers


class _EndWithoutBarrier:
    """Ends the process at its exit with `os._exit`: JAX's own exit waits for all processes, which will not come."""

    def __init__(self) -> None:
        self._peers: Peers | None = None
        self._code = 1
        self._once = threading.Lock()

    def arm(self, peers: Peers, error: BaseException) -> None:
        """From now on this process ends that way."""
        if self._peers is None:
            self._peers = peers
            atexit.register(self)
        if isinstance(error, SystemExit):
            self._code = error.code if isinstance(error.code, int) else 1
        elif isinstance(error, KeyboardInterrupt):
            self._code = 130

    def __call__(self) -> None:
        if not self._once.acquire(blocking=False):
            return
        assert self._peers is not None
        self._peers.say_goodbye()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass
        os._exit(self._code or 1)


end_without_barrier = _EndWithoutBarrier()
