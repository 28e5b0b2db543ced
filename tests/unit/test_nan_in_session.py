"""A value that is no longer finite in a real session: nobody finds it in a checkpoint, wherever the hook is listed."""

from __future__ import annotations

import threading

import jax.numpy as jnp
import numpy as np
import pytest

import monsess as ms

OFF = {"save_checkpoint_secs": None, "save_checkpoint_steps": None}
LAST_GOOD = 3


def init_fn():
    return {"n": jnp.float32(2.0), "w": jnp.zeros(3)}


@ms.train_step
def diverge(state):
    """The loss and the weights are NaN from step 4 on."""
    loss = jnp.sqrt(state["n"])
    return {"n": state["n"] - 1, "w": state["w"] + loss}, {"loss": loss, "other": state["n"]}


@ms.train_step
def stumble(state):
    """The loss is NaN at step 4 only, the weights never."""
    loss = jnp.where(state["n"] == -1, jnp.nan, state["n"])
    return {"n": state["n"] - 1, "w": state["w"] + 1}, {"loss": loss, "other": state["n"]}


class Seen(ms.SessionRunHook):
    """Writes its endings down."""

    def begin(self):
        self.ending = []

    def end(self, session):
        self.ending.append("end")

    def on_error(self, session, error):
        self.ending.append(type(error).__name__)


def session(directory, *hooks, **arguments):
    arguments = {"keep": ms.KeepLast(100), "log_step_count_steps": None, **arguments}
    return ms.MonitoredTrainingSession(init_fn, checkpoint_dir=directory, hooks=hooks, **arguments)


def run(sess, step=diverge, runs=20):
    """The usual loop, bounded."""
    for _ in range(runs):
        if sess.should_stop():
            break
        sess.run(step)


def assert_newest_is(directory, step):
    """All checkpoints are sound and finite; the newest is ``step``, and a session restores it."""
    store = ms.CheckpointStore(directory)
    assert store.steps()[-1] == step
    for one in store.steps():
        assert store.verify(one) == []
        assert all(np.isfinite(leaf).all() for leaf in ms.load_checkpoint(directory, one).values())
    with session(directory) as sess:
        assert sess.restored_from == step


@pytest.mark.parametrize("check_finite", [True, False])
@pytest.mark.parametrize("position", range(4))
def test_w24_no_checkpoint_holds_nan_wherever_the_hook_is(tmp_path, position, check_finite):
    first, last = Seen(), Seen()
    hooks = [first, ms.CheckpointSaverHook(save_steps=1), last]
    hooks.insert(position, ms.NanTensorHook("loss"))
    options = ms.CheckpointOptions(check_finite=check_finite)
    with pytest.raises(ms.NanLossDuringTrainingError, match="At step 4: loss = nan"):
        with session(tmp_path, *hooks, checkpoint=options, **OFF) as sess:
            run(sess)
    assert sess.global_step <= LAST_GOOD + 1 + sess.max_in_flight
    assert sess.stop_reason == ms.StopReason.ERROR
    assert first.ending == last.ending == ["NanLossDuringTrainingError"]
    assert_newest_is(tmp_path, LAST_GOOD)


@pytest.mark.parametrize("name", ["loss", None, ["other", "loss"]])
@pytest.mark.parametrize("max_in_flight", [1, 4])
def test_default_saver_comes_before_the_hook_and_still_waits_for_it(tmp_path, name, max_in_flight):
    with pytest.raises(ms.NanLossDuringTrainingError, match="At step 4"):
        with session(
            tmp_path,
            ms.NanTensorHook(name),
            save_checkpoint_steps=1,
            checkpoint=ms.CheckpointOptions(check_finite=False),
            max_in_flight=max_in_flight,
        ) as sess:
            run(sess)
    assert sess.global_step <= LAST_GOOD + 1 + max_in_flight
    assert_newest_is(tmp_path, LAST_GOOD)


def test_nan_in_the_very_last_step_is_found_before_the_final_commit(tmp_path):
    seen = Seen()
    with pytest.raises(ms.NanLossDuringTrainingError, match="At step 4"):
        with session(
            tmp_path,
            ms.NanTensorHook("loss"),
            ms.StopAtStepHook(last_step=4),
            seen,
            save_checkpoint_steps=3,
            checkpoint=ms.CheckpointOptions(check_finite=False),
        ) as sess:
            run(sess)
    assert sess.global_step == 4
    assert seen.ending == ["NanLossDuringTrainingError"]
    assert_newest_is(tmp_path, LAST_GOOD)


