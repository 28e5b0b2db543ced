"""The hook protocol: what a hook may do, what it is handed, and how a list of hooks is checked.

A hook observes, asks for values, and asks for a stop or a save. The session owns everything else.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from monsess.errors import HookError

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession


class SessionRunArgs(NamedTuple):
    """What a hook wants from the coming run: values to fetch and arguments to feed.

    Args:
        fetches: A pytree whose leaves are output names (``"loss"``, ``"metrics/acc"``: a path into the step's
            outputs) or callables ``f(state, outputs) -> pytree``, compiled once and run on the device.
        feed_dict: Arguments of the step by parameter name, or None.

    Example:
        >>> import monsess as ms
        >>> ms.SessionRunArgs({"loss": "loss"}).feed_dict is None
        True
    """

    fetches: Any = None
    feed_dict: Mapping[str, Any] | None = None


class SessionRunValues(NamedTuple):
    """What a hook gets after a run.

    Args:
        results: The fetched values in the structure of the hook's own ``fetches``, still on the device until they
            are converted; None if it fetched nothing.
        nonfinite: int32 scalar on the device: how many values of the step's floating outputs are NaN or infinite.
        summaries: What the step has collected by `monsess.summary`; ``values()`` gives what `MonitoredSession.log`
            takes. ``()`` where it has collected nothing.

    Example:
        >>> import monsess as ms
        >>> ms.SessionRunValues(results=None, nonfinite=0).results is None
        True
    """

    results: Any
    nonfinite: Any
    summaries: Any = ()


class SessionRunContext:
    """One run as its hooks see it; a new one for each run of a train step.

    ``request_stop`` and ``request_save`` never abort the run that is under way. With one process both take effect
    as soon as the run is over; with several a plain request is one process's wish and takes effect a fixed number
    of runs later, on all processes at the same step.

    Args:
        session: The session that runs.
        original_args: The arguments that the caller handed to ``run`` after the step.
        global_step: Completed updates before the run.

    Example:
        >>> import monsess as ms
        >>> class StopWhenGood(ms.SessionRunHook):
        ...     def before_run(self, run_context):
        ...         return ms.SessionRunArgs("loss")
        ...     def after_run(self, run_context, run_values):
        ...         if run_context.global_step % 100 == 0 and run_values.results < 0.1:
        ...             run_context.request_stop("good enough", everywhere=True)
    """

    __slots__ = ("_chief_only", "_session", "global_step", "original_args")

    def __init__(self, session: MonitoredSession, original_args: tuple[Any, ...], global_step: int) -> None:
        self._session = session
        self._chief_only = False
        self.original_args = original_args
        #: int: completed updates, exact: before the run in ``before_run``, after it in ``after_run``.
        self.global_step = global_step

    @property
    def session(self) -> MonitoredSession:
        """The session; its ``run_without_hooks`` triggers no hook."""
        return self._session

    @property
    def stop_requested(self) -> bool:
        """Whether a stop has been asked for or agreed on, by anybody."""
        return self._session.stop_requested

    def request_stop(self, reason: Any = None, everywhere: bool = False) -> None:
        """Ask the session to stop after this run.

        Args:
            reason: A sentence for people, or a `StopReason`.
            everywhere: The decision is the same on all processes by construction, so that it takes effect in this
                run. Refused from a chief-only hook.

        Raises:
            HookError: ``everywhere=True`` from a chief-only hook of a job with several processes.
        """
        self._refuse_everywhere(everywhere, "request_stop")
        self._session.request_stop(reason, everywhere=everywhere)

    def request_save(self, everywhere: bool = False) -> None:
        """Ask for a checkpoint of the state as it is after this run and after all ``after_run`` calls.

        Args:
            everywhere: As in `request_stop`.

        Raises:
            HookError: ``everywhere=True`` from a chief-only hook of a job with several processes.
        """
        self._refuse_everywhere(everywhere, "request_save")
        self._session.request_save(everywhere=everywhere)

    def request_log(self) -> None:
        """Wish that the hooks of all processes log after the same run, for what goes by the clock of one of them.

        With one process that is this run; with several it is some runs later, see `log_requested`.
        """
        self._session._agreement.want_log()

    @property
    def log_requested(self) -> bool:
        """In ``after_run``: whether somebody's `request_log` takes effect in this run; the same on all processes."""
        return self._session._agreement.log_agreed()

    def watch(self, value: Any, check: Callable[[Any], None]) -> None:
        """Call ``check(value)`` once the run is finished on the device, without waiting for it now.

        The call comes at the latest when the in-flight bound lets the device fall no further behind, before a
        checkpoint of this step or a later one is committed, and before the session ends. It may come from the
        thread that writes checkpoints, so ``check`` must not touch the session; what it raises ends the session.

        Args:
            value: A value of this run, usually a fetched one.
            check: Called with ``value``; its result is ignored.
        """
        self._session._watch(self.global_step, value, check)

    def _refuse_everywhere(self, everywhere: bool, what: str) -> None:
        if everywhere and self._chief_only and self._session.process_count > 1:
            raise HookError(
                f"{what}(everywhere=True) from a chief-only hook: the other processes do not run this hook, so the "
                f"decision cannot be the same everywhere. Call {what}() without it, or pass the hook in hooks=."
            )


