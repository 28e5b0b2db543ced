"""A small file beside the checkpoints that says how far a run came, whatever ends it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from monsess.errors import StorageError
from monsess.log import logger
from monsess.storage import Storage

NAME = "goodput.json"
_EVERY_SECS = 10.0
_FIRST_COST = 2e-6
#: Of the time, the part that writing the step to a local file may take: one in so many.
_PART = 200


class Note:
    """How far a run has come: on a local path as of its newest step, elsewhere as of the last ten seconds.

    Where steps are so short that noting each would slow the run down, it is one of the last few.

    Args:
        storage: Where the note is kept.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._rest = b""
        self._step, self._elapsed = 0, 0.0
        self._file: int | None = None
        self._next = 0.0
        self._cost = _FIRST_COST
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def read(self) -> dict[str, Any] | None:
        """What was noted last, by another attempt perhaps; None if there is nothing that can be read."""
        try:
            found = json.loads(self._storage.read(NAME))
        except FileNotFoundError:
            return None
        except (StorageError, ValueError) as error:
            logger.warning("How far the attempt before this one came is not known: %s", error)
            return None
        return found if isinstance(found, dict) else None

    def begin(self, about: Mapping[str, Any], step: int, elapsed: float) -> None:
        """Begin to note steps.

        Args:
            about: What is noted beside the step and the time, and stays the same.
            step: The first one.
            elapsed: Seconds since the attempt began.
        """
        self._rest = b", " + json.dumps(dict(about)).encode()[1:] + b"\n"
        self._step, self._elapsed, self._next = step, elapsed, 0.0
        path = self._storage.local_path
        self._let_go()
        if path is None:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._keep, name="monsess-goodput", daemon=True)
            self._thread.start()
            return
        try:
            self._storage.write(NAME, self._content())
            self._file = os.open(os.path.join(path, NAME), os.O_WRONLY)
        except (StorageError, OSError) as error:
            self._give_up(error)

    def tell(self, step: int, elapsed: float) -> None:
        """Note a step; on a local path at once, unless that would take half a percent of the time."""
        self._step, self._elapsed = step, elapsed
        if self._file is not None and elapsed >= self._next:
            begun = time.perf_counter()
            try:
                os.pwrite(self._file, self._head(), 0)
            except OSError as error:
                self._give_up(error)
            # Twice as long as before at most: now and then a write takes long because the process has to wait.
            self._cost = min(time.perf_counter() - begun, 2 * self._cost)
            self._next = elapsed + _PART * self._cost

    def close(self, final: Mapping[str, Any] | None, seconds: float) -> None:
        """Note the end.

        Args:
            final: What the note says from now on; None: what it says already, as of the newest step.
            seconds: How long to wait at most.
        """
        self._closed.set()
        self._let_go()
        content = self._content() if final is None else json.dumps(dict(final)).encode() + b"\n"
        if not self._rest and final is None:
            return
        work = threading.Thread(target=self._write, args=(content,), name="monsess-goodput", daemon=True)
        if self._thread is not None:
            self._thread.join(seconds)  # or what it writes might come after this
        work.start()
        work.join(seconds)
        if work.is_alive():
            logger.warning(
                "%s did not take the note of how far the run came within %g s.", self._storage.shown, seconds
            )

    def _keep(self) -> None:
        noted = -1
        while not self._closed.wait(_EVERY_SECS if noted >= 0 else 0.0):
            step = self._step
            if step != noted and not self._write(self._content()):
                return
            noted = step

    def _write(self, content: bytes) -> bool:
        try:
            self._storage.write(NAME, content)
        except StorageError as error:
            self._give_up(error)
            return False
        return True

    def _give_up(self, error: Exception) -> None:
        logger.warning("How far the run comes is not noted any more, so lost work will not be known: %s", error)
        self._let_go()

    def _let_go(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _head(self) -> bytes:
        return b'{"step": %12d, "elapsed": %18.6f' % (self._step, self._elapsed)  # always of the same length

    def _content(self) -> bytes:
        return self._head() + self._rest
