"""Evaluator: checkpoints of a training job evaluated beside it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import ticks
import toy
from conforms import conforms

import monsess as ms
from monsess.filesystems import FsspecFiles
from monsess.testing import FakeClock


@ms.eval_step(reduce={"rows": "sum"})
def away(state, batch, factor=1.0):
    """How far a batch is away from the count."""
    return {"away": (batch - state["count"]).mean() * factor, "rows": jnp.int32(batch.shape[0])}


@ms.eval_step
def count(state):
    return {"count": state["count"]}


NINES = [np.full(8, 9, np.float32)] * 3


def train(url, *steps, **more):
    """Checkpoints of these steps."""
    for step in steps:
        hooks = [ms.StopAtStepHook(last_step=step)]
        with ms.MonitoredTrainingSession(
            ticks.init_fn, checkpoint_dir=url, hooks=hooks, keep=ms.KeepLast(100), save_checkpoint_secs=None
        ) as sess:
            while not sess.should_stop():
                sess.run(ticks.one)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with steps 2, 4 and 6; no test changes it."""
    url = tmp_path_factory.mktemp("trained")
    train(url, 2, 4, 6)
    return url


# ---- once


@conforms("EV-006", "EV-007")
def test_one_evaluation_with_a_hook_that_ends_it(trained, lines):
    final = ms.FinalOpsHook(lambda state, outputs: state["count"] * 100)
    hooks = [ms.StopAfterNEvalsHook(5), final, ms.LoggingTensorHook(["away"], every_n_iter=2)]
    data = ms.repeat([np.full(8, number, np.float32) for number in range(10)])
    result = ms.Evaluator(away, data, ticks.init_fn, hooks=hooks).evaluate_once(trained)
    assert (result.step, result.batches) == (6, 5)
    assert result.metrics == {"away": 2 - 6.0, "rows": 40.0}
    assert final.final_ops_values == 600
    said = lines()
    assert [line for line in said if line.startswith("Evaluation [")] == [f"Evaluation [{n}/5]" for n in range(1, 6)]
    assert [line.partition(" (")[0] for line in said if line.startswith("away = ")] == [
        f"away = {n - 1 - 6}, step = {n}" for n in (1, 2, 4)
    ]
    assert any(line.startswith("Evaluation at step 6: eval/away = -4, eval/rows = 40 (5 batches, ") for line in said)


@conforms("EV-008")
def test_without_data_the_restored_state_alone_is_evaluated(trained):
    result = ms.Evaluator(count, init_fn=ticks.init_fn).evaluate_once(trained)
    assert (result.step, result.metrics, result.batches) == (6, {"count": 6.0}, 1)
    assert ms.Evaluator(count).evaluate_once(trained, 4).metrics == {"count": 4.0}  # plain dicts need no init_fn


@conforms("EV-012")
def test_a_hook_feeds_every_run(trained):
    fed = []

    def feed():
        fed.append(len(fed))
        return {"batch": np.full(8, 9, np.float32), "factor": float(len(fed))}

    hooks = [ms.FeedFnHook(feed), ms.StopAfterNEvalsHook(3)]
    result = ms.Evaluator(away, init_fn=ticks.init_fn, hooks=hooks).evaluate_once(trained)
    assert fed == [0, 1, 2]
    assert result.metrics["away"] == pytest.approx(3 * 2)


def test_the_training_is_not_disturbed(tmp_path):
    """The directory belongs to a run that goes on."""
    with ms.MonitoredTrainingSession(ticks.init_fn, checkpoint_dir=tmp_path, save_checkpoint_steps=1) as sess:
        sess.run(ticks.one)
        ticks.wait_for_saves(sess, 1)
        result = ms.Evaluator(count, init_fn=ticks.init_fn).evaluate_once(tmp_path)
        assert (result.step, result.metrics) == (1, {"count": 1.0})
        sess.run(ticks.one)
    assert ms.CheckpointStore(tmp_path).steps() == [1, 2]


