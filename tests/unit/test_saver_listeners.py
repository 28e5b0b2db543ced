"""CheckpointSaverListener in real sessions: the order of its calls, what it may look at, how it stops training."""

from __future__ import annotations

import pytest
import ticks

import monsess as ms

OFF = {"save_checkpoint_secs": None, "save_checkpoint_steps": None}


class Listener(ms.CheckpointSaverListener):
    """Writes its calls down; ``answers`` gives what after_save returns by step, ``failing`` what raises."""

    def __init__(self, name, trace, answers=None, failing=None):
        self.name, self.trace, self.answers, self.failing = name, trace, answers or {}, failing

    def called(self, what, step=None):
        self.trace.append(f"{self.name}.{what}" + ("" if step is None else f"@{step}"))
        if what == self.failing:
            raise KeyError(self.name)

    def begin(self):
        self.called("begin")

    def before_save(self, session, step):
        self.called("before_save", step)

    def after_save(self, session, step):
        self.called("after_save", step)
        return self.answers.get(step)

    def end(self, session, step):
        self.called("end", step)


class Hook(ms.SessionRunHook):
    """A hook that writes its calls into the same trace."""

    def __init__(self, trace):
        self.trace = trace

    def before_run(self, run_context):
        self.trace.append(f"hook.before@{run_context.global_step}")

    def after_run(self, run_context, run_values):
        self.trace.append(f"hook.after@{run_context.global_step}")

    def end(self, session):
        self.trace.append("hook.end")

    def on_error(self, session, error):
        self.trace.append(f"hook.on_error:{type(error).__name__}")


def session(directory, *hooks, **arguments):
    return ms.MonitoredTrainingSession(ticks.init_fn, checkpoint_dir=directory, hooks=hooks, **OFF, **arguments)


def run_and_commit(sess):
    """One run whose save is committed when this returns."""
    sess.run(ticks.one)
    ticks.wait_for_saves(sess, sess.summary()["saves"] + 1)


@pytest.mark.parametrize("saver_first", [True, False])
def test_order_of_all_calls(tmp_path, saver_first):
    trace = []
    saver = ms.CheckpointSaverHook(save_steps=2, listeners=[Listener("a", trace), Listener("b", trace)])
    hooks = [saver, Hook(trace)] if saver_first else [Hook(trace), saver]
    with session(tmp_path, *hooks) as sess:
        sess.run(ticks.one)
        run_and_commit(sess)
        sess.run(ticks.one)
    endings = ["hook.end", "a.end@3 b.end@3"]
    assert (
        trace
        == (
            "a.begin b.begin "
            "hook.before@0 hook.after@1 "
            "hook.before@1 hook.after@2 a.before_save@2 b.before_save@2 "
            "a.after_save@2 b.after_save@2 hook.before@2 hook.after@3 "
            "a.before_save@3 b.before_save@3 a.after_save@3 b.after_save@3 "
            + " ".join(endings if saver_first else endings[::-1])
        ).split()
    )


def test_before_save_sees_the_step_and_after_save_the_commit(tmp_path):
    seen = []

    class Look(ms.CheckpointSaverListener):
        def before_save(self, session, step):
            seen.append(("before", step, session.global_step, float(session.state["count"])))
            assert step not in ms.CheckpointStore(tmp_path).steps()

        def after_save(self, session, step):
            seen.append(("after", step, session.global_step, float(ms.load_checkpoint(tmp_path, step)["count"])))
            assert ms.CheckpointStore(tmp_path).verify(step) == []

    with session(tmp_path, ms.CheckpointSaverHook(save_steps=2, listeners=[Look()])) as sess:
        sess.run(ticks.one)
        run_and_commit(sess)
        sess.run(ticks.look)
        sess.run(ticks.one)
    assert seen == [("before", 2, 2, 2.0), ("after", 2, 2, 2.0), ("before", 3, 3, 3.0), ("after", 3, 3, 3.0)]


def test_requested_saves_are_told_to_listeners_too(tmp_path):
    trace = []
    with session(tmp_path, ms.CheckpointSaverHook(save_steps=100, listeners=[Listener("a", trace)])) as sess:
        sess.run(ticks.one)
        sess.request_save()
        sess.request_save()
        sess.run(ticks.one)
        sess.request_save()
    assert trace[-1] == "a.end@2"
    assert [call for call in trace if "before" in call] == ["a.before_save@1", "a.before_save@2"]
    assert [call for call in trace if "after" in call] == ["a.after_save@1", "a.after_save@2"]


