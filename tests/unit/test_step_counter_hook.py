"""StepCounterHook alone: when it logs and what it counts."""

from __future__ import annotations

import pytest
from conforms import conforms
from fake_session import FakeSession

from monsess.hooks import StepCounterHook
from monsess.testing import FakeClock


class TestStepCounter:
    @staticmethod
    def rates(lines):
        return [float(line.removeprefix("global_step/sec: ")) for line in lines if line.startswith("global_step/sec: ")]

    @conforms(
        "BH-055",
        instead="Logs at multiples of N global steps (10, 20, 30), so that a resumed run logs at the steps of a "
        "straight one (W-34).",
    )
    def test_logs_at_crossed_multiples(self, lines):
        with FakeClock() as clock:
            session = FakeSession(StepCounterHook(every_n_steps=10))
            logged = []
            for _ in range(30):
                clock.advance(0.5)
                session.run()
                logged += [(session.global_step, rate) for rate in self.rates(lines())]
        assert logged == [(10, 2.0), (20, 2.0), (30, 2.0)]
        assert session.hooks[0].last_rate == 2.0

    @conforms("BH-060")
    def test_first_run_only_starts_the_clock(self, lines):
        with FakeClock() as clock:
            session = FakeSession(StepCounterHook(every_n_steps=1))
            clock.advance(100)
            session.run()
            assert self.rates(lines()) == []
            clock.advance(0.25)
            session.run()
        assert self.rates(lines()) == [4.0]

    @conforms("BH-058")
    def test_by_seconds(self, lines):
        with FakeClock() as clock:
            session = FakeSession(StepCounterHook(every_n_steps=None, every_n_secs=0.1))
            logged = []
            for _ in range(3):
                clock.advance(0.2)
                session.run()
                logged += [(session.global_step, rate) for rate in self.rates(lines())]
        assert logged == [(2, pytest.approx(5.0)), (3, pytest.approx(5.0))]

    def test_w35_seconds_alone_are_enough(self, lines):
        with FakeClock() as clock:
            session = FakeSession(StepCounterHook(every_n_secs=5))
            for _ in range(200):
                clock.advance(0.125)
                session.run()
        assert self.rates(lines()) == [8.0] * 4

    def test_w39_hooks_and_saves_do_not_count(self, lines):
        with FakeClock() as clock:
            session = FakeSession(StepCounterHook(every_n_steps=10))
            session.run()
            for _ in range(9):
                clock.advance(1.0)
                clock.advance(4.0)
                session.seconds["save"] += 3.0
                session.seconds["hooks"] += 1.0
                session.run()
        assert self.rates(lines()) == [1.0]

    def test_w39_no_time_no_line(self, lines):
        with FakeClock():
            session = FakeSession(StepCounterHook(every_n_steps=10))
            for _ in range(20):
                session.run()
        assert self.rates(lines()) == []
        assert session.hooks[0].last_rate is None

    def test_resumed_run_logs_at_the_same_steps_and_measures_its_own(self, lines):
        with FakeClock() as clock:
            session = FakeSession(StepCounterHook(every_n_steps=10), step=17)
            for _ in range(5):
                clock.advance(1.0)
                session.run()
            assert self.rates(lines()) == [1.0]
            clock.advance(50)
            session.recover(17)
            for _ in range(5):
                clock.advance(2.0)
                session.run()
        assert self.rates(lines()) == [0.5]

    @conforms("BH-063", "BH-064")
    @conforms(
        "BH-062",
        instead="Logs at each run but the first that crosses a multiple of N: at 10, 20 for 5 steps per run and N=10 "
        "(W-34).",
    )
    @pytest.mark.parametrize(("per_run", "every", "steps"), [(5, 10, 2), (5, 5, 4), (10, 5, 2)])
    def test_several_steps_per_run(self, lines, per_run, every, steps):
        with FakeClock() as clock:
            session = FakeSession(StepCounterHook(every_n_steps=every))
            while session.global_step < 25:
                clock.advance(1.0)
                session.run(steps=per_run)
        assert self.rates(lines()) == [per_run] * steps

    def test_chief_alone_logs(self, lines):
        with FakeClock() as clock:
            session = FakeSession(StepCounterHook(every_n_steps=2), chief=False, processes=2)
            for _ in range(4):
                clock.advance(1.0)
                session.run()
        assert self.rates(lines()) == []
        assert session.hooks[0].last_rate == 1.0

    @conforms("BH-056", "BH-057")
    def test_line_is_that_of_tensorflow(self, lines):
        with FakeClock() as clock:
            session = FakeSession(StepCounterHook(every_n_steps=1))
            session.run()
            clock.advance(3.0)
            session.run()
        assert lines() == ["global_step/sec: 0.333333"]

    def test_w31_object_can_be_used_in_another_session(self, lines):
        hook = StepCounterHook(every_n_steps=1)
        with FakeClock() as clock:
            for _ in range(2):
                session = FakeSession(hook)
                assert hook.last_rate is None
                for _ in range(2):
                    clock.advance(1.0)
                    session.run()
        assert self.rates(lines()) == [1.0, 1.0]

    def test_cadences(self):
        for arguments in ({"every_n_steps": 5, "every_n_secs": 5}, {"every_n_steps": None}):
            with pytest.raises(ValueError, match="exactly one of every_n_steps and every_n_secs should be provided"):
                StepCounterHook(**arguments)
        for value in (0, -1, True, "1"):
            with pytest.raises(ValueError, match=f"invalid every_n_steps={value!r}"):
                StepCounterHook(every_n_steps=value)
            with pytest.raises(ValueError, match=f"invalid every_n_secs={value!r}"):
                StepCounterHook(every_n_secs=value)