def test_a_state_with_keys_and_every_row_once(tmp_path):
    with ms.MonitoredTrainingSession(toy.init_fn, data=toy.batches(3), checkpoint_dir=tmp_path) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
        w = np.asarray(sess.state["w"])
    data = [toy.batch(100), {name: leaf[:4] for name, leaf in toy.batch(101).items()}]
    result = ms.Evaluator(toy.evaluate, data, toy.init_fn).evaluate_once(tmp_path)
    x, y = (np.concatenate([batch[name] for batch in data]) for name in ("x", "y"))
    assert result.metrics == {"loss": pytest.approx(np.mean((x @ w - y) ** 2), rel=1e-5)}


def test_nothing_there(tmp_path, trained):
    with pytest.raises(ms.StorageError, match="There is no committed checkpoint in"):
        ms.Evaluator(count).evaluate_once(tmp_path)
    with pytest.raises(ms.StorageError, match="Step 5 is not a committed checkpoint"):
        ms.Evaluator(count).evaluate_once(trained, 5)
    with pytest.raises(ms.StateMismatchError):
        ms.Evaluator(count, init_fn=toy.init_fn).evaluate_once(trained)


# ---- again and again


@conforms("EV-009")
def test_so_many_evaluations(trained):
    results = []
    evaluator = ms.Evaluator(away, NINES, ticks.init_fn, num_batches=2)
    last = evaluator.evaluate_repeatedly(
        trained, newest_only=False, max_number_of_evaluations=2, note=False, on_result=results.append
    )
    assert [(one.step, one.metrics, one.batches) for one in results] == [
        (2, {"away": 7.0, "rows": 16.0}, 2),
        (4, {"away": 5.0, "rows": 16.0}, 2),
    ]
    assert last == results[-1]


@conforms("EV-010")
def test_no_checkpoint_in_time(tmp_path):
    with FakeClock() as clock:
        assert ms.Evaluator(count).evaluate_repeatedly(tmp_path, timeout=5) is None
        assert clock.monotonic() == pytest.approx(5)


@conforms("EV-011")
def test_one_evaluation_and_then_the_function_decides(trained):
    asked = []
    with FakeClock():
        result = ms.Evaluator(count, init_fn=ticks.init_fn).evaluate_repeatedly(
            trained, timeout=5, timeout_fn=lambda: asked.append(0) or len(asked) == 4, note=False
        )
    assert result is not None
    assert (result.step, len(asked)) == (6, 4)


@conforms("EV-013", instead="Results are written by `log_dir=`, whole and in the store before it returns.")
def test_results_are_noted_and_written_down(tmp_path):
    train(tmp_path / "run", 2, 4)
    evaluator = ms.Evaluator(count, init_fn=ticks.init_fn, finish=lambda found: {"half": found["count"] / 2}, name="b")
    evaluator.evaluate_repeatedly(tmp_path / "run", timeout=0, newest_only=False, log_dir=tmp_path / "log")
    store = ms.CheckpointStore(tmp_path / "run")
    assert [store.metrics(step) for step in (2, 4)] == [{"eval/b/half": 1.0}, {"eval/b/half": 2.0}]
    curve = ms.read_metrics(tmp_path / "log").curves["eval/b/half"]
    assert [(point.step, point.value) for point in curve] == [(2, 1.0), (4, 2.0)]


def test_it_ends_with_a_step_or_with_an_answer(trained):
    evaluator = ms.Evaluator(count, init_fn=ticks.init_fn)
    result = evaluator.evaluate_repeatedly(trained, newest_only=False, until_step=3, note=False)
    assert result is not None
    assert result.step == 4
    result = evaluator.evaluate_repeatedly(trained, newest_only=False, note=False, on_result=lambda one: one.step == 2)
    assert result is not None
    assert result.step == 2


def test_the_step_is_compiled_once_for_all_checkpoints(trained):
    traced = []

    @ms.eval_step
    def counts(state):
        traced.append(state)
        return {"count": state["count"]}

    evaluator = ms.Evaluator(counts, init_fn=ticks.init_fn)
    evaluator.evaluate_repeatedly(trained, timeout=0, newest_only=False, note=False)
    once = len(traced)
    evaluator.evaluate_repeatedly(trained, timeout=0, newest_only=False, note=False)
    assert len(traced) == once
    assert once <= 2


