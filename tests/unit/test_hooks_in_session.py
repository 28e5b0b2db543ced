"""Built-in hooks in real sessions that end, crash, recover and resume: together they do what a straight run does."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
import ticks
import toy

import monsess as ms
from monsess.hook import hook_name
from monsess.hooks import step_counter
from monsess.runner import HookRunner
from monsess.testing import FakeClock

OFF = {"save_checkpoint_secs": None, "save_checkpoint_steps": None}


class Crash(Exception):
    """What ends a session without a final commit."""


class CountRuns(ms.SessionRunHook):
    """A user's hook with a state."""

    def begin(self):
        self.runs = 0

    def after_run(self, run_context, run_values):
        self.runs += 1

    def state_dict(self):
        return {"runs": self.runs}

    def load_state_dict(self, state):
        self.runs = state["runs"]


def train(directory, *hooks, step=ticks.one, crash_at=None, init_fn=ticks.init_fn, **arguments):
    """Run until the session stops, or leave it by an error once it is at ``crash_at``; return the session."""
    arguments = {"save_checkpoint_steps": 2, "keep": ms.KeepLast(100), **arguments}
    sess = ms.MonitoredTrainingSession(init_fn, checkpoint_dir=directory, hooks=hooks, **arguments)
    try:
        with sess:
            while not sess.should_stop():
                sess.run(step)
                if sess.global_step == crash_at:
                    raise Crash
    except Crash:
        pass
    return sess


def saved(directory):
    return ms.CheckpointStore(directory).steps()


def stored_hooks(directory, step):
    return json.loads((directory / str(step) / "session.json").read_text())["hooks"]


class TestStopAtStep:
    def test_goal_not_reached_survives_crashes(self, tmp_path):
        for crash_at, restored in ((5, None), (7, 4), (9, 6)):
            sess = train(tmp_path, ms.StopAtStepHook(num_steps=10), crash_at=crash_at)
            assert sess.restored_from == restored
        sess = train(tmp_path, ms.StopAtStepHook(num_steps=10))
        assert (sess.restored_from, sess.global_step) == (8, 10)
        assert sess.stop_reason == ms.StopReason.LAST_STEP

    def test_goal_not_reached_survives_a_clean_end(self, tmp_path):
        with ms.MonitoredTrainingSession(
            ticks.init_fn, checkpoint_dir=tmp_path, hooks=[ms.StopAtStepHook(num_steps=10)]
        ) as sess:
            sess.run(ticks.one)
        assert train(tmp_path, ms.StopAtStepHook(num_steps=10)).global_step == 10

    def test_goal_reached_starts_a_new_count_and_that_one_survives_too(self, tmp_path):
        assert train(tmp_path, ms.StopAtStepHook(num_steps=4)).global_step == 4
        assert train(tmp_path, ms.StopAtStepHook(num_steps=4), crash_at=7).restored_from == 4
        sess = train(tmp_path, ms.StopAtStepHook(num_steps=4))
        assert (sess.restored_from, sess.global_step) == (6, 8)

    def test_another_num_steps_starts_a_new_count(self, tmp_path):
        train(tmp_path, ms.StopAtStepHook(num_steps=10), crash_at=4)
        assert train(tmp_path, ms.StopAtStepHook(num_steps=3)).global_step == 7

    def test_w31_object_can_be_used_again(self, tmp_path):
        hook = ms.StopAtStepHook(num_steps=3)
        assert [train(tmp_path, hook).global_step for _ in range(3)] == [3, 6, 9]

    def test_w30_runs_of_several_steps_stop_at_once(self):
        with ms.MonitoredTrainingSession(ticks.init_fn, hooks=[ms.StopAtStepHook(last_step=12)]) as sess:
            while not sess.should_stop():
                sess.run(ticks.adding(5))
        assert sess.global_step == 15


STEPS = 16


