"""W-24 to W-26: NaN is noticed first, saving holds nothing up, and what a listener says counts."""

from __future__ import annotations

import logging
import threading

import jax.numpy as jnp
import numpy as np
import pytest
import refusing
from traps import Listener, Recorder, count, drive, endings, fresh, session, steps_of, trap, until

import monsess as ms

# ---- W-24: NaN


@ms.train_step
def breaks_at_four(state):
    bad = jnp.where(state["n"] >= 3, jnp.nan, 0.0)
    return {"n": state["n"] + 1.0, "w": state["w"] + bad}, {"loss": bad}


@ms.train_step
def reports_nan_at_four(state):
    return {"n": state["n"] + 1.0, "w": state["w"]}, {"loss": jnp.where(state["n"] >= 3, jnp.nan, 0.0)}


def nan_session(directory, *hooks):
    return ms.MonitoredTrainingSession(
        lambda: {"n": 0.0, "w": 0.0},
        checkpoint_dir=directory,
        hooks=[*hooks, ms.StopAtStepHook(last_step=9)],
        save_checkpoint_secs=None,
        keep=ms.KeepLast(2),
    )


@trap("W-24")
@pytest.mark.parametrize("step", [breaks_at_four, reports_nan_at_four], ids=["state", "loss"])
@pytest.mark.parametrize("saver_first", [True, False])
@pytest.mark.parametrize("name", ["loss", None])
def test_nan_is_noticed_before_anything_is_committed(tmp_path, step, saver_first, name):
    hooks = [ms.CheckpointSaverHook(save_steps=1), ms.NanTensorHook(name)]
    with pytest.raises(ms.NanLossDuringTrainingError, match="step 4"):
        with nan_session(tmp_path, *(hooks if saver_first else reversed(hooks))) as sess:
            drive(sess, step)
    assert steps_of(tmp_path) == [2, 3]
    assert ms.latest_checkpoint(tmp_path) == 3
    assert np.isfinite(ms.load_checkpoint(tmp_path)["w"])


@trap("W-24")
def test_a_check_that_failed_in_the_loop_still_stops_the_commit():
    """The save of step 4 waits behind that of step 3 until the loop has met the NaN of step 4."""
    go_on = threading.Event()

    class Releases(ms.SessionRunHook):
        def on_error(self, session, error):
            go_on.set()

    def hold(operation, path):
        if operation == "write" and "/3/" in path:
            assert go_on.wait(60)

    url = fresh()
    with refusing.refusing(hold), pytest.raises(ms.NanLossDuringTrainingError, match="step 4"):
        with ms.MonitoredTrainingSession(
            lambda: {"n": 0.0, "w": 0.0}, checkpoint_dir=url, hooks=[Releases(), ms.NanTensorHook("loss")]
        ) as sess:
            while sess.global_step < 20:
                sess.run(reports_nan_at_four)
                if sess.global_step in (3, 4):
                    sess.request_save()
    assert ms.CheckpointStore(url).steps() == [3]


@trap("W-24")
@pytest.mark.parametrize("hooks", [(), ("warn",)], ids=["no NaN hook", "NaN hook that only warns"])
def test_a_nan_state_is_not_the_final_checkpoint_either(tmp_path, hooks, caplog):
    hooks = [ms.NanTensorHook("loss", fail_on_nan_loss=False)] if hooks else []
    with pytest.raises(ms.NonFiniteStateError, match="'w'") as caught:
        with nan_session(tmp_path, ms.CheckpointSaverHook(save_steps=1), *hooks) as sess:
            drive(sess, breaks_at_four)
    assert "step 3" in str(caught.value)
    assert steps_of(tmp_path) == [2, 3]
    assert any(record.levelno == logging.WARNING and "w" in record.getMessage() for record in caplog.records)


# ---- W-25: saving in the background


@trap("W-25")
def test_a_slow_save_holds_nothing_up_and_holds_the_state_of_its_step():
    url = fresh()
    writing, go_on = threading.Event(), threading.Event()

    def hold(operation, path):
        if operation == "write" and "/1/" in path:
            writing.set()
            assert go_on.wait(60)

    listener = Listener()
    with refusing.refusing(hold):
        with session(url, ms.CheckpointSaverHook(save_steps=1000, listeners=[listener])) as sess:
            sess.run(count)
            sess.request_save()
            assert writing.wait(30)
            for _ in range(20):
                sess.run(count)
            assert sess.global_step == 21
            assert float(sess.state["n"]) == 21
            assert ms.CheckpointStore(url).steps() == []
            assert "after@1" not in listener.calls
            go_on.set()
    assert listener.calls == ["begin", "before@1", "before@21", "after@1", "after@21", "end@21"]
    assert [float(ms.load_checkpoint(url, step)["n"]) for step in (1, 21)] == [1, 21]


@trap("W-25")
def test_a_background_error_is_raised_by_a_run_and_not_lost():
    recorder = Recorder()
    with pytest.raises(ms.SaveError, match=r"\b1\b") as caught:
        with refusing.refusing(refusing.refuse("write", error=lambda: PermissionError("403 quota"))):
            # The store is shown to be writable at the start, so that only the save meets the refusal.
            with refusing.refusing(lambda operation, path: None):
                sess = session(fresh(), recorder)
            with sess:
                sess.run(count)
                sess.request_save()
                until(lambda: sess.run(count) is None)
    assert "403 quota" in str(caught.value.__cause__) + str(caught.value)
    assert endings(recorder.trace) == ["A.on_error"]


# ---- W-26: what a listener says counts


@trap("W-26", "W-25")
def test_a_listener_stops_training_although_the_save_is_made_in_the_background(tmp_path):
    listener = Listener(stop_after=2)
    saver = ms.CheckpointSaverHook(save_steps=1, listeners=[listener])
    with session(tmp_path, saver, ms.StopAtStepHook(last_step=3000)) as sess:
        drive(sess)
    assert sess.global_step < 3000
    assert sess.stop_reason == ms.StopReason.REQUESTED
    assert steps_of(tmp_path)[-1] == sess.global_step


@trap("W-26")
def test_what_a_listener_says_at_the_last_save_is_kept_as_the_reason(tmp_path):
    listener = Listener(stop_after=1)
    with session(tmp_path, ms.CheckpointSaverHook(save_steps=100, listeners=[listener])) as sess:
        sess.run(count)
    assert listener.calls == ["begin", "before@1", "after@1", "end@1"]
    assert sess.stop_reason == ms.StopReason.REQUESTED
    assert "Listener" in str(sess.stop_reason)
