"""A call to a store that was given up, and takes effect after all."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import ticks
from checkpoints import fresh, saver, snapshot
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

import monsess as ms
from monsess.checkpoint import CheckpointStore
from monsess.storage import Storage
from monsess.testing import Faults


def impatient(url: str, faults: Faults) -> CheckpointStore:
    store = CheckpointStore(url, {"faults": faults})
    store._storage._stall_secs = 0.5
    return store


@pytest.mark.parametrize("atomic", [False, True])
def test_an_upload_that_was_given_up_does_not_spoil_the_step_that_was_committed_without_it(atomic):
    faults = Faults(atomic=atomic)
    store = impatient(fresh("faulty"), faults)
    writer = saver(store, save_timeout_secs=60)
    faults.block("write", path="/1/default/")
    writer.submit(snapshot(1))
    assert writer.wait() == [1]
    assert store._storage.is_changing("1")
    faults.release()
    ticks.wait_until(lambda: not store._storage.is_changing(""))
    assert store.verify(1) == []
    writer.close()


@pytest.mark.parametrize("kind", ["delete", "write"])
def test_a_number_under_which_a_call_has_not_ended_is_not_used(kind):
    faults = Faults()
    url = fresh("faulty")
    store = impatient(url, faults)
    store._storage.write("1/session.json", json.dumps({"run_id": "run"}).encode())
    faults.block(kind, path="/1/session.json")
    if kind == "write":
        with pytest.raises(ms.StorageError, match="no answer"):
            store._storage.write("1/session.json", b"{}")
    writer = saver(store, save_timeout_secs=60)
    writer.submit(snapshot(1))
    with pytest.raises(ms.SaveError, match=r"Step 1 was not saved.* has not answered yet"):
        writer.wait()
    writer.submit(snapshot(2))
    assert writer.wait() == [2], "other numbers are free"
    other = CheckpointStore(url, {"faults": faults})
    assert other._storage.is_changing("1"), "also for another session of this process"
    assert not other._storage.is_changing("11")
    faults.release()
    ticks.wait_until(lambda: not other._storage.is_changing("1"))
    writer.submit(snapshot(1))
    assert writer.wait() == [1]
    assert store.verify(1) == []
    writer.close()


class Parts(AbstractBufferedFile):
    """As object stores do it: what was written is stored when the file is closed, and not when it is discarded."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        if self.fs.fail is not None:
            fail, type(self.fs).fail = self.fs.fail, None
            fail()
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.objects[self.path] = b"".join(self.parts)
        return True

    def discard(self) -> None:
        self.parts = []


class PartsFileSystem(AbstractFileSystem):
    protocol = "parts"
    cachable = False
    objects: ClassVar[dict[str, bytes]] = {}
    fail: ClassVar[Any] = None

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **_: Any) -> Parts:
        return Parts(self, path, mode, block_size=1 << 20)


@pytest.mark.parametrize("given_up", [False, True])
def test_a_file_that_failed_half_way_is_not_stored(given_up, tmp_path):
    fsspec.register_implementation("parts", PartsFileSystem, clobber=True)
    (tmp_path / "big").write_bytes(bytes(range(256)) * (10 << 12))
    failing, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def fail() -> None:
        failing.set()
        assert go_on.wait(30)
        ended.set()
        raise ConnectionError("reset")

    url = fresh("parts")
    storage = Storage(url, stall_secs=0.5 if given_up else 60, backoff_secs=0.0)
    name = f"{url.removeprefix('parts://')}/x"
    PartsFileSystem.fail = staticmethod(fail)
    with storage.patience(60):
        if not given_up:
            go_on.set()
        digest = storage.upload("x", str(tmp_path / "big"))
    assert failing.is_set()
    stored = PartsFileSystem.objects[name]
    assert len(stored) == digest.size == 10 << 20
    if given_up:
        go_on.set()
        assert ended.wait(30)
        ticks.wait_until(lambda: not storage.is_changing("x"))
    assert PartsFileSystem.objects[name] is stored


def test_a_download_that_was_given_up_does_not_empty_the_file_of_the_next(tmp_path):
    faults = Faults()
    storage = Storage(fresh("faulty"), {"faults": faults}, stall_secs=0.5)
    storage.write("x", b"bytes")
    faults.block("read", path="/x")
    path = Path(tmp_path / "x")
    with storage.patience(60):
        storage.download("x", str(path))
    assert path.read_bytes() == b"bytes"
    faults.release()
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        assert path.read_bytes() == b"bytes"
        time.sleep(0.01)


def test_what_was_committed_and_is_not_listed_is_not_overwritten():
    """Killed between a commit and the note of it in run.json, on a store whose listings lag behind."""
    faults = Faults(stale_listing_secs=3600)
    url = fresh("faulty")
    store = CheckpointStore(url, {"faults": faults})
    writer = saver(store)
    writer._upkeep._round = lambda fresh: None  # type: ignore[method-assign]
    writer.submit(snapshot(5))
    assert writer.wait() == [5]
    writer.close()
    assert ms.latest_checkpoint(url, {"faults": faults}) is None
    commit = store._read_commit(5)
    again = saver(CheckpointStore(url, {"faults": faults}), attempt="a2")
    again.submit(snapshot(5))
    assert again.wait() == [5]
    again.close()
    assert store._read_commit(5) == commit
    other = saver(CheckpointStore(url, {"faults": faults}), attempt="a3", run_id="other")
    other.submit(snapshot(5))
    with pytest.raises(ms.SaveError, match="another run"):
        other.wait()
    other.close()
