"""owner.json: who has a directory, and whether that process is still there."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys

import pytest
from checkpoints import fresh
from owners import acquired, forge, process_of

from monsess.checkpoint.owner import UnknownOwner, decode, encode, find_owner, look, read_owner, unlock
from monsess.checkpoint.store import CheckpointStore
from monsess.errors import DirectoryInUseError, StorageError
from monsess.process_name import is_alive, is_here, this_process
from monsess.testing import Faults


@pytest.fixture
def store():
    return CheckpointStore(fresh("memory"))


@pytest.fixture
def child():
    """A process that lives until it is killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


# ---- processes


def test_this_process_is_here_and_alive():
    process = this_process()
    assert process.pid == os.getpid()
    assert is_here(process)
    assert is_alive(process)


def test_another_process_is_alive_until_it_is_killed_and_a_zombie_is_not(child):
    process = process_of(child.pid)
    assert is_alive(process)
    os.kill(child.pid, signal.SIGSTOP)
    assert is_alive(process)  # it may go on at any time
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended and is a zombie
    os.kill(child.pid, 0)  # which still has the number
    assert not is_alive(process)
    child.wait()
    assert not is_alive(process)


def test_a_number_that_was_given_to_another_process_is_not_the_process(child):
    process = process_of(child.pid)
    assert is_alive(process)
    assert not is_alive(dataclasses.replace(process, start_time=str(int(process.start_time) - 1)))
    assert is_alive(dataclasses.replace(process, start_time=""))  # not known: it may be the one


def test_numbers_that_no_process_ever_had_are_dead():
    process = this_process()
    assert not is_alive(dataclasses.replace(process, pid=2**22 + 7))
    assert not is_alive(dataclasses.replace(process, pid=2**80))


@pytest.mark.parametrize("field", ["host", "boot_id", "pid_namespace"])
def test_a_process_of_another_machine_boot_or_namespace_is_not_here(field):
    assert not is_here(dataclasses.replace(this_process(), **{field: "other"}))


# ---- the token


def test_a_token_is_read_as_it_was_written():
    owner = forge(run_id=None, restored_from=7, launch="job")
    assert decode(encode(owner)) == owner
    assert decode(json.dumps({**json.loads(encode(owner)), "from_a_later_version": 1}).encode()) == owner


def test_a_token_that_was_cut_off_anywhere_is_none():
    data = encode(forge())
    assert {decode(data[:length]) for length in range(len(data))} == {None}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(forge())])
def test_a_token_that_lacks_something_is_none(name):
    body = json.loads(encode(forge()))
    del body[name]
    assert decode(json.dumps(body).encode()) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", None),
        ("boot_id", 3),
        ("pid_namespace", []),
        ("start_time", 12),
        ("attempt", None),
        ("pid", "12"),
        ("pid", 0),
        ("pid", -1),  # os.kill(-1, ...) would mean everybody
        ("beat", None),
        ("interval", 0),
        ("interval", "10"),
        ("interval", float("inf")),
        ("interval", float("nan")),
        ("since", None),
        ("since", 1e300),
    ],
)
def test_a_token_with_a_wrong_value_is_none(name, value):
    assert decode(json.dumps({**json.loads(encode(forge())), name: value}).encode()) is None


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"3", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_token_is_none(data):
    assert decode(data) is None


def test_an_owner_names_its_process_run_attempt_and_time():
    text = str(forge(host="node7", pid=4711, run_id="r1", attempt="a1", since=0.0))
    assert text.startswith("process 4711 on node7 (run r1, attempt a1, since 19")
    assert "run" not in str(forge(run_id=None))


# ---- read_owner


def test_nobody_owns_an_empty_directory(store):
    assert read_owner(store) is None


def test_the_owner_is_who_acquired_it(store):
    with acquired(store, "a1", run_id="r1", launch="job") as own:
        owner = read_owner(store)
        assert owner is not None
        assert owner.process == this_process()
        assert (owner.run_id, owner.attempt, owner.launch, owner.beat, owner.interval) == ("r1", "a1", "job", 0, 10.0)
        assert owner.is_alive
        own.release()
        assert owner.is_alive is False
    assert read_owner(store) is None


def test_an_owner_elsewhere_can_not_be_told(store):
    store._storage.write("owner.json", encode(forge(host="elsewhere")))
    owner = read_owner(store)
    assert owner is not None
    assert owner.is_alive is None


def test_an_unreadable_token_is_no_owner_and_a_warning(store, caplog):
    store._storage.write("owner.json", b"{")
    with caplog.at_level(logging.WARNING, "monsess"):
        assert read_owner(store) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"owner.json in {store.url} is not valid; no checkpoint depends on it."
    ]


def test_could_not_look_is_not_nobody():
    faults = Faults()
    faults.fail("read", error=PermissionError("403"), times=None)
    store = CheckpointStore(fresh("faulty"), {"faults": faults})
    with pytest.raises(StorageError, match=r"owner\.json"):
        read_owner(store)


@pytest.mark.parametrize("between", [None, b"", b'{"host'])
def test_a_token_that_is_just_being_written_over_is_seen(store, between, monkeypatch):
    """Over SFTP an object is empty, then half, then whole; HDFS deletes the old one first."""
    owner = forge()
    store._storage.write("owner.json", encode(owner))
    answers = [between, between, encode(owner)] if between is not None else [between, encode(owner)]

    def read(name):
        data = answers.pop(0)
        if data is None:
            raise FileNotFoundError(name)
        return data

    monkeypatch.setattr(store._storage, "read", read)
    assert look(store._storage) == owner


def test_where_objects_appear_whole_one_look_is_enough(tmp_path):
    store = CheckpointStore(str(tmp_path))
    assert look(store._storage) is None
    reads = []
    store._storage.read = lambda name: reads.append(name) or b"{"  # type: ignore[method-assign]
    assert look(store._storage) is None  # what stays unreadable is nobody
    assert len(reads) == 5


# ---- unlock


def test_nothing_to_unlock(store):
    assert unlock(store) is None


def test_an_owner_elsewhere_is_unlocked(store):
    owner = forge(host="elsewhere")
    store._storage.write("owner.json", encode(owner))
    assert unlock(store) == owner
    assert read_owner(store) is None


def test_a_dead_owner_and_an_unreadable_one_are_unlocked(store, child):
    owner = dataclasses.replace(forge(), **dataclasses.asdict(process_of(child.pid)))
    child.kill()
    child.wait()
    store._storage.write("owner.json", encode(owner))
    assert unlock(store) == owner
    store._storage.write("owner.json", b"half")
    assert find_owner(store) == UnknownOwner()
    assert unlock(store) == UnknownOwner()
    assert find_owner(store) is None
    with pytest.raises(FileNotFoundError):
        store._storage.read("owner.json")


def test_an_owner_that_is_alive_is_unlocked_by_force_only(store, child):
    owner = dataclasses.replace(forge(), **dataclasses.asdict(process_of(child.pid)))
    store._storage.write("owner.json", encode(owner))
    with pytest.raises(DirectoryInUseError, match=f"process {child.pid} on .* is alive on this machine"):
        unlock(store)
    assert read_owner(store) == owner
    assert unlock(store, force=True) == owner
    assert read_owner(store) is None
