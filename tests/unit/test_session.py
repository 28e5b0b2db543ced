"""The loop: what a run does, how a session begins and ends, and that a resumed one ends in the same bits."""

from __future__ import annotations

import signal
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
import toy

import monsess as ms
from monsess import session as session_module


class Recorder(ms.SessionRunHook):
    """Writes down every call, with the step."""

    def __init__(self, name="A", trace=None):
        self.name = name
        self.trace = [] if trace is None else trace

    def begin(self):
        self.trace.append(f"{self.name}.begin")

    def after_create_session(self, session, coord):
        self.trace.append(f"{self.name}.acs")

    def before_run(self, run_context):
        self.trace.append(f"{self.name}.before@{run_context.global_step}")

    def after_run(self, run_context, run_values):
        self.trace.append(f"{self.name}.after@{run_context.global_step}")

    def end(self, session):
        self.trace.append(f"{self.name}.end")

    def on_error(self, session, error):
        self.trace.append(f"{self.name}.on_error:{type(error).__name__}")


def test_golden_trace_with_endings_in_reverse():
    trace = []
    hooks = [Recorder("A", trace), Recorder("B", trace)]
    with ms.MonitoredTrainingSession(toy.init_fn, data=toy.batches(2), hooks=hooks) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
    assert trace == [
        "A.begin",
        "B.begin",
        "A.acs",
        "B.acs",
        "A.before@0",
        "B.before@0",
        "A.after@1",
        "B.after@1",
        "A.before@1",
        "B.before@1",
        "A.after@2",
        "B.after@2",
        "B.end",
        "A.end",
    ]
    assert sess.stop_reason == ms.StopReason.END_OF_DATA


@pytest.mark.parametrize("stop_at", [1, 5, 9])
def test_resumed_run_ends_in_the_bits_of_a_straight_one(tmp_path, stop_at):
    data = toy.batches(12)
    with ms.MonitoredTrainingSession(
        toy.init_fn, data=data, checkpoint_dir=tmp_path, hooks=[ms.StopAtStepHook(last_step=stop_at)]
    ) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
    assert sess.stop_reason == ms.StopReason.LAST_STEP
    assert ms.latest_checkpoint(str(tmp_path)) == stop_at
    with ms.MonitoredTrainingSession(toy.init_fn, data=data, checkpoint_dir=tmp_path) as sess:
        assert sess.restored_from == sess.global_step == stop_at
        while not sess.should_stop():
            sess.run(toy.train)
        state = sess.state_copy()
    assert sess.global_step == 12
    toy.assert_same_bits(state, toy.straight(12))


def test_periodic_saves_at_multiples_and_at_the_end(tmp_path):
    with ms.MonitoredTrainingSession(
        toy.init_fn, data=toy.batches(7), checkpoint_dir=tmp_path, save_checkpoint_steps=3
    ) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
    store = ms.CheckpointStore(tmp_path)
    assert store.steps() == [3, 6, 7]
    assert all(store.verify(step) == [] for step in store.steps())
    assert ms.load_checkpoint(tmp_path, 6)["updates"] == 6
    assert sess.summary()["saves"] == 3


def test_finished_run_does_nothing_when_started_again(tmp_path):
    def attempt():
        with ms.MonitoredTrainingSession(
            toy.init_fn, data=toy.batches(9), checkpoint_dir=tmp_path, hooks=[ms.StopAtStepHook(last_step=4)]
        ) as sess:
            assert sess.should_stop() == (sess.restored_from == 4)
            while not sess.should_stop():
                sess.run(toy.train)
        return sess.summary()["steps"]

    def contents():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    assert attempt() == 4
    before = contents()
    assert attempt() == 0
    assert contents() == before


def test_run_after_stop_after_the_end_of_data_and_after_close():
    with ms.MonitoredTrainingSession(toy.init_fn, hooks=[ms.StopAtStepHook(last_step=1)]) as sess:
        sess.run(toy.train, toy.batch(0))
        with pytest.raises(ms.RunAfterStopError, match="should_stop"):
            sess.run(toy.train, toy.batch(1))
        sess.run(toy.evaluate, toy.batch(1))
    with pytest.raises(ms.SessionClosedError):
        sess.run(toy.train, toy.batch(1))
    sess.close()

    with ms.MonitoredTrainingSession(toy.init_fn, data=toy.batches(1)) as sess:
        sess.run(toy.train)
        with pytest.raises(ms.EndOfData):
            sess.run(toy.train)
        with pytest.raises(ms.EndOfData):
            sess.run(toy.train)
    assert sess.stop_reason == ms.StopReason.END_OF_DATA


def test_eval_steps_and_runs_without_hooks(tmp_path):
    recorder = Recorder()
    with ms.MonitoredTrainingSession(
        toy.init_fn,
        data=toy.batches(5),
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=1,
        hooks=[recorder, ms.StopAtStepHook(last_step=3)],
    ) as sess:
        sess.run(toy.evaluate, toy.batch(0))
        assert sess.global_step == 0
        sess.run_without_hooks(toy.train)
        sess.run(toy.train)
        sess.run_without_hooks(toy.train)
        assert sess.should_stop()
        assert sess.global_step == 3
    assert [line for line in recorder.trace if "before" in line] == ["A.before@1"]
    assert ms.CheckpointStore(tmp_path).steps() == [2, 3]
    toy.assert_same_bits(sess.state_copy(), toy.straight(3))


