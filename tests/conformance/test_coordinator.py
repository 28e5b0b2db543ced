"""The behaviours of TensorFlow's coordinator tests, CO-001 to CO-021."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from conforms import conforms

from monsess.coordinator import Coordinator, LooperThread
from monsess.errors import EndOfData


def started(target, *args):
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def report_later(coord, error, go, how):
    """A thread that reports ``error`` to the coordinator when ``go`` is set, in one of three ways."""

    def report():
        go.wait(10)
        if how == "with":
            with coord.stop_on_exception():
                raise error
        try:
            raise error
        except Exception as caught:
            coord.request_stop(caught if how == "object" else sys.exc_info())

    return started(report)


@conforms("CO-001", "CO-002")
def test_stop_is_seen_once_it_is_requested():
    coord = Coordinator()
    assert not coord.should_stop()
    assert not coord.wait_for_stop(0.01)
    coord.request_stop()
    assert coord.should_stop()
    assert coord.wait_for_stop(0.01)


@conforms("CO-003")
def test_stop_by_another_thread_is_seen():
    coord, go = Coordinator(), threading.Event()
    assert not coord.should_stop()
    assert not coord.wait_for_stop(0.05)
    thread = started(lambda: go.wait(10) and coord.request_stop())
    assert not coord.should_stop()
    assert not coord.wait_for_stop(0.05)
    go.set()
    assert coord.wait_for_stop(10)
    assert coord.should_stop()
    thread.join()


@conforms("CO-004")
def test_join_waits_for_the_threads_that_are_passed():
    coord, ended = Coordinator(), []
    threads = [threading.Thread(target=lambda s=s: (time.sleep(s), ended.append(s))) for s in (0.02, 0.05, 0.01)]
    for thread in threads:
        thread.start()
    coord.join(threads)
    assert sorted(ended) == [0.01, 0.02, 0.05]
    assert not any(thread.is_alive() for thread in threads)


def registered(coord, seconds, ended):
    def work():
        time.sleep(seconds)
        ended.append(seconds)

    thread = threading.Thread(target=work)
    coord.register_thread(thread)
    return thread


@conforms("CO-005")
def test_join_waits_for_registered_threads():
    coord, ended = Coordinator(), []
    threads = [registered(coord, seconds, ended) for seconds in (0.02, 0.05, 0.01)]
    for thread in threads:
        thread.start()
    coord.join()
    assert sorted(ended) == [0.01, 0.02, 0.05]


@conforms("CO-006")
def test_join_waits_for_registered_and_passed_threads():
    coord, ended = Coordinator(), []
    first = registered(coord, 0.02, ended)
    second = threading.Thread(target=lambda: (time.sleep(0.1), ended.append("passed")))
    first.start()
    second.start()
    coord.join([second])
    assert ended == [0.02, "passed"]


@conforms("CO-007")
@pytest.mark.parametrize("grace", [1e-10, 0.002, 1.0])
def test_thread_that_outlives_the_grace_period_is_an_error(grace):
    coord, end = Coordinator(), threading.Event()
    threads = [started(end.wait, 20), started(lambda: None)]
    coord.request_stop()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="threads still running"):
        coord.join(threads, stop_grace_period_secs=grace)
    assert grace <= time.monotonic() - began < grace + 5
    end.set()


@conforms("CO-008")
def test_live_threads_can_be_ignored():
    coord, end = Coordinator(), threading.Event()
    thread = started(end.wait, 20)
    coord.request_stop()
    coord.join([thread], stop_grace_period_secs=0.02, ignore_live_threads=True)
    assert thread.is_alive()
    end.set()


def join_gets_the_first_error(how):
    coord = Coordinator()
    first, second = threading.Event(), threading.Event()
    threads = [
        report_later(coord, RuntimeError("First"), first, how),
        report_later(coord, RuntimeError("Too late"), second, how),
    ]
    first.set()
    threads[0].join()
    second.set()
    with pytest.raises(RuntimeError, match="First"):
        coord.join(threads)


@conforms("CO-009")
def test_first_error_reported_as_exc_info_is_raised_by_join():
    join_gets_the_first_error("exc_info")


@conforms("CO-010")
def test_first_error_reported_as_object_is_raised_by_join():
    join_gets_the_first_error("object")


@conforms("CO-011")
def test_end_of_data_is_a_clean_stop_by_default():
    coord, go = Coordinator(), threading.Event()
    thread = report_later(coord, EndOfData("the first"), go, "object")
    go.set()
    coord.join([thread])
    assert coord.should_stop()
    assert coord.requested_exception is None


class MyError(Exception):
    pass


@conforms("CO-012")
def test_clean_types_can_be_chosen():
    coord, go = Coordinator(clean_stop_exception_types=(MyError,)), threading.Event()
    thread = report_later(coord, MyError(), go, "object")
    go.set()
    coord.join([thread])
    assert coord.should_stop()


@conforms("CO-013")
def test_first_error_in_a_block_is_raised_by_join():
    join_gets_the_first_error("with")


@conforms("CO-014")
def test_clear_stop_forgets_the_error():
    coord, go = Coordinator(), threading.Event()
    go.set()
    with pytest.raises(RuntimeError, match="First"):
        coord.join([report_later(coord, RuntimeError("First"), go, "with")])
    coord.clear_stop()
    assert not coord.should_stop()
    with pytest.raises(RuntimeError, match="Second"):
        coord.join([report_later(coord, RuntimeError("Second"), go, "with")])


@conforms("CO-015", "CO-016")
def test_an_object_reported_after_join_is_raised_at_once():
    coord = Coordinator()
    coord.request_stop()
    coord.join([])
    with pytest.raises(RuntimeError, match="Too late"):
        coord.request_stop(RuntimeError("Too late"))
    coord.clear_stop()
    coord.request_stop(RuntimeError("In time"))
    with pytest.raises(RuntimeError, match="In time"):
        coord.join([])


@conforms("CO-017", "CO-018")
def test_exc_info_reported_after_join_is_raised_at_once():
    def report(text):
        try:
            raise RuntimeError(text)
        except RuntimeError:
            coord.request_stop(sys.exc_info())

    coord = Coordinator()
    coord.request_stop()
    coord.join([])
    with pytest.raises(RuntimeError, match="Too late"):
        report("Too late")
    coord.clear_stop()
    report("In time")
    with pytest.raises(RuntimeError, match="In time"):
        coord.join([])


def loops(**arguments):
    """The arguments of the first three calls of a looper."""
    coord, calls = Coordinator(), []

    def target(*args, **kwargs):
        calls.append((args, kwargs))
        if len(calls) == 3:
            coord.request_stop()

    looper = LooperThread.loop(coord, 0, target=target, **arguments)
    coord.join()
    assert not looper.is_alive()
    return calls


@conforms("CO-019")
def test_looper_passes_positional_arguments():
    assert loops(args=(1, "b")) == [((1, "b"), {})] * 3


@conforms("CO-020")
def test_looper_passes_keyword_arguments():
    assert loops(kwargs={"a": 1}) == [((), {"a": 1})] * 3


@conforms("CO-021")
def test_looper_passes_both():
    assert loops(args=(1,), kwargs={"b": 2}) == [((1,), {"b": 2})] * 3
