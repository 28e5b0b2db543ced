"""W-34, W-35 and W-39: one convention for schedules, pairs of arguments that do what they say, honest rates."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest
from traps import FailsAt, Lines, count, init_fn, recovery, run, steps_of, trap

import monsess as ms

# ---- W-34: one convention, multiples, a clock that never jumps


@trap("W-34")
def test_all_schedules_are_multiples_and_a_resumed_run_keeps_them(tmp_path):
    def steps(*limits):
        lines = Lines()
        directory = tmp_path / str(limits)
        for limit in limits:
            run(
                lines.hook(every_n_iter=4),
                ms.StopAtStepHook(last_step=limit),
                checkpoint_dir=directory,
                save_checkpoint_steps=4,
                keep=ms.KeepLast(99),
            )
        return list(lines), steps_of(directory)

    assert steps(13) == ([1, 4, 8, 12], [4, 8, 12, 13])
    assert steps(3, 6, 13) == ([1, 4, 8, 12], [3, 4, 6, 8, 12, 13])


@trap("W-34")
def test_seconds_are_those_of_a_monotonic_clock(tmp_path, monkeypatch):
    class Hours(ms.SessionRunHook):
        """An hour of monsess's clock passes in the runs to steps 3 and 6; the wall clock goes wild all the time."""

        def before_run(self, run_context):
            wall[0] -= 1e6 * (-1) ** run_context.global_step
            if run_context.global_step in (2, 5):
                clock.advance(3600)

    wall = [1e9]
    monkeypatch.setattr(time, "time", lambda: wall[0])
    lines = Lines()
    with ms.testing.FakeClock() as clock:
        run(
            Hours(),
            lines.hook(every_n_secs=1800),
            ms.StopAtStepHook(last_step=8),
            checkpoint_dir=tmp_path,
            save_checkpoint_secs=1800,
        )
    assert lines == [1, 3, 6]
    assert steps_of(tmp_path) == [3, 6, 8]


@trap("W-34", "W-35")
def test_steps_and_seconds_together_each_keep_their_own_schedule(tmp_path):
    class Minutes(ms.SessionRunHook):
        def before_run(self, run_context):
            clock.advance(60)

    with ms.testing.FakeClock() as clock:
        run(
            Minutes(),
            ms.StopAtStepHook(last_step=12),
            checkpoint_dir=tmp_path,
            save_checkpoint_secs=5 * 60,
            save_checkpoint_steps=4,
            keep=ms.KeepLast(99),
        )
    assert steps_of(tmp_path) == [4, 5, 8, 10, 12]


# ---- W-35: pairs of arguments


@trap("W-35")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [8]),
        ({"save_checkpoint_steps": 4}, [4, 8]),
        ({"save_checkpoint_steps": 4, "save_checkpoint_secs": None}, [4, 8]),
        ({"save_checkpoint_secs": 150}, [3, 6, 8]),
        ({"save_checkpoint_steps": None, "save_checkpoint_secs": 150}, [3, 6, 8]),
        ({"save_checkpoint_steps": None}, [8]),  # the default of 600 s stays
        ({"save_checkpoint_steps": None, "save_checkpoint_secs": None}, [8]),
    ],
    ids=str,
)
def test_none_switches_off_one_cadence_only_and_a_number_the_others_default(tmp_path, given, expected):
    class Minutes(ms.SessionRunHook):
        def before_run(self, run_context):
            clock.advance(60)

    with ms.testing.FakeClock() as clock:
        run(Minutes(), ms.StopAtStepHook(last_step=8), checkpoint_dir=tmp_path, **given)
    assert steps_of(tmp_path) == expected


@trap("W-35")
def test_the_default_of_600_seconds_survives_a_none_for_the_steps(tmp_path):
    class Minutes(ms.SessionRunHook):
        def before_run(self, run_context):
            clock.advance(60)

    with ms.testing.FakeClock() as clock:
        run(Minutes(), ms.StopAtStepHook(last_step=12), checkpoint_dir=tmp_path, save_checkpoint_steps=None)
    assert steps_of(tmp_path) == [10, 12]


@trap("W-35")
def test_giving_one_of_a_pair_is_enough():
    by_secs, by_steps = ms.StepCounterHook(every_n_secs=5), ms.StepCounterHook(every_n_steps=5)
    both = ms.CheckpointSaverHook(save_secs=5, save_steps=5)
    with ms.testing.FakeClock() as clock:
        for hook in (by_secs, by_steps, both):
            hook._cadence.rearm()
        assert not by_secs._cadence.due(4, 5)  # the default of 100 steps does not come in beside the seconds
        assert by_steps._cadence.due(4, 5)
        assert both._cadence.due(4, 5)
        clock.advance(5)
        assert by_secs._cadence.due(0, 1)
        assert not by_steps._cadence.due(0, 1)
        assert both._cadence.due(0, 1)
    for alone in (ms.LoggingTensorHook(["n"], every_n_secs=5), ms.CheckpointSaverHook(save_secs=5)):
        assert not alone._cadence.crossed(4, 5)


# ---- W-39: the rate of steps


@trap("W-39")
def test_the_rate_leaves_out_hooks_and_saves(tmp_path, caplog):
    class Slow(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            clock.advance(100)

    class SlowSave(ms.CheckpointSaverListener):
        def before_save(self, session, step):
            clock.advance(1000)

    counter = ms.StepCounterHook(every_n_steps=5)
    saver = ms.CheckpointSaverHook(save_steps=3, listeners=[SlowSave()])
    with ms.testing.FakeClock() as clock, caplog.at_level(logging.INFO, "monsess"):
        with ms.MonitoredTrainingSession(
            init_fn,
            hooks=[counter, Slow(), saver, ms.StopAtStepHook(last_step=10)],
            log_step_count_steps=None,
            checkpoint_dir=tmp_path,
            save_checkpoint_secs=None,
        ) as sess:
            while not sess.should_stop():
                sess.run(count)
                clock.advance(0.5)  # what the loop itself takes
    assert counter.last_rate == pytest.approx(2.0)
    assert "global_step/sec: 2" in caplog.text
    assert sess.seconds["hooks"] == pytest.approx(1000)
    assert sess.seconds["save"] == pytest.approx(4000)


@trap("W-39")
def test_no_time_at_all_is_no_infinite_rate(caplog):
    counter = ms.StepCounterHook(every_n_steps=2)
    with ms.testing.FakeClock(), caplog.at_level(logging.INFO, "monsess"):
        sess = run(counter, ms.StopAtStepHook(last_step=8), log_step_count_steps=None)
    assert counter.last_rate is None or np.isfinite(counter.last_rate)
    assert np.isfinite(sess.summary()["steps_per_second"])
    assert "inf" not in caplog.text


@trap("W-30", "W-39")
def test_steps_that_are_done_again_after_a_recovery_give_no_negative_rate(tmp_path):
    counter = ms.StepCounterHook(every_n_steps=2)
    run(
        counter,
        FailsAt(7),
        ms.StopAtStepHook(last_step=8),
        log_step_count_steps=None,
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=2,
        recovery=recovery(),
    )
    assert counter.last_rate is not None
    assert counter.last_rate > 0
