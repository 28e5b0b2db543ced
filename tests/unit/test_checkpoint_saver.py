from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import assert_same_bits, fresh, save, saver, snapshot, toy
from refusing import RefusingFileSystem, refuse, refusing

from monsess.checkpoint import CheckpointOptions, CheckpointStore, KeepLast, Retention, latest_checkpoint
from monsess.checkpoint.restore import find_restorable, fit
from monsess.checkpoint.saver import Saver, Snapshot
from monsess.checkpoint.survey import STAGING_PREFIX
from monsess.errors import NonFiniteStateError, SaveError, StorageError
from monsess.testing import Faults


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path) -> str:
    return str(tmp_path / "run") if request.param == "local" else fresh("memory")


def names(store: CheckpointStore, folder: str = "") -> set[str]:
    """What is there besides run.json."""
    return set(store._storage.list(folder)) - {"run.json"}


def put(store: CheckpointStore, name: str, data: bytes = b"") -> None:
    store._storage.write(name, data)


class Block:
    """Holds every write until `release`."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.release = threading.Event()

    def __call__(self, operation: str, path: str) -> None:
        if operation == "write":
            self.reached.set()
            self.release.wait(60)


# ---- the queue


def test_one_in_flight_one_waiting_and_the_third_is_held(caplog):
    store = CheckpointStore(fresh("refusing"))
    writer = saver(store)
    block = Block()
    with refusing(block):
        writer.submit(snapshot(1))
        assert block.reached.wait(30)
        begun = time.monotonic()
        writer.submit(snapshot(2))
        assert time.monotonic() - begun < 0.5
        assert writer.poll() == []
        assert writer.stalled_seconds == 0
        threading.Timer(1.0, block.release.set).start()
        writer.submit(snapshot(3))
        assert 0.5 < time.monotonic() - begun < 30
        assert writer.stalled_seconds > 0.5
        assert writer.wait() == [1, 2, 3]
    assert (writer.saves, writer.last_committed) == (3, 3)
    assert writer.poll() == []
    writer.close()
    assert store.steps() == [1, 2, 3]


def test_a_held_caller_is_warned_and_gets_an_error_at_the_limit(caplog):
    store = CheckpointStore(fresh("refusing"))
    writer = saver(store, save_timeout_secs=2.0)
    block = Block()
    with refusing(block), caplog.at_level(logging.WARNING, "monsess"):
        writer.submit(snapshot(1))
        writer.submit(snapshot(2)) if block.reached.wait(30) else None
        with pytest.raises(SaveError, match="Step 3"):
            writer.submit(snapshot(3))
        assert "Training waits" in caplog.text
        with pytest.raises(SaveError, match=r"step 1 did not end within 2 s"):
            writer.poll()
        block.release.set()
        writer.close()
    time.sleep(0.3)
    assert store.steps() == [], "what was reported as failed must not be committed later"


def test_a_store_that_blocks_holds_nobody_beyond_the_limit():
    store = CheckpointStore(fresh("refusing"))
    writer = saver(store, save_timeout_secs=1.0)
    block = Block()
    with refusing(block):
        writer.submit(snapshot(1))
        begun = time.monotonic()
        with pytest.raises(SaveError, match=r"step 1 .*save_timeout_secs"):
            writer.wait()
        with pytest.raises(SaveError):
            writer.submit(snapshot(2))
        writer.close()
        assert time.monotonic() - begun < 4
        block.release.set()
    with pytest.raises(SaveError, match="closed"):
        writer.submit(snapshot(3))


def test_each_of_two_saves_has_the_limit_for_itself():
    faults = Faults()
    store = CheckpointStore(fresh("faulty"), {"faults": faults})
    writer = saver(store, save_timeout_secs=9.0)
    writer.submit(snapshot(1))
    writer.wait()
    for step in (2, 3):
        faults.delay("write", 1, 5.0, path=f"/{step}/session.json")
        writer.submit(snapshot(step))
    assert writer.wait() == [2, 3]
    writer.close()


def test_waiting_for_a_number_takes_from_the_time_for_tries(monkeypatch):
    store = CheckpointStore(fresh("memory"))
    writer = saver(store, save_timeout_secs=100.0)
    given = []
    monkeypatch.setattr(store._storage, "patience", lambda left: (given.append(left), contextlib.nullcontext())[1])
    monkeypatch.setattr(writer._upkeep, "claim", lambda step: time.sleep(1.0))
    writer.submit(snapshot(1))
    writer.wait()
    writer.close()
    assert given[0] <= 89.0


def test_an_owner_that_cannot_be_read_does_not_hide_why_a_save_failed(tmp_path, monkeypatch):
    def check() -> None:
        raise StorageError("Could not read owner.json")

    def full(path: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("monsess.checkpoint.publish.fsync_tree", full)
    store = CheckpointStore(tmp_path)
    writer = Saver(store, CheckpointOptions(), KeepLast(1), attempt="a", run_id="run", check=check)
    writer.submit(snapshot(1))
    with pytest.raises(SaveError, match="No space left"):
        writer.wait()
    writer.close()


def test_the_thread_is_a_daemon_and_starts_with_the_first_save():
    before = {t for t in threading.enumerate() if t.name == "monsess-saver"}
    writer = saver(CheckpointStore(fresh("memory")))
    assert {t for t in threading.enumerate() if t.name == "monsess-saver"} <= before
    writer.submit(snapshot(1))
    assert {t for t in threading.enumerate() if t.name == "monsess-saver"} - before
    assert all(t.daemon for t in threading.enumerate() if t.name.startswith("monsess"))
    writer.wait()
    writer.close()
    writer.close()


# ---- errors


def test_an_error_surfaces_once_and_the_next_save_goes_on():
    store = CheckpointStore(fresh("refusing"))
    writer = saver(store)
    with refusing(refuse("write")):
        writer.submit(snapshot(1))
        with pytest.raises(SaveError, match=r"Step 1 .*credentials") as caught:
            writer.wait()
    assert isinstance(caught.value.__cause__, StorageError)
    assert writer.poll() == []
    writer.submit(snapshot(2))
    assert writer.wait() == [2]
    assert store.steps() == [2]


def test_two_errors_are_both_told():
    writer = saver(CheckpointStore(fresh("refusing")))
    with refusing(refuse("write")):
        writer.submit(snapshot(1))
        writer.submit(snapshot(2))
        while writer._busy():
            time.sleep(0.01)
        with pytest.raises(SaveError, match="Step 1") as caught:
            writer.poll()
    assert any("Step 2" in note for note in caught.value.__notes__)


def test_transient_errors_are_ridden_out():
    store = CheckpointStore(fresh("refusing"))
    store._storage._backoff_secs = 0.0
    seen = set()

    def rule(operation, path):
        if (operation, path) not in seen:  # the first try of every operation fails, whatever the threads' order
            seen.add((operation, path))
            raise ConnectionError("again")

    with refusing(rule):
        writer = saver(store)
        writer.submit(snapshot(1))
        assert writer.wait() == [1]
    assert store.verify(1) == []


def test_the_gate_is_asked_before_anything_is_written(url):
    class Nope(Exception):
        pass

    def gate():
        raise Nope("no")

    writer = saver(CheckpointStore(url))
    writer.submit(snapshot(1, gate=gate))
    with pytest.raises(Nope):
        writer.wait()
    with pytest.raises(FileNotFoundError):
        CheckpointStore(url)._storage.list()
    writer.submit(snapshot(2))
    assert writer.wait() == [2]


def test_a_leaf_that_changed_its_shape_is_refused_by_name(url):
    taken = snapshot(1)
    taken.leaves[3] = np.ones((9, 9), np.float32)
    writer = saver(CheckpointStore(url))
    writer.submit(taken)
    with pytest.raises(SaveError, match=r"params/w.*float32\[4, 3\] expected, float32\[9, 9\] found"):
        writer.wait()


def test_device_values_are_let_go():
    taken = snapshot(1, {"w": jnp.ones((100, 100))})
    leaves = taken.leaves
    writer = saver(CheckpointStore(fresh("memory")))
    writer.submit(taken)
    writer.wait()
    assert taken.leaves == []
    assert leaves == []


# ---- order of operations and kills


def test_orbax_markers_go_late_and_the_commit_last_and_deletion_after_it():
    with refusing(lambda operation, path: None) as fs:
        store = CheckpointStore(fresh("refusing"))
        writer = saver(store, keep=1)
        for step in (1, 2):
            writer.submit(snapshot(step))
            writer.wait()
        writer.close()
        log = [(operation, path.strip("/").partition("/")[2]) for operation, path in fs.log]
    written = [path for operation, path in log if operation == "write" and path.startswith("2/")]
    assert written[0] == "2/session.json"
    assert set(written[-3:-1]) == {"2/_CHECKPOINT_METADATA", "2/commit_success.txt"}
    assert written[-1] == "2/commit.json"
    deleted = [path for operation, path in log if operation == "delete"]
    assert next(path for path in deleted if "/" in path) == "1/commit.json"
    assert log.index(("delete", "1/commit.json")) > log.index(("write", "2/commit.json"))
    assert names(store) == {"2"}


@pytest.mark.parametrize("operation", ["write", "delete"])
def test_dying_at_any_operation_leaves_a_directory_that_goes_on(operation):
    """Every operation from the n-th on fails for good, as after a kill; a new attempt then resumes and saves."""
    for n in range(40):
        store = CheckpointStore(save(fresh("refusing"), 1, 2, keep=2)._storage.url)
        count = iter(range(10**6))
        done = []

        def rule(op, path, count=count, done=done, n=n):
            if op == operation and next(count) >= n:
                done.append(1)
                raise PermissionError("dead")

        with refusing(rule):
            first = saver(store, keep=2, attempt="a1")
            first.submit(snapshot(3))
            try:
                first.wait()
            except SaveError:
                pass
            first.close()
        again = CheckpointStore(store._storage.url)
        restored = find_restorable(again)
        assert restored is not None
        assert restored.step in (2, 3)
        assert_same_bits(fit(restored, toy()), toy(restored.step))
        second = saver(again, keep=2, attempt="a2", protect={restored.step})
        for step in (3, 4):
            if step > restored.step:
                second.submit(snapshot(step))
                assert second.wait() == [step]
        second.close()
        assert again.verify(4) == []
        assert names(again) == {"3", "4"} | ({"2"} if restored.step == 2 else set())
        if not done:
            return
    raise AssertionError("never got through")


_KILLED = """
import os, sys, signal
sys.path.insert(0, sys.argv[3])
from checkpoints import saver, snapshot
from monsess.checkpoint import CheckpointStore, publish
import monsess.checkpoint.orbax_io as orbax_io
import monsess.localfiles as localfiles