def log(directory=None, **arguments):
    """What one attempt logs: step, loss and a value made of state and outputs, bit for bit; and its session."""
    found = []

    def formatter(values):
        found.append((int(values["step"]), values["loss"].tobytes(), values["made"].tobytes()))
        return ""

    hook = ms.LoggingTensorHook(
        {
            "loss": "loss",
            "made": lambda state, outputs: (state["momentum"] ** 2).sum() + outputs["grad_norm"],
            "step": lambda state, outputs: state["updates"],
        },
        every_n_iter=5,
        formatter=formatter,
    )
    data = toy.batches(STEPS)
    sess = train(directory, hook, step=toy.train, init_fn=toy.init_fn, data=data, **arguments)
    return found, sess


@pytest.fixture(scope="module")
def straight():
    """What a run without any interruption logs."""
    found, _ = log(**OFF)
    assert [step for step, *_ in found] == [1, 5, 10, 15]
    return found


class TestLogging:
    @pytest.mark.parametrize("crash_at", [1, 4, 5, 6, 11])
    def test_resumed_run_logs_what_a_straight_one_logs(self, tmp_path, straight, crash_at):
        before, _ = log(tmp_path, crash_at=crash_at, save_checkpoint_steps=1)
        after, sess = log(tmp_path)
        assert sess.restored_from == crash_at
        assert before + after == straight

    def test_steps_that_are_done_again_are_logged_again_alike(self, tmp_path, straight):
        before, _ = log(tmp_path, crash_at=11, save_checkpoint_steps=4)
        after, sess = log(tmp_path)
        assert sess.restored_from == 8
        assert before == straight[:3]
        assert after == straight[2:]

    def test_recovery_in_the_process(self, tmp_path, straight):
        class FailOnce(ms.SessionRunHook):
            failed = False

            def after_run(self, run_context, run_values):
                if run_context.global_step == 7 and not self.failed:
                    self.failed = True
                    raise ConnectionError

        count = CountRuns()
        found, sess = log(
            tmp_path,
            chief_only_hooks=[FailOnce(), count],
            recovery=ms.Recovery(is_transient=lambda error: isinstance(error, ConnectionError), backoff_secs=0),
        )
        assert (sess.recoveries, sess.restored_from, sess.global_step) == (1, 6, STEPS)
        assert found == straight
        assert count.runs == STEPS

    def test_runs_of_different_lengths_are_logged_with_their_own_values(self, lines):
        with ms.MonitoredTrainingSession(
            ticks.init_fn, hooks=[ms.LoggingTensorHook(["count"], every_n_iter=10)], log_step_count_steps=None
        ) as sess:
            lines()
            for steps in (5, 1, 1, 10, 1, 5, 5, 10):
                sess.run(ticks.adding(steps))
        logged = [line.split(" (")[0] for line in lines() if line.startswith("count")]
        assert logged == [f"count = {step}, step = {step}" for step in (5, 17, 23, 38)]

    def test_restart_of_a_finished_run_logs_nothing(self, tmp_path, lines):
        for _ in range(2):
            lines()
            train(tmp_path, ms.StopAtStepHook(last_step=3), ms.LoggingTensorHook(["count"], at_end=True))
        assert not any(line.startswith("count") for line in lines())


class TestSchedules:
    def test_crashed_and_resumed_runs_save_at_the_steps_of_a_straight_one(self, tmp_path):
        for crash_at in (2, 5, 9, 10):
            train(tmp_path, crash_at=crash_at, save_checkpoint_steps=3)
        train(tmp_path, ms.StopAtStepHook(last_step=13), save_checkpoint_steps=3)
        assert saved(tmp_path) == [3, 6, 9, 12, 13]

    def test_resumed_run_counts_steps_per_second_at_the_steps_of_a_straight_one(self, tmp_path, lines):
        logged = []

        class Tick(ms.SessionRunHook):
            def before_run(self, run_context):
                logged.extend((run_context.global_step, line) for line in lines() if "/sec" in line)

        with ms.testing.FakeClock():
            for crash_at in (7, None):
                hooks = [ms.StopAtStepHook(last_step=16), Tick()]
                train(tmp_path, *hooks, crash_at=crash_at, log_step_count_steps=5, init_fn=ticks.init_fn)
        assert logged == [], "no time has passed"
        with ms.testing.FakeClock() as clock:
            for restored, until in ((16, 22), (22, 33)):
                with ms.MonitoredTrainingSession(
                    ticks.init_fn, checkpoint_dir=tmp_path, hooks=[Tick()], log_step_count_steps=5
                ) as sess:
                    assert sess.restored_from == restored
                    while sess.global_step < until:
                        clock.advance(0.5)
                        sess.run(ticks.one)
        assert [step for step, _ in logged] == [20, 25, 30]

    def test_seconds_start_anew_with_each_session(self, tmp_path):
        with ms.testing.FakeClock() as clock:
            for _ in range(2):
                sess = ms.MonitoredTrainingSession(ticks.init_fn, checkpoint_dir=tmp_path, save_checkpoint_secs=10)
                with pytest.raises(Crash), sess:
                    clock.advance(9)
                    sess.run(ticks.one)
                    raise Crash
        assert saved(tmp_path) == []


