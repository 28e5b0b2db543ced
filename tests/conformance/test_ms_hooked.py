"""The behaviours of TensorFlow's hooked session, MS-065 to MS-076: what hooks see, ask for and feed."""

from __future__ import annotations

import counting
import numpy as np
import pytest
from conforms import conforms

import monsess as ms


class Asking(counting.Recorder):
    """Asks for fetches and feeds, and keeps what it is handed."""

    def __init__(self, name="A", *, fetches=None, feed_dict=None):
        super().__init__(name)
        asks = fetches is not None or feed_dict is not None
        self._request = ms.SessionRunArgs(fetches, feed_dict) if asks else None
        self.contexts, self.values = [], []

    def before_run(self, run_context):
        super().before_run(run_context)
        self.contexts.append(run_context)
        return self._request

    def after_run(self, run_context, run_values):
        super().after_run(run_context, run_values)
        assert run_context is self.contexts[-1]
        self.values.append(run_values)


@conforms("MS-065", "MS-066")
def test_arguments_reach_the_step_and_its_outputs_the_caller_as_they_are():
    outputs_of = {}

    @ms.train_step
    def step(state, batch, scale, *, mask):
        outputs_of["structure"] = (batch["x"].shape, batch["y"][0].dtype, scale.shape, mask.shape)
        return state, (batch["x"].sum(), {"scale": scale, "none": None}, [])

    batch = {"x": np.arange(16, dtype=np.float32).reshape(8, 2), "y": [np.zeros(8, np.int8)]}
    with counting.session() as sess:
        outputs = sess.run(step, batch, np.float32(3))
        # the outputs are means over the four devices, each of which has two of the rows
        assert isinstance(outputs, tuple)
        assert float(outputs[0]) == batch["x"].sum() / 4
        assert set(outputs[1]) == {"scale", "none"}
        assert (float(outputs[1]["scale"]), outputs[1]["none"], outputs[2]) == (3.0, None, [])
    assert outputs_of["structure"] == ((2, 2), np.int8, (), (2,))


@conforms("MS-067")
def test_each_run_calls_each_hook_once_and_begins_nothing():
    hooks = [counting.Recorder("A"), counting.Recorder("B")]
    with counting.session(hooks=hooks) as sess:
        for runs in range(4):
            for hook in hooks:
                assert (hook.called("begin"), hook.called("acs")) == (1, 1)
                assert (hook.called("before"), hook.called("after")) == (runs, runs)
                assert (hook.called("end"), hook.called("on_error")) == (0, 0)
            sess.run(counting.count)
        sess.run(counting.read)
        sess.run_without_hooks(counting.count)
        assert [hook.called("before") for hook in hooks] == [4, 4]
    assert [hook.called("end") for hook in hooks] == [1, 1]


@conforms(
    "MS-068",
    instead=(
        "results is None as well. There are no options and metadata of a run (TensorFlow's protocol buffers); in their "
        "place is the count of non-finite values in the step's outputs."
    ),
)
def test_hook_that_asked_for_nothing_gets_none():
    hook = Asking()
    with counting.session(hooks=[hook]) as sess:
        sess.run(counting.add, counting.EIGHT)
        sess.run(counting.add, counting.EIGHT, np.float32(np.inf))
    assert [values.results for values in hook.values] == [None, None]
    assert [int(values.nonfinite) for values in hook.values] == [0, 2]
    assert ms.SessionRunValues._fields == ("results", "nonfinite", "summaries")


@conforms(
    "MS-069",
    instead=(
        "original_args are the arguments that the caller handed to run after the step. run_context.session is the one "
        "public session, not a raw one inside it (W-54); its eval steps and run_without_hooks trigger no hook."
    ),
)
def test_run_context_shows_the_callers_arguments_and_the_session():
    class Looking(Asking):
        def after_run(self, run_context, run_values):
            super().after_run(run_context, run_values)
            self.seen = float(run_context.session.run(counting.read))

    hook = Looking()
    batch = counting.EIGHT.copy()
    with counting.session(hooks=[hook]) as sess:
        sess.run(counting.add, batch, 2.0)
        (context,) = hook.contexts
        assert len(context.original_args) == 2
        assert context.original_args[0] is batch
        assert context.original_args[1] == 2.0
        assert context.session is sess
        assert hook.seen == 1
        sess.run(counting.count)
        assert hook.contexts[1] is not context
        assert hook.contexts[1].original_args == ()
    assert hook.called("before") == 2


