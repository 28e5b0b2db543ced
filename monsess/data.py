"""The training input: batches lie on the devices before they are needed, and each is used exactly once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monsess import clock
from monsess.errors import EndOfData, InputPositionError, SessionClosedError
from monsess.layout import REMAINDERS, Layout
from monsess.log import logger
from monsess.prefetch import Entry, Item, Prefetcher, Reader, rows_of
from monsess.repeat import repeat
from monsess.source import Checksum, Source, decode, encode

__all__ = ["Input", "Item", "repeat"]

#: How long `Input.restore` waits for a source that is inside ``next``, and how long `Input.close` does.
RESTORE_WAIT_SECS = 60.0
CLOSE_WAIT_SECS = 0.5

#: How often a long skip says how far it is.
PROGRESS_SECS = 10.0


class Input:
    """The batches of one process, read ahead by a thread, and the position of what was consumed.

    A batch counts as consumed with `consume` only, so that what was merely prefetched is never lost. The thread starts
    with the first `peek`, never before `restore` had its chance. All methods belong to the training thread.

    Args:
        data: An iterator with ``get_state``/``set_state`` or ``state_dict``/``load_state_dict`` (or an iterable with
            these, or whose iterators have them), a re-iterable, or a bare iterator. Batches are pytrees with leaves
            ``[local_batch, ...]``; None is not a batch.
        layout: The devices.
        prefetch: How many batches lie ready on the devices; 0 reads in `peek`, without a thread.
        remainder: ``"error"``, ``"drop"`` or ``"pad"``, as in `Layout.lay_out`. With ``"drop"``, a batch with fewer
            rows than devices is left out.
        process_index: Which process this is.
        process_count: How many processes read a shard each.

    Raises:
        BatchError: ``data`` yields no batches, by its type.
        InputPositionError: The state of ``data`` cannot be stored.
        ValueError: ``prefetch`` or ``remainder`` is none of those above.
    """

    def __init__(
        self,
        data: Any,
        layout: Layout,
        *,
        prefetch: int = 2,
        remainder: str = "error",
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"prefetch must be a number of batches, 0 or more, found {prefetch!r}.")
        if remainder not in REMAINDERS:
            raise ValueError(f"remainder must be one of {', '.join(map(repr, REMAINDERS))}, found {remainder!r}.")
        self._source = Source(data)
        self._layout = layout
        self._prefetch = prefetch
        self._remainder = remainder
        self._process_index = process_index
        self._process_count = process_count

        self._reader: Reader | None = None
        self._prefetcher: Prefetcher | None = None
        self._current: Entry | None = None  # what `peek` showed, until it is consumed
        self._failure: BaseException | None = None
        self._closed = False

        self._consumed = 0
        self._state: Any = None
        self._checksum: Checksum | str | None = None
        self._global_batch: int | None = None

        #: float: seconds that `peek` held the training thread.
        self.seconds_waited = 0.0
        if self._source.started:  # an iterator: a state that cannot be stored is better found now than hours later
            self._state = encode(self._source.read_state())
        if not self.can_rewind:
            logger.info(
                "The training input is a bare iterator (%s): a restart skips what was consumed, but in-process "
                "recovery cannot rewind it. For that, pass a re-iterable or an iterator with state.",
                type(data).__name__,
            )

    @property
    def can_rewind(self) -> bool:
        """Whether `restore` can go back after batches were read."""
        return self._source.kind != "iterator"

    def peek(self, check: Callable[[], None] | None = None) -> Item:
        """The next batch, waiting for it if it must; the same one until it is consumed.

        Args:
            check: Called about ten times a second while it waits; what it raises ends the wait and loses nothing.

        Returns:
            The batch, placed.

        Raises:
            EndOfData: There is none; again with every further call.
            SessionClosedError: The input is closed.
            InputPositionError: An earlier `restore` failed.
            BaseException: What the source raised, as it was raised, after all batches before it.
        """
        entry = self._look(check)
        if entry.item is not None:
            return entry.item
        if entry.error is not None:
            raise entry.error.with_traceback(entry.traceback)  # the traceback would grow with every call otherwise
        raise EndOfData(f"The training input has ended after {entry.index} batches.")

    def ended(self, check: Callable[[], None] | None = None) -> bool:
        """Whether there is no further batch, waiting as `peek` does.

        An error of the source is no end: `peek` raises it.
        """
        entry = self._look(check)
        return entry.item is None and entry.error is None

    def ahead(self, count: int, check: Callable[[], bool] | None = None) -> int:
        """How many batches surely follow the one that `peek` shows, or come next if it shows none; waits for them.

        Args:
            count: How many are asked for, at most ``prefetch`` - 1.
            check: As in `peek`; once it returns True, those that are there are counted.

        Returns:
            ``count``, or fewer if the source ends before. An error of the source is no end: its turn comes.
        """
        shown = int(self._current is not None and self._current.item is not None)
        entries = self._reading_ahead().ahead(shown + count, check)[shown:]
        if any(entry.error is not None for entry in entries):
            return count
        return sum(entry.item is not None for entry in entries)

    def consume(self) -> None:
        """Count the batch that `peek` showed as consumed: its step was dispatched."""
        entry = self._current
        if entry is None or entry.item is None:
            raise AssertionError("consume() without a batch: call peek() first.")
        self._current = None
        if self._prefetcher is not None:
            self._prefetcher.pop()
        self._consumed = entry.index + 1
        self._state = entry.state
        self._checksum = entry.checksum
        if self._global_batch is None:
            self._global_batch = entry.rows * self._process_count

    def position(self) -> dict[str, Any]:
        """What was consumed, as JSON-able values: the next batch after it is the one to go on with.

        Returns:
            ``consumed`` (batches of this process), ``kind``, ``state`` (of a stateful source after the last consumed
            batch), ``checksum`` (of that batch, for the other kinds), ``process_index``, ``process_count`` and
            ``global_batch`` (rows over all processes, None before the first batch).

        Raises:
            InputPositionError: The state of the source cannot be stored.
        """
        self._start()
        if isinstance(self._checksum, Checksum):
            self._checksum = self._checksum.value()
        return {
            "consumed": self._consumed,
            "kind": self._source.kind,
            "state": self._state,
            "checksum": self._checksum,
            "process_index": self._process_index,
            "process_count": self._process_count,
            "global_batch": self._global_batch,
        }

    def restore(self, position: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go to a stored position, before the first batch or, where `can_rewind`, after some.

        Args:
            position: What `position` returned; for a job of several processes, or one that had several, the list of
                what it returned on each.

        Raises:
            InputPositionError: The source cannot go there: it is another kind of source, its order or its batch size
                changed, it ends early, its state belongs to another number of processes, or it is a bare iterator that
                was read from.
        """
        self._check_usable(after_failure=True)
        positions = _checked(position)
        touched = self._prefetcher or self._current or self._consumed or self._failure
        if touched and not self.can_rewind:
            own = _of_process(positions, self._process_index, self._process_count)
            if own is not None and own["consumed"] == self._consumed and self._failure is None:
                return  # recovery to the very position that it is at: what is prefetched stays valid
            raise InputPositionError(
                f"The training input is a bare iterator of which {self._consumed} batches were used; it cannot go back "
                f"to batch {positions[0]['consumed']}. Restart the process, or pass an iterable that can be iterated "
                "again or an iterator with state."
            )
        if self._prefetcher is not None and not self._prefetcher.stop(RESTORE_WAIT_SECS):
            self._failure = InputPositionError(
                f"The training input cannot be rewound: its source has been busy with one batch for more than "
                f"{RESTORE_WAIT_SECS:.0f} s. Restart the process."
            )
            raise self._failure
        self._prefetcher = self._current = None
        try:
            self._go_to(positions)
        except BaseException as error:
            self._failure = error  # anything else would quietly go on at a wrong batch
            raise
        self._failure = None
        self._reader = Reader(self._source, self._layout, self._remainder, self._consumed)

    def lay_out_for(self, layout: Layout) -> None:
        """Lay the batches out for other devices, from the next one on; where `can_rewind`."""
        position = self.position()
        self._layout = layout
        self.restore(position)

    def close(self) -> None:
        """End the thread and close the source's iterator; a source that blocks is left to its (daemon) thread."""
        if self._closed:
            return
        self._closed = True
        self._current = None
        if self._prefetcher is None or self._prefetcher.stop(CLOSE_WAIT_SECS):
            self._source.close()

    def _look(self, check: Callable[[], None] | None) -> Entry:
        if self._current is None:
            self._current = self._next_entry(check)
        return self._current

    def _reading_ahead(self) -> Prefetcher:
        self._check_usable()
        self._start()
        if self._prefetcher is None:
            assert self._reader is not None
            self._prefetcher = Prefetcher(self._reader.read, self._prefetch, self._source.close)
            weakref.finalize(self, self._prefetcher.request_stop)
        return self._prefetcher

    def _next_entry(self, check: Callable[[], None] | None) -> Entry:
        self._check_usable()
        self._start()
        assert self._reader is not None
        if self._prefetch:
            self._reading_ahead()
        entry = None if self._prefetcher is None else self._prefetcher.head()
        if entry is not None:
            return entry
        began = clock.monotonic()
        try:
            entry = self._reader.read() if self._prefetcher is None else self._prefetcher.wait(check)
        finally:
            self.seconds_waited += clock.monotonic() - began
        if entry is None:
            raise SessionClosedError("The training input was closed while a batch was waited for.")
        return entry

    def _start(self) -> None:
        """Make the reader, and with it the state before the first batch, unless that was done."""
        if self._reader is None and not self._closed:
            if not self._source.started:
                self._source.restart()
                self._state = encode(self._source.read_state())
            self._reader = Reader(self._source, self._layout, self._remainder, self._consumed)

    def _check_usable(self, after_failure: bool = False) -> None:
        if self._closed:
            raise SessionClosedError("The training input is closed.")
        if self._failure is not None and not after_failure:
            raise InputPositionError(
                "The training input has no position, since going to the stored one failed. Restart the process."
            ) from self._failure

    def _go_to(self, positions: list[Mapping[str, Any]]) -> None:
        own = _of_process(positions, self._process_index, self._process_count)
        began = clock.monotonic()
        self._global_batch = positions[0]["global_batch"]
        if own is not None and own["state"] is not None:
            self._source.restart(decode(own["state"]))
            self._state, self._checksum, how = own["state"], None, "state restored"
        elif own is None and positions[0]["consumed"] and any(p["state"] is not None for p in positions):
            self._source.restart(self._redistributed(positions))
            self._state, self._checksum, how = encode(self._source.read_state()), None, "state redistributed"
            self._global_batch = None  # that of the new processes is found with their first batch
        else:
            self._skip(own or positions[0], same_shard=own is not None)
            self._state = encode(self._source.read_state())
            seconds = clock.monotonic() - began
            how = f"skipped in {seconds:.1f} s" if seconds > 1 else ""
        self._consumed = (own or positions[0])["consumed"]
        if self._consumed:
            logger.info("the input goes on after batch %d%s", self._consumed, f" ({how})" if how else "")

    def _redistributed(self, positions: list[Mapping[str, Any]]) -> Any:
        before, now = positions[0]["process_count"], self._process_count
        if not self._source.started:
            self._source.restart()
        redistribute = self._source.redistribute
        if redistribute is None:
            raise InputPositionError(
                f"The checkpoint holds the input states of {before} process(es), and {now} are running. The state of "
                f"an iterator belongs to its shard: run {before} process(es), or give the source a method "
                "redistribute(states, process_index, process_count) that returns the state of one new process."
            )
        if len(positions) != before:
            raise InputPositionError(
                f"Expected the input states of all {before} processes, found {len(positions)}: they cannot be "
                f"redistributed to {now}."
            )
        ordered = sorted(positions, key=lambda p: p["process_index"])
        return redistribute([decode(p["state"]) for p in ordered], self._process_index, now)

    def _skip(self, position: Mapping[str, Any], same_shard: bool) -> None:
        """Read and drop what was consumed, and check that the last batch of it is the one that was trained on."""
        self._source.restart()
        self._checksum = None
        count, batch, said = position["consumed"], None, clock.monotonic()
        for index in range(count):
            try:
                batch = next(self._source)
            except (StopIteration, EndOfData):
                raise InputPositionError(
                    f"The training input ended after {index} batches, but the checkpoint was written after {count}. "
                    "Pass the data that the run was started with (monsess.repeat for several epochs)."
                ) from None
            except BaseException as error:
                error.add_note(f"raised by the training input, batch {index}, on the way to the stored position")
                raise
            if index == 0 and not same_shard:
                self._check_global_batch(rows_of(batch), position)
            if clock.monotonic() - said >= PROGRESS_SECS:
                said = clock.monotonic()
                logger.info("The training input: skipped %d of %d consumed batches.", index + 1, count)
        if not count:
            return
        self._checksum = Checksum(batch)
        stored = position["checksum"]
        if same_shard and stored is not None and stored != self._checksum.value():
            raise InputPositionError(
                f"Batch {count - 1} of the training input is not the one that was trained on before the checkpoint "
                f"(checksum {self._checksum.value()}, expected {stored}): the source changed its order or its data. "
                "Give it a fixed order (a seed, sorted files), or pass an iterator that stores its own state."
            )

    def _check_global_batch(self, rows: int, position: Mapping[str, Any]) -> None:
        found, stored = rows * self._process_count, position["global_batch"]
        if found != stored:
            raise InputPositionError(
                f"The checkpoint was written by {position['process_count']} process(es) with a global batch of "
                f"{stored} rows; {self._process_count} now read {found} ({rows} each), so that the number of consumed "
                f"batches means other data. Keep the global batch at {stored}."
            )


def _checked(position: Any) -> list[Mapping[str, Any]]:
    positions = [position] if isinstance(position, Mapping) else list(position)
    names = ("consumed", "kind", "state", "checksum", "process_index", "process_count", "global_batch")
    if not positions or not all(isinstance(p, Mapping) and all(name in p for name in names) for p in positions):
        raise InputPositionError(f"Expected a stored input position with {', '.join(names)}, found {position!r:.200}.")
    return positions


def _of_process(positions: list[Mapping[str, Any]], index: int, count: int) -> Mapping[str, Any] | None:
    """The position of this very shard, or None if the job had another number of processes."""
    if positions[0]["process_count"] == count:
        for position in positions:
            if position["process_index"] == index:
                return position
        raise InputPositionError(f"The checkpoint holds no input position of process {index} of {count}.")
    consumed = sorted({position["consumed"] for position in positions})
    if len(consumed) > 1:
        raise InputPositionError(
            f"The processes had consumed different numbers of batches ({consumed}) when the checkpoint was written, so "
            f"that {count} process(es) cannot go on where {positions[0]['process_count']} stopped. Run as many as then."
        )
    return None
