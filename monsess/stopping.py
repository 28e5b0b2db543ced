"""Everything that makes a session stop: requests, the last step, the end of the input."""

from __future__ import annotations

from typing import Any

from monsess.agreement import Agreement, StopReason
from monsess.errors import EndOfData, RunAfterStopError
from monsess.step_context import LeaveStepFn


class Stopping:
    """Collects the reasons to stop and hands them to the agreement.

    Args:
        agreement: Decides.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._limit: tuple[int, str] | None = None
        self._ended = False
        self._told = False  # whether the loop knows that it is to end
        self._held: StopReason | None = None  # asked for in a run that was rolled back

    @property
    def reason(self) -> StopReason | None:
        """The agreed reason, or None."""
        return self._agreement.stop

    @property
    def limit(self) -> int | None:
        """The step to stop at, or None."""
        return None if self._limit is None else self._limit[0]

    def request(self, reason: Any, everywhere: bool = False) -> None:
        """Ask for a stop, for a `StopReason` or a sentence."""
        if not isinstance(reason, StopReason):
            reason = StopReason("REQUESTED", "" if reason is None else str(reason))
        self._agreement.want_stop(reason, everywhere)

    def set_limit(self, last_step: int, by: str) -> None:
        """Stop at ``last_step``; of several limits the smallest counts."""
        if self._limit is None or last_step < self._limit[0]:
            self._limit = (last_step, by)

    def look_at_limit(self, step: int) -> None:
        """Stop if ``step`` has reached the limit."""
        if self._limit is not None and step >= self._limit[0]:
            last, by = self._limit
            text = f"last step {last} reached" if step == last else f"step {step} has reached the last step {last}"
            self.request(StopReason("LAST_STEP", text, by), everywhere=True)

    def at_end_of_data(self, end: EndOfData | None) -> None:
        """Stop because the input, or whoever raised ``end``, has ended; a step function that is left did so itself."""
        if end is not None and not isinstance(end, LeaveStepFn):
            self._ended = True
            self.request(StopReason("END_OF_DATA", str(end)), everywhere=True)  # whoever meets it leaves the loop

    def roll_back(self) -> None:
        """At a recovery: what follows from step and input is found anew; a request waits for the repeated run."""
        stop = self._agreement.withdraw_stop()
        self._ended = self._told = False
        if stop is not None and stop not in (StopReason.LAST_STEP, StopReason.END_OF_DATA, StopReason.ERROR):
            self._held = stop

    def take_up(self) -> None:
        """After the repeated run: what was asked for before the recovery."""
        if self._held is not None:
            held, self._held = self._held, None
            self.request(held)

    def told(self) -> None:
        """The training loop has been told to stop."""
        self._told = True

    def require_none(self) -> None:
        """Refuse a further train step after a stop.

        Raises:
            EndOfData: The input has ended, or a signal or another process has stopped the job since the loop last
                asked: it ends cleanly here.
            RunAfterStopError: A stop was agreed on.
        """
        if self._ended:
            raise EndOfData("The input has ended; there is no further batch.")
        if self._agreement.stop is not None and self._agreement.unforeseen and not self._told:
            raise LeaveStepFn(f"The session stops: {self._agreement.stop}.")
        if self._agreement.stop is not None:
            raise RunAfterStopError(
                f"Run called even after should_stop requested: {self._agreement.stop}. End the loop with "
                "`while not sess.should_stop()`."
            )
