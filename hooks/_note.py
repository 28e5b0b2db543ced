"""A small file beside the checkpoints that says how far a run came, whatever ends it."""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from monsess import clock
from monsess.errors import StorageError
from monsess.log import logger
from monsess.storage import Storage

if TYPE_CHECKING:
    from monsess.session import MonitoredSession

NAME = "goodput.json"
#: Between two looks on a local path, and between two notes elsewhere.
_LOCAL_SECS, _EVERY_SECS = 0.005, 10.0
#: So long it looks on a local path once it is woken.
_LOOKS_SECS = 0.02
#: Of the time, the part that writing the note to a local file may take where that is slow: one in so many.
_PART = 50


class Note:
    """How far a run has come: on a local path as of its newest step, elsewhere as of the last ten seconds.

    A thread writes it. Once it is woken it looks after the step by itself for a while, every five milliseconds, so that
    it need not be woken for each of many short steps.

    Args:
        storage: Where the note is kept.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._rest = b""
        self._session: weakref.ref[MonitoredSession] | None = None
        self._since = 0.0
        self._newest = (0, 0.0)  # step, and seconds since the attempt began
        self._begun_anew = False  # the rest is another one than that in the file
        self._until = 0.0  # by the clock, the thread looks by itself
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

    def begin(self, about: Mapping[str, Any], session: MonitoredSession, since: float) -> float:
        """Begin to note the steps of a session.

        Args:
            about: What is noted beside the step and the time, and stays the same.
            session: Its step.
            since: When the attempt began, by the clock.

        Returns:
            As `wake`.
        """
        self._rest = b", " + json.dumps(dict(about)).encode()[1:] + b"\n"
        if self._session is None:
            weakref.finalize(session, self.stop).atexit = False  # one that nobody closes leaves no thread behind
        self._session, self._since = weakref.ref(session), since
        self._newest, self._begun_anew = (session.global_step, clock.monotonic() - since), True
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._keep, name="monsess-goodput", daemon=True)
            self._thread.start()
        return self.wake()

    def wake(self) -> float:
        """Have the thread look after the step; returns the moment of the clock up to which it goes on doing so."""
        self._until = clock.monotonic() + (_LOOKS_SECS if self._storage.local_path is not None else _EVERY_SECS)
        self._news.set()
        return self._until

    def look(self, at_all_events: bool = False) -> None:
        """Take note of the step that the session is at now; one that a recovery has gone back to is none.

        Args:
            at_all_events: And of the time, if it is still at the same one.
        """
        session = None if self._session is None else self._session()
        if session is not None and session.global_step >= self._newest[0] + (not at_all_events):
            self._newest = (session.global_step, clock.monotonic() - self._since)

    def stop(self) -> None:
        """Look no more."""
        self._closed.set()
        self._news.set()

    def close(self, final: Mapping[str, Any] | None, seconds: float) -> None:
        """Note the end.

        Args:
            final: What the note says from now on; None: what it says already, as of the newest step.
            seconds: How long to wait at most.
        """
        self.stop()
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
        written: tuple[int, float] | None = None
        looked = pause = took = 0.0
        try:
            while not self._closed.wait(pause):
                if written is not None and looked >= self._until:
                    self._news.wait()  # whoever ended a step since then wakes it
                self._news.clear()
                looked, pause = clock.monotonic(), _LOCAL_SECS
                self.look()
                if self._begun_anew and file is not None:
                    os.close(file)
                    file = None
                newest = self._newest
                if self._begun_anew:
                    file = self._write_whole()
                elif newest != written and file is None:
                    self._storage.write(NAME, self._content())
                elif newest != written:
                    assert file is not None
                    begun, before = time.perf_counter(), took
                    os.pwrite(file, _head(newest), 0)
                    took = time.perf_counter() - begun
                    pause = max(pause, _PART * min(took, before))  # one alone may have met a checkpoint's fsync
                written = newest
                if file is None:
                    pause = _EVERY_SECS
        except (StorageError, OSError) as error:
            self._give_up(error)
        finally:
            if file is not None:
                os.close(file)

    def _write_whole(self) -> int | None:
        """Write the note; on a local path gives the open file, of which only the beginning changes from then on."""
        self._begun_anew = False  # first: it may begin anew once more meanwhile
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

    def _content(self) -> bytes:
        return _head(self._newest) + self._rest


def _head(newest: tuple[int, float]) -> bytes:
    return b'{"step": %12d, "elapsed": %18.6f' % newest  # always of the same length
