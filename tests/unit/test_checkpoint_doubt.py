"""A commit record that is not valid: never whole, or damaged; and directories that hold nothing."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import ticks
from checkpoints import fresh, save, saver, snapshot
from refusing import RefusingFileSystem, refusing

import monsess as ms
from monsess.checkpoint import CheckpointStore, latest_checkpoint
from monsess.checkpoint.restore import find_restorable
from monsess.checkpoint.survey import DELETING_PREFIX, PENDING_PREFIX, Standing
from monsess.errors import DamagedCheckpointError, SaveError

INVALID = {
    "empty": lambda whole: b"",
    "torn": lambda whole: whole[: len(whole) // 3],
    "cut": lambda whole: whole[:-1],
    "flipped": lambda whole: whole[:-1] + b"?",
}


@pytest.fixture(params=["local", "refusing"])
def url(request, tmp_path) -> str:
    return str(tmp_path / "run") if request.param == "local" else fresh("refusing")


def put(store: CheckpointStore, name: str, data: bytes = b"") -> None:
    store._storage.write(name, data)


def names(store: CheckpointStore) -> set[str]:
    """What is there besides run.json."""
    return set(store._storage.list()) - {"run.json"}


def spoil(store: CheckpointStore, step: int, how: str) -> bytes:
    data = INVALID[how](store._storage.read(f"{step}/commit.json"))
    put(store, f"{step}/commit.json", data)
    return data


def run(url: str, last_step: int) -> int:
    with ms.MonitoredTrainingSession(
        ticks.init_fn, checkpoint_dir=url, save_checkpoint_steps=2, hooks=[ms.StopAtStepHook(last_step=last_step)]
    ) as session:
        start = session.global_step
        while not session.should_stop():
            session.run(ticks.one)
    return start


# ---- damage is never a fresh start


@pytest.mark.parametrize("how", INVALID)
def test_no_valid_record_left_is_damage_and_no_fresh_start(url, how):
    store = save(url, 2, 4)
    for step in (2, 4):
        spoil(store, step, how)
    for look in (lambda: find_restorable(CheckpointStore(url)), lambda: latest_checkpoint(url)):
        with pytest.raises(DamagedCheckpointError, match=r"step 4 .*step 2 "):
            look()


@pytest.mark.parametrize("how", ["empty", "cut"])
def test_a_session_does_not_start_anew_beside_damaged_steps(url, how):
    run(url, 4)
    store = CheckpointStore(url)
    held = {step: spoil(store, step, how) for step in (2, 4)}
    with pytest.raises(DamagedCheckpointError):
        run(url, 1)
    assert store._storage.read("2/commit.json") == held[2]
    assert store._storage.read("4/commit.json") == held[4]
    assert store._storage.walk("4").keys() >= {"session.json", "_CHECKPOINT_METADATA"}


@pytest.mark.parametrize("how", INVALID)
def test_the_step_before_is_taken_and_no_byte_of_the_damaged_one_is_lost(url, how):
    store = save(url, 2, 4, keep=1)
    save(url, 6, run_id="run")
    data = spoil(store, 6, how)
    before = store._storage.walk("6").keys()
    restored = find_restorable(CheckpointStore(url))
    assert restored is not None
    assert restored.step == 4
    save(url, 7, 8, keep=1, attempt="a2")
    assert names(store) == {"6", "8"}, "cleaning up leaves what carries a commit record"
    assert store._storage.read("6/commit.json") == data
    save(url, 6, attempt="a3")
    assert names(store) == {"6", "8", "damaged-6-a3"}
    assert store._storage.walk("damaged-6-a3").keys() == before
    assert store.verify(6) == []


# ---- a record that was never whole


def die_while_committing(url: str, step: int, kept: float) -> None:
    """A save that ends for good in the middle of writing its commit.json, as a kill does."""
    root = "/" + url.removeprefix("refusing://")

    def rule(operation: str, path: str) -> None:
        if path == f"{root}/{step}/commit.json" and operation == "write":
            half = f'{{"algorithm":"sha256","attempt":"dead","step":{step}}}'.encode()
            with RefusingFileSystem.store_open(path) as file:
                file.write(half[: int(len(half) * kept)])
            raise PermissionError("dead")

    with refusing(rule):
        writer = saver(CheckpointStore(url), attempt="dead")
        writer.submit(snapshot(step))
        with pytest.raises(SaveError, match="dead"):
            writer.wait()
        writer.close()


@pytest.mark.parametrize("kept", [0.0, 0.5, 1.0])
def test_killed_in_the_very_first_commit_the_run_starts_again_by_itself(kept, caplog):
    url = fresh("refusing")
    die_while_committing(url, 2, kept)
    store = CheckpointStore(url)
    assert store.steps() == []
    with caplog.at_level(logging.WARNING, "monsess"):
        assert find_restorable(store) is None
    assert [r.getMessage() for r in caplog.records if " 2" in r.getMessage()]
    assert latest_checkpoint(url) is None
    save(url, 2, attempt="a2")
    assert store.verify(2) == []
    assert names(store) == {"2"}


def test_what_a_kill_in_a_commit_left_goes_with_the_next_commit():
    url = fresh("refusing")
    die_while_committing(url, 2, 0.5)
    save(url, 3, attempt="a2")
    assert names(CheckpointStore(url)) == {"3"}


@pytest.mark.parametrize("whose", ["another run's", "remembered", "without a readable session.json"])
def test_what_may_be_more_than_a_cut_off_save_is_never_deleted(whose):
    url = fresh("refusing")
    die_while_committing(url, 2, 0.5)
    store = CheckpointStore(url)
    if whose == "remembered":  # it was committed once, and damaged before its mark was gone
        whole = save(fresh("refusing"), 2)
        (record,) = whole._survey().committed.values()
        store._remember("run", [record])
    elif whose == "without a readable session.json":
        put(store, "2/session.json", b"{")
    torn = store._storage.read("2/commit.json")
    run_id = "other" if whose == "another run's" else "run"
    save(url, 3, run_id=run_id, attempt="a2")
    assert store._storage.read("2/commit.json") == torn
    save(url, 2, run_id=run_id, attempt="a2")
    assert store._storage.read("damaged-2-a2/commit.json") == torn


def test_killed_in_a_later_commit_the_step_before_is_taken():
    url = fresh("refusing")
    save(url, 2)
    die_while_committing(url, 4, 0.5)
    restored = find_restorable(CheckpointStore(url), strict=True)
    assert restored is not None
    assert restored.step == 2, "strict mode does not complain of what was never committed"


def test_a_record_that_is_being_written_is_no_damage():
    """Readers look while commit.json arrives bit by bit, in whatever order they look."""
    url = fresh("refusing")
    save(url, 2)
    store = CheckpointStore(url)
    store._storage.delete("run.json")  # which remembers no step that is only being written
    root = "/" + url.removeprefix("refusing://")
    whole = store._storage.read("2/commit.json")
    spoil(store, 2, "torn")
    put(store, f"{PENDING_PREFIX}2")
    assert store.steps() == []
    assert store._survey().those(Standing.BROKEN) == []
    # The reader has listed before the writer began, reads while it writes, and looks again after it is done.
    store._storage.delete(f"{PENDING_PREFIX}2")
    reads = []

    def rule(operation: str, path: str) -> None:
        if operation == "read" and path == f"{root}/2/commit.json":
            reads.append(path)
            if len(reads) == 2:
                with RefusingFileSystem.store_open(path) as file:
                    file.write(whole)

    with refusing(rule):
        assert store.steps() == [2]
    assert len(reads) == 2


def test_marks_of_saves_and_deletions_do_not_stay(url):
    store = save(url, 1, 2, 3, keep=1)
    assert names(store) == {"3"}
    for step in (3, 4):  # killed after the commit, and before the first file
        put(store, f"{PENDING_PREFIX}{step}")
    save(url, 5, attempt="a2")
    assert names(store) == {"3", "5"}


def test_a_store_that_takes_objects_whole_gets_no_marks(tmp_path):
    seen = []
    store = CheckpointStore(tmp_path / "run")
    real = store._storage.write
    store._storage.write = lambda rel, data: (seen.append(rel), real(rel, data))  # type: ignore[method-assign]
    writer = saver(store, keep=1)
    for step in (1, 2):
        writer.submit(snapshot(step))
        writer.wait()
    writer.close()
    assert not [name for name in seen if name.startswith(PENDING_PREFIX)]
    assert store.steps() == [2]


@pytest.mark.parametrize("protocol", ["local", "refusing"])
def test_a_record_that_is_gone_before_anybody_remembered_it(protocol, tmp_path, caplog):
    """On a local path no save and no deletion leaves that; elsewhere an upload that was cut off looks like it."""
    url = str(tmp_path) if protocol == "local" else fresh("refusing")
    store = save(url, 2)
    for name in ("run.json", "2/commit.json"):
        store._storage.delete(name)
    if protocol == "refusing":
        assert find_restorable(CheckpointStore(url)) is None
        save(url, 3, attempt="a2")
        assert names(store) == {"3"}
        return
    with pytest.raises(DamagedCheckpointError, match="step 2"):
        run(url, 3)
    before = store._storage.walk("2")
    save(url, 3, attempt="a2")
    assert store._storage.walk("2") == before
    save(url, 2, attempt="a3")
    assert store._storage.walk("damaged-2-a3") == before


# ---- directories that hold nothing


def test_an_empty_directory_of_somebody_is_ignored_named_once_and_left(tmp_path, caplog):
    store = save(str(tmp_path), 5)
    (tmp_path / "9").mkdir()
    with caplog.at_level(logging.WARNING, "monsess"):
        assert find_restorable(store) is not None
    assert [r.getMessage().count(" 9") for r in caplog.records] == [1]
    save(str(tmp_path), 6, 7)
    assert (tmp_path / "9").is_dir()
    save(str(tmp_path), 9)
    assert store.verify(9) == []
    assert names(store) == {"5", "6", "7", "9"}


def test_empty_directories_of_ours_are_removed(tmp_path):
    store = save(str(tmp_path), 5)
    (tmp_path / "7" / "default" / "d").mkdir(parents=True)
    (tmp_path / "8").mkdir()
    put(store, f"{PENDING_PREFIX}8")
    (tmp_path / ".staging-9-dead" / "default").mkdir(parents=True)
    (tmp_path / ".staging-9-dead" / "default" / "half").touch()
    (tmp_path / f"{DELETING_PREFIX}3" / "default").mkdir(parents=True)
    (tmp_path / f"{DELETING_PREFIX}3" / "default" / "half").touch()
    save(str(tmp_path), 6)
    assert names(store) == {"5", "6"}


def test_a_local_step_disappears_at_once(tmp_path, monkeypatch):
    """A deletion that is cut off anywhere leaves no directory with a step's name."""
    store = save(str(tmp_path), 5, 6)
    monkeypatch.setattr(store._storage, "delete_tree", lambda *_, **__: None)
    store.delete(5)
    monkeypatch.undo()
    assert names(store) == {f"{DELETING_PREFIX}5", "6"}
    save(str(tmp_path), 7)
    assert names(store) == {"6", "7"}


def test_a_deletion_can_be_repeated(tmp_path):
    store = save(str(tmp_path), 5, 6)
    shutil.copytree(tmp_path / "5", tmp_path / f"{DELETING_PREFIX}5")
    store.delete(5)
    assert names(store) == {"6"}


def test_other_lineages_leftovers_keep_their_marks(url):
    store = save(url, 5)
    put(store, "7/session.json", json.dumps({"run_id": "somebody else"}).encode())
    put(store, "7/default/half", b"x")
    put(store, f"{PENDING_PREFIX}7")
    save(url, 6)
    assert names(store) == {"5", "6", "7", f"{PENDING_PREFIX}7"}
    assert Path(store._storage.local_path or "/").exists()
