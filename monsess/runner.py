"""Calls a list of hooks: in order before and after a run, in reverse at the end, each with exactly one ending.

The shape is pluggy's: set-up in order, tear-down in reverse and for everyone, and the first error is the one raised.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from monsess import clock
from monsess.errors import EndOfData, HookError
from monsess.hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    check_no_duplicates,
    check_state_is_json,
    hook_name,
)
from monsess.log import logger
from monsess.timer import Cadence

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession

_now = clock.monotonic  # the clock of the steps-per-second, from which it is taken off


class HookRunner:
    """The hooks of one session, and the time that each of them takes.

    A hook may have a method ``_sleeps_until() -> int | None``, called after a run: before the run that reaches that
    step, ``before_run`` and ``after_run`` need not be called; None says that they always have to be. It counts for the
    very class that defines it, since one that is derived from it may do more in each run. Such a hook may have a method
    ``_sleeps_until_time() -> float`` beside it, and is called again from that moment of the clock on, too, be it in the
    middle of a run: then ``after_run`` alone. And any hook may have a method
    ``_at_stop(run_context)``, called when the session stops after this run, after every hook's ``after_run``: whichever
    of them has asked for the stop, and whether or not this one sleeps.

    Args:
        hooks: Checked hooks (`monsess.hook.check_hooks`), in order.
        chief_only: Those among them that run on the chief alone.
        chief: Whether this process is the chief; on another one the chief's hooks only count for the names.
        process_count: Of the job.

    Raises:
        HookError: The same object twice, or one that cannot run on the chief alone.
    """

    def __init__(
        self, hooks: tuple[Any, ...], chief_only: tuple[Any, ...] = (), chief: bool = True, process_count: int = 1
    ) -> None:
        check_no_duplicates(hooks)
        if process_count > 1:
            _check_chief_only(chief_only)
        self._alone = process_count == 1
        self._chief_only = {id(hook) for hook in chief_only}
        named = list(zip(hooks, _keys(hooks), strict=True))
        self._elsewhere = {key for hook, key in named if id(hook) in self._chief_only and not chief}
        self.hooks = hooks = tuple(hook for hook, key in named if key not in self._elsewhere)
        self.keys = tuple(key for _, key in named if key not in self._elsewhere)
        self._began: list[Any] = []
        #: str | None: the chief-only hook that is running just now.
        self.on_chief: str | None = None
        #: dict of str to float: seconds spent in each hook's methods, by key.
        self.seconds: dict[str, float] = dict.fromkeys(self.keys, 0.0)
        # A method that is not overridden is not called, nor is a hook that is not due: it costs nothing per step.
        self._all_before = self._before = self._those_with("before_run")
        self._all_after = self._after = self._those_with("after_run")
        # By id of a hook: up to which step and until when it need not be called; and the first of them all.
        self._asleep: dict[int, tuple[int, float]] = {}
        self._wake_step = self._wake_time = math.inf
        self._restless: list[Any] = []  # those that may fall asleep after the next run
        self._stoppers = [(h, key) for h, key in zip(hooks, self.keys, strict=True) if _has(h, "_at_stop")]
        self._listeners = [(h, key) for h, key in zip(hooks, self.keys, strict=True) if overrides(h, "log")]
        self._running: list[str] = []  # those that are running just now, each called by the one before it
        self._inner = 0.0  # seconds of the hooks that the running one has called

    @property
    def total_seconds(self) -> float:
        """Seconds spent in all hooks."""
        return sum(self.seconds.values())

    def require_on_all(self, what: str) -> None:
        """Refuse what all processes have to do to a hook that runs on the chief alone.

        Args:
            what: What is about to be done, as in "runs the step".

        Raises:
            HookError: Such a hook is running just now, in a job of several processes.
        """
        if self.on_chief is not None and not self._alone:
            raise HookError(_refusal(self.on_chief, what))

    def begin(self) -> EndOfData | None:
        """Call ``begin`` in order; a hook whose ``begin`` was reached gets an ending.

        Returns:
            The end of the data, if a hook has met it already.
        """
        ended = None
        for hook, key in zip(self.hooks, self.keys, strict=True):
            self._began.append(hook)
            try:
                self._call(hook, key, "begin")
            except EndOfData as end:
                ended = end
        return ended

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> EndOfData | None:
        """Call ``after_create_session`` in order.

        Returns:
            The end of the data, if a hook has met it already.
        """
        ended = None
        self._restless = []  # nobody sleeps before it knows the session: another hook may run a step here
        self._asleep.clear()
        self._choose()
        for hook, key in zip(self.hooks, self.keys, strict=True):
            try:
                self._call(hook, key, "after_create_session", session, coord)
            except EndOfData as end:
                ended = end
        self._restless = [h for h in self.hooks if _has(h, "_sleeps_until") and "_sleeps_until" in vars(type(h))]
        return ended

    def before_run(self, context: SessionRunContext, steps: int) -> dict[str, SessionRunArgs]:
        """Call ``before_run`` in order.

        Args:
            context: Of the run.
            steps: How many it adds.

        Returns:
            By hook key, what the hooks that asked for something asked for.

        Raises:
            HookError: A hook returned something else than None or SessionRunArgs.
        """
        self._wake(context.global_step + steps)
        requests: dict[str, SessionRunArgs] = {}
        for hook, key, chief_only, wanted in self._each("before_run", self._before, context, (context,), {}):
            if not isinstance(wanted, SessionRunArgs):
                raise HookError(
                    f"{hook_name(hook)}.before_run must return None or SessionRunArgs, found {type(wanted).__name__}."
                )
            if wanted.feed_dict is not None and not isinstance(wanted.feed_dict, Mapping):
                raise HookError(
                    f"{hook_name(hook)}.before_run: feed_dict must be a dict from argument of the step to value, "
                    f"found {type(wanted.feed_dict).__name__}."
                )
            if wanted.feed_dict and chief_only and not self._alone:
                raise HookError(_refusal(key, "feeds the step"))
            requests[key] = wanted
        return requests

    def after_run(
        self, context: SessionRunContext, results: Mapping[str, Any], nonfinite: Any, summaries: Any = ()
    ) -> None:
        """Call ``after_run`` in order, each hook with its own results; the end of the data waits for all of them."""
        self._wake(context.global_step)
        usual = (context, SessionRunValues(None, nonfinite, summaries))
        special = {key: (context, SessionRunValues(result, nonfinite, summaries)) for key, result in results.items()}
        self._each("after_run", self._after, context, usual, special)
        if self._stoppers and context.session.stop_reason is not None:
            for hook, key in self._stoppers:
                self._call(hook, key, "_at_stop", context)
        if self._restless:
            self._let_sleep(context.global_step)

    def schedules(self) -> dict[str, str]:
        """By key, in words, when the hooks are due that have to be so on all processes at the same steps."""
        found: dict[str, str] = {}
        for hook, key in zip(self.hooks, self.keys, strict=True):
            cadences = [str(one) for one in getattr(hook, "__dict__", {}).values() if isinstance(one, Cadence)]
            if cadences and getattr(hook, "on_all_processes", False):
                found[key] = ", ".join(cadences)
        return found

    @property
    def listen(self) -> bool:
        """Whether some hook wants to hear what is logged."""
        return bool(self._listeners)

    @property
    def caller_is_on_all(self) -> bool:
        """Whether the hook that runs was called by another one that does the same on all processes."""
        if len(self._running) < 2:
            return False
        return getattr(self.hooks[self.keys.index(self._running[-2])], "on_all_processes", False)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Tell the hooks, in order, what was logged; not the one that logs it."""
        for hook, key in self._listeners:
            if key not in self._running:
                self._call(hook, key, "log", step, scalars)

    def end(self, session: MonitoredSession) -> None:
        """Give every hook that began its clean ending, in reverse, those that listen to `log` after the others.

        The first error is raised with the rest attached.
        """
        self._ending("end", session)

    def on_error(self, session: MonitoredSession, error: BaseException) -> None:
        """Give every hook that began its other ending, in reverse; what they raise is logged and noted on ``error``."""
        try:
            self._ending("on_error", session, error)
        except BaseException as second:
            logger.error("a hook failed while it handled %s: %r", type(error).__name__, second)
            error.add_note(f"While handling this, a hook raised {second!r}.")

    def state_dicts(self) -> dict[str, Any]:
        """The state of every hook that may have one, by key, ``{}`` too, since a rollback goes back to it."""
        states = {}
        for hook, key in zip(self.hooks, self.keys, strict=True):
            if overrides(hook, "state_dict"):
                state = self._call(hook, key, "state_dict")
                # A copy: the hook goes on changing its own while this one is on its way to the store.
                states[key] = json.loads(check_state_is_json(hook, state))
        return states

    def split(self, states: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of the hooks' states: those that are the chief's for all, and those that each process has for itself."""
        own = {
            key
            for hook, key in zip(self.hooks, self.keys, strict=True)
            if getattr(hook, "per_process_state", False) and key in states
        }
        return {key: s for key, s in states.items() if key not in own}, {key: states[key] for key in own}

    def load_state_dicts(self, states: Mapping[str, Any]) -> None:
        """Give each hook back what was stored under its key."""
        states = {key: state for key, state in states.items() if key not in self._elsewhere}
        for hook, key in zip(self.hooks, self.keys, strict=True):
            if key in states:
                self._call(hook, key, "load_state_dict", copy.deepcopy(states[key]))
            elif states and overrides(hook, "load_state_dict"):
                logger.info("the checkpoint holds no state of hook %s; it starts afresh", key)
        unknown = [key for key in states if key not in self.keys]
        if unknown:
            logger.warning("the checkpoint holds the state of hooks that this session does not have: %s", unknown)
        for name, count in Counter(key.split("#")[0] for key in states).items():
            live = sum(key.split("#")[0] == name for key in self.keys)
            if live != count:
                logger.warning(
                    "the checkpoint holds the states of %d %s hooks, the session has %d: they are told apart by their "
                    "order. Give each a state_key.",
                    count,
                    name,
                    live,
                )

    def _ending(self, method: str, *args: Any) -> None:
        first: BaseException | None = None
        began, self._began = self._began[::-1], []
        # What a hook logs at its end is heard by all that listen: a final evaluation is nothing to lose.
        for hook in sorted(began, key=lambda hook: overrides(hook, "log")):
            try:
                self._call(hook, self.keys[_index(self.hooks, hook)], method, *args)
            except BaseException as error:
                if first is None:
                    first = error
                else:
                    first.add_note(f"Then {hook_name(hook)}.{method} raised {error!r}.")
                    logger.error("%s.%s raised %r", hook_name(hook), method, error)
        if first is not None:
            raise first

    def _let_sleep(self, step: int) -> None:
        """Have those not called that say, at the end of a run, that they have nothing to do before a later step."""
        restless = []
        for hook in self._restless:
            until = hook._sleeps_until()
            if until is not None and until > step + 1:
                time = hook._sleeps_until_time() if _has(hook, "_sleeps_until_time") else math.inf
                self._asleep[id(hook)] = until, time
            elif until is not None:
                restless.append(hook)
        self._restless = restless
        self._choose()

    def _wake(self, step: int) -> None:
        """Have those called again that have something to do now, or in a run that ends at ``step``."""
        if step < self._wake_step and (self._wake_time == math.inf or _now() < self._wake_time):
            return
        now = _now()
        for hook in self.hooks:
            until, time = self._asleep.get(id(hook), (math.inf, math.inf))
            if until <= step or time <= now:
                del self._asleep[id(hook)]
                self._restless.append(hook)
        self._choose()

    def _choose(self) -> None:
        self._before = [one for one in self._all_before if id(one[1]) not in self._asleep]
        self._after = [one for one in self._all_after if id(one[1]) not in self._asleep]
        self._wake_step = min((step for step, _ in self._asleep.values()), default=math.inf)
        self._wake_time = min((time for _, time in self._asleep.values()), default=math.inf)

    def _those_with(self, method: str) -> list[tuple[Callable[..., Any], Any, str, bool]]:
        """The method, the hook, its key and whether it is the chief's alone, of each hook that overrides it."""
        return [
            (getattr(hook, method), hook, key, id(hook) in self._chief_only)
            for hook, key in zip(self.hooks, self.keys, strict=True)
            if overrides(hook, method)
        ]

    def _each(
        self,
        name: str,
        calls: list[tuple[Callable[..., Any], Any, str, bool]],
        context: SessionRunContext,
        usual: tuple[Any, ...],
        special: Mapping[str, tuple[Any, ...]],
    ) -> list[tuple[Any, str, bool, Any]]:
        """Call ``name`` of every hook, in order, with its ``special`` arguments or the ``usual`` ones.

        It does what `_call` does, once for all hooks of a step rather than for each: that is most of what a step pays
        for a hook that is not due. The end of the data waits, in ``after_run``, for all of them.

        Returns:
            What was returned, other than None: hook, key, whether it is the chief's alone, and the value.
        """
        found: list[tuple[Any, str, bool, Any]] = []
        ended: EndOfData | None = None
        running, seconds = self._running, self.seconds
        inner, outer = self._inner, self.on_chief
        self._inner = 0.0
        running.append("")
        begun = start = _now()
        try:
            for method, hook, key, chief_only in calls:
                context._chief_only = chief_only
                self.on_chief = key if chief_only else None
                running[-1] = key
                try:
                    result = method(*(special.get(key, usual) if special else usual))
                except BaseException as error:
                    error.add_note(f"Raised by hook {hook_name(hook)} in {name}.")
                    if not isinstance(error, EndOfData) or name == "before_run":
                        raise
                    ended, result = error, None
                finally:
                    now = _now()
                    seconds[key] += now - start - self._inner
                    self._inner = 0.0
                    start = now
                if result is not None:
                    found.append((hook, key, chief_only, result))
        finally:
            running.pop()
            self.on_chief, self._inner = outer, inner + start - begun
        if ended is not None:
            raise ended
        return found

    def _call(self, hook: Any, key: str, method: str, *args: Any) -> Any:
        start = _now()
        outer, self.on_chief = self.on_chief, key if id(hook) in self._chief_only else None
        inner, self._inner = self._inner, 0.0
        self._running.append(key)
        try:
            return getattr(hook, method)(*args)
        except BaseException as error:
            error.add_note(f"Raised by hook {hook_name(hook)} in {method}.")
            raise
        finally:
            self.on_chief = outer
            self._running.pop()
            taken = _now() - start
            self.seconds[key] += taken - self._inner
            self._inner = inner + taken


def _refusal(hook: str, what: str) -> str:
    """Why a hook among ``chief_only_hooks`` may not do ``what``, and what to do."""
    return (
        f"{hook} is among chief_only_hooks and {what}, which all processes have to do: the others would wait for ever, "
        "or stop at another step. Pass the hook in hooks=, on all processes."
    )


def _check_chief_only(hooks: tuple[Any, ...]) -> None:
    for hook in hooks:
        if getattr(hook, "on_all_processes", False):
            raise HookError(
                f"{hook_name(hook)} is among chief_only_hooks, but does what all processes have to do. Pass it in "
                "hooks=, on all processes."
            )


def _index(hooks: tuple[Any, ...], hook: Any) -> int:
    return next(i for i, one in enumerate(hooks) if one is hook)


def _keys(hooks: tuple[Any, ...]) -> tuple[str, ...]:
    """Stable names for hooks: their own, or the class name, numbered where it occurs more than once."""
    counts: dict[str, int] = {}
    keys = []
    for hook in hooks:
        name = getattr(hook, "state_key", None) or hook_name(hook)
        number = counts.get(name, 0)
        counts[name] = number + 1
        keys.append(name if number == 0 else f"{name}#{number}")
    return tuple(keys)


def _has(hook: Any, method: str) -> bool:
    """Whether a hook has this method of the built-in ones; a hook of the user may use its name for anything."""
    return any(method in vars(kind) for kind in type(hook).__mro__ if kind.__module__.startswith("monsess."))


def overrides(hook: Any, method: str) -> bool:
    """Whether a hook has a method of its own, rather than the one that does nothing."""
    found: Callable[..., Any] = getattr(hook, method)
    return getattr(found, "__func__", found) is not getattr(SessionRunHook, method)
