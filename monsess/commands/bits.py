"""How two leaves differ, to the last bit."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np

from monsess.checkpoint.leaves import is_inexact

_PART = 1 << 20
#: Their bits do not count up with their values: no sign, or several values in one byte.
_NOT_IN_ORDER = frozenset({"float8_e8m0fnu", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"})


@dataclasses.dataclass
class Difference:
    """What differs in the values of two leaves of the same kind, shape and dtype.

    Args:
        differing: How many elements have different bits.
        elements: How many there are.
        max_abs: Largest absolute difference of values; None where there is none to speak of (NaN, bool).
        max_ulp: Largest difference in units of the last place; None but for floating dtypes.
        nan: How many elements are NaN on one side only.
    """

    differing: int
    elements: int
    max_abs: float | int | None = None
    max_ulp: int | None = None
    nan: int = 0


def difference(one: Any, other: Any) -> Difference | None:
    """Compare two host values of the same kind, shape and dtype; None if every bit is the same."""
    if not isinstance(one, np.ndarray):
        if _python_bits(one) == _python_bits(other):
            return None
        one, other = (np.asarray(v, object) if type(v) is int else np.asarray(v) for v in (one, other))
        if one.dtype == object:  # of any size
            return Difference(1, 1, abs(one.item() - other.item()))
    found = Difference(0, one.size)
    one, other = np.ascontiguousarray(one).reshape(-1), np.ascontiguousarray(other).reshape(-1)
    for start in range(0, one.size, _PART):  # what is computed of them takes several times their memory
        _add(found, one[start : start + _PART], other[start : start + _PART])
    return found if found.differing else None


def _python_bits(value: Any) -> Any:
    """Something that is equal for the same bits only."""
    if isinstance(value, complex):
        return struct.pack("<2d", value.real, value.imag)
    return struct.pack("<d", value) if isinstance(value, float) else value


def _add(found: Difference, one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> None:
    width = one.dtype.itemsize
    unequal = (one.view(np.uint8).reshape(-1, width) != other.view(np.uint8).reshape(-1, width)).any(axis=1)
    count = int(unequal.sum())
    if not count:
        return
    found.differing += count
    one, other = one[unequal], other[unequal]
    if "complex" in one.dtype.name:
        found.nan += int((np.isnan(one) != np.isnan(other)).sum())
        found.max_abs = _larger(found.max_abs, _max_abs(one.astype(np.complex128), other.astype(np.complex128)))
    elif is_inexact(one.dtype):
        nan_one, nan_other = np.isnan(one), np.isnan(other)
        found.nan += int((nan_one != nan_other).sum())
        numbers = ~(nan_one | nan_other)
        one, other = one[numbers], other[numbers]
        found.max_abs = _larger(found.max_abs, _max_abs(one.astype(np.float64), other.astype(np.float64)))
        found.max_ulp = _larger(found.max_ulp, _max_ulp(one, other))
    elif one.dtype.kind != "b":
        wide = np.uint64 if one.dtype.kind == "u" or "uint" in one.dtype.name else np.int64
        one, other = one.astype(wide), other.astype(wide)
        # The difference of two int64 fits uint64, into which it wraps.
        gap = np.maximum(one, other).view(np.uint64) - np.minimum(one, other).view(np.uint64)
        found.max_abs = _larger(found.max_abs, int(gap.max()))


def _max_abs(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float | None:
    with np.errstate(all="ignore"):
        gaps = np.abs(one - other)
    gaps = gaps[~np.isnan(gaps)]  # the same infinity, or NaN, on both sides
    return float(gaps.max()) if gaps.size else None


def _max_ulp(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> int | None:
    if not one.size or one.dtype.itemsize not in (1, 2, 4, 8) or one.dtype.name in _NOT_IN_ORDER:
        return None
    first, second = _rank(one), _rank(other)
    return int((np.maximum(first, second) - np.minimum(first, second)).max())


def _rank(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Whole numbers in which neighbouring floats differ by 1, with 0.0 and −0.0 the same."""
    bits = values.view(np.dtype(f"u{values.dtype.itemsize}").newbyteorder(values.dtype.byteorder)).astype(np.uint64)
    sign = np.uint64(1 << (8 * values.dtype.itemsize - 1))
    size = bits & (sign - np.uint64(1))
    return np.where(bits & sign, sign - size, sign + size)


def _larger(one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else max(one, other)
