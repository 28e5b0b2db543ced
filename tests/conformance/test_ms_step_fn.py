"""The behaviours of TensorFlow's step functions, MS-107 to MS-123."""

from __future__ import annotations

import functools

import counting
import pytest
from conforms import conforms
from names import shown

import monsess as ms


@conforms("MS-107")
def test_step_function_runs_steps_with_arguments_and_returns_its_value():
    def step_fn(step_context):
        value = step_context.run_with_hooks(counting.add, counting.EIGHT, 3.0)["given"]
        return float(value)

    with counting.session() as sess:
        assert sess.run_step_fn(step_fn) == 6.0
        assert sess.run_step_fn(step_fn) == 6.0
        assert sess.global_step == 2
        assert not sess.should_stop()


def stop(step_context):
    step_context.request_stop("seen enough")


@conforms("MS-108")
def test_request_stop_inside_a_with_block_is_a_clean_end(tmp_path):
    recorder = counting.Recorder()
    with counting.session(hooks=[recorder], checkpoint_dir=tmp_path) as sess:
        sess.run(counting.count)
        sess.run_step_fn(stop)
        raise AssertionError("not reached")
    assert sess.should_stop()
    assert (recorder.called("end"), recorder.called("on_error")) == (1, 0)
    assert (sess.stop_reason.name, sess.stop_reason.text) == ("REQUESTED", "seen enough")
    assert ms.latest_checkpoint(tmp_path) == 1


@conforms(
    "MS-109",
    "MS-110",
    instead=(
        "It surfaces as EndOfData, since StopIteration is never a signal (W-01), and should_stop is True afterwards, "
        "with or without a with-block (W-02)."
    ),
)
def test_request_stop_without_a_with_block():
    sess = counting.session()
    try:
        with pytest.raises(ms.EndOfData):
            sess.run_step_fn(stop)
        assert sess.should_stop()
        assert sess.stop_reason == ms.StopReason.REQUESTED
        with pytest.raises(ms.RunAfterStopError):
            sess.run(counting.count)
    finally:
        sess.close()


@conforms("MS-111")
def test_nothing_after_the_request_in_a_loop_is_executed():
    after = []
    with counting.session() as sess:
        while not sess.should_stop():
            sess.run_step_fn(stop)
            after.append("in the loop")
        after.append("after the loop")
    assert after == []


@conforms("MS-112")
@pytest.mark.parametrize("value", ["a type", None, (1, [2]), ms.Scaffold])
def test_any_value_passes_through(value):
    with counting.session() as sess:
        assert sess.run_step_fn(lambda step_context: value) is value
        assert not sess.should_stop()


class Model:
    """Has step functions as methods."""

    def good(self, step_context):
        return counting.counted(step_context.run_with_hooks(counting.count))

    def bad(self, step_context, extra):
        raise AssertionError("not called")


@conforms("MS-113", "MS-115")
@pytest.mark.parametrize(
    "step_fn", [lambda step_context, extra: None, lambda: None, lambda context: None, Model().bad], ids=shown
)
def test_other_arguments_are_refused_before_anything_runs(step_fn):
    with counting.session() as sess:
        with pytest.raises(ValueError, match="may either have one `step_context` argument"):
            sess.run_step_fn(step_fn)
        assert not sess.should_stop()


@conforms("MS-114")
def test_method_is_accepted():
    with counting.session() as sess:
        assert sess.run_step_fn(Model().good) == 1


@conforms("MS-113")
def test_partial_that_leaves_only_the_step_context_is_accepted():
    def step_fn(step_context, extra):
        return extra

    def other(extra, step_context):
        return extra

    with counting.session() as sess:
        assert sess.run_step_fn(functools.partial(step_fn, extra=3)) == 3
        assert sess.run_step_fn(functools.partial(other, 3)) == 3


class Working(counting.Recorder):
    """Fetches, and does work of its own once the step is done."""

    def before_run(self, run_context):
        super().before_run(run_context)
        return ms.SessionRunArgs({"mine": "count"})

    def after_run(self, run_context, run_values):
        super().after_run(run_context, run_values)
        self.fetched = float(run_values.results["mine"])
        self.step = run_context.global_step
        self.evaluated = float(run_context.session.run(counting.read))


with_and_without_recovery = pytest.mark.parametrize("max_restarts", [3, 0])


