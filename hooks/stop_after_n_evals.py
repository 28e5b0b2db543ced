"""Ending an evaluation after a number of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from monsess.agreement import StopReason
from monsess.hook import SessionRunContext, SessionRunHook, SessionRunValues, hook_name
from monsess.log import logger
from monsess.timer import check_steps

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession

_EACH_BELOW = 20


@final
class StopAfterNEvalsHook(SessionRunHook):
    """Ends an evaluation of an `Evaluator` after a number of runs, and logs how far it is.

    It counts the runs of the session that it is given to, from nought in each session.

    Args:
        num_evals: How many runs, at least 1; None: until the data ends.
        log_progress: Log ``Evaluation [3/100]``: every run if there are fewer than 20, otherwise ten times and at the
            last one.

    Raises:
        ValueError: ``num_evals`` is no whole number from 1 on.

    Example:
        >>> import jax.numpy as jnp, numpy as np, tempfile, monsess as ms
        >>> @ms.eval_step
        ... def evaluate(w, batch):
        ...     return {"mean": batch.mean()}
        >>> url = tempfile.mkdtemp()
        >>> with ms.MonitoredTrainingSession(lambda: np.float32(0), checkpoint_dir=url) as sess:
        ...     pass
        >>> data = [np.full(8, number, np.float32) for number in range(100)]
        >>> ms.Evaluator(evaluate, data, hooks=[ms.StopAfterNEvalsHook(5)]).evaluate_once(url).metrics
        {'mean': 2.0}
    """

    on_all_processes = True

    def __init__(self, num_evals: int | None, log_progress: bool = True) -> None:
        self._num_evals = None if num_evals is None else check_steps("num_evals", num_evals)
        self._log_progress = bool(log_progress)
        count = self._num_evals or 0
        self._every = 1 if count < _EACH_BELOW else count // 10
        self._done = 0
        self._chief = True

    def begin(self) -> None:
        """Count from nought."""
        self._done = 0

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Note who logs."""
        self._chief = session.is_chief

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Count, log, and ask for the end."""
        self._done += 1
        last = self._done == self._num_evals
        if self._log_progress and self._chief:
            if self._num_evals is None:
                logger.info("Evaluation [%d]", self._done)
            elif self._done % self._every == 0 or last:
                logger.info("Evaluation [%d/%d]", self._done, self._num_evals)
        if last:
            text = f"{self._done} evaluations are done"
            run_context.request_stop(StopReason("REQUESTED", text, hook_name(self)), everywhere=True)
