"""From host values to a committed step: staged locally, published, and committed by one last object."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monsess import clock
from monsess.checkpoint import orbax_io
from monsess.checkpoint.commit import COMMIT, ORBAX_MARKERS, SESSION, CommitRecord
from monsess.checkpoint.leaves import LeafSpec
from monsess.checkpoint.staging import StagingDirectory
from monsess.checkpoint.store import CheckpointStore, is_foreign_name
from monsess.checkpoint.survey import STAGING_PREFIX, Standing
from monsess.checkpoint.table import empties_as_json, pack
from monsess.errors import SaveError, StorageError
from monsess.localfiles import Digest, fsync_tree, pump
from monsess.log import logger

_ORBAX_FOLDER = "orbax"


@dataclasses.dataclass(frozen=True)
class Writer:
    """Who writes: the lineage and when it began, the attempt, and where files are staged for a remote store."""

    run_id: str
    attempt: str
    staging_dir: str | None
    started: float


def publish(
    store: CheckpointStore,
    writer: Writer,
    step: int,
    specs: Sequence[LeafSpec],
    values: Sequence[Any],
    session: dict[str, Any],
    metrics: Mapping[str, float],
    check: Callable[[], None],
) -> CommitRecord:
    """Write a step and commit it.

    Args:
        store: Where to.
        writer: Who writes.
        step: Global step.
        specs: The leaf table.
        values: Host values, one per spec.
        session: What session.json holds besides.
        metrics: What retention may rank the step by; finite.
        check: Called just before the commit; what it raises leaves the step uncommitted.

    Returns:
        The commit record; that of the step already there if a sound one of this run was.

    Raises:
        SaveError: The step number is taken by something that is not ours to replace.
        StorageError: The store refused or failed.
    """
    rows, tree = pack(specs, values)
    content = {
        **session,
        "format": 1,
        "step": step,
        "run_id": writer.run_id,
        "attempt": writer.attempt,
        "leaves": rows,
        "empties": empties_as_json(specs),
    }
    local = store._storage.local_path

    def record(files: dict[str, Digest]) -> CommitRecord:
        return CommitRecord(
            step=step,
            run_id=writer.run_id,
            attempt=writer.attempt,
            time=round(clock.wall(), 3),
            started=writer.started,
            metrics=metrics,
            size=sum(digest.size for digest in files.values()),
            files=files,
        )

    if local is not None:
        folder = os.path.join(local, f"{STAGING_PREFIX}{step}-{writer.attempt}")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            os.makedirs(folder)
            _stage(folder, step, content, tree)
            names = _files(folder)
            hashing = [lambda n=name: _hash(os.path.join(folder, *n.split("/"))) for name in names]
            done = record(dict(zip(names, store._storage.map(hashing), strict=True)))
            with open(os.path.join(folder, COMMIT), "wb") as file:
                file.write(done.encode())
            fsync_tree(folder)
            there = make_room(store, writer, step)
            if there is None:
                check()
                store._storage.rename(os.path.basename(folder), str(step))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return there or done

    with StagingDirectory(writer.staging_dir) as staging:
        folder = os.path.join(staging.path, str(step))
        os.makedirs(folder)
        _stage(folder, step, content, tree)
        there = make_room(store, writer, step)
        if there is not None:
            return there
        store._mark(step)
        # session.json first: it says whose leftover this is if nothing else arrives. Orbax's markers late: a plain
        # Orbax reader takes a step that has them for whole.
        names = _files(folder)
        data = [name for name in names if name != SESSION and name not in ORBAX_MARKERS]
        files: dict[str, Digest] = {}

        def upload(group: Sequence[str]) -> None:
            uploads = [
                lambda n=name: store._storage.upload(f"{step}/{n}", os.path.join(folder, *n.split("/")))
                for name in group
            ]
            files.update(zip(group, store._storage.map(uploads), strict=True))

        upload([SESSION])
        upload(data)
        upload([name for name in ORBAX_MARKERS if name in names])
        if short := _not_arrived(store, step, files):
            upload(short)
            if short := _not_arrived(store, step, files):
                raise StorageError(f"{store.url} does not hold all bytes that were written to {step}: {short}.")
        done = record(files)
        check()
        _commit(store, step, done.encode())
        return done  # the clean-up takes the mark away


def make_room(store: CheckpointStore, writer: Writer, step: int) -> CommitRecord | None:
    """Clear whatever lies under the number of a step that is about to be committed.

    Returns:
        None if the number is free now; the record of a sound step of this run, which is never overwritten.

    Raises:
        SaveError: The step belongs to another run, or to plain Orbax.
        StorageError: It could not be looked at or cleared.
    """
    there = _clear(store, writer, step)
    if there is None and store._storage.is_changing(str(step)):
        raise SaveError(
            f"Step {step} was not saved: {store.url} has not answered yet to an earlier write or deletion under that "
            f"number, which may still take effect. The number can be used again by another process, or once the store "
            "has answered."
        )
    return there


def _clear(store: CheckpointStore, writer: Writer, step: int) -> CommitRecord | None:
    unlisted = False
    try:
        names = set(store._storage.walk(str(step)))
    except FileNotFoundError:
        # Some stores' listings lag behind what was written; they are asked for the record by its name.
        if store._storage.local_path is not None or store._read_commit(step) is None:
            return None
        names, unlisted = set[str](), True
    found = store._look_at(step, store._look())
    if isinstance(found, CommitRecord):
        if found.run_id != writer.run_id:
            raise SaveError(
                f"Step {step} in {store.url} is a committed checkpoint of another run ({found.run_id}); this run "
                f"is {writer.run_id} and never overwrites it. Use another checkpoint_dir."
            )
        if not store._compare(found, {}):
            logger.warning("Step %d in %s is committed already and is not written again.", step, store.url)
            return found
    if unlisted:
        raise SaveError(
            f"Step {step} in {store.url} has a damaged commit record or damaged files, and its files are not listed: "
            "it can neither be moved aside nor written anew. Use another checkpoint_dir, or delete it."
        )
    if found is not Standing.UNCOMMITTED and not (found is Standing.UNFINISHED and store._is_of(step, writer.run_id)):
        target = store.set_aside(step, writer.attempt, "damaged")
        logger.warning("Moved the damaged step %d in %s to %s.", step, store.url, target)
        return None
    markers = [name for name in ORBAX_MARKERS if name in names]
    if markers and SESSION not in names:
        raise SaveError(
            f"Step {step} in {store.url} is a checkpoint that monsess did not write ({markers[0]} without "
            f"{SESSION}); it is left alone. Use another checkpoint_dir, or move {step} away."
        )
    if SESSION not in names and any(map(is_foreign_name, names)):
        target = store.set_aside(step, writer.attempt)
        logger.warning("Moved %d in %s, which holds files of somebody else, to %s.", step, store.url, target)
        return None
    store._delete_step(step)
    return None


def _not_arrived(store: CheckpointStore, step: int, files: Mapping[str, Digest]) -> list[str]:
    """Files of which the store does not hold as many bytes as were written."""
    try:
        sizes = store._storage.walk(str(step))
    except FileNotFoundError:
        sizes = {}
    # Listings of some stores lag behind what was written; they are asked again for each object that is not as it should
    # be, by its name.
    missing = [name for name, digest in files.items() if sizes.get(name, -1) not in (None, digest.size)]
    found = store._storage.map([lambda n=name: _size(store, f"{step}/{n}") for name in missing])
    return [name for name, size in zip(missing, found, strict=True) if size not in (None, files[name].size)]


def _size(store: CheckpointStore, name: str) -> int | None:
    try:
        return store._storage.size(name)
    except FileNotFoundError:
        return -1


def _commit(store: CheckpointStore, step: int, data: bytes) -> None:
    """Write the commit record and read it back: a store may say that it took it, and not have it."""
    name = f"{step}/{COMMIT}"
    for _ in range(2):
        store._storage.write(name, data)
        with contextlib.suppress(FileNotFoundError):
            if store._storage.read(name) == data:
                return
    with contextlib.suppress(StorageError):
        store._storage.delete(name)
    raise StorageError(f"{store.url} took the commit record of step {step} and does not hand it back as written.")


def _stage(folder: str, step: int, content: dict[str, Any], tree: Any) -> None:
    with open(os.path.join(folder, SESSION), "w", encoding="utf-8") as file:
        json.dump(content, file)
    inner = os.path.join(folder, _ORBAX_FOLDER)
    orbax_io.write(inner, step, tree)
    for name in os.listdir(inner):
        os.rename(os.path.join(inner, name), os.path.join(folder, name))
    os.rmdir(inner)


def _files(folder: str) -> list[str]:
    """All files below ``folder``, relative, with ``/``."""
    found = []
    for path, _, names in os.walk(folder):
        relative = os.path.relpath(path, folder).replace(os.sep, "/")
        found += [name if relative == "." else f"{relative}/{name}" for name in names]
    return sorted(found)


def _hash(path: str) -> Digest:
    with open(path, "rb", buffering=0) as reader:
        return pump(reader, None)
