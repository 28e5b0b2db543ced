"""Waiting for checkpoints of another job."""

from __future__ import annotations

import itertools

import pytest
import ticks
from conforms import conforms

import monsess as ms
from monsess import new_checkpoints
from monsess.checkpoint import CheckpointStore
from monsess.testing import FakeClock


class Directory:
    """A directory whose steps, or its failure, a test sets; ``later`` is what becomes of it at the next looks."""

    def __init__(self, *steps):
        self.steps = list(steps)
        self.later = iter(())
        self.looks = 0

    def look(self):
        self.looks += 1
        self.steps = next(self.later, self.steps)
        if isinstance(self.steps, Exception):
            raise self.steps
        return list(self.steps)


@pytest.fixture
def directory(monkeypatch):
    found = Directory()
    monkeypatch.setattr(CheckpointStore, "steps", lambda store: found.look())
    return found


URL = "memory://nowhere"


@conforms("EV-001")
def test_nothing_there_and_no_time(directory):
    assert list(ms.checkpoints_iterator(URL, timeout=0)) == []
    assert directory.looks == 1


@conforms("EV-002", "EV-003")
def test_one_checkpoint_however_many_files_it_has_is_yielded_once(tmp_path):
    with ms.MonitoredTrainingSession(ticks.init_fn, checkpoint_dir=tmp_path) as sess:
        sess.run(ticks.one)
    assert len(list((tmp_path / "1").rglob("*"))) > 5
    assert list(ms.checkpoints_iterator(tmp_path, timeout=0)) == [1]


@conforms("EV-004")
def test_a_function_is_asked_at_each_timeout(directory):
    asked = []
    with FakeClock() as clock:
        steps = ms.checkpoints_iterator(URL, 10, timeout_fn=lambda: asked.append(clock.monotonic()) or len(asked) == 4)
        assert list(steps) == []
    assert asked == [10, 20, 30, 40]


@conforms("EV-005", instead="It waits for the whole time-out, and looks once more at its end.")
def test_waiting_ends_with_the_timeout(directory):
    with FakeClock() as clock:
        assert ms.wait_for_new_checkpoint(URL, timeout=1.3, poll_secs=0.5) is None
        assert clock.monotonic() == pytest.approx(1.3)
        assert clock.slept == pytest.approx([0.5, 0.5, 0.3])
        assert directory.looks == 4


def test_waiting_ends_with_another_step(directory):
    directory.later = iter([[5], [5], [5, 9]])
    with FakeClock():
        assert ms.wait_for_new_checkpoint(URL, 5) == 9
    assert ms.wait_for_new_checkpoint(URL, timeout=0) == 9
    assert ms.wait_for_new_checkpoint(URL, 9, timeout=0) is None


def test_only_the_newest_or_every_step(directory):
    looks = [[1, 2], [1, 2], [2, 3, 4], [4], [4, 5]]
    with FakeClock():
        directory.later = iter(looks)
        assert list(ms.checkpoints_iterator(URL, 5)) == [2, 4, 5]
        directory.later = iter(looks)
        assert list(ms.checkpoints_iterator(URL, 5, newest_only=False)) == [1, 2, 3, 4, 5]


def test_a_run_that_went_back_is_followed_there(directory):
    directory.later = iter([[10, 20], [10], [10, 15], [10, 15, 20], [15, 20, 25]])
    with FakeClock():
        assert list(ms.checkpoints_iterator(URL, 5)) == [20, 10, 15, 25]


def test_the_time_without_a_new_step_counts_from_the_last_one(directory):
    directory.later = iter([[1], *[[1]] * 8, [2], *[[2]] * 8, [3]])
    with FakeClock() as clock:
        assert list(ms.checkpoints_iterator(URL, 10)) == [1, 2, 3]
        assert clock.monotonic() == pytest.approx(28, abs=2)


def test_so_much_time_between_two(directory):
    directory.later = ([number] for number in itertools.count(1))
    with FakeClock() as clock:
        at = []
        for _ in ms.checkpoints_iterator(URL, None, min_interval_secs=100):
            at.append(clock.monotonic())
            clock.advance(30)
            if len(at) == 3:
                break
        assert at == [0, 100, 200]
        assert max(clock.slept) <= new_checkpoints._SLEEP_SECS


def test_a_store_that_does_not_answer_is_waited_for(directory, lines):
    trouble = ms.StorageError("Could not list it.")
    directory.later = iter([[1], trouble, trouble, [1], trouble, [1, 2]])
    with FakeClock():
        assert list(ms.checkpoints_iterator(URL, 5)) == [1, 2]
    assert lines() == ["Could not list it. Waiting for it to answer again."] * 2


def test_no_answer_is_never_taken_for_nothing_there(directory):
    trouble = ms.StorageError("Could not list it.")
    directory.steps = trouble
    with pytest.raises(ms.StorageError):
        list(ms.checkpoints_iterator(URL, timeout=0))
    directory.later = iter([[1], trouble])
    found = []
    with FakeClock(), pytest.raises(ms.StorageError):
        found.extend(ms.checkpoints_iterator(URL, 5))
    assert directory.looks > 5


@pytest.mark.parametrize(
    "arguments", [{"timeout": -1}, {"min_interval_secs": -1}, {"poll_secs": 0}, {"timeout": "5"}], ids=str
)
def test_impossible_times(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"invalid {name}="):
        ms.checkpoints_iterator(URL, **arguments)  # at once, and not when it is iterated
