"""The fixtures that a user's ``conftest.py`` asks for."""

from __future__ import annotations

import os
import subprocess
import sys

CONFTEST = """
pytest_plugins = ["monsess.pytest_plugin"]
"""
TEST = """
import threading, time
import pytest
import monsess as ms

def test_store(faulty_store):
    store = ms.CheckpointStore(faulty_store.url, faulty_store.storage_options)
    assert store.steps() == []
    faulty_store.faults.fail("list", error=PermissionError("no"))
    with pytest.raises(ms.StorageError, match="no"):
        store.steps()

def test_store_of_its_own(faulty_store, request):
    assert faulty_store.faults.log == []
    faulty_store.faults.block("write")
    filesystem = ms.testing.FaultyFileSystem(**faulty_store.storage_options)
    thread = threading.Thread(target=filesystem.pipe_file, args=("a/b", b""))
    thread.start()
    assert faulty_store.faults.wait_until_blocked()
    request.config.blocked = thread

def test_nothing_stays_blocked(request):
    request.config.blocked.join(30)
    assert not request.config.blocked.is_alive()

def test_clock(fake_clock):
    from monsess import clock
    fake_clock.advance(5)
    assert clock.monotonic() == 5
"""


def test_fixtures(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_mine.py").write_text(TEST)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
