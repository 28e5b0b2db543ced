"""Curves: what the step returns and collects, at multiples of a number of steps or after a number of seconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax.core import Tracer

from monsess.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from monsess.hooks._values import fetch_label, flat_fetches
from monsess.log import mask
from monsess.reduction import path_name
from monsess.summary import Collected, collecting
from monsess.timer import Cadence, check_secs, check_steps

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession


@final
class SummarySaverHook(SessionRunHook):
    """Logs the step's scalar outputs and what it collects by `monsess.summary`, every so many steps or seconds.

    They go where `MonitoredSession.log` sends them: into ``metrics.jsonl``, TensorBoard's files, and to every hook that
    overrides ``log``. The first run of a fresh start is logged, then every run that crosses a multiple of
    ``save_steps``, so that a resumed run logs the steps that a straight one logs. In between nothing is fetched and
    nothing waits for the device. With several processes the chief decides about seconds for all, which log some runs
    later, after the same step.

    Args:
        save_steps: Steps between two of them, at least 1.
        save_secs: Seconds between two of them, above 0. Exactly one of the two is given.
        output_dir: The session's ``summary_dir``, or None for the same; it is only compared.
        summaries: What to log; None: every scalar output. Otherwise a fetch, an iterable of them, or a dict from tag
            to fetch: the name of an output, or a function ``f(state, outputs)``, compiled once and run only when it
            is due, that calls `monsess.summary` itself or returns a scalar or a dict of them. What the step collects
            is logged in any case.

    Raises:
        ValueError: None or both of the cadences, an impossible one, or nothing to log in ``summaries``. When the
            session is made: it has another ``summary_dir``.

    Example:
        >>> import jax.numpy as jnp, monsess as ms
        >>> @ms.train_step
        ... def step(state):
        ...     return state + 1, {"loss": (1 / (1 + state)).mean()}
        >>> def weights(state, outputs):
        ...     ms.summary.histogram("weights", state)
        ...     return {"norm": jnp.linalg.norm(state)}
        >>> hooks = [ms.SummarySaverHook(save_steps=2, summaries=["loss", weights]), ms.StopAtStepHook(4)]
        >>> url = "memory://docs/summary-saver"
        >>> with ms.MonitoredTrainingSession(
        ...     lambda: jnp.zeros(4), checkpoint_dir=url, hooks=hooks, save_summaries_steps=None
        ... ) as sess:
        ...     while not sess.should_stop():
        ...         outputs = sess.run(step)
        >>> [(point.step, point.value) for point in ms.read_metrics(url).curves["norm"]]
        [(1, 2.0), (2, 4.0), (4, 8.0)]
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        summaries: Any = None,
    ) -> None:
        if (save_steps is None) == (save_secs is None):
            raise ValueError("exactly one of save_steps and save_secs should be provided.")
        self._by_seconds = save_secs is not None
        self._cadence = Cadence(
            every_n_steps=None if save_steps is None else check_steps("save_steps", save_steps),
            every_secs=None if save_secs is None else check_secs("save_secs", save_secs),
            fire_at_first_run=True,
        )
        self._directory = None if output_dir is None else os.fspath(output_dir)
        self._tags, self._fetches = _tags_and_fetches(summaries)
        self._args = SessionRunArgs(self._fetches)
        self._named = summaries is not None
        self.begin()

    def begin(self) -> None:
        """Forget what another session logged."""
        self._first = True
        self._on = True
        self._texts = True
        self._steps_per_run = 1
        self._before = self._seen = 0
        self._due = self._fetched = False
        self._asked = self._clock_of_all = False

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Compare the directories, and count the seconds from now."""
        if self._directory is not None and self._directory.rstrip("/") != (session.summary_dir or "").rstrip("/"):
            found = "none" if session.summary_dir is None else repr(mask(session.summary_dir))
            raise ValueError(
                f"SummarySaverHook(output_dir={mask(self._directory)!r}): the session records in {found}. Leave it "
                "out, or pass summary_dir= to the session."
            )
        self._on = session.is_logging
        self._texts = True  # they may have been rolled back
        self._asked = False
        self._clock_of_all = self._by_seconds and session.process_count > 1
        self._seen = session.global_step
        self._cadence.rearm()

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetch the values if this run will be logged."""
        self._before = before = run_context.global_step
        # How many steps the run adds is known only afterwards; mostly as many as the one before it.
        self._due = self._on and not self._clock_of_all
        self._due = self._due and self._cadence.due(self._seen, before + self._steps_per_run)
        self._fetched = self._due or (self._first and self._named)  # an unknown name is found in the first run
        return self._args if self._fetched else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Log the values if they are due."""
        after = run_context.global_step
        first, self._first = self._first, False
        self._steps_per_run = after - self._before
        seen, self._seen = self._seen, after  # steps of runs without hooks count from here on
        due = self._due
        if not self._by_seconds:
            due = self._on and self._cadence.crossed(seen, after)
        elif self._clock_of_all:
            due = self._agreed(run_context)
        if self._on and first and self._before == 0:
            due = True
        if due and self._on:
            session = run_context.session
            results = run_values.results if self._fetched else session.evaluate(self._fetches)
            session.log(self._values(results, run_values.summaries), after)
        if due:  # also where nobody hears it: the chief asks for others
            self._cadence.rearm()
            self._asked = False

    def _sleeps_until(self) -> int | None:
        """See `HookRunner`."""
        return self._cadence.next_due(self._seen)

    def _agreed(self, run_context: SessionRunContext) -> bool:
        """Whether all log in this run, by the chief's clock."""
        if not self._asked and run_context.session.is_chief and self._cadence.elapsed():
            self._asked = True
            run_context.request_log()
        return run_context.log_requested

    def _values(self, results: Any, collected: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for tag, result in zip(self._tags, results, strict=True):
            returned = result
            if isinstance(result, _Looked):
                values |= result.collected.values(self._texts)
                tag, returned = (tag if isinstance(result.returned, jax.Array) else ""), result.returned
            for path, leaf in jax.tree_util.tree_flatten_with_path(returned)[0]:
                values["/".join(part for part in (tag, path_name(path) if path else "") if part)] = leaf
        if collected:
            values |= collected.values(self._texts)
        self._texts = False  # they are part of the program
        return values


class _Looked(NamedTuple):
    """What came of a function: what it has collected, and what it returned."""

    collected: Collected
    returned: Any


def _tags_and_fetches(summaries: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """How to call what has no name of its own, and what to fetch; a function gives a `_Looked`."""
    if summaries is None:
        return ("",), (_all_scalars,)
    if isinstance(summaries, Mapping):
        named = {str(tag): fetch for tag, fetch in summaries.items()}
    elif isinstance(summaries, str) or callable(summaries):
        named = {fetch_label(summaries): summaries}
    elif isinstance(summaries, Iterable):
        listed = list(summaries)
        named = {fetch_label(fetch): fetch for fetch in listed}
        if len(named) < len(listed):
            raise ValueError("invalid summaries: two fetches of one name. Give each a tag of its own, in a dict.")
    else:
        raise ValueError(f'invalid summaries={summaries!r}: expected a dict or a list, such as ["loss"].')
    if not named:
        raise ValueError("invalid summaries: there is nothing to log in it. Leave it out for every scalar output.")
    for tag, fetch in named.items():
        flat_fetches(f"summaries[{tag!r}]", fetch)
    return tuple(named), tuple(_of_function(fetch) if callable(fetch) else fetch for fetch in named.values())


def _of_function(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def look(state: Any, outputs: Any) -> Any:
        with collecting() as found:
            returned = function(state, outputs)
        like = [leaf for leaf in jax.tree.leaves((state, outputs)) if isinstance(leaf, Tracer)]
        return _Looked(found.reduced(None, like[0] if like else None), returned)

    look.__qualname__ = fetch_label(function)
    return look


def _all_scalars(state: Any, outputs: Any) -> Any:
    """Every output that is one real number, by its path."""
    leaves = jax.tree_util.tree_flatten_with_path(outputs)[0]
    return _Looked(Collected(), {path_name(path): leaf for path, leaf in leaves if _is_scalar(leaf)})


def _is_scalar(leaf: Any) -> bool:
    real = jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.issubdtype(leaf.dtype, jnp.integer)
    return leaf.shape == () and (real or leaf.dtype == jnp.bool_)
