from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys

import fsspec
import numpy as np
import pytest
from checkpoints import assert_same_bits, fresh, save, toy
from refusing import refuse, refusing

from monsess.checkpoint import CheckpointStore, latest_checkpoint, load_checkpoint
from monsess.checkpoint.commit import decode
from monsess.checkpoint.restore import find_restorable, fit
from monsess.errors import DamagedCheckpointError, MonsessError, StorageError
from monsess.localfiles import Digest


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path) -> str:
    return str(tmp_path / "run") if request.param == "local" else fresh("memory")


class Files:
    """The bytes below a store, whatever it is."""

    def __init__(self, url: str) -> None:
        self.fs, self.root = fsspec.core.url_to_fs(url)

    def names(self, folder: str = "") -> list[str]:
        root = f"{self.root}/{folder}" if folder else self.root
        return sorted(name[len(root) + 1 :] for name in self.fs.find(root))

    def read(self, name: str) -> bytes:
        return self.fs.cat_file(f"{self.root}/{name}")

    def write(self, name: str, data: bytes) -> None:
        self.fs.makedirs(f"{self.root}/{name}".rsplit("/", 1)[0], exist_ok=True)
        self.fs.pipe_file(f"{self.root}/{name}", data)

    def remove(self, name: str) -> None:
        self.fs.rm_file(f"{self.root}/{name}")


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGES = {
    "flip": flip,
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "zeros": lambda data: b"\0" * len(data),
    "empty": lambda data: b"",
    "gone": None,
}


def restored_step(url: str) -> int | None:
    restored = find_restorable(CheckpointStore(url))
    return None if restored is None else restored.step


def test_layout(url):
    store = save(url, 0, 5, 10)
    assert store.steps() == [0, 5, 10]
    assert latest_checkpoint(url) == 10
    assert {name.split("/")[0] for name in Files(url).names()} == {"0", "5", "10", "run.json"}
    names = Files(url).names("10")
    assert {n for n in names if not n.startswith("default/")} == {
        "_CHECKPOINT_METADATA",
        "commit.json",
        "commit_success.txt",
        "session.json",
    }
    commit = json.loads(Files(url).read("10/commit.json"))
    assert sorted(commit["files"]) == [n for n in names if n != "commit.json"]
    assert (commit["step"], commit["run_id"], commit["attempt"], commit["algorithm"]) == (10, "run", "a1", "sha256")
    session = json.loads(Files(url).read("10/session.json"))
    assert (session["step"], session["run_id"], session["attempt"], session["format"]) == (10, "run", "a1", 1)
    assert [leaf["path"] for leaf in session["leaves"]] == ["opt/0/mu", "opt/1", "params/b", "params/w"]
    for name in names:
        assert os.fsencode(url) not in Files(url).read(f"10/{name}"), "a path of the machine that wrote it"


def test_numeric_order(url):
    assert save(url, 9, 10, 100).steps() == [9, 10, 100]
    assert latest_checkpoint(url) == 100


@pytest.mark.parametrize("how", DAMAGES)
def test_any_damage_to_any_file_is_found(url, how, caplog):
    save(url, 5, 10)
    files = Files(url)
    for name in files.names("10"):
        whole = files.read(f"10/{name}")
        if DAMAGES[how] is None:
            files.remove(f"10/{name}")
        else:
            files.write(f"10/{name}", DAMAGES[how](whole))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "monsess"):
            restored = find_restorable(CheckpointStore(url))
        assert len(caplog.records) == 1, caplog.text
        assert restored is not None
        assert restored.step == 5, name
        assert_same_bits(fit(restored, toy()), toy(5))
        assert CheckpointStore(url).verify(10)
        assert latest_checkpoint(url) == 5
        assert "10" in os.listdir(url) if "://" not in url else True
        if name != "commit.json":
            assert name in caplog.text
            with pytest.raises(DamagedCheckpointError, match="step 10"):
                find_restorable(CheckpointStore(url), strict=True)
            with pytest.raises(DamagedCheckpointError, match="step 10"):
                load_checkpoint(url, 10)
        files.write(f"10/{name}", whole)
        assert CheckpointStore(url).verify(10) == []
    assert latest_checkpoint(url) == 10


def test_all_damaged_is_an_error_and_not_a_fresh_start(url):
    save(url, 5, 10)
    files = Files(url)
    for step in (5, 10):
        name = next(n for n in files.names(str(step)) if n.startswith("default/d/"))
        files.write(f"{step}/{name}", flip(files.read(f"{step}/{name}")))
    for look in (find_restorable, lambda s: latest_checkpoint(url), lambda s: load_checkpoint(url)):
        with pytest.raises(DamagedCheckpointError, match=r"step 10 .*step 5 .*from a copy") as damaged:
            look(CheckpointStore(url))
        assert "restore_step" not in str(damaged.value), "there is no sound step to choose"


