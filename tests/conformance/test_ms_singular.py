"""The behaviours of TensorFlow's session without recovery, MS-124 to MS-131: here Recovery(max_restarts=0)."""

from __future__ import annotations

import counting
import jax
import pytest
from conforms import conforms

import monsess as ms

NO_RECOVERY = ms.Recovery(max_restarts=0, is_transient=lambda error: True, allow_reinit=True)


@conforms("MS-124")
def test_state_is_initialised():
    with counting.session(recovery=NO_RECOVERY) as sess:
        assert float(sess.run(counting.read)) == 0
        assert counting.counted(sess.run(counting.count)) == 1


@conforms("MS-125")
def test_transient_error_that_is_caught_leaves_the_session_usable():
    error = counting.AbortedError()
    hook = counting.Raising("before", error, 3)
    with counting.session(hooks=[hook], recovery=NO_RECOVERY) as sess:
        assert [counting.counted(sess.run(counting.count)) for _ in range(2)] == [1, 2]
        with pytest.raises(counting.AbortedError) as caught:
            sess.run(counting.count)
        assert caught.value is error
        assert not sess.should_stop()
        assert float(sess.run(counting.read)) == 2
        assert counting.counted(sess.run(counting.count)) == 3
    assert sess.stop_reason == ms.StopReason.BODY_LEFT
    assert (hook.called("acs"), hook.called("end"), sess.recoveries) == (1, 1, 0)


@conforms("MS-126")
def test_transient_error_that_is_not_caught_leaves_the_with_block():
    error = counting.AbortedError()
    hook = counting.Raising("before", error, 1)
    with pytest.raises(counting.AbortedError) as caught:
        with counting.session(hooks=[hook], recovery=NO_RECOVERY) as sess:
            sess.run(counting.count)
            raise AssertionError("not reached")
    assert caught.value is error
    assert sess.should_stop()
    assert (hook.called("acs"), hook.called("end"), hook.called("on_error")) == (1, 0, 1)


@conforms("MS-126")
def test_transient_error_at_the_creation_passes_out_of_the_constructor():
    calls = []

    def init_fn():
        calls.append(None)
        raise counting.AbortedError

    with pytest.raises(counting.AbortedError):
        ms.MonitoredTrainingSession(init_fn, recovery=NO_RECOVERY)
    assert len(calls) == 1


@conforms("MS-127", instead="The signal is EndOfData (W-01).")
def test_end_of_data_is_a_clean_end():
    hook = counting.Raising("before", ms.EndOfData(), 2)
    with counting.session(hooks=[hook], recovery=NO_RECOVERY) as sess:
        sess.run(counting.count)
        assert not sess.should_stop()
        sess.run(counting.count)
        raise AssertionError("not reached")
    assert sess.should_stop()
    assert hook.trace[-1] == "B.end"


@conforms("MS-128")
def test_error_of_a_thread_lets_runs_go_on_and_is_raised_at_the_exit():
    error = counting.AbortedError("of a thread")  # no error is transient here
    hook = counting.ReportingThread(error)
    with pytest.raises(counting.AbortedError) as caught:
        with counting.session(hooks=[hook], recovery=NO_RECOVERY) as sess:
            assert [counting.counted(sess.run(counting.count)) for _ in range(3)] == [1, 2, 3]
            assert sess.should_stop()
            assert hook.creations == 1
    assert caught.value is error
    assert sess.should_stop()


@conforms("MS-129")
@conforms(
    "MS-131",
    instead=(
        "There is no session under the session (W-54). state is the live state while the session is open, and "
        "run_without_hooks and eval steps run on it without any hook. Afterwards it can be read, but nothing run."
    ),
)
def test_state_is_at_hand_and_the_session_of_no_use_once_it_is_left():
    recorder = counting.Recorder()
    with counting.session(hooks=[recorder], recovery=NO_RECOVERY) as sess:
        assert not hasattr(sess, "raw_session")
        sess.run(counting.count)
        assert isinstance(sess.state["count"], jax.Array)
        assert float(sess.state["count"]) == 1
        assert counting.counted(sess.run_without_hooks(counting.count)) == 2
        assert float(sess.state["count"]) == 2
        assert recorder.called("before") == 1
        assert not sess.should_stop()
    assert sess.should_stop()
    assert float(sess.state["count"]) == 2
    with pytest.raises(ms.SessionClosedError):
        sess.run_without_hooks(counting.count)
