"""Evaluation inside the training loop, on data of its own."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np

from monsess import clock
from monsess.agreement import StopReason
from monsess.checkpoint.evaluations import EVAL_PREFIX
from monsess.collectives import allgather
from monsess.errors import EndOfData, HookError, MonsessError
from monsess.hook import SessionRunContext, SessionRunHook, SessionRunValues
from monsess.hooks._values import show
from monsess.log import logger
from monsess.over_batches import OverBatches, counted_eval_step
from monsess.step import EvalStep
from monsess.timer import Cadence, check_secs, check_steps

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession

#: Batches that a process holds while it finds out how many of them all processes have.
_WINDOW = 8
#: Ends after which there is nothing more to train: the final state is worth an evaluation.
_ENDS = (
    StopReason.LAST_STEP,
    StopReason.END_OF_DATA,
    StopReason.EARLY_STOPPING,
    StopReason.REQUESTED,
    StopReason.BODY_LEFT,
)


@final
class EvaluationHook(SessionRunHook):
    """Evaluates the current state with an eval step on data of its own, and logs the results as ``eval/<name>``.

    It changes neither the state nor the step, and takes no batch from the session's ``data``. What the step returns is
    put together over the batches as the step puts it together over the devices: "mean" (weighted by rows, so that
    the last, smaller batch counts for what it is), "sum", "max" or "min"; ``finish`` makes ratios and the like of them.
    The results go where `MonitoredSession.log` takes them: to the curves, to `EarlyStoppingHook`, and to
    `KeepBest(n, "eval/<name>")`, which ranks a checkpoint of the same step by them.

    A step is evaluated once, not again at the end or after a restart. Only the last step of a run that its data or its
    loop has ended is evaluated after the final commit, and once more if that run is started again. With several
    processes all take part, each with its own share of the data, and an evaluation ends where the first of them has no
    further batch. A signal that ends the job breaks an evaluation off, so that the final checkpoint is in time; the
    next attempt makes up for it.

    Args:
        step: Made by `eval_step`; its outputs are single numbers.
        data: An iterable of batches that can be gone through again and again, such as a list, or a function without
            arguments that returns one; leaves ``[local_batch, ...]``. None: the step takes no batch.
        every_n_steps: Evaluate when a run crosses a multiple of it, at least 1.
        every_secs: Evaluate when so many seconds have passed since the last time, above 0. With several processes the
            chief's clock decides, and it may come a little late.
        with_saves: Evaluate whenever the step is about to be saved because a hook before this one has asked for it, as
            the session's own saver does.
        at_start: Evaluate the state of a fresh start, before the first run.
        at_end: Evaluate the last state of training, unless a signal has ended it.
        num_batches: Batches of one evaluation at most, at least 1; None: all.
        finish: Called with the dict of results; what it returns, a dict of numbers, is logged in their place.
        name: Of this evaluation where there are several: the results are logged as ``eval/<this name>/<name>``.

    Raises:
        ValueError: Nothing says when to evaluate, ``data`` can be gone through only once, or a number is impossible.
        TypeError: ``step`` is no eval step.
        StepDefinitionError: An output of ``step`` stays one value per device; in an evaluation: it is no single number.
        HookError: In an evaluation: another one of the session logs a value of the same name.

    Example:
        >>> import jax.numpy as jnp, numpy as np, monsess as ms
        >>> @ms.train_step
        ... def train(w):
        ...     return w + 1, {}
        >>> @ms.eval_step
        ... def evaluate(w, batch):
        ...     return {"error": jnp.mean((batch - w) ** 2)}
        >>> test = [np.full(8, 3, np.float32), np.full(8, 5, np.float32)]
        >>> hook = ms.EvaluationHook(evaluate, test, every_n_steps=2)
        >>> with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), hooks=[hook, ms.StopAtStepHook(4)]) as sess:
        ...     while not sess.should_stop():
        ...         outputs = sess.run(train)
        >>> hook.evaluated_step, hook.results
        (4, {'error': 1.0})
    """

    on_all_processes = True

    def __init__(
        self,
        step: EvalStep,
        data: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
        *,
        every_n_steps: int | None = None,
        every_secs: float | None = None,
        with_saves: bool = False,
        at_start: bool = False,
        at_end: bool = True,
        num_batches: int | None = None,
        finish: Callable[[dict[str, float]], Mapping[str, Any]] | None = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(step, EvalStep):
            raise TypeError(f"EvaluationHook needs a step made by monsess.eval_step, found {step!r}.")
        if not (every_n_steps is not None or every_secs is not None or with_saves or at_start or at_end):
            raise ValueError(
                "EvaluationHook would never evaluate: give every_n_steps=, every_secs=, with_saves=True, at_start=True "
                "or at_end=True."
            )
        self._data = check_data(step, data)
        self._by_steps = None
        if every_n_steps is not None:
            self._by_steps = Cadence(every_n_steps=check_steps("every_n_steps", every_n_steps))
        self._by_secs = None if every_secs is None else _SharedTimer(check_secs("every_secs", every_secs))
        self._with_saves, self._at_start, self._at_end = bool(with_saves), bool(at_start), bool(at_end)
        self._num_batches = None if num_batches is None else check_steps("num_batches", num_batches)
        self._finish = check_function("finish", finish)
        self._prefix = prefix_of(name)
        self.state_key = None if name is None else f"EvaluationHook:{name}"
        self._step = counted_eval_step(step)
        self.begin()

    @property
    def results(self) -> dict[str, float]:
        """The results of the last evaluation of this session, by the names of the outputs; empty before the first."""
        return dict(self._results)

    @property
    def evaluated_step(self) -> int | None:
        """The step that was evaluated last, in this attempt of the run or an earlier one; None before the first."""
        return self._evaluated

    def begin(self) -> None:
        """Forget what another session evaluated."""
        self._evaluated: int | None = None
        self._overdue: int | None = None
        self._results: dict[str, float] = {}
        self._seen = 0
        self._warned = False

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Count steps and seconds from now."""
        self._seen = session.global_step
        if self._by_secs is not None:
            self._by_secs.restart(session.global_step)
        if self._overdue is not None and self._overdue != session.global_step:
            self._overdue = None
        if self._at_start and session.global_step == 0 and self._evaluated is None:
            self._overdue = 0

    def before_run(self, run_context: SessionRunContext) -> None:
        """Evaluate the state before the first run, if that is asked for or was left undone."""
        if self._overdue is not None:
            self._evaluate(run_context.session, self._overdue)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Evaluate if it is due."""
        step, session = run_context.global_step, run_context.session
        seen, self._seen = self._seen, step  # steps of runs without hooks count from here on
        due = self._by_secs is not None and self._by_secs.due(session, step)
        due = due or (self._by_steps is not None and self._by_steps.crossed(seen, step))
        due = due or (self._with_saves and session.save_requested)
        if due:
            self._evaluate(session, step)
        elif session.stop_reason is not None:  # a hook of the user that passes its calls on here has no `_at_stop`
            self._evaluate_at_end(session)

    def end(self, session: MonitoredSession) -> None:
        """Evaluate the final state if it was not."""
        self._evaluate_at_end(session)

    def state_dict(self) -> dict[str, Any]:
        """Which step was evaluated last, and which one is still to be."""
        return {"step": self._evaluated, "overdue": self._overdue}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self._evaluated, self._overdue = state["step"], state["overdue"]

    def _sleeps_until(self) -> int | None:
        """See `HookRunner`."""
        if self._by_secs is not None or self._with_saves:
            return None
        if self._overdue is not None:
            return 0
        return sys.maxsize if self._by_steps is None else self._by_steps.next_due(self._seen)

    def _at_stop(self, run_context: SessionRunContext) -> None:
        """See `HookRunner`: the final checkpoint is still to come, and is ranked by what is found here."""
        self._evaluate_at_end(run_context.session)

    def _evaluate_at_end(self, session: MonitoredSession) -> None:
        if self._at_end and session.stop_reason in _ENDS and not session.preempted:
            self._evaluate(session, session.global_step)

    def _evaluate(self, session: MonitoredSession, step: int) -> None:
        if step == self._evaluated:
            self._overdue = None
            return
        begun = clock.monotonic()
        self._overdue = step  # until it is done, whatever breaks it off
        if session.preempted:
            return
        sums = OverBatches(self._step)
        for args in self._batches(session):
            sums.add(session.run_without_hooks(self._step, *args))
            if session.preempted:  # at the same dispatch on all processes, so that none is left alone here
                logger.info("The evaluation of step %d is broken off, for a signal ends the job.", step)
                return
        results = sums.results()
        self._results = results if self._finish is None else finished(self._finish, results)
        self._evaluated, self._overdue = step, None
        self._refuse_names_of_others(session)
        if session.is_chief:
            logger.info("%s", line(step, self._prefix, self._results, sums.batches, clock.monotonic() - begun))
        if self._by_secs is not None:
            self._by_secs.restart(step)
        session.log({f"{self._prefix}{name}": value for name, value in self._results.items()}, step)

    def _refuse_names_of_others(self, session: MonitoredSession) -> None:
        """Two values of one name would take each other's place, in curves, early stopping and the best checkpoints."""
        own = {f"{self._prefix}{name}" for name in self._results}
        for other in session._hooks.hooks:
            if isinstance(other, EvaluationHook) and other is not self:
                if shared := own & {f"{other._prefix}{name}" for name in other._results}:
                    raise HookError(
                        f"Two EvaluationHooks log {', '.join(sorted(shared))}, of which only the last would count. "
                        "Give them different names: EvaluationHook(..., name=...)."
                    )

    def _batches(self, session: MonitoredSession) -> Iterator[tuple[Any, ...]]:
        """The arguments of each run of the step; as many on each process."""
        if self._data is None:
            yield ()
            return
        batches = itertools.islice(batches_of(self._data), self._num_batches)
        if session.process_count == 1:
            yield from ((batch,) for batch in batches)
            return
        while True:
            window = list(itertools.islice(batches, _WINDOW))
            counts = allgather(np.int64(len(window)))
            common = int(counts.min())
            yield from ((batch,) for batch in window[:common])
            if common < int(counts.max()) and not self._warned:
                self._warned = True
                logger.warning(
                    "The processes do not have the same number of evaluation batches: it ends where process %d has no "
                    "further one, and %d or more of others are left out. Give each as many.",
                    *(int(counts.argmin()), int(counts.max()) - common),
                )
            if common < _WINDOW:
                return


