"""GlobalStepWaiterHook alone: how long it waits and what ends the wait."""

from __future__ import annotations

import pytest
from conforms import conforms
from fake_session import FakeSession

from monsess.errors import MonsessError
from monsess.hooks import GlobalStepWaiterHook
from monsess.testing import FakeClock


class TestGlobalStepWaiter:
    @conforms("BH-074")
    def test_step_zero_is_not_waited_for(self):
        def never():
            raise AssertionError("the step was read")

        with FakeClock() as clock:
            FakeSession(GlobalStepWaiterHook(0, step_fn=never)).run()
        assert clock.slept == []

    @conforms("BH-075")
    def test_polls_until_the_step_is_passed(self, lines):
        steps = iter([0, 500, 1100])
        with FakeClock() as clock:
            session = FakeSession(GlobalStepWaiterHook(1000, step_fn=steps.__next__))
            session.run()
            assert clock.slept == [0.5, 0.5]
            session.run()
            session.recover(0)
            session.run()
        assert lines() == ["Waiting for global step 1000 before starting training."]

    def test_no_checkpoint_yet_is_step_zero(self):
        steps = iter([None, None, 3])
        with FakeClock() as clock:
            FakeSession(GlobalStepWaiterHook(3, step_fn=steps.__next__)).run()
        assert clock.slept == [0.5, 0.5]

    def test_progress_lines(self, lines):
        steps = iter([0, 900, 1500, 1600, 9000, *[9100] * 130, 10000])
        with FakeClock():
            FakeSession(GlobalStepWaiterHook(10000, step_fn=steps.__next__)).run()
        shown = [int(line.split()[-1].rstrip(".")) for line in lines() if "Current step" in line]
        assert shown == [1500, 9000, 9100]

    def test_w44_time_limit(self):
        with FakeClock() as clock:
            session = FakeSession(GlobalStepWaiterHook(10, timeout_secs=30, step_fn=lambda: 4))
            with pytest.raises(MonsessError, match=r"has waited 30 s for global step 10; step_fn is at 4\."):
                session.run()
        assert clock.monotonic() == 30

    @pytest.mark.parametrize("how", ["session", "coordinator"])
    def test_w44_stop_ends_the_wait(self, how):
        session = None

        def step_fn():
            if clock.monotonic() > 5:
                session.request_stop() if how == "session" else session.coord.request_stop()
            return 4

        with FakeClock() as clock:
            session = FakeSession(GlobalStepWaiterHook(10, step_fn=step_fn))
            session.run()
            assert clock.monotonic() == 5.5

    def test_own_step_is_good_if_it_is_past_the_target(self):
        FakeSession(GlobalStepWaiterHook(10), step=12).run()

    def test_wait_that_nothing_could_end_is_an_error_at_once(self):
        with FakeClock() as clock, pytest.raises(MonsessError, match=r"the wait would never end\. Pass step_fn="):
            FakeSession(GlobalStepWaiterHook(10), step=4).run()
        assert clock.slept == []

    def test_w31_waits_anew_in_another_session(self):
        hook = GlobalStepWaiterHook(2, step_fn=iter([0, 2, 0, 0, 2]).__next__)
        with FakeClock() as clock:
            FakeSession(hook).run()
            FakeSession(hook).run()
        assert clock.slept == [0.5] * 3

    def test_impossible_arguments(self):
        for value in (-1, 1.5, True, None):
            with pytest.raises(ValueError, match=f"invalid wait_until_step={value!r}"):
                GlobalStepWaiterHook(value)
        with pytest.raises(ValueError, match="invalid timeout_secs=0"):
            GlobalStepWaiterHook(1, timeout_secs=0)
        with pytest.raises(ValueError, match="invalid step_fn=7"):
            GlobalStepWaiterHook(1, step_fn=7)