class SessionRunHook:
    """Base class of all hooks; every method may be overridden, none must be.

    For each hook that began, exactly one of `end` and `on_error` is called, whatever the other hooks do. Hooks run in
    list order in `before_run` and `after_run`, in reverse order in `end` and `on_error`, where those that override
    `log` come after the others, so that they hear what those log at their end. A method that is not overridden costs
    nothing per step.

    Example:
        >>> import monsess as ms
        >>> class CountRuns(ms.SessionRunHook):
        ...     def begin(self):
        ...         self.runs = 0
        ...     def after_run(self, run_context, run_values):
        ...         self.runs += 1
        ...     def state_dict(self):
        ...         return {"runs": self.runs}
        ...     def load_state_dict(self, state):
        ...         self.runs = state["runs"]
        >>> hook = CountRuns()
        >>> hook.begin()
        >>> hook.state_dict()
        {'runs': 0}
    """

    #: With several processes a hook's stored state is the chief's and goes to all; True: each process has its own.
    per_process_state: bool = False
    #: True: it does what all processes have to do, so that a job of several refuses it among ``chief_only_hooks``.
    on_all_processes: bool = False
    #: Name under which the hook's state is stored; None: its class's, numbered where a class occurs more than once.
    state_key: str | None = None

    def begin(self) -> None:
        """Called once per session object, before the state exists."""

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Called when the state exists, and again after an in-process recovery (``session.recoveries > 0``).

        Args:
            session: The session; ``session.global_step`` and ``session.restored_from`` are known.
            coord: The coordinator of the session's threads.
        """

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before each run of a train step.

        Args:
            run_context: The coming run.

        Returns:
            None, or what the hook wants to fetch and feed.
        """
        return None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after each run of a train step has been dispatched.

        Args:
            run_context: The object that `before_run` saw; ``global_step`` is now the one after the run.
            run_values: The fetched values, not yet waited for.
        """

    def end(self, session: MonitoredSession) -> None:
        """The ending of a clean end; the final checkpoint is committed.

        Args:
            session: The session, still open: its state can be read and eval steps run.
        """

    def on_error(self, session: MonitoredSession, error: BaseException) -> None:
        """The other ending: the session is being left for ``error``.

        Args:
            session: The session.
            error: What is being raised. Raising something else here does not replace it.
        """

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Called, in the training thread, when anybody else logs values: another hook, or `MonitoredSession.log`.

        Args:
            step: The step that they are of.
            scalars: Numbers of the host by tag, such as ``{"loss": 0.1}``; to be left as it is.
        """

    def state_dict(self) -> dict[str, Any]:
        """What the hook has to remember across a restart: JSON-able, stored in every checkpoint.

        Called after every step that is saved, and once after `begin`, for a recovery that has to start again.

        Returns:
            A dict of plain Python values; ``{}`` if there is nothing to remember.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, before the first run after a restore.

        Args:
            state: The stored dict.
        """


#: Every method of the protocol and how many arguments, self left out, it is called with.
PROTOCOL: dict[str, int] = {
    "begin": 0,
    "after_create_session": 2,
    "before_run": 1,
    "after_run": 2,
    "end": 1,
    "on_error": 2,
    "log": 2,
    "state_dict": 0,
    "load_state_dict": 1,
}


