"""W-29 to W-32, W-37 and W-38: exact steps, limits before the first run, no hidden waiting."""

from __future__ import annotations

import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traps import Lines, Recorder, count, init_fn, look, run, steps_of, trap

import monsess as ms


def by(k):
    """A step that performs ``k`` updates."""

    @ms.train_step(steps_per_run=k)
    def several(state):
        return {"n": state["n"] + k}, {"n": state["n"] + k}

    return several


# ---- W-29: limits hold before the first run


@trap("W-29")
@pytest.mark.parametrize("last_step", [3, 2, 0])
def test_a_session_at_or_past_its_last_step_runs_nothing(tmp_path, last_step, caplog):
    run(ms.StopAtStepHook(last_step=3), checkpoint_dir=tmp_path)
    files = sorted(tmp_path.rglob("*"))
    recorder = Recorder()
    caplog.clear()
    with caplog.at_level(logging.INFO, "monsess"):
        with ms.MonitoredTrainingSession(
            init_fn, hooks=[recorder, ms.StopAtStepHook(last_step=last_step)], checkpoint_dir=tmp_path
        ) as sess:
            assert sess.should_stop()
            assert sess.stop_reason == ms.StopReason.LAST_STEP
            with pytest.raises(ms.RunAfterStopError):
                sess.run(count)
    assert sess.global_step == 3
    assert recorder.trace == ["A.begin", "A.after_create_session@3", "A.end"]
    assert sorted(tmp_path.rglob("*")) == files
    said = "last step 3 reached" if last_step == 3 else f"step 3 has reached the last step {last_step}"
    assert caplog.text.count(said) == 1


@trap("W-29")
@pytest.mark.parametrize("limit", [{"num_steps": 0}, {"num_steps": -1}, {"last_step": -1}])
def test_impossible_limits_are_refused_instead_of_running_once(limit):
    with pytest.raises(ValueError, match=f"{next(iter(limit))}="):
        ms.StopAtStepHook(**limit)


@trap("W-29")
def test_a_last_step_of_zero_makes_a_state_and_no_step(tmp_path):
    sess = run(ms.StopAtStepHook(last_step=0), checkpoint_dir=tmp_path)
    assert sess.summary()["steps"] == 0
    assert steps_of(tmp_path) == [0]


# ---- W-30: exact steps, whatever a run adds


@trap("W-30")
def test_hooks_know_the_exact_step_before_and_after_a_run():
    recorder = Recorder()
    run(recorder, ms.StopAtStepHook(last_step=9), step=by(4))
    assert [line.removeprefix("A.") for line in recorder.trace[2:-1]] == [
        *("before_run@0", "after_run@4", "before_run@4", "after_run@8", "before_run@8", "after_run@12"),
    ]


@trap("W-30")
def test_runs_of_five_steps_stop_save_and_log_when_a_multiple_was_crossed(tmp_path):
    lines = Lines()
    sess = run(
        lines.hook(every_n_iter=7),
        ms.StopAtStepHook(last_step=27),
        step=by(5),
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=10,
    )
    assert sess.global_step == 30  # TensorFlow: 35
    assert steps_of(tmp_path) == [10, 20, 30]  # TensorFlow: 15, 30
    assert lines == [5, 10, 15, 25, 30]  # the first run, and those that cross 7, 14, 21, 28
    assert sess.summary()["steps"] == 30


@trap("W-30", "W-32")
def test_runs_of_different_sizes_and_runs_without_hooks_count_exactly():
    with ms.MonitoredTrainingSession(init_fn, hooks=[ms.StopAtStepHook(last_step=12)]) as sess:
        sess.run(by(5))
        sess.run(count)
        sess.run_without_hooks(by(4))
        assert sess.global_step == float(sess.state["n"]) == 10
        assert not sess.should_stop()
        sess.run_without_hooks(by(2))
        assert sess.should_stop()
    assert sess.global_step == 12


# ---- W-31: hooks can be used again


@trap("W-31")
def test_every_built_in_hook_can_serve_a_second_session():
    lines = Lines()
    final = ms.FinalOpsHook(lambda state, outputs: state["n"])
    hooks = [
        ms.StopAtStepHook(num_steps=4),
        lines.hook(every_n_iter=3),
        ms.NanTensorHook(),
        ms.StepCounterHook(every_n_steps=2),
        ms.GlobalStepWaiterHook(3, step_fn=iter(range(3, 100)).__next__),
        ms.FeedFnHook(dict),
        final,
    ]
    for _ in range(2):
        lines.clear()
        assert run(*hooks, log_step_count_steps=None).global_step == 4
        assert lines == [1, 3]
        assert final.final_ops_values == 4


@trap("W-31")
def test_a_warning_nan_hook_and_a_saver_can_serve_a_second_session(tmp_path):
    @ms.train_step
    def nan_once(state):
        return state, {"loss": jnp.nan}

    nan, saver = ms.NanTensorHook(fail_on_nan_loss=False), ms.CheckpointSaverHook(save_steps=2)
    assert run(nan, step=nan_once).stop_reason == ms.StopReason.REQUESTED
    for name in ("a", "b"):
        sess = run(nan, saver, ms.StopAtStepHook(4), checkpoint_dir=tmp_path / name, save_checkpoint_secs=None)
        assert sess.stop_reason == ms.StopReason.LAST_STEP
        assert steps_of(tmp_path / name) == [2, 4]


