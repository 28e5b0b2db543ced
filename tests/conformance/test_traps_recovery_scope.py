"""W-11 and W-15 to W-18: what a recovery takes back, what it repeats, and what it is for."""

from __future__ import annotations

import functools

import jax
import pytest
import toy
from traps import FailsAt, Passing, Recorder, count, drive, endings, init_fn, recovery, steps_of, trap

import monsess as ms

straight = functools.cache(toy.straight)


@trap("W-15")
@pytest.mark.parametrize("fails_at", [(2,), (3, 6), (9,)])
def test_a_recovery_rewinds_the_input_and_ends_in_the_same_bits(tmp_path, fails_at):
    """The last case fails in the run of the last batch, when the prefetch already knows that the data has ended."""
    with ms.MonitoredTrainingSession(
        toy.init_fn,
        data=toy.batches(9),
        hooks=[FailsAt(*fails_at)],
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=1,
        recovery=recovery(),
    ) as sess:
        drive(sess, toy.train)
        state = sess.state_copy()
    assert sess.recoveries == len(fails_at)
    assert sess.global_step == 9
    assert sess.stop_reason == ms.StopReason.END_OF_DATA
    toy.assert_same_bits(state, straight(9))


@trap("W-15")
def test_a_restart_after_an_exhausted_input_starts_no_new_epoch(tmp_path):
    for attempt in (1, 2):
        with ms.MonitoredTrainingSession(toy.init_fn, data=toy.batches(3), checkpoint_dir=tmp_path) as sess:
            assert sess.should_stop() == (attempt == 2)
            drive(sess, toy.train)
        assert sess.global_step == 3
        assert sess.stop_reason == ms.StopReason.END_OF_DATA


@trap("W-15")
def test_a_bare_iterator_that_cannot_go_back_is_an_error_and_not_a_gap(tmp_path):
    with pytest.raises(ms.InputPositionError, match=r"cannot go back to batch 2\b.*can be iterated again") as caught:
        with ms.MonitoredTrainingSession(
            toy.init_fn,
            data=iter(toy.batches(9)),
            hooks=[FailsAt(4)],
            checkpoint_dir=tmp_path,
            save_checkpoint_steps=2,
            recovery=recovery(),
        ) as sess:
            drive(sess, toy.train)
    assert isinstance(caught.value.__cause__, Passing)
    assert steps_of(tmp_path) == [2]


@trap("W-16")
def test_a_repeated_step_function_gets_a_session_that_works(tmp_path):
    seen = []

    def step_fn(step_context):
        outputs = step_context.run_with_hooks(count)
        step_context.session.run_without_hooks(count)
        seen.append(step_context.session.global_step)
        if len(seen) == 2:
            raise Passing("once")
        return float(outputs["n"])

    with ms.MonitoredTrainingSession(
        init_fn, checkpoint_dir=tmp_path, save_checkpoint_steps=1, recovery=recovery()
    ) as sess:
        assert sess.run_step_fn(step_fn) == 1.0
        sess.request_save()
        assert sess.run_step_fn(step_fn) in (3.0, 4.0)
        assert sess.recoveries == 1
        assert sess.global_step == seen[-1] == float(sess.state["n"])


@trap("W-16")
def test_an_error_caught_inside_a_step_function_holds_no_save_back(tmp_path):
    def step_fn(step_context):
        with pytest.raises(KeyError):
            step_context.run_with_hooks(count)
        for _ in range(4):
            step_context.run_with_hooks(count)

    hooks = [Recorder(before_run=KeyError("once"))]
    with ms.MonitoredTrainingSession(init_fn, hooks=hooks, checkpoint_dir=tmp_path, save_checkpoint_steps=2) as sess:
        sess.run_step_fn(step_fn)
        sess.run(count)
    assert steps_of(tmp_path) == [2, 4, 5]


@trap("W-17")
def test_the_user_says_which_errors_pass(tmp_path):
    class Quota(ValueError):
        pass

    def run(**policy):
        recorder = Recorder(before_run=Quota("full"), at_step=2)
        with ms.MonitoredTrainingSession(
            init_fn,
            hooks=[recorder, ms.StopAtStepHook(last_step=3)],
            checkpoint_dir=tmp_path / "-".join(policy),
            save_checkpoint_steps=1,
            recovery=ms.Recovery(backoff_secs=0, **policy),
        ) as sess:
            drive(sess)
        return sess.recoveries

    with pytest.raises(Quota):
        run()
    assert run(is_transient=lambda error: isinstance(error, Quota)) == 1
    with pytest.raises(Quota):
        run(is_transient=lambda error: isinstance(error, Quota), max_restarts=0)


@trap("W-17")
@pytest.mark.parametrize(
    ("message", "passes"), [("UNAVAILABLE: gone", True), ("ABORTED: once", True), ("INTERNAL: a bug", False)]
)
def test_errors_of_the_runtime_pass_by_their_status(tmp_path, message, passes):
    recorder = Recorder(before_run=jax.errors.JaxRuntimeError(message), at_step=2)

    def run():
        with ms.MonitoredTrainingSession(
            init_fn,
            hooks=[recorder, ms.StopAtStepHook(last_step=3)],
            checkpoint_dir=tmp_path,
            save_checkpoint_steps=1,
            recovery=ms.Recovery(backoff_secs=0),
        ) as sess:
            drive(sess)
        return sess.recoveries

    if passes:
        assert run() == 1
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            run()


@trap("W-18")
@pytest.mark.parametrize("where", ["begin", "end", "body"])
def test_what_is_outside_a_run_is_not_repeated_and_ends_in_the_usual_way(tmp_path, where):
    """Repeating a user's with-body is impossible, and a repeated ending would be a second one."""
    trace = []
    hooks = [Recorder("A", trace), Recorder("B", trace, **({} if where == "body" else {where: Passing(where)}))]
    with pytest.raises(Passing, match=where):
        with ms.MonitoredTrainingSession(
            init_fn, hooks=hooks, checkpoint_dir=tmp_path, save_checkpoint_steps=1, recovery=recovery()
        ) as sess:
            sess.run(count)
            if where == "body":
                raise Passing("body")
    assert endings(trace) == (["B.end", "A.end"] if where == "end" else ["B.on_error", "A.on_error"])
    assert [line for line in trace if "begin" in line] == ["A.begin", "B.begin"]
    assert steps_of(tmp_path) == ([] if where == "begin" else [1])


@trap("W-11")
def test_a_stuck_thread_does_not_delay_a_recovery_by_the_whole_grace_period(tmp_path, monkeypatch):
    graces = []
    join = ms.Coordinator.join

    def joined(self, threads=None, stop_grace_period_secs=120, ignore_live_threads=False):
        graces.append(stop_grace_period_secs)
        return join(self, threads, stop_grace_period_secs, ignore_live_threads)

    monkeypatch.setattr(ms.Coordinator, "join", joined)
    with ms.MonitoredTrainingSession(
        init_fn,
        hooks=[FailsAt(2), ms.StopAtStepHook(last_step=3)],
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=1,
        recovery=recovery(),
        stop_grace_period_secs=300,
    ) as sess:
        drive(sess)
    in_recovery, at_the_end = graces
    assert in_recovery <= 10
    assert at_the_end == 300
