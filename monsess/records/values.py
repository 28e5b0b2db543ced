"""What one call logs: checked, and what of it is on the device made ready to be fetched in one piece."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from monsess.summary import Histogram, Image, Text

#: What a scalar is once it is on the host.
Number: TypeAlias = int | float


class Logged:
    """The values of one call; those of the device are copied, for the state that one may come from is donated.

    Args:
        values: From tag to a Python, numpy or jax scalar, or to a histogram, image or text of `monsess.summary`.

    Raises:
        TypeError: ``values`` is no mapping, or has a tag that is no text.
        ValueError: A value is no real scalar.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        if not isinstance(values, Mapping):
            raise TypeError(f'expected scalars as a dict, such as {{"loss": loss}}; found {type(values).__name__}.')
        self._values: dict[str, Any] = {}  # those of the device are in the packages
        self._tags = list(values)
        groups: dict[Any, tuple[list[str], list[jax.Array]]] = {}
        for tag, value in values.items():
            if not isinstance(tag, str) or not tag:
                raise TypeError(f"expected a text as the tag of a value, found {tag!r}.")
            array = _array(tag, value)
            if array is None:
                self._values[tag] = value if isinstance(value, (Histogram, Image, Text)) else _number(tag, value)
                continue
            self._values[tag] = type(value)
            tags, arrays = groups.setdefault(array.sharding, ([], []))
            tags.append(tag)
            arrays.append(array)
        self._packages = [_Package(tags, arrays) for tags, arrays in groups.values()]

    def __bool__(self) -> bool:
        return bool(self._values)

    @property
    def bytes(self) -> int:
        """About how much memory they take until they are written."""
        large = [v.table if isinstance(v, Histogram) else v.pixels for v in self._values.values() if _is_large(v)]
        return sum(package.bytes for package in self._packages) + sum(one.nbytes for one in large)

    def on_host(self) -> tuple[dict[str, Number], dict[str, Any]]:
        """The scalars as numbers, and the rest, in the order given; waits for the device if something was there."""
        arrays = {tag: array for package in self._packages for tag, array in package.unpacked()}
        scalars: dict[str, Number] = {}
        rest: dict[str, Any] = {}
        for tag in self._tags:
            value = self._values[tag]
            if tag in arrays and value in (Histogram, Image):
                rest[tag] = value(arrays[tag])
            elif tag in arrays:
                scalars[tag] = _plain(arrays[tag].item())
            elif isinstance(value, (Histogram, Image, Text)):
                rest[tag] = value
            else:
                scalars[tag] = value
        return scalars, rest


class _Package:
    """Arrays of one device in one, so that they are fetched at once."""

    def __init__(self, tags: list[str], arrays: list[jax.Array]) -> None:
        self._tags = tags
        self._likes = [(array.shape, _carried(array.dtype)) for array in arrays]
        self._packed = _joined(arrays)
        self._packed.copy_to_host_async()

    @property
    def bytes(self) -> int:
        return self._packed.nbytes

    def unpacked(self) -> list[tuple[str, np.ndarray]]:
        data = np.asarray(self._packed).tobytes()
        found, at = [], 0
        for tag, (shape, dtype) in zip(self._tags, self._likes, strict=True):
            count = math.prod(shape)
            found.append((tag, np.frombuffer(data, dtype, count, at).reshape(shape)))
            at += count * dtype.itemsize
        return found


@jax.jit
def _joined(arrays: list[jax.Array]) -> jax.Array:
    wide = [array.astype(_carried(array.dtype)) for array in arrays]
    return jnp.concatenate([jnp.ravel(jax.lax.bitcast_convert_type(array, jnp.uint8)) for array in wide])


def _carried(dtype: np.dtype) -> np.dtype:
    """As what values of that type are brought to the host: of whole bytes."""
    if dtype == jnp.bool_:
        return np.dtype(np.uint8)
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float32) if jnp.finfo(dtype).bits < 8 else dtype
    return np.dtype(np.int8) if jnp.iinfo(dtype).bits < 8 else dtype


def _is_large(value: Any) -> bool:
    return isinstance(value, (Histogram, Image))


def _array(tag: str, value: Any) -> jax.Array | None:
    """The array of the device that ``value`` is or holds, on one device; None if it is of the host."""
    if isinstance(value, Histogram):
        array = value.table
    elif isinstance(value, Image):
        array = value.pixels
    else:
        array = value
    if not isinstance(array, jax.Array):
        return None
    real = jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)
    if array is value and (array.shape != () or not (real or array.dtype == jnp.bool_)):
        raise ValueError(
            f"{tag!r} is {array.dtype}{list(array.shape)}: expected one real number. Log a mean or a norm of it, or "
            "call monsess.summary.histogram."
        )
    return array.addressable_data(0)


def _number(tag: str, value: Any) -> Number:
    if isinstance(value, (np.ndarray, np.generic)) and value.shape == ():
        value = value.item() if value.dtype.kind in "biu" else float(value)
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise ValueError(f"{tag!r} is {value!r}: expected one real number.")


def _plain(value: Any) -> Number:
    return int(value) if isinstance(value, bool) else value