class _SharedTimer:
    """Seconds since the last time, by the chief's clock, without a message per step.

    The processes look at the chief's clock together, at steps that all of them know: the next look comes when about
    half of the time left has passed, as the rate of the steps lets expect.

    Args:
        secs: Seconds between two times.
    """

    def __init__(self, secs: float) -> None:
        self._secs = secs
        self.restart(0)

    def restart(self, step: int) -> None:
        """Count from now."""
        self._since = self._looked_at = clock.monotonic()
        self._looked_step, self._next_look = step, step + 1

    def due(self, session: MonitoredSession, step: int) -> bool:
        """Whether the time has come; with several processes called by all of them, with the same steps."""
        if session.process_count == 1:
            return clock.monotonic() >= self._since + self._secs
        if step < self._next_look:
            return False
        now = clock.monotonic()
        left = self._since + self._secs - now
        rate = (step - self._looked_step) / max(now - self._looked_at, 1e-6)
        told = allgather(np.asarray([left <= 0, min(max(1.0, rate * left / 2), 2**31)], np.int64))[0]  # the chief's
        self._looked_at, self._looked_step = now, step
        self._next_look = step + int(told[1])
        return bool(told[0])


def check_function(name: str, function: Any) -> Any:
    """Return ``function``, which may be None.

    Raises:
        ValueError: It cannot be called.
    """
    if function is not None and not callable(function):
        raise ValueError(f"invalid {name}={function!r}: expected a function, or None.")
    return function


