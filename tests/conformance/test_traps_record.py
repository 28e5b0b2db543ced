"""W-55 and W-56: no side effects, and a session that says what it did."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traps import FailsAt, count, drive, init_fn, recovery, trap

import monsess as ms

ONES = np.ones(8, np.float32)


# ---- W-55: no side effects outside the session


@trap("W-55")
def test_a_session_leaves_the_process_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()

    def snapshot():
        return {
            "print options": str(np.get_printoptions()),
            "environment": dict(os.environ),
            "x64": jax.config.jax_enable_x64,
            "error handling": np.geterr(),
            "excepthook": threading.excepthook,
            "files": sorted(os.listdir(tmp_path)),
        }

    before, threads = snapshot(), set(threading.enumerate())
    array = np.array([1e-9, 1.23456789])
    shown = str(array)
    hooks = [
        ms.LoggingTensorHook(["n"], every_n_iter=1, formatter=lambda values: 1 / 0),
        ms.NanTensorHook(),
    ]
    with pytest.raises(ZeroDivisionError):
        with ms.MonitoredTrainingSession(init_fn, hooks=hooks, checkpoint_dir=tmp_path / "run") as sess:
            sess.run(count)
    with ms.MonitoredTrainingSession(
        init_fn, hooks=[ms.LoggingTensorHook(["n"], every_n_iter=1)], data=[ONES] * 3, checkpoint_dir=tmp_path / "run"
    ) as sess:
        drive(sess, train_n)
    assert snapshot() == before
    assert str(array) == shown
    for thread in set(threading.enumerate()) - threads:
        assert thread.daemon, thread


@ms.train_step
def train_n(state, batch):
    return {"n": state["n"] + 1.0}, {"n": state["n"] + 1.0}


@trap("W-55")
def test_a_session_leaves_the_programs_logging_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    level = logging.root.level
    for _ in range(2):
        with ms.MonitoredTrainingSession(init_fn, checkpoint_dir=tmp_path) as sess:
            sess.run(count)
    assert logging.root.handlers == []
    assert logging.root.level == level


@trap("W-55")
def test_warnings_are_counted_by_session_and_not_by_process(caplog):
    """TensorFlow warned "the first five times per process"; here every session says what it has to say."""

    @ms.train_step
    def nan(state):
        return state, {"loss": jnp.nan}

    for n in range(1, 8):
        with ms.MonitoredTrainingSession(init_fn, hooks=[ms.NanTensorHook("loss", fail_on_nan_loss=False)]) as sess:
            drive(sess, nan)
        assert sum(record.levelno == logging.WARNING for record in caplog.records) == n


@trap("W-55")
@pytest.mark.parametrize("way", ["clean", "error", "abandoned"])
def test_nothing_holds_on_to_a_session_that_nobody_holds(tmp_path, way):
    """No registry, cache or thread keeps the session, its hooks or its arrays alive."""
    gc.collect()
    arrays = len(jax.live_arrays())

    def live_and_die():
        hook = ms.NanTensorHook()
        sess = ms.MonitoredTrainingSession(
            init_fn, hooks=[hook], data=[ONES] * 9, checkpoint_dir=tmp_path, save_checkpoint_steps=1
        )
        sess.run(train_n)
        if way == "clean":
            sess.close()
        if way == "error":
            try:
                with sess:
                    raise KeyError("mine")
            except KeyError:
                pass
        return weakref.ref(sess), weakref.ref(hook)

    session, hook = live_and_die()
    deadline = time.monotonic() + 30
    while (session() or hook() or len(jax.live_arrays()) > arrays) and time.monotonic() < deadline:
        time.sleep(0.02)  # the threads that read and write notice the end within moments
        gc.collect()
    assert session() is None
    assert hook() is None
    assert len(jax.live_arrays()) <= arrays


# ---- W-56: what happened


@trap("W-56")
@pytest.mark.parametrize(
    ("how", "name", "text"),
    [
        ("limit", "LAST_STEP", "last step 2 reached (StopAtStepHook)"),
        ("data", "END_OF_DATA", "the input has ended"),
        ("asked", "REQUESTED", "low enough"),
        ("left", "BODY_LEFT", "the with-block was left"),
        ("error", "ERROR", "KeyError: 'mine'"),
    ],
)
def test_why_training_stopped_is_recorded_and_logged_once(how, name, text, caplog):
    hooks = [ms.StopAtStepHook(last_step=2)] if how == "limit" else []
    with caplog.at_level(logging.INFO, "monsess"):
        try:
            with ms.MonitoredTrainingSession(init_fn, hooks=hooks, data=[ONES] * (2 if how == "data" else 9)) as sess:
                assert sess.stop_reason is None
                while not sess.should_stop():
                    sess.run(train_n)
                    if sess.global_step == 2 and how == "asked":
                        sess.request_stop("low enough")
                    if sess.global_step == 2 and how == "left":
                        break
                    if sess.global_step == 2 and how == "error":
                        raise KeyError("mine")
        except KeyError:
            assert how == "error"
    assert sess.stop_reason == getattr(ms.StopReason, name)
    assert str(sess.stop_reason) == text
    assert sess.global_step == 2
    last = [record.getMessage() for record in caplog.records if f"stopped: {text}" in record.getMessage()]
    assert len(last) == 1
    assert "2 steps" in last[0]


@trap("W-56")
def test_the_summary_says_what_the_session_did(tmp_path):
    with ms.MonitoredTrainingSession(
        init_fn,
        hooks=[FailsAt(5), ms.StopAtStepHook(last_step=6)],
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=3,
        recovery=recovery(),
    ) as sess:
        drive(sess)
    summary = sess.summary()
    expected = {"global_step": 6, "saves": 2, "last_committed": 6, "recoveries": 1, "stop_reason": "LAST_STEP"}
    assert {key: summary[key] for key in expected} == expected
    assert summary["steps"] == 8  # 5 and then 3 more from the checkpoint of step 3
    assert summary["run_id"] == sess.run_id
    assert set(summary["time"]) == {"input", "compile", "step", "hooks", "save"}
