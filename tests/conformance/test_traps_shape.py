"""W-48 to W-54: no frozen graph, no hidden registries, and everything public that is needed."""

from __future__ import annotations

import numpy as np
import pytest
from traps import Recorder, count, drive, endings, init_fn, look, steps_of, trap

import monsess as ms

ONES = np.ones(8, np.float32)


@ms.train_step
def train(state, batch):
    """Says what it was fed."""
    return {"n": state["n"] + 1.0}, {"mean": batch.mean()}


class Feeds(ms.SessionRunHook):
    def __init__(self, **feed):
        self.args = ms.SessionRunArgs(feed_dict=feed)

    def before_run(self, run_context):
        return self.args


# ---- W-48: nothing is ever frozen


@trap("W-48", "W-54")
def test_new_steps_and_evaluations_can_be_made_at_any_time_in_hooks_too(tmp_path):
    class Evaluates(ms.SessionRunHook):
        def begin(self):
            self.values = []

        def after_run(self, run_context, run_values):
            @ms.eval_step
            def new(state, batch):
                return {"v": state["n"] * batch.mean()}

            session = run_context.session
            self.values.append(float(session.run(new, 3 * ONES)["v"]))
            self.values.append(float(session.evaluate(lambda state, outputs: state["n"] + outputs["n"])))

    hook = Evaluates()
    with ms.MonitoredTrainingSession(init_fn, hooks=[hook], checkpoint_dir=tmp_path) as sess:
        sess.run(count)

        @ms.train_step
        def twice(state):
            return {"n": state["n"] + 2.0}, {"n": state["n"] + 2.0}

        sess.run(twice)
    assert hook.values == [3, 2, 9, 6]
    with ms.MonitoredTrainingSession(init_fn) as sess:  # and nothing of it is left over for the next session
        sess.run(count)
    assert sess.global_step == 1