def test_step_that_was_found_bad_is_not_committed_by_a_save_already_on_its_way(tmp_path):
    """The saver is still busy with step 3 when the training thread finds step 4, which waits behind it, to be bad."""
    busy, go_on = threading.Event(), threading.Event()

    def check_finite(path, array):
        busy.set()
        assert go_on.wait(60)
        return True

    class SaveAt3And4(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.global_step in (3, 4):
                run_context.request_save()

        def on_error(self, session, error):
            go_on.set()

    with pytest.raises(ms.NanLossDuringTrainingError, match="At step 4"):
        with session(
            tmp_path,
            ms.NanTensorHook("loss"),
            SaveAt3And4(),
            checkpoint=ms.CheckpointOptions(check_finite=check_finite),
            **OFF,
        ) as sess:
            run(sess, stumble, runs=3)
            assert busy.wait(60)
            run(sess, stumble)
    assert ms.CheckpointStore(tmp_path).steps() == [3]


class TestWarning:
    """``fail_on_nan_loss=False``: a warning and a stop instead of an error."""

    @pytest.mark.parametrize("name", ["loss", None])
    def test_finite_state_is_committed_at_the_clean_end(self, tmp_path, lines, name):
        seen = Seen()
        with session(tmp_path, ms.NanTensorHook(name, fail_on_nan_loss=False), seen) as sess:
            run(sess, stumble)
        assert 4 < sess.global_step <= 4 + sess.max_in_flight
        assert sess.stop_reason == ms.StopReason.REQUESTED
        assert sess.stop_reason.text.startswith("NaN loss during training. At step 4")
        assert seen.ending == ["end"]
        assert len([line for line in lines() if "Model diverged, asking for a stop" in line]) == 1
        assert_newest_is(tmp_path, sess.global_step)

    def test_state_that_is_not_finite_is_not_committed(self, tmp_path, lines):
        seen = Seen()
        with pytest.raises(ms.NonFiniteStateError, match="'w'"):
            with session(
                tmp_path, ms.NanTensorHook("loss", fail_on_nan_loss=False), seen, save_checkpoint_steps=1
            ) as sess:
                run(sess)
        assert sess.global_step <= 4 + sess.max_in_flight
        assert seen.ending == ["NonFiniteStateError"]
        assert any("asking for a stop" in line for line in lines())
        assert_newest_is(tmp_path, LAST_GOOD)

    def test_nan_in_the_very_last_step(self, tmp_path, lines):
        hook = ms.NanTensorHook("loss", fail_on_nan_loss=False)
        with session(tmp_path, hook, ms.StopAtStepHook(last_step=4)) as sess:
            run(sess, stumble)
        assert sess.stop_reason == ms.StopReason.LAST_STEP
        assert any("Model diverged" in line for line in lines())
        assert_newest_is(tmp_path, 4)


def test_restarted_run_stops_at_the_same_step(tmp_path):
    for attempt in range(2):
        with pytest.raises(ms.NanLossDuringTrainingError, match="At step 4"):
            with session(tmp_path, ms.NanTensorHook("loss"), save_checkpoint_steps=1) as sess:
                assert sess.restored_from == (LAST_GOOD if attempt else None)
                run(sess)
        assert_newest_is(tmp_path, LAST_GOOD)


def test_recovery_forgets_values_of_steps_that_were_rolled_back(tmp_path):
    """Step 4 is bad and fails in a way that passes; done again it is good."""

    class GoodNextTime(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.global_step == 4 and run_context.session.recoveries == 0:
                raise ConnectionError

    bad_once = iter([0.0, 0.0, 0.0, np.nan])

    @ms.train_step
    def step(state, batch):
        return state, {"loss": batch.mean()}

    feed = ms.FeedFnHook(lambda: {"batch": np.full(4, next(bad_once, 0.0), np.float32)})
    recovery = ms.Recovery(is_transient=lambda error: isinstance(error, ConnectionError), backoff_secs=0)
    hooks = [feed, ms.NanTensorHook("loss"), GoodNextTime(), ms.StopAtStepHook(last_step=6)]
    with session(tmp_path, *hooks, save_checkpoint_steps=3, recovery=recovery) as sess:
        run(sess, step)
    assert (sess.recoveries, sess.global_step) == (1, 6)
    assert ms.CheckpointStore(tmp_path).steps() == [3, 6]


def test_nan_declared_transient_costs_one_restart(tmp_path):
    """The save of the bad step fails along with the run: that is one error, not two."""
    values = iter([0.0, 0.0, 0.0, np.nan])

    @ms.train_step
    def step(state, batch):
        return state, {"loss": batch.mean()}

    feed = ms.FeedFnHook(lambda: {"batch": np.full(4, next(values, 0.0), np.float32)})
    transient = ms.Recovery(
        max_restarts=1, is_transient=lambda error: isinstance(error, ms.NanLossDuringTrainingError), backoff_secs=0
    )
    hooks = [feed, ms.NanTensorHook("loss"), ms.StopAtStepHook(last_step=8)]
    with session(tmp_path, *hooks, save_checkpoint_steps=1, max_in_flight=1, recovery=transient) as sess:
        run(sess, step)
    assert (sess.recoveries, sess.restored_from, sess.global_step) == (1, LAST_GOOD, 8)
