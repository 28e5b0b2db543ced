"""Periodic checkpoints and those who want to know of them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, final

from monsess.errors import HookError
from monsess.hook import SessionRunContext, SessionRunHook, SessionRunValues
from monsess.log import mask
from monsess.timer import Cadence, check_secs, check_steps

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession


class CheckpointSaverListener:
    """Is told of every checkpoint of a session; all methods may be overridden, and all run in the training thread.

    Example:
        >>> import monsess as ms
        >>> class StopAfterFirst(ms.CheckpointSaverListener):
        ...     def after_save(self, session, step):
        ...         return True
        >>> hook = ms.CheckpointSaverHook(save_steps=100, listeners=[StopAfterFirst()])
    """

    def begin(self) -> None:
        """Called once per session object, before the state exists."""

    def before_save(self, session: MonitoredSession, step: int) -> None:
        """Called before the state is copied for a checkpoint.

        Args:
            session: The session.
            step: The global step of the checkpoint.
        """

    def after_save(self, session: MonitoredSession, step: int) -> bool | None:
        """Called once the checkpoint is committed: at the first run after the commit, or at the end.

        Args:
            session: The session; it may be some steps further.
            step: The global step of the checkpoint.

        Returns:
            True to ask for a stop.
        """

    def end(self, session: MonitoredSession, step: int) -> None:
        """Called at a clean end, after the final checkpoint is committed; not after an error.

        Args:
            session: The session.
            step: The last global step.
        """


_LISTENER_ARGUMENTS = {"begin": 0, "before_save": 2, "after_save": 2, "end": 2}


@final
class CheckpointSaverHook(SessionRunHook):
    """Asks for checkpoints at multiples of a number of steps, after a number of seconds, or both.

    It only asks: the session saves after every hook has seen the step, and never twice for one step. The final
    checkpoint of a clean end does not depend on this hook. Steps and seconds have schedules of their own: whichever is
    due first saves, and neither resets the other. With several processes the chief decides about seconds for all.

    Args:
        checkpoint_dir: The session's ``checkpoint_dir``, or None for the same; it is only compared.
        save_secs: Seconds between two checkpoints, above 0.
        save_steps: Save whenever a run crosses a multiple of it, at least 1.
        listeners: `CheckpointSaverListener` objects, called in this order.

    Raises:
        ValueError: No cadence, or one that is no length of time or count of steps. When the session is made: it has
            another ``checkpoint_dir``, or none.
        HookError: A listener lacks a method or has one of another shape.

    Example:
        >>> import monsess as ms
        >>> hook = ms.CheckpointSaverHook(save_steps=1000, save_secs=600)
        >>> ms.CheckpointSaverHook()
        Traceback (most recent call last):
        ValueError: Either save_secs or save_steps should be provided.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        save_secs: float | None = None,
        save_steps: int | None = None,
        listeners: Iterable[CheckpointSaverListener] | None = (),
    ) -> None:
        if save_secs is None and save_steps is None:
            raise ValueError("Either save_secs or save_steps should be provided.")
        self._cadence = Cadence(
            every_n_steps=None if save_steps is None else check_steps("save_steps", save_steps),
            every_secs=None if save_secs is None else check_secs("save_secs", save_secs),
        )
        self.on_all_processes = save_steps is not None  # seconds are the chief's to decide about
        self._checkpoint_dir = None if checkpoint_dir is None else os.fspath(checkpoint_dir)
        self._listeners = _check_listeners(listeners)
        self._registered = False
        self._chief = True
        self._seen = 0

    def begin(self) -> None:
        """Begin the listeners."""
        self._registered = False
        for listener in self._listeners:
            listener.begin()

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Compare the directories, make the listeners known to the session, and count the seconds from now."""
        self._check_directory(session)
        if not self._registered:
            for listener in self._listeners:
                session.add_saver_listener(listener)
            self._registered = True
        self._chief = session.is_chief
        self._seen = session.global_step
        self._cadence.rearm()

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Ask for a save if one is due."""
        by_seconds = self._cadence.elapsed()
        if by_seconds:
            self._cadence.rearm()
        seen, self._seen = self._seen, run_context.global_step  # steps of runs without hooks count from here on
        if self._cadence.crossed(seen, run_context.global_step):
            run_context.request_save(everywhere=True)
        elif by_seconds and self._chief:
            run_context.request_save()

    def end(self, session: MonitoredSession) -> None:
        """End the listeners, all of them, also where one fails."""
        failures: list[Exception] = []
        for listener in self._listeners:
            try:
                listener.end(session, session.global_step)
            except Exception as error:
                error.add_note(f"raised by {type(listener).__qualname__}.end")
                failures.append(error)
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"a further listener failed: {type(other).__name__}: {other}")
            raise failures[0]

    def _sleeps_until(self) -> int | None:
        """See `HookRunner`."""
        return self._cadence.next_due(self._seen)

    def _check_directory(self, session: MonitoredSession) -> None:
        actual = session.checkpoint_dir
        wanted = self._checkpoint_dir
        if actual is None and not session.is_chief:
            return  # the chief's counts, and its own hook compares that one
        if actual is None:
            at = "" if wanted is None else f" into {mask(wanted)}"
            raise ValueError(
                f"CheckpointSaverHook should save{at}, but the session has no checkpoint_dir and would never restore "
                "from there. Pass checkpoint_dir to MonitoredTrainingSession."
            )
        if wanted is not None and _place(wanted) != _place(actual):
            raise ValueError(
                f"CheckpointSaverHook has checkpoint_dir {mask(wanted)}, the session has {mask(actual)}. A session "
                "saves into one directory, the one that it restores from: leave checkpoint_dir of the hook out."
            )


def _place(url: str) -> str:
    """One spelling for every way to write the same directory."""
    protocol, separator, path = url.partition("://")
    if separator and protocol not in ("file", "local"):
        return url.rstrip("/")
    return os.path.realpath(path if separator else url)


def _check_listeners(listeners: Iterable[Any] | None) -> tuple[Any, ...]:
    if listeners is None:
        return ()
    if isinstance(listeners, (str, bytes)) or not isinstance(listeners, Iterable):
        raise HookError(f"listeners must be an iterable of CheckpointSaverListener, found {type(listeners).__name__}.")
    checked = tuple(listeners)
    for position, listener in enumerate(checked):
        where = f"listeners[{position}]"
        if inspect.isclass(listener):
            name = listener.__qualname__
            raise HookError(f"{where} is the class {name}, not an object. Write {name}(...).")
        if any(listener is earlier for earlier in checked[:position]):
            raise HookError(f"{where}: the same {type(listener).__qualname__} object is listed twice. Pass it once.")
        for name, count in _LISTENER_ARGUMENTS.items():
            _check_method(listener, name, count, where)
    return checked


def _check_method(listener: Any, name: str, count: int, where: str) -> None:
    kind = type(listener).__qualname__
    method = getattr(listener, name, None)
    if not callable(method):
        raise HookError(
            f"{where} ({kind}) has no method {name!r}. Derive it from monsess.CheckpointSaverListener, which provides "
            "all of them."
        )
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return  # a builtin without a signature: it can only be tried
    try:
        signature.bind(*([None] * count))
    except TypeError:
        shown = "session, step" if count else ""
        raise HookError(f"{where} ({kind}): {name}{signature} cannot be called as {name}({shown}).") from None
