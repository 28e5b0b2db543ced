"""Steps per second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from monsess import clock
from monsess.hook import SessionRunContext, SessionRunHook, SessionRunValues
from monsess.log import logger
from monsess.timer import Cadence, check_secs, check_steps

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession

_DEFAULT: Any = object()
_DEFAULT_STEPS = 100


@final
class StepCounterHook(SessionRunHook):
    """Logs how many steps per second the training makes, not counting the time spent in hooks and saves.

    It is a line of the log and the curve ``global_step/sec``.
    The first run of a session, which compiles, only starts the clock. The chief logs; `last_rate` is there on all
    processes.

    Args:
        every_n_steps: Log whenever a run crosses a multiple of it, at least 1. The default is 100, or None if
            ``every_n_secs`` is given.
        every_n_secs: Log after so many seconds, above 0. One of the two is given at most.

    Raises:
        ValueError: Both, ``every_n_steps=None`` alone, or a value that is no count of steps or length of time.

    Example:
        >>> import monsess as ms
        >>> hook = ms.StepCounterHook(every_n_secs=5)
        >>> hook.last_rate is None
        True
    """

    #: float | None: steps per second as last logged.
    last_rate: float | None

    def __init__(self, every_n_steps: int | None = _DEFAULT, every_n_secs: float | None = None) -> None:
        if every_n_steps is _DEFAULT:
            every_n_steps = _DEFAULT_STEPS if every_n_secs is None else None
        if (every_n_steps is None) == (every_n_secs is None):
            raise ValueError("exactly one of every_n_steps and every_n_secs should be provided.")
        self._cadence = Cadence(
            every_n_steps=None if every_n_steps is None else check_steps("every_n_steps", every_n_steps),
            every_secs=None if every_n_secs is None else check_secs("every_n_secs", every_n_secs),
        )
        self.begin()

    def begin(self) -> None:
        """Forget what another session measured."""
        self.last_rate = None
        self._disarm()

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Start again with the next run: what lies before it is not training."""
        self._disarm()

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Measure if it is due."""
        after = run_context.global_step
        if self._from_step is None:
            self._arm(self._training_seconds(run_context.session), after)
        elif self._cadence.due(self._seen, after):
            session = run_context.session
            now = self._training_seconds(session)  # before this hook logs, which is no training either
            if now > self._from_seconds:
                self.last_rate = (after - self._from_step) / (now - self._from_seconds)
                if session.is_chief:
                    logger.info("global_step/sec: %g", self.last_rate)
                    session.log({"global_step/sec": self.last_rate}, after)
            self._arm(now, after)
        self._seen = after

    def _sleeps_until(self) -> int | None:
        """See `HookRunner`."""
        return self._cadence.next_due(self._seen)

    def _disarm(self) -> None:
        self._seen = 0
        self._from_step: int | None = None
        self._from_seconds = 0.0

    def _arm(self, now: float, step: int) -> None:
        self._from_step = step
        self._from_seconds = now
        self._cadence.rearm()

    @staticmethod
    def _training_seconds(session: MonitoredSession) -> float:
        spent = session.seconds
        return clock.monotonic() - spent.get("save", 0.0) - spent.get("hooks", 0.0)
