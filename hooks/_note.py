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
#: Between two notes: on a local path, and elsewhere.
_LOCAL_SECS, _EVERY_SECS = 0.005, 10.0
#: Of the time, the part that writing the note to a local file may take where that is slow: one in so many.
_PART = 50


class Note:
    """How far a run has come: on a local path as of its newest step, elsewhere as of the last ten seconds.

    A thread writes it, since a write takes the time of a short step where the disk is busy; where steps are shorter
    than five milliseconds it is as of the last five.

    Args:
        storage: Where the note is kept.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._rest = b""
        self._newest = (0, 0.0)  # step, and seconds since the attempt began
        self._begun_anew = False  # the rest is another one than that in the file
        self._news, self._closed = threading.Event(), threading.Event()
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
        self._newest, self._begun_anew = (step, elapsed), True
        self._news.set()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._keep, name="monsess-goodput", daemon=True)
            self._thread.start()

    def tell(self, step: int, elapsed: float) -> None:
        """Note a step."""
        self._newest = (step, elapsed)
        if not self._news.is_set():
            self._news.set()

    def close(self, final: Mapping[str, Any] | None, seconds: float) -> None:
        """Note the end.

        Args:
            final: What the note says from now on; None: what it says already, as of the newest step.
            seconds: How long to wait at most.
        """
        self._closed.set()
        self._news.set()
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
        file: int | None = None
        try:
            while True:
                self._news.wait()
                if self._closed.is_set():
                    return
                self._news.clear()
                if file is not None and self._begun_anew:
                    os.close(file)
                    file = None
                pause = _LOCAL_SECS
                if file is None:
                    file = self._write_whole()
                else:
                    begun = time.perf_counter()
                    os.pwrite(file, self._head(), 0)
                    pause = max(pause, _PART * (time.perf_counter() - begun))
                if self._closed.wait(_EVERY_SECS if file is None else pause):
                    return
        except (StorageError, OSError) as error:
            self._give_up(error)
        finally:
            if file is not None:
                os.close(file)

    def _write_whole(self) -> int | None:
        """Write the note; on a local path gives the open file, of which only the beginning changes from then on."""
        self._begun_anew = False
        self._storage.write(NAME, self._content())
        path = self._storage.local_path
        return None if path is None else os.open(os.path.join(path, NAME), os.O_WRONLY)

    def _write(self, content: bytes) -> None:
        try:
            self._storage.write(NAME, content)
        except StorageError as error:
            self._give_up(error)

    @staticmethod
    def _give_up(error: Exception) -> None:
        logger.warning("How far the run comes is not noted any more, so lost work will not be known: %s", error)

    def _head(self) -> bytes:
        return b'{"step": %12d, "elapsed": %18.6f' % self._newest  # always of the same length

    def _content(self) -> bytes:
        return self._head() + self._rest
