"""After a commit: leftovers of dead attempts and steps that the policy lets go. Never an error, never in a hurry."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from monsess.checkpoint.commit import CommitRecord, StepRecord
from monsess.checkpoint.publish import Writer
from monsess.checkpoint.retention import Retention
from monsess.checkpoint.staging import remove_dead
from monsess.checkpoint.store import DELETING_PREFIX, PENDING_PREFIX, CheckpointStore, Standing, Survey, shown_error
from monsess.localfiles import TEMPORARY_PREFIX
from monsess.log import logger

Work = Callable[[], None]

_SLOW_SECS = 5.0
_ALWAYS = 1  # things done after each commit however much hurry there is, so that no more is added than taken away


class Upkeep:
    """Deletes what is no longer wanted, one thing at a time.

    Args:
        store: Where.
        writer: Who cleans up: leftovers of other lineages are not his.
        keep: Which steps stay.
        protect: Steps that stay whatever ``keep`` says; read at each round.
    """

    def __init__(self, store: CheckpointStore, writer: Writer, keep: Retention, protect: Collection[int]) -> None:
        self._store = store
        self._writer = writer
        self._keep = keep
        self._protect = protect
        self._known: dict[int, StepRecord] | None = None  # until the first commit: what run.json remembers
        self._looked_at: set[int] = set()
        self._warned: set[str] = set()

    def after(self, record: CommitRecord, hurry: Callable[[], bool]) -> None:
        """Clean up after a commit.

        Args:
            record: What was just committed.
            hurry: True when something more urgent waits; what is left is done after a later commit.
        """
        try:
            remembered = self._store._remembered() if self._known is None else self._known
            survey = self._store._survey({**remembered, record.step: record})
            known = self._known = {**survey.committed, record.step: record}
            surplus = self._surplus(known, record)
            going = {one.step for one in surplus}
            # Forgotten before they are deleted, so that a remembered step without a commit.json is damage.
            self._store._remember(self._writer.run_id, [one for step, one in known.items() if step not in going])
            deletions = [lambda r=one: self._forget(known, survey, r) for one in surplus]
            self._tidy(deletions, self._leftovers(survey), hurry)
        except Exception as error:  # deletion never stops training
            self._warn(
                "failed",
                "Could not clean up in %s; it is tried again after the next commit: %s",
                self._store.url,
                shown_error(error),
            )

    def _tidy(self, deletions: Sequence[Work], leftovers: Sequence[Work], hurry: Callable[[], bool]) -> None:
        for done, work in enumerate([*deletions[:1], *leftovers, *deletions[1:], self._remove_dead_staging], start=1):
            begun = time.monotonic()
            work()
            if time.monotonic() - begun > _SLOW_SECS:
                self._warn("slow", "Deleting old checkpoints in %s is slow.", self._store.url)
            if done > _ALWAYS and hurry():
                return

    def _surplus(self, known: Mapping[int, StepRecord], newest: StepRecord) -> list[StepRecord]:
        """The steps of this lineage that the policy lets go."""
        own = [
            record
            for step, record in sorted(known.items())
            if record.run_id == self._writer.run_id and step not in self._store._damaged
        ]
        protected = tuple(self._protect)  # another thread may change it
        kept = {*self._keep.keep(own), *protected, newest.step, max(known)}
        surplus = [record for record in own if record.step not in kept]
        if surplus:
            pinned = self._store._pins()
            surplus = [record for record in surplus if record.step not in pinned]
        return surplus

    def _forget(self, known: dict[int, StepRecord], survey: Survey, record: StepRecord) -> None:
        """Delete a step, if it still is what it was when its record was read."""
        step = record.step
        found = self._store._look_at(step, survey.listing)
        if isinstance(found, CommitRecord) and not _same(found, record):
            known[step] = found  # somebody put another one there: judged after the next commit
            return
        if isinstance(found, CommitRecord):
            self._store._delete_step(step)
        else:
            self._store._damaged.add(step)  # its record is gone or no longer valid
        known.pop(step, None)

    def _leftovers(self, survey: Survey) -> list[Work]:
        work: list[Work] = []
        pending = survey.listing.pending
        for step in survey.those(Standing.UNCOMMITTED):
            if step in self._looked_at:
                continue  # somebody else's, or not ours to judge: looked at once
            if self._is_ours(step, step in pending):
                work.append(lambda s=step: self._store._delete_step(s))
            else:
                self._looked_at.add(step)
        for step in pending.difference(survey.those(Standing.UNFINISHED), self._looked_at):
            work.append(lambda s=step: self._store._storage.delete(f"{PENDING_PREFIX}{s}"))
        local = self._store._storage.local_path
        if local is None:
            return work
        for name in survey.listing.staging:
            session = self._store._session_of(name) or {}  # it is written first: without it half was deleted already
            if session.get("run_id", self._writer.run_id) == self._writer.run_id:
                work.append(lambda n=name: shutil.rmtree(os.path.join(local, n)))
        for name in os.listdir(local):
            if name.startswith(DELETING_PREFIX):
                work.append(lambda n=name: self._store._storage.delete_tree(n))
            if name.startswith(f"{TEMPORARY_PREFIX}") and not name.startswith(f"{TEMPORARY_PREFIX}{os.getpid()}-"):
                path = os.path.join(local, name)
                work.append(lambda p=path: os.unlink(p))
        return work

    def _is_ours(self, step: int, pending: bool) -> bool:
        """Whether an uncommitted step is a leftover of this lineage."""
        session = self._store._session_of(str(step))
        if session is None:
            return self._store._is_hollow(step, pending)
        if not session and pending:
            return True  # killed while it wrote the first file
        return session.get("run_id") == self._writer.run_id

    def _remove_dead_staging(self) -> None:
        if self._store._storage.local_path is None:
            remove_dead(self._writer.staging_dir)

    def _warn(self, kind: str, text: str, *values: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(text, *values)


def _same(one: StepRecord, other: StepRecord) -> bool:
    return (one.run_id, one.attempt, one.time) == (other.run_id, other.attempt, other.time)