def test_things_that_are_no_checkpoints(url, caplog):
    save(url, 5)
    files = Files(url)
    files.write("9/x", b"")
    files.write("11_bak/commit.json", files.read("5/commit.json"))
    files.write("007/commit.json", files.read("5/commit.json"))
    files.write("6/commit.json", files.read("5/commit.json"))
    files.write("-3/commit.json", b"")
    files.write("notes.txt", b"")
    if "://" not in url:
        os.makedirs(f"{url}/12")
        os.makedirs(f"{url}/.staging-30-x")
    store = CheckpointStore(url)
    assert store.steps() == [5]
    with caplog.at_level(logging.WARNING, "monsess"):
        restored = find_restorable(store)
    assert restored is not None
    assert restored.step == 5
    assert [r.getMessage() for r in caplog.records if "11_bak" in r.getMessage() and " 9" in r.getMessage()]
    assert store.verify(9) == ["commit.json is missing: step 9 is not a committed checkpoint"]


def test_a_chosen_step(url):
    save(url, 5, 10)
    restored = find_restorable(CheckpointStore(url), restore_step=5)
    assert restored is not None
    assert restored.step == 5
    assert_same_bits(load_checkpoint(url, 5)["params"], toy(5)["params"])
    with pytest.raises(StorageError, match=r"Step 7 .* 5, 10"):
        find_restorable(CheckpointStore(url), restore_step=7)


def test_nothing_there(url):
    assert CheckpointStore(url).steps() == []
    assert latest_checkpoint(url) is None
    assert find_restorable(CheckpointStore(url)) is None
    with pytest.raises(StorageError, match="no committed checkpoint"):
        load_checkpoint(url)
    if "://" not in url:
        assert not os.path.exists(url), "looking must not make anything"


@pytest.mark.parametrize("operation", ["list", "read"])
def test_could_not_look_is_never_nothing_there(operation):
    for url in (fresh("refusing"), save(fresh("refusing"), 5)._storage.url):
        with refusing(refuse(operation)):
            store = CheckpointStore(url)
            looks = [lambda s=store: s.steps(), lambda u=url: latest_checkpoint(u), lambda s=store: find_restorable(s)]
            for look in looks if operation == "list" else [store.read_run]:
                with pytest.raises(StorageError, match="credentials"):
                    look()


def test_the_first_write_shows_that_the_store_refuses():
    store = CheckpointStore(fresh("refusing"))
    with refusing(refuse("write")), pytest.raises(StorageError, match=r"run\.json.*credentials"):
        store.write_run({"run_id": "x"})


def test_a_step_that_is_deleted_while_it_is_read_is_no_damage(caplog):
    url = save(fresh("refusing"), 5, 10)._storage.url
    root = "/" + url.removeprefix("refusing://")

    def rule(operation, path):
        if operation == "read" and path.startswith(f"{root}/10/") and not path.endswith("commit.json"):
            store = fsspec.filesystem("refusing").store
            for name in [n for n in store if n.startswith(f"{root}/10/")]:
                store.pop(name, None)

    with refusing(rule), caplog.at_level(logging.WARNING, "monsess"):
        assert restored_step(url) == 5
    assert not caplog.records


def test_a_failing_read_is_an_error_and_no_fall_back():
    url = save(fresh("refusing"), 5, 10)._storage.url

    def rule(operation, path):
        if operation == "read" and "/10/default/" in path:
            raise PermissionError("403")

    with refusing(rule), pytest.raises(StorageError):
        find_restorable(CheckpointStore(url))


def test_a_forged_record_cannot_point_outside(url):
    save(url, 5)
    files = Files(url)
    record = decode(files.read("5/commit.json"), 5)
    for name in ("../x", "/etc/passwd", "a//b", "a/./b", "a\\b"):
        forged = dataclasses.replace(record, files={**record.files, name: Digest(0, "")})
        with pytest.raises(ValueError, match="list of files"):
            decode(forged.encode(), 5)
    with pytest.raises(ValueError, match="belongs to step 5"):
        decode(files.read("5/commit.json"), 6)
    body = json.loads(files.read("5/commit.json"))
    for other in (json.dumps(body).encode(), files.read("5/commit.json") + b"\n", b"[]", b"3", b"\xff", b"{" * 10**5):
        with pytest.raises(ValueError):
            decode(other, 5)


