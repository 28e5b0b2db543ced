"""How far the training is, for the person who watches it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TextIO, final

import jax
import jax.numpy as jnp
import numpy as np

from monsess import clock
from monsess.errors import FetchError
from monsess.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from monsess.hooks._values import flat_fetches
from monsess.log import logger
from monsess.timer import check_secs, check_steps

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession

_ALONE = "loss"


@final
class ProgressBarHook(SessionRunHook):
    """Shows steps, rate, the time that is left, and values of the step: a bar in a terminal, a line elsewhere.

    In a terminal tqdm draws the bar on stderr, redrawn twice a second; lines of the log go above it, and whatever ends
    the session leaves the cursor on a line of its own. Elsewhere, in a file, a pipe or a notebook, the log gets one
    line every so many seconds, as it does where tqdm is not installed (``pip install "monsess[tqdm]"``). The chief
    shows it. The loop does not wait for the device: what is shown is the newest values that are there.

    Args:
        values: The values to show: the name of an output, a list of names, or a dict from label to name or callable
            ``f(state, outputs)``; each a single number. None: the output ``loss``, if there is one.
        total: The last step, at least 1; None: that of the session, which a `StopAtStepHook` gives it.
        refresh_secs: Seconds between two drawings of the bar, above 0.
        line_secs: Seconds between two lines where there is no terminal, above 0.

    Raises:
        ValueError: ``values`` holds something else, or a number is out of its range.

    Example:
        >>> import jax.numpy as jnp, monsess as ms
        >>> @ms.train_step
        ... def step(state):
        ...     return state + 1, {"loss": 1 / (state + 1)}
        >>> hooks = [ms.ProgressBarHook(), ms.StopAtStepHook(last_step=3)]
        >>> with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), hooks=hooks) as sess:
        ...     while not sess.should_stop():
        ...         outputs = sess.run(step)
    """

    def __init__(
        self,
        values: Any = None,
        total: int | None = None,
        *,
        refresh_secs: float = 0.5,
        line_secs: float = 30.0,
    ) -> None:
        self._labels, fetches = _labels_and_fetches(values)
        self._args = SessionRunArgs(_loss if fetches is None else fetches)
        self._total = None if total is None else check_steps("total", total)
        self._refresh_secs = check_secs("refresh_secs", refresh_secs)
        self._line_secs = check_secs("line_secs", line_secs)
        self._display: _Display | None = None
        self.begin()

    def begin(self) -> None:
        """Begin anew in another session."""
        self._close()
        self._fetched = False
        self._due_at = math.inf
        self._waits = False  # for what was fetched, to arrive
        self._arrived: tuple[int, float, Any] | None = None

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Begin at the session's step; after a recovery, go back to it."""
        self._close()  # what was drawn so far stays
        self._fetched = self._waits = False
        self._arrived = None
        self._due_at = clock.monotonic() if session.is_chief else math.inf  # with the first run

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetch the values if they are to be shown."""
        return None if clock.monotonic() < self._due_at else self._args

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Show the values that were fetched last, once they are there."""
        if run_values.results is not None:
            self._fetched = self._waits = True
            self._due_at = math.inf  # until they have arrived
            values = list(run_values.results)
            for label, value in zip(self._labels, values, strict=False):
                if jnp.ndim(value):
                    raise ValueError(f"ProgressBarHook: {label!r} is no single number, but of shape {value.shape}.")
            run_context.watch(_one_array(values), partial(self._take, run_context.global_step, clock.monotonic()))
        if self._arrived is not None:
            (step, at, values), self._arrived = self._arrived, None
            self._waits = False
            self._show(step, at, values, run_context.session)

    def end(self, session: MonitoredSession) -> None:
        """Show the end, and leave the line."""
        if self._fetched:
            try:
                values = _one_array(list(session.evaluate(self._args.fetches)))
            except FetchError:  # the last step was another one, which does not return them
                values = ()
            self._show(session.global_step, clock.monotonic(), np.asarray(values), session)
        self._close()

    def on_error(self, session: MonitoredSession, error: BaseException) -> None:
        """Leave the line: the error is printed below it."""
        self._close()

    def _sleeps_until(self) -> int | None:
        """See `HookRunner`; what was fetched may arrive in any run."""
        return 0 if self._waits else sys.maxsize

    def _sleeps_until_time(self) -> float:
        """See `HookRunner`."""
        return self._due_at

    def _take(self, step: int, at: float, values: Any) -> None:
        self._arrived = (step, at, np.asarray(values))  # in any thread: it is shown in the training thread

    def _show(self, step: int, at: float, values: Any, session: MonitoredSession) -> None:
        total = session.last_step if self._total is None else self._total
        if self._display is None:  # only now: the first run, which compiles, says nothing of the rate
            self._display = self._open(step, at, total)
        texts = [f"{label}={value:.4g}" for label, value in zip(self._labels, values, strict=False)]
        try:
            self._display.show(step, at, total, ", ".join(texts))
        except (OSError, ValueError) as error:  # a full disk behind it, a character that it does not know
            self._close()
            logger.warning("ProgressBarHook: the progress is not shown any more, stderr refuses it: %s", error)
            return
        self._due_at = clock.monotonic() + self._display.secs

    def _open(self, step: int, at: float, total: int | None) -> _Display:
        stream = sys.stderr
        if _is_terminal(stream):
            try:
                return _bar(stream, step, total, self._refresh_secs)
            except (OSError, ValueError) as error:
                logger.info("The progress is shown line by line: no bar can be drawn on stderr: %s", error)
            except ImportError:
                logger.info('The progress is shown line by line: a bar needs tqdm. pip install "monsess[tqdm]"')
        return _Lines(step, at, self._line_secs)

    def _close(self) -> None:
        display, self._display = self._display, None
        if display is not None:
            display.close()


