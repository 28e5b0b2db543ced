"""The session's side of its input: which batch comes next, for which devices, and when the wait for it is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monsess.agreement import StopReason
from monsess.ballot import AHEAD
from monsess.binding import move
from monsess.coordinator import Coordinator
from monsess.data import Input, Item
from monsess.errors import StepDefinitionError
from monsess.job import Job
from monsess.layout import Layout
from monsess.log import logger
from monsess.step_context import LeaveStepFn


class Feeding:
    """The batches of a session's ``data``; without data there is never one.

    Args:
        data: What the user passed, or None.
        layout: The devices that batches are laid out for at first.
        prefetch: As in `Input`.
        remainder: As in `Input`.
        coord: Gives the coordinator of the session's threads, whose stop ends a wait for a batch.
        job: The processes, each of which reads a shard.
    """

    def __init__(
        self, data: Any, layout: Layout, prefetch: int, remainder: str, coord: Callable[[], Coordinator], job: Job
    ) -> None:
        if job.process_count > 1:
            prefetch = max(prefetch, AHEAD + 1)  # what this process vouches for has to be there
        self._input = (
            None
            if data is None
            else Input(
                data,
                layout,
                prefetch=prefetch,
                remainder=remainder,
                process_index=job.process_index,
                process_count=job.process_count,
            )
        )
        self._job = job
        self._layout = layout
        self._remainder = remainder
        self._coord = coord
        self._start: dict[str, Any] | None = None
        self._used = False

    @property
    def has_data(self) -> bool:
        """Whether the session has ``data``."""
        return self._input is not None

    @property
    def seconds_waited(self) -> float:
        """Seconds for which the training thread waited for batches."""
        return 0.0 if self._input is None else self._input.seconds_waited

    def position(self) -> dict[str, Any] | None:
        """What was consumed, for a checkpoint."""
        return None if self._input is None else self._input.position()

    def go_to(self, position: dict[str, Any] | None, restored: bool) -> None:
        """Go to the position of the checkpoint, or to the beginning if none was restored."""
        self._used = False
        if self._input is None:
            if position is not None:
                logger.warning("the checkpoint holds an input position, but the session has no data=: it will be lost")
            return
        if position is not None:
            self._input.restore(position)
            return
        if restored:
            logger.warning("the checkpoint holds no input position: the input starts at its beginning")
        if self._start is None:
            self._start = self._input.position()
        else:
            self._input.restore(self._start)

    def next_batch(self, layout: Layout) -> Item:
        """The next batch, laid out for the devices that the step runs on; the same one until it is `consumed`.

        Raises:
            EndOfData: There is none, or a thread has stopped the session.
            Exception: What the source raised, or what a thread has reported.
        """
        assert self._input is not None
        if layout is not self._layout and not self._used and self._input.can_rewind:
            self._input.lay_out_for(layout)
            self._layout = layout
        try:
            item = self._input.peek(self._look_at_threads)
        except _ThreadStoppedError:
            self._coord().raise_requested_exception()
            raise
        if layout is self._layout:
            return item
        if self._remainder != "error":
            raise StepDefinitionError(
                f'remainder="{self._remainder}" and steps on different devices do not go together with data=: hand the '
                "batches to run(), or let all steps run on the same devices."
            )
        return move(item, layout)

    def ahead(self) -> int:
        """How many batches surely follow the one that `next_batch` gave, at most `AHEAD`; without data that many.

        Once a stop is on its way, those that are there have to do, since nobody may be left to read further ones.

        Raises:
            Exception: What a thread has reported.
        """
        if self._input is None or self._job.process_count == 1:
            return AHEAD
        try:
            return self._input.ahead(AHEAD, self._stops_wait)
        except _ThreadStoppedError:
            self._coord().raise_requested_exception()
            raise

    def consumed(self) -> None:
        """The batch that `next_batch` gave was dispatched."""
        assert self._input is not None
        self._input.consume()
        self._used = True

    def ended(self) -> bool:
        """Whether there is no further batch; waits for the next one unless a thread stops the session."""
        if self._input is None:
            return False
        try:
            return self._input.ended(self._look_at_threads)
        except _ThreadStoppedError:
            return False

    def close(self) -> None:
        """End the prefetching."""
        if self._input is not None:
            self._input.close()

    def _look_at_threads(self) -> None:
        self._job.check()
        coord, alone = self._coord(), self._job.process_count == 1
        # With several processes a clean stop is a wish: a process that left for it here would leave alone.
        if coord.should_stop() if alone else coord.requested_exception is not None:
            raise _ThreadStoppedError("A thread has stopped the session while it waited for the input.")
        if alone and self._job.agreement.stop == StopReason.PREEMPTED:
            raise _ThreadStoppedError("The job was preempted while it waited for the input.")

    def _stops_wait(self) -> bool:
        """Whether the wait for the batches that follow is to end, as a stop is agreed on or goes with this dispatch."""
        self._look_at_threads()
        if self._coord().should_stop():
            self._job.agreement.want_stop(StopReason("REQUESTED", by="a thread"))
            return True
        return self._job.agreement.stop is not None


class _ThreadStoppedError(LeaveStepFn):
    """Ends a wait for the input: a clean end, unless the thread has reported an error, which is then raised."""
