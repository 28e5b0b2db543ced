"""Taking a directory, keeping it by heartbeats, finding out that it is lost, and giving it back."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import ticks
import toy
from checkpoints import fresh, saver, snapshot
from owners import acquired, forge, process_of

import monsess as ms
from monsess.checkpoint import ownership
from monsess.checkpoint.options import CheckpointOptions
from monsess.checkpoint.owner import encode, live_attempts, read_owner, unlock
from monsess.checkpoint.ownership import Ownership
from monsess.checkpoint.retention import KeepLast
from monsess.checkpoint.saver import Saver
from monsess.checkpoint.store import CheckpointStore
from monsess.errors import DirectoryInUseError, StorageError
from monsess.testing import Faults

STORES = ("local", "objects", "halves")


@pytest.fixture
def faults(request):
    return Faults(atomic=True)


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    return make(request.param, tmp_path)


@pytest.fixture
def faulty(faults):
    return CheckpointStore(fresh("faulty"), {"faults": faults})


@pytest.fixture
def child():
    """A process that lives until it is killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def make(kind, tmp_path) -> CheckpointStore:
    if kind == "local":
        return CheckpointStore(str(tmp_path / "run"))
    return CheckpointStore(fresh("faulty"), {"faults": Faults(atomic=kind == "objects", directories=kind == "halves")})


def again(store: CheckpointStore) -> CheckpointStore:
    """The same directory, as another run has it."""
    return CheckpointStore(store._storage.url, store._storage._options)


def owned_by(store: CheckpointStore, **more) -> object:
    owner = forge(**more)
    store._storage.write("owner.json", encode(owner))
    return owner


def attempt_of(store: CheckpointStore) -> str | None:
    owner = read_owner(store)
    return None if owner is None else owner.attempt


