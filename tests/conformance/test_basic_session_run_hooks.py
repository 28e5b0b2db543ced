"""The behaviours of TensorFlow's tests of built-in hooks in real sessions; those of savers have their own file."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import ticks
from conforms import conforms

import monsess as ms


def session(*hooks, **arguments):
    return ms.MonitoredTrainingSession(ticks.init_fn, hooks=hooks, log_step_count_steps=None, **arguments)


def train_to(directory, step):
    """Leave a checkpoint of ``step`` behind."""
    with session(checkpoint_dir=directory) as sess:
        sess.run(ticks.adding(step))


class TestStopAtStep:
    @conforms("BH-010")
    def test_stops_at_the_last_step_and_not_before(self):
        with session(ms.StopAtStepHook(last_step=10)) as sess:
            sess.run(ticks.adding(5))
            assert not sess.should_stop()
            while sess.global_step < 9:
                sess.run(ticks.one)
            assert not sess.should_stop()
            sess.run(ticks.one)
            assert sess.should_stop()
        assert sess.global_step == 10
        assert sess.stop_reason == ms.StopReason.LAST_STEP

    @conforms(
        "BH-011",
        instead="A stop is final: a further run is refused (RunAfterStopError) instead of stopping once more, and a "
        "session restored beyond the target stops before its first run (W-29).",
    )
    def test_stops_beyond_the_last_step(self, tmp_path):
        with session(ms.StopAtStepHook(last_step=10)) as sess:
            sess.run(ticks.adding(10))
            with pytest.raises(ms.RunAfterStopError):
                sess.run(ticks.one)
        assert sess.global_step == 10
        train_to(tmp_path, 11)
        with session(ms.StopAtStepHook(last_step=10), checkpoint_dir=tmp_path) as sess:
            assert sess.global_step == 11
            assert sess.should_stop()
            with pytest.raises(ms.RunAfterStopError):
                sess.run(ticks.one)
        assert sess.summary()["steps"] == 0
        assert sess.stop_reason == ms.StopReason.LAST_STEP

    @conforms("BH-012")
    @pytest.mark.parametrize("last_run", [1, 2])
    def test_num_steps_counts_from_the_restored_step(self, tmp_path, last_run):
        train_to(tmp_path, 5)
        with session(ms.StopAtStepHook(num_steps=10), checkpoint_dir=tmp_path) as sess:
            assert sess.global_step == 5
            for step in (13, 14):
                while sess.global_step < step:
                    sess.run(ticks.one)
                assert not sess.should_stop()
            sess.run(ticks.adding(last_run))
            assert sess.should_stop()
        assert sess.global_step == 14 + last_run

    @conforms("BH-013")
    def test_jump_to_the_target(self, tmp_path):
        train_to(tmp_path, 5)
        with session(ms.StopAtStepHook(num_steps=10), checkpoint_dir=tmp_path) as sess:
            sess.run(ticks.adding(10))
            assert sess.should_stop()
        assert sess.global_step == 15


class TestLoggingTensor:
    @staticmethod
    def logged(sess, lines, runs):
        """The steps at which a line appears in the next runs."""
        lines()
        steps = []
        for _ in range(runs):
            sess.run(ticks.one)
            steps += [sess.global_step for line in lines() if line.startswith("count = ")]
        return steps

    @staticmethod
    def at_end(lines):
        return [line for line in lines() if line.startswith("count = ")]

    @conforms("BH-018")
    def test_at_end_only(self, lines):
        with session(ms.LoggingTensorHook(["count"], at_end=True)) as sess:
            assert self.logged(sess, lines, 3) == []
        assert self.at_end(lines) == ["count = 3, step = 3"]

    @conforms(
        "BH-019",
        instead="Logs at the first run of a fresh start and at multiples of N global steps (1, 10, 20, ...), so that a "
        "resumed run logs the steps of a straight one (W-34).",
    )
    @conforms("BH-020", "BH-021", "BH-022")
    def test_every_n_steps(self, lines):
        for _ in range(2):  # a second hook in the same process starts afresh
            with session(ms.LoggingTensorHook(["count"], every_n_iter=10)) as sess:
                assert self.logged(sess, lines, 1) == [1]
                assert self.logged(sess, lines, 31) == [10, 20, 30]
                assert sess.global_step == 32
            assert self.at_end(lines) == []

    @conforms("BH-023")
    def test_every_n_steps_and_at_the_end(self, lines):
        with session(ms.LoggingTensorHook(["count"], every_n_iter=10, at_end=True)) as sess:
            assert self.logged(sess, lines, 12) == [1, 10]
        (line,) = self.at_end(lines)
        assert line.startswith("count = 12, step = 12 (")

    @conforms("BH-024")
    def test_first_line_has_no_time(self, lines):
        with ms.testing.FakeClock() as clock, session(ms.LoggingTensorHook(["count"], every_n_iter=5)) as sess:
            lines()
            for _ in range(5):
                sess.run(ticks.one)
                clock.advance(0.25)
            assert lines() == ["count = 1, step = 1", "count = 5, step = 5 (1.000 sec)"]

    @conforms("BH-025", "BH-026")
    def test_every_n_seconds(self, lines):
        with ms.testing.FakeClock() as clock, session(ms.LoggingTensorHook(["count"], every_n_secs=1.0)) as sess:
            assert self.logged(sess, lines, 2) == [1]
            clock.advance(1.0)
            assert self.logged(sess, lines, 2) == [3]
        assert self.at_end(lines) == []

    @conforms("BH-027")
    def test_every_n_seconds_and_at_the_end(self, lines):
        hook = ms.LoggingTensorHook(["count"], every_n_secs=1.0, at_end=True)
        with ms.testing.FakeClock(), session(hook) as sess:
            assert self.logged(sess, lines, 2) == [1]
        assert self.at_end(lines) == ["count = 2, step = 2 (0.000 sec)"]

    @conforms("BH-028")
    def test_formatter_makes_the_line(self, lines):
        seen = []

        def formatter(values):
            seen.append(values)
            return "qqq 100% %s"

        with session(ms.LoggingTensorHook({"c": "count"}, every_n_iter=1, formatter=formatter)) as sess:
            lines()
            sess.run(ticks.one)
            assert lines() == ["qqq 100% %s"]
        assert seen == [{"c": np.float32(1.0)}]


class TestStepCounter:
    @staticmethod
    def rates(sess, clock, lines, runs, secs, per_run=1):
        """By step, the rates that are logged in the next runs; each takes ``secs`` of the clock."""
        found = {}
        for _ in range(runs):
            lines()
            clock.advance(secs)
            sess.run(ticks.adding(per_run))
            for line in lines():
                if line.startswith("global_step/sec: "):
                    found[sess.global_step] = float(line.removeprefix("global_step/sec: "))
        return found

    @conforms(
        "BH-055",
        instead="Logs at multiples of N global steps (10, 20, 30), so that a resumed run logs at the steps of a "
        "straight one (W-34).",
    )
    def test_every_n_steps(self, lines):
        with ms.testing.FakeClock() as clock, session(ms.StepCounterHook(every_n_steps=10)) as sess:
            assert self.rates(sess, clock, lines, 31, 0.5) == {10: 2.0, 20: 2.0, 30: 2.0}

    def test_default_hook_of_a_session(self, lines):
        sess = ms.MonitoredTrainingSession(ticks.init_fn, log_step_count_steps=10)
        with ms.testing.FakeClock() as clock, sess:
            assert self.rates(sess, clock, lines, 20, 0.25) == {10: 4.0, 20: 4.0}

    @conforms("BH-056", "BH-057", "BH-060")
    def test_first_run_only_starts_the_clock(self, lines, caplog):
        with ms.testing.FakeClock() as clock, session(ms.StepCounterHook(every_n_steps=1)) as sess:
            assert self.rates(sess, clock, lines, 1, 100.0) == {}
            lines()
            clock.advance(0.25)
            sess.run(ticks.one)
            assert [(one.levelname, one.getMessage()) for one in caplog.records] == [("INFO", "global_step/sec: 4")]

    @conforms("BH-058")
    def test_every_n_seconds(self, lines):
        with ms.testing.FakeClock() as clock, session(ms.StepCounterHook(every_n_secs=0.1)) as sess:
            assert self.rates(sess, clock, lines, 3, 0.2) == {2: pytest.approx(5.0), 3: pytest.approx(5.0)}

    @conforms(
        "BH-061",
        instead="There is no such warning: the session owns the step, every run that hooks see advances it, and runs "
        "that do not count (eval steps, steps_per_run=0) trigger no hook (W-23, W-32).",
    )
    def test_step_that_hooks_see_always_advances(self, caplog):
        caplog.set_level("INFO", logger="monsess")
        seen = []

        class See(ms.SessionRunHook):
            def after_run(self, run_context, run_values):
                seen.append(run_context.global_step)

        with session(ms.StepCounterHook(every_n_steps=1), See()) as sess:
            sess.run(ticks.one)
            for _ in range(20):
                sess.run(ticks.look)
                sess.run(ticks.adding(0))
            assert sess.global_step == 1
            sess.run(ticks.one)
            assert float(sess.state["count"]) == 22
        assert seen == [1, 2]
        assert [one.getMessage() for one in caplog.records if one.levelname != "INFO"] == []

    @conforms(
        "BH-062",
        instead="Logs at each run but the first that crosses a multiple of N: at 10, 20 for 5 steps per run and N=10 "
        "(W-34).",
    )
    def test_fewer_steps_per_run_than_every_n_steps(self, lines):
        with ms.testing.FakeClock() as clock, session(ms.StepCounterHook(every_n_steps=10)) as sess:
            assert self.rates(sess, clock, lines, 5, 0.5, per_run=5) == {10: 10.0, 20: 10.0}

    @conforms("BH-063")
    def test_as_many_steps_per_run_as_every_n_steps(self, lines):
        with ms.testing.FakeClock() as clock, session(ms.StepCounterHook(every_n_steps=5)) as sess:
            assert self.rates(sess, clock, lines, 5, 0.5, per_run=5) == dict.fromkeys((10, 15, 20, 25), 10.0)

    @conforms("BH-064")
    def test_more_steps_per_run_than_every_n_steps(self, lines):
        with ms.testing.FakeClock() as clock, session(ms.StepCounterHook(every_n_steps=5)) as sess:
            assert self.rates(sess, clock, lines, 5, 0.5, per_run=10) == dict.fromkeys((20, 30, 40, 50), 20.0)


class TestGlobalStepWaiter:
    @conforms("BH-074")
    def test_step_zero_is_not_waited_for(self):
        def never():
            raise AssertionError("the step was read")

        with ms.testing.FakeClock() as clock, session(ms.GlobalStepWaiterHook(0, step_fn=never)) as sess:
            sess.run(ticks.one)
        assert clock.slept == []

    @conforms("BH-075")
    def test_polls_until_the_step_is_passed(self):
        steps = iter([0, 500, 1100])
        with ms.testing.FakeClock() as clock, session(ms.GlobalStepWaiterHook(1000, step_fn=steps.__next__)) as sess:
            sess.run(ticks.one)
            sess.run(ticks.one)
            assert sess.global_step == 2
        assert clock.slept == [0.5, 0.5]


class TestFinalOps:
    @conforms("BH-076")
    def test_scalar(self):
        hook = ms.FinalOpsHook("count")
        with session(hook) as sess:
            sess.run(ticks.one)
            sess.run(ticks.one)
            assert hook.final_ops_values is None
        assert hook.final_ops_values == 2.0

    @conforms("BH-077")
    def test_vector(self):
        hook = ms.FinalOpsHook(lambda state, outputs: state["count"] * jnp.arange(4.0) + outputs["before"])
        with session(hook) as sess:
            sess.run(ticks.adding(2))
        assert hook.final_ops_values.tolist() == [0.0, 2.0, 4.0, 6.0]

    @conforms("BH-078")
    def test_end_of_data(self, tmp_path, lines):
        def read(state, outputs):
            raise ms.EndOfData

        hook = ms.FinalOpsHook(read)
        with pytest.raises(ms.EndOfData), session(hook, checkpoint_dir=tmp_path) as sess:
            sess.run(ticks.one)
        assert any("dependency back to some input source" in line for line in lines())
        assert hook.final_ops_values is None
        assert ms.latest_checkpoint(tmp_path) == 1, "W-06: the final checkpoint comes before any hook's end"

    @conforms("BH-079")
    def test_feed_dict(self):
        hook = ms.FinalOpsHook(lambda state, outputs, x, y: state["count"] * x + y, {"x": 10, "y": np.arange(2)})
        with session(hook) as sess:
            sess.run(ticks.adding(5))
        assert hook.final_ops_values.tolist() == [50.0, 51.0]


@conforms("BH-081")
def test_feed_function_is_asked_anew_for_each_run():
    @ms.train_step
    def add(state, batch, scale):
        amount = batch.mean() * scale
        return {"count": state["count"] + amount}, {"amount": amount}

    numbers = iter([1.0, 2.0, 3.0])
    with session(ms.FeedFnHook(lambda: {"batch": np.full(8, next(numbers)), "scale": 10.0})) as sess:
        assert float(sess.run(add)["amount"]) == 10.0
        assert float(sess.run(add)["amount"]) == 20.0
        assert float(sess.state["count"]) == 30.0
