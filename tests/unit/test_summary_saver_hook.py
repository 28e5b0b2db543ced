"""SummarySaverHook: its schedule by steps and seconds, what it fetches and when, and how it resumes."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import ticks

import monsess as ms


class Heard(ms.SessionRunHook):
    """What was logged: ``(step, value of the tag)``."""

    def __init__(self, tag="count"):
        self.tag, self.steps, self.values = tag, [], []

    def log(self, step, scalars):
        if self.tag in scalars:
            self.steps.append(step)
            self.values.append(scalars[self.tag])


def train(hook, runs, *, steps_of=lambda run: 1, seconds=0.0, folder=None, tag="count", **more):
    heard = Heard(tag)
    with ms.testing.FakeClock() as clock:
        with ms.MonitoredTrainingSession(
            ticks.init_fn, checkpoint_dir=folder, hooks=[hook, heard], save_summaries_steps=None, **more
        ) as sess:
            for run in range(runs):
                sess.run(ticks.adding(steps_of(run)))
                clock.advance(seconds)
    return heard


@pytest.mark.parametrize(
    ("every", "runs", "steps_of", "expected"),
    [
        (1, 4, 1, [1, 2, 3, 4]),
        (3, 10, 1, [1, 3, 6, 9]),
        (100, 5, 1, [1]),
        (7, 6, 5, [5, 10, 15, 25, 30]),  # every run that crosses a multiple of 7
        (10, 3, 10, [10, 20, 30]),
    ],
)
def test_by_steps(every, runs, steps_of, expected):
    heard = train(ms.SummarySaverHook(save_steps=every), runs, steps_of=lambda run: steps_of)
    assert heard.steps == expected
    assert heard.values == expected  # those of that very step


def test_runs_of_different_lengths_are_seen_all_the_same():
    assert train(ms.SummarySaverHook(save_steps=4), 5, steps_of=lambda run: (1, 2, 5, 1, 1)[run]).steps == [1, 8]


@pytest.mark.parametrize(("secs", "seconds", "expected"), [(10, 1, [1, 11, 21]), (1, 5, list(range(1, 26)))])
def test_by_seconds(secs, seconds, expected):
    assert train(ms.SummarySaverHook(save_secs=secs), 25, seconds=seconds).steps == expected


@pytest.mark.parametrize("killed_after", range(1, 8))
def test_a_resumed_run_logs_the_steps_of_a_straight_one(tmp_path, killed_after):
    first = train(ms.SummarySaverHook(save_steps=3), killed_after, folder=tmp_path)
    second = train(ms.SummarySaverHook(save_steps=3), 10 - killed_after, folder=tmp_path)
    assert first.steps + second.steps == [1, 3, 6, 9]
    assert [point.step for point in ms.read_metrics(tmp_path).curves["count"]] == [1, 3, 6, 9]


def test_a_restart_does_not_log_because_of_the_restart(tmp_path):
    train(ms.SummarySaverHook(save_steps=100), 2, folder=tmp_path)
    assert train(ms.SummarySaverHook(save_steps=100), 2, folder=tmp_path).steps == []
    assert train(ms.SummarySaverHook(save_secs=100), 2, folder=tmp_path).steps == []


def test_only_scalars_among_the_outputs_are_curves():
    @ms.train_step(reduce={"flag": "max", "stacked": None})
    def step(state):
        outputs = {
            "loss": jnp.float32(1),
            "vector": jnp.ones(3),
            "flag": state["count"] >= 0,
            "stacked": jnp.float32(2),
        }
        return {"count": state["count"] + 1}, {**outputs, "deep": {"er": jnp.float32(3)}}

    logged = []

    class All(ms.SessionRunHook):
        def log(self, step, scalars):
            logged.append(dict(scalars))

    with ms.MonitoredTrainingSession(ticks.init_fn, hooks=[All()], save_summaries_steps=1) as sess:
        sess.run(step)
    assert logged == [{"loss": 1.0, "flag": 1, "deep/er": 3.0}]


@pytest.mark.parametrize(
    ("summaries", "expected"),
    [
        ("count", {"count": 1.0}),
        (["count", "before"], {"count": 1.0, "before": 0.0}),
        ({"mine": "count"}, {"mine": 1.0}),
        ({"twice": lambda state, outputs: 2 * state["count"]}, {"twice": 2.0}),
        ([lambda state, outputs: {"a": outputs["count"], "b": {"c": state["count"]}}], {"a": 1.0, "b/c": 1.0}),
        ([lambda state, outputs: ms.summary.scalar("inside", state["count"])], {"inside": 1.0}),
    ],
)
def test_what_can_be_named(summaries, expected):
    logged = []

    class All(ms.SessionRunHook):
        def log(self, step, scalars):
            logged.append(dict(scalars))

    hooks = [ms.SummarySaverHook(save_steps=1, summaries=summaries), All()]
    with ms.MonitoredTrainingSession(
        ticks.init_fn, hooks=hooks, save_summaries_steps=None, log_step_count_steps=None
    ) as sess:
        sess.run(ticks.one)
    assert logged == [expected]


@pytest.mark.parametrize("summaries", [5, [], {}, [5], {"a": 5}, ["a", "a"], [""]])
def test_what_cannot_be_named_is_refused(summaries):
    with pytest.raises(ValueError, match="summaries"):
        ms.SummarySaverHook(save_steps=1, summaries=summaries)


def test_an_unknown_name_is_found_in_the_first_run_of_any_session(tmp_path):
    train(ms.SummarySaverHook(save_steps=100), 2, folder=tmp_path)
    with pytest.raises(ms.FetchError, match="'los'"):
        train(ms.SummarySaverHook(save_steps=100, summaries=["los"]), 1, folder=tmp_path)


def test_another_directory_is_refused(tmp_path):
    hook = ms.SummarySaverHook(save_steps=1, output_dir=str(tmp_path / "a"))
    with pytest.raises(ValueError, match="summary_dir"):
        train(hook, 1, folder=tmp_path / "b")
    same = ms.SummarySaverHook(save_steps=1, output_dir=f"{tmp_path}/b/")
    assert train(same, 1, folder=tmp_path / "b").steps == [1]


def test_nothing_is_fetched_where_nobody_listens_and_nothing_is_written():
    looked = []

    def look(state, outputs):
        looked.append(1)  # while it is traced
        return state["count"]

    hook = ms.SummarySaverHook(save_secs=1, summaries={"a": look})
    with ms.MonitoredTrainingSession(ticks.init_fn, hooks=[hook], save_summaries_steps=None) as sess:
        sess.run(ticks.one)
        sess.run(ticks.one)
    assert len(looked) <= 1  # an unknown name is looked for once


def test_one_transfer_at_a_step_that_is_logged_and_none_in_between(tmp_path, monkeypatch):
    """What is logged together comes to the host together."""
    from monsess.records import values

    packages = []
    original = values._Package.unpacked
    monkeypatch.setattr(values._Package, "unpacked", lambda self: packages.append(1) or original(self))

    @ms.train_step
    def step(state):
        ms.summary.scalar("a", state["count"])
        ms.summary.histogram("h", jnp.arange(5.0))
        return {"count": state["count"] + 1}, {"b": state["count"], "c": state["count"] * 2}

    with ms.MonitoredTrainingSession(ticks.init_fn, checkpoint_dir=tmp_path, save_summaries_steps=5) as sess:
        for _ in range(20):
            sess.run(step)
    assert len(packages) == 5  # at 1, 5, 10, 15 and 20


def test_steps_without_hooks_count_from_where_they_led(tmp_path):
    heard = Heard()
    with ms.MonitoredTrainingSession(
        ticks.init_fn, hooks=[ms.SummarySaverHook(save_steps=4), heard], save_summaries_steps=None
    ) as sess:
        sess.run(ticks.one)
        for _ in range(4):
            sess.run_without_hooks(ticks.one)
        sess.run(ticks.one)
        sess.run(ticks.one)
        sess.run(ticks.one)
    assert heard.steps == [1, 6, 8]


def test_a_chief_that_hears_nothing_itself_goes_on_asking_for_others():
    """Another process may have a hook that listens."""

    class Session:
        is_logging, is_chief, process_count, global_step, summary_dir = False, True, 2, 0, None

    class Context:
        session, log_requested = Session(), False

        def request_log(self):
            asked.append(self.global_step)

    asked, context = [], Context()
    hook = ms.SummarySaverHook(save_secs=10)
    with ms.testing.FakeClock() as clock:
        hook.after_create_session(Session(), None)
        for step in range(1, 41):
            context.global_step = step - 1
            hook.before_run(context)
            context.global_step = step
            context.log_requested = bool(asked) and asked[-1] == step - 2  # as the processes agree on it
            hook.after_run(context, None)
            clock.advance(1)
    assert asked == [11, 23, 35]
