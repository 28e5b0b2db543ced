"""W-05 and W-12 to W-14: recovery is bounded, visible, goes back to a checkpoint, and takes the hooks with it."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from traps import (
    FailsAt,
    Passing,
    Recorder,
    count,
    drive,
    endings,
    init_fn,
    recovery,
    session,
    steps_of,
    trap,
)

import monsess as ms


class CountsRuns(ms.SessionRunHook):
    """Counts runs as a local counter would, and keeps the count in its state."""

    def begin(self):
        self.runs, self.seen, self.created = 0, [], []

    def after_create_session(self, session, coord):
        self.created.append((session.recoveries, session.restored_from, session.global_step, self.runs))

    def after_run(self, run_context, run_values):
        self.runs += 1
        self.seen.append((run_context.global_step, self.runs))

    def state_dict(self):
        return {"runs": self.runs}

    def load_state_dict(self, state):
        self.runs = state["runs"]


@trap("W-12")
def test_a_fault_that_stays_ends_the_session_in_bounded_time_with_growing_pauses(tmp_path, caplog):
    class Always(ms.SessionRunHook):
        def before_run(self, run_context):
            raise Passing("the network is gone")

    policy = recovery(max_restarts=4, backoff_secs=2.0, allow_reinit=True)
    with ms.testing.FakeClock() as clock, pytest.raises(Passing, match="the network is gone") as caught:
        with ms.MonitoredTrainingSession(init_fn, hooks=[Always()], checkpoint_dir=tmp_path, recovery=policy) as sess:
            drive(sess)
    assert clock.slept == [2.0, 4.0, 8.0, 16.0]
    assert any("Gave up after 4 restarts" in note for note in caught.value.__notes__)
    assert sess.recoveries == 4
    assert sess.summary()["recoveries"] == 4
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [f"restart {n} of 4" in warnings[n - 1].getMessage() for n in (1, 2, 3, 4)] == [True] * 4


@trap("W-12")
def test_a_creation_that_always_fails_gives_up_too():
    calls = []

    def broken():
        calls.append(1)
        raise Passing("no device")

    with pytest.raises(Passing, match="no device"):
        ms.MonitoredTrainingSession(broken, recovery=recovery(max_restarts=3))
    assert len(calls) == 4


@trap("W-12")
def test_progress_gives_the_whole_budget_back(tmp_path):
    """Six restarts with a budget of one: each comes after a newer checkpoint than the one before."""
    failing = FailsAt(2, 4, 6, 8, 10, 12)
    with ms.MonitoredTrainingSession(
        init_fn,
        hooks=[failing, ms.StopAtStepHook(last_step=13)],
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=1,
        recovery=recovery(max_restarts=1),
    ) as sess:
        drive(sess)
    assert sess.recoveries == 6
    assert sess.global_step == 13


@trap("W-13")
def test_without_a_checkpoint_a_recovery_is_refused(tmp_path):
    recorder = Recorder()
    with pytest.raises(ms.MonsessError, match=r"no checkpoint to recover from.*checkpoint_dir.*allow_reinit") as caught:
        with ms.MonitoredTrainingSession(init_fn, hooks=[recorder, FailsAt(3)], recovery=recovery()) as sess:
            drive(sess)
    assert isinstance(caught.value.__cause__, Passing)
    assert endings(recorder.trace) == ["A.on_error"]
    assert "A.after_run@1" not in recorder.trace[recorder.trace.index("A.after_run@3") :]


@trap("W-13")
def test_without_a_commit_yet_a_recovery_is_refused_too(tmp_path):
    """A directory is not enough: going on from step 0 would be the silent restart all the same."""
    with pytest.raises(ms.MonsessError, match=r"no checkpoint to recover from yet.*Save more often") as caught:
        with session(tmp_path, FailsAt(3), save_checkpoint_steps=100, recovery=recovery()) as sess:
            drive(sess)
    assert "Pass checkpoint_dir" not in str(caught.value)
    assert steps_of(tmp_path) == []


@trap("W-13")
def test_starting_again_from_nothing_has_to_be_asked_for():
    counter = CountsRuns()
    with ms.MonitoredTrainingSession(
        init_fn, hooks=[counter, FailsAt(3), ms.StopAtStepHook(last_step=4)], recovery=recovery(allow_reinit=True)
    ) as sess:
        drive(sess)
        assert float(sess.state["n"]) == 4.0
    assert counter.seen == [(1, 1), (2, 2), (3, 3), (1, 1), (2, 2), (3, 3), (4, 4)]
    assert counter.created == [(0, None, 0, 0), (1, None, 0, 0)]


@trap("W-14", "W-19")
def test_hooks_are_told_of_a_recovery_and_go_back_with_the_state(tmp_path):
    counter, recorder = CountsRuns(), Recorder(before_run=Passing("once"), at_step=5)
    with ms.MonitoredTrainingSession(
        init_fn,
        hooks=[counter, recorder, ms.StopAtStepHook(last_step=7)],
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=3,
        recovery=recovery(),
    ) as sess:
        drive(sess)
        assert float(sess.state["n"]) == 7.0
    assert counter.created == [(0, None, 0, 0), (1, 3, 3, 3)]
    # Whatever a run of steps is repeated, step and local count belong together.
    assert counter.seen == [(n, n) for n in (1, 2, 3, 4, 5, 4, 5, 6, 7)]
    assert recorder.trace.count("A.begin") == 1
    assert steps_of(tmp_path) == [3, 6, 7]
    assert sess.restored_from == 3


@trap("W-14")
def test_a_hook_without_anything_to_remember_is_not_left_with_a_later_state(tmp_path):
    """``state_dict`` returns ``{}`` until there is something; a rollback to then has to take the rest back."""

    class Best(ms.SessionRunHook):
        def begin(self):
            self.state = {}

        def after_run(self, run_context, run_values):
            if run_context.global_step == 2:
                self.state = {"best": 2}

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    best = Best()
    found = []

    class Looks(ms.SessionRunHook):
        def after_create_session(self, session, coord):
            found.append((session.global_step, best.state))

    with ms.MonitoredTrainingSession(
        init_fn,
        hooks=[best, FailsAt(2), Looks(), ms.StopAtStepHook(last_step=3)],
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=1,
        recovery=recovery(),
    ) as sess:
        drive(sess)
    assert found == [(0, {}), (1, {})]


@trap("W-14")
def test_a_hook_that_the_checkpoint_does_not_know_goes_back_to_its_beginning(tmp_path):
    with session(tmp_path, ms.StopAtStepHook(last_step=2)) as sess:
        drive(sess)
    counter = CountsRuns()
    with session(tmp_path, counter, FailsAt(4), ms.StopAtStepHook(last_step=5), recovery=recovery()) as sess:
        drive(sess)
    assert counter.seen == [(3, 1), (4, 2), (3, 1), (4, 2), (5, 3)]


@trap("W-14")
def test_a_fresh_start_is_no_restore():
    class Loads(ms.SessionRunHook):
        loaded = ()

        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            self.loaded = (*self.loaded, state)

    hook = Loads()
    with ms.MonitoredTrainingSession(init_fn, hooks=[hook, FailsAt(1)], recovery=recovery(allow_reinit=True)) as sess:
        assert hook.loaded == ()
        sess.run(count)
        assert sess.recoveries == 1
    assert hook.loaded == ({"a": 1},)


@trap("W-14")
def test_schedules_go_back_too(tmp_path):
    """What is logged after a rollback is what a straight run logs there."""
    lines = []
    logging_hook = ms.LoggingTensorHook(["n"], every_n_iter=2, formatter=lambda v: lines.append(float(v["n"])) or "")
    saves = []

    class Listener(ms.CheckpointSaverListener):
        def after_save(self, session, step):
            saves.append(step)

    with ms.MonitoredTrainingSession(
        init_fn,
        hooks=[
            logging_hook,
            ms.CheckpointSaverHook(save_steps=3, listeners=[Listener()]),
            FailsAt(5),
            ms.StopAtStepHook(last_step=8),
        ],
        checkpoint_dir=tmp_path,
        save_checkpoint_secs=None,
        recovery=recovery(),
    ) as sess:
        drive(sess)
    assert lines == [1, 2, 4, 4, 6, 8]
    assert saves == [3, 6, 8]


@trap("W-05")
@pytest.mark.parametrize("last_step", [3, 5])
def test_a_stop_asked_for_in_a_run_that_is_rolled_back_is_not_lost(tmp_path, last_step):
    """The stop comes in the run to step 3, whose after_run then fails for once: it is repeated, and the stop holds."""

    class Asks(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.global_step == 3 and not run_context.session.recoveries:
                run_context.request_stop("once, by hand")

    with ms.MonitoredTrainingSession(
        init_fn,
        hooks=[Asks(), FailsAt(3), ms.StopAtStepHook(last_step=last_step)],
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=1,
        recovery=recovery(),
    ) as sess:
        drive(sess)
    assert sess.recoveries == 1
    assert sess.global_step <= 3
    assert steps_of(tmp_path)[-1] == sess.global_step
    assert sess.stop_reason is not None
    assert sess.stop_reason.name == ("LAST_STEP" if sess.global_step == last_step else "REQUESTED")


@trap("W-05", "W-14", "W-29")
def test_the_last_step_is_reached_although_it_was_rolled_back_once(tmp_path):
    with ms.MonitoredTrainingSession(
        init_fn,
        hooks=[FailsAt(4), ms.StopAtStepHook(last_step=4)],
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=2,
        recovery=recovery(),
    ) as sess:
        drive(sess)
        assert float(sess.state["n"]) == 4.0
    assert sess.stop_reason == ms.StopReason.LAST_STEP
    assert steps_of(tmp_path) == [2, 4]


@trap("W-14")
def test_what_hooks_held_of_a_rolled_back_run_stays_readable(tmp_path):
    kept = []

    class Keeps(ms.SessionRunHook):
        def before_run(self, run_context):
            return ms.SessionRunArgs(["n", lambda state, outputs: state["n"]])

        def after_run(self, run_context, run_values):
            kept.append(run_values.results)

    with ms.MonitoredTrainingSession(
        init_fn,
        hooks=[Keeps(), FailsAt(3), ms.StopAtStepHook(last_step=4)],
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=2,
        recovery=recovery(),
    ) as sess:
        drive(sess)
    assert np.asarray(kept).tolist() == [[n, n] for n in (1, 2, 3, 3, 4)]
