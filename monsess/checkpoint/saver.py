"""Background saves: one in flight, one waiting, and every one of them accounted for."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from monsess import clock
from monsess.checkpoint import orbax_io
from monsess.checkpoint.commit import CommitRecord
from monsess.checkpoint.leaves import LeafSpec, holds_inf, holds_nan, is_inexact, to_host
from monsess.checkpoint.options import CheckpointOptions
from monsess.checkpoint.publish import Writer, publish
from monsess.checkpoint.retention import Retention
from monsess.checkpoint.store import NONFINITE, CheckpointStore, shown_error
from monsess.checkpoint.table import check_against
from monsess.checkpoint.upkeep import ABANDONED_SECS, Upkeep
from monsess.errors import DirectoryInUseError, NonFiniteStateError, SaveError, StorageError
from monsess.log import logger

_WARN_SECS = 5.0
_CLEANING_SECS = 10.0
_BREATH_SECS = 1.0
#: Of the time that a save may take, the part for which what fails in the store is tried again.
_PATIENCE = 0.9


class ValuesLostError(SaveError):
    """The device did not hand over the values of a snapshot: the step itself has failed, which is the cause."""


def _no_gate() -> None:
    """The gate of a snapshot without one, and the check of a saver without one."""


@dataclasses.dataclass
class Snapshot:
    """A state to be saved, private to the saver: nobody changes or donates its leaves.

    Args:
        step: Global step.
        leaves: jax arrays or host values, in the order of ``specs``; each is let go as soon as it is on the host.
        specs: What the leaves are, as `monsess.checkpoint.leaves.describe` returned it.
        session: JSON-able content of session.json.
        metrics: Scalars, perhaps still on the device, by which retention may rank the step; those that are not finite
            rank nothing.
        gate: Called when the values are on the host, before anything is written; what it raises abandons the save and
            is raised in the training thread.
        is_final: The last save of a session: a state that is not finite is then an error.
    """

    step: int
    leaves: list[Any]
    specs: Sequence[LeafSpec]
    session: dict[str, Any] = dataclasses.field(default_factory=dict)
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    gate: Callable[[], None] = _no_gate
    is_final: bool = False


class Saver:
    """Writes snapshots in one daemon thread, which starts with the first of them.

    A save that was accepted ends as committed or as an error raised by `poll` or `wait`; no wait for one
    of them is longer than ``options.save_timeout_secs``.

    Args:
        store: Where to.
        options: Finite check, time limit, staging directory.
        keep: Which steps stay.
        attempt: Name of this attempt, part of file names.
        run_id: Lineage.
        protect: Steps that are never deleted; may be changed while the saver runs.
        started: When the lineage began, in seconds since the epoch; None for now.
        check: Called just before each commit; what it raises prevents the commit.
    """

    def __init__(
        self,
        store: CheckpointStore,
        options: CheckpointOptions,
        keep: Retention,
        *,
        attempt: str,
        run_id: str,
        protect: set[int] | None = None,
        started: float | None = None,
        check: Callable[[], None] = _no_gate,
    ) -> None:
        self._store = store
        self._check = check
        self._options = options
        began = round(clock.wall(), 3) if started is None else started
        self._writer = Writer(run_id, attempt, options.staging_dir, began)
        self._upkeep = Upkeep(store, self._writer, keep, set() if protect is None else protect, check)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting: Snapshot | None = None
        self._active: int | None = None
        self._active_since = 0.0
        self._said_slow: int | None = None
        self._stuck: str | None = None
        self._store_failed = False  # the last save, for as long as that was tried
        self._closed = False
        self._committed: list[int] = []
        self._errors: list[BaseException] = []
        #: float: seconds that `submit` held its caller.
        self.stalled_seconds = 0.0
        #: int: how many steps were committed.
        self.saves = 0
        #: int | None: the newest of them.
        self.last_committed: int | None = None
        #: dict by step of commits that nobody has asked about yet: when, in how many seconds, and of what size.
        self.facts: dict[int, dict[str, float]] = {}
        #: list[tuple[int, str]]: steps that were not committed because the leaf of that path is not finite.
        self.skipped: list[tuple[int, str]] = []

    def submit(self, snapshot: Snapshot) -> None:
        """Hand over a snapshot; returns at once unless one is in flight and another one waits.

        Args:
            snapshot: Belongs to the saver from now on.

        Raises:
            SaveError: No place became free within the limit, or the saver is closed or stuck.
        """
        with self._changed:
            if self._closed:
                raise SaveError(f"Step {snapshot.step} cannot be saved: the saver is closed.")
            if self._waiting is not None:
                self._hold(snapshot.step)
            if self._stuck is not None:
                raise SaveError(f"Step {snapshot.step} cannot be saved: {self._stuck}")
            self._waiting = snapshot
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="monsess-saver", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def rank(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take note of finite values by which retention may rank a step that was submitted or committed earlier."""
        self._upkeep.rank(step, metrics)

    def poll(self) -> list[int]:
        """Return what was committed since the last call, without waiting.

        Returns:
            Steps in the order of their commits.

        Raises:
            BaseException: What a save failed with: `SaveError`, `NonFiniteStateError`, or the gate's own error; each
                once, further ones as notes of the first.
        """
        with self._changed:
            self._look_for_stuck()
            return self._report()

    def wait(self) -> list[int]:
        """Wait until everything submitted is committed or failed, each within ``save_timeout_secs``; then as `poll`.

        Raises:
            BaseException: As `poll`; `SaveError` if the time is over.
        """
        limit = self._options.save_timeout_secs
        with self._changed:
            active, deadline = self._active, time.monotonic() + limit
            while self._busy() and self._stuck is None:
                if active is not None and self._active not in (None, active):  # each of the two has its own limit
                    active, deadline = self._active, time.monotonic() + limit
                left = deadline - time.monotonic()
                if left <= 0:
                    steps = [s for s in (self._active, self._waiting and self._waiting.step) if s is not None]
                    self._give_up(f"step {' and '.join(map(str, steps))} did not end within {limit:g} s")
                    break
                self._changed.wait(min(left, 1.0))
                self._look_for_stuck()
            return self._report()

    def close(self, wait: bool = True) -> None:
        """End the thread; never raises and never waits longer than the limit.

        The clean-up after the last commit gets a few seconds to end; what is left of it is done by a later run.

        Args:
            wait: Let the saves that were submitted end first; otherwise a save in flight is left uncommitted.
        """
        limit = self._options.save_timeout_secs
        begun = time.monotonic()
        with self._changed:
            self._closed = True
            if not wait:
                self._waiting = None
                if self._active is not None:
                    self._give_up(f"step {self._active} was abandoned")
            self._changed.notify_all()
            while self._stuck is None and self._busy() and time.monotonic() - begun < limit:
                self._changed.wait(0.5)
                self._look_for_stuck()
        if not self._upkeep.close(min(limit, _CLEANING_SECS)):
            logger.warning(
                "The clean-up of old checkpoints in %s did not end in time; a later run goes on with it.",
                self._store.url,
            )

    def abandon(self) -> None:
        """Have the threads end when they look next: nobody submits anything any more.

        The garbage collector calls it at any point of any thread, so that it takes no lock.
        """
        self._closed = True
        self._upkeep.abandon()

    @property
    def _cleaning(self) -> bool:
        return self._upkeep.busy

    def _busy(self) -> bool:
        return self._active is not None or self._waiting is not None

    def _hold(self, step: int) -> None:
        begun = time.monotonic()
        limit = self._options.save_timeout_secs
        warned = False
        try:
            while self._waiting is not None and self._stuck is None:
                held = time.monotonic() - begun
                if held > limit:
                    raise SaveError(
                        f"Step {step} could not be saved: the two saves before it did not end within {limit:g} s. Save "
                        f"less often, or find out why {self._store.url} is slow."
                    )
                if not warned and held > min(_WARN_SECS, limit / 2):
                    warned = True
                    logger.warning(
                        "Training waits for two earlier saves to %s; save less often if this goes on.", self._store.url
                    )
                self._changed.wait(0.5)
                self._look_for_stuck()
        finally:
            self.stalled_seconds += time.monotonic() - begun

    def _look_for_stuck(self) -> None:
        limit = self._options.save_timeout_secs
        if self._stuck is not None or self._active is None:
            return
        taken = time.monotonic() - self._active_since
        if taken > limit:
            self._give_up(f"step {self._active} did not end within {limit:g} s")
        elif taken > limit / 2 and self._said_slow != self._active:
            self._said_slow = self._active
            logger.warning(
                "The save of step %d to %s has taken %.0f s and is given up after %g s; training goes on.",
                *(self._active, self._store.url, taken, limit),
            )

    def _give_up(self, reason: str) -> None:
        """Leave the thread behind: whatever it was doing, it commits nothing any more."""
        trouble = self._store._storage.trouble
        reason += f" (the store is tried again and again: could not {trouble})" if trouble else ""
        self._stuck = (
            f"the save of {reason} and nothing is committed any more. Check that {self._store.url} answers, or raise "
            "CheckpointOptions(save_timeout_secs=...)."
        )
        self._errors.append(SaveError(self._stuck[0].upper() + self._stuck[1:]))
        self._waiting = None
        self._active = None

    def _report(self) -> list[int]:
        if self._errors:
            first, *others = self._errors
            self._errors = []
            for other in others:
                first.add_note(f"Another save failed as well: {type(other).__name__}: {other}")
            raise first
        committed, self._committed = self._committed, []
        return committed

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._waiting is None:
                    if self._closed or self._stuck is not None:
                        return
                    self._changed.wait(ABANDONED_SECS)
                snapshot, self._waiting = self._waiting, None
                self._active = snapshot.step
                self._active_since = time.monotonic()
                self._changed.notify_all()
            record: CommitRecord | None = None
            error: BaseException | None = None
            try:
                record = self._save(snapshot)
            except BaseException as raised:  # whatever it is, the training thread hears of it
                error = raised
            with self._changed:
                if self._stuck is not None:
                    return
                if record is not None:
                    self._committed.append(record.step)
                    seconds = round(time.monotonic() - self._active_since, 3)
                    self.facts[record.step] = {"time": record.time, "seconds": seconds, "bytes": record.size}
                    self.saves += 1
                    self.last_committed = max(record.step, self.last_committed or 0)
                if error is not None:
                    self._errors.append(error)
                self._active = None
                if record is not None:
                    self._upkeep.after(record)
                self._changed.notify_all()
            del snapshot
            if record is not None and self._waiting is not None:
                self._upkeep.breathe(_BREATH_SECS)

    def _save(self, snapshot: Snapshot) -> CommitRecord | None:
        try:
            values = self._to_host(snapshot)
        except SaveError:
            raise
        except Exception as error:
            raise ValuesLostError(
                f"Step {snapshot.step} was not saved: the device did not hand over its values: {shown_error(error)}"
            ) from error
        snapshot.gate()
        if self._is_unfit(snapshot, values):
            return None
        metrics = {name: float(np.asarray(value)) for name, value in snapshot.metrics.items()}
        self._upkeep.claim(snapshot.step)
        # A little less than the limit, after which only that it is over would be known, and not why.
        left = self._active_since + _PATIENCE * self._options.save_timeout_secs - time.monotonic()
        if self._store_failed:
            left = 0.0  # the session ends with that error; this save is tried, and holds nobody for as long once more
        try:
            with self._store._storage.patience(left):
                record = publish(
                    self._store,
                    self._writer,
                    snapshot.step,
                    snapshot.specs,
                    values,
                    snapshot.session,
                    {name: value for name, value in metrics.items() if math.isfinite(value)},
                    self._check_still_wanted,
                )
            self._store_failed = False
            return record
        except (SaveError, DirectoryInUseError):
            raise
        except Exception as error:
            self._store_failed = isinstance(error, StorageError)
            if not self._store_failed:
                with contextlib.suppress(StorageError):  # what went wrong is more to the point
                    self._check()  # another run may have taken the directory over and cleaned up
            hint = "" if isinstance(error, StorageError) else " The step before it is still there."
            raise SaveError(
                f"Step {snapshot.step} was not saved to {self._store.url}: {shown_error(error)}{hint}"
            ) from error
        finally:
            self._upkeep.release(snapshot.step)

    def _to_host(self, snapshot: Snapshot) -> list[Any]:
        leaves, snapshot.leaves = snapshot.leaves, []
        for leaf in leaves:
            start = getattr(leaf, "copy_to_host_async", None)
            if start is not None:
                start()
        orbax_io.warm_up()  # its import takes about as long as a transfer
        values: list[Any] = []
        leaves.reverse()
        for spec in snapshot.specs:
            value = to_host(leaves.pop())
            problem = check_against(spec, value)
            if problem is not None:
                raise SaveError(
                    f"Step {snapshot.step} was not saved: leaf {spec.path!r} is not what it was when the session was "
                    f"made: {problem}."
                )
            values.append(value)
        return values

    def _is_unfit(self, snapshot: Snapshot, values: Sequence[Any]) -> bool:
        path = self._first_unfit(snapshot.specs, values)
        if path is None:
            return False
        text = f"leaf {path!r} of step {snapshot.step} is not finite (CheckpointOptions.check_finite)"
        if snapshot.is_final:
            raise NonFiniteStateError(
                f"The final state is not committed: {text}. The newest checkpoint before it is still there."
            )
        if self._failed_before(snapshot.step, path):
            raise NonFiniteStateError(
                f"Training ends: {text}, as it was in an attempt before this one, and starting again would not help."
            )
        self.skipped.append((snapshot.step, path))
        logger.warning("Not saved: %s. Training goes on, the newest checkpoint before it is kept.", text)
        return True

    def _failed_before(self, step: int, path: str) -> bool:
        """Whether an earlier attempt failed in the same leaf, here or before, and none got past that; notes it down.

        Of each attempt the first failure after its newest commit is remembered: saves by the clock do not come at the
        same steps again.
        """
        try:
            run = self._store.read_run() or {}
            attempts = {entry[2]: entry for entry in run.get(NONFINITE, [])}
            own = attempts.pop(self._writer.attempt, None)
            earlier = [entry[0] for entry in attempts.values() if entry[0] <= step and entry[1] == path]
            if earlier and max(self._store.steps(), default=-1) < max(earlier):
                return True
            if own is None or own[0] <= (self.last_committed or 0):
                noted = [*attempts.values(), [step, path, self._writer.attempt]][-20:]
                self._store.write_run({"run_id": self._writer.run_id, NONFINITE: noted})
        except StorageError as error:
            logger.warning("A later attempt will not know that step %d was not finite: %s", step, error)
        return False

    def _first_unfit(self, specs: Sequence[LeafSpec], values: Sequence[Any]) -> str | None:
        check = self._options.check_finite
        if check is False:
            return None
        for spec, value in zip(specs, values, strict=True):
            if spec.kind == "key":
                continue
            array = np.asarray(value) if spec.kind == "array" or isinstance(value, (float, complex)) else None
            if array is None:
                continue
            if callable(check):
                fit = bool(check(spec.path, array))
            else:
                fit = not is_inexact(array.dtype) or not (
                    holds_nan(array) or (spec.finite is True and holds_inf(array))
                )
            if not fit:
                return spec.path
        return None

    def _check_still_wanted(self) -> None:
        self._check()
        with self._changed:
            if self._stuck is not None:
                raise SaveError("The save was given up.")
