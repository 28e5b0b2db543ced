"""Values in the log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, final

from monsess import clock
from monsess.errors import EndOfData
from monsess.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from monsess.hooks._values import fetch_label, flat_fetches, show, to_host
from monsess.log import logger
from monsess.timer import Cadence, check_secs, check_steps

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession


@final
class LoggingTensorHook(SessionRunHook):
    """Logs values of the step: ``loss = 0.123, step = 10 (0.345 sec)``.

    ``every_n_iter`` counts global steps: the first run of a fresh start is logged, then every run that crosses a
    multiple of it, so that a resumed run logs the steps that a straight one logs. The step is appended unless a tag
    is called ``step`` or ``global_step``. Between two lines nothing is fetched and nothing waits for the device; only
    the first run of a session is fetched in any case, so that an unknown name is found there.

    Args:
        tensors: A dict from tag to fetch, logged in the order of the sorted tags, or an iterable of fetches, logged in
            the order given. A fetch is the name of an output, a callable ``f(state, outputs)``, or a pytree of them.
        every_n_iter: Steps between two lines, at least 1.
        every_n_secs: Seconds between two lines, above 0. At most one of the two is given.
        at_end: Also log at a clean end, unless the last step was just logged.
        formatter: Called with the dict from tag to host value; what it returns is logged as it is.

    Raises:
        ValueError: None of the three or both cadences, an impossible cadence, no tensors, two of one tag, or one that
            is neither name nor callable.

    Example:
        >>> import jax.numpy as jnp, monsess as ms
        >>> @ms.train_step
        ... def step(state):
        ...     return state + 1, {"loss": 1 / (state + 1)}
        >>> lines = []
        >>> hook = ms.LoggingTensorHook(["loss"], every_n_iter=2, formatter=lambda values: lines.append(values) or "")
        >>> with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), hooks=[hook, ms.StopAtStepHook(4)]) as sess:
        ...     while not sess.should_stop():
        ...         outputs = sess.run(step)
        >>> [float(values["loss"]) for values in lines]
        [1.0, 0.5, 0.25]
    """

    def __init__(
        self,
        tensors: Mapping[str, Any] | Iterable[Any],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        only_at_end = at_end and every_n_iter is None and every_n_secs is None
        if not only_at_end and (every_n_iter is None) == (every_n_secs is None):
            raise ValueError("either at_end and/or exactly one of every_n_iter and every_n_secs must be provided.")
        self._cadence = None if only_at_end else _cadence(every_n_iter, every_n_secs)
        self._by_seconds = every_n_secs is not None
        if formatter is not None and not callable(formatter):
            raise ValueError(f"invalid formatter={formatter!r}: expected a callable from a dict of values to a text.")
        self._tags, self._fetches = _tags_and_fetches(tensors)
        self._args = SessionRunArgs(self._fetches)
        self._at_end = bool(at_end)
        self._formatter = formatter
        self.begin()

    def begin(self) -> None:
        """Forget what another session logged."""
        self._first = True
        self._steps_per_run = 1
        self._before = self._seen = 0
        self._due = self._fetched = False
        self._logged_step: int | None = None
        self._logged_at: float | None = None

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Count the seconds from now."""
        self._seen = session.global_step
        self._logged_step = None  # the state is another one after a recovery, whatever its step
        if self._cadence is not None:
            self._cadence.rearm()

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetch the values if this run will be logged."""
        self._before = before = run_context.global_step
        # How many steps the run adds is known only afterwards; mostly as many as the one before it.
        self._due = self._cadence is not None and self._cadence.due(self._seen, before + self._steps_per_run)
        self._fetched = self._due or self._first
        return self._args if self._fetched else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Log the values if they are due."""
        after = run_context.global_step
        self._first = False
        self._steps_per_run = after - self._before
        seen, self._seen = self._seen, after  # steps of runs without hooks count from here on
        if self._cadence is None:
            return
        due = self._due
        if not self._by_seconds:
            due = self._cadence.crossed(seen, after)
        elif after > self._before == 0:
            due = True
        if due:
            session = run_context.session
            self._log(run_values.results if self._fetched else session.evaluate(self._fetches), after)

    def end(self, session: MonitoredSession) -> None:
        """Log once more if ``at_end`` asks for it."""
        step = session.global_step
        if not self._at_end or step == self._logged_step:
            return
        if self._first:
            logger.info("LoggingTensorHook: no step was run, so there is nothing to log at the end.")
            return
        try:
            values = session.evaluate(self._fetches)
        except EndOfData as error:
            logger.warning("LoggingTensorHook: nothing logged at the end, for the input has ended (%s).", error)
            return
        self._log(values, step)

    def _sleeps_until(self) -> int | None:
        """See `HookRunner`."""
        return sys.maxsize if self._cadence is None else self._cadence.next_due(self._seen)

    def _log(self, results: Any, step: int) -> None:
        values = dict(zip(self._tags, to_host(results), strict=True))
        now = clock.monotonic()
        if self._formatter is not None:
            line = self._formatter(values)
        else:
            parts = [f"{tag} = {show(value)}" for tag, value in values.items()]
            if "step" not in values and "global_step" not in values:
                parts.append(f"step = {step}")
            line = ", ".join(parts)
            if self._logged_at is not None:
                line += f" ({now - self._logged_at:.3f} sec)"
        logger.info("%s", line)
        self._logged_at = now
        self._logged_step = step
        if self._cadence is not None:
            self._cadence.rearm()


def _cadence(every_n_iter: Any, every_n_secs: Any) -> Cadence:
    if every_n_secs is not None:
        return Cadence(every_secs=check_secs("every_n_secs", every_n_secs), fire_at_first_run=True)
    return Cadence(every_n_steps=check_steps("every_n_iter", every_n_iter), fire_at_first_run=True)


def _tags_and_fetches(tensors: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The tags in the order of the line, and what to fetch for each."""
    if isinstance(tensors, Mapping):
        tags = tuple(sorted(tensors))
        fetches = tuple(tensors[tag] for tag in tags)
    elif isinstance(tensors, str) or not isinstance(tensors, Iterable):
        raise ValueError(f'invalid tensors={tensors!r}: expected a dict or a list, such as ["loss"].')
    else:
        fetches = tuple(tensors)
        tags = tuple(fetch_label(fetch) for fetch in fetches)
    for tag, fetch in zip(tags, fetches, strict=True):
        flat_fetches(f"tensors[{tag!r}]", fetch)
    if not tags:
        raise ValueError("invalid tensors: there is nothing to log in it.")
    twice = sorted({tag for tag in tags if tags.count(tag) > 1})
    if twice:
        raise ValueError(f"invalid tensors: {', '.join(twice)} occurs twice. Give each a tag of its own, in a dict.")
    return tags, fetches
