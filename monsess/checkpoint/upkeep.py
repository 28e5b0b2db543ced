"""After a commit: leftovers of dead attempts and steps that the policy lets go. Never an error, never in the way.

It works in a thread of its own and through connections of its own, so that a store which is slow to delete, or never
answers, holds neither a save nor training. The thread that saves *claims* the number it is about to write: the one here
keeps away from it then. Everything is looked at once more just before it is deleted.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from monsess.checkpoint import aside
from monsess.checkpoint.commit import CommitRecord, StepRecord
from monsess.checkpoint.evaluations import EVAL_PREFIX, EVALS, Evaluations
from monsess.checkpoint.publish import Writer
from monsess.checkpoint.retention import Retention
from monsess.checkpoint.staging import remove_dead
from monsess.checkpoint.store import PINS, CheckpointStore, shown_error
from monsess.checkpoint.survey import DELETING_PREFIX, PENDING_PREFIX, STAGING_PREFIX, Standing, Survey
from monsess.errors import DirectoryInUseError
from monsess.localfiles import TEMPORARY_PREFIX
from monsess.log import logger

_STAGING_NAME = re.compile(rf"{re.escape(STAGING_PREFIX)}(?:0|[1-9][0-9]*)-.+")
_DELETING_NAME = re.compile(rf"{re.escape(DELETING_PREFIX)}(0|[1-9][0-9]*)")
_SLOW_SECS = 5.0
#: How often threads that wait for a session look whether somebody still holds it.
ABANDONED_SECS = 2.0
_MOST_EARLY = 100
_FAILURES = 3  # so many in a row, and the rest is left for after the next commit


class _Work(NamedTuple):
    """One thing to do.

    Args:
        step: The number that it is about, if it is about one.
        do: Does it.
    """

    step: int | None
    do: Callable[[], object]


class Upkeep:
    """Deletes what is no longer wanted, one thing at a time, in a daemon thread that starts with the first commit.

    Args:
        store: Where.
        writer: Who cleans up: leftovers of other lineages are not his.
        keep: Which steps stay.
        protect: Steps that stay whatever ``keep`` says; another thread may change it.
        check: Called before each thing that is done; raises if the directory belongs to somebody else by now.
    """

    def __init__(
        self,
        store: CheckpointStore,
        writer: Writer,
        keep: Retention,
        protect: Collection[int],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store._apart()
        self._writer = writer
        self._keep = keep
        self._protect = protect
        self._check = check
        self._known: dict[int, StepRecord] | None = None  # until the first commit: what run.json remembers
        self._broken: dict[int, StepRecord] = {}  # remembered as well, or they would be taken for leftovers
        self._looked_at: set[int] = set()
        self._warned: set[str] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._fresh: dict[int, CommitRecord] = {}
        self._evaluations = Evaluations(self._store._storage)
        self._ranks_evaluations = any(name.startswith(EVAL_PREFIX) for name in getattr(keep, "metrics", ()))
        self._late: dict[int, dict[str, float]] = {}  # values of steps, to be written beside their checkpoints
        self._early: dict[int, dict[str, float]] = {}  # that are tried again after the next commit
        self._working = False
        self._done = 0  # things since the newest commit
        self._closed = False
        self._given_up = False
        self._claimed: set[int] = set()
        self._touched: set[int] = set()  # claimed at any time since the directory was looked at
        self._deleting: int | None = None

    @property
    def busy(self) -> bool:
        """Whether something is left to do after the commits so far."""
        with self._changed:
            return self._is_busy()

    def after(self, record: CommitRecord) -> None:
        """Clean up after a commit; returns at once.

        Args:
            record: What was just committed.
        """
        with self._changed:
            if self._closed:
                return
            self._fresh[record.step] = record
            early, self._early = self._early, {}
            self._late = {s: {**early.get(s, {}), **self._late.get(s, {})} for s in {**early, **self._late}}
            self._done = 0
            self._wake()

    def rank(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take note of values of a step that is committed or may yet be; returns at once.

        Args:
            step: Global step.
            metrics: Finite values.
        """
        with self._changed:
            if self._closed:
                return
            self._late.setdefault(step, {}).update(metrics)
            self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="monsess-upkeep", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is ending and starts no thread any more
                self._fresh.clear()
                self._late.clear()
                self._closed = True
        self._changed.notify_all()

    def breathe(self, seconds: float) -> None:
        """Wait until something was done since the newest commit, so that the store does not grow; not for long."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._given_up or not self._is_busy(), seconds)

    def claim(self, step: int) -> None:
        """Have a number for oneself until `release`; waits if it is just being deleted."""
        with self._changed:
            self._claimed.add(step)
            self._touched.add(step)
            self._changed.wait_for(lambda: self._deleting != step)

    def release(self, step: int) -> None:
        """Let go of a number that was claimed."""
        with self._changed:
            self._claimed.discard(step)

    def close(self, seconds: float) -> bool:
        """End the thread, after what it is just doing; never raises.

        Args:
            seconds: How long it may go on.

        Returns:
            Whether everything was done.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_busy(), seconds)
            self._given_up = True
            self._changed.notify_all()
            return not self._is_busy()

    def abandon(self) -> None:
        """Have the thread end when it looks next; takes no lock."""
        self._closed = True

    def _is_busy(self) -> bool:
        return self._working or bool(self._fresh) or bool(self._late)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._working = False
                self._changed.notify_all()
                while not (self._fresh or self._late or self._closed):
                    self._changed.wait(ABANDONED_SECS)
                if self._given_up or not (self._fresh or self._late):
                    return
                fresh, self._fresh = self._fresh, {}
                late, self._late = self._late, {}
                self._working = True
                self._touched = set(self._claimed)
            try:
                self._note_all(late, newest=max(fresh, default=-1))
                if fresh:
                    self._round(fresh)
            except DirectoryInUseError as error:  # the next commit raises it where it is heard
                logger.debug("%s", error)
            except Exception as error:  # deletion never stops training
                self._warn_of(error)

    def _round(self, fresh: dict[int, CommitRecord]) -> None:
        known, survey = self._look(fresh)
        surplus = self._surplus(known, next(reversed(fresh)))
        going = {record.step for record in surplus}
        self._check()
        with self._store._run_lock:
            # Forgotten before they are deleted, so that a remembered step without a commit.json is damage; what is
            # just being written is remembered after its commit.
            going |= self._touched_so_far()
            kept = [one for step, one in {**self._broken, **known}.items() if step not in going]
            self._store._remember(self._writer.run_id, kept)
        deletions = [_Work(record.step, lambda r=record: self._forget(known, survey, r)) for record in surplus]
        marks, leftovers = self._marks(survey), self._leftovers(survey)
        always = [*deletions[:1], *marks]  # so that no more is added than taken away, however fast commits come
        failures = 0
        for place, work in enumerate([*always, *leftovers, *deletions[1:], _Work(None, self._remove_dead_staging)]):
            if self._given_up or (self._fresh and place >= len(always)):
                return
            try:
                self._do(work)
                failures = 0
            except DirectoryInUseError:
                raise
            except Exception as error:
                failures += 1
                self._warn_of(error)
                if failures == _FAILURES:
                    return

    def _look(self, fresh: Mapping[int, CommitRecord]) -> tuple[dict[int, StepRecord], Survey]:
        """What is there, and what is known of the committed steps."""
        if self._known is not None:
            before = {**self._broken, **self._known}
            survey = self._store._survey({**self._known, **fresh})
        else:
            run = self._store.read_run() or {}
            damaged = self._store._remembered_damage(run)
            before = self._store._remembered(run)
            remembered = {s: record for s, record in before.items() if s not in damaged}
            survey = self._store._survey({**remembered, **fresh})
            self._store._note_damage(damaged, survey)
        self._known = {**survey.committed, **fresh}
        if survey.listing.evaluated:
            self._evaluations.refresh(None if self._ranks_evaluations else ())
        if self._ranks_evaluations:
            self._known = {step: self._ranked(record) for step, record in self._known.items()}
        self._broken = {s: record for s, record in before.items() if survey.others.get(s) is Standing.BROKEN}
        return self._known, survey

    def _ranked(self, record: StepRecord) -> StepRecord:
        """A record with the values of its step that came later, those that could not be written yet among them."""
        record = self._evaluations.applied(record)
        with self._changed:
            waiting = {**self._early.get(record.step, {}), **self._late.get(record.step, {})}
        if not waiting or record.run_id != self._writer.run_id:
            return record
        return dataclasses.replace(record, metrics={**record.metrics, **waiting})

    def _note_all(self, late: Mapping[int, Mapping[str, float]], newest: int) -> None:
        """Write values beside their checkpoints, or keep them until there is one, or the store takes them."""
        left = dict(late)
        try:
            for step, metrics in late.items():
                if self._note(step, metrics, newest):
                    del left[step]
        except DirectoryInUseError:
            raise
        except Exception as error:  # the others wait too: what is to be deleted must not wait for all of them
            text = "Could not note values beside checkpoints in %s; it is tried again after the next commit: %s"
            self._warn("noted", text, self._store.url, shown_error(error))
        with self._changed:
            for step, metrics in left.items():
                later = self._late if step in self._fresh else self._early
                later[step] = {**metrics, **later.get(step, {})}
            for old in sorted(self._early)[:-_MOST_EARLY]:
                del self._early[old]

    def _note(self, step: int, metrics: Mapping[str, float], newest: int) -> bool:
        """Write values of a step beside its checkpoint; whether there is nothing left to do."""
        found = self._store._look_at(step, self._store._look())
        if not isinstance(found, CommitRecord):
            return step < newest  # it never became a checkpoint, and steps are committed in their order
        if found.run_id == self._writer.run_id:
            self._check()
            self._evaluations.add(found, metrics)
        return True

    def _do(self, work: _Work) -> None:
        with self._changed:
            if work.step is not None and work.step in self._touched:
                return
            self._deleting = work.step
        begun = time.monotonic()
        try:
            self._check()
            work.do()
        finally:
            with self._changed:
                self._deleting = None
                self._done += 1
                self._changed.notify_all()
        if time.monotonic() - begun > _SLOW_SECS:
            self._warn("slow", "Deleting old checkpoints in %s is slow.", self._store.url)

    def _touched_so_far(self) -> set[int]:
        with self._changed:
            return set(self._touched)

    def _surplus(self, known: Mapping[int, StepRecord], newest: int) -> list[StepRecord]:
        """The steps of this lineage that the policy lets go."""
        own = [
            record
            for step, record in sorted(known.items())
            if record.run_id == self._writer.run_id and step not in self._store._damaged
        ]
        chosen = map(operator.index, self._keep.keep(own))  # an answer that is no steps would let everything go
        kept = {*chosen, *tuple(self._protect), newest, max(known)}
        surplus = [record for record in own if record.step not in kept]
        if surplus:
            pinned = self._store._pins()
            surplus = [record for record in surplus if record.step not in pinned]
        return surplus

    def _forget(self, known: dict[int, StepRecord], survey: Survey, record: StepRecord) -> None:
        """Delete a step, if it still is what it was when its record was read, and if it still may go."""
        step = record.step
        if step in tuple(self._protect) or step in self._store._pins():
            return
        found = self._store._look_at(step, survey.listing)
        if isinstance(found, CommitRecord) and not _same(found, record):
            known[step] = found  # somebody put another one there: judged after the next commit
            return
        if self._ranks_evaluations:
            self._evaluations.refresh({step})
            newer = self._ranked(record)
            if newer.metrics != record.metrics:
                known[step] = newer  # an evaluator was just in time: likewise
                return
        if isinstance(found, CommitRecord):
            self._store._delete_step(step)
        else:
            self._store._damaged.add(step)  # its record is gone or no longer valid
        known.pop(step, None)

    def _drop(self, step: int) -> None:
        """Delete a leftover, if it still is one, and then its mark: without that it might not be known for ours."""
        listing = self._store._look()
        if self._store._look_at(step, listing) in (Standing.UNCOMMITTED, Standing.UNFINISHED):
            self._store._delete_step(step)
            if step in listing.pending:
                self._store._storage.delete(f"{PENDING_PREFIX}{step}")

    def _marks(self, survey: Survey) -> list[_Work]:
        """Marks of steps that are whole, or gone."""
        steps = survey.listing.pending.difference(survey.others)
        return [self._unmark(step) for step in sorted(steps)]

    def _unmark(self, step: int) -> _Work:
        return _Work(step, lambda: self._store._storage.delete(f"{PENDING_PREFIX}{step}"))

    def _leftovers(self, survey: Survey) -> list[_Work]:
        work: list[_Work] = []
        pending = survey.listing.pending
        for step in survey.those(Standing.UNCOMMITTED, Standing.UNFINISHED):
            if step in self._looked_at or step in self._touched_so_far():
                continue  # somebody else's, or not ours to judge: looked at once
            if self._is_ours(step, survey.others[step], step in pending):
                work.append(_Work(step, lambda s=step: self._drop(s)))
            else:
                self._looked_at.add(step)
        for name in self._evaluations.orphans(survey.listing.numbers):
            work.append(_Work(None, lambda n=name: self._store._storage.delete(n)))
        for mark in aside.marks(survey.listing.moving, but_of=self._writer.attempt):
            work.append(_Work(None, lambda m=mark: aside.settle(self._store, m)))
        return work if self._store._storage.local_path is None else work + self._local_leftovers(survey)

    def _local_leftovers(self, survey: Survey) -> list[_Work]:
        local = self._store._storage.local_path
        assert local is not None
        work: list[_Work] = []
        for name in survey.listing.staging:
            if not _STAGING_NAME.fullmatch(name) or name.endswith(f"-{self._writer.attempt}"):
                continue
            session = self._store._session_of(name) or {}  # it is written first: without it half was deleted already
            if session.get("run_id", self._writer.run_id) == self._writer.run_id:
                work.append(_Work(None, lambda n=name: shutil.rmtree(os.path.join(local, n))))
        for name in os.listdir(local):
            if match := _DELETING_NAME.fullmatch(name):
                work.append(_Work(int(match[1]), lambda n=name: self._store._storage.delete_tree(n)))
        for folder in (local, os.path.join(local, PINS), os.path.join(local, EVALS)):
            if not os.path.isdir(folder):
                continue
            for name in os.listdir(folder):
                if name.startswith(TEMPORARY_PREFIX) and not name.startswith(f"{TEMPORARY_PREFIX}{os.getpid()}-"):
                    path = os.path.join(folder, name)
                    work.append(_Work(None, lambda p=path: os.unlink(p)))
        return work

    def _is_ours(self, step: int, standing: Standing, pending: bool) -> bool:
        """Whether a step without a valid commit record is a leftover of this lineage."""
        if standing is Standing.UNFINISHED:  # all but its record had arrived
            return self._store._is_of(step, self._writer.run_id)
        session = self._store._session_of(str(step))
        if session is None:
            return self._store._is_hollow(step, pending)
        if not session and pending:
            return True  # killed while it wrote the first file
        return session.get("run_id") == self._writer.run_id

    def _remove_dead_staging(self) -> None:
        if self._store._storage.local_path is None:
            remove_dead(self._writer.staging_dir)

    def _warn_of(self, error: Exception) -> None:
        text = "Could not clean up in %s; it is tried again after the next commit: %s"
        self._warn("failed", text, self._store.url, shown_error(error))

    def _warn(self, kind: str, text: str, *values: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(text, *values)


def _same(one: StepRecord, other: StepRecord) -> bool:
    return (one.run_id, one.attempt, one.time) == (other.run_id, other.attempt, other.time)