@conforms("MS-116", "MS-117")
@conforms("MS-118", instead="There is one class of sessions; Recovery(max_restarts=0) makes one that does not recover.")
@with_and_without_recovery
def test_hooks_see_only_what_is_run_with_hooks(max_restarts):
    hook = Working()

    def step_fn(step_context):
        session = step_context.session
        assert session is sess
        assert counting.counted(session.run_without_hooks(counting.count)) == 1
        assert float(session.run(counting.read)) == 1
        assert (hook.called("before"), hook.called("after")) == (0, 0)
        outputs = step_context.run_with_hooks(counting.count)
        assert (hook.called("before"), hook.called("after")) == (1, 1)
        assert (hook.fetched, hook.step, hook.evaluated) == (2.0, 2, 2.0)
        return outputs

    with counting.session(hooks=[hook], recovery=counting.recovery(max_restarts=max_restarts)) as sess:
        assert {name: float(value) for name, value in sess.run_step_fn(step_fn).items()} == {"count": 2.0}
        assert not sess.should_stop()
        assert hook.trace[2:] == ["A.before", "A.after"]


@conforms("MS-116")
def test_work_of_a_hook_does_not_let_a_save_in_before_the_other_hooks(tmp_path):
    class Asking(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            run_context.request_save()

    class Remembering(ms.SessionRunHook):
        steps = 0

        def after_run(self, run_context, run_values):
            self.steps += 1

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    hooks = [Working(), Asking(), Remembering()]
    with pytest.raises(KeyError):
        with counting.session(hooks=hooks, checkpoint_dir=tmp_path) as sess:
            sess.run(counting.count)
            raise KeyError("crash")
    remembering = Remembering()
    with counting.session(hooks=[remembering], checkpoint_dir=tmp_path) as sess:
        assert (sess.restored_from, remembering.steps) == (1, 1)


@conforms("MS-119")
@with_and_without_recovery
def test_request_stop_before_the_run_lets_no_hook_run(max_restarts):
    recorder = counting.Recorder()

    def step_fn(step_context):
        step_context.request_stop()
        return step_context.run_with_hooks(counting.count)

    with counting.session(hooks=[recorder], recovery=counting.recovery(max_restarts=max_restarts)) as sess:
        sess.run_step_fn(step_fn)
        raise AssertionError("not reached")
    assert sess.should_stop()
    assert recorder.trace == ["A.begin", "A.acs", "A.end"]


class Aborting:
    """A step function that meets a transient error at its first call, before or after the run with hooks."""

    def __init__(self, before=False, after=False):
        self._before, self._after = before, after
        self.calls = 0
        self.side_effects = 0

    def step(self, step_context):
        self.calls += 1
        if self._before and self.calls == 1:
            raise counting.AbortedError
        self.side_effects += 1
        value = counting.counted(step_context.run_with_hooks(counting.count))
        if self._after and self.calls == 1:
            raise counting.AbortedError
        return value


@conforms("MS-120")
def test_transient_error_of_a_step_function_calls_it_again():
    aborting = Aborting(before=True)
    with counting.session(recovery=counting.recovery()) as sess:
        assert sess.run_step_fn(aborting.step) == 1
        assert not sess.should_stop()
        assert (aborting.calls, aborting.side_effects, sess.recoveries) == (2, 1, 1)
        assert sess.run_step_fn(aborting.step) == 2


@conforms("MS-121")
def test_transient_error_after_the_run_executes_the_whole_function_again():
    aborting, recorder = Aborting(after=True), counting.Recorder()
    with counting.session(hooks=[recorder], recovery=counting.recovery()) as sess:
        assert sess.run_step_fn(aborting.step) == 1  # the update of the first call was rolled back
        assert not sess.should_stop()
        assert (aborting.calls, aborting.side_effects) == (2, 2)
        assert sess.global_step == 1
        assert sess.run_step_fn(aborting.step) == 2
    assert recorder.called("after") == 3


@conforms("MS-122")
@pytest.mark.parametrize("when", ["before", "after"])
def test_session_that_does_not_recover_passes_the_error_on(when):
    aborting, recorder = Aborting(**{when: True}), counting.Recorder()
    with pytest.raises(counting.AbortedError):
        with counting.session(hooks=[recorder], recovery=counting.recovery(max_restarts=0)) as sess:
            sess.run_step_fn(aborting.step)
            raise AssertionError("not reached")
    assert aborting.calls == 1
    assert sess.recoveries == 0
    assert recorder.trace[-1] == "A.on_error"


@conforms("MS-123")
def test_transient_error_of_a_hook_repeats_the_whole_function():
    aborting = Aborting()
    hook = counting.Raising("before", counting.AbortedError(), 1)
    with counting.session(hooks=[hook], recovery=counting.recovery()) as sess:
        assert sess.run_step_fn(aborting.step) == 1
        assert not sess.should_stop()
        assert (aborting.calls, aborting.side_effects) == (2, 2)
        assert sess.run_step_fn(aborting.step) == 2
    assert (hook.called("before!"), hook.called("before"), hook.called("after")) == (1, 2, 2)
