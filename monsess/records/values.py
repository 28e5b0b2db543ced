"""Scalars of the host or of the device, checked, and those of the device made ready to be fetched in one piece."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

#: What a scalar is once it is on the host.
Number: TypeAlias = int | float


class Scalars:
    """The scalars of one call, those of the device copied: the state that one may come from is donated.

    Args:
        values: From tag to a Python, numpy or jax scalar.

    Raises:
        TypeError: ``values`` is no mapping, or has a tag that is no text.
        ValueError: A value is no real scalar.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        if not isinstance(values, Mapping):
            raise TypeError(f'expected scalars as a dict, such as {{"loss": loss}}; found {type(values).__name__}.')
        self._tags = list(values)
        self._host: dict[str, Number] = {}
        groups: dict[Any, tuple[list[str], list[jax.Array]]] = {}
        for tag, value in values.items():
            if not isinstance(tag, str) or not tag:
                raise TypeError(f"expected a text as the tag of a scalar, found {tag!r}.")
            if isinstance(value, jax.Array):
                leaf = _checked(tag, value)
                tags, leaves = groups.setdefault((leaf.dtype, leaf.sharding), ([], []))
                tags.append(tag)
                leaves.append(leaf)
            else:
                self._host[tag] = _number(tag, value)
        self._device = [(tags, _packed(leaves)) for tags, leaves in groups.values()]

    def __bool__(self) -> bool:
        return bool(self._tags)

    def numbers(self) -> dict[str, Number]:
        """The scalars as numbers, in the order given; waits for the device if one of them was there."""
        found = dict(self._host)
        for tags, packed in self._device:
            values: list[Any] = np.asarray(packed).tolist()
            found.update({tag: _plain(value) for tag, value in zip(tags, values, strict=True)})
        return {tag: found[tag] for tag in self._tags}


@jax.jit
def _stacked(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack(leaves)


def _packed(leaves: list[jax.Array]) -> jax.Array:
    packed = _stacked(leaves)
    packed.copy_to_host_async()
    return packed


def _checked(tag: str, value: jax.Array) -> jax.Array:
    real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    if value.shape != () or not (real or value.dtype == jnp.bool_):
        raise ValueError(
            f"{tag!r} is {value.dtype}{list(value.shape)}: expected one real number. Log a mean or a norm of it, or a "
            "monsess.summary.Histogram."
        )
    return value.addressable_data(0)


def _number(tag: str, value: Any) -> Number:
    if isinstance(value, (np.ndarray, np.generic)) and value.shape == ():
        value = value.item() if value.dtype.kind in "biuf" else float(value)
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise ValueError(f"{tag!r} is {value!r}: expected one real number.")


def _plain(value: Any) -> Number:
    return int(value) if isinstance(value, bool) else value
