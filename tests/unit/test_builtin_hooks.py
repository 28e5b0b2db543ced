"""The built-in hooks, driven by a session of a few lines, so that each can be seen alone."""

from __future__ import annotations

import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conforms import conforms

from monsess import hooks as builtin
from monsess.coordinator import Coordinator
from monsess.errors import EndOfData, FetchError, HookError, MonsessError, NanLossDuringTrainingError
from monsess.hook import SessionRunContext, SessionRunHook, SessionRunValues, check_hooks
from monsess.hooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    FeedFnHook,
    FinalOpsHook,
    GlobalStepWaiterHook,
    LoggingTensorHook,
    NanTensorHook,
    StepCounterHook,
    StopAtStepHook,
)
from monsess.testing import FakeClock


class FakeSession:
    """As much of a session as hooks see, and what they asked of it."""

    def __init__(self, *hooks, step=0, restored=None, checkpoint_dir="/ckpt", chief=True, processes=1):
        self.hooks = check_hooks(hooks)
        self.coord = Coordinator()
        self.global_step = step
        self.state = step
        self.outputs = None
        self.checkpoint_dir = checkpoint_dir
        self.is_chief, self.process_count = chief, processes
        self.seconds = {"save": 0.0, "hooks": 0.0}
        self.restored_from, self.recoveries = (step or None), 0
        self.stop_requested = False
        self.stops, self.saves, self.limits, self.listeners = [], [], [], []
        self.fetched, self.fed, self.pending = [], [], []
        for hook in self.hooks:
            hook.begin()
        for hook, stored in zip(self.hooks, restored or [], strict=False):
            hook.load_state_dict(stored)
        self.create()

    def create(self):
        for hook in self.hooks:
            hook.after_create_session(self, self.coord)

    def recover(self, step):
        """Go back to the checkpoint of ``step``, which holds the hooks' states of now."""
        self.recoveries += 1
        self.global_step = self.state = self.restored_from = step
        self.pending.clear()
        for hook in self.hooks:
            hook.load_state_dict(hook.state_dict())
        self.create()

    def run(self, steps=1, **outputs):
        """One run that adds ``steps`` steps and returns ``outputs``; returns what the hooks fetched in it."""
        context = SessionRunContext(self, (), self.global_step)
        wanted = [hook.before_run(context) for hook in self.hooks]
        self.outputs = outputs
        self.global_step = self.state = context.global_step = self.global_step + steps
        leaves = [jnp.asarray(value) for value in jax.tree.leaves(outputs)]
        bad = sum(jnp.sum(~jnp.isfinite(x)) for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact))
        results = [None if args is None else self.evaluate(args.fetches) for args in wanted]
        self.fetched.append([args and args.fetches for args in wanted])
        self.fed.append([args and args.feed_dict for args in wanted])
        for hook, result in zip(self.hooks, results, strict=True):
            hook.after_run(context, SessionRunValues(result, jnp.asarray(bad)))
        return results

    def end(self):
        self.finish()
        for hook in reversed(self.hooks):
            hook.end(self)

    def finish(self):
        """The device has caught up: look at what is watched."""
        while self.pending:
            _, value, check = self.pending.pop(0)
            check(value)

    def evaluate(self, fetches, feed_dict=None):
        def one(fetch):
            if callable(fetch):
                return fetch(self.state, self.outputs, **(feed_dict or {}))
            if self.outputs is None or fetch not in self.outputs:
                raise FetchError(f"no output {fetch!r}")
            return jax.tree.map(jnp.asarray, self.outputs[fetch])

        return jax.tree.map(one, fetches)

    def request_stop(self, reason=None, everywhere=False):
        self.stop_requested = True
        self.stops.append((self.global_step, reason, everywhere))

    def request_save(self, everywhere=False):
        self.saves.append((self.global_step, everywhere))

    def stop_at_step(self, last_step, by):
        self.limits.append((last_step, by))

    def add_saver_listener(self, listener):
        self.listeners.append(listener)

    def _watch(self, step, value, check):
        self.pending.append((step, value, check))

    @property
    def saved_steps(self):
        return [step for step, _ in self.saves]


