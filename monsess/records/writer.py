"""The records of one session: taken in the training thread, brought to the store by another one.

A slow or failing store never stops training, and never fails silently.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from monsess import clock
from monsess.errors import MonsessError, StorageError
from monsess.log import logger, mask
from monsess.records.lines import FILE, PART_PREFIX, SUFFIX, encode
from monsess.records.reading import part_key
from monsess.records.streams import Stream
from monsess.records.values import Logged
from monsess.storage import Storage
from monsess.summary import Text

#: Seconds after which what waits is sealed as a part, at least and at most; in between it is a share of the attempt's
#: age, so that somebody who looks on sees the first ones soon, and a run of weeks does not leave a hundred thousand.
_PART_SECS = (5.0, 300.0)
_SHARE = 0.01
_PART_BYTES = 1 << 20
_RETRY_SECS = (5.0, 60.0)
_MOST_WAITING = 100_000
_MOST_BYTES = 64 << 20
_CLOSE_SECS = 30.0
_CLOSE_OVERDUE_SECS = 5.0  # where a flush was waited for in vain


class Extra(Protocol):
    """A second form in which the same is written, such as TensorBoard's."""

    def open(self, storage: Storage, names: list[str]) -> Stream:
        """Its bytes on their way to a directory that holds ``names``."""
        ...

    def is_one(self, name: str) -> bool:
        """Whether a file of that name holds such records."""
        ...

    def values(self, step: int, when: float, values: Mapping[str, Any]) -> bytes:
        """Numbers, histograms, images and texts of a step, by tag."""
        ...

    def start(self, step: int, when: float) -> bytes:
        """A mark: what came before it of ``step`` and later ones is void."""
        ...