# ---- W-32: looking is not training


@trap("W-32")
def test_evaluation_in_the_loop_moves_no_hook_no_step_and_no_batch(tmp_path):
    @ms.train_step
    def train(state, batch):
        return {"n": state["n"] + batch.mean()}, {"n": state["n"]}

    @ms.eval_step
    def evaluate(state, batch):
        return {"n": state["n"] * batch.mean()}

    def trace(look_too):
        recorder, lines = Recorder(), Lines()
        with ms.MonitoredTrainingSession(
            init_fn,
            data=[np.full(8, float(i), np.float32) for i in range(6)],
            hooks=[recorder, lines.hook(every_n_iter=2)],
            checkpoint_dir=tmp_path / str(look_too),
            save_checkpoint_steps=2,
        ) as sess:
            while not sess.should_stop():
                sess.run(train)
                if look_too:
                    sess.run(evaluate, np.ones(8, np.float32))
                    sess.run(look)
                    sess.evaluate(["n", lambda state, outputs: state["n"]])
                    float(sess.state["n"])
        return recorder.trace, list(lines), steps_of(tmp_path / str(look_too)), sess.global_step

    assert trace(True) == trace(False)


@trap("W-32", "W-38")
def test_an_eval_step_needs_no_batch_of_the_input():
    asked = []

    def data():
        for i in range(3):
            asked.append(i)
            yield np.full(8, float(i), np.float32)

    with ms.MonitoredTrainingSession(init_fn, data=data(), prefetch=0) as sess:
        sess.run(look)
        assert asked == []


# ---- W-37: NaN


@trap("W-37")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("watch", [None, "metrics/deep", ["loss", "metrics/deep"], lambda state, outputs: state["w"]])
def test_arrays_infinities_and_everything_there_is_are_looked_at(bad, watch):
    @ms.train_step
    def step(state):
        deep = jnp.zeros((2, 3)).at[1, 2].set(jnp.where(state["n"] == 2, bad, 0.0))
        return {"n": state["n"] + 1.0, "w": deep}, {"loss": jnp.zeros(()), "metrics": {"deep": deep}}

    with pytest.raises(ms.NanLossDuringTrainingError, match="step 3"):
        run(
            ms.NanTensorHook(watch),
            ms.StopAtStepHook(9),
            step=step,
            initial=lambda: {"n": 0.0, "w": np.zeros((2, 3), np.float32)},
        )


@trap("W-37")
def test_a_nan_on_one_device_only_is_seen():
    @ms.train_step
    def step(state):
        last = jax.lax.axis_index("data") == 3
        return {"n": state["n"] + 1.0}, {"loss": jnp.where(last & (state["n"] == 2), jnp.nan, 1.0)}

    with pytest.raises(ms.NanLossDuringTrainingError, match="step 3"):
        run(ms.NanTensorHook("loss"), ms.StopAtStepHook(9), step=step)


# ---- W-38: nothing waits for the device between triggers


@trap("W-38")
def test_hooks_that_are_not_due_wait_for_no_step(tmp_path):
    """Steps 3 and 4 cannot end before the test lets them, and yet both runs, hooks and all, return."""
    go_on = threading.Event()
    let_go = threading.Timer(60, go_on.set)  # a failure must not hang the session
    let_go.start()

    def wait(n):
        if n >= 2:
            go_on.wait()
        return np.float32(0)

    @ms.train_step
    def slow(state):
        waited = jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), state["n"])
        return {"n": state["n"] + 1.0 + waited}, {"n": state["n"]}

    class Fetches(ms.SessionRunHook):
        def before_run(self, run_context):
            return ms.SessionRunArgs({"by name": "n", "by function": lambda state, outputs: state["n"] * 2})

    hooks = [Fetches(), Lines().hook(every_n_iter=1000), ms.NanTensorHook(), ms.StopAtStepHook(last_step=9)]
    with ms.MonitoredTrainingSession(
        init_fn, hooks=hooks, checkpoint_dir=tmp_path, save_checkpoint_steps=1000, log_step_count_steps=1000
    ) as sess:
        sess.run(slow)
        sess.run(slow)
        third = sess.run(slow)
        fourth = sess.run(slow)
        assert not sess.should_stop()
        assert not go_on.is_set()
        assert not third["n"].is_ready()
        assert not fourth["n"].is_ready()
        assert sess.global_step == 4
        go_on.set()
    let_go.cancel()
    assert float(ms.load_checkpoint(tmp_path)["n"]) == 4


@trap("W-38")
def test_what_is_not_asked_for_is_not_computed():
    calls = []

    def fetched(state, outputs):
        jax.debug.callback(lambda n: calls.append(int(n)), state["n"])
        return state["n"]

    class Rarely(ms.SessionRunHook):
        def before_run(self, run_context):
            return ms.SessionRunArgs(fetched) if run_context.global_step == 3 else None

    run(Rarely(), ms.StopAtStepHook(last_step=6))
    jax.effects_barrier()
    assert calls == [4]
