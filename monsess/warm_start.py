"""Starts a fresh state from some leaves of another run's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from monsess.checkpoint import latest_checkpoint, load_checkpoint
from monsess.errors import StateMismatchError
from monsess.log import logger, mask
from monsess.placement import placed_structure
from monsess.reduction import path_name
from monsess.scaffold import Scaffold


def warm_started(state: Any, scaffold: Scaffold) -> Any:
    """Replace the leaves of a fresh state whose paths match the scaffold's patterns by stored ones.

    Args:
        state: What ``init_fn`` returned.
        scaffold: Finalised.

    Returns:
        The state; unchanged if there is nothing to start from.

    Raises:
        StateMismatchError: No checkpoint, no matching leaf, or a matching leaf that is absent there or differs in
            shape or dtype; lists them.
    """
    url = scaffold.warm_start_from
    if url is None:
        return state
    patterns = scaffold.warm_start_paths or ()
    step = latest_checkpoint(url)
    if step is None:
        raise StateMismatchError(f"warm_start_from={mask(url)!r} holds no committed checkpoint.")
    stored = load_checkpoint(url, step)
    paths, structure = jax.tree_util.tree_flatten_with_path(state)
    problems: list[str] = []
    taken = 0
    leaves = []
    for path, leaf in paths:
        name = path_name(path)
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            leaves.append(leaf)
            continue
        taken += 1
        leaves.append(_taken(name, leaf, _at(stored, name.split("/")), problems))
    if not taken:
        names = ", ".join(path_name(path) for path, _ in paths)
        raise StateMismatchError(
            f"No leaf of the state matches warm_start_paths={list(patterns)}. Its leaves: {names}."
        )
    if problems:
        raise StateMismatchError(
            f"warm_start_from={mask(url)!r}, step {step}: "
            + "; ".join(problems)
            + ". Leave these paths out of warm_start_paths, or start from a checkpoint of the same model."
        )
    logger.info("warm start: %d of %d leaves from step %d of %s", taken, len(leaves), step, mask(url))
    return jax.tree_util.tree_unflatten(structure, leaves)


def _taken(name: str, leaf: Any, found: Any, problems: list[str]) -> Any:
    if found is None:
        problems.append(f"{name} is not stored there")
        return leaf
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(found), impl=jax.random.key_impl(leaf))
    wanted, value = placed_structure(leaf), np.asarray(found)
    if (wanted.shape, wanted.dtype) != (value.shape, value.dtype):
        problems.append(f"{name} is {wanted.dtype}{list(wanted.shape)}, stored {value.dtype}{list(value.shape)}")
        return leaf
    return value


def _at(node: Any, parts: list[str]) -> Any:
    for part in parts:
        if isinstance(node, Mapping):
            node = node.get(part)
        elif isinstance(node, (list, tuple)):
            node = node[int(part)] if part.isdigit() and int(part) < len(node) else None
        else:
            return None
    return node
