"""Where the time went, over all attempts of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, final

from monsess import clock
from monsess.agreement import StopReason
from monsess.hook import SessionRunContext, SessionRunHook, SessionRunValues
from monsess.hooks._note import Note
from monsess.log import logger
from monsess.timer import Cadence, check_secs, check_steps

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession

#: What a session measures, in the training thread, without counting anything twice.
_MEASURED = ("input", "compile", "step", "hooks", "save")
PARTS = (*_MEASURED, "loop", "start", "lost", "down")
_PRODUCTIVE = ("step", "loop")
_END_SECS = 20.0
_ERROR_SECS = 3.0


class _Account(NamedTuple):
    """What is known of a run up to some moment.

    Args:
        parts: Seconds by part.
        hooks: Seconds by hook.
        lost_steps: Steps that were run and had to be run again.
        restarts: How often that happened.
    """

    parts: dict[str, float]
    hooks: dict[str, float]
    lost_steps: int = 0
    restarts: int = 0

    @classmethod
    def empty(cls) -> _Account:
        """That of a run that begins."""
        return cls(dict.fromkeys(PARTS, 0.0), {})

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> _Account:
        """What `stored` gave, back."""
        parts = {name: float(stored["totals"].get(name, 0.0)) for name in PARTS}
        return cls(parts, dict(stored["hooks"]), int(stored["lost_steps"]), int(stored["restarts"]))

    @property
    def stored(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "totals": self.totals,
            "hooks": dict(self.hooks),
            "lost_steps": self.lost_steps,
            "restarts": self.restarts,
        }

    @property
    def wall(self) -> float:
        """All seconds."""
        return sum(self.parts.values())

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by part, and their sum."""
        return {**self.parts, "wall": self.wall}

    def plus(self, parts: Mapping[str, float], hooks: Mapping[str, float] | None = None) -> _Account:
        """With more seconds."""
        return self._replace(parts=_sum(self.parts, parts), hooks=_sum(self.hooks, hooks or {}))


