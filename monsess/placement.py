"""The state on the devices: placed once, viewed on the first one, copied for a checkpoint, compared between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from monsess.across import to_local
from monsess.checkpoint.leaves import LeafSpec
from monsess.errors import ReplicasDifferError, UnstorableLeafError
from monsess.layout import Layout
from monsess.reduction import path_name
from monsess.spmd import bit_hash

#: jax 0.10.2 knows no such element type on its devices (float6) or aborts the process (one bit).
_NO_DEVICE_HOLDS = {"float6_e2m3fn", "float6_e3m2fn", "int1", "uint1"}


def place(state: Any, layout: Layout) -> Any:
    """Put a private copy of a state on all devices of ``layout``, replicated, with strong dtypes.

    The copy keeps the caller's arrays usable when the step donates the state, and the committed placement lets the
    step be compiled once only.

    Args:
        state: A pytree of jax, numpy and Python numbers and typed PRNG keys, of any placement.
        layout: The devices.

    Returns:
        The same pytree of jax arrays.

    Raises:
        UnstorableLeafError: An integer that the dtype JAX would give it cannot hold, or a dtype that no device has.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(state)
    copies = [_private_copy(path_name(path), leaf) for path, leaf in paths]
    return jax.device_put(jax.tree_util.tree_unflatten(structure, copies), replicated(layout))


def replicated(layout: Layout) -> NamedSharding:
    """The sharding of a state on the devices of ``layout``."""
    return NamedSharding(layout.mesh, PartitionSpec())


def on_first_device(tree: Any) -> Any:
    """The first local device's copy of every array of ``tree``; touches no other device and copies nothing."""
    return jax.tree.map(lambda x: x.addressable_data(0), tree)


class Snapshotter:
    """Takes copies of the state that later donated steps leave alone, without waiting for the device.

    Args:
        on_host: Copy to host memory instead, which waits for the step; for devices short of memory.
    """

    def __init__(self, on_host: bool = False) -> None:
        self._on_host = on_host
        self._copy = jax.jit(_copy_leaves)

    def __call__(self, state: Any) -> list[Any]:
        """Return the leaves of ``state``, in flatten order, as private copies."""
        leaves = [leaf.addressable_data(0) for leaf in jax.tree.leaves(state)]
        if self._on_host:
            return [_to_host(leaf) for leaf in leaves]
        return self._copy(leaves)


def _copy_leaves(leaves: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(leaf) for leaf in leaves]