def test_pins_and_deletion(url):
    store = save(url, 5, 10)
    store.pin(5)
    with pytest.raises(MonsessError, match=r"pinned.*unpin\(5\)"):
        store.delete(5)
    assert Files(url).names("pins") == ["5"]
    store.unpin(5)
    store.unpin(5)
    store.delete(5)
    assert store.steps() == [10]
    assert [n for n in Files(url).names() if n.startswith("5/")] == []
    with pytest.raises(MonsessError, match="not a committed"):
        store.delete(5)
    with pytest.raises(MonsessError, match="not a committed"):
        store.pin(7)


@pytest.mark.parametrize("how", ["delete", "set_aside"])
def test_what_is_known_of_the_other_steps_is_not_forgotten_with_one(url, how):
    store = save(url, 1, 2, 3)
    store._damaged.add(3)
    records = store._survey().committed
    store._remember("run", list(records.values()))
    known = store.read_run() or {}
    assert known["damaged"].keys() == {"3"}
    other = CheckpointStore(url)
    other.delete(1) if how == "delete" else other.set_aside(1, "a2")
    del known["steps"]["1"]
    found = other.read_run() or {}
    found["steps"].pop("1", None)  # a rename leaves it to the next clean-up
    assert found == known
    other.delete(3)
    assert (other.read_run() or {})["damaged"] == {}


def test_set_aside_keeps_every_byte(url):
    store = save(url, 5, 10)
    before = {n: Files(url).read(f"10/{n}") for n in Files(url).names("10")}
    assert store.set_aside(10, "a2") == "aside-10-a2"
    assert {n: Files(url).read(f"aside-10-a2/{n}") for n in Files(url).names("aside-10-a2")} == before
    assert store.steps() == [5]
    save(url, 10)
    assert store.set_aside(10, "a2") == "aside-10-a2-2"


def test_run_record(url, caplog):
    store = CheckpointStore(url)
    assert store.read_run() is None
    store.write_run({"run_id": "r", "nonfinite": [1]})
    store.write_run({"run_id": "r", "more": 2})
    assert store.read_run() == {"run_id": "r", "nonfinite": [1], "more": 2}
    store.write_run({"run_id": "s"})
    assert store.read_run() == {"run_id": "s"}
    Files(url).write("run.json", b'{"run_id"')
    with caplog.at_level(logging.WARNING, "monsess"):
        assert store.read_run() is None
    assert "run.json" in caplog.text


def test_a_copy_is_as_good_as_the_original(tmp_path):
    local, remote, back = str(tmp_path / "run"), fresh("memory"), str(tmp_path / "back")
    save(local, 5, 10)
    for source, target in ((local, remote), (remote, back)):
        one, other = Files(source), Files(target)
        for name in one.names():
            other.write(name, one.read(name))
        assert CheckpointStore(target).steps() == [5, 10]
        assert CheckpointStore(target).verify(10) == []
        assert_same_bits(load_checkpoint(target)["params"], toy(10)["params"])


def test_a_step_that_is_a_link(tmp_path):
    save(str(tmp_path / "run"), 5)
    shutil.move(tmp_path / "run" / "5", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", tmp_path / "run" / "5")
    store = CheckpointStore(tmp_path / "run")
    assert store.steps() == [5]
    assert store.verify(5) == []
    store.delete(5)
    assert store.steps() == []
    assert (tmp_path / "elsewhere" / "commit.json").exists()


def test_credentials_in_the_url_are_masked():
    store = CheckpointStore("refusing://me:hush@host/x", {"password": "hush"})
    assert "hush" not in repr(store)
    assert store.url == "refusing://***@host/x"


def test_steps_are_listed_with_a_bounded_number_of_requests():
    url = save(fresh("refusing"), 5, 10, 15)._storage.url
    with refusing(lambda operation, path: None) as fs:
        CheckpointStore(url).steps()
        assert sorted(operation for operation, _ in fs.log) == ["list", "read"], "run.json remembers the steps"
    CheckpointStore(url)._storage.delete("run.json")
    with refusing(lambda operation, path: None) as fs:
        CheckpointStore(url).steps()
        assert sorted(operation for operation, _ in fs.log) == ["list", *4 * ["read"]]


def test_loading_starts_no_device(tmp_path):
    state = {"k": np.arange(3), "w": np.ones((2, 3), np.float32)}
    save(str(tmp_path / "run"), 5, state=state)
    code = (
        "import sys, monsess as ms\n"
        "tree = ms.load_checkpoint(sys.argv[1])\n"
        "assert ms.latest_checkpoint(sys.argv[1]) == 5\n"
        "assert tree['w'].sum() == 6\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)