def hooks_with_states(*others):
    return [
        CountRuns(),
        ms.StopAtStepHook(num_steps=5),
        ms.CheckpointSaverHook(save_steps=2),
        ms.NanTensorHook("count"),
        *others,
    ]


class TestStates:
    @pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
    def test_states_do_not_depend_on_the_order_of_the_hooks(self, tmp_path, order):
        hooks = hooks_with_states()
        train(tmp_path, *(hooks[i] for i in order), **OFF)
        assert saved(tmp_path) == [2, 4, 5]
        for step in saved(tmp_path):
            assert stored_hooks(tmp_path, step) == {
                "CountRuns": {"runs": step},
                "StopAtStepHook": {"goal": 5, "num_steps": 5},
            }

    def test_resumed_run_may_list_its_hooks_in_another_order(self, tmp_path):
        train(tmp_path, *hooks_with_states(), crash_at=3, **OFF)
        hooks = hooks_with_states(ms.LoggingTensorHook(["count"], every_n_iter=1))[::-1]
        sess = train(tmp_path, *hooks, **OFF)
        assert (sess.restored_from, sess.global_step) == (2, 5)
        assert stored_hooks(tmp_path, 5)["CountRuns"] == {"runs": 5}


class TestOtherHooks:
    def test_waiter_watches_another_run(self, tmp_path):
        other, own = tmp_path / "other", tmp_path / "own"

        def step_of_other():
            step = ms.latest_checkpoint(other)
            train(other, ms.StopAtStepHook(num_steps=2))
            return step

        with ms.testing.FakeClock() as clock:
            sess = train(own, ms.GlobalStepWaiterHook(4, step_fn=step_of_other), crash_at=1)
            assert clock.slept == [0.5, 0.5]
        assert sess.global_step == 1

    def test_w44_stop_of_the_session_ends_the_wait(self):
        def step_fn():
            if clock.monotonic() > 5:
                sess.request_stop("enough")
            return 0

        with ms.testing.FakeClock() as clock:
            hook = ms.GlobalStepWaiterHook(10, step_fn=step_fn)
            with ms.MonitoredTrainingSession(ticks.init_fn, hooks=[hook]) as sess:
                sess.run(ticks.one)
                assert sess.should_stop()
            assert clock.monotonic() == 5.5
        assert sess.stop_reason.text == "enough"

    def test_end_of_data_in_a_feed_function_is_a_clean_end(self, tmp_path):
        @ms.train_step
        def add(state, batch):
            return {"count": state["count"] + batch.mean()}, {}

        batches = iter([np.full(4, 1.0), np.full(4, 2.0)])

        def feed():
            for batch in batches:
                return {"batch": batch}
            raise ms.EndOfData

        final = ms.FinalOpsHook(lambda state, outputs: state["count"])
        sess = train(tmp_path, ms.FeedFnHook(feed), final, step=add)
        assert sess.global_step == 2
        assert sess.stop_reason == ms.StopReason.END_OF_DATA
        assert final.final_ops_values == 3.0
        assert saved(tmp_path) == [2]

    def test_final_values_after_a_resume_and_of_a_run_that_was_finished(self, tmp_path, lines):
        train(tmp_path, crash_at=3)
        hooks = [ms.FinalOpsHook("count"), ms.FinalOpsHook(lambda state, outputs: state["count"])]
        train(tmp_path, ms.StopAtStepHook(last_step=5), *hooks)
        assert [hook.final_ops_values for hook in hooks] == [5.0, 5.0]
        lines()
        sess = train(tmp_path, ms.StopAtStepHook(last_step=5), *hooks)
        assert sess.summary()["steps"] == 0
        assert hooks[0].final_ops_values is None
        assert hooks[1].final_ops_values == 5.0
        assert any(line.startswith("FinalOpsHook: no step was run") for line in lines())