@final
class GoodputHook(SessionRunHook):
    """Accounts for the whole wall time of a run, restarts and lost work included, and for each hook.

    The parts are ``input`` (waiting for a batch), ``compile`` (first run of each step), ``step`` (dispatching, and
    waiting for the devices), ``hooks``, ``save`` (the training thread held by a checkpoint), ``loop`` (the loop's own
    code, where outputs are converted and so waited for), ``start`` (restoring or initialising), ``lost`` (everything
    since the checkpoint that a run had to go back to) and ``down`` (from the end of a killed attempt to the start of
    the next). They add up to ``wall``. The totals are stored with each checkpoint; how far a run came is noted in
    ``goodput.json`` beside the checkpoints, by a thread, so that the lost work is known after a kill: on a local path
    with every step, or every five milliseconds where steps are shorter, unless writing the file takes more than a
    fiftieth of the time there; elsewhere every ten seconds. The goodput is the share of ``step`` and ``loop``. The
    chief writes it to the records, as an event with all parts and as the curve ``goodput``, and logs a line at the end.

    Args:
        every_n_steps: Record whenever a run crosses a multiple of it, at least 1; None: not by steps.
        every_n_secs: Record after so many seconds, above 0; None: not by seconds. One of the two has to be given.

    Raises:
        ValueError: Neither is given, or a value is no count of steps or length of time.

    Example:
        >>> import jax.numpy as jnp, monsess as ms
        >>> @ms.train_step
        ... def step(state):
        ...     return state + 1, {}
        >>> hook = ms.GoodputHook()
        >>> with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), hooks=[hook, ms.StopAtStepHook(3)]) as sess:
        ...     while not sess.should_stop():
        ...         outputs = sess.run(step)
        >>> hook.totals["lost"], hook.lost_steps, 0 < hook.goodput <= 1
        (0.0, 0, True)
    """

    def __init__(self, every_n_steps: int | None = 100, every_n_secs: float | None = None) -> None:
        self._cadence = Cadence(
            every_n_steps=None if every_n_steps is None else check_steps("every_n_steps", every_n_steps),
            every_secs=None if every_n_secs is None else check_secs("every_n_secs", every_n_secs),
        )
        self._session: MonitoredSession | None = None
        self._note: Note | None = None
        self.begin()

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by part, and ``wall``, their sum; over all attempts, up to now or to the end of the session."""
        return self._now().totals

    @property
    def hooks(self) -> dict[str, float]:
        """Seconds by hook, over all attempts."""
        return self._now().hooks

    @property
    def lost_steps(self) -> int:
        """Steps that were run and had to be run again, or will have to be, over all attempts."""
        return self._base.lost_steps

    @property
    def restarts(self) -> int:
        """How often a run went on after an attempt that was killed or preempted, or that failed."""
        return self._base.restarts

    @property
    def goodput(self) -> float:
        """The share of ``step`` and ``loop`` in ``wall``, from 0 to 1."""
        return _goodput(self._now())

    def begin(self) -> None:
        """Begin a new account."""
        self._began, self._began_wall = clock.monotonic(), clock.wall()
        self._base = _Account.empty()  # all that was before `_from`
        self._loaded: dict[str, Any] | None = None
        self._from = self._began
        self._session = None
        self._final: _Account | None = None
        self._seen = self._first = 0
        self._noting = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the account of the checkpoint back."""
        self._loaded = state

    def state_dict(self) -> dict[str, Any]:
        """The account so far, and when that was."""
        return {**self._now().stored, "time": clock.wall()}

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Find out what was lost, if anything."""
        now = clock.monotonic()
        loaded, self._loaded = self._loaded, None
        before = _Account.empty()
        if loaded is not None:
            try:
                before = _Account.of(loaded)
            except (AttributeError, KeyError, TypeError, ValueError) as error:  # of another version, say
                logger.warning("The account of the checkpoint cannot be read (%r), and begins anew.", error)
                loaded = None
        if session.recoveries:
            step, failed = session._left_behind()
            if failed < self._from:  # creating the state has failed behind this hook, which has counted all that
                step, failed = self._seen, self._from
            told = failed - self._from
            reached = {"step": step, "wall": self._base.wall + told, "down": self._base.parts["down"]}
            reached |= {"lost_steps": self._base.lost_steps, "restarts": self._base.restarts}
            base = _after_a_failure(before, reached, session.global_step)
            self._base = base.plus({"start": now - failed})
        else:
            self._note = self._its_note(session)
            found = None if self._note is None else self._note.read()
            if found is not None and found.get("run_id") == session.run_id:
                before = _continued(before, loaded, found, session.global_step, self._began_wall)
            self._base = before.plus({"start": now - self._began})
        self._session = session
        self._from = now
        self._seconds_before, self._hooks_before = dict(session.seconds), _hook_seconds(session)
        self._seen = self._first = session.global_step
        self._noting = False
        self._noted_until = math.inf  # up to when the thread of the note looks by itself, if there is one
        self._cadence.rearm()

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Have the step noted, and record the account if that is due."""
        if self._note is not None and not self._noting:
            self._begin_noting(self._note)
        elif self._note is not None:
            self._noted_until = self._note.wake()
        seen, self._seen = self._seen, run_context.global_step
        if self._cadence.due(seen, self._seen):
            self._cadence.rearm()
            self._record(run_context.session)

    def _sleeps_until(self) -> int | None:
        """See `HookRunner`."""
        return self._cadence.next_due(self._seen)

    def _sleeps_until_time(self) -> float:
        """See `HookRunner`."""
        return self._noted_until

    def end(self, session: MonitoredSession) -> None:
        """Record the account, log it, and note that nothing was lost."""
        self._final = account = self._now()
        if session.is_chief and session.global_step > self._first:
            self._record(session)
            logger.info("goodput %s", _shown(account))
        if self._note is not None and self._noting:
            told = session.stop_reason == StopReason.PREEMPTED
            final = {"step": session.global_step, "clean": True, "preempted": told, "run_id": session.run_id}
            self._note.close({**final, "time": clock.wall(), **account.stored}, _END_SECS)
        self._let_go()

    def on_error(self, session: MonitoredSession, error: BaseException) -> None:
        """Keep the note, which says how far the run came."""
        if self._session is not None:
            self._final = self._now()
        if self._note is not None and self._noting:
            self._note.look(at_all_events=True)
            self._note.close(None, _ERROR_SECS)
        self._let_go()

    def _let_go(self) -> None:
        if self._note is not None:
            self._note.stop()
        self._session = self._note = None

    def _its_note(self, session: MonitoredSession) -> Note | None:
        storage = session._storage() if session.is_chief else None
        return None if storage is None else Note(storage)

    def _begin_noting(self, note: Note) -> None:
        assert self._session is not None
        about = {
            "run_id": self._session.run_id,
            "time": clock.wall() - (clock.monotonic() - self._from),
            "wall": self._base.wall,
            "down": self._base.parts["down"],
            "lost_steps": self._base.lost_steps,
            "restarts": self._base.restarts,
        }
        self._noting = True
        self._noted_until = note.begin(about, self._session, self._from)

    def _now(self) -> _Account:
        """The account up to this moment."""
        if self._final is not None:
            return self._final
        session = self._session
        if session is None:
            return self._base
        elapsed = clock.monotonic() - self._from
        spent = session.seconds
        parts = {name: max(0.0, spent[name] - self._seconds_before[name]) for name in _MEASURED}
        parts["loop"] = max(0.0, elapsed - sum(parts.values()))
        hooks = _hook_seconds(session)
        return self._base.plus(parts, {name: hooks[name] - self._hooks_before.get(name, 0.0) for name in hooks})

    def _record(self, session: MonitoredSession) -> None:
        if not session.is_chief:
            return
        account = self._now()
        rounded = account._replace(
            parts={name: round(seconds, 4) for name, seconds in account.parts.items()},
            hooks={name: round(seconds, 4) for name, seconds in account.hooks.items()},
        )
        stored = rounded.stored
        stored["totals"]["wall"] = round(stored["totals"]["wall"], 4)
        session._record("goodput", **stored)
        session.log({"goodput": _goodput(account)})


