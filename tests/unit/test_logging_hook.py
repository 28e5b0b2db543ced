"""LoggingTensorHook alone: when it logs, what it fetches, how a line looks."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from conforms import conforms
from fake_session import FakeSession

from monsess.errors import EndOfData, FetchError
from monsess.hooks import LoggingTensorHook
from monsess.testing import FakeClock


class TestLoggingTensor:
    def logged_steps(self, session, lines, runs, steps=1):
        """The steps at which a line appears in the next runs."""
        logged = []
        for _ in range(runs):
            session.run(steps=steps, loss=float(session.global_step))
            logged += [session.global_step for line in lines() if line.startswith("loss = ")]
        return logged

    @conforms("BH-014", "BH-015")
    @pytest.mark.parametrize("value", [0, -10, True, 1.5, "1"])
    def test_impossible_every_n_iter(self, value):
        with pytest.raises(ValueError, match=f"invalid every_n_iter={value!r}"):
            LoggingTensorHook(["t"], every_n_iter=value)

    @pytest.mark.parametrize("value", [0, -0.5, True, "1"])
    def test_impossible_every_n_secs(self, value):
        with pytest.raises(ValueError, match=f"invalid every_n_secs={value!r}"):
            LoggingTensorHook(["t"], every_n_secs=value)

    @conforms("BH-016", "BH-017")
    @pytest.mark.parametrize("at_end", [False, True])
    def test_cadences_that_exclude_each_other_or_miss(self, at_end):
        with pytest.raises(ValueError, match="exactly one of every_n_iter and every_n_secs"):
            LoggingTensorHook(["t"], every_n_iter=5, every_n_secs=5, at_end=at_end)
        with pytest.raises(ValueError, match="exactly one of"):
            LoggingTensorHook(["t"])

    @pytest.mark.parametrize("tensors", [[], {}, "loss", 5, [3.0], {"a": None}, {"a": []}, [""]])
    def test_impossible_tensors(self, tensors):
        with pytest.raises(ValueError, match="invalid tensors"):
            LoggingTensorHook(tensors, every_n_iter=1)

    def test_two_of_one_tag(self):
        with pytest.raises(ValueError, match="loss occurs twice"):
            LoggingTensorHook(["loss", "loss"], every_n_iter=1)

    def test_formatter_must_be_callable(self):
        with pytest.raises(ValueError, match="invalid formatter='%s'"):
            LoggingTensorHook(["loss"], every_n_iter=1, formatter="%s")

    @conforms(
        "BH-019",
        instead="Logs at the first run of a fresh start and at multiples of N global steps (1, 10, 20, ...), so that a "
        "resumed run logs the steps of a straight one (W-34).",
    )
    def test_logs_at_the_first_run_and_at_crossed_multiples(self, lines):
        session = FakeSession(LoggingTensorHook(["loss"], every_n_iter=10))
        assert self.logged_steps(session, lines, 31) == [1, 10, 20, 30]

    @conforms("BH-020", "BH-021")
    def test_silent_after_a_line_and_at_the_end(self, lines):
        session = FakeSession(LoggingTensorHook(["loss"], every_n_iter=10))
        assert self.logged_steps(session, lines, 1) == [1]
        assert self.logged_steps(session, lines, 1) == []
        session.end()
        assert lines() == []

    def test_restore_is_no_reason_to_log(self, lines):
        session = FakeSession(LoggingTensorHook(["loss"], every_n_iter=10), step=15)
        assert self.logged_steps(session, lines, 20) == [20, 30]

    def test_recovery_is_no_reason_to_log(self, lines):
        session = FakeSession(LoggingTensorHook(["loss"], every_n_iter=10))
        self.logged_steps(session, lines, 12)
        session.recover(8)
        assert self.logged_steps(session, lines, 14) == [10, 20]

    @pytest.mark.parametrize("runs", [[1] * 30, [4] * 8, [7, 1, 1, 7, 4, 1, 9], [25, 1, 24]])
    def test_runs_of_any_length_are_logged_when_they_cross(self, lines, runs):
        session = FakeSession(LoggingTensorHook(["loss"], every_n_iter=5))
        logged, expected = [], []
        for steps in runs:
            before = session.global_step
            logged += self.logged_steps(session, lines, 1, steps=steps)
            after = session.global_step
            if before == 0 or before // 5 < after // 5:
                expected.append(after)
        assert logged == expected

    def test_w38_fetches_only_what_it_logs(self):
        session = FakeSession(LoggingTensorHook(["loss"], every_n_iter=5), step=7)
        for _ in range(14):
            session.run(loss=1.0)
        fetching = [8 + number for number, (fetches,) in enumerate(session.fetched) if fetches]
        assert fetching == [8, 10, 15, 20], "and the first run, for unknown names"

    def test_unknown_name_is_found_in_the_first_run(self):
        for step in (0, 7):
            session = FakeSession(LoggingTensorHook(["los"], every_n_iter=5), step=step)
            with pytest.raises(FetchError, match="los"):
                session.run(loss=1.0)

    def test_order_and_looks(self, lines):
        session = FakeSession(LoggingTensorHook(["b", "a"], every_n_iter=1))
        session.run(a=np.float32(0.1234567), b=7)
        assert lines() == ["b = 7, a = 0.123457, step = 1"]
        session = FakeSession(LoggingTensorHook({"z": "a", "b": "b"}, every_n_iter=1))
        session.run(a=1e-5, b=True)
        assert lines() == ["b = True, z = 1e-05, step = 1"]

    @conforms("BH-024")
    def test_only_the_first_line_has_no_time(self, lines):
        with FakeClock() as clock:
            session = FakeSession(LoggingTensorHook(["loss"], every_n_iter=10))
            for _ in range(20):
                session.run(loss=0.123)
                clock.advance(0.0345)
        assert lines() == [
            "loss = 0.123, step = 1",
            "loss = 0.123, step = 10 (0.310 sec)",
            "loss = 0.123, step = 20 (0.345 sec)",
        ]

    def test_own_step_tag_is_not_doubled(self, lines):
        fetches = {"loss": "loss", "step": lambda state, outputs: jnp.int32(state)}
        session = FakeSession(LoggingTensorHook(fetches, every_n_iter=1))
        session.run(loss=0.5)
        assert lines() == ["loss = 0.5, step = 1"]

    def test_arrays_containers_and_narrow_floats(self, lines):
        hook = LoggingTensorHook({"a": "a", "h": "h", "p": ["a", "h"]}, every_n_iter=1)
        session = FakeSession(hook)
        session.run(a=np.array([1.0, 1e-9]), h=jnp.bfloat16(0.5))
        assert lines() == ["a = [1. 0.], h = 0.5, p = [[1. 0.], 0.5], step = 1"]
        session = FakeSession(LoggingTensorHook(["m"], every_n_iter=1))
        session.run(m={"x": 1.0, "y": [2]})
        assert lines() == ["m = {x: 1, y: [2]}, step = 1"]

    def test_w55_print_options_of_numpy_are_left_alone(self):
        before = np.get_printoptions()
        session = FakeSession(LoggingTensorHook(["a"], every_n_iter=1))
        session.run(a=np.array([1.0, 1e-9]))
        assert np.get_printoptions() == before

    @conforms("BH-028")
    def test_formatter_makes_the_line(self, lines):
        seen = []

        def formatter(values):
            seen.append(values)
            return "qqq 100% %s"

        session = FakeSession(LoggingTensorHook(["loss"], every_n_iter=2, formatter=formatter))
        for _ in range(2):
            session.run(loss=0.5)
        assert lines() == ["qqq 100% %s"] * 2
        assert [list(values) for values in seen] == [["loss"]] * 2
        assert isinstance(seen[0]["loss"], np.ndarray)
        assert seen[0]["loss"] == 0.5

    @conforms("BH-025", "BH-026")
    def test_by_seconds(self, lines):
        with FakeClock() as clock:
            session = FakeSession(LoggingTensorHook(["loss"], every_n_secs=1.0))
            assert self.logged_steps(session, lines, 2) == [1]
            clock.advance(1.0)
            assert self.logged_steps(session, lines, 2) == [3]
            session.end()
        assert lines() == []

    def test_by_seconds_after_a_restore(self, lines):
        with FakeClock() as clock:
            session = FakeSession(LoggingTensorHook(["loss"], every_n_secs=1.0), step=5)
            assert self.logged_steps(session, lines, 2) == []
            clock.advance(1.0)
            assert self.logged_steps(session, lines, 2) == [8]

    def test_first_run_by_seconds_may_add_several_steps(self, lines):
        with FakeClock():
            session = FakeSession(LoggingTensorHook(["loss"], every_n_secs=1.0))
            assert self.logged_steps(session, lines, 2, steps=5) == [5]

    @conforms("BH-018")
    def test_at_end_only(self, lines):
        session = FakeSession(LoggingTensorHook(["loss"], at_end=True))
        assert self.logged_steps(session, lines, 3) == []
        session.end()
        assert lines() == ["loss = 2, step = 3"]

    @conforms("BH-023", "BH-027")
    @pytest.mark.parametrize("cadence", [{"every_n_iter": 10}, {"every_n_secs": 1000.0}])
    def test_cadence_and_end(self, lines, cadence):
        session = FakeSession(LoggingTensorHook(["loss"], at_end=True, **cadence))
        self.logged_steps(session, lines, 12)
        session.end()
        (line,) = lines()
        assert line.startswith("loss = 11, step = 12 (")

    def test_last_step_is_not_logged_twice(self, lines):
        session = FakeSession(LoggingTensorHook(["loss"], every_n_iter=10, at_end=True))
        assert self.logged_steps(session, lines, 10) == [1, 10]
        session.end()
        assert lines() == []

    def test_end_without_a_run(self, lines):
        FakeSession(LoggingTensorHook(["loss"], at_end=True), step=4).end()
        assert lines() == ["LoggingTensorHook: no step was run, so there is nothing to log at the end."]

    def test_input_that_has_ended_does_not_break_the_end(self, lines):
        session = FakeSession(LoggingTensorHook(["loss"], at_end=True))
        session.run(loss=1.0)

        def ended(fetches):
            raise EndOfData("no more")

        session.evaluate = ended
        session.end()
        assert "nothing logged at the end" in lines()[0]

    @conforms("BH-022")
    def test_w31_object_can_be_used_in_another_session(self, lines):
        hook = LoggingTensorHook(["loss"], every_n_iter=10)
        for _ in range(2):
            session = FakeSession(hook)
            session.run(loss=0.5)
            assert lines() == ["loss = 0.5, step = 1"]

    def test_generators_and_callables(self, lines):
        def double(state, outputs):
            return 2 * outputs["loss"]

        session = FakeSession(LoggingTensorHook((fetch for fetch in ["loss", double]), every_n_iter=1))
        for _ in range(2):
            session.run(loss=1.5)
        assert "double = 3, step = 1" in lines()[0]
