"""The timer keeps TensorFlow's contract; the cadence fires at multiples, so that a resumed run fires alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from conforms import conforms

from monsess.testing import FakeClock
from monsess.timer import Cadence, SecondOrStepTimer, check_secs, check_steps


@conforms("BH-001")
def test_timer_with_both_cadences_is_refused():
    with pytest.raises(ValueError, match="Can not provide both every_secs and every_steps"):
        SecondOrStepTimer(every_secs=2.0, every_steps=10)


@conforms("BH-002")
def test_timer_without_a_cadence_is_refused():
    with pytest.raises(ValueError, match="Either every_secs or every_steps should be provided"):
        SecondOrStepTimer()


@conforms("BH-003", "BH-004", "BH-005")
def test_timer_by_seconds():
    with FakeClock(start=5.0) as clock:
        timer = SecondOrStepTimer(every_secs=1.0)
        assert timer.should_trigger_for_step(1)
        timer.update_last_triggered_step(1)
        assert not timer.should_trigger_for_step(1)
        assert not timer.should_trigger_for_step(2)
        clock.advance(1.0)
        assert not timer.should_trigger_for_step(1)
        assert timer.should_trigger_for_step(2)


@conforms("BH-006")
def test_timer_by_steps():
    timer = SecondOrStepTimer(every_steps=3)
    assert timer.should_trigger_for_step(1)
    timer.update_last_triggered_step(1)
    assert [timer.should_trigger_for_step(step) for step in (1, 2, 3, 4)] == [False, False, False, True]


@conforms("BH-007", "BH-008")
def test_timer_reports_what_has_passed():
    with FakeClock() as clock:
        timer = SecondOrStepTimer(every_steps=1)
        assert timer.last_triggered_step() is None
        assert timer.update_last_triggered_step(1) == (None, None)
        clock.advance(0.25)
        assert timer.update_last_triggered_step(5) == (0.25, 4)
        clock.advance(0.5)
        assert timer.update_last_triggered_step(7) == (0.5, 2)
        assert timer.last_triggered_step() == 7


def test_timer_forgets_at_reset():
    timer = SecondOrStepTimer(every_steps=3)
    timer.update_last_triggered_step(1)
    timer.reset()
    assert timer.last_triggered_step() is None
    assert timer.should_trigger_for_step(1)
    assert timer.update_last_triggered_step(1) == (None, None)


def test_timer_after_a_rollback_waits_for_its_next_step():
    timer = SecondOrStepTimer(every_steps=3)
    timer.update_last_triggered_step(10)
    assert [step for step in range(14) if timer.should_trigger_for_step(step)] == [13]
    assert timer.update_last_triggered_step(4)[1] == -6


NO_STEPS = [0, -1, 1.5, 1e3, True, "10", None, math.nan, np.bool_(True)]
NO_SECS = [0, -0.5, True, "10", None, math.nan, math.inf, -math.inf, 1j]


@pytest.mark.parametrize("value", NO_STEPS)
def test_impossible_steps_name_argument_and_value(value):
    with pytest.raises(ValueError, match=r"invalid every_things=.*whole number") as caught:
        check_steps("every_things", value)
    assert repr(value) in str(caught.value)
    if value is not None:
        with pytest.raises(ValueError, match="invalid every_steps="):
            SecondOrStepTimer(every_steps=value)
        with pytest.raises(ValueError, match="invalid every_n_steps="):
            Cadence(every_n_steps=value)


@pytest.mark.parametrize("value", NO_SECS)
def test_impossible_seconds_name_argument_and_value(value):
    with pytest.raises(ValueError, match=r"invalid wait_secs=.*number of seconds") as caught:
        check_secs("wait_secs", value)
    assert repr(value) in str(caught.value)
    if value is not None:
        with pytest.raises(ValueError, match="invalid every_secs="):
            SecondOrStepTimer(every_secs=value)
        with pytest.raises(ValueError, match="invalid every_secs="):
            Cadence(every_secs=value)


def test_numbers_of_numpy_are_numbers():
    assert check_steps("n", np.int64(3)) == 3
    assert check_steps("n", 0, at_least=0) == 0
    assert check_secs("s", np.float32(0.5)) == 0.5
    assert isinstance(check_steps("n", np.int64(3)), int)


def fired(cadence: Cadence, start: int, stop: int, per_run: int = 1) -> list[int]:
    return [step + per_run for step in range(start, stop, per_run) if cadence.due(step, step + per_run)]


def test_cadence_fires_at_multiples():
    assert fired(Cadence(10), 0, 30) == [10, 20, 30]
    assert fired(Cadence(10, fire_at_first_run=True), 0, 30) == [1, 10, 20, 30]
    assert fired(Cadence(1, fire_at_first_run=True), 0, 3) == [1, 2, 3]


@pytest.mark.parametrize("per_run", [1, 2, 3, 5, 7, 25])
@pytest.mark.parametrize("n", [1, 4, 10])
def test_cadence_fires_once_for_each_run_that_crosses(n, per_run):
    cadence = Cadence(n)
    for before in range(0, 100, per_run):
        crossed = any(step % n == 0 for step in range(before + 1, before + per_run + 1))
        assert cadence.due(before, before + per_run) is crossed


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("resumed_at", range(31))
def test_cadence_of_a_resumed_run_is_that_of_the_straight_one(resumed_at, first):
    straight = fired(Cadence(10, fire_at_first_run=first), 0, 60)
    resumed = fired(Cadence(10, fire_at_first_run=first), resumed_at, 60)
    assert resumed == [step for step in straight if step > resumed_at]


def test_cadence_by_seconds_counts_from_the_last_rearm():
    with FakeClock(start=3.0) as clock:
        cadence = Cadence(every_secs=2.0)
        assert not cadence.elapsed()
        clock.advance(1.9)
        assert not cadence.due(5, 6)
        clock.advance(0.2)
        assert cadence.due(5, 6)
        assert cadence.elapsed(), "asking changes nothing"
        cadence.rearm()
        assert not cadence.elapsed()


def test_cadence_by_both_keeps_two_schedules():
    with FakeClock() as clock:
        cadence = Cadence(every_n_steps=3, every_secs=10.0)
        due = []
        for step in range(1, 13):
            clock.advance(2.5)
            if cadence.elapsed():
                due.append((step, "secs"))
                cadence.rearm()
            if cadence.crossed(step - 1, step):
                due.append((step, "steps"))
        assert due == [(3, "steps"), (4, "secs"), (6, "steps"), (8, "secs"), (9, "steps"), (12, "secs"), (12, "steps")]


def test_cadence_by_seconds_fires_at_the_first_run_of_a_fresh_start_only():
    with FakeClock():
        cadence = Cadence(every_secs=10.0, fire_at_first_run=True)
        assert cadence.due(0, 1)
        assert not cadence.due(1, 2)
        assert not cadence.due(40, 41)


def test_cadence_without_a_schedule_is_refused():
    with pytest.raises(ValueError, match="Either every_n_steps or every_secs should be provided"):
        Cadence()


def test_a_run_that_goes_nowhere_or_back_is_never_due_by_steps():
    cadence = Cadence(5, fire_at_first_run=True)
    assert not cadence.due(0, 0)
    assert not cadence.due(12, 3)
