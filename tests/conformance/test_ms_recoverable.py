"""The behaviours of TensorFlow's recoverable session, MS-048 to MS-064, seen at the one public session.

TensorFlow counts the sessions that a creator makes; here each one is a call of ``init_fn``, since nothing is saved and
starting again is allowed.
"""

from __future__ import annotations

import counting
import pytest
from conforms import conforms

import monsess as ms


def session(hooks=(), policy=None):
    """A session that may start again, and what counts how often it did."""
    creator = counting.CountedInit()
    return ms.MonitoredTrainingSession(creator, hooks=hooks, recovery=policy or counting.recovery()), creator


@conforms("MS-048", "MS-049", "MS-050")
def test_state_is_created_once_while_runs_succeed():
    sess, creator = session()
    with sess:
        assert creator.calls == 1
        assert [counting.counted(sess.run(counting.count)) for _ in range(4)] == [1, 2, 3, 4]
        assert float(sess.run(counting.read)) == 4
        assert not sess.should_stop()
    assert creator.calls == 1
    assert sess.recoveries == 0


@conforms("MS-051", "MS-052")
def test_each_transient_error_creates_the_state_once_more_and_repeats_the_call():
    hook = counting.Raising("before", counting.AbortedError(), 3, 5, 6)
    sess, creator = session([hook])
    with sess:
        values, creations = [], []
        for _ in range(5):
            values.append(counting.counted(sess.run(counting.count)))
            creations.append(creator.calls)
        assert values == [1, 2, 1, 1, 2]
        assert creations == [1, 1, 2, 4, 4]
        assert sess.recoveries == 3
        assert not sess.should_stop()
    assert hook.called("before") == 5
    assert hook.called("acs") == 4
    assert hook.called("begin") == 1


@conforms("MS-053")
def test_error_of_the_creation_during_a_recovery_comes_out_of_run():
    calls = []

    def init_fn():
        calls.append(None)
        if len(calls) == 2:
            raise IndexError("nothing left")
        return counting.init_fn()

    aborted = counting.AbortedError()
    hook = counting.Raising("before", aborted, 2)
    with pytest.raises(IndexError, match="nothing left") as caught:
        with ms.MonitoredTrainingSession(init_fn, hooks=[hook], recovery=counting.recovery()) as sess:
            sess.run(counting.count)
            sess.run(counting.count)
    assert caught.value.__cause__ is aborted
    assert sess.should_stop()
    assert hook.trace[-1] == "B.on_error"


def with_hooks(sess, hook):
    """The second run meets the thread's report in a hook."""
    return counting.counted(sess.run(counting.count))


def step_fn_with_hooks(sess, hook):
    """The same in a step function."""
    return counting.counted(sess.run_step_fn(lambda step_context: step_context.run_with_hooks(counting.count)))


def step_fn_without_hooks(sess, hook):
    """The step function itself meets it, and runs the step without hooks."""

    def step_fn(step_context):
        hook.report()
        return counting.counted(step_context.session.run_without_hooks(counting.count))

    return sess.run_step_fn(step_fn)


RUNS = {
    "run": with_hooks,
    "run_with_hooks": step_fn_with_hooks,
    "run_without_hooks": step_fn_without_hooks,
}
three_ways = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


@conforms("MS-054", "MS-055", "MS-059", "MS-062")
@three_ways
def test_transient_error_of_a_thread_lets_the_run_return_and_is_recovered_by_should_stop(run):
    hook = counting.ReportingThread(counting.AbortedError())
    sess, creator = session([hook])
    with sess:
        assert run(sess, hook) == 1
        assert not sess.should_stop()
        assert run(sess, hook) == 2
        assert hook.coord.should_stop()
        assert creator.calls == 1
        assert not sess.should_stop()
        assert creator.calls == hook.creations == 2
        assert sess.recoveries == 1
        assert not hook.coord.should_stop()
        assert run(sess, hook) == 1
        assert not sess.should_stop()
    assert creator.calls == 2


@conforms("MS-056", "MS-057", "MS-060", "MS-063")
@three_ways
def test_other_error_of_a_thread_stops_the_loop_and_is_raised_by_close(run):
    error = counting.CancelledError("of the thread")
    hook, recorder = counting.ReportingThread(error), counting.Recorder()
    sess, creator = session([hook, recorder])
    assert run(sess, hook) == 1
    assert not sess.should_stop()
    assert run(sess, hook) == 2
    assert sess.should_stop()
    assert creator.calls == hook.creations == 1
    with pytest.raises(counting.CancelledError) as caught:
        sess.close()
    assert caught.value is error
    assert sess.should_stop()
    assert recorder.trace[-1] == "A.on_error"  # the ending of an error, exactly once (W-04)
    assert recorder.called("end") == 0


@conforms("MS-058", "MS-061", "MS-064")
@three_ways
def test_run_that_fails_because_a_thread_met_a_transient_error_is_repeated(run):
    hook = counting.ReportingThread(counting.AbortedError(), stuck=counting.CancelledError())
    sess, creator = session([hook])
    with sess:
        assert run(sess, hook) == 1
        assert not sess.should_stop()
        assert run(sess, hook) == 1
        assert creator.calls == hook.creations == 2
        assert not sess.should_stop()
        assert run(sess, hook) == 2
    assert creator.calls == 2
    assert sess.recoveries == 1


@conforms("MS-064")
def test_step_without_hooks_that_is_stuck_repeats_the_whole_step_function():
    hook, calls = counting.ReportingThread(counting.AbortedError(), at_run=1, stuck=counting.CancelledError()), []

    @ms.train_step
    def step(state):
        hook.report()  # while the step is traced, the one time that its Python runs
        return counting.count.function(state)

    def step_fn(step_context):
        calls.append(step_context.session.global_step)
        step_context.session.run_without_hooks(counting.count)
        return counting.counted(step_context.session.run_without_hooks(step))

    sess, creator = session([hook])
    with sess:
        assert sess.run_step_fn(step_fn) == 2
        assert not sess.should_stop()
        assert sess.global_step == 2
    assert calls == [0, 0]
    assert creator.calls == 2
