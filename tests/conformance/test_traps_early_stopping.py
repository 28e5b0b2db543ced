"""W-28, W-36 and W-40: early stopping without a flag in the model, without old plateaus, and without reading files."""

from __future__ import annotations

import builtins
import json

import jax
from traps import count, init_fn, trap

import monsess as ms


class Logs(ms.SessionRunHook):
    """Logs these values of steps 1, 2, ..."""

    def __init__(self, values):
        self._values = values

    def after_run(self, run_context, run_values):
        if run_context.global_step <= len(self._values):
            run_context.session.log({"val": self._values[run_context.global_step - 1]})


def train(url, *hooks, values=(), last_step=1000):
    """Train with these values logged; the session, closed."""
    hooks = [*hooks, Logs(values), ms.StopAtStepHook(last_step=last_step)]
    with ms.MonitoredTrainingSession(init_fn, checkpoint_dir=url, save_checkpoint_steps=1, hooks=hooks) as session:
        while not session.should_stop():
            session.run(count)
    return session


FALLS_THEN_FLAT = [3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


@trap("W-28")
def test_the_stop_is_no_part_of_the_model_and_stops_nobody_who_goes_on(tmp_path):
    stopped = train(tmp_path, ms.EarlyStoppingHook("val", patience=3), values=FALLS_THEN_FLAT)
    assert (stopped.global_step, stopped.stop_reason) == (6, ms.StopReason.EARLY_STOPPING)
    assert jax.tree.structure(ms.load_checkpoint(tmp_path)) == jax.tree.structure(init_fn())
    again = train(tmp_path, ms.EarlyStoppingHook("val", patience=3), values=FALLS_THEN_FLAT)
    assert (again.summary()["steps"], again.stop_reason) == (0, ms.StopReason.EARLY_STOPPING)
    without = train(tmp_path, last_step=8)
    assert (without.global_step, without.stop_reason) == (8, ms.StopReason.LAST_STEP)


@trap("W-28")
def test_a_checkpoint_from_before_the_hook_restores(tmp_path):
    train(tmp_path, last_step=3)
    session = train(tmp_path, ms.EarlyStoppingHook("val", patience=2), values=[0, 0, 0, 5.0, 5.0, 5.0])
    assert (session.restored_from, session.global_step) == (3, 6)


@trap("W-36")
def test_a_plateau_that_is_over_stops_nobody(tmp_path):
    """TensorFlow's rule looks at the whole history: a run restarted after a plateau stopped at once."""
    patient = ms.EarlyStoppingHook("val", patience=9)
    train(tmp_path, patient, values=[2.0, 2.0, 2.0, 2.0, 2.0, 1.0], last_step=6)
    resumed = train(tmp_path, ms.EarlyStoppingHook("val", patience=3), values=[0] * 6 + [1.0, 1.0, 1.0])
    assert (resumed.restored_from, resumed.global_step) == (6, 9)


@trap("W-36")
def test_a_value_that_is_missing_does_not_end_training(lines):
    session = train(None, ms.EarlyStoppingHook("eval/loss", patience=1), values=FALLS_THEN_FLAT, last_step=8)
    assert (session.global_step, session.stop_reason) == (8, ms.StopReason.LAST_STEP)
    assert any("no value 'eval/loss' was logged, so it stopped nothing" in line for line in lines())


@trap("W-40")
def test_no_file_is_read_and_what_is_remembered_does_not_grow(monkeypatch):
    opened = []
    real = builtins.open
    sizes = []

    class Looks(ms.SessionRunHook):
        def log(self, step, scalars):
            if step in (10, 500):
                sizes.append(len(json.dumps(hook.state_dict())))

    hook = ms.EarlyStoppingHook("val", patience=10_000)
    with ms.MonitoredTrainingSession(init_fn, hooks=[hook, Looks()]) as session:
        session.run(count)
        monkeypatch.setattr(builtins, "open", lambda *args, **named: opened.append(args) or real(*args, **named))
        for _ in range(500):
            session.run(count)
            session.log({"val": 1.0 / session.global_step})
        monkeypatch.undo()
    assert opened == []
    assert sizes[1] <= sizes[0] + 50
