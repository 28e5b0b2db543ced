"""What the processes hand in for a save: nobody but the chief waits, and who gives nothing is named."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from monsess.errors import ClusterError, ReplicasDifferError, SaveError
from monsess.handing_in import HandingIn
from monsess.placement import ReplicaCheck

WAIT = 20.0


class Store:
    """The messages of a job, in this process."""

    def __init__(self, index, messages, missing=False):
        self.index = index
        self.messages = messages
        self.posted = threading.Event()
        self._missing = missing

    def post(self, key, value):
        self.messages[key] = value
        self.posted.set()

    def gather(self, what, value, limit_secs, check):
        self.post(f"{what}/{self.index}", value)
        if self._missing:
            raise ClusterError(f"Process 0 waited {limit_secs:g} s for process 1: {what}.")
        return [self.messages[f"{what}/{index}"] for index in range(2)]

    def forget(self, what):
        for key in [key for key in self.messages if key.startswith(f"{what}/")]:
            del self.messages[key]


def test_who_hands_in_does_not_wait_for_what_comes_late():
    messages = {}
    channel = Store(1, messages)
    come = threading.Event()

    def late():
        assert come.wait(WAIT)
        return ["bits"]

    value = {"consumed": 3}
    HandingIn(channel, 1.0).give(3, value, late)
    assert messages == {}
    value["consumed"] = 4  # as of the save it was 3
    come.set()
    assert channel.posted.wait(WAIT)
    chief = HandingIn(Store(0, messages), 1.0)
    assert chief.take(3, {"consumed": 2}, lambda: None, lambda: None) == [
        [{"consumed": 2}, None],
        [{"consumed": 3}, ["bits"]],
    ]


def test_what_was_taken_is_forgotten_in_time():
    messages = {}
    chief, other = HandingIn(Store(0, messages), 1.0), Store(1, messages)
    for step in range(20):
        other.post(f"the save of step {step}/1", json.dumps([step, None]))
        assert chief.take(step, step, lambda: None, lambda: None) == [[step, None]] * 2
    assert len(messages) == 2 * 8


def test_who_gives_nothing_is_named():
    chief = HandingIn(Store(0, {}, missing=True), 240.0)
    with pytest.raises(SaveError, match=r"Step 3 was not saved. Process 0 waited 240 s for process 1.*on all or on"):
        chief.take(3, None, lambda: None, lambda: None)


def test_what_cannot_be_posted_is_an_error_of_the_process_that_tried():
    class Gone(Store):
        def post(self, key, value):
            self.posted.set()
            raise ConnectionError("the service is gone")

    tried = HandingIn(Gone(1, {}), 1.0)
    tried.check()
    before = set(threading.enumerate())
    tried.give(3, None, lambda: None)
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT)
    with pytest.raises(SaveError, match="the service is gone"):
        tried.check()


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([[[1, 2], [1, 2]]], None),
        ([[[1, 2]], [[1, 2]], None], None),
        ([None, None], None),
        ([[[]], [[]]], None),
        ([[[1, 2], [1, 3]]], "the 2 local devices hold different values in: b"),
        (
            [[[1, 2]], [[1, 2]], [[0, 2]]],
            "the devices of the 3 processes (process 2 unlike the first device of process 0)",
        ),
        (
            [[[1, 2]] * 2, [[1, 2], [1, 3]]],
            "the devices of the 2 processes (process 1 unlike the first device of process 0)",
        ),
        (
            [[[1, 2], [1, 3]], [[1, 2]] * 2],
            "the devices of the 2 processes (process 0 unlike the first device of process 0)",
        ),
    ],
)
def test_one_device_that_differs_is_found_wherever_it_is(rows, found):
    check = ReplicaCheck(len(rows), lambda value: None)
    told = [None if one is None else check.told(np.array(one, np.uint32)) for one in rows]
    told = json.loads(json.dumps(told))
    names = ["a", "b"] if rows[0] and rows[0][0] else []
    if found is None:
        check.check(told, names, 5)
        return
    with pytest.raises(ReplicasDifferError) as error:
        check.check(told, names, 5)
    assert str(error.value).startswith("After step 5 the ")
    assert found in str(error.value)
