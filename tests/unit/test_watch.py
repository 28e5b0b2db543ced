"""Checks of values still on their way: run once, in order, and a verdict counts for every thread."""

from __future__ import annotations

import threading

import pytest

from monsess.watch import Watches


def test_checks_run_once_and_in_order():
    watches, seen = Watches(), []
    for step in (1, 2, 2, 3):
        watches.add(step, f"value {step}", seen.append)
    watches.run_through(0)
    assert seen == []
    watches.run_through(2)
    watches.run_through(2)
    assert seen == ["value 1", "value 2", "value 2"]
    watches.run_through(float("inf"))
    assert seen[3:] == ["value 3"]


def test_what_failed_stays_failed():
    watches = Watches()

    def fail(value):
        raise ValueError(value)

    watches.add(3, "bad", fail)
    for _ in range(2):
        watches.run_through(2)
        with pytest.raises(ValueError, match="bad"):
            watches.run_through(3)
        with pytest.raises(ValueError, match="bad"):
            watches.run_through(4)
    watches.clear()
    watches.run_through(4)


def test_other_thread_waits_for_the_verdict():
    watches, checking, go_on = Watches(), threading.Event(), threading.Event()
    results = {}

    def check(value):
        checking.set()
        assert go_on.wait(60)
        raise ValueError

    def run(name):
        try:
            watches.run_through(1)
            results[name] = "passed"
        except ValueError:
            results[name] = "failed"

    watches.add(1, None, check)
    first = threading.Thread(target=run, args=("first",))
    first.start()
    assert checking.wait(60)
    watches.run_through(0)  # what is not waited for does not wait
    second = threading.Thread(target=run, args=("second",))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    go_on.set()
    first.join(60)
    second.join(60)
    assert results == {"first": "failed", "second": "failed"}


def test_interrupted_check_is_no_verdict():
    watches, seen = Watches(), []

    def interrupted(value):
        seen.append(value)
        if len(seen) == 1:
            raise KeyboardInterrupt

    watches.add(1, "value", interrupted)
    with pytest.raises(KeyboardInterrupt):
        watches.run_through(1)
    watches.run_through(1)
    assert seen == ["value", "value"]
