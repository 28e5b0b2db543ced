"""Small helpers for code that runs on every device at once, inside a step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def per_device_key(key: jax.Array, axis_name: str = "data") -> jax.Array:
    """Give each device its own random stream, so that dropout differs between devices on purpose.

    The key in the state stays the same everywhere; only the derived one differs. Advance the state's key with
    ``jax.random.split`` outside of it.

    Args:
        key: One PRNG key, typed or raw uint32, the same on all devices.
        axis_name: The step's axis.

    Returns:
        A key of the same kind that differs from device to device, over all processes.

    Example:
        >>> import jax, monsess as ms
        >>> keys = jax.vmap(lambda _: jax.random.key_data(ms.per_device_key(jax.random.key(0))), axis_name="data")
        >>> a, b = keys(jax.numpy.zeros(2))
        >>> bool((a != b).any())
        True
    """
    return jax.random.fold_in(key, jax.lax.axis_index(axis_name))


def masked_mean(values: jax.Array, mask: jax.Array, axis_name: str = "data") -> jax.Array:
    """The exact mean of the unmasked rows of all devices, as ``remainder="pad"`` needs it.

    A mean of per-device means is wrong when the devices hold different numbers of real rows; this is the sum of the
    sums over the sum of the counts.

    Args:
        values: ``[per_device_batch, ...]`` floating.
        mask: ``[per_device_batch]`` bool; False rows do not count.
        axis_name: The step's axis.

    Returns:
        ``[...]``: the mean over the rows of all devices, equal on all of them, at least float32; NaN if every row is
        masked.

    Example:
        >>> import jax, jax.numpy as jnp, monsess as ms
        >>> values, mask = jnp.array([[1.0, 2.0], [6.0, 99.0]]), jnp.array([[True, True], [True, False]])
        >>> jax.vmap(ms.masked_mean, axis_name="data")(values, mask).tolist()
        [3.0, 3.0]
    """
    if jnp.finfo(values.dtype).bits < 32:
        values = values.astype(jnp.float32)
    keep = mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
    total = jnp.where(keep, values, 0).sum(axis=0)
    count = mask.sum()
    total, count = jax.lax.psum((total, count), axis_name)
    return total / count


def bit_hash(leaves: list[Any]) -> jax.Array:
    """A uint32 per leaf that changes when any bit of the leaf or the order of its elements does.

    Args:
        leaves: Arrays of any JAX dtype, typed PRNG keys included.

    Returns:
        ``[len(leaves)]`` uint32.
    """
    return jnp.stack([_leaf_hash(leaf) for leaf in leaves]) if leaves else jnp.zeros((0,), jnp.uint32)


def _leaf_hash(leaf: Any) -> jax.Array:
    words = _words(leaf).ravel()
    place = jax.lax.iota(jnp.uint32, words.size)
    # An odd factor per place makes every single-word change visible and swaps too; sums of uint32 wrap exactly.
    return jnp.sum((words + jnp.uint32(0x9E3779B9)) * (place * jnp.uint32(0x85EBCA6B) * jnp.uint32(2) + jnp.uint32(1)))


def _words(leaf: Any) -> jax.Array:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    bits = jnp.finfo(leaf.dtype).bits if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.iinfo(leaf.dtype).bits
    if bits < 8:
        return leaf.astype(jnp.float32 if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.int32).view(jnp.uint32)
    if bits == 64:
        return jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    unsigned = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bits]
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