@pytest.mark.parametrize(
    "hook",
    [
        ms.BroadcastGlobalVariablesHook(0),
        ms.CheckpointSaverHook(save_steps=5, save_secs=5),
        ms.FeedFnHook(dict),
        ms.ReplicaCheckHook(every_n_steps=3),
        ms.StopAtStepHook(last_step=6),
    ],
    ids=hook_name,
)
def test_what_all_processes_have_to_do_is_refused_to_the_chief_alone(hook):
    for chief in (True, False):
        HookRunner((hook,), (hook,), chief, process_count=1)
        HookRunner((hook,), (), chief, process_count=2)
        with pytest.raises(ms.HookError, match=f"^{hook_name(hook)} is among chief_only_hooks, but does what all"):
            HookRunner((hook,), (hook,), chief, process_count=2)


@pytest.mark.parametrize(
    "hook",
    [
        ms.CheckpointSaverHook(save_secs=5),
        ms.FinalOpsHook("loss"),
        ms.GlobalStepWaiterHook(0),
        ms.LoggingTensorHook(["loss"], every_n_iter=2),
        ms.NanTensorHook("loss"),
        ms.StepCounterHook(),
    ],
    ids=hook_name,
)
def test_what_the_chief_may_do_alone(hook):
    assert HookRunner((hook,), (hook,), process_count=2).hooks == (hook,)
    assert HookRunner((hook,), (hook,), chief=False, process_count=2).hooks == ()


@ms.train_step(steps_per_run=3)
def three(state):
    return state + 3, {"loss": 1.0 / (1.0 + state)}


@ms.train_step
def counted(state):
    return {"count": state["count"] + 1}, {"loss": 1.0 / (1.0 + state["count"])}


@ms.train_step
def single(state):
    return state + 1, {"loss": 1.0 / (1.0 + state)}


class Notes(ms.SessionRunHook):
    """Which values were logged at which step."""

    def begin(self):
        self.heard = []

    def log(self, step, scalars):
        self.heard.append((step, sorted(scalars)))


@pytest.mark.parametrize("seed", range(8))
def test_a_hook_that_sleeps_does_what_one_that_is_always_called_does(tmp_path, seed, lines):
    """A derived class is called in every run; runs of several steps and those without hooks are among them."""
    choose = random.Random(seed)
    every = choose.randint(2, 9)
    makes = [
        (ms.CheckpointSaverHook, {"save_steps": every}),
        (ms.StepCounterHook, {"every_n_steps": every}),
        (ms.SummarySaverHook, {"save_steps": every}),
        (ms.LoggingTensorHook, {"tensors": ["loss"], "every_n_iter": every}),
        (ms.ReplicaCheckHook, {"every_n_steps": every}),
        (ms.EvaluationHook, {"step": ms.eval_step(lambda state: {"v": state}), "every_n_steps": every}),
    ]
    runs = [(choose.choice([single, single, three]), choose.random() < 0.8) for _ in range(40)]
    seen = []
    for derived in (False, True):
        lines()
        hooks = [(type(kind.__name__, (kind,), {}) if derived else kind)(**given) for kind, given in makes]
        notes, url, slept = Notes(), tmp_path / str(derived), False
        with ms.MonitoredTrainingSession(
            lambda: 0.0,
            checkpoint_dir=url,
            hooks=[*hooks, notes],
            keep=ms.KeepLast(100),
            save_summaries_steps=None,
            log_step_count_steps=None,
            **OFF,
        ) as sess:
            for step, with_hooks in runs:
                (sess.run if with_hooks else sess.run_without_hooks)(step)
                slept = slept or bool(sess._hooks._asleep)
        assert slept is not derived
        seen.append((notes.heard, saved(url), [line.split(" (")[0] for line in lines() if "loss = " in line]))
    assert seen[0] == seen[1]
    assert len(seen[0][0]) > 5