def test_error_in_the_body_saves_nothing_and_tells_the_hooks(tmp_path):
    trace = []
    with pytest.raises(KeyError, match="mine"):
        with ms.MonitoredTrainingSession(
            toy.init_fn,
            data=toy.batches(5),
            checkpoint_dir=tmp_path,
            hooks=[Recorder("A", trace), Recorder("B", trace)],
        ) as sess:
            sess.run(toy.train)
            raise KeyError("mine")
    assert trace[-2:] == ["B.on_error:KeyError", "A.on_error:KeyError"]
    assert ms.latest_checkpoint(tmp_path) is None
    assert sess.stop_reason == ms.StopReason.ERROR


@pytest.mark.parametrize("leave", ["break", "request_stop", "end_of_data", "close"])
def test_every_clean_way_out_commits_the_step(tmp_path, leave):
    with ms.MonitoredTrainingSession(toy.init_fn, data=toy.batches(9), checkpoint_dir=tmp_path) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
            if sess.global_step == 4:
                if leave == "break":
                    break
                if leave == "request_stop":
                    sess.request_stop("enough")
                if leave == "end_of_data":
                    raise ms.EndOfData
                if leave == "close":
                    sess.close()
    assert ms.latest_checkpoint(tmp_path) == 4
    expected = {"break": "BODY_LEFT", "request_stop": "REQUESTED", "end_of_data": "BODY_LEFT", "close": "BODY_LEFT"}
    assert sess.stop_reason is not None
    assert sess.stop_reason.name == expected[leave]


def test_session_without_anything():
    with ms.MonitoredTrainingSession() as sess:
        assert sess.global_step == 0
        assert sess.state == {}
        assert not sess.should_stop()
        assert sess.is_chief


def test_users_arrays_stay_usable_and_python_leaves_become_arrays():
    mine = jnp.arange(3.0)
    theirs = np.arange(3.0)

    @ms.train_step
    def step(state):
        return {"a": state["a"] + 1, "b": state["b"] * 2, "n": state["n"] + 1}, {}

    with ms.MonitoredTrainingSession(lambda: {"a": mine, "b": theirs, "n": 0}) as sess:
        for _ in range(3):
            sess.run(step)
        assert float(sess.state["a"][0]) == 3.0
        assert int(sess.state["n"]) == 3
    assert mine.tolist() == [0, 1, 2]
    assert theirs.tolist() == [0, 1, 2]


def test_third_attempt_restores_what_the_second_one_wrote(tmp_path):
    data = toy.batches(9)
    for last_step in (3, 6, 9):
        with ms.MonitoredTrainingSession(
            toy.init_fn, data=data, checkpoint_dir=tmp_path, hooks=[ms.StopAtStepHook(last_step=last_step)]
        ) as sess:
            while not sess.should_stop():
                sess.run(toy.train)
    toy.assert_same_bits(sess.state_copy(), toy.straight(9))


def test_restore_of_a_chosen_older_step(tmp_path):
    def session(**options):
        return ms.MonitoredTrainingSession(
            toy.init_fn,
            data=toy.batches(8),
            checkpoint_dir=tmp_path,
            save_checkpoint_steps=2,
            checkpoint=ms.CheckpointOptions(**options),
        )

    with session() as sess:
        while not sess.should_stop():
            sess.run(toy.train)
    with pytest.raises(ms.MonsessError, match=r"newer checkpoints \[6, 8\]"):
        session(restore_step=4)
    with session(restore_step=4, newer="aside") as sess:
        assert sess.restored_from == 4
        while not sess.should_stop():
            sess.run(toy.train)
        toy.assert_same_bits(sess.state_copy(), toy.straight(8))
    assert ms.CheckpointStore(tmp_path).steps() == [2, 4, 6, 8]
    assert sorted(p.name.rsplit("-", 1)[0] for p in tmp_path.glob("aside-*")) == ["aside-6", "aside-8"]


class Unreadable:
    """An input whose state cannot be read."""

    def __iter__(self):
        return self

    def __next__(self):
        return toy.batch(0)

    def get_state(self):
        raise OSError("no state today")

    def set_state(self, state):
        pass


class FailsAtBegin(ms.SessionRunHook):
    def begin(self):
        raise OSError("cannot begin")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"data": Unreadable()}, OSError),
        ({"hooks": [FailsAtBegin()]}, OSError),
        ({"hooks": [_SAME := ms.StepCounterHook(), _SAME]}, ms.HookError),
        ({"checkpoint_dir": ""}, ValueError),
    ],
    ids=["data", "begin", "hooks", "store"],
)
def test_a_session_that_cannot_be_made_leaves_nothing_behind(arguments, error):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    threads, sessions = set(threading.enumerate()), set(session_module._open_sessions)
    with pytest.raises(error):
        ms.MonitoredTrainingSession(toy.init_fn, **arguments)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    deadline = time.monotonic() + 5
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
    assert set(session_module._open_sessions) <= sessions
