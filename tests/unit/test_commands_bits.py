"""`monsess diff`: how much two leaves differ."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from monsess.checkpoint.leaves import _ML_DTYPES
from monsess.commands.bits import Difference, difference

DTYPES = [
    *(np.dtype(name) for name in ("bool", "i1", "i8", "u1", "u8", "f2", "f4", "f8", "c8", "c16", ">f4")),
    *sorted(_ML_DTYPES, key=str),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype(dtype):
    one = np.array([1, 1, 1, 1]).astype(dtype).reshape(2, 2)
    other = one.copy()
    assert difference(one, other) is None
    other.view(np.uint8)[0, 0] ^= 1
    found = difference(one, other)
    assert found is not None
    assert (found.differing, found.elements) == (1, 4)


def test_units_in_the_last_place():
    one = np.array([1.0, -1.0, 5e-324, 3.0])
    assert difference(one, np.nextafter(one, math.inf)) == Difference(4, 4, 2.0**-51, 1)
    assert difference(np.array([5e-324]), np.array([-5e-324])) == Difference(1, 1, 1e-323, 2)
    assert difference(np.array([0.0]), np.array([-0.0])) == Difference(1, 1, 0.0, 0)
    bf16 = np.array([1.0, 2.0]).astype(ml_dtypes.bfloat16)
    found = difference(bf16, (bf16.view(np.uint16) + np.uint16(3)).view(ml_dtypes.bfloat16))
    assert found is not None
    assert found.max_ulp == 3


def test_nan_and_infinity():
    quiet = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert difference(quiet[:1], quiet[1:]) == Difference(1, 1, None, None, 0)
    found = difference(np.array([np.nan, np.inf, 1.0]), np.array([1.0, np.inf, -np.inf]))
    assert found is not None
    assert (found.differing, found.nan, found.max_abs) == (2, 1, math.inf)


def test_whole_numbers_do_not_wrap():
    assert difference(np.array([2**63 + 5], np.uint64), np.array([0], np.uint64)) == Difference(1, 1, 2**63 + 5)
    assert difference(np.array([-(2**63)]), np.array([2**63 - 1])) == Difference(1, 1, 2**64 - 1)


def test_python_scalars():
    assert difference(10**50, 1) == Difference(1, 1, 10**50 - 1)
    assert difference(1.0, 1.5) == Difference(1, 1, 0.5, 2**51)
    assert difference(math.nan, math.nan) is None
    assert difference(0.0, -0.0) == Difference(1, 1, 0.0, 0)
    assert difference(True, False) == Difference(1, 1)
    assert difference(1 + 2j, 1 + 2j) is None
    assert difference(1 + 2j, 1 - 2j) == Difference(1, 1, 4.0)


def test_more_than_one_part(monkeypatch):
    monkeypatch.setattr("monsess.commands.bits._PART", 7)
    one = np.arange(100, dtype=np.int32)
    other = one.copy()
    other[[3, 50, 99]] += [1, 20, 3]
    assert difference(one, other) == Difference(3, 100, 20)
    assert difference(one[:0], other[:0]) is None