count = iter(range(10**6))
def maybe_die(*_):
    if next(count) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

for module, name in (
    (os, "rename"), (os, "makedirs"), (os, "rmdir"), (publish, "fsync_tree"), (publish, "_hash"), (orbax_io, "write"),
    (publish, "make_room"), (localfiles, "fsync_dir"),
):
    def wrap(function=getattr(module, name)):
        def wrapped(*args, **kwargs):
            maybe_die()
            result = function(*args, **kwargs)
            maybe_die()
            return result
        return wrapped
    setattr(module, name, wrap())
writer = saver(CheckpointStore(sys.argv[1]), attempt="dead")
writer.submit(snapshot(3))
assert writer.wait() == [3]
writer.close()
"""


def test_sigkill_during_a_local_save(tmp_path):
    support = os.path.dirname(sys.modules["checkpoints"].__file__ or "")
    for moment in (0, 2, 5, 9, 14, 25, 40):
        url = str(tmp_path / f"run{moment}")
        save(url, 1, 2)
        child = subprocess.run([sys.executable, "-c", _KILLED, url, str(moment), support], check=False)
        assert child.returncode in (0, -signal.SIGKILL)
        if moment == 0:
            assert child.returncode == -signal.SIGKILL
        restored = find_restorable(CheckpointStore(url))
        assert restored is not None
        assert restored.step in (2, 3)
        store = save(url, 4, attempt="next")
        assert not [name for name in os.listdir(url) if name.startswith(STAGING_PREFIX)]
        assert set(os.listdir(url)) <= {"1", "2", "3", "4", "run.json"}
        assert store.verify(4) == []


def test_no_staging_directory_stays(tmp_path):
    options = {"staging_dir": str(tmp_path / "staging")}
    dead = tmp_path / "staging" / "monsess-staging-dead"
    dead.mkdir(parents=True)
    (dead / ".lock").touch()
    alive = tmp_path / "staging" / "monsess-staging-alive"
    alive.mkdir()
    other = tmp_path / "staging" / "mine"
    other.mkdir()
    import fcntl

    with open(alive / ".lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        save(fresh("memory"), 1, 2, **options)
        assert sorted(os.listdir(tmp_path / "staging")) == ["mine", "monsess-staging-alive"]
        with refusing(refuse("write")):
            writer = saver(CheckpointStore(fresh("refusing")), **options)
            writer.submit(snapshot(1))
            with pytest.raises(SaveError):
                writer.wait()
            writer.close()
        assert sorted(os.listdir(tmp_path / "staging")) == ["mine", "monsess-staging-alive"]


def test_a_failed_local_save_leaves_nothing_behind(tmp_path, monkeypatch):
    store = save(str(tmp_path / "run"), 1)
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
    writer = saver(store)
    writer.submit(snapshot(2))
    with pytest.raises(SaveError, match="I/O error"):
        writer.wait()
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path / "run")) == ["1", "run.json"]


@pytest.mark.parametrize("times", [1, 10**6])
def test_a_write_that_arrives_short_is_not_committed(times, monkeypatch):
    """The store says that it took everything and keeps half of it."""
    count = iter(range(10**6))
    store = CheckpointStore(fresh("refusing"))
    upload = store._storage.upload

    def short(rel, path):
        digest = upload(rel, path)
        if "/default/d/" in rel and next(count) < times:
            file = RefusingFileSystem.store[f"/{store._storage.url.removeprefix('refusing://')}/{rel}"]
            file.truncate(digest.size // 2)
        return digest

    monkeypatch.setattr(store._storage, "upload", short)
    writer = saver(store)
    writer.submit(snapshot(1))
    if times == 1:
        assert writer.wait() == [1]
        assert store.verify(1) == []
    else:
        with pytest.raises(SaveError, match="does not hold all bytes"):
            writer.wait()
        assert store.steps() == []
    writer.close()


# ---- taken numbers and leftovers


def leftover(store: CheckpointStore, step: int, run_id: str | None = "run") -> None:
    if run_id is not None:
        put(store, f"{step}/session.json", json.dumps({"run_id": run_id}).encode())
    put(store, f"{step}/default/d/half", b"x")


def test_own_leftovers_are_removed_after_the_next_commit_and_others_stay(url):
    store = save(url, 5)
    if "://" in url:  # on a local path a step appears and disappears by a rename
        leftover(store, 7)
    leftover(store, 8, "somebody else")
    leftover(store, 9, None)
    put(store, "11_bak/x")
    put(store, "12/_CHECKPOINT_METADATA")
    put(store, "pins/99")
    if "://" not in url:
        for name, run_id in ((".staging-6-dead", "run"), (".staging-6-other", "somebody else")):
            put(store, f"{name}/session.json", json.dumps({"run_id": run_id}).encode())
        os.makedirs(f"{url}/.staging-3-dead")
    save(url, 10)
    expected = {"5", "8", "9", "10", "11_bak", "12", "pins"}
    assert names(store) - {".staging-6-other"} == expected
    assert (".staging-6-other" in names(store)) == ("://" not in url)


@pytest.mark.parametrize("run_id", ["run", "somebody else", None])
def test_a_leftover_is_removed_when_its_number_is_needed(url, run_id):
    store = save(url, 5)
    leftover(store, 10, run_id)
    save(url, 10)
    assert store.verify(10) == []
    assert "default/d/half" not in store._storage.walk("10")


def test_an_empty_directory_does_not_stop_its_number(tmp_path):
    (tmp_path / "9" / "empty").mkdir(parents=True)
    store = save(str(tmp_path), 9)
    assert store.steps() == [9]


def test_files_of_somebody_else_are_moved_and_not_lost(url):
    store = save(url, 5)
    put(store, "10/thesis.tex", b"precious")
    save(url, 10)
    assert store.verify(10) == []
    assert store._storage.read("aside-10-a1/thesis.tex") == b"precious"


@pytest.mark.parametrize("marker", ["_CHECKPOINT_METADATA", "commit_success.txt"])
def test_a_plain_orbax_step_is_refused(url, marker):
    store = save(url, 5)
    put(store, f"10/{marker}", b"theirs")
    put(store, "10/default/x", b"theirs")
    writer = saver(store)
    writer.submit(snapshot(10))
    with pytest.raises(SaveError, match=r"Step 10 .* did not write"):
        writer.wait()
    writer.close()
    assert store._storage.read(f"10/{marker}") == b"theirs"
    assert names(store) == {"5", "10"}


def test_a_step_of_another_run_is_refused(url):
    store = save(url, 5, 10, run_id="theirs")
    writer = saver(store)
    writer.submit(snapshot(10))
    with pytest.raises(SaveError, match=r"another run \(theirs\)"):
        writer.wait()
    writer.close()
    assert store.verify(10) == []


def test_a_sound_step_is_not_overwritten_and_counts(url):
    store = save(url, 10, attempt="a1")
    save(url, 10, attempt="a2", state=toy(99))
    restored = find_restorable(store)
    assert restored is not None
    assert restored.session["attempt"] == "a1"
    assert_same_bits(fit(restored, toy()), toy(10))


def test_a_damaged_step_is_moved_only_when_its_number_is_needed(url):
    store = save(url, 5, 10)
    name = next(n for n in store._storage.walk("10") if n.startswith("default/d/"))
    put(store, f"10/{name}", b"damage")
    assert latest_checkpoint(url) == 5
    save(url, 9, attempt="a2")
    assert names(store) == {"5", "9", "10"}
    save(url, 10, attempt="a2")
    assert names(store) == {"5", "9", "10", "damaged-10-a2"}
    assert store._storage.read(f"damaged-10-a2/{name}") == b"damage"
    assert store.verify(10) == []


# ---- retention


def test_keep_last(url):
    store = save(url, *range(1, 8), keep=3)
    assert store.steps() == [5, 6, 7]
    assert names(store) == {"5", "6", "7"}


def test_never_deleted(url):
    store = save(url, 1, 2, run_id="other")
    save(url, 3, 4, 5, 6)
    store.pin(4)
    store = CheckpointStore(url)
    name = next(n for n in store._storage.walk("6") if n.startswith("default/d/"))
    put(store, f"6/{name}", b"damage")
    restored = find_restorable(store)  # 6 is damaged: 5 is taken
    assert restored is not None
    writer = saver(store, keep=1, protect={restored.step})
    for step in (7, 8):
        writer.submit(snapshot(step))
        writer.wait()
    writer.close()
    assert store.steps() == [1, 2, 4, 5, 6, 8]


def test_damaged_steps_do_not_take_a_place(url):
    store = save(url, 10, 20)
    name = next(n for n in store._storage.walk("20") if n.startswith("default/d/"))
    put(store, f"20/{name}", b"damage")
    find_restorable(store)
    writer = saver(store, keep=2)
    writer.submit(snapshot(30))
    writer.wait()
    writer.close()
    assert store.steps() == [10, 20, 30]


def test_policies_combine(url):
    class Tens(Retention):
        def keep(self, records):
            return {r.step for r in records if r.step % 10 == 0}

    policy = KeepLast(2) | Tens() | KeepLast(1)
    store = CheckpointStore(url)
    writer = saver(store)
    writer._upkeep._keep = policy
    for step in (5, 10, 15, 20, 25, 30, 35):
        writer.submit(snapshot(step))
        writer.wait()
    writer.close()
    assert store.steps() == [10, 20, 30, 35]
    assert repr(KeepLast(2) | KeepLast(1)) == "KeepLast(2) | KeepLast(1)"


@pytest.mark.parametrize("n", [0, -1, 1.5, True, None])
def test_keep_last_wants_a_count(n):
    with pytest.raises(ValueError, match="KeepLast"):
        KeepLast(n)


def test_a_policy_that_keeps_nothing_does_not_lose_the_newest(url):
    class Nothing(Retention):
        def keep(self, records):
            return set()

    store = CheckpointStore(url)
    writer = saver(store)
    writer._upkeep._keep = Nothing()
    for step in (1, 2, 3):
        writer.submit(snapshot(step))
        writer.wait()
    writer.close()
    assert store.steps() == [3]


def test_failing_deletion_warns_once_and_is_done_later(caplog):
    store = CheckpointStore(fresh("refusing"))
    writer = saver(store, keep=1)
    with refusing(refuse("delete")), caplog.at_level(logging.WARNING, "monsess"):
        for step in (1, 2, 3):
            writer.submit(snapshot(step))
            assert writer.wait() == [step]
        while writer._cleaning:
            time.sleep(0.01)
    assert caplog.text.count("Could not clean up") == 1
    assert store.steps() == [1, 2, 3]
    writer.submit(snapshot(4))
    assert writer.wait() == [4]
    writer.close()
    assert names(store) == {"4"}


def test_slow_deletion_holds_no_save():
    store = CheckpointStore(fresh("refusing"))
    writer = saver(store, keep=1, save_timeout_secs=30)

    def rule(operation, path):
        if operation == "delete":
            time.sleep(0.2)

    with refusing(rule):
        begun = time.monotonic()
        for step in (1, 2, 3):
            writer.submit(snapshot(step))
            writer.wait()
        assert time.monotonic() - begun < 15
        writer.close()
    assert store.steps() == [3]


# ---- the finite check


def with_value(value: float, spot: str = "w") -> dict[str, object]:
    state = {"w": np.ones((3, 3), np.float32), "best": np.array([np.inf], np.float32), "n": np.arange(3)}
    if spot == "w":
        state["w"][1, 1] = value
    return state


def taken(step: int, state: dict[str, object], **more: object) -> Snapshot:
    """A snapshot whose table was made when the session started."""
    made = snapshot(step, state, **more)
    made.specs = snapshot(0, with_value(1.0)).specs
    return made


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_periodic_save_that_is_not_finite_is_skipped(url, value, caplog):
    store = CheckpointStore(url)
    writer = saver(store)
    with caplog.at_level(logging.WARNING, "monsess"):
        for step, bad in ((1, False), (2, True), (3, False)):
            writer.submit(taken(step, with_value(value if bad else 1.0)))
            assert writer.wait() == ([] if bad else [step])
    writer.close()
    assert writer.skipped == [(2, "w")]
    assert "'w' of step 2" in caplog.text
    assert store.steps() == [1, 3]


def test_the_same_failure_after_a_restart_ends_the_run(url):
    for attempt in ("a1", "a2"):
        writer = saver(CheckpointStore(url), attempt=attempt)
        writer.submit(taken(2, with_value(np.nan)))
        if attempt == "a1":
            assert writer.wait() == []
            writer.submit(taken(3, with_value(np.nan)))
            assert writer.wait() == []
        else:
            with pytest.raises(NonFiniteStateError, match="'w' of step 2"):
                writer.wait()
        writer.close()
    run = CheckpointStore(url).read_run()
    assert run is not None
    assert run["run_id"] == "run"


def attempt_that_skips(url: str, name: str, *steps: int, good: tuple[int, ...] = (), spot: str = "w") -> None:
    """An attempt whose states of ``steps`` are not finite and those of ``good`` are."""
    writer = saver(CheckpointStore(url), attempt=name)
    try:
        for step in sorted({*steps, *good}):
            state = with_value(1.0)
            if step in steps:
                state[spot] = np.full_like(state[spot], np.nan)
            writer.submit(taken(step, state))
            assert writer.wait() == ([step] if step in good else [])
    finally:
        writer.close()


def test_the_first_failure_of_an_attempt_is_not_forgotten_after_many(url):
    attempt_that_skips(url, "a1", *range(3, 33), good=(1, 2))
    with pytest.raises(NonFiniteStateError, match="'w' of step 3"):
        attempt_that_skips(url, "a2", *range(3, 33))


def test_the_same_failure_at_a_later_step_ends_the_run(url):
    """Saves by the clock are due at other steps in each attempt."""
    attempt_that_skips(url, "a1", 30)
    attempt_that_skips(url, "a2", 28)
    with pytest.raises(NonFiniteStateError, match="'w' of step 29"):
        attempt_that_skips(url, "a3", 29)


def test_a_commit_in_between_makes_it_another_failure(url):
    attempt_that_skips(url, "a1", 3, good=(2, 5))
    attempt_that_skips(url, "a2", 8)
    attempt_that_skips(url, "a3", 9, good=(8,))
    with pytest.raises(NonFiniteStateError, match="'w' of step 10"):
        attempt_that_skips(url, "a4", 10)


def test_after_a_commit_the_next_failure_of_the_attempt_is_the_one_that_counts(url):
    attempt_that_skips(url, "a1", 3, 8, 9, good=(2, 5))
    with pytest.raises(NonFiniteStateError, match="'w' of step 8"):
        attempt_that_skips(url, "a2", 8)


def test_another_leaf_is_another_failure(url):
    attempt_that_skips(url, "a1", 3, spot="best")
    attempt_that_skips(url, "a2", 3)
    with pytest.raises(NonFiniteStateError, match="'w' of step 4"):
        attempt_that_skips(url, "a3", 4)


def test_a_final_state_that_is_not_finite_is_an_error(url):
    writer = saver(CheckpointStore(url))
    writer.submit(taken(2, with_value(np.nan), is_final=True))
    with pytest.raises(NonFiniteStateError, match="'w' of step 2"):
        writer.wait()
    writer.close()


def test_every_floating_dtype_is_checked():
    state = {
        "b": jnp.ones(3, jnp.bfloat16),
        "f8": jnp.ones(3, jnp.float8_e4m3fn),
        "c": jnp.ones(3, jnp.complex64),
        "p": 1.0,
    }
    for name in state:
        bad = {**state, name: float("nan") if name == "p" else state[name].at[1].set(jnp.nan)}
        writer = saver(CheckpointStore(fresh("memory")))
        writer.submit(snapshot(1, bad))
        assert writer.wait() == []
        assert writer.skipped == [(1, name)]
        writer.close()


def test_the_check_can_be_turned_off_or_replaced(url):
    save(url, 1, state=with_value(np.nan), check_finite=False)
    seen = []

    def predicate(path, array):
        seen.append((path, array.dtype.name))
        return path != "w" or not np.isnan(array).any()

    writer = saver(CheckpointStore(url), check_finite=predicate)
    writer.submit(snapshot(2, with_value(np.inf)))
    assert writer.wait() == [2]
    writer.submit(snapshot(3, with_value(np.nan)))
    assert writer.wait() == []
    writer.close()
    assert seen[:3] == [("best", "float32"), ("n", "int64"), ("w", "float32")]
    assert writer.skipped == [(3, "w")]


# ---- options


@pytest.mark.parametrize(
    "wrong",
    [
        {"snapshot": "disk"},
        {"newer": "delete"},
        {"save_timeout_secs": 0},
        {"save_timeout_secs": -1},
        {"save_timeout_secs": float("nan")},
        {"save_timeout_secs": True},
        {"restore_step": -1},
        {"restore_step": 1.5},
        {"check_finite": "yes"},
    ],
)
def test_options_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CheckpointOptions(**wrong)


def test_many_leaves_make_a_bounded_number_of_objects():
    state = {f"w{i}": np.full(50, i, np.float32) for i in range(200)}
    with refusing(lambda operation, path: None) as fs:
        save(fresh("refusing"), 1, state=state)
        operations = [operation for operation, _ in fs.log]
    assert operations.count("write") <= 40
    assert operations.count("list") <= 10


def test_nothing_stays_in_the_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the machine's own is used by others meanwhile
    url = fresh("memory")
    save(url, 1)
    find_restorable(CheckpointStore(url))
    assert os.listdir(tmp_path) == []


def test_keys_are_saved_from_the_device():
    state = {"k": jax.random.key(5), "w": jnp.full((3,), -0.0)}
    url = fresh("memory")
    save(url, 1, state=state)
    restored = find_restorable(CheckpointStore(url))
    assert restored is not None
    back = fit(restored, jax.eval_shape(lambda: state))
    assert jax.random.key_data(state["k"]).tolist() == back["k"].tolist()
    assert np.signbit(back["w"]).all()


def test_filesystem_objects_are_used_by_the_thread_that_made_them():
    """`RefusingFileSystem` asserts it on every operation."""
    RefusingFileSystem.made.clear()
    store = save(fresh("refusing"), 1)
    assert find_restorable(store) is not None
    assert RefusingFileSystem.made
    assert threading.get_ident() not in RefusingFileSystem.made
