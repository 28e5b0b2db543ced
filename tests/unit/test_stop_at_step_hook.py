"""StopAtStepHook alone: its arguments and its goal."""

from __future__ import annotations

import pytest
from conforms import conforms
from fake_session import FakeSession

from monsess.hooks import StopAtStepHook


class TestStopAtStep:
    @conforms("BH-009")
    def test_both_targets(self):
        with pytest.raises(ValueError, match="Only one of num_steps or last_step can be specified"):
            StopAtStepHook(num_steps=10, last_step=20)

    def test_no_target(self):
        with pytest.raises(ValueError, match="One of num_steps or last_step must be specified"):
            StopAtStepHook()

    @pytest.mark.parametrize("value", [0, -1, 1.5, True, "5"])
    def test_impossible_num_steps(self, value):
        with pytest.raises(ValueError, match=f"invalid num_steps={value!r}"):
            StopAtStepHook(num_steps=value)

    @pytest.mark.parametrize("value", [-1, 1.5, False, "5"])
    def test_impossible_last_step(self, value):
        with pytest.raises(ValueError, match=f"invalid last_step={value!r}"):
            StopAtStepHook(last_step=value)

    def test_last_step_is_absolute(self):
        assert FakeSession(StopAtStepHook(last_step=10), step=4).limits == [(10, "StopAtStepHook")]
        assert FakeSession(StopAtStepHook(last_step=0)).limits == [(0, "StopAtStepHook")]

    def test_num_steps_counts_from_the_start(self):
        assert FakeSession(StopAtStepHook(num_steps=10), step=5).limits == [(15, "StopAtStepHook")]

    def test_no_work_per_step(self):
        assert "before_run" not in vars(StopAtStepHook)
        assert "after_run" not in vars(StopAtStepHook)

    def test_goal_survives_a_recovery(self):
        session = FakeSession(StopAtStepHook(num_steps=10), step=5)
        session.run()
        session.recover(5)
        session.recover(0)
        assert session.limits == [(15, "StopAtStepHook")] * 3

    def test_goal_not_reached_survives_a_crash(self, lines):
        stored = FakeSession(StopAtStepHook(num_steps=10), step=5).hooks[0].state_dict()
        assert FakeSession(StopAtStepHook(num_steps=10), step=12, restored=[stored]).limits[0][0] == 15
        assert "going on from step 12 to the stored goal, step 15" in lines()[-1]

    def test_goal_reached_starts_a_new_count(self):
        stored = FakeSession(StopAtStepHook(num_steps=10), step=5).hooks[0].state_dict()
        for step in (15, 16):
            assert FakeSession(StopAtStepHook(num_steps=10), step=step, restored=[stored]).limits[0][0] == step + 10

    def test_another_num_steps_starts_a_new_count(self):
        stored = FakeSession(StopAtStepHook(num_steps=10), step=5).hooks[0].state_dict()
        assert FakeSession(StopAtStepHook(num_steps=20), step=12, restored=[stored]).limits[0][0] == 32
        assert FakeSession(StopAtStepHook(last_step=20), step=12, restored=[stored]).limits[0][0] == 20
        stored = FakeSession(StopAtStepHook(last_step=20), step=5).hooks[0].state_dict()
        assert FakeSession(StopAtStepHook(num_steps=10), step=12, restored=[stored]).limits[0][0] == 22

    def test_w31_object_can_be_used_in_another_session(self):
        hook = StopAtStepHook(num_steps=10)
        assert FakeSession(hook).limits[0][0] == 10
        assert FakeSession(hook, step=10).limits[0][0] == 20
        assert FakeSession(hook).limits[0][0] == 10
