"""Starts a fresh state from some leaves of a checkpoint that another run, or plain Orbax, wrote."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from monsess.checkpoint import CheckpointOptions, CheckpointStore, plain_orbax
from monsess.checkpoint.leaves import LeafSpec, converted, describe, is_convertible
from monsess.checkpoint.restore import find_restorable
from monsess.errors import StateMismatchError
from monsess.log import logger, mask
from monsess.placement import placed_structure
from monsess.scaffold import Scaffold
from monsess.storage import Storage

Keys = tuple[str, ...]

_PYTHON_DTYPES = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A checkpoint that leaves are taken from.

    Args:
        where: For messages.
        specs: What is stored, by path.
        read: Gives the values of some paths.
    """

    where: str
    specs: Mapping[Keys, LeafSpec]
    read: Callable[[Sequence[Keys]], Sequence[Any]]


def warm_started(state: Any, scaffold: Scaffold, options: CheckpointOptions) -> Any:
    """Replace the leaves of a fresh state whose paths match the scaffold's patterns by stored ones.

    Args:
        state: What ``init_fn`` returned.
        scaffold: Finalised.
        options: Whether to cast dtypes that differ, and where to download to.

    Returns:
        The state; unchanged if there is nothing to start from.

    Raises:
        StateMismatchError: No checkpoint, a pattern that matches no leaf, or leaves that are absent there or differ in
            shape, dtype or key kind; lists exactly those.
        DamagedCheckpointError: Every step of a monsess directory is damaged.
        StorageError: It could not be looked at or read.
    """
    if scaffold.warm_start_from is None:
        return state
    url = os.fspath(scaffold.warm_start_from)
    leaves, structure = jax.tree_util.tree_flatten(state)
    specs = describe(placed_structure(state))
    chosen = _chosen(specs, scaffold.warm_start_paths or ())
    with _stored(url, scaffold.warm_start_options, [specs[i].keys for i in chosen], options.staging_dir) as stored:
        problems: list[str] = []
        for i in chosen:
            problem = _difference(stored.specs.get(specs[i].keys), specs[i], leaves[i], options.convert)
            if problem is not None:
                problems.append(f"{specs[i].path or 'the state'} {problem}")
        if problems:
            raise StateMismatchError(
                f"warm_start_from={stored.where}: "
                + "; ".join(problems)
                + ". Leave these paths out of warm_start_paths, or start from a checkpoint of the same model. "
                "CheckpointOptions(convert=True) casts dtypes."
            )
        for i, value in zip(chosen, stored.read([specs[i].keys for i in chosen]), strict=True):
            try:
                leaves[i] = _taken(value, specs[i], leaves[i])
            except ValueError as error:
                problems.append(f"{specs[i].path or 'the state'} is {specs[i]}, and {error}")
        if problems:
            raise StateMismatchError(f"warm_start_from={stored.where}: {'; '.join(problems)}.")
        logger.info("warm start: %d of %d leaves from %s", len(chosen), len(leaves), stored.where)
    return jax.tree_util.tree_unflatten(structure, leaves)


def _chosen(specs: Sequence[LeafSpec], patterns: Sequence[str]) -> list[int]:
    idle = [p for p in patterns if not any(fnmatchcase(spec.path, p) for spec in specs)]
    if idle or not patterns:
        names = ", ".join(spec.path or "''" for spec in specs[:40]) + (", ..." if len(specs) > 40 else "")
        raise StateMismatchError(
            f"No leaf of the state matches {', '.join(map(repr, idle)) or 'anything'} of "
            f"warm_start_paths={list(patterns)}. Its leaves: {names}."
        )
    return [i for i, spec in enumerate(specs) if any(fnmatchcase(spec.path, p) for p in patterns)]


def _difference(found: LeafSpec | None, wanted: LeafSpec, leaf: Any, convert: bool) -> str | None:
    """How a stored leaf differs from the one that is wanted; None if it can be taken."""
    if found is None:
        return "is not stored there"
    if (found.kind, found.shape, found.dtype, found.key_impl) == (
        wanted.kind,
        wanted.shape,
        wanted.dtype,
        wanted.key_impl,
    ):
        return None
    if found.shape == () and found.dtype in (_PYTHON_DTYPES.get(type(leaf)), type(leaf).__name__):
        return None  # a Python number here and there
    if convert and is_convertible(found, wanted):
        return None
    return f"is {wanted}, stored {found}"


def _taken(value: Any, wanted: LeafSpec, leaf: Any) -> Any:
    if wanted.kind == "key":
        return jax.random.wrap_key_data(jnp.asarray(value), impl=wanted.key_impl)
    plain = value.item() if isinstance(value, np.ndarray) and value.shape == () else value
    if type(plain) is type(leaf) and getattr(value, "dtype", None) != wanted.dtype:
        return plain  # checked against the dtype that JAX gives it when it is placed
    return converted(value, wanted)


@contextlib.contextmanager
def _stored(
    url: str, options: Mapping[str, Any] | None, wanted: Sequence[Keys], staging_dir: str | None
) -> Iterator[_Stored]:
    storage = Storage(url, options)
    found = plain_orbax.look_for(storage)
    if found is None:
        raise StateMismatchError(f"warm_start_from={storage.shown!r} holds no checkpoint.")
    if found.is_ours:
        yield _ours(url, options, found.folder, staging_dir)
        return
    with plain_orbax.opened(storage, found.folder or "", wanted, staging_dir) as leaves:
        where = f"the Orbax checkpoint {found.folder} in {storage.shown}" if found.folder else storage.shown
        yield _Stored(where, leaves.specs, leaves.read)


def _ours(url: str, options: Mapping[str, Any] | None, folder: str | None, staging_dir: str | None) -> _Stored:
    step = None
    if folder == "":  # the URL names a step
        url, _, name = url.rstrip("/").rpartition("/")
        if not name.isdecimal():
            raise StateMismatchError(
                f"{mask(url)}/{name} is a step that was moved out of the way, and cannot be verified there. Copy it to "
                "a directory of its own, under its number."
            )
        url, step = url or "/", int(name)
    store = CheckpointStore(url, options)
    restored = find_restorable(store, restore_step=step, staging_dir=staging_dir)
    if restored is None:
        raise StateMismatchError(f"warm_start_from={store.url!r} holds no committed checkpoint.")
    values = {spec.keys: value for spec, value in zip(restored.specs, restored.leaves, strict=True)}
    return _Stored(
        f"step {restored.step} of {store.url}",
        {spec.keys: spec for spec in restored.specs},
        lambda keys: [values[one] for one in keys],
    )
