"""A checkpoint directory as a store of steps: what is there, whether it is sound, and what to do with it.

A step whose commit.json is there and not valid, be it torn or empty, is *damaged*: bytes that were once whole. The one
exception is a record that was never whole, because the save was killed while it wrote it. The bytes alone do not tell
the two apart, so the place does. On a local path a step appears by a rename with its record complete, and an object
store takes an object whole or not at all: there such a record is always damage, and on a local path a missing one
beside a session.json is, too. Everywhere else an empty object ``.pending-<step>`` is written before the first object of
a step and deleted after its record was written; a record that is not valid beside such a mark is that of an
*unfinished* step, which is no checkpoint and never was one. So a run that was killed in its very first commit starts
again by itself, and one whose checkpoints are damaged never does.

A damaged step is never cleaned up; it is moved aside when its number is needed. An unfinished one of the same run is a
leftover like any other.

run.json remembers what the commit records of the steps said, so that a directory of a thousand steps is surveyed with
two requests. It is a memory and no proof: whatever is restored, deleted or overwritten is looked at itself before. A
step is remembered before its mark is taken away and forgotten before it is deleted, so one that is remembered and has
files but no valid commit.json is damaged, whatever marks there are.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import os
import re
import threading
from collections.abc import Collection, Mapping
from typing import Any, final

from monsess.checkpoint import aside
from monsess.checkpoint.commit import COMMIT, ITEM, ORBAX_MARKERS, SESSION, CommitRecord, StepRecord, decode
from monsess.checkpoint.evaluations import EVALS, Evaluations
from monsess.checkpoint.survey import DELETING_PREFIX, PENDING_PREFIX, STAGING_PREFIX, Listing, Standing, Survey
from monsess.errors import MonsessError, StorageError
from monsess.localfiles import Digest
from monsess.log import logger, mask
from monsess.storage import Storage

RUN = "run.json"
PINS = "pins"
#: Skipped non-finite saves, as `run.json` remembers them across attempts.
NONFINITE = "nonfinite"
#: What the commit records of the steps said, as `run.json` remembers it.
INDEX = "steps"
#: Attempt and time of the steps that an attempt found damaged, as `run.json` remembers them.
DAMAGED = "damaged"
_STEP_NAME = re.compile(r"0|[1-9][0-9]*")


@final
class CheckpointStore:
    """The checkpoints in one directory: list, verify, delete and pin them, without a session or a device.

    Nothing is read from a cache. A step counts only if its commit record is there and valid; "could not look" is
    always an error, never an empty answer. The object holds no connection and may be used from several threads.

    Args:
        url: A local path or any fsspec URL, taken literally.
        storage_options: Handed to the fsspec filesystem; never shown.

    Example:
        >>> import monsess as ms
        >>> ms.CheckpointStore("memory://docs/empty").steps()
        []
    """

    def __init__(self, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
        self._storage = Storage(url, storage_options)
        #: Steps that were found damaged: they neither count for retention nor are they deleted by it.
        self._damaged: set[int] = set()
        #: Steps that this process found sound.
        self._sound: set[int] = set()
        #: Held by a thread that reads run.json in order to write it.
        self._run_lock = threading.RLock()

    @property
    def url(self) -> str:
        """The directory, with credentials masked."""
        return self._storage.shown

    def __repr__(self) -> str:
        return f"CheckpointStore({self.url!r})"

    def steps(self) -> list[int]:
        """List the committed steps, whose content is not verified.

        Returns:
            Steps in ascending order; empty only if the listing proved it.

        Raises:
            StorageError: The directory could not be listed or read.
        """
        return sorted(self._survey(self._remembered()).committed)

    def verify(self, step: int) -> list[str]:
        """Read every byte of a committed step and compare it with the commit record.

        Args:
            step: Global step.

        Returns:
            One sentence per problem; empty if the step is sound.

        Raises:
            StorageError: The store could not be read, which says nothing about the step.
        """
        try:
            record = decode(self._storage.read(f"{step}/{COMMIT}"), step)
        except FileNotFoundError:
            return [f"{COMMIT} is missing: step {step} is not a committed checkpoint"]
        except ValueError as error:
            return [f"{COMMIT} is not valid: {error}"]
        return self._compare(record, {})

    def delete(self, step: int) -> None:
        """Delete a committed step, its commit record first.

        Args:
            step: Global step.

        Raises:
            MonsessError: The step is pinned, or it is not a committed checkpoint.
            StorageError: It could not be deleted.
        """
        if step in self._pins():
            raise MonsessError(f"Step {step} in {self.url} is pinned and is not deleted. Call unpin({step}) first.")
        self._demand(step)
        self._forget(step)
        self._delete_step(step)

    def pin(self, step: int) -> None:
        """Protect a committed step from deletion, by retention and by `delete`.

        Args:
            step: Global step.

        Raises:
            MonsessError: The step is not a committed checkpoint.
            StorageError: The pin could not be written.
        """
        self._demand(step)
        self._storage.write(f"{PINS}/{step}", b"")

    def unpin(self, step: int) -> None:
        """Take a pin away; without one nothing happens.

        Args:
            step: Global step.

        Raises:
            StorageError: The pin could not be deleted.
        """
        self._storage.delete(f"{PINS}/{step}")

    def metrics(self, step: int) -> dict[str, float]:
        """The values by which a committed step may be ranked: those of its commit, and those noted since.

        Args:
            step: Global step.

        Returns:
            Finite values by name, such as ``"loss"`` or ``"eval/accuracy"``.

        Raises:
            MonsessError: The step is not a committed checkpoint.
            StorageError: The store could not be read.
        """
        record = self._demand(step)
        evaluations = Evaluations(self._storage)
        evaluations.refresh([step])
        return dict(evaluations.applied(record).metrics)

    def note_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note values of a committed step that came after its commit, such as those of an evaluation in another job.

        The checkpoint itself is not touched. A run that ranks its checkpoints by one of them, as `KeepBest` does,
        finds it when it next looks at what to keep.

        Args:
            step: Global step.
            metrics: Values by name; an evaluation's are called ``"eval/<name>"``. Those that are not finite are left
                out.

        Raises:
            ValueError: A name is no text, or a value no number.
            MonsessError: The step is not a committed checkpoint.
            StorageError: They could not be written.
        """
        for name, value in metrics.items():
            real = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not isinstance(name, str) or not name or not real:
                raise ValueError(f"invalid metrics: {name!r}: {value!r}. Expected a text and a number for each value.")
        record = self._demand(step)
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        if finite:
            Evaluations(self._storage).add(record, finite)

    def read_run(self) -> dict[str, Any] | None:
        """Return what run.json holds; None if it is absent or unreadable as JSON.

        Raises:
            StorageError: The store could not be read.
        """
        try:
            data = self._storage.read(RUN)
        except FileNotFoundError:
            return None
        try:
            run = json.loads(data)
        except ValueError:
            run = None
        if not isinstance(run, dict):
            logger.warning("%s in %s is not valid and is written anew; no checkpoint depends on it.", RUN, self.url)
            return None
        return run

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Write run.json; keys that the same run wrote before and that ``run`` lacks are kept.

        A session calls it at its start, so that a store that refuses writes is found out before any training.

        Args:
            run: JSON-able; ``run_id`` names the lineage.

        Raises:
            StorageError: The store could not be read or written.
        """
        with self._run_lock:
            before = self.read_run() or {}
            if before.get("run_id") == run.get("run_id"):
                run = {**before, **run}
            self._storage.write(RUN, json.dumps(dict(run), sort_keys=True).encode())

    def set_aside(self, step: int, attempt: str, name: str = "aside") -> str:
        """Move a step out of the way, to ``<name>-<step>-<attempt>``; no byte of it is lost.

        Args:
            step: Global step.
            attempt: Who does it.
            name: ``"aside"`` or ``"damaged"``.

        Returns:
            Where it went, relative to the directory.

        Raises:
            StorageError: It could not be moved.
        """
        taken = self._list_root()
        target = f"{name}-{step}-{attempt}"
        for again in range(2, 1000):
            if target not in taken:
                break
            target = f"{name}-{step}-{attempt}-{again}"
        if self._storage.local_path is not None:
            self._storage.rename(str(step), target)
        else:
            for mark in aside.marks(taken):
                aside.settle(self, mark)
            aside.move(self, step, target)
        self._damaged.discard(step)
        return target

    def _apart(self) -> CheckpointStore:
        """The same directory through connections of its own: what is stuck in one does not hold up the other."""
        twin = CheckpointStore(self._storage.url, self._storage._options)
        twin._damaged, twin._sound, twin._run_lock = self._damaged, self._sound, self._run_lock
        return twin

    def _demand(self, step: int) -> CommitRecord:
        """The commit record of ``step``; raises unless it is committed now."""
        found = self._look_at(step, self._look())
        if not isinstance(found, CommitRecord):
            raise MonsessError(f"Step {step} in {self.url} is not a committed checkpoint; there are {self.steps()}.")
        return found

    def _look(self) -> Listing:
        """List the directory."""
        found = self._list_root()
        directories = [name for name, entry in found.items() if entry.is_dir]
        return Listing(
            sorted(int(name) for name in directories if _STEP_NAME.fullmatch(name)),
            _pending(found),
            [name for name in directories if name.startswith(STAGING_PREFIX)],
            [name for name in directories if name[:1].isdigit() and not _STEP_NAME.fullmatch(name)],
            aside.marks(found),
            evaluated=EVALS in directories,
        )

    def _look_at(self, step: int, listing: Listing) -> CommitRecord | Standing:
        """Read the commit record of one step."""
        for again in (True, False):
            data = self._read_commit(step)
            if data is None:
                break
            try:
                return decode(data, step)
            except ValueError:
                if step in listing.pending and not self._is_remembered(step, listing):
                    return Standing.UNFINISHED
            if again:  # perhaps it was begun and ended since the listing
                listing.pending.update(_pending(self._list_root()))
        return Standing.UNCOMMITTED if data is None and not self._lost_record(step, listing) else Standing.BROKEN

    def _lost_record(self, step: int, listing: Listing) -> bool:
        """Whether the commit.json of a step, which is not there, once was and was not deleted by monsess."""
        if step in listing.pending:
            return False
        if self._storage.local_path is not None and self._session_of(str(step)) is not None:
            return True  # a step appears there by a rename, with its record, and disappears by one
        if not self._is_remembered(step, listing):
            return False
        return not self._is_hollow(step, pending=True)

    def _is_remembered(self, step: int, listing: Listing) -> bool:
        if listing.remembered is None:
            listing.remembered = self._remembered()
        return step in listing.remembered

    def _survey(self, known: Mapping[int, StepRecord] | None = None) -> Survey:
        """Look at every step; commit records in ``known`` are not read again."""
        listing = self._look()
        known = {step: record for step, record in (known or {}).items() if step not in listing.pending}
        self._add_unlisted(listing, known)
        survey = Survey(listing, {step: known[step] for step in listing.numbers if step in known}, {})
        unread = [step for step in listing.numbers if step not in known]
        looks = self._storage.map([lambda s=s: self._look_at(s, listing) for s in unread])
        for step, found in zip(unread, looks, strict=True):
            if isinstance(found, CommitRecord):
                survey.committed[step] = found
            else:
                survey.others[step] = found
        return survey

    def _add_unlisted(self, listing: Listing, known: Collection[int]) -> None:
        """Add the numbers that are known to be committed, not listed, and there: some stores' listings lag behind."""
        if self._storage.local_path is None:
            unlisted = [step for step in known if step not in listing.numbers]
            found = self._storage.map([lambda s=s: self._read_commit(s) for s in unlisted])
            there = [step for step, data in zip(unlisted, found, strict=True) if data is not None]
            listing.numbers[:] = sorted([*listing.numbers, *there])

    def _remembered(self, run: Mapping[str, Any] | None = None) -> dict[int, StepRecord]:
        """What run.json says of the steps; nothing if it is not there or not readable."""
        run = self.read_run() if run is None else run
        try:
            rows = {} if run is None else dict(run.get(INDEX) or {})
            return {int(name): StepRecord(step=int(name), **fields) for name, fields in rows.items()}
        except (TypeError, ValueError, AttributeError):
            return {}  # no checkpoint depends on it

    def _forget(self, step: int) -> None:
        """Take a step out of run.json's memory, before it is deleted piece by piece."""
        with self._run_lock:
            run = self.read_run() or {}
            rows = {name: run[name] for name in (INDEX, DAMAGED) if isinstance(run.get(name), dict)}
            if any(str(step) in memory for memory in rows.values()):
                others = {name: {k: v for k, v in memory.items() if k != str(step)} for name, memory in rows.items()}
                self.write_run({**run, **others})

    def _remember(self, run_id: str, records: Collection[StepRecord]) -> None:
        """Note down in run.json what the commit records said, and which steps are damaged nevertheless."""
        names = [field.name for field in dataclasses.fields(StepRecord) if field.name != "step"]
        rows = {str(record.step): {name: getattr(record, name) for name in names} for record in records}
        damaged = {str(record.step): _identity(record) for record in records if record.step in self._damaged}
        self.write_run({"run_id": run_id, INDEX: rows, DAMAGED: damaged})

    def _remembered_damage(self, run: Mapping[str, Any]) -> dict[int, Any]:
        """The steps that run.json says to be damaged, and which ones of that number it means."""
        found = run.get(DAMAGED)
        rows = found.items() if isinstance(found, dict) else ()
        return {int(name): identity for name, identity in rows if _STEP_NAME.fullmatch(name)}

    def _note_damage(self, damaged: Mapping[int, Any], survey: Survey) -> None:
        """Take for damaged what an attempt before this one found to be, unless it is another step by now, or mended."""
        for step in set(damaged).intersection(survey.committed).difference(self._sound):
            if damaged[step] == _identity(survey.committed[step]):
                self._damaged.add(step)

    def _list_root(self) -> dict[str, Any]:
        try:
            return self._storage.list()
        except FileNotFoundError:
            return {}

    def _read_commit(self, step: int) -> bytes | None:
        try:
            return self._storage.read(f"{step}/{COMMIT}")
        except FileNotFoundError:
            return None

    def _compare(self, record: CommitRecord, targets: Mapping[str, str]) -> list[str]:
        """Read the files of a step, into the local paths ``targets`` where given, and say what is wrong with them."""

        def check(name: str, expected: Digest) -> str | None:
            try:
                found = self._storage.download(f"{record.step}/{name}", targets.get(name))
            except FileNotFoundError:
                return f"{name} is missing"
            if found.size != expected.size:
                return f"{name} has {found.size} bytes, {expected.size} were committed"
            return None if found == expected else f"{name} does not hold the bytes that were committed"

        found = self._storage.map([lambda n=n, d=d: check(n, d) for n, d in sorted(record.files.items())])
        problems = [problem for problem in found if problem is not None]
        if not problems:
            self._damaged.discard(record.step)
            self._sound.add(record.step)
        return problems

    def _delete_step(self, step: int) -> None:
        if self._storage.local_path is None:
            self._storage.write(f"{PENDING_PREFIX}{step}", b"")  # from here on run.json's memory is not trusted
            # session.json goes last: while any file is left, it says whose leftover this is.
            self._storage.delete_tree(str(step), first=(COMMIT,), last=(SESSION,))
            self._storage.delete(f"{PENDING_PREFIX}{step}")
            return
        name = f"{DELETING_PREFIX}{step}"
        self._storage.delete_tree(name)  # of a deletion that was cut off
        try:
            self._storage.rename(str(step), name)
        except StorageError:
            if str(step) in self._list_root():
                raise
        self._storage.delete_tree(name)

    def _mark(self, step: int) -> None:
        """Say that from here on half a step may be found, where that can be."""
        if self._storage.keeps_halves:
            self._storage.write(f"{PENDING_PREFIX}{step}", b"")

    def _unmark(self, step: int) -> None:
        """Say that a step is whole."""
        if self._storage.keeps_halves:
            self._storage.delete(f"{PENDING_PREFIX}{step}")

    def _pins(self) -> set[int]:
        try:
            return {int(name) for name in self._storage.list(PINS) if _STEP_NAME.fullmatch(name)}
        except FileNotFoundError:
            return set()

    def _is_hollow(self, step: int, pending: bool) -> bool:
        """Whether a step is certainly what a save or a deletion of monsess left of it: directories without a file."""
        try:
            return not self._storage.walk(str(step)) and (pending or ITEM in self._storage.list(str(step)))
        except FileNotFoundError:
            return False

    def _is_of(self, step: int, run_id: str) -> bool:
        """Whether the session.json of a step says that it is of that lineage."""
        return (self._session_of(str(step)) or {}).get("run_id") == run_id

    def _session_of(self, folder: str) -> dict[str, Any] | None:
        """The session.json in ``folder``; None if there is none, ``{}`` if it is not readable as JSON."""
        try:
            session = json.loads(self._storage.read(f"{folder}/{SESSION}"))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return session if isinstance(session, dict) else {}


def _pending(listing: Mapping[str, Any]) -> set[int]:
    numbers = (name.removeprefix(PENDING_PREFIX) for name in listing if name.startswith(PENDING_PREFIX))
    return {int(number) for number in numbers if _STEP_NAME.fullmatch(number)}


def _identity(record: StepRecord) -> list[Any]:
    return [record.run_id, record.attempt, record.time]


def is_foreign_name(name: str) -> bool:
    """Whether monsess never writes a file of that name into a step's directory."""
    return name not in (SESSION, COMMIT, *ORBAX_MARKERS) and not name.startswith(f"{ITEM}/")


def shown_error(error: BaseException) -> str:
    """An error's text without credentials."""
    text = str(error)
    return mask(text if isinstance(error, StorageError) else f"{type(error).__name__}: {text}")
