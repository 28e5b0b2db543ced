"""StopAtTimeHook and StopAfterNEvalsHook alone."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from fake_session import FakeSession

from monsess.agreement import StopReason
from monsess.hooks import StopAfterNEvalsHook, StopAtTimeHook
from monsess.testing import FakeClock


def stop_at(hook, *, run_secs=10.0, runs=100, start=1000.0, **session):
    """The time at which a stop is asked for, and all requests."""
    with FakeClock(start) as clock:
        fake = FakeSession(hook, **session)
        for _ in range(runs):
            if fake.stops:
                break
            clock.advance(run_secs)
            fake.run()
        return (clock.monotonic() if fake.stops else None), fake.stops


def test_seconds_count_from_the_beginning_of_the_session():
    assert stop_at(StopAtTimeHook(100, margin_secs=0))[0] == 1100
    assert stop_at(StopAtTimeHook(100, margin_secs=35))[0] == 1070
    assert stop_at(StopAtTimeHook(5000, margin_secs=0))[0] is None
    hook = StopAtTimeHook(100, margin_secs=0)
    assert [stop_at(hook)[0], stop_at(hook, start=5000.0)[0]] == [1100, 5100]


def test_a_moment_by_the_wall_clock():
    assert stop_at(StopAtTimeHook(at=1200))[0] == 1140
    assert stop_at(StopAtTimeHook(at=datetime.fromtimestamp(1200, UTC), margin_secs=0))[0] == 1200


def test_the_end_of_the_slurm_job(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1300")
    assert stop_at(StopAtTimeHook())[0] == 1240
    assert stop_at(StopAtTimeHook(50, margin_secs=0))[0] == 1050
    monkeypatch.setenv("SLURM_JOB_END_TIME", "tomorrow")
    with pytest.raises(ValueError, match="SLURM_JOB_END_TIME='tomorrow' is no time"):
        StopAtTimeHook()
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    with pytest.raises(ValueError, match="give secs= or at=; SLURM_JOB_END_TIME is not set"):
        StopAtTimeHook()


def test_it_asks_once_as_one_process_and_says_why(lines):
    with FakeClock() as clock:
        session = FakeSession(StopAtTimeHook(60, margin_secs=20))
        clock.advance(41)
        session.run()
        session.run()
    ((step, reason, everywhere),) = session.stops
    assert (step, reason, reason.by, everywhere) == (1, StopReason.REQUESTED, "StopAtTimeHook", False)
    assert reason.text == "the time limit (60 s) has come, 20 s before it"
    assert lines() == ["StopAtTimeHook: the time limit (60 s) has come, 20 s before it; asking for a stop."]


def test_the_chief_decides():
    assert stop_at(StopAtTimeHook(100), chief=False, processes=2) == (None, [])


def test_a_time_that_has_come_stops_before_the_first_run():
    with FakeClock(2000.0):
        assert [step for step, _, _ in FakeSession(StopAtTimeHook(at=1000), step=7).stops] == [7]


def test_a_recovery_does_not_begin_anew():
    with FakeClock() as clock:
        session = FakeSession(StopAtTimeHook(100, margin_secs=0))
        session.run()
        clock.advance(60)
        session.recover(0)
        clock.advance(60)
        session.run()
        assert len(session.stops) == 1


def test_nothing_is_stored():
    assert "state_dict" not in vars(StopAtTimeHook)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"secs": 5, "at": 5}, "Only one of secs and at can be given"),
        ({"secs": 0}, "invalid secs=0"),
        ({"secs": 5, "margin_secs": -1}, "invalid margin_secs=-1"),
        ({"secs": 5, "margin_secs": False}, "invalid margin_secs=False"),
        ({"secs": 30}, "invalid secs=30: it stops margin_secs=60 before that, so it would run nothing"),
        ({"at": "noon"}, "expected seconds since the epoch, or a datetime"),
        ({"at": datetime(2030, 1, 1)}, "it has no time zone"),
    ],
    ids=str,
)
def test_impossible_times(arguments, message):
    with pytest.raises(ValueError, match=message):
        StopAtTimeHook(**arguments)


# ---- StopAfterNEvalsHook


@pytest.mark.parametrize(
    ("count", "shown"),
    [(3, [1, 2, 3]), (19, list(range(1, 20))), (20, list(range(2, 21, 2))), (25, [*range(2, 25, 2), 25])],
)
def test_it_stops_after_so_many_runs_and_logs_ten_of_them(count, shown, lines):
    session = FakeSession(StopAfterNEvalsHook(count))
    while not session.stops:
        session.run()
    assert [(step, everywhere) for step, _, everywhere in session.stops] == [(count, True)]
    assert lines() == [f"Evaluation [{one}/{count}]" for one in shown]


def test_without_a_number_the_data_ends_it(lines):
    session = FakeSession(StopAfterNEvalsHook(None))
    for _ in range(3):
        session.run()
    assert session.stops == []
    assert lines() == ["Evaluation [1]", "Evaluation [2]", "Evaluation [3]"]
    session = FakeSession(StopAfterNEvalsHook(2, log_progress=False))
    session.run()
    assert lines() == []


def test_it_counts_from_nought_in_each_session():
    hook = StopAfterNEvalsHook(2)
    for _ in range(2):
        session = FakeSession(hook)
        session.run()
        assert session.stops == []
        session.run()
        assert len(session.stops) == 1


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "5"])
def test_impossible_numbers_of_runs(count):
    with pytest.raises(ValueError, match=f"invalid num_evals={count!r}"):
        StopAfterNEvalsHook(count)
