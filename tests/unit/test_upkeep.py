"""Deletion comes after a newer commit, in a thread of its own, and never gets into anybody's way."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
import ticks
from attempts import Run
from checkpoints import fresh, snapshot
from names import shown
from refusing import refuse, refusing

import monsess as ms
from monsess.checkpoint.commit import CommitRecord
from monsess.checkpoint.options import CheckpointOptions
from monsess.checkpoint.saver import Saver
from monsess.checkpoint.store import CheckpointStore
from monsess.checkpoint.survey import Survey


def test_nothing_goes_before_a_newer_one_is_committed():
    url = fresh("refusing")
    run = Run(url, ms.KeepLast(3))
    for step in (1, 2, 3):
        run.save(step)
    run = Run(url, ms.KeepLast(1), attempt="a2")
    with refusing(lambda op, path: refuse("write")(op, path) if path.endswith("/4/commit.json") else None):
        run.saver.submit(snapshot(4))
        with pytest.raises(ms.SaveError):
            run.saver.wait()
    assert run.steps() == [1, 2, 3]
    with refusing(lambda operation, path: None) as filesystem:
        run.save(5)
        committed = filesystem.log.index(("write", f"/{url.removeprefix('refusing://')}/5/commit.json"))
        deleted = [
            i for i, (operation, path) in enumerate(filesystem.log) if operation == "delete" and "/4/" not in path
        ]
        assert deleted
        assert min(deleted) > committed
    assert run.steps() == [5]


@pytest.mark.parametrize("answer", [RuntimeError("no idea"), None, 5, ["3"]], ids=shown)
def test_a_policy_that_fails_deletes_nothing_and_is_told_of_once(answer, caplog):
    class Fails(ms.Retention):
        def keep(self, records):
            if isinstance(answer, Exception):
                raise answer
            return answer

    url = fresh("refusing")
    run = Run(url, Fails())
    for step in (1, 2, 3):
        run.save(step)
    assert run.steps() == [1, 2, 3]
    assert [record.levelname for record in caplog.records if "Could not clean up" in record.getMessage()] == ["WARNING"]


@pytest.mark.parametrize("how", ["fails", "crawls", "blocks"])
def test_training_does_not_notice_a_deletion_that(how, caplog):
    release = threading.Event()

    def rule(operation: str, path: str) -> None:
        if operation == "delete" and "owner.json" not in path:
            if how == "fails":
                raise PermissionError("403 not you")
            release.wait(0.05 if how == "crawls" else 300)

    url = fresh("refusing")
    with refusing(rule):
        with ms.MonitoredTrainingSession(
            ticks.init_fn,
            checkpoint_dir=url,
            save_checkpoint_steps=5,
            keep=ms.KeepLast(1),
            hooks=[ms.StopAtStepHook(last_step=30)],
        ) as session:
            try:
                while not session.should_stop():
                    session.run(ticks.one)
                ticks.wait_for_saves(session, 6)  # all the time not one deletion came to its end
            finally:
                if how != "crawls":
                    release.set()
    assert session.stop_reason == ms.StopReason.LAST_STEP
    assert CheckpointStore(url).steps()[-1] == 30
    failed = [line for line in caplog.messages if "Could not clean up" in line]
    assert len(failed) == (how == "fails"), failed


def hurry(run: Run) -> None:
    """The end of a run waits for a second at most from here on; a save on a busy machine may take longer."""
    run.saver._options = dataclasses.replace(run.saver._options, save_timeout_secs=1)


def test_a_deletion_that_blocks_does_not_hold_the_end_beyond_the_limit(caplog):
    url = fresh("refusing")
    run = Run(url, ms.KeepLast(1))
    run.save(1)
    release = threading.Event()
    with refusing(lambda operation, path: release.wait(300) if operation == "delete" else None):
        run.saver.submit(snapshot(2))
        run.saver.wait()
        hurry(run)
        begun = time.monotonic()
        run.saver.close()
        assert time.monotonic() - begun < 30
        assert "did not end in time; a later run goes on with it" in caplog.text
        release.set()
    ticks.wait_until(lambda: not run.threads())
    run = Run(url, ms.KeepLast(1), attempt="a2")
    run.save(3)
    assert run.steps() == [3]


def test_nothing_is_deleted_and_no_thread_is_left_after_the_end():
    url = fresh("refusing")
    first = Run(url, ms.KeepLast(99))
    for step in range(1, 31):
        first.save(step)
    first.saver.close()
    run = Run(url, ms.KeepLast(1), attempt="a2")
    with refusing(lambda operation, path: time.sleep(0.03) if operation == "delete" else None):
        run.saver.submit(snapshot(31))
        run.saver.wait()
        hurry(run)
        run.saver.close()
        ticks.wait_until(lambda: not run.threads())
        left = run.steps()
    assert left[-1] == 31
    assert 1 < len(left) < 31
    run = Run(url, ms.KeepLast(1), attempt="a3")
    run.save(32)
    run.saver.close()
    assert run.steps() == [32]
    ticks.wait_until(lambda: not run.threads())


def test_a_number_that_is_needed_while_its_leftover_is_deleted_is_saved_afterwards():
    """The thread that cleans up is half through a leftover of step 9 when training gets there."""
    url = fresh("refusing")
    first = Run(url, ms.KeepLast(99))
    with refusing(lambda op, path: refuse("write")(op, path) if path.endswith("/9/commit.json") else None):
        first.saver.submit(snapshot(9))
        with pytest.raises(ms.SaveError):
            first.saver.wait()
    run = Run(url, ms.KeepLast(99), attempt="a2")
    deleting, go_on = threading.Event(), threading.Event()

    def rule(operation: str, path: str) -> None:
        if operation == "delete" and "/9/" in path:
            deleting.set()
            go_on.wait(30)

    with refusing(rule) as filesystem:
        run.saver.submit(snapshot(8))
        assert deleting.wait(30)
        run.saver.submit(snapshot(9))
        time.sleep(0.2)
        assert not [path for operation, path in filesystem.log if operation == "write" and "/9/" in path]
        go_on.set()
        run.saver.wait()
        ticks.wait_until(lambda: not run.saver._cleaning)
    assert run.steps() == [8, 9]
    assert run.store.verify(9) == []


def test_who_lost_the_directory_deletes_nothing_any_more():
    """Such as a process that was frozen while it deleted, and comes back when another one has taken over."""
    url = fresh("refusing")
    run = Run(url, ms.KeepLast(99))
    for step in range(1, 7):
        run.save(step)
    lost = threading.Event()

    def check() -> None:
        if lost.is_set():
            raise ms.DirectoryInUseError("taken over")

    store = CheckpointStore(url)
    saver = Saver(store, CheckpointOptions(), ms.KeepLast(1), attempt="a2", run_id="run", started=0.0, check=check)
    with refusing(lambda operation, path: lost.set() if operation == "delete" and "/2/" in path else None):
        saver.submit(snapshot(7))
        saver.wait()
        ticks.wait_until(lambda: not saver._cleaning)
    assert store.steps() == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("protocol", ["local", "refusing"])
def test_who_lost_the_directory_touches_nothing_of_its_successor(protocol, tmp_path):
    """It is lost right after a commit; the successor, of the same lineage, is just writing step 12."""
    url = str(tmp_path) if protocol == "local" else fresh(protocol)
    store = CheckpointStore(url)
    lost = threading.Event()

    def check() -> None:
        if lost.is_set():
            raise ms.DirectoryInUseError("taken over")

    saver = Saver(store, CheckpointOptions(), ms.KeepLast(5), attempt="a", run_id="run", check=check)
    after = saver._upkeep.after
    folder = ".staging-12-b" if protocol == "local" else "12"

    def lose(record: CommitRecord) -> None:
        lost.set()
        store._storage.write(f"{folder}/session.json", b'{"run_id": "run"}')
        store._storage.write(f"{folder}/default/half", b"x")
        store._storage.write(".pending-12", b"")
        store.write_run({"run_id": "run", "steps": {}})
        after(record)

    saver._upkeep.after = lose  # type: ignore[method-assign]
    saver.submit(snapshot(10))
    saver.wait()
    saver.close()
    assert set(store._storage.walk(folder)) == {"session.json", "default/half"}
    assert ".pending-12" in store._storage.list()
    assert (store.read_run() or {})["steps"] == {}


def test_a_leftover_that_was_committed_meanwhile_stays():
    url = fresh("refusing")
    store = CheckpointStore(url)
    store._storage.write("12/session.json", b'{"run_id": "run"}')
    one, other = Run(url, ms.KeepLast(5)), Run(url, ms.KeepLast(5), attempt="b")
    judged = one.saver._upkeep._leftovers

    def leftovers(survey: Survey) -> object:
        work = judged(survey)
        other.save(12)
        return work

    one.saver._upkeep._leftovers = leftovers  # type: ignore[method-assign, assignment]
    one.save(10)
    assert store.verify(12) == []


def test_a_leftover_that_cannot_be_deleted_now_is_deleted_after_the_next_commit():
    url = fresh("refusing")
    store = CheckpointStore(url)
    store._storage.write(".pending-12", b"")
    store._storage.write("12/session.json", b"")  # killed while it wrote the first file: the mark says whose it is
    run = Run(url, ms.KeepLast(5))
    with refusing(lambda op, path: refuse("write")(op, path) if path.endswith(".pending-12") else None):
        run.save(10)
    assert {".pending-12", "12"} <= store._storage.list().keys()
    run.save(11)
    assert store._storage.list().keys() == {"10", "11", "run.json"}


def test_folders_that_only_look_like_those_of_monsess_stay(tmp_path):
    for name in (".staging-data", ".staging-x-1", ".deleting-all", ".deleting-"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    for name in (".staging-9-dead", ".deleting-7"):
        (tmp_path / name).mkdir()
    Run(str(tmp_path), ms.KeepLast(5)).save(1)
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {".staging-data", ".staging-x-1", ".deleting-all", ".deleting-", "1", "run.json"}
    assert (tmp_path / ".staging-data" / "precious").exists()
    assert (tmp_path / ".deleting-all" / "precious").exists()
