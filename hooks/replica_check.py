"""A look, every now and then, whether all copies of the state are still the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from monsess.hook import SessionRunContext, SessionRunHook, SessionRunValues
from monsess.timer import Cadence, check_steps

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession


@final
class ReplicaCheckHook(SessionRunHook):
    """Compares a bit-hash of the state over all devices of all processes, and ends training where they differ.

    The session itself does so after the first step and with every save. This hook does it at multiples of a number of
    steps, and waits for the step: choose the number accordingly.

    Args:
        every_n_steps: Compare whenever a run crosses a multiple of it, at least 1.

    Raises:
        ValueError: ``every_n_steps`` is no whole number from 1 on. In a run: `ReplicasDifferError`.

    Example:
        >>> import monsess as ms
        >>> hook = ms.ReplicaCheckHook(every_n_steps=1000)
    """

    on_all_processes = True

    def __init__(self, every_n_steps: int) -> None:
        self._cadence = Cadence(every_n_steps=check_steps("every_n_steps", every_n_steps), every_secs=None)
        self._seen = 0

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Count from the step that the session begins with."""
        self._seen = session.global_step

    def _sleeps_until(self) -> int | None:
        """See `HookRunner`."""
        return self._cadence.next_due(self._seen)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Compare if it is due."""
        seen, self._seen = self._seen, run_context.global_step
        if self._cadence.crossed(seen, run_context.global_step):
            run_context.session.compare_replicas()
