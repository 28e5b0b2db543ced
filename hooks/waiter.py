"""Waiting for another run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from monsess import clock
from monsess.errors import MonsessError
from monsess.hook import SessionRunContext, SessionRunHook
from monsess.log import logger
from monsess.timer import check_secs, check_steps

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession

_POLL_SECS = 0.5
_STEPS_PER_LINE = 1000
_SECS_PER_LINE = 60.0


@final
class GlobalStepWaiterHook(SessionRunHook):
    """Holds back the first run until another run has reached a step.

    All processes of one monsess job share one step, so only the progress of another run can be waited for:
    ``step_fn`` says where that one is. Without it the session's own step is taken, which is good for a session that
    may have been restored past the target; short of it nothing would ever end the wait, and that is an error at once.
    A stop that is asked for meanwhile, by anybody, ends the wait.

    Args:
        wait_until_step: The step to wait for; 0: no wait.
        timeout_secs: Seconds to wait at most, above 0.
        step_fn: Called every half second without arguments; returns the other run's step as an int, or None while
            there is none. With ``store = ms.CheckpointStore(url)``, ``lambda: max(store.steps(), default=None)`` does;
            `latest_checkpoint` would read every byte of a checkpoint each time.

    Raises:
        ValueError: An argument is no such number or callable.
        MonsessError: In the first run: the time is up, or there is nothing that could end the wait.

    Example:
        >>> import jax.numpy as jnp, monsess as ms
        >>> hook = ms.GlobalStepWaiterHook(1000, step_fn=iter([None, 500, 1100]).__next__)
        >>> @ms.train_step
        ... def step(state):
        ...     return state + 1, {}
        >>> with ms.testing.FakeClock() as clock:
        ...     with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), hooks=[hook]) as sess:
        ...         outputs = sess.run(step)
        ...     clock.slept
        [0.5, 0.5]
    """

    def __init__(
        self,
        wait_until_step: int,
        timeout_secs: float = 7200,
        step_fn: Callable[[], int | None] | None = None,
    ) -> None:
        self._target = check_steps("wait_until_step", wait_until_step, at_least=0)
        self._timeout_secs = check_secs("timeout_secs", timeout_secs)
        if step_fn is not None and not callable(step_fn):
            raise ValueError(f"invalid step_fn={step_fn!r}: expected a callable that returns a step.")
        self._step_fn = step_fn
        self._passed = False
        self._coord: Coordinator | None = None

    def begin(self) -> None:
        """Wait anew in another session."""
        self._passed = False

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Note the coordinator, whose stop ends the wait."""
        self._coord = coord

    def before_run(self, run_context: SessionRunContext) -> None:
        """Wait, the first time."""
        if not self._passed:
            if self._target > 0:
                self._wait(run_context)
            self._passed = True

    def _sleeps_until(self) -> int | None:
        """See `HookRunner`."""
        return sys.maxsize

    def _wait(self, run_context: SessionRunContext) -> None:
        if self._step_fn is None:
            if run_context.global_step >= self._target:
                return
            raise MonsessError(
                f"GlobalStepWaiterHook waits for step {self._target}, but this session is at step "
                f"{run_context.global_step} and only its own runs advance it, so the wait would never end. Pass "
                "step_fn=, which says where another run is (with store = monsess.CheckpointStore(url) that is lambda: "
                "max(store.steps(), default=None)), or leave the hook out: all processes of one job run the same step."
            )
        start = line_at = clock.monotonic()
        step = line_step = self._step_fn() or 0
        if step < self._target:
            logger.info("Waiting for global step %d before starting training.", self._target)
        while step < self._target:
            if run_context.stop_requested or (self._coord is not None and self._coord.should_stop()):
                logger.info("Waiting for global step %d ends at step %d: a stop was requested.", self._target, step)
                return
            now = clock.monotonic()
            if now - start >= self._timeout_secs:
                raise MonsessError(
                    f"GlobalStepWaiterHook has waited {now - start:g} s for global step {self._target}; step_fn is at "
                    f"{step}. Is the other run alive? Raise timeout_secs if it needs longer."
                )
            if step - line_step > _STEPS_PER_LINE or now - line_at >= _SECS_PER_LINE:
                logger.info(
                    "Waiting for global step %d before starting training. Current step is %d.", self._target, step
                )
                line_at, line_step = now, step
            clock.sleep(_POLL_SECS)
            step = self._step_fn() or 0
