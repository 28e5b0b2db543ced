"""Calls that all processes make at the same point: one that misses one is found, and nobody else is suspected."""

from __future__ import annotations

import random

import pytest

import monsess as ms
from monsess.joint import NO_CALL, JointCall, Place, difference, position
from monsess.peers import Peers


class Process:
    """One process that runs "step", "call ..." , "leave" and "end" in turn, and waits at calls for the other one."""

    def __init__(self, name: str, program: list[str]) -> None:
        self.name = name
        self.program = program
        self.done = 0
        self.dispatched, self.left, self.ended = 0, None, None
        self.call = NO_CALL

    def go_on(self) -> None:
        what = self.program[self.done]
        if what == "step":
            self.dispatched += 1
        elif what == "leave":
            self.left = self.dispatched
        elif what == "end":
            self.ended = self.dispatched
        else:
            self.call = JointCall(self.call.number + 1, self.at, what)
        self.done += 1

    @property
    def at(self):
        return position(self.dispatched, self.left, self.ended)

    @property
    def waits(self) -> bool:
        return self.done > 0 and self.program[self.done - 1].startswith("call")

    def may_go_on(self, other: Process) -> bool:
        if self.done == len(self.program):
            return False
        return not self.waits or other.call.number >= self.call.number


def found_in(one: Process, other: Process, chance: random.Random) -> str | None:
    """Let both run in some order; what is found out on the way, from what the other told at some earlier moment."""
    told = {}
    while True:
        able = [(a, b) for a, b in ((one, other), (other, one)) if a.may_go_on(b)]
        for a, b in ((one, other), (other, one)):
            if not able or chance.random() < 0.5:
                told[a] = Place(a.at, a.call, a.name)
            if b in told:
                found = difference(Place(a.at, a.call, a.name), told[b])
                if found is not None:
                    return found
        if not able:
            return None
        chance.choice(able)[0].go_on()


PROGRAM = ["call a", "step", "step", "call b", "call a", "step", "call c", "leave", "step", "call a", "end", "call b"]


def test_processes_that_do_the_same_are_never_suspected():
    for seed in range(300):
        pair = Process("process 0", PROGRAM), Process("process 1", PROGRAM)
        assert found_in(*pair, random.Random(seed)) is None
        assert [one.done for one in pair] == [len(PROGRAM)] * 2


@pytest.mark.parametrize("missing", [i for i, what in enumerate(PROGRAM[:-1]) if what.startswith("call")])
def test_a_call_that_one_process_misses_is_found(missing):
    without = PROGRAM[:missing] + PROGRAM[missing + 1 :]
    for seed in range(50):
        pair = Process("process 0", PROGRAM), Process("process 1", without)
        found = found_in(*pair, random.Random(seed))
        assert found is not None
        assert "process 0 calls" in found


def test_another_call_in_its_place_is_found():
    pair = Process("process 0", ["step", "call a", "step"]), Process("process 1", ["step", "call b", "step"])
    assert "process 1 calls call b after 1" in str(found_in(*pair, random.Random(0)))


class Channel:
    """The messages of all processes in one dict."""

    def __init__(self, index: int, messages: dict[str, str]) -> None:
        self.index, self.count, self.messages = index, 2, messages

    def post(self, key: str, value: str) -> None:
        self.messages[key] = value

    def under(self, key: str) -> dict[str, str]:
        return {name.removeprefix(f"{key}/"): v for name, v in self.messages.items() if name.startswith(f"{key}/")}


@pytest.mark.parametrize("comes", [True, False])
def test_one_that_has_just_taken_a_step_back_is_not_suspected_too_soon(comes):
    messages: dict[str, str] = {}
    one, other = (Peers(Channel(index, messages), 15.0, 100.0) for index in range(2))
    for each in (one, other):
        each.dispatching(1, 111, False)
        each._tell()
        each.all_met()
    one.take_back()  # the step cannot be compiled; what the other told is from before that
    one.joint("allreduce")
    assert one._look() is None
    if comes:
        other.take_back()
        other.joint("allreduce")
    else:
        other.under_way()
    told = []
    for _ in range(3):
        other._tell()
        told.append(one._look())
    *early, found = told
    if comes:
        assert found is None
    else:
        assert isinstance(found, ms.ProcessesDivergedError)
        assert early[0] is None
        assert "process 0 (calling allreduce) calls allreduce after 0 runs, process 1 (starting) went on" in str(found)
