"""Stopping in time: before the scheduler ends the job."""

from __future__ import annotations

import math
import numbers
import os
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any, final

from monsess import clock
from monsess.agreement import StopReason
from monsess.hook import SessionRunContext, SessionRunHook, SessionRunValues, hook_name
from monsess.log import logger
from monsess.new_checkpoints import secs_from_zero
from monsess.timer import check_secs

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession

#: str: where Slurm says when the job ends, in seconds since the epoch.
SLURM_VARIABLE = "SLURM_JOB_END_TIME"


@final
class StopAtTimeHook(SessionRunHook):
    """Stops cleanly once a time has come, so that the final checkpoint is committed before a job's time limit.

    The chief's clock decides for all processes, which stop at the same step. A session that is started when the time
    has come already runs nothing. Whoever starts the job again sees ``sess.stop_reason.by == "StopAtTimeHook"``; the
    next attempt has its own time, for nothing of it is stored.

    Args:
        secs: Seconds from the beginning of the session, more than ``margin_secs``, by the monotonic clock; a
            recovery does not begin anew.
        at: A moment instead: seconds since the epoch, or a `datetime.datetime` with a time zone. With neither of the
            two the end of the Slurm job is taken, from ``SLURM_JOB_END_TIME``.
        margin_secs: So long before that moment it stops: the time that one step and the final save need, 0 or more.

    Raises:
        ValueError: Both, neither and no Slurm job, or a value that is no such time.

    Example:
        >>> import jax.numpy as jnp, monsess as ms
        >>> @ms.train_step
        ... def step(state):
        ...     return state + 1, {}
        >>> with ms.testing.FakeClock() as clock:
        ...     hook = ms.StopAtTimeHook(secs=3600, margin_secs=100)
        ...     with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), hooks=[hook]) as sess:
        ...         while not sess.should_stop():
        ...             outputs = sess.run(step)
        ...             clock.advance(1000)
        >>> sess.global_step, sess.stop_reason.by
        (5, 'StopAtTimeHook')
    """

    def __init__(
        self, secs: float | None = None, *, at: float | datetime | None = None, margin_secs: float = 60.0
    ) -> None:
        if secs is not None and at is not None:
            raise ValueError("Only one of secs and at can be given.")
        self._secs = None if secs is None else check_secs("secs", secs)
        if secs is None and at is None:
            at = _end_of_slurm_job()
        self._at = None if at is None else _moment(at)
        self._margin = secs_from_zero("margin_secs", margin_secs)
        if self._secs is not None and self._secs <= self._margin:
            raise ValueError(
                f"invalid secs={secs!r}: it stops margin_secs={self._margin:g} before that, so it would run nothing. "
                "Give a smaller margin_secs=: the time that one step and the final save need."
            )
        self._deadline = math.inf  # of the clock; never, where another process decides or it has asked already

    def begin(self) -> None:
        """Begin to count."""
        left = self._secs if self._at is None else self._at - clock.wall()
        assert left is not None
        self._deadline = clock.monotonic() + left - self._margin

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Ask for a stop before the first run if the time has come."""
        if not session.is_chief:
            self._deadline = math.inf
        if clock.monotonic() >= self._deadline:
            session.request_stop(self._reason())

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Ask for a stop if the time has come."""
        if clock.monotonic() >= self._deadline:
            run_context.request_stop(self._reason())

    def _sleeps_until(self) -> int | None:
        """See `HookRunner`."""
        return sys.maxsize

    def _sleeps_until_time(self) -> float:
        """See `HookRunner`."""
        return self._deadline

    def _reason(self) -> StopReason:
        self._deadline = math.inf  # a wish is kept until it is acted on
        limit = f"{self._secs:g} s" if self._at is None else datetime.fromtimestamp(self._at).astimezone().isoformat()
        margin = f", {self._margin:g} s before it" if self._margin else ""
        text = f"the time limit ({limit}) has come{margin}"
        logger.info("StopAtTimeHook: %s; asking for a stop.", text)
        return StopReason("REQUESTED", text, hook_name(self))


def _end_of_slurm_job() -> float:
    text = os.environ.get(SLURM_VARIABLE, "")
    try:
        return float(text)
    except ValueError:
        found = f"{SLURM_VARIABLE}={text!r} is no time" if text else f"{SLURM_VARIABLE} is not set"
        raise ValueError(
            f"StopAtTimeHook knows no limit: give secs= or at=; {found}, so there is no Slurm job to ask for its end."
        ) from None


def _moment(at: Any) -> float:
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise ValueError(f"invalid at={at!r}: it has no time zone. Write at.astimezone() for the local one.")
        return at.timestamp()
    if not isinstance(at, numbers.Real) or isinstance(at, bool) or not math.isfinite(at) or at <= 0:
        raise ValueError(f"invalid at={at!r}: expected seconds since the epoch, or a datetime with a time zone.")
    return float(at)