@trap("W-48", "W-50")
def test_an_evaluation_inside_after_run_does_not_bring_the_save_forward(tmp_path):
    """Saves come after ALL after_run calls, also where a hook has run a step of its own before the saver asks."""

    class Evaluates(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            run_context.session.run(look)

    class Counts(ms.SessionRunHook):
        runs = 0

        def after_run(self, run_context, run_values):
            self.runs += 1

        def state_dict(self):
            return {"runs": self.runs}

        def load_state_dict(self, state):
            self.loaded = state["runs"]

    hooks = [Evaluates(), ms.CheckpointSaverHook(save_steps=2), Counts()]
    options = {"checkpoint_dir": tmp_path, "save_checkpoint_secs": None}
    with ms.MonitoredTrainingSession(init_fn, hooks=[*hooks, ms.StopAtStepHook(last_step=3)], **options) as sess:
        drive(sess)
    again = Counts()
    choice = ms.CheckpointOptions(restore_step=2, newer="aside")
    with ms.MonitoredTrainingSession(init_fn, hooks=[again], checkpoint=choice, **options):
        assert again.loaded == 2


@trap("W-48")
def test_begin_comes_before_any_state_exists():
    order = []

    class Early(ms.SessionRunHook):
        def begin(self):
            order.append("begin")

    def init():
        order.append("init_fn")
        return {"n": 0.0}

    with ms.MonitoredTrainingSession(init, hooks=[Early()]):
        pass
    assert order == ["begin", "init_fn"]


# ---- W-49: nothing is looked up in a registry


@trap("W-49")
def test_sessions_side_by_side_know_nothing_of_each_other(tmp_path):
    a, b = Recorder("a"), Recorder("b")
    first = ms.MonitoredTrainingSession(init_fn, hooks=[a], checkpoint_dir=tmp_path / "a")
    second = ms.MonitoredTrainingSession(lambda: {"n": 10.0}, hooks=[b], checkpoint_dir=tmp_path / "b")
    first.run(count)
    second.run(count)
    second.run(count)
    first.request_stop("the first alone")
    assert first.should_stop()
    assert not second.should_stop()
    assert (first.global_step, second.global_step) == (1, 2)
    assert (float(first.state["n"]), float(second.state["n"])) == (1, 12)
    second.close()
    assert endings(a.trace) == []
    first.close()
    assert (steps_of(tmp_path / "a"), steps_of(tmp_path / "b")) == ([1], [2])


# ---- W-50: one documented order


@trap("W-50")
def test_the_order_of_hooks_is_one_and_endings_are_reversed(tmp_path):
    trace = []
    names = {"chief": Recorder("chief", trace), "first": Recorder("first", trace), "second": Recorder("second", trace)}
    with ms.MonitoredTrainingSession(
        init_fn,
        chief_only_hooks=[names["chief"]],
        hooks=[names["first"], names["second"]],
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=1,
    ) as sess:
        sess.run(count)
    order = ["chief", "first", "second"]
    assert trace == [
        *(f"{name}.begin" for name in order),
        *(f"{name}.after_create_session@0" for name in order),
        *(f"{name}.before_run@0" for name in order),
        *(f"{name}.after_run@1" for name in order),
        *(f"{name}.end" for name in reversed(order)),
    ]
    assert list(sess.summary()["hooks"]) == [
        "StepCounterHook",
        "SummarySaverHook",
        "CheckpointSaverHook",
        "Recorder",
        "Recorder#1",
        "Recorder#2",
    ]


@trap("W-50")
@pytest.mark.parametrize("position", [0, 1, 2])
def test_the_order_of_hooks_does_not_decide_what_a_checkpoint_holds(tmp_path, position):
    class Counts(ms.SessionRunHook):
        def begin(self):
            self.runs = 0

        def after_run(self, run_context, run_values):
            self.runs += 1

        def state_dict(self):
            return {"runs": self.runs}

        def load_state_dict(self, state):
            self.runs = state["runs"]

    def session(counter, **more):
        hooks = [Recorder(), Recorder()]
        hooks.insert(position, counter)
        return ms.MonitoredTrainingSession(
            init_fn, hooks=hooks, checkpoint_dir=tmp_path, save_checkpoint_steps=2, **more
        )

    with pytest.raises(KeyError), session(Counts()) as sess:
        for _ in range(3):
            sess.run(count)
        raise KeyError("killed")
    counter = Counts()
    with session(counter) as sess:
        assert (sess.global_step, counter.runs) == (2, 2)


# ---- W-51: the list of hooks


@trap("W-51")
def test_the_list_of_hooks_is_copied_a_generator_is_read_once_and_duplicates_are_refused():
    trace = []
    hooks = [Recorder("A", trace)]
    with ms.MonitoredTrainingSession(init_fn, hooks=hooks) as sess:
        hooks.append(Recorder("late", trace))
        hooks[0] = None
        sess.run(count)
    assert "A.after_run@1" in trace
    assert not any("late" in line for line in trace)

    trace.clear()
    with ms.MonitoredTrainingSession(init_fn, hooks=(Recorder(name, trace) for name in "AB")) as sess:
        sess.run(count)
    assert [line for line in trace if "after_run" in line] == ["A.after_run@1", "B.after_run@1"]

    same = Recorder()
    for arguments in ({"hooks": [same, same]}, {"hooks": [same], "chief_only_hooks": [same]}):
        with pytest.raises(ms.HookError, match="same Recorder object is listed twice"):
            ms.MonitoredTrainingSession(init_fn, **arguments)
    assert same.trace == []


@trap("W-51")
@pytest.mark.parametrize("returned", ["loss", {"fetches": "loss"}, ("loss", None), 3])
def test_what_before_run_returns_is_checked(returned):
    class Wrong(ms.SessionRunHook):
        def before_run(self, run_context):
            return returned

    with pytest.raises(ms.HookError, match=r"Wrong.before_run must return None or SessionRunArgs, found \w+"):
        with ms.MonitoredTrainingSession(init_fn, hooks=[Wrong()]) as sess:
            sess.run(count)


# ---- W-52: what users hand over is not changed


@trap("W-52")
def test_what_hooks_and_callers_hand_over_is_neither_changed_nor_accumulated():
    class Both(ms.SessionRunHook):
        def __init__(self):
            self.fetches = {"mean": "mean", "more": [lambda state, outputs: state["n"]]}
            self.feed = {"scale": 2.0}
            self.args = ms.SessionRunArgs(self.fetches, self.feed)
            self.results = []

        def before_run(self, run_context):
            assert run_context.original_args == (batch,) or run_context.original_args[0] is batch
            return self.args

        def after_run(self, run_context, run_values):
            self.results.append(run_values.results)

    @ms.train_step
    def scaled(state, batch, scale=1.0):
        return {"n": state["n"] + 1.0}, {"mean": batch["x"].mean() * scale}

    hook = Both()
    batch = {"x": np.arange(8, dtype=np.float32)}
    kept = batch["x"].copy()
    fetches, feed = dict(hook.fetches), dict(hook.feed)
    with ms.MonitoredTrainingSession(init_fn, hooks=[hook]) as sess:
        for _ in range(4):
            sess.run(scaled, batch)
    assert (hook.fetches, hook.feed) == (fetches, feed)
    assert hook.args == ms.SessionRunArgs(hook.fetches, hook.feed)
    assert list(batch) == ["x"]
    np.testing.assert_array_equal(batch["x"], kept)
    assert [float(result["mean"]) for result in hook.results] == [7.0] * 4


# ---- W-53: one value for one argument


@trap("W-53")
def test_every_pair_of_feeders_of_one_argument_is_noticed_and_named():
    def fails(*hooks, args=(), data=None, match):
        with pytest.raises(ms.FeedConflictError, match=match) as caught:
            with ms.MonitoredTrainingSession(init_fn, hooks=hooks, data=data) as sess:
                sess.run(train, *args)
        assert "'batch'" in str(caught.value)

    fails(Feeds(batch=ONES), ms.FeedFnHook(lambda: {"batch": ONES}), match="Feeds and from FeedFnHook")
    fails(Feeds(batch=ONES), Feeds(batch=ONES), match="Feeds and from Feeds#1")
    fails(Feeds(batch=ONES), args=(ONES,), match="Feeds and from the caller of run")
    fails(Feeds(batch=ONES), data=[ONES], match="Feeds and from data=")
    fails(Feeds(batch=ONES), data=[ONES], args=(ONES,), match="Feeds and from the caller of run")
    with ms.MonitoredTrainingSession(init_fn, hooks=[Feeds(batch=2 * ONES)]) as sess:
        assert float(sess.run(train)["mean"]) == 2.0
    with ms.MonitoredTrainingSession(init_fn, data=[ONES]) as sess:
        assert float(sess.run(train, 3 * ONES)["mean"]) == 3.0  # by the contract: that one, and none from data
        assert float(sess.run(train)["mean"]) == 1.0


# ---- W-54: no archaeology


@trap("W-54")
def test_everything_a_hook_or_a_thread_needs_is_public():
    found = {}

    class Looks(ms.SessionRunHook):
        def after_create_session(self, session, coord):
            found["at the start"] = (session.global_step, float(session.state["n"]), session.restored_from)

        def after_run(self, run_context, run_values):
            session = run_context.session
            found["in a run"] = (session.global_step, float(session.state["n"]), session.is_chief)
            session.run_without_hooks(count)

        def end(self, session):
            found["at the end"] = (session.global_step, float(session.state_copy()["n"]), session.stop_reason.name)

    with ms.MonitoredTrainingSession(init_fn, hooks=[Looks()]) as sess:
        sess.run(count)
        assert sess.run_step_fn(lambda step_context: step_context.session) is sess
    assert found == {
        "at the start": (0, 0.0, None),
        "in a run": (1, 1.0, True),
        "at the end": (2, 2.0, "BODY_LEFT"),
    }
