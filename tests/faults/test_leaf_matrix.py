"""Every kind of leaf, stored on 4 devices and restored on 1, 2 and 8 by sessions in other processes: every bit."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import leaf_matrix
import pytest

import monsess as ms

#: What the issue names by hand; that `leaf_matrix.dtypes` finds them is not left to chance.
_AT_LEAST = {
    *("bfloat16", "float16", "float32", "float64", "float4_e2m1fn", "bool", "complex64", "complex128"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "int2", "int4", "int8", "int16", "int32", "int64"),
    *("uint2", "uint4", "uint8", "uint16", "uint32", "uint64"),
}


def start(devices: int, directory: Path, last_step: int) -> subprocess.Popen[str]:
    command = [sys.executable, leaf_matrix.__file__, str(devices), str(directory), str(last_step)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines(child: subprocess.Popen[str]) -> list[str]:
    output, _ = child.communicate(timeout=240)
    assert child.returncode == 0, output
    return [line for line in output.splitlines() if line.startswith(("restored", "loaded"))]


def test_every_leaf_keeps_every_bit_on_another_number_of_devices(tmp_path):
    first = lines(start(4, tmp_path / "on4", 1))
    leaves = int(first[0].rsplit(" ", 1)[1])
    children = []
    for devices in (1, 2, 8):
        shutil.copytree(tmp_path / "on4", tmp_path / f"on{devices}")
        children.append(start(devices, tmp_path / f"on{devices}", 2))
    try:
        found = [lines(child) for child in children]
    finally:
        for child in children:
            child.kill()
    loaded = f"loaded {len(leaf_matrix.dtypes())} dtypes"
    assert first == [f"restored None leaves {leaves}"] * 2 + [loaded]
    assert found == [[f"restored 1 leaves {leaves}"] * 2 + [loaded]] * 3
    print(f"leaf matrix: {leaves} leaves of {len(leaf_matrix.dtypes())} dtypes, 4 devices to 1, 2 and 8: every bit")


def test_the_matrix_holds_the_dtypes_that_are_asked_for():
    assert {dtype.name for dtype in leaf_matrix.dtypes()} >= _AT_LEAST


@pytest.mark.parametrize(("leaf", "text"), [(10**30, "10000"), (2**40 + 1, "jax_enable_x64"), ("name", "a str")])
def test_a_leaf_that_the_session_cannot_hold_is_refused_with_its_path(leaf, text):
    with pytest.raises(ms.UnstorableLeafError, match=f"deep/leaf.*{re.escape(text)}"):
        ms.MonitoredTrainingSession(lambda: {"deep": {"leaf": leaf}, "w": jnp.zeros(2)})
