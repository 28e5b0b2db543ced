"""Reading a committed step for a person: its record, its session.json, and its leaves one at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

from monsess.checkpoint.commit import COMMIT, SESSION, CommitRecord
from monsess.checkpoint.store import CheckpointStore
from monsess.checkpoint.survey import Standing
from monsess.commands.options import nothing_there
from monsess.errors import DamagedCheckpointError, MonsessError, StorageError
from monsess.localfiles import Digest

_NAMED = 10  # so many steps are named where one is not there


def commit_of(store: CheckpointStore, step: int) -> CommitRecord:
    """The commit record of ``step``.

    Raises:
        MonsessError: It is not committed.
        DamagedCheckpointError: Its record is not valid.
        StorageError: It could not be read.
    """
    listing = store._look()
    found = store._look_at(step, listing)
    if isinstance(found, CommitRecord):
        return found
    if found is Standing.BROKEN:
        problems = store.verify(step) or [f"{COMMIT} was not valid"]
        raise DamagedCheckpointError(f"Step {step} in {store.url} is damaged: {problems[0].partition(': step ')[0]}.")
    there = store.steps()
    if not there:
        raise MonsessError(nothing_there(store))
    valid: list[int] = []
    while there and len(valid) < _NAMED:
        other = there.pop()
        if isinstance(store._look_at(other, listing), CommitRecord):  # what run.json remembers is no proof
            valid.insert(0, other)
    names = ", ".join(map(str, valid)) or "none"
    more = f" and {len(there)} older ones" if there else ""
    raise MonsessError(f"Step {step} in {store.url} is not a committed checkpoint; committed: {names}{more}.")


def session_of(store: CheckpointStore, record: CommitRecord) -> dict[str, Any]:
    """The session.json of a step, if it holds the bytes that were committed.

    Raises:
        DamagedCheckpointError: It does not.
        StorageError: It could not be read.
    """
    try:
        data = store._storage.read(f"{record.step}/{SESSION}")
    except FileNotFoundError:
        raise DamagedCheckpointError(f"Step {record.step} in {store.url} is damaged: {SESSION} is missing.") from None
    if Digest(len(data), hashlib.sha256(data).hexdigest()) != record.files[SESSION]:
        raise DamagedCheckpointError(
            f"Step {record.step} in {store.url} is damaged: {SESSION} does not hold the bytes that were committed."
        )
    return _parsed(store, record, data)


class OpenStep:
    """A step whose every byte was verified.

    Args:
        record: Its commit record.
        session: Its session.json.
        folder: Local folder that holds its files.
    """

    def __init__(self, record: CommitRecord, session: dict[str, Any], folder: str) -> None:
        from monsess.checkpoint.table import unpack_specs

        self.record = record
        self.specs = unpack_specs(session)
        self._rows = {tuple(row["keys"]): row for row in session["leaves"]}
        self._folder = folder

    def leaf(self, keys: tuple[str, ...]) -> Any:
        """The value of one leaf: a numpy array (for typed keys their key data) or a Python scalar."""
        from monsess.checkpoint.restore import _read_leaves

        return _read_leaves(self._folder, [self._rows[keys]])[0]


@contextlib.contextmanager
def opened(store: CheckpointStore, step: int) -> Iterator[OpenStep]:
    """Verify a step and give its leaves; files of a remote store are downloaded for as long as the block takes.

    Raises:
        MonsessError: It is not committed.
        DamagedCheckpointError: It is damaged.
        StorageError: It could not be read.
    """
    from monsess.checkpoint.staging import StagingDirectory

    record = commit_of(store, step)
    with contextlib.ExitStack() as stack:
        local = store._storage.local_path
        targets: dict[str, str] = {}
        if local is not None:
            folder = os.path.join(local, str(step))
        else:
            folder = stack.enter_context(StagingDirectory(None)).path
            targets = {name: os.path.join(folder, *name.split("/")) for name in record.files}
            for target in targets.values():
                os.makedirs(os.path.dirname(target), exist_ok=True)
        problems = store._compare(record, targets)
        if problems:
            raise DamagedCheckpointError(f"Step {step} in {store.url} is damaged: {'; '.join(problems)}.")
        with open(os.path.join(folder, SESSION), "rb") as file:
            session = _parsed(store, record, file.read())
        yield OpenStep(record, session, folder)


def _parsed(store: CheckpointStore, record: CommitRecord, data: bytes) -> dict[str, Any]:
    try:
        session = json.loads(data)
        session["leaves"][:0]
        return session
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"Step {record.step} in {store.url} holds the bytes that were committed, but they could not be read "
            f"({type(error).__name__}: {error}). It may have been written by a newer version of monsess."
        ) from error