def hook_name(hook: Any) -> str:
    """The name by which messages and the run report call a hook: its class's."""
    return type(hook).__qualname__


def check_hooks(hooks: Iterable[Any], argument: str = "hooks") -> tuple[Any, ...]:
    """Return ``hooks`` as a tuple after checking that each one can be called as a hook.

    Args:
        hooks: The objects that the user passed; a generator is read once.
        argument: The name of the argument, for messages.

    Raises:
        HookError: Not an iterable, a class instead of an object, a missing or wrongly shaped method.
    """
    if hooks is None:
        return ()
    if isinstance(hooks, (str, bytes)) or not isinstance(hooks, Iterable):
        alone = f" For a single hook write {argument}=[hook]." if isinstance(hooks, SessionRunHook) else ""
        raise HookError(
            f"{argument} must be an iterable of SessionRunHook objects, found {type(hooks).__name__}.{alone}"
        )
    checked = tuple(hooks)
    for position, hook in enumerate(checked):
        _check_hook(hook, f"{argument}[{position}]")
    return checked


def check_no_duplicates(hooks: tuple[Any, ...]) -> None:
    """Refuse a list of hooks that holds the same object twice.

    Raises:
        HookError: Naming the hook and both positions.
    """
    seen: dict[int, int] = {}
    for position, hook in enumerate(hooks):
        if id(hook) in seen:
            raise HookError(
                f"The same {hook_name(hook)} object is listed twice, as hook {seen[id(hook)]} and {position}: every "
                "callback would run twice. Pass it once, or make a second object."
            )
        seen[id(hook)] = position


def _check_hook(hook: Any, where: str) -> None:
    if inspect.isclass(hook):
        raise HookError(f"{where} is the class {hook.__qualname__}, not an object. Write {hook.__qualname__}(...).")
    for name, count in PROTOCOL.items():
        method = getattr(hook, name, None)
        if method is None:
            raise HookError(
                f"{where} ({hook_name(hook)}) has no method {name!r}. Derive it from monsess.SessionRunHook, which "
                "provides all of them."
            )
        if not callable(method):
            raise HookError(f"{where} ({hook_name(hook)}): {name!r} is a {type(method).__name__}, not a method.")
        if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
            raise HookError(
                f"{where} ({hook_name(hook)}): {name} is an async or generator function, whose body a plain call does "
                "not run. Make it a plain method."
            )
        try:
            signature = inspect.signature(method)
        except (TypeError, ValueError):
            continue  # a builtin without a signature: it can only be tried
        try:
            signature.bind(*([None] * count))
        except TypeError:
            expected = inspect.signature(getattr(SessionRunHook, name))
            shown = ", ".join(p for p in expected.parameters if p != "self")
            raise HookError(
                f"{where} ({hook_name(hook)}): {name}{signature} cannot be called as {name}({shown})."
            ) from None


def check_state_is_json(hook: Any, state: Any) -> str:
    """Return a hook's state as JSON text.

    Raises:
        HookError: The hook's ``state_dict`` is not a dict of JSON-able values.
    """
    if not isinstance(state, dict):
        raise HookError(f"{hook_name(hook)}.state_dict() must return a dict, found {type(state).__name__}.")
    try:
        text = json.dumps(state)
    except (TypeError, ValueError) as error:
        raise HookError(
            f"{hook_name(hook)}.state_dict() must return JSON-able values (str, int, float, bool, None, list, dict): "
            f"{error}."
        ) from error
    if not _same(json.loads(text), state):
        raise HookError(
            f"{hook_name(hook)}.state_dict() changes when it is stored as JSON (tuples become lists, int keys become "
            f"strings): {state!r}. Return lists and string keys."
        )
    return text


def _same(stored: Any, state: Any) -> bool:
    """Whether what was read back is what was stored; NaN is NaN."""
    if isinstance(state, dict):
        return (
            isinstance(stored, dict)
            and stored.keys() == state.keys()
            and all(_same(stored[k], state[k]) for k in state)
        )
    if isinstance(state, list):
        return isinstance(stored, list) and len(stored) == len(state) and all(map(_same, stored, state))
    return bool(stored == state) or (stored != stored and state != state)
