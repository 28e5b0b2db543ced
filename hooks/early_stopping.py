"""Stopping when a value no longer gets better, or goes past a bound."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

from monsess.agreement import StopReason
from monsess.checkpoint.evaluations import EVAL_PREFIX
from monsess.hook import SessionRunContext, SessionRunHook, SessionRunValues, hook_name
from monsess.log import logger
from monsess.timer import Cadence, check_secs, check_steps

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession

Mode = Literal["min", "max"]
_NAMED = 8


class Progress(NamedTuple):
    """How a value has done so far: all that a rule remembers.

    Args:
        best: The best value, or None before the first.
        best_step: The step that it is of.
        waited: How many values have come since without a better one.
        step: The step of the newest value.
        value: The newest value.
    """

    best: float | None = None
    best_step: int | None = None
    waited: int = 0
    step: int | None = None
    value: float | None = None

    def after(self, step: int, value: float, mode: Mode, min_delta: float) -> Progress:
        """What it is after one more value; NaN and infinity are never better."""
        if not math.isfinite(value):
            better = False
        elif self.best is None:
            better = True
        else:
            better = value < self.best - min_delta if mode == "min" else value > self.best + min_delta
        if better:
            return Progress(value, step, 0, step, value)
        # Without any best yet, the steps of waiting count from the first value.
        return Progress(self.best, step if self.best_step is None else self.best_step, self.waited + 1, step, value)


@final
class EarlyStoppingHook(SessionRunHook):
    """Stops when a logged value has not got better for too long, or has gone past a bound.

    It hears every value that is logged with `MonitoredSession.log`: ``eval/<name>`` of an `EvaluationHook`, or what the
    loop logs itself. What it remembers, the best value and how long that is ago, is stored in every checkpoint, so that
    a run which is killed and started again stops where a straight one does. No flag is stored: the rule is applied to
    what is remembered, before the first run too, so that starting the stopped run again executes nothing, and starting
    it with more patience goes on. What a hook logs is in the checkpoint of that step; what the loop logs after ``run``
    comes after it, and is stored with the next one. A value that never comes stops nothing; that is said at the end.

    The stop takes effect in the run in which the value is logged. With several processes that holds for a value of an
    `EvaluationHook`, which is the same on all. The stop for any other value is a wish there, which takes effect some
    runs later, on all at the same step: what one process alone logs does no harm.

    Args:
        metric: The name of the value, such as ``"eval/loss"``.
        mode: ``"min"``: lower is better; ``"max"``: higher is better.
        patience: Stop at the so-manyth value in a row that is not better than the best, at least 1.
        max_steps: Stop at a value so many steps or more after the best one, at least 1.
        min_delta: By more than so much a value has to differ from the best to be better; 0 or more.
        higher_than: Stop at a value above it.
        lower_than: Stop at a value below it.
        min_steps: Values of earlier steps are not looked at.

    Raises:
        ValueError: ``metric`` is no name, there is no rule, or a number is impossible.

    Example:
        >>> import jax.numpy as jnp, monsess as ms
        >>> @ms.train_step
        ... def step(state):
        ...     return state + 1, {"loss": jnp.maximum(3.0 - state, 0.0)}
        >>> hook = ms.EarlyStoppingHook("loss", patience=3)
        >>> with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), hooks=[hook]) as sess:
        ...     while not sess.should_stop():
        ...         outputs = sess.run(step)
        ...         sess.log({"loss": outputs["loss"]})
        >>> sess.global_step, sess.stop_reason.name
        (7, 'EARLY_STOPPING')
    """

    def __init__(
        self,
        metric: str,
        mode: Mode = "min",
        *,
        patience: int | None = None,
        max_steps: int | None = None,
        min_delta: float = 0.0,
        higher_than: float | None = None,
        lower_than: float | None = None,
        min_steps: int = 0,
    ) -> None:
        if not isinstance(metric, str) or not metric:
            raise ValueError(f'invalid metric={metric!r}: expected the name of a logged value, such as "eval/loss".')
        if mode not in ("min", "max"):
            raise ValueError(f'invalid mode={mode!r}: expected "min" or "max".')
        if patience is None and max_steps is None and higher_than is None and lower_than is None:
            raise ValueError(
                "EarlyStoppingHook has no rule: give patience= or max_steps= (without a better value), higher_than= or "
                "lower_than=."
            )
        self._metric = metric
        self._mode: Mode = mode
        self._patience = None if patience is None else check_steps("patience", patience)
        self._max_steps = None if max_steps is None else check_steps("max_steps", max_steps)
        self._min_delta = _number("min_delta", min_delta)
        if self._min_delta < 0:
            raise ValueError(f"invalid min_delta={min_delta!r}: expected 0 or more.")
        self._higher_than = None if higher_than is None else _number("higher_than", higher_than)
        self._lower_than = None if lower_than is None else _number("lower_than", lower_than)
        self._min_steps = check_steps("min_steps", min_steps, at_least=0)
        self.on_all_processes = metric.startswith(EVAL_PREFIX)
        self.state_key = f"EarlyStoppingHook:{metric}"  # two of them in another order keep their states
        self.begin()

    @property
    def best(self) -> float | None:
        """The best value so far, or None."""
        return self._progress.best

    @property
    def best_step(self) -> int | None:
        """The step of the best value, or None."""
        return None if self._progress.best is None else self._progress.best_step

    def begin(self) -> None:
        """Forget what another session logged."""
        self._before = Progress()  # without the newest value, which may come a second time
        self._progress = Progress()
        self._heard: set[str] = set()
        self._session: MonitoredSession | None = None

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Apply the rule to what is remembered, before the first run."""
        self._session = session
        self._stop_if_due(everywhere=self.on_all_processes)  # what is remembered is the chief's, on all processes

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take note of a value, and ask for a stop if it is due."""
        value = scalars.get(self._metric)
        if value is None:
            if len(self._heard) < _NAMED:
                self._heard.update(scalars)
            return
        newest = self._progress.step
        if step < self._min_steps or (newest is not None and step < newest):
            return
        if newest is None or step > newest:
            self._before = self._progress
        self._progress = self._before.after(step, float(value), self._mode, self._min_delta)
        session = self._session
        self._stop_if_due(everywhere=session is not None and self.on_all_processes and session._hooks.caller_is_on_all)

    def end(self, session: MonitoredSession) -> None:
        """Say so if the value never came."""
        if self._progress.step is None and (self._heard or session.global_step > self._min_steps):
            names = ", ".join(sorted(self._heard)[:_NAMED]) or "none"
            logger.warning(
                "EarlyStoppingHook: no value %r was logged, so it stopped nothing. Logged were: %s.",
                self._metric,
                names,
            )

    def state_dict(self) -> dict[str, Any]:
        """The best value and how long it is ago, without and with the newest value."""
        return {"before": list(self._before), "now": list(self._progress)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self._before, self._progress = Progress(*state["before"]), Progress(*state["now"])

    def _stop_if_due(self, everywhere: bool) -> None:
        why = self._verdict()
        session = self._session
        if why is None or session is None or session.stop_reason is not None:
            return
        logger.info("%s", why)
        logger.info("Requesting early stopping at global step %d", session.global_step)
        session.request_stop(StopReason("EARLY_STOPPING", why, hook_name(self)), everywhere)

    def _verdict(self) -> str | None:
        """Why to stop, or None."""
        best, best_step, waited, step, value = self._progress
        if step is None or value is None or best_step is None:
            return None
        than = None
        if self._higher_than is not None and value > self._higher_than:
            than = f"greater than the configured threshold ({self._higher_than:g})"
        elif self._lower_than is not None and value < self._lower_than:
            than = f"less than the configured threshold ({self._lower_than:g})"
        if than is not None:
            return f'At step {step}, metric "{self._metric}" has value {value:g} which is {than} for early stopping.'
        found = f"the best is {'none' if best is None else f'{best:g}'} of step {best_step}"
        change = "decrease" if self._mode == "min" else "increase"
        if self._max_steps is not None and step - best_step >= self._max_steps:
            return (
                f'No {change} in metric "{self._metric}" for {step - best_step} steps, which is greater than or equal '
                f"to max steps ({self._max_steps}) configured for early stopping: {found}."
            )
        if self._patience is not None and waited >= self._patience:
            return (
                f'No {change} in metric "{self._metric}" for {waited} values, which is greater than or equal to the '
                f"patience ({self._patience}) configured for early stopping: {found}."
            )
        return None


def stop_if_no_decrease_hook(
    metric_name: str, max_steps_without_decrease: int, min_steps: int = 0
) -> EarlyStoppingHook:
    """Make a hook that stops when a value has not fallen for a number of steps.

    It needs no cadence, directory or event files: it looks at each value as it is logged.

    Args:
        metric_name: The name of the value, such as ``"eval/loss"``.
        max_steps_without_decrease: Stop at a value so many steps or more after the lowest one.
        min_steps: Values of earlier steps are not looked at.

    Returns:
        An `EarlyStoppingHook`.

    Example:
        >>> import monsess as ms
        >>> hook = ms.stop_if_no_decrease_hook("eval/loss", 1000)
    """
    return EarlyStoppingHook(metric_name, "min", max_steps=max_steps_without_decrease, min_steps=min_steps)


def stop_if_no_increase_hook(
    metric_name: str, max_steps_without_increase: int, min_steps: int = 0
) -> EarlyStoppingHook:
    """Make a hook that stops when a value has not risen for a number of steps; see `stop_if_no_decrease_hook`.

    Args:
        metric_name: The name of the value, such as ``"eval/accuracy"``.
        max_steps_without_increase: Stop at a value so many steps or more after the highest one.
        min_steps: Values of earlier steps are not looked at.

    Returns:
        An `EarlyStoppingHook`.

    Example:
        >>> import monsess as ms
        >>> hook = ms.stop_if_no_increase_hook("eval/accuracy", 1000)
    """
    return EarlyStoppingHook(metric_name, "max", max_steps=max_steps_without_increase, min_steps=min_steps)


def stop_if_higher_hook(metric_name: str, threshold: float, min_steps: int = 0) -> EarlyStoppingHook:
    """Make a hook that stops when a value is above a threshold.

    Args:
        metric_name: The name of the value, such as ``"eval/accuracy"``.
        threshold: Stop at a value above it.
        min_steps: Values of earlier steps are not looked at.

    Returns:
        An `EarlyStoppingHook`.

    Example:
        >>> import monsess as ms
        >>> hook = ms.stop_if_higher_hook("eval/accuracy", 0.99)
    """
    return EarlyStoppingHook(metric_name, "max", higher_than=threshold, min_steps=min_steps)


def stop_if_lower_hook(metric_name: str, threshold: float, min_steps: int = 0) -> EarlyStoppingHook:
    """Make a hook that stops when a value is below a threshold.

    Args:
        metric_name: The name of the value, such as ``"eval/loss"``.
        threshold: Stop at a value below it.
        min_steps: Values of earlier steps are not looked at.

    Returns:
        An `EarlyStoppingHook`.

    Example:
        >>> import monsess as ms
        >>> hook = ms.stop_if_lower_hook("eval/loss", 0.01)
    """
    return EarlyStoppingHook(metric_name, "min", lower_than=threshold, min_steps=min_steps)


def make_early_stopping_hook(
    should_stop_fn: Callable[[], Any], *, run_every_secs: float | None = None, run_every_steps: int | None = None
) -> SessionRunHook:
    """Make a hook that stops when a function of the user's says so.

    With several processes each calls the function for itself, and the first true answer of any of them stops all, some
    runs later and at the same step.

    Args:
        should_stop_fn: Called without arguments in the training thread, after the first run of a fresh start and then
            as often as one of the two cadences says; a true answer stops.
        run_every_secs: Seconds between two calls, above 0; 60 if neither is given.
        run_every_steps: Call it when a run crosses a multiple of this, at least 1.

    Returns:
        A hook for ``hooks=``.

    Raises:
        TypeError: ``should_stop_fn`` cannot be called.
        ValueError: Both cadences, or one that is no length of time or count of steps.

    Example:
        >>> import monsess as ms, os
        >>> hook = ms.make_early_stopping_hook(lambda: os.path.exists("stop-now"), run_every_steps=100)
    """
    if not callable(should_stop_fn):
        raise TypeError(f"`should_stop_fn` must be callable, found {should_stop_fn!r}.")
    if run_every_secs is not None and run_every_steps is not None:
        raise ValueError("Only one of `run_every_secs` and `run_every_steps` must be set.")
    if run_every_steps is not None:
        cadence = Cadence(every_n_steps=check_steps("run_every_steps", run_every_steps), fire_at_first_run=True)
    else:
        secs = check_secs("run_every_secs", 60 if run_every_secs is None else run_every_secs)
        cadence = Cadence(every_secs=secs, fire_at_first_run=True)
    return _StopOnPredicateHook(should_stop_fn, cadence)


@final
class _StopOnPredicateHook(SessionRunHook):
    """Asks a function of the user's whether to stop."""

    def __init__(self, should_stop_fn: Callable[[], Any], cadence: Cadence) -> None:
        self._should_stop_fn = should_stop_fn
        self._cadence = cadence
        self._seen = 0

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Count steps and seconds from now."""
        self._seen = session.global_step
        self._cadence.rearm()

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Ask if it is due."""
        step = run_context.global_step
        seen, self._seen = self._seen, step  # steps of runs without hooks count from here on
        if not self._cadence.due(seen, step):
            return
        self._cadence.rearm()
        if self._should_stop_fn():
            logger.info("Requesting early stopping at global step %d", step)
            name = getattr(self._should_stop_fn, "__qualname__", "should_stop_fn")
            run_context.request_stop(StopReason("EARLY_STOPPING", f"{name}() said so", "make_early_stopping_hook"))


def _number(name: str, value: Any) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"invalid {name}={value!r}: expected a finite number.")
    return float(value)
