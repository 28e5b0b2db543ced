"""What the hooks that fetch have in common: checking fetches, bringing values to the host, showing them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def flat_fetches(argument: str, fetches: Any) -> list[str | Any]:
    """Return the leaves of ``fetches`` after checking that each one can be fetched.

    Args:
        argument: The name of the argument, for the message.
        fetches: A pytree of output names and callables.

    Raises:
        ValueError: There is no leaf, or one is neither a name nor a callable.
    """
    leaves = jax.tree_util.tree_leaves(fetches, is_leaf=callable)
    if not leaves:
        raise ValueError(f"invalid {argument}={fetches!r}: expected at least one output name or callable.")
    for leaf in leaves:
        if not (callable(leaf) or (isinstance(leaf, str) and leaf)):
            raise ValueError(
                f"invalid {argument}: {leaf!r} is a {type(leaf).__name__}. Expected the name of an output of the step, "
                'such as "loss" or "metrics/acc", or a callable f(state, outputs).'
            )
    return leaves


def fetch_label(fetch: Any) -> str:
    """How messages call one fetch: its name, or that of the callable."""
    return fetch if isinstance(fetch, str) else getattr(fetch, "__qualname__", None) or repr(fetch)


def to_host(values: Any) -> Any:
    """Return a pytree of device values as numpy arrays; typed PRNG keys have no numpy form and stay as they are.

    Waits for the device.
    """
    return jax.tree_util.tree_map(_leaf_to_host, values)


def _leaf_to_host(leaf: Any) -> Any:
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended):
        return leaf
    return np.asarray(leaf)


def show(value: Any) -> str:
    """Return a host value as text: scalars with six digits, arrays by numpy, containers by their parts.

    Example:
        >>> show({"loss": np.float32(0.1234567), "count": np.int64(3)})
        '{loss: 0.123457, count: 3}'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {show(part)}" for key, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(show(part) for part in value) + "]"
    if isinstance(value, (np.generic, np.ndarray)):
        if value.ndim > 0:
            return np.array2string(np.asarray(value), precision=6, suppress_small=True)
        value = value.item()
    return f"{value:.6g}" if isinstance(value, (float, complex)) else str(value)