class Records:
    """Writes the records of one session into its directory.

    Args:
        url: Where.
        storage_options: For fsspec.
        attempt: Name of the attempt, part of file names.
        extra: TensorBoard's form, or None.
        check: Called in the writing thread before each write; what it raises ends the writing for good, without a
            word: it is said elsewhere.
        part_secs: Seconds after which a part is sealed, at least and at most.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None,
        attempt: str,
        extra: Extra | None = None,
        check: Callable[[], None] = lambda: None,
        part_secs: tuple[float, float] = _PART_SECS,
    ) -> None:
        self._storage = Storage(url, storage_options, tries=2)
        self._attempt = attempt
        self._extra = extra
        self._check = check
        self._part_secs = part_secs
        self._began = time.monotonic()
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._waiting_bytes = 0
        self._thread: threading.Thread | None = None
        self._held: list[tuple[Callable[[], None], int | None]] | None = []  # until it is opened
        self._streams: list[Stream] = []
        self._lines: Stream | None = None
        self._events: Stream | None = None
        self._asked = self._answered = 0  # flushes
        self._whole = True  # whether the newest flush left nothing behind
        self._closing = False
        self._ended = False
        self._overdue = False  # whether a flush was waited for in vain and is not answered yet
        self._warned = self._warned_of_extra = False
        self._dropped = 0
        self._pending_mark: tuple[int, float] | None = None
        self._marks_matter = False  # whether there are files of the extra form that a mark speaks of
        self._since: float | None = None  # what waits longest
        self._retry_at = 0.0
        self._retry_secs = _RETRY_SECS[0]

    def require_protocol(self) -> None:
        """Make sure that something serves the URL, without asking the store.

        Raises:
            StorageError: A package is missing, or the protocol is not known.
        """
        self._storage.require_protocol()

    @property
    def is_open(self) -> bool:
        """Whether what is recorded is written."""
        return self._held is None

    def open(self) -> None:
        """Begin to write, with what was recorded so far."""
        if self._held is None:
            return
        held, self._held = self._held, None
        for one in held:
            self._put(*one)

    def start(self, step: int, **fields: Any) -> None:
        """An attempt begins after ``step``: what was recorded of later steps is void."""
        when = self._record("start", step, fields)
        fresh = self._lines is None and fields.get("restored_from") is None
        self._put(lambda: self._mark(0 if fresh else step + 1, when))

    def record(self, event: str, step: int, **fields: Any) -> None:
        """Write an event; ``time`` may be among the fields."""
        self._record(event, step, fields)

    def log(self, step: int, logged: Logged) -> None:
        """Write what was logged; what of it is on the device is waited for by the thread that writes."""
        when = _wall()

        def write() -> None:
            try:
                scalars, rest = logged.on_host()
            except Exception as error:  # the step that they are of has failed, and is heard of
                logger.debug("values of step %d were lost: %s", step, error)
                return
            scalars = {self._masked(tag): value for tag, value in scalars.items()}
            rest = {self._masked(tag): self._masked(value) for tag, value in rest.items()}
            if scalars:
                self._add_line({"step": step, "time": when, "scalars": scalars})
            for tag, value in rest.items():
                if isinstance(value, Text):
                    self._add_line({"event": "text", "step": step, "time": when, "tag": tag, "text": value.text})
            self._extra_add(lambda extra: extra.values(step, when, {**scalars, **rest}))

        self._put(write, logged.bytes)

    def abandon(self) -> None:
        """End the thread, which writes what it has: nobody records anything any more.

        The garbage collector calls it at any point of any thread.
        """
        with self._changed:  # it may be taken by the thread that has it
            self._closing = True
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until everything recorded so far is in the store; never raises.

        Args:
            seconds: How long at most.

        Returns:
            Whether it is; False at once if the store refuses it now, or has not answered an earlier flush yet.
        """
        with self._changed:
            if self._held is not None or self._ended or self._thread is None:
                return self._held is not None or self._thread is None
            if self._overdue:
                return False
            self._asked += 1
            ticket = self._asked
            self._changed.notify_all()
            self._overdue = not self._changed.wait_for(lambda: self._answered >= ticket or self._ended, seconds)
            return self._answered >= ticket and self._whole

    def close(self, seconds: float = _CLOSE_SECS) -> None:
        """Bring the rest to the store and end; never raises.

        Args:
            seconds: How long at most; what is not there by then is lost, with a warning.
        """
        thread = self._thread
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            seconds = min(seconds, _CLOSE_OVERDUE_SECS) if self._overdue else seconds
        if thread is None:
            return
        thread.join(seconds)
        if thread.is_alive() or not self._whole or self._dropped:
            logger.warning(
                "Not all records of this run could be written to %s%s; checkpoints are not concerned.",
                self._storage.shown,
                f" within {seconds:g} s" if thread.is_alive() else "",
            )

    def _record(self, event: str, step: int, fields: Mapping[str, Any]) -> float:
        record = {"event": event, "step": step, "time": _wall(), **fields}
        record = self._masked(record)
        self._put(lambda: self._add_line(record, needed=True))
        return float(record["time"])

    def _masked(self, value: Any) -> Any:
        """``value`` without credentials, its own directory's among them, wherever users' code has put them."""
        if isinstance(value, str):
            return mask(value, self._storage._secrets)
        if isinstance(value, Text):
            return Text(self._masked(value.text))
        if isinstance(value, Mapping):
            return {self._masked(str(name)): self._masked(part) for name, part in value.items()}
        return [self._masked(part) for part in value] if isinstance(value, (list, tuple)) else value

    def _put(self, write: Callable[[], None], size: int | None = None) -> None:
        """Have ``write`` called by the thread; of values, which have a ``size``, no more than some may wait."""
        with self._changed:
            if self._closing or self._ended:
                return
            if self._held is not None:
                self._held.append((write, size))
                return
            if size is not None and (len(self._waiting) >= _MOST_WAITING or self._waiting_bytes > _MOST_BYTES):
                self._dropped += 1
                if self._dropped == 1:
                    logger.warning("%s does not take records as fast as they come; some are lost.", self._storage.shown)
                return
            self._waiting.append(write)
            self._waiting_bytes += size or 0
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="monsess-records", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # the interpreter is ending and starts no thread any more
                    self._ended = True
            elif len(self._waiting) == 1:
                self._changed.notify_all()

    # ---- the thread that writes

    def _work(self) -> None:
        try:
            while self._round():
                pass
        except MonsessError as error:  # the directory is somebody else's by now
            logger.debug("%s", error)
        except Exception as error:
            logger.warning("Records are written no more: %s: %s", type(error).__name__, mask(str(error)))
            self._whole = False
        finally:
            for stream in self._streams:
                stream.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _round(self) -> bool:
        """Take what waits and write what is due; False if that was the last time."""
        with self._changed:
            if not self._waiting and not self._closing and self._asked == self._answered:
                self._changed.wait(self._pause())
            taken, self._waiting = self._waiting, deque()
            self._waiting_bytes = 0
            asked, closing = self._asked, self._closing
        if taken:
            self._open_streams()
        while taken:
            write = taken.popleft()  # with the values that it holds
            try:
                write()
            except Exception as error:
                logger.warning("A record was left out: %s: %s", type(error).__name__, mask(str(error)))
        if any(stream.size for stream in self._streams):
            self._since = time.monotonic() if self._since is None else self._since
        wanted = closing or asked > self._answered
        if wanted or self._is_due():
            self._write(durable=asked > self._answered, last=closing)
            if asked > self._answered:
                with self._changed:
                    self._answered, self._overdue = asked, False
                    self._changed.notify_all()
        return not closing

    def _pause(self) -> float | None:
        """Seconds until something is due; None if nothing waits."""
        if self._since is None:
            return None
        return max(0.0, max(self._since + self._wait_secs(), self._retry_at) - time.monotonic())

    def _wait_secs(self) -> float:
        if self._storage.local_path is not None:
            return 0.0
        least, most = self._part_secs
        return min(max(least, _SHARE * (time.monotonic() - self._began)), most)

    def _is_due(self) -> bool:
        if self._since is None or time.monotonic() < self._retry_at:
            return False
        full = any(stream.size >= _PART_BYTES for stream in self._streams)
        return full or time.monotonic() >= self._since + self._wait_secs()

    def _write(self, durable: bool, last: bool) -> None:
        self._check()
        whole = True
        for stream in self._streams:
            try:
                stream.flush(durable)
            except StorageError as error:
                whole = False
                self._warn(error, last)
        if whole:
            self._retry_at, self._retry_secs = 0.0, _RETRY_SECS[0]
            self._since = None
        else:
            self._retry_at = time.monotonic() + self._retry_secs
            self._retry_secs = min(self._retry_secs * 2, _RETRY_SECS[1])
        self._whole = whole and not any(stream.lost for stream in self._streams)

    def _warn(self, error: StorageError, last: bool) -> None:
        if not self._warned and not last:
            self._warned = True
            logger.warning("Records could not be written; training goes on and it is tried again: %s", error)
        else:
            logger.debug("%s", error)

    def _open_streams(self) -> None:
        """Choose names that sort after those of all attempts before; until the store answers, it is asked again."""
        if self._lines is not None:
            return
        names: list[str] = []
        while True:
            try:
                self._check()
                names = list(self._storage.list())
            except FileNotFoundError:
                pass
            except StorageError as error:
                self._whole = False
                self._warn(error, self._closing)
                with self._changed:
                    self._answered, self._overdue = self._asked, False
                    self._changed.notify_all()
                    if self._closing:
                        raise
                    self._changed.wait(self._retry_secs)
                self._retry_secs = min(self._retry_secs * 2, _RETRY_SECS[1])
                continue
            break
        numbers = [key[0] for name in names if (key := part_key(name)) is not None]
        prefix = f"{PART_PREFIX}{max(numbers, default=0) + 1:04d}-{self._attempt}-"
        self._whole = True
        self._lines = Stream(self._storage, lambda n: FILE if n is None else f"{prefix}{n:06d}{SUFFIX}", lines=True)
        self._streams.append(self._lines)
        if self._extra is not None:
            try:
                self._events = self._extra.open(self._storage, names)
                self._marks_matter = any(map(self._extra.is_one, names))
            except Exception as error:
                self._extra = None
                logger.warning("TensorBoard's files are not written: %s: %s", type(error).__name__, error)
            else:
                self._streams.append(self._events)

    def _add_line(self, record: Mapping[str, Any], needed: bool = False) -> None:
        assert self._lines is not None
        self._lines.add(encode(record), needed)

    def _mark(self, step: int, when: float) -> None:
        """Where files of an earlier attempt are, they are told at once; otherwise with the first values."""
        self._pending_mark = (step, when)
        if self._marks_matter:
            self._extra_add(lambda extra: b"")

    def _extra_add(self, make: Callable[[Extra], bytes]) -> None:
        if self._extra is None or self._events is None:
            return
        try:
            if self._pending_mark is not None:
                self._events.add(self._extra.start(*self._pending_mark), needed=True)
                self._pending_mark, self._marks_matter = None, True
            self._events.add(make(self._extra))
        except Exception as error:  # a library that does not fit is no reason to lose the lines
            if not self._warned_of_extra:
                self._warned_of_extra = True
                reason = f"{type(error).__name__}: {mask(str(error))}"
                logger.warning("A record was left out of TensorBoard's files: %s", reason)


def _wall() -> float:
    return round(clock.wall(), 3)