def said(caplog, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


# ---- who may have it


def test_what_nobody_owns_is_taken_and_given_back(store):
    with acquired(store, "a1") as own:
        assert attempt_of(store) == "a1"
        own.check()
        own.acquire()  # once more changes nothing
        assert attempt_of(store) == "a1"
    assert attempt_of(store) is None
    own.release()  # once more changes nothing
    with pytest.raises(DirectoryInUseError, match="not owned by this session"):
        own.check()


def test_a_dead_process_of_this_machine_holds_up_nobody(store, caplog):
    owned_by(store, pid=os.getpid(), start_time="1")  # the number was given to this process since
    begun = time.monotonic()
    with caplog.at_level(logging.INFO, "monsess"), acquired(store, "a1") as own:
        own.check()
        assert attempt_of(store) == "a1"
    assert time.monotonic() - begun < 9.0  # three heartbeats are 30 s
    assert said(caplog, "Waiting") == []
    assert len(said(caplog, "from process")) == 1


def test_a_zombie_holds_up_nobody(store, child, caplog):
    owner = process_of(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    owned_by(store, **dataclasses.asdict(owner))
    with caplog.at_level(logging.INFO, "monsess"), acquired(store, "a1"):
        assert attempt_of(store) == "a1"
    assert said(caplog, "Waiting") == []


def test_a_process_that_is_just_ending_is_given_a_moment(store, child):
    owned_by(store, **dataclasses.asdict(process_of(child.pid)))
    threading.Timer(0.2, child.kill).start()
    with acquired(store, "a1"):
        assert attempt_of(store) == "a1"


@pytest.mark.parametrize("launch", [None, "job"])
def test_a_process_that_is_alive_is_refused_by_name(store, child, launch, monkeypatch):
    monkeypatch.setattr(ownership, "_DYING_SECS", 0.1)
    owner = owned_by(store, **dataclasses.asdict(process_of(child.pid)), run_id="r7", launch=launch)
    with pytest.raises(DirectoryInUseError) as caught:
        Ownership(again(store), attempt="a1", launch=launch).acquire()
    text = str(caught.value)
    for part in (store.url, str(child.pid), owner.host, "run r7", "since 20", "unlock --force", "checkpoint_dir"):
        assert part in text
    assert read_owner(store) == owner


def test_a_stopped_process_is_alive(faulty, child):
    owned_by(faulty, **dataclasses.asdict(process_of(child.pid)))
    child.send_signal(signal.SIGSTOP)
    with pytest.raises(DirectoryInUseError):
        Ownership(faulty, attempt="a1").acquire()


def test_a_session_of_this_process_is_refused_until_it_is_closed(store):
    with acquired(store, "a1"):
        with pytest.raises(DirectoryInUseError, match=r"a1.*a session of this process. Close it first"):
            Ownership(again(store), attempt="a2").acquire()
        assert attempt_of(store) == "a1"
    with acquired(again(store), "a2"):
        assert attempt_of(store) == "a2"


def test_a_session_that_nobody_holds_any_more_holds_up_nobody(store):
    class Holder:
        pass

    holder = Holder()
    holder.own, holder.me = Ownership(store, attempt="a1"), holder  # in a cycle, as sessions are
    holder.own.acquire()
    gc.disable()
    try:
        del holder
        with acquired(again(store), "a2") as own:
            own.check()
            assert attempt_of(store) == "a2"
    finally:
        gc.enable()
    assert not {"a1", "a2"} & live_attempts
    ticks.wait_until(lambda: "monsess-heartbeat" not in [thread.name for thread in threading.enumerate()])


def test_a_session_that_nobody_closed_and_nobody_holds_holds_up_nobody(tmp_path):
    """Not even if it has saved: its threads end as well."""
    of_session = ("monsess-heartbeat", "monsess-saver", "monsess-upkeep")

    def threads():
        return {one for one in threading.enumerate() if one.name in of_session}

    before = threads()  # a test of a store that blocks for ever leaves some

    def live_and_die():
        sess = ms.MonitoredTrainingSession(
            toy.init_fn, data=toy.batches(5), checkpoint_dir=tmp_path, save_checkpoint_steps=1
        )
        sess.run(toy.train)
        ticks.wait_until(lambda: ms.CheckpointStore(tmp_path).steps() == [1])
        ticks.wait_until(lambda: not sess._saving._saver._busy())

    live_and_die()
    with ms.MonitoredTrainingSession(toy.init_fn, checkpoint_dir=tmp_path) as sess:
        assert sess.restored_from == 1
    ticks.wait_until(lambda: threads() <= before)


def test_a_half_token_is_nobodys(store, caplog):
    store._storage.write("owner.json", encode(forge())[:40])
    with acquired(store, "a1") as own:
        own.check()
        assert attempt_of(store) == "a1"


# ---- an owner somewhere else

ELSEWHERE = ("host", "boot_id", "pid_namespace")


@pytest.mark.parametrize("field", ELSEWHERE)
def test_an_owner_elsewhere_that_misses_three_heartbeats_is_dead(faulty, field, caplog):
    owned_by(faulty, **{field: "other"}, interval=0.2)
    begun = time.monotonic()
    with caplog.at_level(logging.INFO, "monsess"), acquired(again(faulty), "a1") as own:
        assert time.monotonic() - begun >= 0.6
        own.check()
        assert attempt_of(faulty) == "a1"
    (waiting,) = said(caplog, "Waiting 0.6 s")
    assert "monsess unlock" in waiting
    assert f"process {os.getpid()}" in waiting
    assert len(said(caplog, "took")) == 1


@pytest.mark.parametrize("change", [{"beat": 4}, {"attempt": "another", "beat": 0}])
def test_an_owner_elsewhere_that_beats_is_refused(faulty, change):
    owner = owned_by(faulty, host="other", interval=0.4)
    timer = threading.Timer(0.5, lambda: owned_by(faulty, host="other", interval=0.4, **change))
    timer.start()
    with pytest.raises(DirectoryInUseError, match=r"on other .*heartbeat was seen"):
        Ownership(again(faulty), attempt="a1").acquire()
    timer.join()
    assert read_owner(faulty) == dataclasses.replace(owner, **change)


def test_a_real_heartbeat_is_seen(faulty, monkeypatch):
    with acquired(faulty, "a1", interval_secs=0.1):
        monkeypatch.setattr("monsess.checkpoint.owner.is_here", lambda process: False)
        with pytest.raises(DirectoryInUseError, match="heartbeat was seen"):
            Ownership(again(faulty), attempt="a2").acquire()


def test_an_owner_elsewhere_that_lets_go_is_not_waited_for_any_longer(faulty):
    owned_by(faulty, host="other", interval=1000.0)
    threading.Timer(0.3, lambda: unlock(again(faulty))).start()
    ownership._LONGEST_INTERVAL_SECS, before = 1.0, ownership._LONGEST_INTERVAL_SECS
    try:
        with acquired(again(faulty), "a1"):
            assert attempt_of(faulty) == "a1"
    finally:
        ownership._LONGEST_INTERVAL_SECS = before


def test_the_next_attempt_of_the_same_launch_does_not_wait(faulty, caplog, monkeypatch):
    owned_by(faulty, host="other", launch="job-1", interval=1000.0)
    monkeypatch.setenv("MONSESS_LAUNCH_ID", "job-1")
    with caplog.at_level(logging.INFO, "monsess"), acquired(again(faulty), "a1"):
        owner = read_owner(faulty)
        assert owner is not None
        assert (owner.attempt, owner.launch) == ("a1", "job-1")
    assert said(caplog, "Waiting") == []


@pytest.mark.parametrize(("theirs", "ours"), [(None, ""), ("job-1", "job-2"), ("job-1", ""), (None, "job-2")])
def test_another_launch_waits(faulty, caplog, monkeypatch, theirs, ours):
    owned_by(faulty, host="other", launch=theirs, interval=0.1)
    monkeypatch.setenv("MONSESS_LAUNCH_ID", ours)
    with caplog.at_level(logging.INFO, "monsess"), acquired(again(faulty), "a1"):
        pass
    assert len(said(caplog, "Waiting")) == 1


# ---- several at once


@pytest.mark.parametrize("count", [2, 5])
def test_of_several_that_begin_at_once_exactly_one_commits(store, count):
    for _ in range(3):
        start, ready, went_on = threading.Barrier(count), threading.Barrier(count), []

        def begin(own, start=start, ready=ready, went_on=went_on):
            start.wait()
            try:
                own.acquire()
                own.check()
                went_on.append(own)
            except DirectoryInUseError:
                pass
            ready.wait()

        owners = [Ownership(again(store), attempt=f"a{number}") for number in range(count)]
        threads = [threading.Thread(target=begin, args=(own,)) for own in owners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # On a machine that is too busy a late one may overtake one that has begun; before a commit both look again.
        assert [own for own in went_on if passes(own)] == [own for own in owners if own._attempt == attempt_of(store)]
        for own in owners:
            own.release()
        assert attempt_of(store) is None


def passes(own: Ownership) -> bool:
    try:
        own.check()
    except DirectoryInUseError:
        return False
    return True


def test_who_was_overtaken_at_the_start_is_told_so(faulty):
    own = Ownership(faulty, attempt="a1")
    own.acquire()
    owned_by(again(faulty), attempt="a2", pid=77)
    with pytest.raises(DirectoryInUseError, match=r"process 77 .* began at the same moment"):
        own.check()
    own.release()
    assert attempt_of(faulty) == "a2"  # what is not ours is not removed


def test_how_long_to_wait_for_others_follows_the_store(faulty, faults):
    faults.delay("write", seconds=0.3, path="owner.json")
    own = Ownership(faulty, attempt="a1")
    own.acquire()
    begun = time.monotonic()
    own.check()
    assert time.monotonic() - begun >= 2.0
    own.release()


# ---- while it is owned


def test_a_heartbeat_counts_and_says_what_was_noted(faulty):
    with acquired(faulty, "a1", interval_secs=0.05) as own:
        own.note(run_id="r9", restored_from=40)
        ticks.wait_until(lambda: (read_owner(faulty) or forge(beat=0)).beat > 2)
        owner = read_owner(faulty)
        assert owner is not None
        assert (owner.run_id, owner.restored_from, owner.attempt) == ("r9", 40, "a1")
        own.check()
    time.sleep(0.2)
    assert attempt_of(faulty) is None  # no late heartbeat brings it back


def test_what_a_run_began_from_is_written_at_once(store):
    """`monsess prune` must not delete the step that a run began from, not even in its first seconds."""
    with acquired(store, "a1", interval_secs=3600) as own:
        own.note(run_id="r9", restored_from=40)
        ticks.wait_until(lambda: (read_owner(store) or forge(restored_from=None)).restored_from == 40)
        owner = read_owner(store)
        assert owner is not None
        assert (owner.run_id, owner.beat) == ("r9", 1)
        own.note(run_id="r9", restored_from=40)  # which is known already
        own.check()
    assert read_owner(store) is None


def test_no_heartbeat_comes_between_the_end_and_the_removal(faulty, faults):
    own = Ownership(faulty, attempt="a1", interval_secs=0.05)
    own.acquire()
    faults.block("write", path="owner.json", when="after")
    assert faults.wait_until_blocked()
    threading.Timer(0.3, faults.release).start()
    own.release()
    assert attempt_of(faulty) is None


def test_a_heartbeat_that_fails_is_said_once_and_the_next_ones_come(faulty, faults, caplog):
    with caplog.at_level(logging.WARNING, "monsess"), acquired(faulty, "a1", interval_secs=0.05) as own:
        faults.fail("write", times=3, error=PermissionError("no"), path="owner.json")
        ticks.wait_until(lambda: len([o for o in faults.log if o.outcome == "PermissionError"]) == 3)
        beat = (read_owner(faulty) or forge()).beat
        ticks.wait_until(lambda: (read_owner(faulty) or forge(beat=0)).beat > beat)
        own.check()
    assert len(said(caplog, "heartbeat failed")) == 1


def test_a_store_that_is_stuck_elsewhere_does_not_stop_the_heart(faulty, faults):
    with acquired(faulty, "a1", interval_secs=0.05):
        faults.block("write", path="/data", times=None)
        jobs = [lambda n=n: faulty._storage.write(f"1/data{n}", b"x") for n in range(8)]
        stuck = threading.Thread(target=lambda: faulty._storage.map(jobs))
        stuck.start()
        assert faults.wait_until_blocked(8)  # all that the store's own object can do at once
        beat = (read_owner(again(faulty)) or forge()).beat
        ticks.wait_until(lambda: (read_owner(again(faulty)) or forge(beat=0)).beat > beat + 1)
        faults.release()
        stuck.join()


def test_who_finds_another_owner_has_lost_the_directory(store, caplog):
    own = Ownership(store, attempt="a1")
    own.acquire()
    own.check()
    owned_by(again(store), attempt="a2", pid=77)
    with pytest.raises(DirectoryInUseError, match=r"taken away .*attempt a1.* belongs to process 77"):
        own.check()
    own._store._storage.delete("owner.json")
    with pytest.raises(DirectoryInUseError, match="taken away"):
        own.check()  # for ever
    with pytest.raises(DirectoryInUseError, match="taken away"):
        own.raise_if_lost()
    own.release()


def test_a_heartbeat_finds_another_owner_says_so_and_is_the_last(faulty, faults, caplog):
    own = Ownership(faulty, attempt="a1", interval_secs=0.05)
    own.acquire()
    own.check()
    with own._quiet():  # or a beat that has just looked writes over it, which a real taker waits out
        owned_by(again(faulty), attempt="a2")
    with caplog.at_level(logging.ERROR, "monsess"):
        ticks.wait_until(lambda: said(caplog, "taken away"))
    with pytest.raises(DirectoryInUseError):
        own.raise_if_lost()
    time.sleep(0.2)
    assert attempt_of(faulty) == "a2"
    assert len(said(caplog, "taken away")) == 1
    own.release()
    assert attempt_of(faulty) == "a2"


@pytest.mark.parametrize("left", [None, b"", b'{"host": "h'])
def test_a_token_that_went_missing_is_written_anew_if_nobody_began_since(store, left, caplog, monkeypatch):
    """Somebody unlocked the directory of a run that is alive, or a heartbeat failed half-way."""
    monkeypatch.setattr("monsess.checkpoint.owner._PAUSES", (0.01, 0.01))
    with acquired(store, "a1") as own:
        own.check()
        store.write_run({"run_id": "r", "last_attempt": "a1"})  # as the session does
        store._storage.delete("owner.json") if left is None else store._storage.write("owner.json", left)
        with caplog.at_level(logging.WARNING, "monsess"):
            own.check()
        assert attempt_of(store) == "a1"
        assert len(said(caplog, "written anew")) == 1


@pytest.mark.parametrize("run", [None, {"run_id": "r", "last_attempt": "a2"}])
def test_a_token_that_went_missing_is_lost_if_somebody_came_and_went(store, run):
    with acquired(store, "a1") as own:
        own.check()
        if run is not None:
            store.write_run(run)
        unlock(again(store), force=True)
        with pytest.raises(DirectoryInUseError, match="come and gone"):
            own.check()


def test_could_not_look_is_not_ours(faulty, faults):
    with acquired(faulty, "a1") as own:
        faults.fail("read", error=PermissionError("403"), times=None)
        with pytest.raises(StorageError, match=r"owner\.json"):
            own.check()
        faults.heal()
        own.check()


def test_nothing_is_committed_once_the_directory_is_lost(store):
    own = Ownership(store, attempt="a1")
    own.acquire()
    writer = Saver(store, CheckpointOptions(), KeepLast(5), attempt="a1", run_id="run", check=own.check)
    writer.submit(snapshot(1))
    assert writer.wait() == [1]
    owned_by(again(store), attempt="a2")
    writer.submit(snapshot(2))
    with pytest.raises(DirectoryInUseError, match="taken away"):
        writer.wait()
    assert store.steps() == [1]
    writer.close()
    own.release()


# ---- giving back


def test_a_directory_that_was_made_for_nothing_goes_away(tmp_path):
    with acquired(CheckpointStore(str(tmp_path / "new")), "a1"):
        assert (tmp_path / "new").is_dir()
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with acquired(CheckpointStore(str(tmp_path / "old")), "a1"):
        pass
    assert (tmp_path / "old").is_dir()


def test_a_directory_with_something_in_it_stays(tmp_path):
    store = CheckpointStore(str(tmp_path / "new"))
    with acquired(store, "a1"):
        store.write_run({"run_id": "r"})
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run.json"]


def test_a_store_that_refuses_is_no_error_at_the_end(faulty, faults, caplog):
    own = Ownership(faulty, attempt="a1")
    own.acquire()
    faults.fail("delete", error=PermissionError("403"), times=None)
    with caplog.at_level(logging.WARNING, "monsess"):
        own.release()
    (line,) = said(caplog, "could not be removed")
    assert "after 30 s" in line
    faults.heal()
    with acquired(again(faulty), "a2"):  # this process has let go all the same
        assert attempt_of(faulty) == "a2"


def test_a_store_that_never_answers_holds_the_end_for_a_while_only(faulty, faults, monkeypatch, caplog):
    monkeypatch.setattr(ownership, "_RELEASE_SECS", 0.3)
    own = Ownership(faulty, attempt="a1")
    own.acquire()
    faults.block("delete", times=None)
    begun = time.monotonic()
    own.release()
    assert time.monotonic() - begun < 30
    assert len(said(caplog, "could not be removed")) == 1
    faults.heal()


def test_what_a_store_refuses_is_not_owned(faulty, faults):
    faults.fail("write", error=PermissionError("403"), times=None)
    own = Ownership(faulty, attempt="a1")
    with pytest.raises(StorageError, match=r"owner\.json"):
        own.acquire()
    assert "a1" not in live_attempts
    own.release()
    faults.heal()
    own.acquire()
    own.release()


def test_a_child_that_was_forked_gives_nothing_back(tmp_path):
    program = """
import os, sys
from monsess.checkpoint.ownership import Ownership
from monsess.checkpoint.store import CheckpointStore
own = Ownership(CheckpointStore(sys.argv[1]), attempt="parent")
own.acquire()
if not os.fork():
    sys.exit(0)  # with its exit functions
os.wait()
print(open(os.path.join(sys.argv[1], "owner.json")).read())
"""
    # A process that ends without closing anything gives back what it has.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["attempt"] == "parent"
    assert not (tmp_path / "owner.json").exists()


# ---- what it costs


def test_the_requests_of_a_start_a_commit_and_an_end(faulty, faults, monkeypatch):
    # As an object store that takes an object whole or not at all; elsewhere an absent token is looked for twice.
    monkeypatch.setattr("monsess.storage.Storage.keeps_halves", False)
    own = Ownership(faulty, attempt="a1")

    def counted(call):
        before = len(faults.log)
        call()
        return [f"{o.kind} {o.path.rpartition('/')[2]}" for o in faults.log[before:]]

    look, write = "read owner.json", "write owner.json"
    assert counted(own.acquire) == [look, write]
    assert counted(own.check) == [look]  # before anything is written, and before each commit
    assert counted(own.release) == [look, "delete owner.json"]


def test_a_saver_without_an_owner_asks_nobody(store):
    writer = saver(store)
    writer.submit(snapshot(1))
    assert writer.wait() == [1]
    writer.close()