def test_damaged_and_deleted_checkpoints_are_left_out(tmp_path, lines):
    train(tmp_path, 2, 4, 6)
    (damaged,) = [path for path in (tmp_path / "4" / "default").rglob("d/*") if path.is_file()][:1]
    damaged.write_bytes(b"damage")
    store = ms.CheckpointStore(tmp_path)
    found = []

    def delete_the_last(result):
        found.append(result.step)
        if result.step == 2:
            store.delete(6)

    evaluator = ms.Evaluator(count, init_fn=ticks.init_fn)
    seen = iter([[2, 4, 6], [2, 4, 6], [2, 4, 6]])
    with pytest.MonkeyPatch.context() as patch:
        real = ms.CheckpointStore.steps
        patch.setattr(ms.CheckpointStore, "steps", lambda one: next(seen, None) or real(one))
        evaluator.evaluate_repeatedly(tmp_path, timeout=0, newest_only=False, note=False, on_result=delete_the_last)
    assert found == [2]
    said = lines()
    assert any(line.startswith("Not evaluated: No sound checkpoint could be restored from ") for line in said)
    assert any(line.startswith("Step 6 in ") and "was deleted before it could be evaluated" in line for line in said)


def test_a_directory_that_cannot_be_written_gets_no_note(trained, monkeypatch, lines):
    def refuse(self, step, metrics):
        raise ms.StorageError("Could not write.")

    monkeypatch.setattr(ms.CheckpointStore, "note_metrics", refuse)
    assert ms.Evaluator(count, init_fn=ticks.init_fn).evaluate_repeatedly(trained, timeout=0) is not None
    assert "The results of step 6 were not noted: Could not write." in lines()


def test_a_store_that_is_away_for_a_while_is_waited_for(monkeypatch, lines):
    url = "memory://evaluator/away"
    train(url, 2)
    failures = [OSError("the store is away")] * 9
    open_read = FsspecFiles.open_read

    def fails(self, rel):
        if rel == "2/session.json" and failures:
            raise failures.pop()
        return open_read(self, rel)

    monkeypatch.setattr(FsspecFiles, "open_read", fails)
    monkeypatch.setattr("monsess.storage._MOST_BACKOFF_SECS", 0.01)
    result = ms.Evaluator(count, init_fn=ticks.init_fn).evaluate_repeatedly(url, timeout=0)
    assert result is not None
    assert (result.step, failures) == (2, [])
    assert [line for line in lines() if "trying again, for" in line]


# ---- what is refused


def test_the_directory_of_the_training_takes_no_records_of_an_evaluator(trained):
    evaluator = ms.Evaluator(count, init_fn=ticks.init_fn)
    for log_dir in (trained, f"file://{trained}/"):
        with pytest.raises(ValueError, match="is the directory of the training, which writes its own"):
            evaluator.evaluate_repeatedly(trained, timeout=0, log_dir=log_dir, note=False)
    with pytest.raises(ValueError, match="is the directory of the training"):
        evaluator.publish(ms.EvaluationResult(6, {}, 1, 0.1), "memory://a/b", log_dir="memory://a/b/")


def test_what_is_no_eval_step():
    with pytest.raises(TypeError, match=r"Evaluator needs a step made by monsess\.eval_step"):
        ms.Evaluator(ticks.one)  # type: ignore[arg-type]


def test_data_that_is_used_up():
    with pytest.raises(ValueError, match="which the first one uses up"):
        ms.Evaluator(away, iter(NINES))
    with pytest.raises(ValueError, match="takes a batch: pass data="):
        ms.Evaluator(away)


@pytest.mark.parametrize(
    ("name", "value"), [("num_batches", 0), ("name", ""), ("name", 5), ("finish", 5), ("init_fn", 5)]
)
def test_impossible_arguments(name, value):
    with pytest.raises(ValueError, match=f"invalid {name}="):
        ms.Evaluator(count, **{name: value})
    with pytest.raises(ValueError, match='remainder must be "error", "drop" or "pad"'):
        ms.Evaluator(count, remainder="x")


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_number_of_evaluations", 0), ("until_step", -1), ("timeout", -1), ("timeout_fn", 5), ("on_result", 5)],
)
def test_impossible_arguments_of_the_loop(name, value, tmp_path):
    with pytest.raises(ValueError, match=f"invalid {name}="):
        ms.Evaluator(count).evaluate_repeatedly(tmp_path, **{name: value})
