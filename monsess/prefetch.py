"""The thread that reads batches ahead and places them on the devices while the step runs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import jax
import numpy as np

from monsess.errors import BatchError, EndOfData, MonsessError
from monsess.layout import Layout, NothingLeftError
from monsess.source import Checksum, Source, encode

#: Seconds between two looks at ``check`` while the training thread waits for a batch.
_CHECK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Item:
    """A batch that lies on the devices.

    Args:
        batch: The pytree, leaves ``[n_devices, per_device, ...]``.
        mask: bool ``[n_devices, per_device]``, False for rows that only fill up; None without ``remainder="pad"``.
        index: How many batches the source gave before this one, since its start.
    """

    batch: Any
    mask: jax.Array | None
    index: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One outcome of reading the source: a batch, its end (neither item nor error), or an error."""

    index: int
    item: Item | None = None
    error: BaseException | None = None
    traceback: TracebackType | None = None
    state: Any = None
    checksum: Checksum | None = None
    rows: int = 0


class Reader:
    """Reads one batch after the other from a source and lays it out; what goes wrong is an `Entry` too.

    Args:
        source: The source, at the position where reading begins.
        layout: Where batches go.
        remainder: As in `Layout.lay_out`.
        index: How many batches came before.
    """

    def __init__(self, source: Source, layout: Layout, remainder: str, index: int) -> None:
        self._source = source
        self._layout = layout
        self._remainder = remainder
        self._index = index

    def read(self) -> Entry:
        """The next outcome, once per batch; after an end or an error it must not be called again."""
        while True:
            index = self._index
            note = f"raised by the training input, batch {index}"
            try:
                try:
                    batch = next(self._source)
                except (StopIteration, EndOfData):
                    return Entry(index)
                state = encode(self._source.read_state()) if self._source.kind == "stateful" else None
                note = f"found in batch {index} of the training input"
                try:
                    placed, mask, _ = self._layout.lay_out(batch, remainder=self._remainder)
                except NothingLeftError:
                    self._index += 1
                    continue  # "drop" drops all rows of this batch: it counts as read together with the next one
                checksum = None if self._source.kind == "stateful" else Checksum(batch)
            except BaseException as error:
                error.add_note(note)
                return Entry(index, error=error, traceback=error.__traceback__)
            self._index += 1
            item = Item(placed, mask, index)
            return Entry(index, item, state=state, checksum=checksum, rows=rows_of(batch))


def rows_of(batch: Any) -> int:
    """The leading axis of a batch that was, or is about to be, laid out."""
    shape = np.shape((jax.tree_util.tree_leaves(batch) or [0])[0])
    if not shape:
        raise BatchError(f"Expected a batch with leaves [local_batch, ...], found {batch!r:.80}.")
    return int(shape[0])


class Prefetcher:
    """A daemon thread that keeps up to ``size`` outcomes ready, in order.

    Args:
        read: Gives the next outcome; called by the thread only.
        size: How many outcomes are held, the one that is looked at included.
        on_abandoned: Called by the thread when it ends after `stop` has given up waiting for it.
    """

    def __init__(self, read: Callable[[], Entry], size: int, on_abandoned: Callable[[], None]) -> None:
        self._read = read
        self._size = size
        self._on_abandoned = on_abandoned
        self._entries: deque[Entry] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._finished = False
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="monsess-input", daemon=True)
        self._thread.start()

    def head(self) -> Entry | None:
        """The first outcome if it is there already."""
        with self._changed:
            return self._entries[0] if self._entries else None

    def wait(self, check: Callable[[], None] | None = None) -> Entry | None:
        """Wait for the first outcome; None if the thread was stopped meanwhile.

        Args:
            check: Called about ten times a second; what it raises ends the wait.
        """
        while True:
            with self._changed:
                if not (self._entries or self._stopped or self._finished):
                    self._changed.wait(None if check is None else _CHECK_SECONDS)
                if self._entries:
                    return self._entries[0]
                if self._stopped:
                    return None
                self._require_alive()
            if check is not None:
                check()

    def ahead(self, count: int, check: Callable[[], bool] | None = None) -> list[Entry]:
        """Wait for the first ``count`` outcomes, fewer if the source ends or fails before; none if it was stopped.

        Args:
            count: At most the ``size`` of the prefetcher.
            check: As in `wait`; once it returns True, what is there has to do.
        """
        enough = False
        while True:
            with self._changed:
                if self._stopped:
                    return []
                over = self._entries and self._entries[-1].item is None
                if over or enough or len(self._entries) >= count:
                    return list(self._entries)[:count]
                self._require_alive()
                self._changed.wait(None if check is None else _CHECK_SECONDS)
            enough = check is not None and check()

    def _require_alive(self) -> None:
        if self._finished:
            raise MonsessError("The thread that reads the training input died without a result.")

    def pop(self) -> None:
        """Drop the first outcome, so that there is room for another one."""
        with self._changed:
            self._entries.popleft()
            self._changed.notify_all()

    def request_stop(self) -> None:
        """Let the thread end as soon as it is not inside the source; what it held is dropped."""
        with self._changed:
            self._stopped = True
            self._entries.clear()
            self._changed.notify_all()

    def stop(self, seconds: float) -> bool:
        """Stop, wait up to ``seconds`` for the thread, and return whether it has left the source."""
        self.request_stop()
        self._thread.join(seconds)
        with self._changed:
            self._abandoned = not self._finished
            return self._finished

    def _run(self) -> None:
        try:
            self._fill()
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()
                abandoned = self._abandoned
            if abandoned:
                self._on_abandoned()

    def _fill(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or len(self._entries) < self._size)
                if self._stopped:
                    return
            entry = self._read()
            with self._changed:
                if self._stopped:
                    return
                self._entries.append(entry)
                self._changed.notify_all()
            if entry.item is None:
                return