def _hook_seconds(session: MonitoredSession) -> dict[str, float]:
    return dict(session.summary()["hooks"])


def _goodput(account: _Account) -> float:
    return sum(account.parts[name] for name in _PRODUCTIVE) / account.wall if account.wall > 0 else 0.0


def _continued(
    before: _Account, loaded: Mapping[str, Any] | None, found: Mapping[str, Any], step: int, began: float
) -> _Account:
    """The account of a run that goes on, from that of its checkpoint and the note of the attempt before this one.

    Args:
        before: Of the checkpoint.
        loaded: The same as it was stored, or None.
        found: The note.
        step: Where the run goes on.
        began: When this attempt began, in seconds since the epoch.
    """
    try:
        if found.get("clean") and found["step"] == step and not found["preempted"]:
            return _Account.of(found)
        if found.get("clean"):
            account = _of_the_end(before, found, step)
            if not found["preempted"]:
                return account  # its end was wanted, and so is going back from there
            last = float(found["time"])
        else:
            elapsed = float(found["elapsed"])
            account = _after_a_failure(before, {**found, "wall": found["wall"] + elapsed}, step)
            last = float(found["time"]) + elapsed
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("How far the attempt before this one came is not known: goodput.json holds %r", error)
        return before
    if loaded is not None:  # a note that is written now and then may be older than the checkpoint
        last = max(last, float(loaded.get("time", last)))
    return account.plus({"down": max(0.0, began - last)})


def _of_the_end(before: _Account, found: Mapping[str, Any], step: int) -> _Account:
    """The account of a run that goes on, or goes back, after a clean end."""
    account = _Account.of(found)
    if found["step"] == step:
        return account._replace(restarts=account.restarts + 1)
    about = {"lost_steps": account.lost_steps, "restarts": account.restarts, "down": account.parts["down"]}
    return _after_a_failure(before, {"step": found["step"], "wall": account.wall, **about}, step)


def _after_a_failure(before: _Account, reached: Mapping[str, Any], step: int) -> _Account:
    """The account of a run that goes back to a checkpoint.

    Args:
        before: That of the checkpoint.
        reached: ``step``, ``wall``, ``down``, ``lost_steps`` and ``restarts`` where it was before.
        step: That of the checkpoint.
    """
    down = max(0.0, float(reached["down"]) - before.parts["down"])
    lost = max(0.0, float(reached["wall"]) - before.wall - down)
    steps = max(0, int(reached["step"]) - step)
    account = before.plus({"lost": lost, "down": down})
    return account._replace(
        lost_steps=max(before.lost_steps, int(reached["lost_steps"])) + steps,
        restarts=max(before.restarts, int(reached["restarts"])) + 1,
    )


def _sum(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in {**left, **right}}


def _shown(account: _Account) -> str:
    wall = account.wall
    parts = sorted(((s, name) for name, s in account.parts.items() if s >= 0.005 * wall), reverse=True)
    text = f"{100 * _goodput(account):.1f} % of {wall:.1f} s: " + ", ".join(f"{name} {s:.1f} s" for s, name in parts)
    if account.restarts:
        text += f"; {account.lost_steps} steps lost in {account.restarts} restarts"
    return text
