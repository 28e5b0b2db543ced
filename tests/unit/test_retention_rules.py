"""What is never deleted, whatever the policy says and whatever the store does: rule 7 of the field cases."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import ticks
from checkpoints import fresh, snapshot, toy
from refusing import refuse, refusing

import monsess as ms
from monsess.checkpoint.options import CheckpointOptions
from monsess.checkpoint.restore import find_restorable
from monsess.checkpoint.saver import Saver
from monsess.checkpoint.store import CheckpointStore


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path):
    return str(tmp_path / "run") if request.param == "local" else fresh("refusing")


class Run:
    """One attempt: saves steps in the background, one after the other, with what retention ranks them by."""

    def __init__(self, url: str, keep: ms.Retention, *, run_id: str = "run", attempt: str = "a1", **more: object):
        self.store = CheckpointStore(url)
        self.protect: set[int] = set()
        self.saver = Saver(
            self.store,
            CheckpointOptions(**more),  # type: ignore[arg-type]
            keep,
            attempt=attempt,
            run_id=run_id,
            protect=self.protect,
            started=0.0,
        )

    def save(self, step: int, loss: float | None = None, state: object = None) -> None:
        metrics = {} if loss is None else {"loss": loss}
        self.saver.submit(snapshot(step, state, metrics=metrics))
        self.saver.wait()
        ticks.wait_until(lambda: not self.saver._cleaning)

    def steps(self) -> list[int]:
        return CheckpointStore(self.store.url).steps()


def spoil(store: CheckpointStore, step: int) -> None:
    """Change a byte of the data of ``step``."""
    name = next(n for n in store._storage.walk(str(step)) if n.startswith("default/d/"))
    store._storage.write(f"{step}/{name}", b"damage")


class Nothing(ms.Retention):
    """Keeps nothing."""

    def keep(self, records):
        return ()


# ---- the policies, on a store


def test_the_newest_is_the_highest_number(url):
    run = Run(url, ms.KeepLast(2))
    for step in (8, 9, 10, 99, 100):
        run.save(step)
    assert run.steps() == [99, 100]


def test_the_best_outlives_restarts(url):
    policy = ms.KeepLast(1) | ms.KeepBest(1, "loss")
    for attempt, steps in enumerate([{1: 5.0, 2: 0.5, 3: 3.0}, {4: 4.0}, {5: 0.7, 6: 6.0}]):
        run = Run(url, policy, attempt=f"a{attempt}")
        for step, loss in steps.items():
            run.save(step, loss)
        assert run.steps() == [2, max(steps)]
    run.save(7, 0.1)
    run.save(8, 0.2)
    assert run.steps() == [7, 8]


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_the_best_is_known_without_the_index(url, index):
    run = Run(url, ms.KeepLast(2) | ms.KeepBest(1, "loss"))
    for step, loss in {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}.items():
        run.save(step, loss)
    if index == "lost":
        run.store._storage.delete("run.json")
    run = Run(url, ms.KeepLast(1) | ms.KeepBest(2, "loss"), attempt="a2")
    run.save(5, 5.0)
    assert run.steps() == [1, 3, 5]


@pytest.mark.parametrize("loss", [None, np.nan, np.inf, -np.inf, 1.0])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_value_that_is_no_better_displaces_nothing(url, mode, loss):
    run = Run(url, ms.KeepBest(1, "loss", mode=mode))
    run.save(1, 1.0)
    for step in (2, 3, 4):
        run.save(step, loss)
    assert run.steps() == [1, 4]


def test_a_state_that_is_not_finite_displaces_nothing(url):
    run = Run(url, ms.KeepLast(2) | ms.KeepBest(1, "loss"))
    for step in (1, 2, 3):
        run.save(step, float(step))
    for step in (4, 5, 6):
        state = toy(step)
        state["params"]["w"][1, 1] = np.nan
        run.save(step, 0.0, state)
    assert run.steps() == [1, 2, 3]
    run.save(7, 7.0)
    assert run.steps() == [1, 3, 7]


# ---- whatever the policy says


def test_others_lineages_neither_count_nor_go(url):
    other = Run(url, ms.KeepLast(9), run_id="other")
    for step in (1, 3, 50):
        other.save(step, -1.0)
    run = Run(url, ms.KeepLast(2) | ms.KeepBest(1, "loss"))
    for step in (10, 20, 30, 40):
        run.save(step, float(step))
    assert run.steps() == [1, 3, 10, 30, 40, 50]


def test_what_the_index_says_is_looked_at_before_it_is_believed(url):
    other = Run(url, ms.KeepLast(9), run_id="other")
    for step in (1, 2):
        other.save(step)
    rows = other.store.read_run()["steps"]  # type: ignore[index]
    for row in rows.values():
        row["run_id"] = "run"
    other.store.write_run({"run_id": "run", "steps": rows})
    run = Run(url, Nothing())
    run.save(3)
    run.save(4)
    assert run.steps() == [1, 2, 4]


def test_pinned_ones_stay_also_if_they_are_pinned_while_others_go():
    url = fresh("refusing")
    run = Run(url, ms.KeepLast(9))
    for step in range(1, 7):
        run.save(step)
    run.store.pin(2)
    deleting, go_on = threading.Event(), threading.Event()

    def rule(operation: str, path: str) -> None:
        if operation == "delete" and "/1/" in path:
            deleting.set()
            go_on.wait(30)

    run = Run(url, ms.KeepLast(1), attempt="a2")
    with refusing(rule):
        run.saver.submit(snapshot(7))
        assert deleting.wait(30)
        CheckpointStore(url).pin(4)
        go_on.set()
        run.saver.wait()
        ticks.wait_until(lambda: not run.saver._cleaning)
    assert run.steps() == [2, 4, 7]
    run.store.unpin(2)
    run.save(8)
    assert run.steps() == [4, 8]


def test_what_is_restored_while_others_go_stays():
    """A recovery may choose a step while the thread of the saver is half through its list."""
    url = fresh("refusing")
    run = Run(url, ms.KeepLast(9))
    for step in range(1, 7):
        run.save(step)
    run = Run(url, ms.KeepLast(1), attempt="a2")

    def rule(operation: str, path: str) -> None:
        if operation == "delete" and "/2/" in path:
            run.protect.add(5)

    with refusing(rule):
        run.save(7)
    assert run.steps() == [5, 7]


def test_damaged_ones_stay_and_do_not_count(url):
    run = Run(url, ms.KeepLast(9))
    for step in (1, 2, 3, 4):
        run.save(step, 4.0 - step)
    spoil(run.store, 4)
    run = Run(url, ms.KeepLast(1) | ms.KeepBest(1, "loss"), attempt="a2")
    restored = find_restorable(run.store)
    assert restored is not None
    assert restored.step == 3
    run.save(5, 9.0)
    run.save(6, 9.0)
    assert run.steps() == [3, 4, 6]


# ---- only after a commit, and without getting into anybody's way


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


@pytest.mark.parametrize("answer", [RuntimeError("no idea"), None, 5, ["3"]], ids=repr)
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
        if operation == "delete":
            if how == "fails":
                raise PermissionError("403 not you")
            release.wait(0.05 if how == "crawls" else 60)

    url = fresh("refusing")
    try:
        with refusing(rule):
            with ms.MonitoredTrainingSession(
                ticks.init_fn,
                checkpoint_dir=url,
                save_checkpoint_steps=5,
                keep=ms.KeepLast(1),
                hooks=[ms.StopAtStepHook(last_step=30)],
            ) as session:
                begun = time.monotonic()
                while not session.should_stop():
                    session.run(ticks.one)
                assert session.stop_reason == ms.StopReason.LAST_STEP
            ended = time.monotonic() - begun
    finally:
        release.set()
    assert session.summary()["saves"] == 6
    assert CheckpointStore(url).steps()[-1] == 30
    assert ended < 50, "a deletion that blocked held the end of training"
    warned = [line for line in caplog.messages if "clean-up" in line or "clean up" in line or "is slow" in line]
    assert len(warned) == {"fails": 1, "crawls": 0, "blocks": 1}[how], warned


# ---- through a session


@ms.train_step
def lossy(state):
    """Step n; the loss is lowest at steps 3 and 7, and not a number at step 5."""
    count = state["count"] + 1.0
    loss = abs((count - 3.0) * (count - 7.0)) + (0.0 * count) / (count - 5.0)
    return {"count": count}, {"loss": loss, "more": {"count": count}}


def test_a_session_stores_what_its_policy_ranks_by(tmp_path):
    policy = ms.KeepLast(1) | ms.KeepBest(2, "loss") | ms.KeepBest(1, "more/count", mode="min")
    for last_step in (4, 8, 12):
        with ms.MonitoredTrainingSession(
            ticks.init_fn,
            checkpoint_dir=str(tmp_path),
            save_checkpoint_steps=1,
            keep=policy,
            hooks=[ms.StopAtStepHook(last_step=last_step)],
        ) as session:
            while not session.should_stop():
                session.run(lossy)
    assert CheckpointStore(tmp_path).steps() == [1, 3, 7, 8, 12]  # 8 is the one that was restored