@conforms("MS-070")
@pytest.mark.parametrize("callback", ["before_run", "after_run"])
@pytest.mark.parametrize("which", ["first", "last"])
def test_should_stop_once_a_hook_has_asked(callback, which):
    class Stopping(counting.Recorder):
        stop = False

    def ask(self, run_context, run_values=None):
        if self.stop:
            run_context.request_stop("enough")

    setattr(Stopping, callback, ask)
    stopping, other = Stopping("S"), counting.Recorder("O")
    hooks = [stopping, other] if which == "first" else [other, stopping]
    with counting.session(hooks=hooks) as sess:
        sess.run(counting.count)
        assert not sess.should_stop()
        stopping.stop = True
        assert counting.counted(sess.run(counting.count)) == 2  # the run in which it is asked for is whole
        assert other.called("after") == 2
        assert sess.should_stop()
        with pytest.raises(RuntimeError, match="Run called even after should_stop requested"):
            sess.run(counting.count)
        assert other.called("before") == 2
    assert (sess.stop_reason.name, sess.stop_reason.text) == ("REQUESTED", "enough")


@conforms("MS-071")
def test_each_hook_gets_what_it_asked_for_in_its_own_structure():
    asked = Asking("A", fetches=["given", ("scale", "scale")])
    computing = Asking("B", fetches={"twice": lambda state, outputs: 2 * outputs["given"], "count": _count})
    named = Asking("C", fetches="given")
    nothing, empty = Asking("D"), Asking("E", fetches=[])
    with counting.session(hooks=[asked, computing, named, nothing, empty]) as sess:
        outputs = sess.run(counting.add, counting.EIGHT, 3.0)
        assert set(outputs) == {"given", "scale", "shift"}
    results = [hook.values[0].results for hook in (asked, computing, named, nothing, empty)]
    given, (first, second) = results[0]
    assert isinstance(results[0][1], tuple)
    assert (float(given), float(first), float(second)) == (6.0, 3.0, 3.0)
    assert {name: float(value) for name, value in results[1].items()} == {"twice": 12.0, "count": 1.0}
    assert float(results[2]) == 6.0
    assert results[3] is None
    assert results[4] == []
    assert float(outputs["given"]) == 6.0


def _count(state, outputs):
    return state["count"]


@conforms("MS-072")
def test_feeds_of_two_hooks_are_put_together():
    hooks = [Asking("A", feed_dict={"batch": 2 * counting.EIGHT}), Asking("B", feed_dict={"shift": 1.0})]
    with counting.session(hooks=hooks) as sess:
        assert float(sess.run(counting.add)["given"]) == 5.0


@conforms("MS-073", "MS-074")
def test_feeds_of_hooks_and_caller_are_put_together_and_the_callers_are_left_alone():
    hooks = [Asking("A", feed_dict={"scale": 3.0}), Asking("B", feed_dict={"shift": 1.0})]
    feeds = [hook._request.feed_dict.copy() for hook in hooks]
    batch = {"x": counting.EIGHT.copy()}

    @ms.train_step
    def step(state, batch, scale, shift):
        return state, {"given": batch["x"].sum() * scale + shift}

    with counting.session(hooks=hooks) as sess:
        for _ in range(2):
            assert float(sess.run(step, batch)["given"]) == 7.0
    assert list(batch) == ["x"]
    assert batch["x"].tobytes() == counting.EIGHT.tobytes()
    assert [hook._request.feed_dict for hook in hooks] == feeds
    assert [context.original_args for context in hooks[0].contexts] == [(batch,), (batch,)]


@conforms("MS-075")
def test_two_hooks_that_feed_the_same_are_refused():
    class First(Asking):
        pass

    class Second(Asking):
        pass

    hooks = [First(feed_dict={"scale": 1.0}), Second(feed_dict={"scale": 1.0})]
    with counting.session(hooks=hooks) as sess:
        with pytest.raises(RuntimeError, match=r"Same tensor is fed by two hooks.*scale.*First.*Second"):
            sess.run(counting.add, counting.EIGHT)
        assert sess.global_step == 0
        assert not sess.should_stop()


@conforms("MS-076")
@pytest.mark.parametrize("by_data", [False, True])
def test_hook_and_caller_that_feed_the_same_are_refused(by_data):
    hook = Asking(feed_dict={"batch": counting.EIGHT})
    data = [counting.EIGHT] if by_data else None
    with counting.session(hooks=[hook], data=data) as sess:
        with pytest.raises(RuntimeError, match=r"Same tensor is fed by a SessionRunHook and .*batch.*Asking"):
            sess.run(counting.add, *([] if by_data else [counting.EIGHT]))
        assert sess.global_step == 0
        assert not sess.should_stop()