def test_true_result_stops_and_every_listener_is_told(tmp_path, lines):
    trace = []
    listeners = [Listener("a", trace, answers={2: True}), Listener("b", trace)]
    with session(tmp_path, ms.CheckpointSaverHook(save_steps=1, listeners=listeners)) as sess:
        run_and_commit(sess)
        run_and_commit(sess)
        assert not sess.should_stop()
        sess.run(ticks.one)
        assert trace[-3:] == ["b.after_save@2", "a.before_save@3", "b.before_save@3"]
        assert sess.should_stop()
        with pytest.raises(ms.RunAfterStopError):
            sess.run(ticks.one)
    assert sess.stop_reason == ms.StopReason.REQUESTED
    assert "CheckpointSaverListener" in sess.stop_reason.text
    assert any("requested that training be stopped" in line for line in lines())
    assert sess.global_step == 3


def test_true_result_at_the_end_changes_nothing(tmp_path):
    trace = []
    listener = Listener("a", trace, answers={1: True})
    with session(tmp_path, ms.CheckpointSaverHook(save_steps=9, listeners=[listener]), Hook(trace)) as sess:
        sess.run(ticks.one)
    assert trace[-3:] == ["a.after_save@1", "hook.end", "a.end@1"]
    assert ms.latest_checkpoint(tmp_path) == 1


def test_w19_restored_step_is_not_saved_again(tmp_path):
    trace = []
    for _ in range(2):
        trace.clear()
        hooks = [ms.StopAtStepHook(last_step=1), ms.CheckpointSaverHook(save_steps=1, listeners=[Listener("a", trace)])]
        with session(tmp_path, *hooks) as sess:
            while not sess.should_stop():
                sess.run(ticks.one)
    assert trace == ["a.begin", "a.end@1"]


@pytest.mark.parametrize("failing", ["before_save", "after_save"])
def test_error_in_a_listener_ends_the_session_and_says_where_it_comes_from(tmp_path, failing):
    trace = []
    saver = ms.CheckpointSaverHook(save_steps=2, listeners=[Listener("a", trace, failing=failing)])
    with pytest.raises(KeyError, match="a") as caught:
        with session(tmp_path, saver, Hook(trace)) as sess:
            while sess.global_step < 50:
                sess.run(ticks.one)
    assert any("Listener" in note and failing in note for note in getattr(caught.value, "__notes__", ()))
    assert "hook.on_error:KeyError" in trace
    assert not any(".end" in call for call in trace)
    steps = ms.CheckpointStore(tmp_path).steps()
    assert steps == [] if failing == "before_save" else 2 in steps
    assert all(ms.CheckpointStore(tmp_path).verify(step) == [] for step in steps)


@pytest.mark.parametrize("failing", ["before_save", "after_save"])
def test_error_in_a_listener_at_the_end(tmp_path, failing):
    trace = []
    saver = ms.CheckpointSaverHook(save_steps=100, listeners=[Listener("a", trace, failing=failing)])
    with pytest.raises(KeyError, match="a"), session(tmp_path, saver, Hook(trace)) as sess:
        sess.run(ticks.one)
    assert trace[-1] == "hook.on_error:KeyError"
    assert ms.CheckpointStore(tmp_path).steps() == ([] if failing == "before_save" else [1])


def test_listener_of_a_session_that_recovers_is_told_once_per_commit(tmp_path):
    class FailOnce(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.global_step == 3 and run_context.session.recoveries == 0:
                raise ConnectionError

    trace = []
    hooks = [ms.CheckpointSaverHook(save_steps=2, listeners=[Listener("a", trace)]), FailOnce()]
    recovery = ms.Recovery(is_transient=lambda error: isinstance(error, ConnectionError), backoff_secs=0)
    with session(tmp_path, *hooks, recovery=recovery) as sess:
        while sess.global_step < 5:
            sess.run(ticks.one)
    assert sess.recoveries == 1
    assert [call for call in trace if "before" in call] == [f"a.before_save@{step}" for step in (2, 4, 5)]
    assert [call for call in trace if "after" in call] == [f"a.after_save@{step}" for step in (2, 4, 5)]
    assert (trace[0], trace[-1]) == ("a.begin", "a.end@5")
