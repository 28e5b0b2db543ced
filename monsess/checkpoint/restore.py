"""From a store to a state: the newest step that verifies, and its fit into the live structure."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from monsess.checkpoint import orbax_io
from monsess.checkpoint.commit import COMMIT, SESSION, CommitRecord
from monsess.checkpoint.leaves import LeafTable, converted, describe, is_convertible
from monsess.checkpoint.staging import StagingDirectory
from monsess.checkpoint.store import CheckpointStore
from monsess.checkpoint.survey import Standing
from monsess.checkpoint.table import check_against, nest, unpack_row, unpack_specs
from monsess.errors import DamagedCheckpointError, StateMismatchError, StorageError
from monsess.log import logger

T = TypeVar("T")

_LOOKS = 3
_NAMED = 3  # so many damaged steps are named


@dataclasses.dataclass(frozen=True)
class Restored:
    """A verified checkpoint in host memory.

    Args:
        step: Global step.
        started: When the lineage began, in seconds since the epoch.
        session: The parsed session.json.
        leaves: Numpy arrays (for typed keys their uint32 key data) and Python scalars, in the order of ``specs``.
        specs: What the leaves are, with the ``finite`` flags of the state that was saved.
    """

    step: int
    started: float
    session: dict[str, Any]
    leaves: list[Any]
    specs: LeafTable


def find_restorable(
    store: CheckpointStore, *, strict: bool = False, restore_step: int | None = None, staging_dir: str | None = None
) -> Restored | None:
    """Load the newest step that verifies, or the one asked for.

    Args:
        store: Where to look, uncached.
        strict: A damaged newest step is an error.
        restore_step: This step and no other.
        staging_dir: Local directory for what is downloaded.

    Returns:
        None only after a listing that proved that nothing was ever committed.

    Raises:
        DamagedCheckpointError: There are committed steps and none of those allowed verifies.
        StorageError: The store could not be looked at, or ``restore_step`` is not there.
    """
    return _newest(store, strict, restore_step, lambda record: _load(store, record, staging_dir))


def fit(restored: Restored, template_tree: Any, *, convert: bool = False) -> Any:
    """Put the leaves of a checkpoint into the structure of the live state.

    Args:
        restored: The checkpoint.
        template_tree: The live structure: a pytree of arrays, `jax.ShapeDtypeStruct` and Python scalars.
        convert: Cast dtypes, and Python scalars to arrays and back, where values are at most rounded. Shapes, paths
            and keys always have to agree.

    Returns:
        The template's structure with host leaves: numpy arrays, for typed keys their uint32 key data, Python and
        numpy scalars where the template has them.

    Raises:
        StateMismatchError: Listing exactly the leaves that differ.
        UnstorableLeafError: The template holds something else than a state may hold.
    """
    wanted = describe(template_tree)
    stored = {spec.keys: (spec, leaf) for spec, leaf in zip(restored.specs, restored.leaves, strict=True)}
    live, structure = jax.tree_util.tree_flatten(template_tree)
    problems: list[str] = []
    leaves: list[Any] = []
    for spec, example in zip(wanted, live, strict=True):
        name = spec.path or "the state"
        if spec.keys not in stored:
            problems.append(f"{name}: missing in the checkpoint, the state has {spec}")
            continue
        found, leaf = stored.pop(spec.keys)
        if (found.kind, found.shape, found.dtype, found.key_impl) != (
            spec.kind,
            spec.shape,
            spec.dtype,
            spec.key_impl,
        ):
            if not (convert and is_convertible(found, spec)):
                problems.append(f"{name}: {found} in the checkpoint, the state has {spec}")
                continue
            try:
                leaf = converted(leaf, spec)
            except ValueError as error:
                problems.append(f"{name}: {found} in the checkpoint, the state has {spec}, and {error}")
                continue
        leaves.append(leaf[()] if isinstance(example, np.generic) else leaf)
    for spec, _ in stored.values():
        problems.append(f"{spec.path or 'the state'}: {spec} in the checkpoint, the state has no such leaf")
    if problems:
        raise StateMismatchError(
            f"The checkpoint of step {restored.step} does not fit the state that init_fn describes:\n  "
            + "\n  ".join(problems)
            + "\nRestore with the code that saved it, or start in another directory. CheckpointOptions(convert=True) "
            "casts dtypes, and Python scalars to arrays and back."
        )
    return jax.tree_util.tree_unflatten(structure, leaves)


def latest_checkpoint(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> int | None:
    """Find the newest step whose every byte is what was committed.

    Args:
        url: A local path or any fsspec URL.
        storage_options: Handed to the fsspec filesystem.

    Returns:
        The global step; None only after a listing that proved that nothing was ever committed.

    Raises:
        DamagedCheckpointError: There are committed steps and none verifies.
        StorageError: The store could not be looked at.

    Example:
        >>> import monsess as ms
        >>> ms.latest_checkpoint("memory://docs/empty") is None
        True
    """
    store = CheckpointStore(url, storage_options)
    found = _newest(store, False, None, lambda record: (store._compare(record, {}), record.step))
    if found is None:
        _refuse_a_step(store)
    return found


def load_checkpoint(
    url: str | os.PathLike[str], step: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> Any:
    """Load a verified checkpoint as nested dicts and lists of numpy arrays, without a session and without a device.

    Args:
        url: A local path or any fsspec URL.
        step: Global step; None for the newest that verifies.
        storage_options: Handed to the fsspec filesystem.

    Returns:
        The state: sequences as lists, named tuples, dataclasses and other nodes as dicts by field name, arrays bit
        for bit in their stored dtype, typed keys as their uint32 key data, Python scalars as such.

    Raises:
        DamagedCheckpointError: The step, or every step, is damaged.
        StorageError: The store could not be read, or there is no such checkpoint.

    Example:
        >>> import monsess as ms
        >>> ms.load_checkpoint("memory://docs/empty")
        Traceback (most recent call last):
        ...
        monsess.errors.StorageError: There is no committed checkpoint in memory://docs/empty.
    """
    store = CheckpointStore(url, storage_options)
    restored = find_restorable(store, restore_step=step)
    if restored is None:
        _refuse_a_step(store)
        raise StorageError(f"There is no committed checkpoint in {store.url}.")
    return nest(restored.specs, restored.leaves, restored.specs.empties)


def _newest(
    store: CheckpointStore,
    strict: bool,
    restore_step: int | None,
    load: Callable[[CommitRecord], tuple[list[str], T]],
) -> T | None:
    for _ in range(_LOOKS):
        listing = store._look()
        if store._storage.local_path is None:
            listing.remembered = store._remembered()
            newest = max(listing.numbers, default=-1)
            store._add_unlisted(listing, [step for step in listing.remembered if step > newest])
        vanished = False
        damaged: list[str] = []
        ignored: list[str] = sorted(listing.odd)
        for step in reversed(listing.numbers):
            if restore_step not in (None, step):
                continue
            found = store._look_at(step, listing)
            if isinstance(found, CommitRecord):
                problems, result = load(found)
                if not problems:
                    _name_ignored(store, ignored)
                    return result
                if store._read_commit(step) is None:
                    vanished = True  # deleted while it was read: not damage
                    continue
            elif found is Standing.BROKEN:
                problems = [f"{COMMIT} is missing or not valid"]
            else:
                ignored.insert(0, str(step))
                continue
            store._damaged.add(step)
            text = f"step {step} ({'; '.join(problems[:4])}{'; …' if len(problems) > 4 else ''})"
            damaged.append(text)
            if strict or restore_step is not None:
                break
            logger.warning("Damaged checkpoint in %s: %s. It is left there and an older one is taken.", store.url, text)
        _name_ignored(store, ignored)
        if damaged:
            more = f", and {len(damaged) - _NAMED} more: monsess verify --all {store.url}" if damaged[_NAMED:] else ""
            choose = "choose a sound step with CheckpointOptions(restore_step=...), "
            raise DamagedCheckpointError(
                f"No sound checkpoint could be restored from {store.url}: {', '.join(damaged[:_NAMED])}{more}. Bring "
                f"the directory back from a copy, {choose if strict or restore_step is not None else ''}or start in "
                "another directory."
            )
        if restore_step is not None:
            there = ", ".join(map(str, store.steps())) or "none"
            raise StorageError(
                f"Step {restore_step} is not a committed checkpoint in {store.url}; committed steps: {there}."
            )
        if not vanished:
            return None
    raise StorageError(f"The checkpoints in {store.url} were deleted while they were read. Start again.")


def _refuse_a_step(store: CheckpointStore) -> None:
    """Raise if a step was given in the place of the directory in which it lies."""
    folder, _, name = store.url.rstrip("/").rpartition("/")
    if name.isdecimal() and not {COMMIT, SESSION}.isdisjoint(store._list_root()):
        raise StorageError(f"{store.url} is a step itself: expected {folder}, and the step {name}.")


def _name_ignored(store: CheckpointStore, ignored: Sequence[str]) -> None:
    if ignored:
        logger.warning("Ignored in %s, because they are not committed checkpoints: %s.", store.url, ", ".join(ignored))


def _load(store: CheckpointStore, record: CommitRecord, staging_dir: str | None) -> tuple[list[str], Restored]:
    nothing = Restored(record.step, record.started, {}, [], LeafTable())
    with contextlib.ExitStack() as stack:
        local = store._storage.local_path
        if local is not None:
            folder = os.path.join(local, str(record.step))
            targets: dict[str, str] = {}
        else:
            folder = stack.enter_context(StagingDirectory(staging_dir)).path
            targets = {name: os.path.join(folder, *name.split("/")) for name in record.files}
            for target in targets.values():
                os.makedirs(os.path.dirname(target), exist_ok=True)
        problems = store._compare(record, targets)
        if problems:
            return problems, nothing
        try:
            with open(os.path.join(folder, SESSION), "rb") as file:
                session = json.load(file)
            specs = unpack_specs(session)
            leaves = _read_leaves(folder, session["leaves"])
        except Exception as error:
            raise StorageError(
                f"Step {record.step} in {store.url} holds the bytes that were committed, but they could not be read "
                f"({type(error).__name__}: {error}). It may have been written by a newer version of monsess or Orbax."
            ) from error
    checked = zip(specs, leaves, strict=True)
    problems = [f"leaf {spec.path!r}: {text}" for spec, leaf in checked if (text := check_against(spec, leaf))]
    return problems, Restored(record.step, record.started, session, leaves, specs)


def _read_leaves(folder: str, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    arrays = iter(orbax_io.read(folder, [row["item"] for row in rows if "item" in row]))
    return [next(arrays) if "item" in row else unpack_row(row) for row in rows]
