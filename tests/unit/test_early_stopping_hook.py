"""EarlyStoppingHook and its makers alone: when they ask for a stop, and what they remember."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
from conforms import conforms
from fake_session import FakeSession

from monsess.agreement import StopReason
from monsess.hooks import (
    EarlyStoppingHook,
    make_early_stopping_hook,
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
)
from monsess.testing import FakeClock


class Session(FakeSession):
    """A session in which values are logged."""

    stop_reason = None
    _hooks = SimpleNamespace(caller_is_on_all=False)

    def tell(self, *values, every=10, first=10):
        """Log values of steps 10, 20, ..., until a stop is asked for; the step of that, or None."""
        step = first
        for value in values:
            self.global_step = step
            for hook in self.hooks:
                hook.log(step, {"loss": value, "other": 0.0})
            if self.stops:
                return step
            step += every
        return None


def stops_at(hook, *values, **more):
    return Session(hook).tell(*values, **more)


# ---- the rules


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3, 2, 1, 0, -1, -2], None),
        ([1, 1, 1, 1, 1], 40),
        ([1, 2, 3, 4], 40),
        ([3, 4, 4, 2, 4, 4, 1, 1, 1], None),
        ([3, 4, 4, 2, 4, 4, 1, 1, 1, 1], 100),
        ([1, math.nan, math.inf, math.nan], 40),
        ([math.nan, math.nan, 5, 6, 7], None),
        ([math.nan, math.nan, math.nan], 30),
        ([5, -math.inf, 4, 4, 4], None),  # an infinite value is no best one
    ],
)
def test_patience_counts_values_without_a_better_one(values, expected):
    assert stops_at(EarlyStoppingHook("loss", patience=3), *values) == expected
    assert stops_at(EarlyStoppingHook("loss", "max", patience=3), *[-value for value in values]) == expected


def test_min_delta_is_what_better_means():
    assert stops_at(EarlyStoppingHook("loss", patience=2, min_delta=0.5), 3, 2.6, 2.5) == 30
    assert stops_at(EarlyStoppingHook("loss", patience=2, min_delta=0.5), 3, 2.6, 2.4, 2.0, 1.8) is None
    assert stops_at(EarlyStoppingHook("loss", patience=2, min_delta=0.5), 3, 2.6, 2.4, 2.0, 1.9) == 50


@conforms("ES-007")
def test_no_increase_for_max_steps():
    # TensorFlow's own table: the accuracy at steps 1000 to 6000.
    values = [0.5, 0.5, 0.5, 0.5, 0.6, 0.6]
    for limit, min_steps, expected in ((5000, 0, None), (3000, 0, 4000), (2000, 0, 3000), (1000, 4500, 6000)):
        hook = stop_if_no_increase_hook("loss", limit, min_steps)
        assert stops_at(hook, *values, every=1000, first=1000) == expected, (limit, min_steps)


@conforms("ES-008")
def test_no_decrease_for_max_steps():
    values = [1.0, 0.9, 0.8, 0.8, 0.8, 0.7]
    for limit, min_steps, expected in ((4000, 0, None), (2000, 0, 5000), (1000, 0, 4000), (1000, 5500, None)):
        hook = stop_if_no_decrease_hook("loss", limit, min_steps)
        assert stops_at(hook, *values, every=1000, first=1000) == expected, (limit, min_steps)


@conforms("ES-005")
def test_higher_than_a_threshold():
    values = [0.5, 0.6, 0.7, 0.8]
    for threshold, min_steps, expected in ((0.8, 0, None), (0.7, 0, 40), (0.6, 45, None), (0.6, 35, 40)):
        assert stops_at(stop_if_higher_hook("loss", threshold, min_steps), *values) == expected, (threshold, min_steps)
    assert stops_at(stop_if_higher_hook("loss", 1.0), math.nan, math.inf) == 20


@conforms("ES-006")
def test_lower_than_a_threshold():
    values = [0.8, 0.7, 0.6, 0.5]
    for threshold, min_steps, expected in ((0.5, 0, None), (0.6, 0, 40), (0.7, 45, None), (0.7, 35, 40)):
        assert stops_at(stop_if_lower_hook("loss", threshold, min_steps), *values) == expected, (threshold, min_steps)


@conforms("ES-009")
def test_any_of_several_hooks_stops():
    hooks = [stop_if_higher_hook("loss", 9.0), stop_if_no_decrease_hook("loss", 20), stop_if_lower_hook("loss", 0.0)]
    session = Session(*hooks)
    assert session.tell(3, 2, 2, 2) == 40
    (reason,) = [reason for _, reason, _ in session.stops]
    assert reason.text == (
        'No decrease in metric "loss" for 20 steps, which is greater than or equal to max steps (20) configured for '
        "early stopping: the best is 2 of step 20."
    )


def test_a_past_plateau_stops_nobody_who_has_recovered():
    """W-36: what counts is what is remembered since the best value, not all that ever was."""
    patient = Session(EarlyStoppingHook("loss", max_steps=100))
    assert patient.tell(1, 1, 1, 1, 0.5) is None
    stored = patient.hooks[0].state_dict()
    resumed = Session(EarlyStoppingHook("loss", max_steps=20), step=50, restored=[stored])
    assert resumed.stops == []
    assert resumed.tell(0.5, 0.5, first=60) == 70


# ---- the stop


def test_the_reason_says_which_value_and_why(lines):
    session = Session(EarlyStoppingHook("loss", patience=2))
    session.tell(1, 2, 3)
    (at, reason, everywhere) = session.stops[0]
    assert (at, reason, everywhere) == (30, StopReason.EARLY_STOPPING, False)
    assert reason.by == "EarlyStoppingHook"
    text = (
        'No decrease in metric "loss" for 2 values, which is greater than or equal to the patience (2) configured for '
        "early stopping: the best is 1 of step 10."
    )
    assert reason.text == text
    assert lines() == [text, "Requesting early stopping at global step 30"]
    session = Session(stop_if_higher_hook("loss", 0.5))
    session.tell(0.75)
    assert session.stops[0][1].text == (
        'At step 10, metric "loss" has value 0.75 which is greater than the configured threshold (0.5) for early '
        "stopping."
    )


@pytest.mark.parametrize("by_evaluation", [True, False])
def test_a_value_of_an_evaluation_is_the_same_on_all_processes(by_evaluation):
    session = Session(EarlyStoppingHook("eval/loss", lower_than=1.0), processes=2)
    session._hooks.caller_is_on_all = by_evaluation
    session.hooks[0].log(10, {"eval/loss": 0.5})
    assert [everywhere for _, _, everywhere in session.stops] == [by_evaluation]
    assert session.hooks[0].on_all_processes
    assert not EarlyStoppingHook("loss", lower_than=1.0).on_all_processes


def test_a_stop_that_is_agreed_on_is_left_alone():
    session = Session(EarlyStoppingHook("loss", patience=1))
    session.stop_reason = StopReason.BODY_LEFT
    assert session.tell(1, 1, 1) is None


def test_a_value_that_never_comes_stops_nothing_and_is_told(lines):
    session = Session(EarlyStoppingHook("eval/loss", patience=1))
    assert session.tell(1, 1, 1) is None
    session.end()
    assert lines() == [
        "EarlyStoppingHook: no value 'eval/loss' was logged, so it stopped nothing. Logged were: loss, other."
    ]
    session = Session(EarlyStoppingHook("loss", patience=9))
    session.tell(1)
    session.end()
    assert lines() == []


# ---- what is remembered


def test_a_second_value_of_a_step_takes_the_place_of_the_first():
    hook = EarlyStoppingHook("loss", patience=3)
    session = Session(hook)
    for step, value in ((10, 5), (20, 6), (20, 4), (30, 9), (30, 9), (30, 9), (30, 9)):
        session.global_step = step
        hook.log(step, {"loss": value})
    assert (hook.best, hook.best_step, session.stops) == (4, 20, [])


def test_values_of_earlier_steps_are_not_looked_at():
    hook = EarlyStoppingHook("loss", patience=2)
    session = Session(hook)
    for step, value in ((30, 5), (20, 1), (10, 9), (25, 9)):
        hook.log(step, {"loss": value})
    assert (hook.best, session.stops) == (5, [])


@pytest.mark.parametrize("cut", range(1, 7))
def test_restarts_change_nothing(cut):
    values = [3, 2, 4, 4, 1, 1, 1, 1]
    straight = stops_at(EarlyStoppingHook("loss", patience=3), *values)
    first = Session(EarlyStoppingHook("loss", patience=3))
    first.tell(*values[:cut])
    stored = json.loads(json.dumps(first.hooks[0].state_dict()))
    second = Session(EarlyStoppingHook("loss", patience=3), step=10 * cut, restored=[stored])
    assert second.tell(*values[cut:], first=10 * cut + 10) == straight == 80


def test_w28_a_stopped_run_stays_stopped_and_more_patience_goes_on():
    """No flag is stored that would stop whoever restores it: the rule is applied anew."""
    first = Session(EarlyStoppingHook("loss", patience=3))
    assert first.tell(1, 1, 1, 1) == 40
    stored = first.hooks[0].state_dict()
    same = Session(EarlyStoppingHook("loss", patience=3), step=40, restored=[stored])
    assert [reason for _, reason, _ in same.stops] == [StopReason.EARLY_STOPPING]
    assert Session(EarlyStoppingHook("loss", patience=5), step=40, restored=[stored]).tell(1, 1, first=50) == 60


def test_a_recovery_goes_back_with_the_checkpoint():
    session = Session(EarlyStoppingHook("loss", patience=3))
    session.tell(1, 1, 1)
    session.recover(30)
    assert session.tell(1, first=40) == 40


def test_an_object_can_be_used_in_another_session():
    hook = EarlyStoppingHook("loss", patience=3)
    assert stops_at(hook, 1, 1, 1, 1) == 40
    assert hook.best == 1
    assert stops_at(hook, 1, 1, 1) is None


def test_a_step_costs_nothing():
    assert not {"before_run", "after_run"} & set(vars(EarlyStoppingHook))


# ---- a function of the user's


@conforms("ES-010")
def test_a_predicate_is_asked_after_the_first_run():
    session = Session(make_early_stopping_hook(lambda: False, run_every_steps=1))
    session.run()
    session.run()
    assert session.stops == []
    session = Session(make_early_stopping_hook(lambda: True, run_every_steps=100))
    session.run()
    assert [(step, reason) for step, reason, _ in session.stops] == [(1, StopReason.EARLY_STOPPING)]


def test_a_predicate_is_asked_at_multiples_and_after_seconds():
    asked = []
    session = Session(make_early_stopping_hook(lambda: asked.append(session.global_step), run_every_steps=10))
    for _ in range(30):
        session.run()
    session.run(steps=15)
    assert asked == [1, 10, 20, 30, 45]
    asked.clear()
    with FakeClock() as clock:
        session = Session(make_early_stopping_hook(lambda: asked.append(clock.monotonic())))  # 60 s is the default
        for _ in range(20):
            session.run()
            clock.advance(25)
    assert asked == [0, 75, 150, 225, 300, 375, 450]


@conforms("ES-012")
def test_two_cadences_of_a_predicate():
    with pytest.raises(ValueError, match="Only one of `run_every_secs` and `run_every_steps` must be set"):
        make_early_stopping_hook(lambda: True, run_every_secs=60, run_every_steps=100)


def test_a_predicate_can_be_called():
    with pytest.raises(TypeError, match="`should_stop_fn` must be callable, found 5"):
        make_early_stopping_hook(5)


# ---- what is refused


@pytest.mark.parametrize("metric", ["", None, 5])
def test_impossible_names(metric):
    with pytest.raises(ValueError, match='expected the name of a logged value, such as "eval/loss"'):
        EarlyStoppingHook(metric, patience=1)


def test_no_rule():
    with pytest.raises(ValueError, match="EarlyStoppingHook has no rule: give patience= or max_steps="):
        EarlyStoppingHook("loss")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("patience", 0),
        ("max_steps", 1.5),
        ("min_delta", -1),
        ("min_delta", math.nan),
        ("higher_than", "5"),
        ("lower_than", True),
        ("min_steps", -1),
        ("mode", "lowest"),
    ],
)
def test_impossible_numbers(name, value):
    with pytest.raises(ValueError, match=f"invalid {name}="):
        EarlyStoppingHook("loss", **{"patience": 3, name: value})
