"""Stopping at a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from monsess.hook import SessionRunHook, hook_name
from monsess.log import logger
from monsess.timer import check_steps

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession


@final
class StopAtStepHook(SessionRunHook):
    """Stops the session at a step, exactly, and costs nothing per step.

    A session that starts at or past the step runs nothing. With ``num_steps`` the goal is stored in every checkpoint:
    one that was not reached survives a crash, so that a restarted job does no more steps than a straight one; one
    that was reached, or that was set with another ``num_steps``, starts a new count from the restored step.

    Args:
        num_steps: Steps to run from the step at which the session starts, at least 1.
        last_step: The global step to stop at, at least 0. Exactly one of the two is given.

    Raises:
        ValueError: Both, neither, or a value that is no such number.

    Example:
        >>> import jax.numpy as jnp, monsess as ms
        >>> @ms.train_step
        ... def step(state):
        ...     return state + 1, {"state": state}
        >>> with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), hooks=[ms.StopAtStepHook(last_step=3)]) as sess:
        ...     while not sess.should_stop():
        ...         outputs = sess.run(step)
        >>> sess.global_step
        3
    """

    on_all_processes = True

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if num_steps is None and last_step is None:
            raise ValueError("One of num_steps or last_step must be specified.")
        if num_steps is not None and last_step is not None:
            raise ValueError("Only one of num_steps or last_step can be specified.")
        self._num_steps = None if num_steps is None else check_steps("num_steps", num_steps)
        self._last_step = None if last_step is None else check_steps("last_step", last_step, at_least=0)
        self._goal: int | None = None
        self._stored_goal: int | None = None

    def begin(self) -> None:
        """Forget the goal of another session."""
        self._goal = self._stored_goal = None

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Tell the session where to stop; a recovery keeps the goal."""
        if self._goal is None:
            self._goal = self._last_step if self._num_steps is None else self._goal_from(session.global_step)
        assert self._goal is not None
        session.stop_at_step(self._goal, by=hook_name(self))

    def state_dict(self) -> dict[str, Any]:
        """The goal, and the ``num_steps`` that it was set with."""
        return {"goal": self._goal, "num_steps": self._num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the stored goal back, provided that it was set with the same ``num_steps``."""
        if self._num_steps is not None and state.get("num_steps") == self._num_steps:
            self._stored_goal = state.get("goal")

    def _goal_from(self, step: int) -> int:
        assert self._num_steps is not None
        if self._stored_goal is not None and self._stored_goal > step:
            logger.info("StopAtStepHook: going on from step %d to the stored goal, step %d.", step, self._stored_goal)
            return self._stored_goal
        return step + self._num_steps
