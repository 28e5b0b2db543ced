"""How a state is laid out in files: enough of them for several threads, and never in crumbs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from monsess.checkpoint import orbax_io
from monsess.checkpoint.commit import ITEM

MB = 1 << 20


def data_files(folder: Path) -> list[int]:
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return sorted(size for size in sizes if size > MB // 2)


def test_a_big_state_is_several_files(tmp_path):
    leaves = {f"w{i}": np.full((MB // 4,), i, np.float32) for i in range(24)}
    orbax_io.write(str(tmp_path / "1"), 1, leaves)
    sizes = data_files(tmp_path)
    assert len(sizes) >= 4
    assert sizes[-1] <= 6 * MB  # the smallest size that is asked for, and what comes with the last leaf
    found = orbax_io.read(str(tmp_path / "1"), list(leaves))
    assert all(np.array_equal(one, leaf) for one, leaf in zip(found, leaves.values(), strict=True))


def test_an_array_with_a_prime_number_of_rows_is_not_cut(tmp_path):
    import tensorstore

    prime = np.ones((1_500_007,), np.float32)  # above the size of a file; cut, it would be a million chunks
    orbax_io.write(str(tmp_path / "1"), 1, {"prime": prime, "other": np.zeros(3)})
    base = {"driver": "file", "path": os.path.join(tmp_path, "1", ITEM) + "/"}
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": "prime/"}}
    assert tensorstore.open(spec, open=True).result().chunk_layout.read_chunk.shape == prime.shape
    assert np.array_equal(orbax_io.read(str(tmp_path / "1"), ["prime"])[0], prime)


@pytest.mark.parametrize("size", [0, 1, MB, 300 * MB, 20_000 * MB])
def test_the_size_that_is_asked_for(size):
    class Sized(np.ndarray):
        nbytes = size  # type: ignore[assignment]

    wanted = orbax_io._file_bytes({"a": np.zeros(0).view(Sized), "b": [np.zeros(3), None, 1.0]})
    assert 4 * MB <= wanted <= 2048 * MB
    assert wanted >= min(size, 2048 * MB)


def test_values_are_not_copied(tmp_path):
    peak = Path("/proc/self/clear_refs")
    if not os.access(peak, os.W_OK):
        return

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(name))

    orbax_io.write(str(tmp_path / "0"), 0, {"a": np.zeros(10)})
    leaves = {f"w{i}": np.random.default_rng(i).random((10 * MB // 8,)) for i in range(20)}
    peak.write_text("5")
    before = status("VmRSS")
    orbax_io.write(str(tmp_path / "1"), 1, leaves)
    assert status("VmHWM") - before < 100  # of 200 MB; Orbax copies all, and then compresses