@pytest.fixture
def lines(caplog):
    """The lines logged so far; calling it returns those since the call before."""
    caplog.set_level(logging.INFO, logger="monsess")

    def take():
        new = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return new

    return take


def test_hooks_are_usable_and_exported_sorted():
    assert builtin.__all__ == sorted(builtin.__all__)
    assert all(hasattr(builtin, name) for name in builtin.__all__)
    check_hooks(
        [
            CheckpointSaverHook(save_steps=1),
            FeedFnHook(dict),
            FinalOpsHook(None),
            GlobalStepWaiterHook(0),
            LoggingTensorHook(["loss"], at_end=True),
            NanTensorHook(),
            StepCounterHook(),
            StopAtStepHook(1),
        ]
    )


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


class Listener(CheckpointSaverListener):
    def __init__(self, name="l", calls=None, failing=False):
        self.name, self.calls, self.failing = name, [] if calls is None else calls, failing

    def begin(self):
        self.calls.append(f"{self.name}.begin")

    def end(self, session, step):
        self.calls.append(f"{self.name}.end@{step}")
        if self.failing:
            raise ValueError(self.name)


class TestCheckpointSaver:
    @conforms("BH-032")
    def test_no_cadence(self):
        with pytest.raises(ValueError, match="Either save_secs or save_steps should be provided"):
            CheckpointSaverHook("/ckpt")

    @pytest.mark.parametrize("value", [0, -1, True, "1"])
    def test_impossible_cadences(self, value):
        with pytest.raises(ValueError, match=f"invalid save_steps={value!r}"):
            CheckpointSaverHook(save_steps=value)
        with pytest.raises(ValueError, match=f"invalid save_secs={value!r}"):
            CheckpointSaverHook(save_secs=value)

    def test_saves_at_crossed_multiples(self):
        session = FakeSession(CheckpointSaverHook(save_steps=10))
        for _ in range(25):
            session.run()
        assert session.saves == [(10, True), (20, True)]

    def test_resumed_run_saves_at_the_same_steps(self):
        session = FakeSession(CheckpointSaverHook(save_steps=10), step=13)
        for _ in range(20):
            session.run()
        assert session.saved_steps == [20, 30]

    def test_several_steps_per_run(self):
        session = FakeSession(CheckpointSaverHook(save_steps=10))
        for _ in range(10):
            session.run(steps=4)
        assert session.saved_steps == [12, 20, 32, 40]

    def test_step_by_a_run_without_hooks_is_not_made_up_for(self):
        session = FakeSession(CheckpointSaverHook(save_steps=10), step=8)
        session.run()
        session.global_step += 1
        session.run()
        assert session.saves == []

    def test_saves_by_seconds(self):
        with FakeClock() as clock:
            session = FakeSession(CheckpointSaverHook(save_secs=10))
            for _ in range(14):
                clock.advance(2.0)
                session.run()
        assert session.saves == [(5, False), (10, False)]

    def test_seconds_are_counted_from_the_start_of_the_session(self):
        with FakeClock() as clock:
            hook = CheckpointSaverHook(save_secs=10)
            clock.advance(100)
            session = FakeSession(hook)
            session.run()
        assert session.saves == []

    @conforms(
        "BH-031",
        instead="Both cadences may be given: whichever comes first saves, and neither resets the other's schedule.",
    )
    def test_both_cadences_keep_their_own_schedules(self):
        with FakeClock() as clock:
            session = FakeSession(CheckpointSaverHook(save_secs=10, save_steps=3))
            for _ in range(12):
                clock.advance(2.5)
                session.run()
        assert session.saves == [(3, True), (4, False), (6, True), (8, False), (9, True), (12, True)]

    def test_chief_alone_decides_about_seconds(self):
        with FakeClock() as clock:
            session = FakeSession(CheckpointSaverHook(save_secs=10, save_steps=100), chief=False, processes=2)
            for _ in range(101):
                clock.advance(5.0)
                session.run()
        assert session.saves == [(100, True)]

    def test_listeners_begin_are_registered_once_and_end(self):
        calls = []
        first, second = Listener("a", calls), Listener("b", calls)
        session = FakeSession(CheckpointSaverHook(save_steps=2, listeners=[first, second]))
        assert session.listeners == [first, second]
        session.run()
        session.recover(0)
        assert session.listeners == [first, second]
        for _ in range(3):
            session.run()
        session.end()
        assert calls == ["a.begin", "b.begin", "a.end@3", "b.end@3"]

    def test_listeners_are_registered_with_each_session(self):
        hook = CheckpointSaverHook(save_steps=2, listeners=[Listener()])
        assert len(FakeSession(hook).listeners) == 1
        assert len(FakeSession(hook).listeners) == 1

    def test_w06_every_listener_is_ended(self):
        calls = []
        listeners = [Listener("a", calls, failing=True), Listener("b", calls, failing=True), Listener("c", calls)]
        session = FakeSession(CheckpointSaverHook(save_steps=2, listeners=listeners))
        with pytest.raises(ValueError, match="a") as caught:
            session.end()
        assert calls[-3:] == ["a.end@0", "b.end@0", "c.end@0"]
        assert caught.value.__notes__ == ["raised by Listener.end", "a further listener failed: ValueError: b"]

    def test_no_listeners(self):
        assert FakeSession(CheckpointSaverHook(save_steps=2, listeners=None)).listeners == []

    def test_unusable_listeners(self):
        class NoEnd:
            begin = before_save = after_save = staticmethod(lambda *args: None)

        class Wrong(CheckpointSaverListener):
            def before_save(self, session):
                pass

        def refused(listeners, match):
            with pytest.raises(HookError, match=match):
                CheckpointSaverHook(save_steps=1, listeners=listeners)

        refused([Listener(), NoEnd()], r"listeners\[1\] \(TestCheckpointSaver.*NoEnd\) has no method 'end'")
        refused([Wrong()], r"before_save\(session\) cannot be called as before_save\(session, step\)")
        refused([Listener], r"is the class Listener, not an object. Write Listener\(\.\.\.\)")
        refused("listener", "must be an iterable")
        refused(Listener(), "must be an iterable of CheckpointSaverListener, found Listener")
        same = Listener()
        refused([same, same], r"listeners\[1\]: the same Listener object is listed twice")

    @pytest.mark.parametrize(
        ("hook_dir", "session_dir"),
        [
            ("/ckpt/run", "/ckpt/run/"),
            ("/ckpt/./run", "/ckpt/run"),
            ("file:///ckpt/run", "/ckpt/run"),
            ("memory://run/", "memory://run"),
            (None, "memory://run"),
        ],
    )
    def test_same_directory(self, hook_dir, session_dir):
        FakeSession(CheckpointSaverHook(hook_dir, save_steps=1), checkpoint_dir=session_dir)

    def test_path_objects_are_directories(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        FakeSession(CheckpointSaverHook(tmp_path / "run", save_steps=1), checkpoint_dir="run")

    def test_another_directory_is_refused(self):
        hook = CheckpointSaverHook("s3://key:secret@host/a", save_steps=1)
        with pytest.raises(ValueError, match=r"has checkpoint_dir .*, the session has") as caught:
            FakeSession(hook, checkpoint_dir="s3://key:secret@host/b")
        assert "secret" not in str(caught.value)

    def test_session_without_a_directory_is_refused(self):
        for hook_dir in (None, "/ckpt"):
            with pytest.raises(ValueError, match="the session has no checkpoint_dir"):
                FakeSession(CheckpointSaverHook(hook_dir, save_steps=1), checkpoint_dir=None)


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

    @conforms(
        "BH-062",
        "BH-063",
        "BH-064",
        instead="Logs at each run but the first that crosses a multiple of N: 10, 20 for 5 steps per run and N=10; "
        "10, 15, 20, 25 for N=5; 20, 30 for 10 per run and N=5 (W-34).",
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


class TestNanTensor:
    def test_loss_that_is_finite(self):
        session = FakeSession(NanTensorHook("loss"))
        for _ in range(3):
            session.run(loss=1.0)
        session.end()
        assert session.stops == []

    @pytest.mark.parametrize(("value", "shown"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
    def test_loss_that_is_not(self, value, shown):
        session = FakeSession(NanTensorHook("loss"))
        session.run(loss=1.0)
        session.run(loss=value)
        with pytest.raises(NanLossDuringTrainingError) as caught:
            session.finish()
        assert str(caught.value) == f"NaN loss during training. At step 2: loss = {shown}."

    def test_nothing_waits_in_the_run(self):
        session = FakeSession(NanTensorHook("loss"))
        session.run(loss=np.nan)
        assert [step for step, _, _ in session.pending] == [1]

    def test_without_a_name_all_floating_outputs_are_looked_at(self):
        session = FakeSession(NanTensorHook())
        session.run(loss=1.0, grads={"w": np.ones(3)}, count=3)
        session.finish()
        assert session.fetched == [[None]]
        session.run(loss=1.0, grads={"w": np.array([1.0, np.inf, np.nan])}, count=3)
        with pytest.raises(NanLossDuringTrainingError, match="At step 2: 2 of the values"):
            session.finish()

    def test_w37_arrays_and_pytrees(self):
        hook = NanTensorHook({"l": "loss", "g": "grads"})
        session = FakeSession(hook)
        good = {"w": np.ones((2, 2), np.float32), "n": np.arange(3)}
        session.run(loss=jnp.bfloat16(1.0), grads=good)
        session.finish()
        session.run(loss=jnp.bfloat16(1.0), grads={**good, "w": np.array([[1, np.inf], [0, 0]], np.float32)})
        with pytest.raises(NanLossDuringTrainingError, match=r"At step 2: grads\['w'\] holds NaN or infinity\."):
            session.finish()

    def test_arrays_stay_on_the_device(self):
        session = FakeSession(NanTensorHook("grads"))
        session.run(grads=np.ones((1000, 10)))
        ((_, value, _),) = session.pending
        assert [leaf.shape for leaf in jax.tree.leaves(value)] == [()]

    def test_callables(self):
        def ratio(state, outputs):
            return outputs["a"] / outputs["b"]

        session = FakeSession(NanTensorHook([ratio, "a"]))
        session.run(a=jnp.float32(1), b=jnp.float32(0))
        with pytest.raises(NanLossDuringTrainingError, match=r"At step 1: .*ratio = inf\."):
            session.finish()

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2", "complex64", "float32"])
    def test_every_floating_type(self, dtype):
        session = FakeSession(NanTensorHook(["loss"]))
        session.run(loss=jnp.array(1.0).astype(dtype))
        session.finish()
        session.run(loss=jnp.array(np.nan).astype(dtype))
        with pytest.raises(NanLossDuringTrainingError):
            session.finish()

    @pytest.mark.parametrize("name", ["loss", None])
    def test_warning_and_stop(self, lines, name):
        session = FakeSession(NanTensorHook(name, fail_on_nan_loss=False))
        session.run(loss=np.nan)
        thread = threading.Thread(target=session.finish)  # as the thread that writes checkpoints may
        thread.start()
        thread.join()
        assert session.stops == [], "a check must not touch the session"
        session.run(loss=1.0)
        ((step, reason, everywhere),) = session.stops
        assert (step, everywhere) == (2, False)
        assert reason.startswith("NaN loss during training. At step 1: ")
        assert len([line for line in lines() if "asking for a stop" in line]) == 1

    def test_integers_can_never_be_nan(self):
        session = FakeSession(NanTensorHook("count"))
        with pytest.raises(ValueError, match="count holds no floating value"):
            session.run(count=3)

    @pytest.mark.parametrize("loss", [[], {}, 3.0, ["loss", 1], "", np.ones(2)])
    def test_impossible_tensors(self, loss):
        with pytest.raises(ValueError, match="invalid loss_tensor"):
            NanTensorHook(loss)

    def test_w31_and_recovery_forget_what_was_found(self):
        hook = NanTensorHook("loss", fail_on_nan_loss=False)
        session = FakeSession(hook)
        session.run(loss=np.nan)
        session.finish()
        session.recover(0)
        session.run(loss=1.0)
        assert session.stops == []
        session.run(loss=np.nan)
        session.finish()
        session = FakeSession(hook)
        session.run(loss=1.0)
        assert session.stops == []


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


class TestFinalOps:
    @conforms("BH-076", "BH-077")
    @pytest.mark.parametrize("value", [3.5, np.arange(4)])
    def test_value_of_the_end(self, value):
        hook = FinalOpsHook("loss")
        session = FakeSession(hook)
        assert hook.final_ops_values is None
        session.run(loss=0.0)
        session.run(loss=value)
        assert hook.final_ops_values is None
        session.end()
        assert isinstance(hook.final_ops_values, np.ndarray)
        np.testing.assert_array_equal(hook.final_ops_values, value)

    def test_structure_is_kept(self):
        hook = FinalOpsHook({"loss": "loss", "state": [lambda state, outputs: jnp.int32(state)]})
        session = FakeSession(hook)
        session.run(loss=2.0)
        session.end()
        assert hook.final_ops_values == {"loss": 2.0, "state": [1]}

    def test_nothing(self):
        hook = FinalOpsHook(None)
        FakeSession(hook).end()
        assert hook.final_ops_values is None

    @conforms("BH-079")
    def test_feed_dict_is_handed_to_callables(self):
        hook = FinalOpsHook([lambda state, outputs, x, y: outputs["loss"] * x + y, "loss"], {"x": 10, "y": 1})

        class NotFed(SessionRunHook):
            pass

        session = FakeSession(hook, NotFed())
        session.run(loss=2.0)
        session.end()
        assert hook.final_ops_values == [21.0, 2.0]

    @conforms("BH-078")
    def test_end_of_data(self, lines):
        def reads(state, outputs):
            raise EndOfData

        hook = FinalOpsHook(reads)
        session = FakeSession(hook)
        session.run(loss=1.0)
        with pytest.raises(EndOfData):
            session.end()
        assert "dependency back to some input source" in lines()[0]
        assert hook.final_ops_values is None

    def test_w31_values_of_another_session_are_forgotten(self):
        hook = FinalOpsHook("loss")
        session = FakeSession(hook)
        session.run(loss=1.0)
        session.end()
        FakeSession(hook)
        assert hook.final_ops_values is None

    def test_impossible_arguments(self):
        with pytest.raises(ValueError, match="invalid final_ops"):
            FinalOpsHook(3.0)
        with pytest.raises(ValueError, match="no callable to take arguments"):
            FinalOpsHook("loss", {"x": 1})
        with pytest.raises(ValueError, match="expected names of arguments"):
            FinalOpsHook(lambda state, outputs: 1, {1: 1})


class TestFeedFn:
    @conforms("BH-081")
    def test_feeds_each_run_anew(self):
        numbers = iter(range(10))
        session = FakeSession(FeedFnHook(lambda: {"batch": next(numbers)}))
        session.run()
        session.run()
        assert session.fed == [[{"batch": 0}], [{"batch": 1}]]
        assert session.fetched == [[None], [None]]

    def test_end_of_data_goes_through(self):
        def ended():
            raise EndOfData

        with pytest.raises(EndOfData):
            FakeSession(FeedFnHook(ended)).run()

    def test_what_is_no_dict(self):
        with pytest.raises(TypeError, match="feed_fn must return a dict from argument name to value, found list"):
            FakeSession(FeedFnHook(lambda: [1])).run()
        with pytest.raises(ValueError, match="invalid feed_fn="):
            FeedFnHook({"batch": 1})
