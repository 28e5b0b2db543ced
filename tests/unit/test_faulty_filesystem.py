"""The filesystem that fails on demand: sound as long as nothing is asked of it, and then failing as it was asked to."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import uuid
from typing import Any

import fsspec
import pytest

import monsess as ms
from monsess.testing import Faults, FaultyFileSystem, Operation


@pytest.fixture(params=["memory", "folder"])
def root(request, tmp_path):
    return None if request.param == "memory" else str(tmp_path / "store")


@pytest.fixture
def make(root):
    """Makes filesystems over one store; paths begin with ``make.name``."""

    def make(faults: Faults | None = None, **can: Any) -> FaultyFileSystem:
        return FaultyFileSystem(root=root, faults=faults or Faults(**can), skip_instance_cache=True)

    make.name = uuid.uuid4().hex
    return make


def outcomes(faults: Faults) -> list[tuple[str, str]]:
    return [(operation.kind, operation.outcome) for operation in faults.log]


def names(filesystem: FaultyFileSystem, path: str) -> list[str]:
    return [entry["name"].rpartition("/")[2] for entry in filesystem.ls(path)]


def test_the_protocol_is_known_to_fsspec(make):
    assert fsspec.get_filesystem_class("faulty") is FaultyFileSystem
    filesystem, path = fsspec.core.url_to_fs(f"faulty://{make.name}/run[1]/a?b#c", faults=Faults())
    assert isinstance(filesystem, FaultyFileSystem)
    assert path == f"{make.name}/run[1]/a?b#c"


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("faulty://s/a/", "s/a"),
        ("/s/a", "s/a"),
        ("faulty://anna:pass/word@s/a", "anna:pass/word@s/a"),  # a slash has to be written %2F in a password
        ("faulty://anna:p%2Fw@s/a@b", "s/a@b"),
        ("faulty://s", "s"),
        ("faulty://", ""),
        ("s/a//b/%20", "s/a//b/%20"),
    ],
)
def test_paths_are_literal(url, path):
    assert FaultyFileSystem._strip_protocol(url) == path


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("directories", [False, True])
def test_objects_come_back(make, directories, atomic):
    filesystem = make(directories=directories, atomic=atomic)
    folder = f"{make.name}/a/b"
    filesystem.makedirs(folder, exist_ok=True)
    filesystem.makedirs(folder, exist_ok=True)
    filesystem.pipe_file(f"{folder}/c", b"12345")
    with filesystem.open(f"{folder}/d", "wb") as file:
        assert file.write(b"abc") == 3
        assert file.write(b"") == 0
        assert file.write(b"def") == 3
        assert file.tell() == 6
    filesystem.pipe_file(f"{folder}/empty", b"")
    assert filesystem.cat_file(f"{folder}/c") == b"12345"
    assert filesystem.cat_file(f"{folder}/c", 1, 3) == b"23"
    assert filesystem.open(f"{folder}/d").read() == b"abcdef"
    assert filesystem.open(f"{folder}/d", "r").read() == "abcdef"
    assert filesystem.ls(folder) == [
        {"name": f"{folder}/c", "size": 5, "type": "file"},
        {"name": f"{folder}/d", "size": 6, "type": "file"},
        {"name": f"{folder}/empty", "size": 0, "type": "file"},
    ]
    assert filesystem.ls(f"{make.name}/a", detail=False) == [folder]
    assert filesystem.ls(make.name) == [{"name": f"{make.name}/a", "size": 0, "type": "directory"}]
    assert filesystem.ls(f"{folder}/c") == [filesystem.info(f"{folder}/c")]
    assert filesystem.isdir(folder)
    assert filesystem.isfile(f"{folder}/c")
    assert not filesystem.exists(f"{folder}/x")
    filesystem.pipe_file(f"{folder}/d", b"!")
    filesystem.cp_file(f"{folder}/d", f"{folder}/e")
    assert filesystem.cat_file(f"{folder}/e") == b"!"
    assert sorted(filesystem.find(make.name)) == [f"{folder}/{name}" for name in ("c", "d", "e", "empty")]
    assert make().cat_file(f"{folder}/e") == b"!", "another filesystem object sees the same store"
    filesystem.rm(f"{make.name}/a", recursive=True)
    assert filesystem.ls(make.name) == []


def test_what_is_absent_is_said_to_be(make):
    for filesystem in (make(), make(directories=True)):
        for ask in (filesystem.ls, filesystem.info, filesystem.cat_file, filesystem.open, filesystem.rm_file):
            with pytest.raises(FileNotFoundError):
                ask(f"{make.name}/x")
        with pytest.raises(FileNotFoundError):
            filesystem.cp_file(f"{make.name}/x", f"{make.name}/y")
        with pytest.raises(FileNotFoundError):
            filesystem.rmdir(f"{make.name}/x")
        assert filesystem.ls(make.name) == []


def test_without_directories_a_prefix_lasts_as_long_as_an_object_below_it(make):
    filesystem = make()
    filesystem.mkdir(f"{make.name}/a")
    assert not filesystem.exists(f"{make.name}/a")
    filesystem.pipe_file(f"{make.name}/a/b/c", b"1")
    assert filesystem.isdir(f"{make.name}/a/b")
    with pytest.raises(FileNotFoundError):
        filesystem.cat_file(f"{make.name}/a/b")
    with pytest.raises(OSError, match="not empty"):
        filesystem.rmdir(f"{make.name}/a/b")
    filesystem.rm_file(f"{make.name}/a/b/c")
    assert not filesystem.exists(f"{make.name}/a")


def test_empty_directories_of_a_killed_write_are_not_listed(tmp_path):
    (tmp_path / "s" / "a" / "b").mkdir(parents=True)
    filesystem = FaultyFileSystem(root=tmp_path)
    assert filesystem.ls("s") == []
    assert not filesystem.exists("s/a")
    assert FaultyFileSystem(root=tmp_path, faults={"directories": True}).ls("s", detail=False) == ["s/a"]


def test_with_directories_they_have_to_be_made_and_stay(make):
    filesystem = make(directories=True)
    with pytest.raises(FileNotFoundError):
        filesystem.pipe_file(f"{make.name}/a/b", b"1")
    with pytest.raises(FileNotFoundError):
        filesystem.mkdir(f"{make.name}/a/b", create_parents=False)
    filesystem.mkdir(f"{make.name}/a")
    with pytest.raises(FileExistsError):
        filesystem.mkdir(f"{make.name}/a")
    filesystem.pipe_file(f"{make.name}/a/b", b"1")
    with pytest.raises(FileExistsError):
        filesystem.makedirs(f"{make.name}/a/b", exist_ok=True)
    assert filesystem.cat_file(f"{make.name}//a///b") == b"1"
    for refuse in (filesystem.cat_file, filesystem.rm_file):
        with pytest.raises(IsADirectoryError):
            refuse(f"{make.name}/a")
    with pytest.raises(IsADirectoryError):
        filesystem.pipe_file(f"{make.name}/a", b"")
    filesystem.rm_file(f"{make.name}/a/b")
    assert filesystem.ls(f"{make.name}/a") == []
    filesystem.rmdir(f"{make.name}/a")
    assert not filesystem.exists(f"{make.name}/a")


@pytest.mark.parametrize("name", ["[1]", "a*b", "x?", "%20", "%", ".", "a/../b", " ", "é", ".hidden", "%%", "#"])
def test_any_name_is_a_name(make, name):
    filesystem = make()
    filesystem.pipe_file(f"{make.name}/run/{name}", b"1")
    assert filesystem.cat_file(f"{make.name}/run/{name}") == b"1"
    assert filesystem.find(f"{make.name}/run") == [f"{make.name}/run/{name}"]
    filesystem.rm_file(f"{make.name}/run/{name}")
    assert filesystem.ls(make.name) == []


def test_a_doubled_slash_counts_where_there_are_no_directories(make):
    filesystem = make()
    for name in ("a/b", "a//b", "a///b"):
        filesystem.pipe_file(f"{make.name}/{name}", name.encode())
    for name in ("a/b", "a//b", "a///b"):
        assert filesystem.cat_file(f"{make.name}/{name}") == name.encode()
        filesystem.rm_file(f"{make.name}/{name}")
    assert filesystem.ls(make.name) == []


def test_an_object_below_an_object_is_refused(make):
    filesystem = make()
    filesystem.pipe_file(f"{make.name}/a", b"1")
    with pytest.raises((NotADirectoryError, FileExistsError)):
        filesystem.pipe_file(f"{make.name}/a/b", b"1")
    filesystem.pipe_file(f"{make.name}/c/d", b"1")
    with pytest.raises(IsADirectoryError):
        filesystem.pipe_file(f"{make.name}/c", b"1")


def test_what_the_store_cannot_do(make):
    filesystem = make()
    filesystem.pipe_file(f"{make.name}/a", b"1")
    with pytest.raises(NotImplementedError, match="rename"):
        filesystem.mv(f"{make.name}/a", f"{make.name}/b")
    with pytest.raises(NotImplementedError, match="append"):
        filesystem.open(f"{make.name}/a", "ab")
    with pytest.raises(FileExistsError):
        filesystem.pipe_file(f"{make.name}/a", b"2", mode="create")
    with pytest.raises(FileExistsError):
        make(overwrite=False).pipe_file(f"{make.name}/a", b"2")
    with pytest.raises(FileExistsError):
        make(overwrite=False).cp_file(f"{make.name}/a", f"{make.name}/a")
    assert filesystem.cat_file(f"{make.name}/a") == b"1"
    make(exclusive_create=False).pipe_file(f"{make.name}/a", b"2", mode="create")
    assert filesystem.cat_file(f"{make.name}/a") == b"2"


def test_what_the_store_can_do(make):
    for directories in (False, True):
        filesystem = make(rename=True, append=True, directories=directories)
        filesystem.pipe_file(f"{make.name}/a", b"1")
        with filesystem.open(f"{make.name}/a", "ab") as file:
            file.write(b"2")
        with filesystem.open(f"{make.name}/new", "ab") as file:
            file.write(b"3")
        filesystem.mv(f"{make.name}/a", f"{make.name}/new")
        assert filesystem.cat_file(f"{make.name}/new") == b"12"
        assert not filesystem.exists(f"{make.name}/a")
    filesystem.makedirs(f"{make.name}/d/e")
    filesystem.mv(f"{make.name}/d", f"{make.name}/f")
    assert filesystem.isdir(f"{make.name}/f/e")
    with pytest.raises(FileExistsError):
        filesystem.mv(f"{make.name}/new", f"{make.name}/f")
    with pytest.raises(FileNotFoundError):
        filesystem.mv(f"{make.name}/x", f"{make.name}/y")


def test_exclusive_creation_has_one_winner(make):
    filesystems = [make(atomic=atomic) for atomic in (False, True) for _ in range(4)]
    won = []
    start = threading.Barrier(len(filesystems))

    def create(number: int) -> None:
        start.wait()
        try:
            filesystems[number].pipe_file(f"{make.name}/token", b"%d" % number, mode="create")
            won.append(number)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=create, args=(number,)) for number in range(len(filesystems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert make().cat_file(f"{make.name}/token") == b"%d" % won[0]


def test_a_listing_is_cached_only_if_that_is_asked_for(root, make):
    faults = Faults()
    filesystem = make(faults)
    caching = FaultyFileSystem(root=root, faults=faults, use_listings_cache=True, skip_instance_cache=True)
    filesystem.pipe_file(f"{make.name}/a", b"")
    assert names(caching, make.name) == names(filesystem, make.name) == ["a"]
    filesystem.pipe_file(f"{make.name}/b", b"")
    assert names(caching, make.name) == ["a"]
    assert names(filesystem, make.name) == ["a", "b"]
    caching.invalidate_cache()
    assert names(caching, make.name) == ["a", "b"]


def test_the_log_tells_every_operation(make):
    faults = Faults()
    first, second = make(faults), make(faults)
    first.pipe_file(f"{make.name}/a", b"1")
    second.cp_file(f"{make.name}/a", f"{make.name}/b")
    second.exists(f"{make.name}/c")
    second.ls(make.name)
    first.makedirs(f"{make.name}/d")
    first.cat_file(f"{make.name}/b")
    first.rm_file(f"{make.name}/b")
    with pytest.raises(NotImplementedError):
        first.mv(f"{make.name}/a", f"{make.name}/b")
    open_file = first.open(f"{make.name}/e", "wb")
    assert faults.log == [
        Operation(1, "write", f"{make.name}/a", "done", 1),
        Operation(2, "copy", f"{make.name}/a", "done", 2),
        Operation(3, "info", f"{make.name}/c", "FileNotFoundError", 2),
        Operation(4, "list", make.name, "done", 2),
        Operation(5, "mkdir", f"{make.name}/d", "done", 1),
        Operation(6, "read", f"{make.name}/b", "done", 1),
        Operation(7, "delete", f"{make.name}/b", "done", 1),
        Operation(8, "rename", f"{make.name}/a", "NotImplementedError", 1),
        Operation(9, "write", f"{make.name}/e", "running", 1),
    ]
    open_file.close()
    assert faults.log[-1].outcome == "done"


def test_the_nth_operation_of_a_kind_fails(make):
    faults = Faults()
    filesystem = make(faults)
    filesystem.pipe_file(f"{make.name}/before", b"")  # counted from here on
    faults.fail("write", n=2, times=2, error=TimeoutError)
    for name, fails in (("a", False), ("b", True), ("c", True), ("d", False)):
        if fails:
            with pytest.raises(TimeoutError):
                filesystem.pipe_file(f"{make.name}/{name}", b"1")
        else:
            filesystem.pipe_file(f"{make.name}/{name}", b"1")
            filesystem.cat_file(f"{make.name}/{name}")  # another kind is not counted
    assert names(filesystem, make.name) == ["a", "before", "d"]


def test_a_fault_of_any_kind_and_of_some_paths(make):
    faults = Faults()
    filesystem = make(faults)
    faults.fail("any", n=3)
    filesystem.pipe_file(f"{make.name}/a", b"1")
    filesystem.cat_file(f"{make.name}/a")
    with pytest.raises(OSError, match="as it was told to"):
        filesystem.ls(make.name)
    faults.fail("write", times=None, error=lambda: PermissionError(f"no {len(faults.log)}"), path="a*")
    filesystem.pipe_file(f"{make.name}/aa", b"1")
    for number in (5, 6, 7):
        with pytest.raises(PermissionError, match=f"no {number}"):
            filesystem.pipe_file(f"{make.name}/a*", b"1")
    faults.heal()
    filesystem.pipe_file(f"{make.name}/a*", b"1")


@pytest.mark.parametrize("data", [b"123456", b""])
@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("when", ["before", "middle", "after"])
def test_when_a_write_fails(make, when, atomic, data):
    faults = Faults(atomic=atomic)
    filesystem = make(faults)
    faults.fail("write", when=when)
    with pytest.raises(OSError, match="as it was told to"):
        filesystem.pipe_file(f"{make.name}/a", data)
    left = filesystem.cat_file(f"{make.name}/a") if filesystem.exists(f"{make.name}/a") else None
    half = None if atomic else data[: len(data) // 2]
    assert left == {"before": None, "middle": half, "after": data}[when]
    assert outcomes(faults)[0] == ("write", "OSError")
    filesystem.pipe_file(f"{make.name}/a", data)
    assert filesystem.cat_file(f"{make.name}/a") == data


@pytest.mark.parametrize("when", ["before", "middle", "after"])
def test_when_other_operations_fail(make, when):
    faults = Faults()
    filesystem = make(faults)
    filesystem.pipe_file(f"{make.name}/a", b"123456")
    for kind, act in (
        ("delete", lambda: filesystem.rm_file(f"{make.name}/a")),
        ("copy", lambda: filesystem.cp_file(f"{make.name}/a", f"{make.name}/b")),
        ("list", lambda: filesystem.ls(make.name)),
        ("info", lambda: filesystem.info(f"{make.name}/a")),
        ("mkdir", lambda: filesystem.mkdir(f"{make.name}/d")),
    ):
        filesystem.pipe_file(f"{make.name}/a", b"123456")
        faults.fail(kind, when=when, error=KeyError("mine"))
        with pytest.raises(KeyError, match="mine"):
            act()
        assert outcomes(faults)[-1] == (kind, "KeyError")
        if kind == "delete":
            assert filesystem.exists(f"{make.name}/a") == (when != "after")
        if kind == "copy":
            left = filesystem.cat_file(f"{make.name}/b") if filesystem.exists(f"{make.name}/b") else None
            assert left == {"before": None, "middle": b"123", "after": b"123456"}[when]


def test_a_read_that_breaks_off(make):
    faults = Faults()
    filesystem = make(faults)
    filesystem.pipe_file(f"{make.name}/a", b"123456")
    faults.fail("read", when="middle", error=ConnectionResetError, times=2)
    with filesystem.open(f"{make.name}/a") as file:
        assert file.read(2) == b"12"
        with pytest.raises(ConnectionResetError):
            file.read(2)
    with pytest.raises(ConnectionResetError):
        filesystem.cat_file(f"{make.name}/a")
    assert outcomes(faults)[1:] == [("read", "ConnectionResetError")] * 2
    assert filesystem.cat_file(f"{make.name}/a") == b"123456"


def test_silent_damage(make):
    faults = Faults()
    filesystem = make(faults)
    path = f"{make.name}/a"
    faults.truncate("write", keep_bytes=2)
    filesystem.pipe_file(path, b"123456")
    assert filesystem.cat_file(path) == b"12"
    faults.corrupt("write")
    filesystem.pipe_file(path, b"123456")
    assert filesystem.cat_file(path) == b"123457"
    faults.truncate("read", keep_bytes=3)
    assert filesystem.cat_file(path) == b"123"
    faults.corrupt("read")
    assert filesystem.open(path).read() == b"123456"
    faults.short_write()
    with filesystem.open(path, "wb") as file:
        assert file.write(b"1234") == 2
        assert file.write(b"567") == 3
    assert filesystem.cat_file(path) == b"12567"
    faults.lose("write")
    filesystem.pipe_file(path, b"!")
    faults.lose("delete")
    filesystem.rm_file(path)
    faults.lose("copy")
    filesystem.cp_file(path, f"{make.name}/b")
    assert outcomes(faults)[-3:] == [("write", "lost"), ("delete", "lost"), ("copy", "lost")]
    assert names(filesystem, make.name) == ["a"]
    assert filesystem.cat_file(path) == b"12567"
    faults.corrupt("write")
    filesystem.pipe_file(path, b"")
    assert filesystem.cat_file(path) == b""


def test_two_writes_of_one_object_do_not_end_in_both(make):
    """One that was given up and wakes while the next one is on its way writes over it, and not behind it."""
    store = make()
    late, next_one = store.open("b/late", "wb"), store.open("b/late", "wb")
    for piece in (b"abc", b"def"):
        next_one.write(piece)
        late.write(piece)
    next_one.close()
    late.close()
    assert store.cat_file("b/late") == b"abcdef"


@pytest.mark.parametrize("directories", [False, True])
def test_listings_that_lag_behind(make, directories):
    faults = Faults(stale_listing_secs=60, directories=directories)
    lagging, exact = make(faults), make(directories=directories)
    exact.makedirs(f"{make.name}/d")
    lagging.pipe_file(f"{make.name}/a", b"12")
    lagging.pipe_file(f"{make.name}/d/b", b"1")
    assert lagging.cat_file(f"{make.name}/a") == b"12", "only listings lag behind"
    assert names(lagging, make.name) == (["d"] if directories else [])
    if not directories:
        with pytest.raises(FileNotFoundError):
            lagging.ls(f"{make.name}/d")
    assert names(exact, make.name) == ["a", "d"]
    faults.stale_listing_secs = 0.01
    time.sleep(0.02)
    assert names(lagging, make.name) == ["a", "d"]
    assert names(lagging, f"{make.name}/d") == ["b"]

    faults.stale_listing_secs = 60
    lagging.rm_file(f"{make.name}/d/b")
    lagging.pipe_file(f"{make.name}/a", b"123456")
    lagging.pipe_file(f"{make.name}/a", b"1234567")
    assert [entry["size"] for entry in lagging.ls(make.name)] == [2, 0], "the size of before"
    assert names(lagging, f"{make.name}/d") == ["b"]
    with pytest.raises(FileNotFoundError):
        lagging.cat_file(f"{make.name}/d/b")
    faults.stale_listing_secs = 0
    assert lagging.ls(make.name) == exact.ls(make.name)
    assert lagging.info(f"{make.name}/a")["size"] == 7


def test_credentials_that_expire(make):
    faults = Faults()
    old, other = make(faults), make(faults)
    faults.expire_credentials(after=2)
    old.pipe_file(f"{make.name}/a", b"")
    other.ls(make.name)
    for filesystem in (old, other, old):
        with pytest.raises(PermissionError, match="expired"):
            filesystem.cat_file(f"{make.name}/a")
    fresh = make(faults)
    assert fresh.cat_file(f"{make.name}/a") == b""
    assert faults.log[-1] == Operation(6, "read", f"{make.name}/a", "done", 3)
    faults.expire_credentials(error=ConnectionError("401"))
    for filesystem in (fresh, old):
        with pytest.raises(ConnectionError, match="401"):
            filesystem.ls(make.name)
    faults.heal()
    old.ls(make.name)


def test_a_blocked_operation_goes_on_when_it_is_released(make):
    faults = Faults()
    filesystem = make(faults)
    for when, left in (("before", None), ("middle", b"12")):
        faults.block("write", when=when, path=when)
        thread = threading.Thread(target=filesystem.pipe_file, args=(f"{make.name}/{when}", b"1234"))
        thread.start()
        assert faults.wait_until_blocked()
        assert not faults.wait_until_blocked(2, timeout_secs=0.01)
        seen = make()
        assert (seen.cat_file(f"{make.name}/{when}") if seen.exists(f"{make.name}/{when}") else None) == left
        faults.release()
        thread.join()
        assert filesystem.cat_file(f"{make.name}/{when}") == b"1234"
        filesystem.pipe_file(f"{make.name}/{when}", b"")


def test_delays_are_waited_for(make, monkeypatch):
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    faults = Faults(slow_delete_secs=7)
    filesystem = make(faults)
    faults.delay("read", 2, 3.0, times=2)
    filesystem.pipe_file(f"{make.name}/a", b"")
    for _ in range(4):
        filesystem.cat_file(f"{make.name}/a")
    filesystem.rm_file(f"{make.name}/a")
    assert waited == [3.0, 3.0, 7]


def test_faults_meet_in_the_order_in_which_they_were_added(make):
    faults = Faults()
    filesystem = make(faults)
    faults.fail("write", error=KeyError("first"))
    faults.fail("any", error=KeyError("second"), times=2)
    for which in ("first", "second"):
        with pytest.raises(KeyError, match=which):
            filesystem.pipe_file(f"{make.name}/a", b"")
    filesystem.pipe_file(f"{make.name}/a", b"")


@pytest.mark.parametrize(
    ("slip", "says"),
    [
        (lambda f: f.fail("wirte"), "'wirte'; there are list, info"),
        (lambda f: f.fail("write", n=0), "from 1 on, found n=0"),
        (lambda f: f.kill("write", 2, when="during"), "found 'during'"),
        (lambda f: f.block("write", times=0), "times=0"),
        (lambda f: f.truncate("delete"), "found 'delete'"),
        (lambda f: f.lose("read"), "found 'read'"),
        (lambda f: f.expire_credentials(after=-1), "after=-1"),
    ],
)
def test_slips_are_refused_at_once(slip, says):
    with pytest.raises(ValueError, match=says):
        slip(Faults())


def test_faults_may_come_from_json(make):
    filesystem = FaultyFileSystem(faults={"directories": True})
    assert filesystem.faults.directories
    with pytest.raises(TypeError, match="found 'none'"):
        FaultyFileSystem(faults="none")
    with pytest.raises(TypeError, match="dirs"):
        FaultyFileSystem(faults={"dirs": True})


def test_equal_faults_from_json_are_shared_within_a_store(tmp_path):
    """`monsess check-store` writes by one filesystem object and looks by another; both get their options from JSON."""

    def make(root=None, **faults):
        return FaultyFileSystem(root=root, faults=faults, skip_instance_cache=True)

    one, other = make(stale_listing_secs=1000, directories=True), make(directories=True, stale_listing_secs=1000)
    assert one is not other
    assert one.faults is other.faults
    name = uuid.uuid4().hex
    one.makedirs(f"{name}/a")
    one.pipe_file(f"{name}/a/late", b"x")
    assert other.ls(f"{name}/a") == []
    assert other.cat_file(f"{name}/a/late") == b"x"
    assert make(stale_listing_secs=1).faults is not one.faults
    assert make(str(tmp_path), stale_listing_secs=1000, directories=True).faults is not one.faults
    unscripted = FaultyFileSystem(skip_instance_cache=True), FaultyFileSystem(skip_instance_cache=True)
    assert unscripted[0].faults is not unscripted[1].faults


def test_fsspec_tells_filesystems_apart_by_their_faults():
    faults = Faults()
    assert FaultyFileSystem(faults=faults) is FaultyFileSystem(faults=faults)
    assert FaultyFileSystem(faults=faults) is not FaultyFileSystem(faults=Faults())


_KILLED = """
import json, os, sys
from monsess.testing import Faults, FaultyFileSystem

