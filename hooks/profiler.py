"""Profiles of some steps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import jax

from monsess.hook import SessionRunContext, SessionRunHook, SessionRunValues
from monsess.hooks._trace import Trace
from monsess.log import logger
from monsess.storage import Storage
from monsess.timer import Cadence, check_secs, check_steps

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession

_BUSY_SECS = 10.0
_END_SECS = 60.0
_ERROR_SECS = 5.0


@final
class ProfilerHook(SessionRunHook):
    """Records profiler traces of some steps, one per process, for TensorBoard and XProf.

    Each trace lies in ``<output_dir>/process_<k>/plugins/profile/step_<n>``, with the steps, what ran on the devices,
    and what Python did. It ends when its last step is finished on the devices, which the training does not wait for,
    and is written in the background. A profiler that fails, or that somebody else is using, costs a warning and the
    trace. By steps or seconds, the first run of a session, which compiles, is not traced, nor is more than one trace
    at a time.

    Args:
        save_steps: Trace the run that crosses a multiple of it, at least 1.
        save_secs: Trace a run after so many seconds, above 0, by the clock of each process.
        output_dir: A local path or any fsspec URL; None: ``profile`` in the session's ``checkpoint_dir``, with its
            options. A process that has neither records nothing.
        window: ``(first, last)``: trace these steps, as one trace. A session that is restored to a step between them
            traces the rest. Exactly one of ``save_steps``, ``save_secs`` and ``window`` is given.
        num_steps: How many steps a trace has with ``save_steps`` or ``save_secs``, at least 1.
        storage_options: For the store of ``output_dir``; never logged.
        options: `jax.profiler.ProfileOptions`; its ``python_tracer_level = 0`` makes small traces.

    Raises:
        ValueError: None or several of the cadences, a value that is no such number, pair or options, or ``num_steps``
            with a ``window``.

    Example:
        >>> import monsess as ms
        >>> hook = ms.ProfilerHook(window=(10, 12), output_dir="/tmp/profile")
        >>> ms.ProfilerHook()
        Traceback (most recent call last):
        ValueError: exactly one of save_steps, save_secs and window should be provided.
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        window: tuple[int, int] | None = None,
        num_steps: int = 1,
        storage_options: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> None:
        if sum(given is not None for given in (save_steps, save_secs, window)) != 1:
            raise ValueError("exactly one of save_steps, save_secs and window should be provided.")
        if storage_options and output_dir is None:
            raise ValueError("storage_options were given without an output_dir.")
        self._window = None if window is None else _checked_window(window)
        self._cadence = None
        if window is None:
            self._cadence = Cadence(
                every_n_steps=None if save_steps is None else check_steps("save_steps", save_steps),
                every_secs=None if save_secs is None else check_secs("save_secs", save_secs),
            )
        self._every = 0 if save_steps is None else check_steps("save_steps", save_steps)
        self._num_steps = check_steps("num_steps", num_steps)
        if window is not None and self._num_steps > 1:
            raise ValueError(f"num_steps={num_steps} was given with a window, which says itself how many steps it has.")
        if not (options is None or isinstance(options, jax.profiler.ProfileOptions)):
            raise ValueError(f"invalid options={options!r}: expected a jax.profiler.ProfileOptions, or None.")
        self._own = None if output_dir is None else Storage(output_dir, storage_options)
        self._options = options
        #: list of str: where the traces of this process lie that have been stored so far.
        self.traces: list[str] = []
        self._storage: Storage | None = None
        self._place = ""
        self._trace: Trace | None = None  # the one that goes on
        self._stored: Trace | None = None  # the one before it, which may still be written
        self._forget()

    def begin(self) -> None:
        """Forget what another session traced."""
        self.traces = []
        self._forget()

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Find out where traces go; after a recovery, what was being traced is over."""
        if self._trace is not None:
            self._finish(max(self._seen, self._from), None)
        self._forget()
        self._seen = session.global_step
        self._place = f"process_{jax.process_index()}"
        self._storage = self._own
        if self._own is None:
            self._storage = session._storage()
            self._place = f"profile/{self._place}"
        if self._storage is None:
            logger.info("ProfilerHook records nothing here: there is no output_dir and no checkpoint_dir.")

    def before_run(self, run_context: SessionRunContext) -> None:
        """Begin a trace if one is due."""
        self._before = before = run_context.global_step
        if before < self._wake and self._trace is None:
            return
        if self._trace is None and self._storage is not None and self._is_due(before):
            self._begin(before + 1)
        if self._trace is not None:
            self._trace.step_begins(before + 1)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """End the trace if this was its last step."""
        after = run_context.global_step
        if after - self._before != self._steps_per_run:
            self._steps_per_run, self._wake = after - self._before, 0
        self._seen = after
        if self._trace is not None:
            self._trace.step_ends()
            if after >= self._last:
                self._finish(after, run_values.nonfinite)

    def end(self, session: MonitoredSession) -> None:
        """Keep what was traced so far."""
        if self._trace is not None:
            self._finish(session.global_step, None)
        if self._window is not None and self._window[0] > session.global_step:
            logger.info(
                "ProfilerHook: the run ends at step %d, before the window %s.", session.global_step, self._window
            )
        self._wait(_END_SECS)

    def on_error(self, session: MonitoredSession, error: BaseException) -> None:
        """Keep what was traced so far, if that does not take long."""
        if self._trace is not None:
            self._finish(max(self._seen, self._from), None)
        self._wait(_ERROR_SECS)

    def _sleeps_until(self) -> int | None:
        """See `HookRunner`."""
        if self._cadence is not None and not self._every:
            return None
        return 0 if self._trace is not None else self._wake + self._steps_per_run

    def _forget(self) -> None:
        self._first_run = True
        self._steps_per_run = 1
        self._wake = 0  # until this step there is nothing to do
        self._before = self._seen = 0
        self._from = self._last = 0
        self._missed = False

    def _is_due(self, before: int) -> bool:
        after = before + self._steps_per_run
        if self._cadence is None:
            assert self._window is not None
            self._wake = self._window[0] - self._steps_per_run
            return self._window[0] <= after and before < self._window[1]
        if self._first_run:
            self._first_run = False
            self._cadence.rearm()
            return False
        if not self._cadence.due(self._seen, after):
            if self._every:
                self._wake = (self._seen // self._every + 1) * self._every - self._steps_per_run
            return False
        self._cadence.rearm()
        return True

    def _begin(self, step: int) -> None:
        self._from = step
        self._last = step - 1 + self._num_steps if self._window is None else self._window[1]
        if self._stored is not None and not self._stored.wait(_BUSY_SECS):
            self._miss(step, "the one before it is still being written")
            return
        try:
            self._trace = Trace(self._options)
        except Exception as error:
            self._miss(step, f"{type(error).__name__}: {error}")

    def _miss(self, step: int, why: str) -> None:
        """Say once for each window, which is tried again in every run of it, why there is no trace."""
        if self._window is None or not self._missed:
            logger.warning("ProfilerHook: no trace from step %d on: %s", step, why)
        self._missed = True

    def _finish(self, step: int, value: Any) -> None:
        assert self._trace is not None
        assert self._storage is not None
        trace, self._trace = self._trace, None
        if step < self._from:
            trace.drop()
            return
        name = f"step_{step}" if step == self._from else f"steps_{self._from}-{step}"
        trace.finish(name, self._storage, self._place, value, self.traces)
        self._stored = trace

    def _wait(self, seconds: float) -> None:
        trace, self._stored = self._stored, None
        if trace is not None and not trace.wait(seconds):
            logger.warning("A profiler trace could not be stored within %g s and is left behind.", seconds)


def _checked_window(window: Any) -> tuple[int, int]:
    try:
        first, last = window
    except (TypeError, ValueError):
        first, last = None, None
    if first is None:
        raise ValueError(f"invalid window={window!r}: expected the first and the last step, such as (10, 12).")
    first, last = check_steps("window[0]", first), check_steps("window[1]", last)
    if last < first:
        raise ValueError(f"invalid window={window!r}: the last step comes before the first one.")
    return first, last
