"""What each policy keeps, by itself: of records, without a store."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from monsess.checkpoint.commit import StepRecord
from monsess.checkpoint.retention import KeepBest, KeepEvery, KeepLast, Retention

HOUR = 3600.0
BEGAN = 1.7e9


def at(step: int, hours: float = 0.0, **metrics: float) -> StepRecord:
    """A record of a step that was saved ``hours`` after its run began."""
    return StepRecord(
        step=step, run_id="run", attempt="a", time=BEGAN + hours * HOUR, started=BEGAN, metrics=dict(metrics)
    )


def kept(policy: Retention, *records: StepRecord) -> list[int]:
    """What ``policy`` keeps of them, in order."""
    return sorted(policy.keep(records))


def losses(*values: float | None) -> list[StepRecord]:
    """Records of steps 1, 2, … with these losses; None for a step that has none."""
    return [at(step) if value is None else at(step, loss=value) for step, value in enumerate(values, start=1)]


# ---- KeepLast


def test_the_last_are_those_with_the_highest_numbers():
    records = [at(step) for step in (2, 9, 10, 11, 100, 1000)]
    assert kept(KeepLast(3), *records) == [11, 100, 1000]
    assert kept(KeepLast(9), *records) == [2, 9, 10, 11, 100, 1000]
    assert kept(KeepLast(3)) == []


# ---- KeepBest


def test_the_best_are_the_lowest_or_the_highest():
    records = losses(5.0, 1.0, 4.0, -2.0, 3.0)
    assert kept(KeepBest(2, "loss"), *records) == [2, 4]
    assert kept(KeepBest(2, "loss", mode="max"), *records) == [1, 3]
    assert kept(KeepBest(9, "loss"), *records) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf], ids=str)
def test_a_step_without_a_finite_value_has_no_rank(mode, value):
    assert kept(KeepBest(1, "loss", mode), *losses(value, 5.0, value)) == [2]
    assert kept(KeepBest(3, "loss", mode), *losses(value, 5.0, value)) == [2]
    assert kept(KeepBest(3, "loss", mode), *losses(value, value)) == []


def test_another_metric_is_no_rank():
    assert kept(KeepBest(1, "eval/loss"), at(1, loss=0.0), at(2, **{"eval/loss": 9.0})) == [2]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_equal_values_the_earlier_step_is_the_better(mode):
    assert kept(KeepBest(2, "loss", mode), *losses(1.0, 1.0, 1.0, 1.0)) == [1, 2]
    assert kept(KeepBest(1, "loss", mode), *losses(0.0, -0.0)) == [1]


# ---- KeepEvery


def test_steps_are_kept_as_their_multiples_are_crossed():
    saved = [1, 3, 5, 8, 9, 10, 11, 19, 23, 29, 47, 50]
    assert kept(KeepEvery(steps=10), *map(at, saved)) == [10, 23, 47, 50]
    assert kept(KeepEvery(steps=1), *map(at, saved)) == saved
    assert kept(KeepEvery(steps=100), *map(at, saved)) == []
    assert kept(KeepEvery(steps=10), at(0), at(9)) == []


def test_hours_are_counted_from_the_beginning_of_the_run():
    policy = KeepEvery(hours=6)
    records = [at(1, 0), at(2, 5.9), at(3, 6), at(4, 6.1), at(5, 11.9), at(6, 12.2), at(7, 30), at(8, 35.9)]
    assert kept(policy, *records) == [3, 6, 7]
    assert kept(KeepEvery(hours=0.5), at(1, 0.4), at(2, 0.5), at(3, 0.9), at(4, 1.0)) == [2, 4]
    assert kept(KeepEvery(hours=Fraction(1, 2)), at(1, 0.4), at(2, 0.5)) == [2]  # type: ignore[arg-type]


def test_a_clock_that_was_put_forward_and_back_keeps_what_it_kept_and_does_not_end_the_keeping():
    policy = KeepEvery(hours=1)
    before = [at(1, 0.5), at(2, 1.1), at(3, 2.1)]
    years_ahead = [at(4, 90_000.1), at(5, 90_000.5)]
    back = [at(6, 2.9), at(7, 3.2), at(8, 3.9), at(9, 4.2)]
    assert kept(policy, *before, *years_ahead) == [2, 3, 4]
    assert kept(policy, *before, *years_ahead, *back) == [2, 3, 4, 7, 9]


def test_a_clock_that_was_put_back_keeps_nothing_more_until_it_has_made_up_for_that():
    policy = KeepEvery(hours=1)
    records = [at(1, 1.1), at(2, 2.1), at(3, 3.1), at(4, 1.2), at(5, 2.2), at(6, 3.2), at(7, 4.2)]
    assert kept(policy, *records) == [1, 2, 3, 7]
    assert kept(policy, at(1, -90_000.0), at(2, -5.0)) == []  # before the beginning


# ---- together


def test_either_of_two_is_enough():
    records = [at(step, loss=abs(step - 13)) for step in range(1, 31)]
    policy = KeepLast(2) | KeepBest(1, "loss") | KeepEvery(steps=10)
    assert kept(policy, *records) == [10, 13, 20, 29, 30]
    assert repr(policy) == "KeepLast(2) | KeepBest(1, 'loss') | KeepEvery(steps=10)"
    assert repr(KeepEvery(hours=1.5) | KeepBest(2, "accuracy", mode="max")) == (
        "KeepEvery(hours=1.5) | KeepBest(2, 'accuracy', mode='max')"
    )


def test_a_policy_says_which_metrics_it_ranks_by():
    assert KeepLast(1).metrics == KeepEvery(steps=5).metrics == ()
    both = KeepLast(1) | KeepBest(1, "loss") | (KeepBest(2, "accuracy", mode="max") | KeepBest(3, "loss"))
    assert both.metrics == ("loss", "accuracy")


class Odd(Retention):
    """Of a user: keeps odd steps."""

    def keep(self, records):
        return [record.step for record in records if record.step % 2]


class NoHeir:
    """Likewise, without the base class."""

    def keep(self, records):
        return {4}


def test_policies_of_users_can_be_combined_too():
    records = [at(step) for step in range(1, 7)]
    assert Odd().metrics == ()
    assert kept(Odd() | KeepLast(1), *records) == [1, 3, 5, 6]
    assert kept(KeepLast(1) | Odd(), *records) == [1, 3, 5, 6]
    combined = KeepLast(1) | NoHeir()  # type: ignore[operator]
    assert kept(combined, *records) == [4, 6]
    assert combined.metrics == ()


@pytest.mark.parametrize("other", [5, None, "loss", KeepLast, Odd], ids=str)
def test_only_policies_can_be_combined(other):
    with pytest.raises(TypeError, match="unsupported operand"):
        KeepLast(1) | other


def random_run(chance: random.Random, length: int) -> list[StepRecord]:
    """Steps of a run with equal, missing and infinite losses, whose clock jumps now and then."""
    step, hours, records = 0, 0.0, []
    for _ in range(length):
        step += chance.choice([1, 3, 10, 40])
        hours += chance.choice([0.0, 0.1, 0.7, 3.0, *([-5.0, 100.0] if chance.random() < 0.1 else [])])
        loss = chance.choice([None, math.inf, 0.0, 1.0, 2.0, chance.random()])
        records.append(at(step, hours) if loss is None else at(step, hours, loss=loss))
    return records


@pytest.mark.parametrize("seed", range(20))
def test_asking_after_each_commit_keeps_what_asking_once_would_keep(seed):
    """A policy that remembers nothing loses nothing by that: what it let go earlier it would not keep later."""
    chance = random.Random(seed)
    records = random_run(chance, 60)
    for policy in (
        KeepLast(3),
        KeepBest(2, "loss"),
        KeepBest(1, "loss", mode="max"),
        KeepEvery(steps=25),
        KeepEvery(hours=2),
        KeepLast(2) | KeepBest(2, "loss") | KeepEvery(hours=5),
    ):
        left: list[StepRecord] = []
        for record in records:
            left.append(record)
            keep = {*policy.keep(left), record.step}
            surplus = [one for one in left if one.step not in keep]
            for one in surplus[: chance.choice([0, 1, 99])]:  # deletions may come late, never wrong
                left.remove(one)
        keep = {*policy.keep(left), records[-1].step}
        assert keep == {*policy.keep(records), records[-1].step}, policy


# ---- what is refused


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "5", None, math.nan, math.inf])
def test_a_number_of_checkpoints_is_a_whole_number_from_one_on(n):
    with pytest.raises(ValueError, match="KeepLast needs a whole number of checkpoints from 1 on, found"):
        KeepLast(n)
    with pytest.raises(ValueError, match="KeepBest needs a whole number of checkpoints from 1 on, found"):
        KeepBest(n, "loss")


def test_numbers_may_be_those_of_numpy():
    assert repr(KeepLast(np.int64(3)) | KeepEvery(steps=np.int32(7))) == "KeepLast(3) | KeepEvery(steps=7)"
    assert repr(KeepEvery(hours=np.float32(0.5))) == "KeepEvery(hours=0.5)"


@pytest.mark.parametrize("metric", [None, "", 5, len])
def test_a_metric_is_a_name(metric):
    with pytest.raises(ValueError, match='name of an output, such as "loss", found'):
        KeepBest(1, metric)


def test_a_mode_is_one_of_two():
    with pytest.raises(ValueError, match='mode of KeepBest must be "min" or "max", found \'lowest\''):
        KeepBest(1, "loss", mode="lowest")  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [{}, {"steps": 5, "hours": 5}, {"steps": None, "hours": None}], ids=str)
def test_steps_or_hours_are_given(arguments):
    with pytest.raises(ValueError, match=r"either steps= or hours=, found steps=.* and hours="):
        KeepEvery(**arguments)


@pytest.mark.parametrize("value", [0, -1, True, "5", math.nan, math.inf])
def test_stretches_have_a_length(value):
    with pytest.raises(ValueError, match=r"steps=.*: expected a whole number, at least 1"):
        KeepEvery(steps=value)
    with pytest.raises(ValueError, match=r"hours=.*: expected a finite number of hours, above 0"):
        KeepEvery(hours=value)
