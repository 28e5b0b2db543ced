"""What the tests of TensorFlow's Estimator hooks check: evaluation, early stopping, the last step, the input."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from conforms import conforms
from counting import EIGHT, add, count, init_fn, read, session, train_to_the_end

import monsess as ms


@ms.eval_step
def evaluate(state, batch):
    """How far the batch is away from the count."""
    return {"away": jnp.mean(batch - state["count"])}


class Hears(ms.SessionRunHook):
    """Writes down what is logged of evaluations."""

    def __init__(self):
        self.heard = []

    def log(self, step, scalars):
        self.heard += [(step, name, value) for name, value in scalars.items() if name.startswith("eval/")]


# ---- evaluation metrics


@conforms("ES-001")
def test_metrics_are_read_per_step_in_order(tmp_path):
    with session(checkpoint_dir=tmp_path) as sess:
        for step in range(1, 6):
            sess.run(count)
            sess.log({"eval/loss": 1.0 / step, "eval/accuracy": 0.1 * step})
    curves = ms.read_metrics(tmp_path).curves
    assert [(point.step, point.value) for point in curves["eval/loss"]] == [(s, 1.0 / s) for s in range(1, 6)]
    assert [(point.step, point.value) for point in curves["eval/accuracy"]] == [(s, 0.1 * s) for s in range(1, 6)]


@conforms(
    "ES-002", instead="Only what cannot be read is left out: a damaged line hides neither those before nor after."
)
def test_a_damaged_file_keeps_what_can_be_read(tmp_path):
    with session(checkpoint_dir=tmp_path) as sess:
        for _ in range(4):
            sess.run(count)
            sess.log({"eval/loss": float(sess.global_step)})
    file = tmp_path / "metrics.jsonl"
    lines = file.read_text().splitlines()
    (third,) = [number for number, line in enumerate(lines) if '"eval/loss":3.0' in line]
    lines[third] = lines[third][:20]
    file.write_text("\n".join([*lines, '{"step": 5, "ti']))
    assert [point.step for point in ms.read_metrics(tmp_path).curves["eval/loss"]] == [1, 2, 4]


@conforms("ES-003", "ES-004")
def test_no_metrics_where_there_is_no_run(tmp_path):
    assert ms.read_metrics(tmp_path).curves == {}
    assert ms.read_metrics(tmp_path / "missing").curves == {}


@conforms(
    "ES-013", "ES-014", instead="The stop is the session's `stop_reason`; no flag of it lies in the model's state."
)
def test_a_predicate_stops_the_session():
    with session(hooks=[ms.make_early_stopping_hook(lambda: False, run_every_steps=1)]) as sess:
        for _ in range(3):
            sess.run(count)
        assert not sess.should_stop()
        assert sess.stop_reason is None
    with session(hooks=[ms.make_early_stopping_hook(lambda: True, run_every_steps=1)]) as sess:
        sess.run(count)
        assert sess.should_stop()
        assert sess.stop_reason == ms.StopReason.EARLY_STOPPING
        assert sorted(sess.state) == ["count"]


# ---- evaluation in the loop


@conforms("EH-001")
def test_it_evaluates_before_training_every_n_steps_and_at_the_end(tmp_path):
    hook = ms.EvaluationHook(evaluate, [EIGHT], every_n_steps=4, at_start=True)
    with session(hooks=[hook, ms.StopAtStepHook(last_step=10)], checkpoint_dir=tmp_path) as sess:
        train_to_the_end(sess)
    curve = ms.read_metrics(tmp_path).curves["eval/away"]
    assert [(point.step, point.value) for point in curve] == [(step, 1.0 - step) for step in (0, 4, 8, 10)]


@conforms("EH-003", instead="The name is part of the tag, `eval/<name>/...`, in the one place of the run's records.")
def test_a_named_evaluation_equals_a_regular_one(tmp_path):
    hears = Hears()
    hooks = [ms.EvaluationHook(evaluate, [EIGHT, 3 * EIGHT], name="train"), hears, ms.StopAtStepHook(last_step=3)]
    with session(hooks=hooks, checkpoint_dir=tmp_path) as sess:
        train_to_the_end(sess)
    result = ms.Evaluator(evaluate, [EIGHT, 3 * EIGHT], init_fn).evaluate_once(tmp_path)
    assert hears.heard == [(result.step, "eval/train/away", result.metrics["away"])]


# ---- stopping with a checkpoint


@conforms(
    "EH-009",
    "EH-010",
    "EH-011",
    instead="No worker polls the directory for the chief's checkpoint: all processes stop at the same step, and each "
    "leaves the session only when the final checkpoint is committed.",
)
def test_a_session_that_has_stopped_has_its_checkpoint(tmp_path):
    with session(hooks=[ms.StopAtStepHook(last_step=5)], checkpoint_dir=tmp_path) as sess:
        train_to_the_end(sess)
    assert sess.global_step == 5
    assert ms.CheckpointStore(tmp_path).steps()[-1] == 5


@conforms(
    "EH-012", "EH-013", instead="One hook for all processes, `StopAtStepHook(last_step=...)`; there is no factory."
)
def test_the_same_hook_stops_every_process():
    hook = ms.StopAtStepHook(last_step=5)
    assert hook.on_all_processes
    with session(hooks=[hook]) as sess:
        train_to_the_end(sess)
    assert sess.global_step == 5


# ---- input


def batches():
    return [number * EIGHT for number in range(6)]


def given(sess, runs):
    """What the next runs are given, as the step's output tells."""
    return [float(sess.run(add)["given"]) for _ in range(runs)]


class WithPosition:
    """An iterator that knows where it is."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == 6:
            raise StopIteration
        self.next += 1
        return (self.next - 1) * EIGHT

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


@conforms("IP-001", "IP-002")
@pytest.mark.parametrize("make", [batches, WithPosition])
def test_a_second_training_continues_the_input(make, tmp_path):
    with session(data=make(), checkpoint_dir=tmp_path) as sess:
        first = given(sess, 2)
    with session(data=make(), checkpoint_dir=tmp_path) as sess:
        second = given(sess, 2)
    assert [*first, *second] == [2.0 * number for number in range(4)]


@conforms("IP-003", instead="The input's position belongs to every checkpoint; without one the input begins anew.")
def test_without_a_checkpoint_the_input_begins_anew():
    for _ in range(2):
        with session(data=batches()) as sess:
            assert given(sess, 2) == [0.0, 2.0]


@conforms("IP-004", instead="A session without `data=` is none that forgot its iterator: there is nothing to store.")
def test_without_data_there_is_nothing_to_store(tmp_path):
    with session(checkpoint_dir=tmp_path) as sess:
        sess.run(count)
    with session(checkpoint_dir=tmp_path) as sess:
        assert (sess.restored_from, float(np.asarray(sess.run(read)))) == (1, 1.0)
