"""What monsess's coordinator does beyond TensorFlow's: no poisoned join, no lost error, no unnamed straggler."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback

import pytest

from monsess import coordinator
from monsess.coordinator import Coordinator, LooperThread
from monsess.errors import EndOfData


def started(target, *args, name=None):
    thread = threading.Thread(target=target, args=args, daemon=True, name=name)
    thread.start()
    return thread


def test_w10_fresh_exception_outside_an_except_block_stops_and_is_raised_by_every_join():
    coord = Coordinator()
    coord.request_stop(ValueError("fresh"))
    assert coord.should_stop()
    for _ in range(3):
        with pytest.raises(ValueError, match="fresh"):
            coord.join()


@pytest.mark.parametrize("wrong", ["an error", ValueError, (1, 2), (ValueError, "text", None), 0])
def test_w10_what_is_no_exception_stops_all_the_same(wrong):
    coord = Coordinator()
    with pytest.raises(TypeError, match="request_stop takes an exception object"):
        coord.request_stop(wrong)
    assert coord.should_stop()
    with pytest.raises(TypeError, match="request_stop takes"):
        coord.join()


def test_empty_exc_info_is_a_plain_stop():
    coord = Coordinator()
    coord.request_stop(sys.exc_info())
    coord.join()
    assert coord.should_stop()


def test_exc_info_keeps_a_traceback_that_the_object_lost():
    coord = Coordinator()
    try:
        raise ValueError("lost")
    except ValueError as error:
        trace = error.__traceback__
        info = (type(error), error.with_traceback(None), trace)
    coord.request_stop(info)
    with pytest.raises(ValueError, match="lost") as caught:
        coord.join()
    assert any("raise ValueError" in line for line in traceback.format_tb(caught.tb))


def test_error_keeps_its_own_traceback_at_every_join():
    coord = Coordinator()

    def culprit():
        raise ValueError("mine")

    def work():
        with coord.stop_on_exception():
            culprit()

    started(work).join()
    depths = []
    for _ in range(3):
        with pytest.raises(ValueError, match="mine") as caught:
            coord.join()
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert "culprit" in frames
        depths.append(len(frames))
    assert len(set(depths)) == 1, "the traceback grows from join to join"


def test_w11_stragglers_are_named_in_a_warning(caplog):
    coord, end = Coordinator(), threading.Event()
    threads = [started(end.wait, 20, name="stuck-upload"), started(end.wait, 20, name="stuck-feed")]
    for thread in threads:
        coord.register_thread(thread)
    coord.request_stop()
    assert coord.join(stop_grace_period_secs=0.02, ignore_live_threads=True) == ("stuck-upload", "stuck-feed")
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "stuck-upload, stuck-feed" in record.getMessage()
    with pytest.raises(RuntimeError, match="stuck-upload stuck-feed"):
        coord.join(threads, stop_grace_period_secs=0)
    end.set()


def test_w11_each_join_has_its_own_grace_period():
    coord, end = Coordinator(), threading.Event()
    thread = started(end.wait, 20)
    coord.request_stop()
    for grace in (0.2, -1, 0.0):
        began = time.monotonic()
        coord.join([thread], stop_grace_period_secs=grace, ignore_live_threads=True)
        assert max(grace, 0.0) <= time.monotonic() - began < 2
    end.set()


def test_stragglers_are_named_even_if_an_error_is_raised(caplog):
    coord, end = Coordinator(), threading.Event()
    thread = started(end.wait, 20, name="stuck")
    coord.request_stop(ValueError("first"))
    with pytest.raises(ValueError, match="first"):
        coord.join([thread], stop_grace_period_secs=0.01)
    assert "stuck" in caplog.text
    end.set()


def test_a_stop_wakes_join(monkeypatch):
    monkeypatch.setattr(coordinator, "_FIRST_LOOK_SECS", 60)  # so that only the stop can wake it
    monkeypatch.setattr(coordinator, "_LONGEST_LOOK_SECS", 60)
    coord, end = Coordinator(), threading.Event()
    thread = started(end.wait, 20)
    joiner = started(lambda: coord.join([thread], stop_grace_period_secs=0, ignore_live_threads=True))
    time.sleep(0.2)
    assert joiner.is_alive(), "before a stop there is no limit"
    coord.request_stop()
    joiner.join(10)
    assert not joiner.is_alive()
    end.set()


def test_join_ends_as_soon_as_the_last_thread_does():
    coord = Coordinator()
    thread = started(time.sleep, 0.2)
    coord.request_stop()
    began = time.monotonic()
    coord.join([thread], stop_grace_period_secs=60)
    assert time.monotonic() - began < 5


def test_threads_that_never_started_and_the_joining_one_hold_nothing_up():
    coord = Coordinator()
    coord.register_thread(threading.Thread(target=print))
    coord.register_thread(threading.current_thread())
    assert coord.join(stop_grace_period_secs=float("inf")) == ()


def test_join_empties_the_register():
    coord, end = Coordinator(), threading.Event()
    coord.register_thread(started(end.wait, 20))
    coord.request_stop()
    coord.join(stop_grace_period_secs=0, ignore_live_threads=True)
    coord.join(stop_grace_period_secs=0)
    end.set()


def test_error_after_a_plain_stop_is_not_lost():
    coord = Coordinator()
    coord.request_stop()
    coord.request_stop(ValueError("while stopping"))
    with pytest.raises(ValueError, match="while stopping"):
        coord.join()


def test_further_errors_are_logged(caplog):
    coord = Coordinator()
    coord.request_stop(ValueError("first"))
    coord.request_stop(KeyError("second"))
    assert "ValueError: first" in caplog.text
    assert "KeyError: 'second'" in caplog.text
    assert isinstance(coord.requested_exception, ValueError)
    with pytest.raises(ValueError, match="first"):
        coord.raise_requested_exception()


def test_w02_subclasses_of_clean_types_are_clean():
    class MyEnd(EndOfData):
        pass

    coord = Coordinator()
    coord.request_stop(MyEnd())
    coord.join()
    assert coord.should_stop()
    coord.request_stop(MyEnd())  # after join too


def test_nothing_is_clean_if_nothing_is_named():
    coord = Coordinator(clean_stop_exception_types=[])
    coord.request_stop(EndOfData("end"))
    with pytest.raises(EndOfData):
        coord.join()


def test_clean_types_must_be_exception_types():
    with pytest.raises(TypeError, match="exception types, found 'EndOfData'"):
        Coordinator(clean_stop_exception_types=["EndOfData"])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_stop_on_exception_reports_everything(error):
    coord = Coordinator()
    with coord.stop_on_exception():
        raise error
    assert coord.should_stop()
    with pytest.raises(type(error)):
        coord.join()


def test_stop_on_exception_leaves_a_quiet_block_alone():
    coord = Coordinator()
    with coord.stop_on_exception():
        pass
    assert not coord.should_stop()


def test_joined_and_clear_stop():
    coord = Coordinator()
    assert not coord.joined
    coord.request_stop(ValueError("x"))
    with pytest.raises(ValueError, match="x"):
        coord.join()
    assert coord.joined
    coord.clear_stop()
    assert (coord.joined, coord.should_stop(), coord.requested_exception) == (False, False, None)
    assert coord.join() == ()


def test_waits_take_any_length():
    coord = Coordinator()
    assert not coord.wait_for_stop(-1)
    coord.request_stop()
    assert coord.wait_for_stop(float("inf"))


def test_many_threads_report_and_one_error_is_raised():
    coord, go = Coordinator(), threading.Event()

    def work(number):
        with coord.stop_on_exception():
            go.wait(10)
            raise ValueError(f"thread {number}")

    threads = [started(work, number) for number in range(20)]
    go.set()
    with pytest.raises(ValueError, match="thread") as caught:
        coord.join(threads)
    assert caught.value is coord.requested_exception


class Recorder(LooperThread):
    def __init__(self, coord, interval, rounds, failing=None):
        super().__init__(coord, interval)
        self.calls = []
        self.rounds, self.failing = rounds, failing

    def note(self, name):
        self.calls.append(name)
        if name == self.failing:
            raise ValueError(name)

    def start_loop(self):
        self.note("start")

    def stop_loop(self):
        self.note("stop")

    def run_loop(self):
        self.note("run")
        if len(self.calls) > self.rounds:
            self._coord.request_stop()


@pytest.mark.parametrize("interval", [None, 0, 0.001])
def test_looper_starts_runs_and_stops(interval):
    coord = Coordinator()
    looper = Recorder(coord, interval, rounds=3)
    assert looper.daemon
    looper.start()
    coord.join()
    assert looper.calls == ["start", "run", "run", "run", "stop"]


@pytest.mark.parametrize(("failing", "calls"), [("start", ["start"]), ("run", ["start", "run"])])
def test_looper_that_fails_reports_and_does_not_stop_cleanly(failing, calls):
    coord = Coordinator()
    looper = Recorder(coord, None, rounds=3, failing=failing)
    looper.start()
    with pytest.raises(ValueError, match=failing):
        coord.join()
    assert looper.calls == calls


def test_looper_calls_at_fixed_times_and_catches_up():
    coord, at = Coordinator(), []

    def work():
        at.append(time.monotonic())
        if len(at) == 2:
            time.sleep(0.35)
        if len(at) == 6:
            coord.request_stop()

    LooperThread.loop(coord, 0.1, work)
    coord.join()
    since = [moment - at[0] for moment in at]
    # Due at 0, 0.1, 0.2 ...; the second call takes until 0.45, so that the calls due at 0.2 to 0.4 follow at once.
    assert since[2] >= 0.4
    assert since[4] - since[2] < 0.09
    assert 0.5 <= since[5] < 0.9


def test_looper_reacts_at_once_to_a_stop():
    coord = Coordinator()
    looper = LooperThread.loop(coord, 3600, lambda: None)
    time.sleep(0.05)
    coord.request_stop()
    looper.join(5)
    assert not looper.is_alive()


def test_looper_says_what_is_wrong():
    with pytest.raises(ValueError, match="'coord' argument must be a Coordinator: 'x'"):
        LooperThread("x", None)
    with pytest.raises(ValueError, match="also pass 'target'"):
        LooperThread(Coordinator(), None, args=(1,))
    with pytest.raises(ValueError, match="also pass 'target'"):
        LooperThread(Coordinator(), None, kwargs={"a": 1})
    for interval in (-1, "1", True, float("nan")):
        with pytest.raises(ValueError, match="invalid timer_interval_secs="):
            LooperThread(Coordinator(), interval)


def test_looper_is_named_after_what_it_calls():
    assert LooperThread(Coordinator(), None, target=time.sleep).name == "looper-sleep"
    assert LooperThread(Coordinator(), None).name == "looper-LooperThread"
