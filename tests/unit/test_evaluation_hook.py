"""EvaluationHook: when it evaluates, what it logs, and that training does not notice."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import ticks
import toy
from conforms import conforms
from fake_session import FakeSession

import monsess as ms
from monsess.agreement import StopReason
from monsess.hooks import evaluation
from monsess.hooks.evaluation import EvaluationHook, _SharedTimer
from monsess.testing import FakeClock

LOOK = ms.eval_step(lambda state: {"count": state["count"]})


class Session(FakeSession):
    """A session in which a step without a batch can be evaluated; writes down when it was."""

    save_requested = preempted = False
    _hooks = property(lambda self: self)  # it has the list of them itself

    def __init__(self, *hooks, **more):
        self.evaluated, self.told = [], {}
        self.on_evaluation = lambda: None
        super().__init__(*hooks, **more)

    def run_without_hooks(self, step, *args):
        self.evaluated.append(self.global_step)
        self.on_evaluation()
        return {"_rows": jnp.float32(1), "count": jnp.float32(self.global_step)}

    def log(self, scalars, step=None):
        self.told[step] = dict(scalars)

    def runs(self, count, steps=1):
        for _ in range(count):
            self.run(steps)
        return self.evaluated


# ---- the schedule


def test_multiples_of_steps():
    assert Session(EvaluationHook(LOOK, every_n_steps=4)).runs(13) == [4, 8, 12]
    assert Session(EvaluationHook(LOOK, every_n_steps=4)).runs(4, steps=5) == [5, 10, 15, 20]
    assert Session(EvaluationHook(LOOK, every_n_steps=4)).runs(4, steps=3) == [6, 9, 12]
    assert Session(EvaluationHook(LOOK, every_n_steps=4), step=6).runs(7) == [8, 12]


def test_seconds():
    with FakeClock() as clock:
        session = Session(EvaluationHook(LOOK, every_secs=60))
        session.on_evaluation = lambda: clock.advance(7)  # which the next interval does not count
        for _ in range(10):
            clock.advance(25)
            session.run()
        assert session.evaluated == [3, 6, 9]
        session.recover(9)
        clock.advance(59)
        session.run()
        clock.advance(1)
        session.run()
        assert session.evaluated == [3, 6, 9, 11]


def test_steps_and_seconds_together():
    with FakeClock() as clock:
        session = Session(EvaluationHook(LOOK, every_n_steps=4, every_secs=60))
        for _ in range(10):
            clock.advance(25)
            session.run()
        assert session.evaluated == [3, 4, 7, 8]


def test_with_saves():
    session = Session(EvaluationHook(LOOK, with_saves=True))
    for step in range(1, 7):
        session.save_requested = step in (2, 5)
        session.run()
    assert session.evaluated == [2, 5]


def test_at_start_only_of_a_fresh_start():
    hook = EvaluationHook(LOOK, every_n_steps=4, at_start=True)
    session = Session(hook)
    assert session.runs(5) == [0, 4]
    assert Session(EvaluationHook(LOOK, every_n_steps=4, at_start=True), step=3).runs(2) == [4]


@pytest.mark.parametrize("reason", ["LAST_STEP", "END_OF_DATA", "EARLY_STOPPING", "REQUESTED", "BODY_LEFT"])
def test_at_end_once(reason):
    session = Session(EvaluationHook(LOOK, every_n_steps=4))
    session.runs(6)
    session.stop_reason = StopReason(reason)
    session.end()
    assert session.evaluated == [4, 6]
    session = Session(EvaluationHook(LOOK, every_n_steps=4))
    session.runs(8)
    session.stop_reason = StopReason(reason)
    session.end()
    assert session.evaluated == [4, 8]
    session = Session(EvaluationHook(LOOK, every_n_steps=4, at_end=False))
    session.runs(6)
    session.stop_reason = StopReason(reason)
    session.end()
    assert session.evaluated == [4]


def test_a_stop_that_is_agreed_on_evaluates_before_the_final_save():
    session = Session(EvaluationHook(LOOK))
    session.runs(6)
    session.stop_reason = StopReason.LAST_STEP
    session.run()
    assert session.evaluated == [7]
    session.end()
    assert session.evaluated == [7]


def test_the_end_that_a_signal_makes_is_not_evaluated():
    session = Session(EvaluationHook(LOOK, every_n_steps=4))
    session.runs(6)
    session.stop_reason, session.preempted = StopReason.LAST_STEP, True
    session.end()
    assert session.evaluated == [4]


def test_an_evaluation_that_a_signal_breaks_off_is_made_up_for(lines):
    data = [np.zeros(4, np.float32)] * 5
    step = ms.eval_step(lambda state, batch: {"count": batch.mean()})
    session = Session(EvaluationHook(step, data, every_n_steps=4))
    session.on_evaluation = lambda: setattr(session, "preempted", True)
    session.runs(4)
    assert (session.evaluated, session.told) == ([4], {})
    assert lines() == ["The evaluation of step 4 is broken off, for a signal ends the job."]
    stored = session.hooks[0].state_dict()
    assert stored == {"step": None, "overdue": 4}
    resumed = Session(EvaluationHook(step, data, every_n_steps=4), step=4, restored=[stored])
    resumed.runs(2)
    assert resumed.evaluated == [4] * 5
    assert resumed.told == {4: {"eval/count": 4.0}}
    older = Session(EvaluationHook(step, data, every_n_steps=4), step=3, restored=[stored])
    assert older.runs(1) == [4] * 5


def test_a_restart_evaluates_nothing_twice():
    first = Session(EvaluationHook(LOOK, every_n_steps=4))
    first.runs(8)
    second = Session(EvaluationHook(LOOK, every_n_steps=4), step=8, restored=[first.hooks[0].state_dict()])
    assert second.hooks[0].evaluated_step == 8
    second.stop_reason = StopReason.LAST_STEP
    second.end()
    assert second.evaluated == []


def test_other_processes_look_at_the_chiefs_clock_now_and_then(monkeypatch):
    """The looks are at the same steps on both, however their clocks differ, and about as often as the time halves."""
    secs = 600.0
    looks: dict[int, list[int]] = {0: [], 1: []}
    due: dict[int, list[int]] = {0: [], 1: []}
    told: list[np.ndarray] = []

    def run(process, step_secs, offset):
        with FakeClock(offset) as clock:
            session = FakeSession(processes=2, chief=process == 0)
            timer = _SharedTimer(secs)
            mine = iter(list(told))

            def gather(value):
                looks[process].append(step)
                if process == 0:
                    told.append(value)
                    return np.stack([value, value])
                return np.stack([next(mine), value])

            monkeypatch.setattr(evaluation, "allgather", gather)
            for step in range(1, 20001):
                clock.advance(step_secs)
                if timer.due(session, step):
                    due[process].append(step)
                    timer.restart(step)

    run(0, 0.1, 0.0)
    run(1, 0.3, 77.0)
    assert looks[0] == looks[1]
    assert due[0] == due[1]
    assert all(6000 <= b - a <= 6060 for a, b in zip([0, *due[0]], due[0], strict=False)), due[0]
    assert len(looks[0]) < 25 * len(due[0])


# ---- what it logs


def test_results_go_to_the_log_to_other_hooks_and_to_the_curves(lines, tmp_path):
    heard = []

    class Hears(ms.SessionRunHook):
        def log(self, step, scalars):
            if "count" not in scalars:  # which the session's own hook logs
                heard.append((step, dict(scalars)))

    step = ms.eval_step(reduce={"right": "sum", "rows": "sum"})(
        lambda state, batch: {"right": (batch > 1).sum(), "rows": jnp.int32(batch.shape[0])}
    )
    data = [np.arange(8, dtype=np.float32), np.arange(4, dtype=np.float32)]
    hook = EvaluationHook(
        step, data, every_n_steps=2, finish=lambda found: {"accuracy": found["right"] / found["rows"]}
    )
    named = EvaluationHook(step, lambda: iter(data), every_n_steps=3, at_end=False, num_batches=1, name="train")
    with ms.MonitoredTrainingSession(
        ticks.init_fn, checkpoint_dir=tmp_path, hooks=[hook, named, Hears(), ms.StopAtStepHook(4)]
    ) as sess:
        while not sess.should_stop():
            sess.run(ticks.one)
    accuracy = {"eval/accuracy": 8 / 12}
    assert heard == [(2, accuracy), (3, {"eval/train/right": 6.0, "eval/train/rows": 8.0}), (4, accuracy)]
    assert hook.results == {"accuracy": 8 / 12}
    text = "\n".join(lines())
    assert "Evaluation at step 2: eval/accuracy = 0.666667 (2 batches, " in text
    assert "Evaluation at step 3: eval/train/right = 6, eval/train/rows = 8 (1 batch, " in text
    curves = ms.read_metrics(tmp_path).curves
    assert [(point.step, point.value) for point in curves["eval/accuracy"]] == [(2, 8 / 12), (4, 8 / 12)]


@conforms("EH-002")
def test_the_current_state_is_evaluated_with_every_row_once_and_training_does_not_notice():
    data = [toy.batch(100), {name: leaf[:4] for name, leaf in toy.batch(101).items()}]
    hook = EvaluationHook(toy.evaluate, data, every_n_steps=2, at_start=True)
    with ms.MonitoredTrainingSession(toy.init_fn, data=toy.batches(5), hooks=[hook]) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
        assert (sess.global_step, hook.evaluated_step) == (5, 4)
        state = sess.state_copy()
        toy.assert_same_bits(state, toy.straight(5))
    assert hook.evaluated_step == 5
    w = np.asarray(state["w"])
    x, y = (np.concatenate([batch[name] for batch in data]) for name in ("x", "y"))
    assert hook.results == {"loss": pytest.approx(np.mean((x @ w - y) ** 2), rel=1e-5)}


def test_what_is_killed_and_started_again_evaluates_what_a_straight_run_does(tmp_path):
    class Crash(Exception):
        pass

    def attempt(crash_at=None, url=tmp_path):
        heard = []

        class Hears(ms.SessionRunHook):
            def log(self, step, scalars):
                if "eval/count" in scalars:
                    heard.append((step, scalars["eval/count"]))

        hooks = [EvaluationHook(LOOK, every_n_steps=3), Hears(), ms.StopAtStepHook(last_step=10)]
        try:
            with ms.MonitoredTrainingSession(
                ticks.init_fn, checkpoint_dir=url, save_checkpoint_steps=1, hooks=hooks
            ) as sess:
                while not sess.should_stop():
                    sess.run(ticks.one)
                    if sess.global_step == crash_at:
                        ticks.wait_for_saves(sess, crash_at - (sess.restored_from or 0))
                        raise Crash
        except Crash:
            pass
        return heard

    straight = [(step, float(step)) for step in (3, 6, 9, 10)]
    assert attempt(url=None) == straight
    assert [*attempt(3), *attempt(8), *attempt()] == straight
    assert attempt() == []


# ---- what is refused


def test_a_step_that_trains():
    with pytest.raises(TypeError, match=r"needs a step made by monsess.eval_step, found <train_step"):
        EvaluationHook(ticks.one, every_n_steps=1)


def test_data_that_is_used_up_or_missing():
    with pytest.raises(ValueError, match=r"found the iterator .* which the first one uses up"):
        EvaluationHook(toy.evaluate, iter([]), every_n_steps=1)
    with pytest.raises(ValueError, match=r"evaluate\(state, batch\) takes a batch: pass data="):
        EvaluationHook(toy.evaluate, every_n_steps=1)
    with pytest.raises(ValueError, match="must be an iterable of batches or a function"):
        EvaluationHook(toy.evaluate, toy.batch(0), every_n_steps=1)


def test_no_schedule():
    with pytest.raises(ValueError, match="EvaluationHook would never evaluate"):
        EvaluationHook(LOOK, at_end=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [("every_n_steps", 0), ("every_secs", -1), ("num_batches", 1.5), ("finish", 5), ("name", "")],
)
def test_impossible_arguments(name, value):
    with pytest.raises(ValueError, match=f"invalid {name}={value!r}"):
        EvaluationHook(LOOK, **{name: value})


def test_two_hooks_that_log_the_same_name():
    def hooks(*names):
        return [EvaluationHook(LOOK, every_n_steps=2, name=name) for name in names] + [ms.StopAtStepHook(last_step=2)]

    def run(*names):
        with ms.MonitoredTrainingSession(ticks.init_fn, hooks=hooks(*names)) as sess:
            while not sess.should_stop():
                sess.run(ticks.one)

    run(None, "test")
    with pytest.raises(ms.HookError, match="Two EvaluationHooks log eval/count, of which only the last would count"):
        run(None, None)


def test_the_chief_alone_cannot_evaluate():
    assert EvaluationHook.on_all_processes


def train_once(hook):
    with ms.MonitoredTrainingSession(ticks.init_fn, hooks=[hook]) as sess:
        sess.run(ticks.one)


def test_data_without_a_batch():
    with pytest.raises(ms.MonsessError, match="got no batch"):
        train_once(EvaluationHook(toy.evaluate, [], every_n_steps=1))


def test_the_end_of_evaluation_data_is_not_the_end_of_training():
    def raising():
        raise ms.EndOfData("gone")
        yield

    hook = EvaluationHook(toy.evaluate, raising, every_n_steps=1)
    with pytest.raises(ms.MonsessError, match=r"evaluation data raised EndOfData \(gone\)") as raised:
        train_once(hook)
    assert "Raised by hook EvaluationHook in after_run." in raised.value.__notes__


def test_finish_returns_numbers():
    hook = EvaluationHook(LOOK, every_n_steps=1, finish=lambda found: 5)
    with pytest.raises(TypeError, match="finish must return a dict from name to number, found 5"):
        train_once(hook)


def test_the_last_evaluation_is_heard_by_hooks_wherever_they_stand(lines):
    class Hears(ms.SessionRunHook):
        def __init__(self):
            self.heard, self.ended = [], False

        def log(self, step, scalars):
            assert not self.ended
            self.heard += [step] if "eval/count" in scalars else []

        def end(self, session):
            self.ended = True

    before, after = Hears(), Hears()
    stops = ms.EarlyStoppingHook("eval/count", "max", patience=3)
    with ms.MonitoredTrainingSession(ticks.init_fn, hooks=[before, EvaluationHook(LOOK), stops, after]) as session:
        session.run(ticks.one)
    assert before.heard == after.heard == [1]
    assert (before.ended, after.ended) == (True, True)
    assert stops.best == 1
    assert not [line for line in lines() if "no value 'eval/count' was logged" in line]
