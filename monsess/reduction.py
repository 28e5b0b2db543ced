"""How a step's outputs become one value over all devices, inside the step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from monsess.errors import StepDefinitionError
from monsess.step import Reduce, Reduction

_PLAIN_OUTPUT = "output"  # what an output that is a bare array, in no container, is called
#: Up to this many values are copied side by side, so that they are summed in one go: between processes each array is a
#: round of messages of its own, even in one collective.
_PACKED_SIZE = 4096


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


class Reduced(NamedTuple):
    """What `reduce_outputs` gives.

    Args:
        reduced: The reduced outputs: all of them if none is to be stacked, else a flat list.
        stacked: The stacked ones, or ``()``.
        nonfinite: int32 count of the non-finite values in all floating outputs of all devices.
        agreed: The sum of the signals, or None.
    """

    reduced: Any
    stacked: Stacked | tuple[()]
    nonfinite: jax.Array
    agreed: jax.Array | None


def reduce_outputs(outputs: Any, reduce: Reduce, axis_name: str, signals: jax.Array | None = None) -> Reduced:
    """Reduce one device's outputs over the axis; called while the step is traced.

    Args:
        outputs: Any pytree of arrays and numbers.
        reduce: As in `train_step`.
        axis_name: The step's axis.
        signals: float32 vector to be summed with them, or None.

    Raises:
        StepDefinitionError: An integer output without a reduction, a reduction that its dtype does not have, or a
            name in ``reduce`` that is no output.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(outputs)
    names = [path_name(path) for path, _ in paths]
    leaves = [_as_array(name, leaf) for name, (_, leaf) in zip(names, paths, strict=True)]
    how = _reductions(names, leaves, reduce)

    places = tuple(i for i, one in enumerate(how) if one is None)
    if signals is None:
        agreed, reduced = None, reduce_leaves(leaves, how, axis_name)
    else:
        agreed, *reduced = reduce_leaves([signals, *leaves], ["sum", *how], axis_name)
    stacked = [leaves[i] for i in places]
    nonfinite = _count_nonfinite(reduced)
    if any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in stacked):
        nonfinite = nonfinite + jax.lax.psum(_count_nonfinite(stacked), axis_name)
    if not stacked:
        return Reduced(jax.tree_util.tree_unflatten(structure, reduced), (), nonfinite, agreed)
    return Reduced(reduced, Stacked(stacked, places, structure), nonfinite, agreed)


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
    """Reduce every leaf that has a reduction, all sums of a dtype in one collective."""
    totals = _totals(
        {i: _summable(leaf, how[i]) for i, leaf in enumerate(leaves) if how[i] in ("mean", "sum")}, axis_name
    )
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


def _totals(leaves: dict[int, jax.Array], axis_name: str) -> dict[int, jax.Array]:
    """The sums over all devices; those of small leaves are packed."""
    packs: dict[Any, list[int]] = {}
    for i, leaf in leaves.items():
        if leaf.size <= _PACKED_SIZE:
            packs.setdefault(leaf.dtype, []).append(i)
    packed = [jnp.concatenate([leaves[i].reshape(-1) for i in pack]) for pack in packs.values()]
    alone = [i for i, leaf in leaves.items() if leaf.size > _PACKED_SIZE]
    sums, whole = jax.lax.psum((packed, [leaves[i] for i in alone]), axis_name)
    totals = dict(zip(alone, whole, strict=True))
    for pack, total in zip(packs.values(), sums, strict=True):
        ends = itertools.accumulate(leaves[i].size for i in pack)
        for i, end in zip(pack, ends, strict=True):
            totals[i] = total[end - leaves[i].size : end].reshape(leaves[i].shape)
    return totals


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