@pytest.mark.parametrize(
    ("hook", "due"),
    [
        (ms.LoggingTensorHook(["loss"], every_n_iter=10), [1, 10, 20]),
        (ms.EvaluationHook(ticks.look, every_n_steps=10), [1, 10, 20]),
        (ms.EvaluationHook(ticks.look), [1]),
        (ms.NanTensorHook(), [1]),
        (ms.StopAtTimeHook(3600), [1]),
    ],
    ids=lambda value: hook_name(value) if isinstance(value, ms.SessionRunHook) else "",
)
def test_a_hook_that_is_not_due_is_not_called(hook, due):
    """The first run of a session tells when it is due."""
    called = []
    with ms.MonitoredTrainingSession(lambda: {"count": 0.0}, hooks=[hook], **OFF, log_step_count_steps=None) as sess:
        for step in range(1, 26):
            before = sess._hooks.seconds[hook_name(hook)]
            sess.run(counted)
            called += [step] if sess._hooks.seconds[hook_name(hook)] != before else []
    assert called == due


def test_a_hook_that_goes_by_seconds_is_called_when_its_time_has_come(lines):
    with FakeClock() as clock:
        hooks = [ms.ProgressBarHook(line_secs=10), ms.StopAtTimeHook(100, margin_secs=20)]
        asleep, shown = [], []
        lines()
        with ms.MonitoredTrainingSession(
            lambda: {"count": 0.0}, hooks=hooks, max_in_flight=1, **OFF, log_step_count_steps=None
        ) as sess:
            while not sess.should_stop():
                clock.advance(1)
                sess.run(counted)
                asleep.append(len(sess._hooks._asleep))
                shown += [sess.global_step] if any(line.startswith("step ") for line in lines()) else []
        assert sess.global_step == 80
        assert shown == [
            2,
            13,
            24,
            35,
            46,
            57,
            68,
            79,
        ]  # asked for when ten seconds have passed, and there one run later
        assert asleep.count(2) >= 55


class Warms(ms.SessionRunHook):
    """Runs a step before the hooks behind it know of the session."""

    def after_create_session(self, session, coord):
        session.run(counted)


def test_a_step_that_a_hook_runs_at_the_start_sends_no_other_to_sleep(lines):
    with FakeClock() as clock:
        hooks = [Warms(), ms.ProgressBarHook(line_secs=10), ms.EvaluationHook(ticks.look, every_n_steps=5)]
        with ms.MonitoredTrainingSession(
            lambda: {"count": 0.0}, hooks=hooks, max_in_flight=1, **OFF, log_step_count_steps=None
        ) as sess:
            while sess.global_step < 40:
                clock.advance(1)
                sess.run(counted)
    told = lines()
    assert len([line for line in told if line.startswith("step ")]) >= 3
    assert len([line for line in told if line.startswith("Evaluation at step ")]) == 8


@ms.train_step
def breaks(state):
    return {"count": state["count"] + 1}, {"loss": 0.0 / state["count"]}


class WarmsBadly(ms.SessionRunHook):
    """Its own step is the one whose loss is not finite."""

    def after_create_session(self, session, coord):
        session.run(breaks)


@pytest.mark.parametrize("alone", [True, False])
def test_what_is_not_finite_is_found_in_the_first_run_too(alone):
    hooks = [] if alone else [WarmsBadly()]
    with (
        pytest.raises(ms.NanLossDuringTrainingError, match="At step 1: "),
        ms.MonitoredTrainingSession(lambda: {"count": 0.0}, hooks=[*hooks, ms.NanTensorHook()], **OFF) as sess,
    ):
        while sess.global_step < 9:
            sess.run(breaks)


class PassesOn(ms.SessionRunHook):
    """A built-in hook inside of one of the user, which knows of the public methods only."""

    def __init__(self, hook):
        self.hook = hook

    def begin(self):
        self.hook.begin()

    def before_run(self, run_context):
        return self.hook.before_run(run_context)

    def after_run(self, run_context, run_values):
        self.hook.after_run(run_context, run_values)

    def end(self, session):
        self.hook.end(session)


