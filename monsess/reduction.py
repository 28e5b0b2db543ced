"""How a step's outputs become one value over all devices, inside the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from monsess.errors import StepDefinitionError
from monsess.step import Reduce, Reduction

_PLAIN_OUTPUT = "output"  # what an output that is a bare array, in no container, is called


@jax.tree_util.register_pytree_node_class
class Stacked:
    """The outputs that stay one value per local device, with where they belong; a pytree node.

    The places are part of the tree structure, so that each compiled variant of a step carries its own.
    """

    def __init__(self, leaves: list[Any], places: tuple[int, ...], structure: Any) -> None:
        self.leaves = leaves
        self.places = places
        self.structure = structure

    def tree_flatten(self) -> tuple[list[Any], tuple[tuple[int, ...], Any]]:
        """The leaves, and the places as static data."""
        return self.leaves, (self.places, self.structure)

    @classmethod
    def tree_unflatten(cls, static: tuple[tuple[int, ...], Any], leaves: Any) -> Stacked:
        """Undo `tree_flatten`."""
        return cls(list(leaves), *static)


def path_name(path: Any) -> str:
    """``metrics/acc`` for a key path of `jax.tree_util`."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or _PLAIN_OUTPUT


def output_names(outputs: Any) -> list[str]:
    """The names of all leaves of a step's outputs, in flatten order."""
    return [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(outputs)[0]]


def reduce_outputs(outputs: Any, reduce: Reduce, axis_name: str) -> tuple[Any, Stacked | tuple[()], jax.Array]:
    """Reduce one device's outputs over the axis; called while the step is traced.

    Args:
        outputs: Any pytree of arrays and numbers.
        reduce: As in `train_step`.
        axis_name: The step's axis.

    Returns:
        The reduced outputs (all of them if none is to be stacked, else a flat list), the stacked ones or ``()``, and
        an int32 count of the non-finite values in all floating outputs of all devices.

    Raises:
        StepDefinitionError: An integer output without a reduction, a reduction that its dtype does not have, or a
            name in ``reduce`` that is no output.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(outputs)
    names = [path_name(path) for path, _ in paths]
    leaves = [_as_array(name, leaf) for name, (_, leaf) in zip(names, paths, strict=True)]
    how = _reductions(names, leaves, reduce)

    places = tuple(i for i, one in enumerate(how) if one is None)
    reduced = reduce_leaves(leaves, how, axis_name)
    stacked = [leaves[i] for i in places]
    nonfinite = _count_nonfinite(reduced)
    if any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in stacked):
        nonfinite = nonfinite + jax.lax.psum(_count_nonfinite(stacked), axis_name)
    if not stacked:
        return jax.tree_util.tree_unflatten(structure, reduced), (), nonfinite
    return reduced, Stacked(stacked, places, structure), nonfinite


def merge(reduced: Any, stacked: Stacked | tuple[()]) -> Any:
    """The outputs in the structure in which the step returned them."""
    if not isinstance(stacked, Stacked):
        return reduced
    kept = dict(zip(stacked.places, stacked.leaves, strict=True))
    rest = iter(reduced)
    leaves = [kept[i] if i in kept else next(rest) for i in range(stacked.structure.num_leaves)]
    return jax.tree_util.tree_unflatten(stacked.structure, leaves)


def _as_array(name: str, leaf: Any) -> jax.Array:
    try:
        return jnp.asarray(leaf)
    except TypeError:
        raise StepDefinitionError(
            f"Output {name!r} is a {type(leaf).__name__}; a step returns arrays and numbers in any pytree."
        ) from None


def _reductions(names: list[str], leaves: list[jax.Array], reduce: Reduce) -> list[Reduction]:
    named: Mapping[str, Reduction] = reduce if isinstance(reduce, Mapping) else {}
    unknown = sorted(set(named) - set(names))
    if unknown:
        raise StepDefinitionError(f"reduce names {unknown}, but the step's outputs are {names}.")
    if not isinstance(reduce, Mapping):
        how: list[Reduction] = [reduce] * len(names)
    else:
        how = [named.get(name, "mean") for name in names]
    for name, leaf, one in zip(names, leaves, how, strict=True):
        _check_reduction(name, leaf, one, explicit=name in named)
    return how


def _check_reduction(name: str, leaf: jax.Array, how: Reduction, explicit: bool) -> None:
    if how is None:
        return
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        if how in ("max", "min"):
            raise StepDefinitionError(
                f"Output {name!r} is {leaf.dtype}: complex numbers have no {how}; use mean or sum."
            )
    elif not jnp.issubdtype(leaf.dtype, jnp.floating):
        numeric = jnp.issubdtype(leaf.dtype, jnp.integer) or leaf.dtype == jnp.bool_
        if not numeric:
            raise StepDefinitionError(f"Output {name!r} has dtype {leaf.dtype}, which cannot be reduced; use None.")
        if not explicit:
            raise StepDefinitionError(
                f"Output {name!r} is {leaf.dtype}: whether to add it, average it or keep it per device is not clear. "
                f'Name it: reduce={{{name!r}: "sum"}} (or "mean", which gives float32, "max", "min", None).'
            )


def reduce_leaves(leaves: list[jax.Array], how: list[Reduction], axis_name: str) -> list[jax.Array]:
    """Reduce every leaf that has a reduction, all sums in one collective."""
    sums = {i: _summable(leaf, how[i]) for i, leaf in enumerate(leaves) if how[i] in ("mean", "sum")}
    totals = dict(zip(sums, jax.lax.psum(list(sums.values()), axis_name), strict=True)) if sums else {}
    size = jax.lax.axis_size(axis_name)
    reduced = []
    for i, leaf in enumerate(leaves):
        match how[i]:
            case "mean":
                reduced.append(totals[i] / size)
            case "sum":
                reduced.append(totals[i])
            case "max" | "min" as extreme:
                reduced.append(_extreme(leaf, extreme, axis_name))
            case None:
                pass
    return reduced


def _summable(leaf: jax.Array, how: Reduction) -> jax.Array:
    """The values in a type that holds their sum: a float16 sum of 30,000 over four devices is infinite."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf.astype(jnp.float32) if jnp.finfo(leaf.dtype).bits < 32 else leaf
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return leaf
    if how == "mean":
        return leaf.astype(jnp.float32)
    narrow = leaf.dtype == jnp.bool_ or jnp.iinfo(leaf.dtype).bits < 32
    return leaf.astype(jnp.int32) if narrow else leaf


def _extreme(leaf: jax.Array, how: Reduction, axis_name: str) -> jax.Array:
    over_devices = jax.lax.pmax if how == "max" else jax.lax.pmin
    wide = _summable(leaf, how)
    value = over_devices(wide, axis_name)
    if jnp.issubdtype(wide.dtype, jnp.floating):
        # pmax and pmin may drop a NaN that only one device holds.
        is_nan = jax.lax.pmax(jnp.isnan(wide).astype(jnp.int32), axis_name) > 0
        return jnp.where(is_nan, jnp.nan, value)
    return value.astype(leaf.dtype)


def _count_nonfinite(leaves: list[jax.Array]) -> jax.Array:
    counts = [
        jnp.sum(~jnp.isfinite(leaf), dtype=jnp.int32) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    return sum(counts, jnp.zeros((), jnp.int32))
