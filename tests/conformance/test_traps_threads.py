"""W-03, W-04, W-10 and W-11: threads of a session lose no error and hold nobody up."""

from __future__ import annotations

import logging
import threading

import pytest
from traps import Recorder, WithThread, count, drive, endings, init_fn, steps_of, trap

import monsess as ms


@trap("W-03", "W-04")
def test_a_threads_error_shows_at_once_ends_the_loop_and_is_raised(tmp_path):
    recorder, failing = Recorder(), WithThread(OSError("the data thread died"))
    with pytest.raises(OSError, match="the data thread died"):
        with ms.MonitoredTrainingSession(init_fn, hooks=[recorder, failing], checkpoint_dir=tmp_path) as sess:
            assert sess.should_stop()
            assert sess.stop_reason == ms.StopReason.ERROR
            assert "the data thread died" in str(sess.stop_reason)
    assert endings(recorder.trace) == ["A.on_error"]
    assert recorder.errors == [failing.error]
    assert steps_of(tmp_path) == []


@trap("W-04")
def test_the_bodys_error_is_raised_and_the_threads_is_attached():
    recorder, failing = Recorder(), WithThread(OSError("the data thread died"))
    with pytest.raises(KeyError) as caught:
        with ms.MonitoredTrainingSession(init_fn, hooks=[recorder, failing]):
            raise KeyError("mine")
    assert any("the data thread died" in note for note in caught.value.__notes__)
    assert recorder.errors == [caught.value]
    assert endings(recorder.trace) == ["A.on_error"]


@trap("W-04")
@pytest.mark.parametrize("leave", ["end of data", "close"])
def test_a_clean_way_out_does_not_hide_a_threads_error(tmp_path, leave):
    recorder, failing = Recorder(), WithThread(OSError("the data thread died"))
    with pytest.raises(OSError, match="the data thread died"):
        with ms.MonitoredTrainingSession(init_fn, hooks=[recorder, failing], checkpoint_dir=tmp_path) as sess:
            if leave == "close":
                sess.close()
            raise ms.EndOfData
    assert endings(recorder.trace) == ["A.on_error"]
    assert steps_of(tmp_path) == []


@trap("W-06", "W-08")
def test_threads_are_stopped_also_when_an_end_fails():
    hook = WithThread()
    with pytest.raises(KeyError, match="A"):
        with ms.MonitoredTrainingSession(init_fn, hooks=[hook, Recorder(end=KeyError("A"))]):
            pass
    hook.thread.join(10)
    assert not hook.thread.is_alive()


@trap("W-10")
@pytest.mark.parametrize("raised", [False, True], ids=["fresh", "raised before"])
def test_the_coordinator_takes_any_exception_object(raised):
    error = ValueError("mine")
    if raised:
        with pytest.raises(ValueError):
            raise error
    coord = ms.Coordinator()
    coord.request_stop(error)
    assert coord.should_stop()
    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            coord.join()
    coord.clear_stop()
    assert coord.join() == ()


@trap("W-10", "W-03")
def test_a_hooks_thread_can_report_an_exception_that_was_never_raised():
    class Reports(ms.SessionRunHook):
        def after_create_session(self, session, coord):
            coord.request_stop(OSError("disk full"))

    with pytest.raises(OSError, match="disk full"):
        with ms.MonitoredTrainingSession(init_fn, hooks=[Reports()]) as sess:
            drive(sess)


class Stuck(ms.SessionRunHook):
    """Starts a thread that ignores the stop until `release` is set."""

    def __init__(self):
        self.release = threading.Event()

    def after_create_session(self, session, coord):
        thread = threading.Thread(target=self.release.wait, name="stuck-reader", daemon=True)
        coord.register_thread(thread)
        thread.start()


@trap("W-11")
def test_threads_that_outlive_the_grace_period_are_named(caplog):
    hook = Stuck()
    with caplog.at_level(logging.WARNING, "monsess"):
        with ms.MonitoredTrainingSession(init_fn, hooks=[hook], stop_grace_period_secs=0.01) as sess:
            sess.run(count)
    hook.release.set()
    assert "stuck-reader" in caplog.text
    coord = ms.Coordinator()
    Stuck.after_create_session(stuck := Stuck(), None, coord)
    coord.request_stop()
    with pytest.raises(RuntimeError, match="stuck-reader"):
        coord.join(stop_grace_period_secs=0.01)
    stuck.release.set()
