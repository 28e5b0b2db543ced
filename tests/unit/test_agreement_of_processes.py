"""The agreement of several processes, simulated: the vectors of each dispatch are summed as the devices would."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Callable

import numpy as np
import pytest

from monsess.agreement import StopReason
from monsess.ballot import AHEAD, LAG, SLOTS, Ballot, count, fingerprint_of
from monsess.errors import ProcessesDivergedError
from monsess.together import ClusterAgreement

PROGRAM = fingerprint_of("train", "step")


class Hang(AssertionError):
    """A process waits in a collective that another one never enters."""


class Processes:
    """Processes in lockstep: dispatch k of one meets dispatch k of the others."""

    def __init__(self, batches: list[int]) -> None:
        self.left = list(batches)
        self.agreements = [ClusterAgreement(i, len(batches), lambda value: None) for i in range(len(batches))]
        self.begin()

    def begin(self) -> Processes:
        """All tell each other what they wish, and have, before the first dispatch."""
        ballots = [one.ballot(0, min(n, AHEAD)) for one, n in zip(self.agreements, self.left, strict=True)]
        for agreement in self.agreements:
            agreement.begin(np.sum(ballots, axis=0))
        return self

    def stopped(self) -> list[bool]:
        return [one.stop is not None or one.data_ended for one in self.agreements]

    def dispatch(self, takes: bool = True, programs: list[int] | None = None) -> None:
        """All dispatch; in reality one that does not would leave the others hanging."""
        stopped = self.stopped()
        if any(stopped):
            if all(stopped):
                return
            raise Hang(f"only some stopped: {stopped}, {self.left} batches left")
        if takes:
            if not all(self.left):
                raise Hang(f"a process has no batch: {self.left}")
            self.left = [n - 1 for n in self.left]
        programs = programs or [PROGRAM] * len(self.left)
        ballots = [
            agreement.ballot(program, min(n, AHEAD))
            for agreement, program, n in zip(self.agreements, programs, self.left, strict=True)
        ]
        total = np.sum(ballots, axis=0)
        for agreement, program in zip(self.agreements, programs, strict=True):
            agreement.sent(program, takes, total)

    def run(self, between: Callable[[int], None] = lambda k: None, limit: int = 50) -> int:
        """Dispatch until all stop; how often."""
        for k in range(limit):
            if all(self.stopped()):
                return k
            self.dispatch()
            between(k + 1)
        return limit


@pytest.mark.parametrize("pair", list(itertools.product(range(9), repeat=2)))
def test_data_of_any_two_lengths_ends_after_the_shorter_one_on_both(pair):
    assert Processes(list(pair)).run() == min(pair)


def test_data_of_any_four_lengths():
    for lengths in itertools.product((0, 1, 2, 3, 5), repeat=4):
        assert Processes(list(lengths)).run() == min(lengths)


def test_eval_steps_between_take_no_batch():
    chance = random.Random(3)
    for lengths in itertools.product(range(7), repeat=2):
        processes = Processes(list(lengths))
        taken = 0
        while not all(processes.stopped()):
            takes = chance.random() < 0.6
            processes.dispatch(takes)
            taken += takes
        assert taken == min(lengths)


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("when", [1, 2, 5])
def test_one_asks_to_stop_and_all_stop_at_the_same_step(who, when):
    processes = Processes([100] * 3)

    def ask(k: int) -> None:
        if k == when:
            processes.agreements[who].want_stop(StopReason("REQUESTED", "enough"))

    assert processes.run(ask) == when + LAG + 1
    assert {str(one.stop) for one in processes.agreements} == {"enough", f"a stop was requested (process {who})"}
    assert {one.stop for one in processes.agreements} == {StopReason.REQUESTED}


def test_what_is_decided_everywhere_counts_at_once():
    processes = Processes([100] * 2)

    def ask(k: int) -> None:
        if k == 4:
            for one in processes.agreements:
                one.want_stop(StopReason.LAST_STEP, everywhere=True)

    assert processes.run(ask) == 4


def test_the_highest_of_several_reasons_counts():
    processes = Processes([100] * 2)
    processes.agreements[0].want_stop(StopReason.PREEMPTED)
    processes.agreements[1].want_stop(StopReason.EARLY_STOPPING)
    assert processes.run() == LAG + 1
    assert [one.stop for one in processes.agreements] == [StopReason.EARLY_STOPPING] * 2


def test_a_save_takes_effect_once_and_on_all_at_the_same_step():
    processes = Processes([20] * 2)
    saved: list[list[int]] = [[], []]

    def look(k: int) -> None:
        if k == 3:
            processes.agreements[1].want_save()
        for one, steps in zip(processes.agreements, saved, strict=True):
            if one.save_agreed():
                steps.append(k)
                one.save_taken()

    processes.run(look)
    assert saved == [[3 + LAG + 1]] * 2


def test_another_program_on_one_is_found_on_both():
    processes = Processes([20] * 2)
    processes.dispatch()
    processes.dispatch(programs=[PROGRAM, fingerprint_of("eval", "step")])
    processes.dispatch()
    ballots = [one.ballot(PROGRAM, AHEAD) for one in processes.agreements]
    for one in processes.agreements:
        with pytest.raises(ProcessesDivergedError, match="dispatch 2"):
            one.sent(PROGRAM, True, np.sum(ballots, axis=0))


@pytest.mark.parametrize("who", [0, 1])
def test_a_wish_from_before_the_first_dispatch_counts_before_it(who):
    processes = Processes([100] * 2)
    processes.agreements[who].want_stop(StopReason("REQUESTED", "enough"))
    processes.agreements[who].want_save()
    assert processes.begin().run() == 0
    assert {str(one.stop) for one in processes.agreements} == {"enough", f"a stop was requested (process {who})"}
    assert [one.save_agreed() for one in processes.agreements] == [True, True]


def test_a_wish_that_was_not_dispatched_goes_with_the_next_one():
    processes = Processes([20] * 2)
    processes.agreements[1].want_save()
    for one in processes.agreements:
        one.ballot(PROGRAM, AHEAD)
        one.unsent()
    for _ in range(LAG + 1):
        processes.dispatch()
    assert [one.save_agreed() for one in processes.agreements] == [True, True]
    processes.agreements[1].save_taken()
    processes.agreements[1].unsent()  # nothing was told by the newest one
    processes.run(limit=LAG + 1)
    assert not processes.agreements[1].save_agreed()


@pytest.mark.parametrize(
    ("received", "number"),
    [
        ([None, None], None),
        ([None, signal.SIGTERM], signal.SIGTERM),
        ([signal.SIGTERM, signal.SIGINT], signal.SIGINT),
    ],
)
def test_a_signal_that_no_dispatch_carried_is_heard_at_the_end(received, number):
    processes = Processes([20] * 2)
    for one, signaled in zip(processes.agreements, received, strict=True):
        if signaled is not None:
            one.want_preemption(signaled)
    told = [one.received for one in processes.agreements]
    assert told == received
    for one in processes.agreements:
        one.hear_at_end(told)
        assert one.signal == number
        assert one.stop == (None if number is None else StopReason.PREEMPTED)


def test_a_signal_at_the_end_does_not_outrank_what_was_agreed():
    processes = Processes([20] * 2)
    for one in processes.agreements:
        one.want_stop(StopReason.LAST_STEP, everywhere=True)
        one.hear_at_end([None, signal.SIGTERM])
    assert [one.stop for one in processes.agreements] == [StopReason.LAST_STEP] * 2


def test_at_the_end_the_last_wishes_are_heard():
    processes = Processes([20] * 2)
    processes.agreements[1].want_stop(StopReason.PREEMPTED)
    processes.dispatch()
    assert processes.stopped() == [False, False]
    for one in processes.agreements:
        one.settle()
    assert [one.stop for one in processes.agreements] == [StopReason.PREEMPTED] * 2


@pytest.mark.parametrize("processes", [2, 3, 1000, 8192])
def test_sums_of_fingerprints_are_exact(processes):
    for fingerprint in (1, 2**31 - 1, PROGRAM):
        one = Ballot(fingerprint).encode(0)
        assert one.shape == (SLOTS,)
        assert one.dtype == np.float32
        total = np.sum(np.tile(one, (processes, 1)), axis=0)
        assert count(total, fingerprint, processes).same_program
        assert total.max() < 2**24
        assert not count(total, fingerprint + 1, processes).same_program
        other = Ballot(fingerprint - 1).encode(1)
        assert not count(total - one + other, fingerprint, processes).same_program
