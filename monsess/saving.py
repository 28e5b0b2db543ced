"""Between the session and its checkpoints: finds one to restore, decides what a save holds, tells the listeners."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from monsess import clock
from monsess.checkpoint import CheckpointOptions, CheckpointStore, Retention
from monsess.checkpoint.leaves import LeafTable, describe
from monsess.checkpoint.ownership import Ownership
from monsess.checkpoint.restore import Restored, find_restorable
from monsess.checkpoint.saver import Saver, Snapshot
from monsess.errors import (
    ClusterError,
    DirectoryInUseError,
    MonsessError,
    NonFiniteStateError,
    SaveError,
    StorageError,
)
from monsess.log import logger, mask
from monsess.placement import Snapshotter, on_first_device
from monsess.reduction import path_name

if TYPE_CHECKING:
    from monsess.session import MonitoredSession


class SavePoint(NamedTuple):
    """What a checkpoint of the current step holds, and what has to hold before it is committed.

    Args:
        state: The replicated state.
        content: The hooks' states and the input position; the gate may complete it.
        metrics: The values that the retention ranks by, on their way on the device.
        gate: Called by the thread that writes, once the values have arrived; what it raises prevents the commit.
    """

    state: Any
    content: dict[str, Any]
    metrics: dict[str, Any]
    gate: Callable[[], None]


class Saving:
    """The checkpoints of one session; does nothing where there is no directory.

    Args:
        url: The checkpoint directory, or None; that of the chief counts for all processes.
        storage_options: For fsspec.
        options: How to save and restore.
        keep: Which checkpoints to keep.
        on_commit: Called, in the training thread, for each new commit, with its step and the facts of it: "time" (of
            the commit, seconds since the epoch), "seconds" (that it took), "bytes".
        chief: Whether this process writes; another one only keeps step with it.
    """

    def __init__(
        self,
        url: str | None,
        storage_options: dict[str, Any] | None,
        options: CheckpointOptions,
        keep: Retention,
        on_commit: Callable[[int, Mapping[str, Any]], None],
        chief: bool = True,
    ) -> None:
        self._chief = chief
        self.store = None if url is None else CheckpointStore(url, storage_options)
        #: bool: whether there are checkpoints of this run, whichever process writes them.
        self.saves = self.store is not None
        self.run_id = uuid.uuid4().hex[:12]
        self.attempt = uuid.uuid4().hex[:8]
        self._began = round(clock.wall(), 3)  # the lineage
        self._ownership = None if self.store is None or not chief else Ownership(self.store, attempt=self.attempt)
        self._not_owned: StorageError | None = None  # why the directory could not be taken
        self._options = options
        self._keep = keep
        #: tuple[str, ...]: the outputs that the retention ranks steps by; values of an evaluation come from elsewhere.
        self.ranked_by = tuple(name for name in getattr(keep, "metrics", ()) if not name.startswith("eval/"))
        #: frozenset[str]: values of an evaluation that it ranks them by.
        self.ranked_by_evaluation = frozenset(getattr(keep, "metrics", ())).difference(self.ranked_by)
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})  # values of a step that is not saved yet
        self._on_commit = on_commit
        self._snapshot = Snapshotter(on_host=options.snapshot == "host")
        self._saver: Saver | None = None
        self._specs = LeafTable()
        self._listeners: list[Any] = []
        self._protected: set[int] = set()
        self._newer: list[int] = []  # steps after the one that was chosen to be restored
        self._taken: int | None = None  # the step of the newest snapshot that was handed over or restored
        self._committed: int | None = None  # the newest step known to be committed

    @property
    def place(self) -> str | None:
        """Where the checkpoints are, for people; None if there are none."""
        if self.store is not None:
            return self.store.url
        return "the checkpoint_dir of process 0" if self.saves else None

    def masked(self, text: str) -> str:
        """``text`` without credentials, those that the directory is reached with among them."""
        return mask(text, () if self.store is None else self.store._storage._secrets)

    @property
    def last_committed(self) -> int | None:
        """The newest committed step that this session wrote or restored."""
        return self._committed

    @property
    def commits(self) -> int:
        """How many checkpoints this session has committed."""
        return 0 if self._saver is None else self._saver.saves

    @property
    def stalled_seconds(self) -> float:
        """Seconds for which a full queue held the training thread."""
        return 0.0 if self._saver is None else self._saver.stalled_seconds

    def find(self, restore_step: int | None) -> Restored | None:
        """The checkpoint to restore; None only if there is proven to be none."""
        if self.store is None:
            return None
        self._own()
        restored = find_restorable(
            self.store,
            strict=self._options.strict,
            restore_step=restore_step,
            staging_dir=self._options.staging_dir,
        )
        if restore_step is not None:
            self._look_at_newer(restore_step)
        if restored is None:
            run = self.store.read_run()
            if run is not None and run.get("run_id"):
                self.run_id = str(run["run_id"])  # an attempt that died before its first commit is the same run
                self._began = float(run.get("started", self._began))
            return None
        self.run_id = str(restored.session["run_id"])
        self._began = restored.started
        return restored

    def _own(self) -> None:
        """Take the directory before anything in it is looked at.

        Raises:
            DirectoryInUseError: Another run has it.
        """
        assert self._ownership is not None
        try:
            self._ownership.acquire()
        except StorageError as error:
            self._not_owned = error  # a checkpoint can be read all the same; nothing can be saved

    def start(self, state: Any, restored: Restored | None) -> None:
        """Take note of the state at the start, whose leaves and infinities later saves are measured against."""
        self._taken = self._committed = None if restored is None else restored.step
        if self.store is None or not self._chief:
            return
        specs = describe(on_first_device(state))
        if restored is not None:
            specs = specs.with_finite_of(restored.specs)
            self._protect(restored.step)
        assert self._ownership is not None
        self._ownership.note(run_id=self.run_id, restored_from=self._taken)
        self._specs = specs
        self._snapshot(state)  # compiled now rather than at the first save

    def _protect(self, step: int) -> None:
        """Have retention leave ``step``, and no longer the one restored before it; the saver's thread looks on."""
        self._protected.add(step)
        for other in self._protected - {step}:
            self._protected.discard(other)

    def open_for_writing(self) -> None:
        """Show that the store can be written, and get ready to save."""
        if self.store is None or self._saver is not None or not self._chief:
            return
        assert self._ownership is not None
        if self._not_owned is not None:
            raise self._not_owned
        self._ownership.check()
        run = self.store.read_run() or {}
        self.store.write_run({**run, "run_id": self.run_id, "started": self._began, "last_attempt": self.attempt})
        for step in reversed(self._newer):
            logger.info("moved the newer step %d to %s", step, self.store.set_aside(step, self.attempt))
        self._newer = []
        self._saver = Saver(
            self.store,
            self._options,
            self._keep,
            attempt=self.attempt,
            run_id=self.run_id,
            protect=self._protected,
            started=self._began,
            check=_weak(self._ownership.check),
        )
        weakref.finalize(self, self._saver.abandon).atexit = False

    def _look_at_newer(self, restore_step: int) -> None:
        assert self.store is not None
        self._newer = [step for step in self.store.steps() if step > restore_step]
        if self._newer and self._options.newer == "refuse":
            raise MonsessError(
                f"restore_step={restore_step}, but {self.store.url} holds the newer checkpoints {self._newer}, which "
                'going on from there would contradict. CheckpointOptions(newer="aside") moves them to '
                "aside-<step>-<attempt>."
            )

    def add_listener(self, listener: Any) -> None:
        """Have ``listener`` told of every save; adding it twice changes nothing."""
        if all(one is not listener for one in self._listeners):
            self._listeners.append(listener)

    def save(self, session: MonitoredSession, point: Callable[[], SavePoint], final: bool = False) -> None:
        """Hand a snapshot of the current step over, once per step.

        Args:
            session: The session.
            point: Gives what is to be saved; called after the listeners' ``before_save``.
            final: The last save of the session.
        """
        step = session.global_step
        if not self.saves or self._taken == step:
            return
        if not self._chief:
            point()
            self._taken = step
            return
        self.open_for_writing()
        assert self._saver is not None
        for listener in self._listeners:
            _told(listener, "before_save", session, step)
        state, content, metrics, gate = point()
        # The very object that the gate completes with what the other processes hand in.
        content |= {"step": step, "run_id": self.run_id, "attempt": self.attempt, "versions": versions()}
        if self._evaluated[0] == step:
            metrics = {**metrics, **self._evaluated[1]}
        leaves = self._snapshot(state)
        self._saver.submit(Snapshot(step, leaves, self._specs, content, metrics, gate, is_final=final))
        self._taken = step

    def rank(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take note of values of an evaluation, for the checkpoint of that step, be it written or not.

        Args:
            step: Global step.
            metrics: The values, by names of `ranked_by_evaluation`.
        """
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        if not finite or not self._chief or self.store is None:
            return
        if self._taken is None or step > self._taken:
            before = self._evaluated[1] if self._evaluated[0] == step else {}
            self._evaluated = (step, {**before, **finite})
        elif self._saver is not None:
            self._saver.rank(step, finite)

    def poll(self, session: MonitoredSession) -> None:
        """Tell listeners of new commits, and raise what went wrong in the background."""
        if self._saver is not None:
            self._tell(session, self._saver.poll())
        if self._ownership is not None:
            self._ownership.raise_if_lost()

    def finish(self, session: MonitoredSession, point: Callable[[], SavePoint]) -> None:
        """Commit the current step unless it is committed, and wait for everything that was handed over.

        Raises:
            SaveError: The step did not become a checkpoint.
            NonFiniteStateError: The state must not become one.
        """
        if not self.saves:
            return
        step = session.global_step
        self.save(session, point, final=True)
        if not self._chief:
            return
        self._wait(session)
        if self._saver is not None and self._committed != step:
            self._refuse_skipped(step)
            self._taken = None  # a periodic save of this step did not make it: once more
            self.save(session, point, final=True)
            self._wait(session)
            if self._committed != step:
                raise SaveError(f"Step {step} was handed over to be saved, but was not committed.")

    def follow(self, step: int) -> None:
        """On another process than the chief: note that it has committed ``step``."""
        self._committed = step

    def lineage(self) -> dict[str, Any]:
        """Which run this is and whether it is saved, for the other processes."""
        return {"run_id": self.run_id, "began": self._began, "saves": self.saves}

    def join_lineage(self, lineage: dict[str, Any]) -> None:
        """On another process than the chief: be of its run, and take part in its saves if it makes any.

        Raises:
            ClusterError: It makes none, and this process has a directory.
        """
        if self.store is not None and not lineage["saves"]:
            raise ClusterError(
                f"This process has checkpoint_dir={self.store.url}, and the chief, process 0, has none: it alone saves "
                "and restores, so nothing would be saved. Pass checkpoint_dir= on process 0, or on no process."
            )
        self.run_id, self._began, self.saves = lineage["run_id"], lineage["began"], lineage["saves"]

    def settle(self, session: MonitoredSession) -> None:
        """Wait for saves in flight and tell of them: a recovery restores the newest, which may be on its way."""
        self._wait(session)

    def drain(self, cause: BaseException | None) -> None:
        """Let saves in flight end, bounded, while the session is left for ``cause``; what fails is logged."""
        if self._saver is None:
            return
        try:
            for step in self._saver.wait():
                self._note_commit(step)
        except Exception as error:
            if error is not cause:
                logger.error("a checkpoint in flight was lost: %s", error)

    def close(self) -> None:
        """End the background thread, and let go of the directory."""
        if self._saver is not None:
            self._saver.close(wait=False)
        if self._ownership is not None:
            self._ownership.release()

    def raise_if_lost(self) -> None:
        """Raise if another run has taken the directory over; nothing is read or waited for.

        Raises:
            DirectoryInUseError: It has.
        """
        if self._ownership is not None:
            self._ownership.raise_if_lost()

    def _wait(self, session: MonitoredSession) -> None:
        if self._saver is not None:
            self._tell(session, self._saver.wait())

    def _tell(self, session: MonitoredSession, steps: list[int]) -> None:
        for step in steps:
            self._note_commit(step)
            for listener in self._listeners:
                if _told(listener, "after_save", session, step):
                    logger.info("A CheckpointSaverListener requested that training be stopped. listener: %r", listener)
                    session.request_stop("a CheckpointSaverListener asked for it", session.process_count == 1)

    def _note_commit(self, step: int) -> None:
        assert self.store is not None
        self._committed = step
        logger.info("saved step %d in %s", step, self.store.url)
        self._on_commit(step, {} if self._saver is None else self._saver.facts.pop(step, {}))

    def _refuse_skipped(self, step: int) -> None:
        assert self._saver is not None
        for skipped, path in self._saver.skipped:
            if skipped == step:
                raise NonFiniteStateError(
                    f"The state of step {step} holds a non-finite value in {path!r} and was not committed. The newest "
                    f"checkpoint is step {self._committed}. Look at the loss before that step; "
                    "CheckpointOptions(check_finite=False) stores such states."
                )


def _weak(check: Callable[[], None]) -> Callable[[], None]:
    """The same for the threads of the saver, which outlive a session that nobody closed and nobody holds any more.

    A save that is under way holds its session.
    """
    reference = weakref.WeakMethod(check)

    def call() -> None:
        found = reference()
        if found is None:
            raise DirectoryInUseError("The session was abandoned, and nothing is done in its directory any more.")
        found()

    return call


def _told(listener: Any, method: str, session: MonitoredSession, step: int) -> Any:
    try:
        return getattr(listener, method)(session, step)
    except BaseException as error:
        error.add_note(f"Raised by listener {type(listener).__qualname__} in {method}, step {step}.")
        raise


def leaf_names(state: Any) -> list[str]:
    """The paths of a state's leaves, in flatten order; ``state`` where it is nothing but one leaf."""
    return [path_name(path) if path else "state" for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]


def versions() -> dict[str, str]:
    """The versions that a checkpoint and the records name."""
    return {
        "monsess": importlib.metadata.version("monsess"),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
