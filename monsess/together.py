"""The agreement of several processes: wishes travel inside the steps and take effect at the same step on all."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from monsess.agreement import Agreement, StopReason
from monsess.ballot import AHEAD, LAG, Ballot, Tally, count
from monsess.errors import ProcessesDivergedError


class ClusterAgreement(Agreement):
    """Turns wishes of any process into decisions of all; made anew for each session.

    What is the same on all processes by construction (``everywhere=True``) is decided at once. Everything else is
    told with the next dispatch and decided `LAG` dispatches later, by all at the same point of their programs.

    Args:
        process_index: This process.
        process_count: How many there are, at least 2.
        wait_for: Waits for a value of the device, and raises if its step will never end.
    """

    lag = LAG

    def __init__(self, process_index: int, process_count: int, wait_for: Callable[[Any], None]) -> None:
        super().__init__()
        self.process_index = process_index
        self.process_count = process_count
        self._wait_for = wait_for
        self._wish: StopReason | None = None
        self._wish_save = False
        self._told_save = False  # whether the newest ballot carries that wish
        self._wish_log = self._told_log = False
        self._signal: int | None = None  # that this process has received
        self._pending: deque[tuple[int, int, int, Any]] = deque()  # number, fingerprint, batches consumed, the sum
        self._consumed = 0
        self._data_limit: int | None = None
        #: int: how many programs this process has dispatched.
        self.dispatched = 0

    def begin(self, total: np.ndarray) -> None:
        """Draw the conclusions from the sum of all ballots of program 0, the one before the first dispatch."""
        self._conclude(count(total, 0, self.process_count), 0)

    def want_stop(self, reason: StopReason, everywhere: bool = False) -> None:
        """Wish for a stop; see the class."""
        if everywhere:
            super().want_stop(reason)
            return
        with self._lock:
            if self._stop is None and reason.outranks(self._wish):
                self._wish = reason

    def want_preemption(self, number: int) -> None:
        """Wish for a stop because this process has received the signal ``number``."""
        self._signal = number
        self.want_stop(StopReason("PREEMPTED", f"{signal.Signals(number).name} received"))

    def want_save(self, everywhere: bool = False) -> None:
        """Wish for a checkpoint; see the class."""
        if everywhere:
            super().want_save()
            return
        with self._lock:
            self._wish_save = True

    def want_log(self) -> None:
        """Wish that all processes log after the same run; see the class."""
        with self._lock:
            self._wish_log = True

    def ballot(self, fingerprint: int, batches: int) -> np.ndarray:
        """What the next dispatch carries for this process, float32 ``[SLOTS]``.

        Args:
            fingerprint: Of the program.
            batches: How many batches this process surely has after it, at most `AHEAD`.
        """
        with self._lock:
            stop = None if self._wish is None else self._wish.name
            save, self._wish_save = self._wish_save, False
            self._told_save = save
            log, self._wish_log = self._wish_log, False
            self._told_log = log
        interrupted = stop == "PREEMPTED" and self._signal == signal.SIGINT
        return Ballot(fingerprint, stop, save, batches, interrupted, log).encode(self.process_index)

    def unsent(self) -> None:
        """The program of the newest ballot was not dispatched: what it was to tell waits for the next one."""
        with self._lock:
            self._wish_save = self._wish_save or self._told_save
            self._told_save = False
            self._wish_log = self._wish_log or self._told_log
            self._told_log = False

    def sent(self, fingerprint: int, took_batch: bool, total: Any) -> None:
        """A program was dispatched: read the sum of the one `LAG` dispatches before.

        Args:
            fingerprint: Of the program.
            took_batch: Whether it used a batch of the session's data.
            total: The sum of all processes' vectors, on its way on the device.

        Raises:
            ProcessesDivergedError: The processes run different programs.
        """
        self.dispatched += 1
        self._consumed += took_batch
        self._pending.append((self.dispatched, fingerprint, self._consumed, total))
        while len(self._pending) > LAG:
            self._read()

    def settle(self) -> None:
        """Read the sums of all dispatches, at the end: a last wish is heard, a last difference is found."""
        while self._pending:
            self._read()

    @property
    def received(self) -> int | None:
        """The signal that this process wishes to be preempted by, or None."""
        asked = self._wish is not None and self._wish.name == "PREEMPTED"
        return self._signal or (signal.SIGTERM if asked else None)

    def hear_at_end(self, received: list[int | None]) -> None:
        """All have left the loop: take up the signals, one of each process or None, that no dispatch carried."""
        who = [index for index, number in enumerate(received) if number is not None]
        if who and self.stop is None:
            by = "" if len(who) > 1 or who[0] == self.process_index else f"process {who[0]}"
            self._preempted(signal.SIGINT if signal.SIGINT in received else signal.SIGTERM, by)

    def confirm(self, number: int) -> None:
        """Make sure that the processes did the same up to dispatch ``number``; from the thread that writes.

        Raises:
            ProcessesDivergedError: They did not.
        """
        for entry in list(self._pending):
            if entry[0] <= number:
                self._tally(entry)

    @property
    def data_ended(self) -> bool:
        """Whether some process has no further batch, so that nobody takes one."""
        return self._data_limit is not None and self._consumed >= self._data_limit

    def _read(self) -> None:
        entry = self._pending[0]
        tally = self._tally(entry)
        self._pending.popleft()  # only now: until it was read, the thread that writes reads it itself
        self._conclude(tally, entry[2])

    def _tally(self, entry: tuple[int, int, int, Any]) -> Tally:
        number, fingerprint, _, total = entry
        self._wait_for(total)
        tally = count(np.asarray(total), fingerprint, self.process_count)
        if not tally.same_program:
            raise ProcessesDivergedError(
                f"The processes run different programs: at dispatch {number} another process did not do what process "
                f"{self.process_index} did. Every train step, eval step and run_without_hooks has to be called by all "
                "processes, in the same order and with batches of the same shape; nothing is saved after this."
            )
        return tally

    def _conclude(self, tally: Tally, consumed: int) -> None:
        if tally.batches < AHEAD:
            limit = consumed + tally.batches
            self._data_limit = limit if self._data_limit is None else min(limit, self._data_limit)
        with self._lock:
            self._save = self._save or tally.save
            self._log = self._log or tally.log
            if tally.stop is None:
                return
            own, self._wish = self._wish, None
        self.unforeseen = True  # an eval step of the loop's own may have carried it
        if tally.stop == "PREEMPTED":
            by = "" if tally.by == self.process_index or tally.by is None else f"process {tally.by}"
            self._preempted(signal.SIGINT if tally.interrupted else signal.SIGTERM, by)
            return
        reason = own
        if own is None or own.name != tally.stop:
            who = "several processes" if tally.by is None else f"process {tally.by}"
            reason = StopReason(tally.stop, by=who)
        assert reason is not None
        super().want_stop(reason)