class _Display(Protocol):
    """Shows how far the training is."""

    #: float: seconds between two times that it is shown.
    secs: float

    def show(self, step: int, at: float, total: int | None, text: str) -> None:
        """Show a step, which was run at ``at`` on the clock."""

    def close(self) -> None:
        """Leave what was shown last."""


class _Lines:
    """One line of the log each time."""

    def __init__(self, step: int, at: float, secs: float) -> None:
        self.secs = secs
        self._shown: int | None = None
        self._step, self._since = step, at

    def show(self, step: int, at: float, total: int | None, text: str) -> None:
        """Log a line; its rate is that since the line before."""
        if step == self._shown:
            return
        seconds, steps = at - self._since, step - self._step
        rate = steps / seconds if seconds > 0 else 0.0
        parts = [f"step {step}" if total is None else f"step {step}/{total} ({100 * step / total:.1f} %)"]
        if rate > 0:
            parts.append(f"{rate:.4g} steps/s")
        if rate > 0 and total is not None and step < total:
            parts.append(f"{_duration((total - step) / rate)} left")
        if text:
            parts.append(text)
        logger.info("%s", ", ".join(parts))
        self._step, self._since, self._shown = step, at, step

    def close(self) -> None:
        """Nothing is left open."""


def _bar(stream: TextIO, step: int, total: int | None, secs: float) -> _Display:
    """A bar drawn by tqdm.

    Raises:
        ImportError: tqdm is not installed.
    """
    from tqdm.std import tqdm

    class Quiet(tqdm):
        monitor_interval = 0  # no thread: the hook knows when to draw

    class Bar:
        def __init__(self) -> None:
            self.secs = secs
            # Some terminals do not tell how wide they are.
            width: dict[str, Any] = {"dynamic_ncols": True} if _columns(stream) else {"ncols": 80}
            self._tqdm: Any = Quiet(
                initial=step, total=total, unit="step", file=stream, mininterval=0, miniters=0, leave=True, **width
            )
            self._clears = _ClearsLine(self._tqdm)
            logger.handlers.insert(0, self._clears)  # before the handlers that write

        def show(self, step: int, at: float, total: int | None, text: str) -> None:
            self._tqdm.total = total
            self._tqdm.set_postfix_str(text, refresh=False)
            if not self._tqdm.update(step - self._tqdm.n):
                self._tqdm.refresh()

        def close(self) -> None:
            if self._clears in logger.handlers:
                logger.handlers.remove(self._clears)
            with contextlib.suppress(OSError, ValueError):
                self._tqdm.close()

    return Bar()


def _is_terminal(stream: Any) -> bool:
    """Whether that is what ``sys.stderr`` is: it may be anything that can be written to, or None, or closed."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return 0


class _ClearsLine(logging.Handler):
    """Takes the bar away for a line of the log, which is written where it was; the bar is drawn anew below it."""

    def __init__(self, bar: Any) -> None:
        super().__init__()
        self._bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # whoever logs has nothing to do with it
            self._bar.clear()


def _labels_and_fetches(values: Any) -> tuple[tuple[str, ...], Any]:
    if values is None:
        return (_ALONE,), None
    if isinstance(values, str):
        values = [values]
    if callable(values):
        raise ValueError(f"invalid values={values!r}: give the callable a label, in a dict.")
    if isinstance(values, Mapping):
        labels, fetches = tuple(map(str, values)), tuple(values.values())
    else:
        fetches = tuple(values) if isinstance(values, Iterable) else (values,)
        labels = tuple(map(str, fetches))
    for fetch in fetches:
        flat_fetches("values", fetch)
        if not (isinstance(fetch, str) or callable(fetch)):
            raise ValueError(f"invalid values: {fetch!r} is more than one value. Expected a name or a callable.")
    return labels, fetches


def _loss(state: Any, outputs: Any) -> Any:
    """The output ``loss`` if there is one: a list of one value or none."""
    found = outputs.get(_ALONE) if isinstance(outputs, Mapping) else None
    return [] if found is None or jnp.ndim(found) else [found]


@jax.jit
def _one_array(values: list[Any]) -> jax.Array:
    """All values as one array, so that one transfer brings them to the host."""
    return jnp.stack([jnp.asarray(v, jnp.float32) for v in values]) if values else jnp.zeros((0,), jnp.float32)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