def prefix_of(name: Any) -> str:
    """What the names of an evaluation's values begin with.

    Raises:
        ValueError: ``name`` is no name.
    """
    if name is not None and (not isinstance(name, str) or not name):
        raise ValueError(f"invalid name={name!r}: expected a text, or None.")
    return EVAL_PREFIX if name is None else f"{EVAL_PREFIX}{name}/"


def check_data(step: EvalStep, data: Any, fed: bool = False) -> Any:
    """Return evaluation data after checking that it can be gone through again.

    Args:
        step: The eval step.
        data: The data, or None.
        fed: Whether a hook may feed the step instead.

    Raises:
        ValueError: It cannot, or the step needs some and there is none.
    """
    if data is None:
        if step.required and not fed:
            raise ValueError(f"{step.name}{step.signature} takes a batch: pass data=, a list of batches or the like.")
        return None
    if callable(data) and not isinstance(data, Iterable):
        return data
    if not isinstance(data, Iterable) or isinstance(data, (str, bytes, Mapping)):
        raise ValueError(
            f"Evaluation data must be an iterable of batches or a function that returns one, found {data!r:.80}."
        )
    if isinstance(data, Iterator):
        raise ValueError(
            f"Evaluation data must be there for each evaluation anew, found the iterator {data!r:.80}, which the first "
            "one uses up. Pass the list or data set itself, or a function that makes a new iterator."
        )
    return data


def batches_of(data: Any) -> Iterator[Any]:
    """The batches of evaluation data; that it has ended is never taken for the end of training."""
    batches: Iterable[Any] = data if isinstance(data, Iterable) else data()
    try:
        yield from batches
    except EndOfData as error:
        raise MonsessError(
            f"The evaluation data raised EndOfData ({error}), which is a signal of training data."
        ) from error


def finished(finish: Callable[[dict[str, float]], Mapping[str, Any]], results: dict[str, float]) -> dict[str, float]:
    """What ``finish`` makes of the results.

    Raises:
        TypeError: That is no dict of numbers.
    """
    made = finish(dict(results))
    try:
        return {str(name): float(value) for name, value in made.items()}
    except (AttributeError, TypeError, ValueError):
        raise TypeError(f"finish must return a dict from name to number, found {made!r:.80}.") from None


def line(step: int, prefix: str, results: Mapping[str, float], batches: int, seconds: float) -> str:
    """The results for the log."""
    shown = ", ".join(f"{prefix}{name} = {show(value)}" for name, value in results.items()) or "nothing"
    count = f"{batches} batch" if batches == 1 else f"{batches} batches"
    return f"Evaluation at step {step}: {shown} ({count}, {seconds:.3f} sec)"