def _to_host(leaf: jax.Array) -> np.ndarray[Any, Any]:
    return np.array(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


class ReplicaCheck:
    """Compares a bit-hash of the state between the devices of all processes; no collective is involved.

    Args:
        process_count: How many processes there are.
        wait_for: Waits for a value of the device.
    """

    def __init__(self, process_count: int, wait_for: Callable[[Any], None]) -> None:
        self._alone = process_count == 1
        self._wait_for = wait_for
        self._compiled: dict[Layout, Callable[[Any], jax.Array]] = {}

    def dispatch(self, state: Any, layout: Layout) -> jax.Array | None:
        """Start hashing on the local devices.

        Args:
            state: The replicated state.
            layout: The devices that it lies on.

        Returns:
            ``[local devices, leaves]`` uint32 on its way, or None with one device in all, where there is nothing to
            compare.
        """
        if self._alone and layout.device_count == 1:
            return None
        if layout not in self._compiled:
            self._compiled[layout] = _hash_on_each_device(layout)
        return self._compiled[layout](jax.tree.leaves(to_local(state, layout)))

    def told(self, hashes: jax.Array | None) -> list[str] | None:
        """What a process tells the others of its devices, JSON-able; waits for the hashes."""
        if hashes is None:
            return None
        self._wait_for(hashes)
        texts = [row.astype("<u4").tobytes().hex() for row in np.asarray(hashes)]
        return texts if self._alone or len(set(texts)) > 1 else texts[:1]

    @staticmethod
    def check(told: list[list[str] | None], names: list[str], step: int) -> None:
        """Raise if some devices' hashes differ.

        Args:
            told: By each process; None by one that does not compare.
            names: Of the leaves.
            step: The global step of the state.

        Raises:
            ReplicasDifferError: Naming the differing leaves.
        """
        texts = [(index, text) for index, of_one in enumerate(told) for text in of_one or []]
        odd = sorted({index for index, text in texts if text != texts[0][1]})
        if not odd:
            return
        rows = np.array([np.frombuffer(bytes.fromhex(text), "<u4") for _, text in texts])
        differing = [name for name, column in zip(names, rows.T, strict=True) if (column != column[0]).any()]
        shown = ", ".join(differing[:8]) + (f" and {len(differing) - 8} more" if len(differing) > 8 else "")
        who = f"{len(rows)} local devices"
        if len(told) > 1:
            listed = ", ".join(map(str, odd[:8])) + (" and others" if len(odd) > 8 else "")
            unlike = f"process {listed} unlike the first device of process {texts[0][0]}"
            who = f"devices of the {len(told)} processes ({unlike})"
        raise ReplicasDifferError(
            f"After step {step} the {who} hold different values in: {shown}. Most often the gradients were not "
            'averaged: add grads = jax.lax.pmean(grads, "data") to the step. A key that differs on purpose is made '
            "inside the step by monsess.per_device_key, and not stored. check_replicas=False turns this check off."
        )


def first_device_hash(state: Any) -> np.ndarray[Any, Any]:
    """A bit-hash of every leaf as it lies on the first local device, uint32 ``[leaves]``; waits for it."""
    return np.asarray(jax.jit(bit_hash)([leaf.addressable_data(0) for leaf in jax.tree.leaves(state)]))


def _hash_on_each_device(layout: Layout) -> Callable[[Any], jax.Array]:
    per_device = jax.shard_map(
        lambda leaves: bit_hash(leaves)[None],
        mesh=layout.mesh,
        in_specs=(PartitionSpec(),),
        out_specs=PartitionSpec(layout.axis_name),
        check_vma=False,
    )
    return jax.jit(per_device)


def _private_copy(name: str, leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jnp.copy(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        return jnp.asarray(jnp.copy(leaf), dtype=leaf.dtype)
    array, target = np.array(leaf), _dtype_on_device(name, leaf)
    if target == array.dtype:
        return array
    narrowed = array.astype(target)
    if np.issubdtype(array.dtype, np.integer) and not np.array_equal(narrowed.astype(array.dtype), array):
        raise UnstorableLeafError(
            f"State leaf {name!r} holds {array.dtype} values that {target} cannot hold, and JAX's 64-bit types are "
            'off. Store it as an array that fits, or switch them on: jax.config.update("jax_enable_x64", True).'
        )
    return narrowed


def placed_structure(state: Any) -> Any:
    """What `place` would make of a state, as `jax.ShapeDtypeStruct` leaves, without placing it.

    Args:
        state: A pytree of arrays, numbers and `jax.ShapeDtypeStruct`.
    """
    return jax.tree_util.tree_map_with_path(_placed_leaf, state)


def _placed_leaf(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.ShapeDtypeStruct(np.shape(leaf), _dtype_on_device(path_name(path), leaf))


def _dtype_on_device(name: str, leaf: Any) -> np.dtype[Any]:
    dtype = np.asarray(leaf).dtype
    if dtype.kind == "O":
        raise UnstorableLeafError(
            f"State leaf {name!r} is {str(leaf)[:60]}, which no array can hold. Leave it out of the state."
        )
    if dtype.name in _NO_DEVICE_HOLDS:
        raise UnstorableLeafError(
            f"State leaf {name!r} is of dtype {dtype}, which JAX names but puts on no device. Store it as int8 or "
            "float8 and cast it where it is used."
        )
    return jax.dtypes.canonicalize_dtype(dtype)


def with_typed_keys(state: Any, specs: Sequence[LeafSpec]) -> Any:
    """Make typed PRNG keys of the uint32 key data that a checkpoint holds for them.

    Args:
        state: Host leaves.
        specs: What the leaves are, in flatten order.
    """
    leaves, structure = jax.tree.flatten(state)
    typed = [
        jax.random.wrap_key_data(jnp.asarray(leaf), impl=spec.key_impl) if spec.kind == "key" else leaf
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
    return jax.tree.unflatten(structure, typed)