def test_a_built_in_hook_inside_another_one_does_its_work(tmp_path):
    inner = ms.EvaluationHook(ticks.look)
    with ms.MonitoredTrainingSession(
        lambda: {"count": 0.0}, checkpoint_dir=tmp_path, hooks=[ms.StopAtStepHook(5), PassesOn(inner)], **OFF
    ) as sess:
        while not sess.should_stop():
            sess.run(counted)
        assert inner.evaluated_step == 5
    with (
        pytest.raises(ms.NanLossDuringTrainingError, match="At step 1: "),
        ms.MonitoredTrainingSession(lambda: {"count": 0.0}, hooks=[PassesOn(ms.NanTensorHook())], **OFF) as sess,
    ):
        while sess.global_step < 9:
            sess.run(breaks)


class MovesTheClock(ms.SessionRunHook):
    """What makes a run long."""

    def __init__(self, clock):
        self.clock = clock

    def before_run(self, run_context):
        self.clock.advance(30)


def test_a_time_that_comes_in_the_middle_of_a_run_is_not_noticed_a_run_late():
    with FakeClock() as clock:
        hooks = [MovesTheClock(clock), ms.StopAtTimeHook(100, margin_secs=10)]
        with ms.MonitoredTrainingSession(lambda: {"count": 0.0}, hooks=hooks, **OFF, log_step_count_steps=None) as sess:
            while not sess.should_stop():
                sess.run(counted)
        assert sess.global_step == 3


class StopsAt(ms.SessionRunHook):
    """Asks for a stop."""

    def __init__(self, step):
        self.step = step

    def after_run(self, run_context, run_values):
        if run_context.global_step == self.step:
            run_context.request_stop("enough", everywhere=True)


@pytest.mark.parametrize("every", [{"every_n_steps": 50}, {"every_secs": 1e6}, {"with_saves": True}, {}])
@pytest.mark.parametrize("first", [True, False])
def test_the_last_step_is_evaluated_before_its_save_whoever_stops_and_in_whatever_order(tmp_path, every, first):
    hook = ms.EvaluationHook(ticks.look, **every)
    notes = Notes()
    hooks = [StopsAt(7), hook, notes] if first else [notes, hook, StopsAt(7)]
    with ms.MonitoredTrainingSession(
        lambda: {"count": 0.0},
        checkpoint_dir=tmp_path,
        hooks=hooks,
        keep=ms.KeepBest(1, "eval/count", "max"),
        save_summaries_steps=None,
        save_summaries_secs=None,
        log_step_count_steps=None,
        **OFF,
    ) as sess:
        while not sess.should_stop():
            sess.run(counted)
        assert hook.evaluated_step == 7
    assert ms.CheckpointStore(tmp_path).metrics(7) == {"eval/count": 7.0}
    assert notes.heard == [(7, ["eval/count"])]


class Unlucky(ms.SessionRunHook):
    """Uses the names that built-in hooks have for themselves."""

    _sleeps_until = _sleeps_until_time = _at_stop = 5

    def __init__(self):
        self.runs = 0

    def after_run(self, run_context, run_values):
        self.runs += 1


def test_a_hook_of_the_user_may_have_any_attribute():
    hook = Unlucky()
    with ms.MonitoredTrainingSession(lambda: 0.0, hooks=[hook, ms.StopAtStepHook(3)]) as sess:
        while not sess.should_stop():
            sess.run(single)
    assert hook.runs == 3


def test_the_time_that_logging_a_rate_takes_is_no_training(lines, monkeypatch):
    with FakeClock() as clock:
        log = step_counter.logger.info
        monkeypatch.setattr(step_counter.logger, "info", lambda *line: (clock.advance(0.25), log(*line)))
        hook = ms.StepCounterHook(every_n_steps=2)
        with ms.MonitoredTrainingSession(lambda: 0.0, hooks=[hook], log_step_count_steps=None) as sess:
            for _ in range(9):
                clock.advance(0.1)
                sess.run(single)
    rates = [float(line.split()[-1]) for line in lines() if line.startswith("global_step/sec")]
    assert rates == pytest.approx([10.0] * 4)