root, cases = json.load(sys.stdin)
statuses = []
for number, (kind, when, atomic) in enumerate(cases):
    child = os.fork()
    if not child:
        faults = Faults(atomic=atomic, rename=True)
        filesystem = FaultyFileSystem(root=root, faults=faults)
        filesystem.pipe_file(f"{number}/a", b"old content")
        faults.kill(kind, 2 if kind == "any" else 1, when=when)
        if kind == "any":
            filesystem.cat_file(f"{number}/a")
        if kind in ("write", "any"):
            filesystem.pipe_file(f"{number}/a", b"123456")
        elif kind == "copy":
            filesystem.cp_file(f"{number}/a", f"{number}/b")
        elif kind == "delete":
            filesystem.rm_file(f"{number}/a")
        else:
            filesystem.mv(f"{number}/a", f"{number}/b")
        os._exit(0)
    statuses.append(os.waitpid(child, 0)[1])
print(json.dumps(statuses))
"""


def test_a_kill_leaves_what_a_store_would_keep(tmp_path):
    old, new = {"a": b"old content"}, {"a": b"123456"}
    cases = {
        ("write", "before", False): old,
        ("write", "before", True): old,
        ("write", "middle", False): {"a": b"123"},
        ("write", "middle", True): old,
        ("write", "after", False): new,
        ("write", "after", True): new,
        ("any", "middle", False): {"a": b"123"},
        ("copy", "before", False): old,
        ("copy", "middle", False): {**old, "b": b"old c"},
        ("copy", "middle", True): old,
        ("copy", "after", False): {**old, "b": b"old content"},
        ("delete", "before", False): old,
        ("delete", "middle", False): old,
        ("delete", "after", False): {},
        ("rename", "before", False): old,
        ("rename", "after", False): {"b": b"old content"},
    }
    child = subprocess.run(
        [sys.executable, "-c", _KILLED],
        input=json.dumps([str(tmp_path), list(cases)]),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) == [signal.SIGKILL] * len(cases)
    filesystem = FaultyFileSystem(root=tmp_path)
    for number, (case, left) in enumerate(cases.items()):
        found = {name.rpartition("/")[2]: filesystem.cat_file(name) for name in filesystem.find(str(number))}
        assert found == left, case


def test_importing_monsess_does_not_import_fsspec():
    code = "import sys, monsess.testing; assert 'fsspec' not in sys.modules; monsess.testing.FaultyFileSystem"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def test_a_checkpoint_store_over_it(root, make):
    faults = Faults()
    options = {"faults": faults} if root is None else {"faults": faults, "root": root}
    store = ms.CheckpointStore(f"faulty://{make.name}/run", options)
    assert store.steps() == []
    faults.fail("list", error=PermissionError("no"))
    with pytest.raises(ms.StorageError, match="no"):
        store.steps()


def test_an_unknown_attribute_of_testing_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Faulty"):
        ms.testing.Faulty  # noqa: B018
    assert pickle.loads(pickle.dumps(Operation(1, "read", "a", "done", 1))).kind == "read"
