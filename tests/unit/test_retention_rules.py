"""What is never deleted, whatever the policy says and whatever the store does: rule 7 of the field cases."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import ticks
from attempts import Run, spoil
from checkpoints import fresh, snapshot, toy
from refusing import refusing

import monsess as ms
from monsess.checkpoint.restore import find_restorable
from monsess.checkpoint.store import CheckpointStore


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path):
    return str(tmp_path / "run") if request.param == "local" else fresh("refusing")


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


def test_damaged_ones_stay_through_later_attempts_until_they_are_mended(url):
    run = Run(url, ms.KeepLast(9))
    for step in (1, 2, 3, 4):
        run.save(step)
    name = next(n for n in run.store._storage.walk("4") if n.startswith("default/d/"))
    data = run.store._storage.read(f"4/{name}")
    spoil(run.store, 4)
    for attempt, (found, step) in enumerate([(3, 5), (5, 6), (6, 7)]):
        run = Run(url, ms.KeepLast(1), attempt=f"b{attempt}")
        restored = find_restorable(run.store)
        assert restored is not None
        assert restored.step == found
        run.save(step)
        run.saver.close()
        assert run.steps() == [4, step]
    run.store._storage.write(f"4/{name}", data)  # from a backup
    run = Run(url, ms.KeepLast(1), attempt="c")
    assert run.store.verify(4) == []
    run.save(8)
    assert run.steps() == [8]


def test_another_step_under_the_number_of_a_damaged_one_is_an_ordinary_one(url):
    run = Run(url, ms.KeepLast(9))
    for step in (1, 2):
        run.save(step)
    spoil(run.store, 2)
    run = Run(url, ms.KeepLast(9), attempt="a2")
    find_restorable(run.store)
    run.save(3)
    run.saver.close()
    CheckpointStore(url).set_aside(2, "a2", "damaged")
    run = Run(url, ms.KeepLast(9), attempt="a3")
    run.save(2)
    run.saver.close()
    run = Run(url, ms.KeepLast(1), attempt="a4")
    run.save(4)
    assert run.steps() == [4]


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
