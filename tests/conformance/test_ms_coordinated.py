"""The behaviours of TensorFlow's wrapped and coordinated sessions, MS-032 to MS-046, seen at the one public session."""

from __future__ import annotations

import traceback

import counting
import numpy as np
import pytest
from conforms import conforms

import monsess as ms


@conforms("MS-032", "MS-035", "MS-039")
def test_should_stop_is_false_while_open_and_true_once_closed():
    sess = counting.session()
    assert [sess.should_stop() for _ in range(3)] == [False] * 3
    sess.run(counting.count)
    assert not sess.should_stop()
    for _ in range(3):
        sess.close()
        assert sess.should_stop()


@conforms(
    "MS-033",
    instead=(
        "There is no subclass with a check of its own: a thread, a hook or the program asks the session or its "
        "coordinator for a stop. should_stop looks anew at every call."
    ),
)
def test_should_stop_looks_anew_at_every_call():
    threads = counting.Threads(0)
    asked = []

    def should_stop():
        asked.append(sess.should_stop())
        if len(asked) == 3:
            threads.coord.request_stop()
        return asked[-1]

    with counting.session(hooks=[threads]) as sess:
        while not should_stop():
            pass
    assert asked == [False, False, False, True]


@conforms(
    "MS-034",
    instead=(
        "There are no sessions inside sessions: whatever stops training, hook, thread, program or input, is seen by "
        "the should_stop of the one session, and by the session that a hook or step function is handed."
    ),
)
@pytest.mark.parametrize("by", ["hook", "coordinator", "program", "limit", "data"])
def test_every_source_of_a_stop_is_seen(by):
    class Ask(counting.Recorder):
        def after_create_session(self, session, coord):
            self.session, self.coord = session, coord

        def after_run(self, run_context, run_values):
            if by == "hook":
                run_context.request_stop()

    hook = Ask()
    arguments = {"data": [counting.EIGHT]} if by == "data" else {}
    hooks = [hook, ms.StopAtStepHook(last_step=1)] if by == "limit" else [hook]
    with counting.session(hooks=hooks, **arguments) as sess:
        assert not sess.should_stop()
        sess.run(counting.add if by == "data" else counting.count)
        if by == "coordinator":
            hook.coord.request_stop()
        if by == "program":
            sess.request_stop()
        assert sess.should_stop()
        assert hook.session.should_stop()
    assert sess.stop_reason.name == {"limit": "LAST_STEP", "data": "END_OF_DATA"}.get(by, "REQUESTED")


@conforms("MS-036", "MS-038")
def test_run_hands_over_the_arguments_and_returns_the_outputs():
    with counting.session() as sess:
        outputs = sess.run(counting.add, 2 * counting.EIGHT, 10.0, np.float32(0.5))
    assert {name: float(value) for name, value in outputs.items()} == {"given": 40.5, "scale": 10.0, "shift": 0.5}


@conforms("MS-040")
def test_should_stop_as_soon_as_the_coordinator_is_asked_to_stop():
    threads = counting.Threads(1)
    with counting.session(hooks=[threads]) as sess:
        assert not sess.should_stop()
        threads.coord.request_stop()
        assert sess.should_stop()
        assert sess.stop_requested
    assert sess.stop_reason == ms.StopReason.REQUESTED


class Mine(Exception):
    pass


@conforms("MS-041", "MS-042")
@pytest.mark.parametrize("callback", ["before", "after"])
def test_error_of_a_run_keeps_its_type_and_stops_nothing(callback):
    threads = counting.Threads()
    error = Mine("a message")
    hook = counting.Raising(callback, error, 1)
    with counting.session(hooks=[threads, hook]) as sess:
        with pytest.raises(Mine) as caught:
            sess.run(counting.count)
        assert caught.value is error
        assert str(error) == "a message"
        assert not threads.coord.should_stop()
        assert threads.alive() == 3
        assert not sess.should_stop()
        assert sess.stop_reason is None
        step = 0 if callback == "before" else 1  # after_run is told of an update that was made
        assert sess.global_step == step
        assert counting.counted(sess.run(counting.count)) == step + 1
    assert hook.called("end") == 1
    assert hook.called("on_error") == 0


@conforms("MS-041", "MS-042")
def test_error_in_the_step_itself_keeps_its_type_and_stops_nothing():
    faulty = True

    @ms.train_step
    def step(state):
        if faulty:
            raise Mine("in the step")
        return counting.count.function(state)

    with counting.session() as sess:
        for _ in range(2):
            with pytest.raises(Mine, match="in the step"):
                sess.run(step)
            assert not sess.should_stop()
            assert sess.global_step == 0
        faulty = False
        assert counting.counted(sess.run(step)) == 1


@conforms("MS-043", "MS-044")
def test_close_after_a_failed_run_ends_the_threads():
    threads = counting.Threads()
    hook = counting.Raising("before", Mine(), 3)
    sess = counting.session(hooks=[threads, hook])
    for _ in range(2):
        assert threads.alive() == 3
        sess.run(counting.count)
    assert threads.alive() == 3
    assert not threads.coord.should_stop()
    with pytest.raises(Mine):
        sess.run(counting.count)
    sess.close()
    assert threads.alive() == 0
    assert threads.coord.should_stop()
    assert threads.coord.joined
    assert sess.should_stop()


@conforms("MS-045")
def test_close_ends_the_threads():
    threads = counting.Threads()
    sess = counting.session(hooks=[threads])
    assert threads.alive() == 3
    sess.close()
    assert threads.alive() == 0
    assert threads.coord.should_stop()
    assert threads.coord.joined
    assert sess.should_stop()


def _innermost(error):
    return traceback.extract_tb(error.__traceback__)[-1].name


@conforms("MS-046")
def test_innermost_frame_of_an_error_is_where_it_was_raised():
    def where_it_happens():
        raise Mine

    class Hook(ms.SessionRunHook):
        def before_run(self, run_context):
            if run_context.global_step == 0:
                where_it_happens()

    @ms.train_step
    def step(state):
        where_it_happens()

    def step_fn(step_context):
        where_it_happens()

    with counting.session(hooks=[Hook()]) as sess:
        for call in (
            lambda: sess.run(counting.count),
            lambda: sess.run_step_fn(lambda step_context: step_context.run_with_hooks(counting.count)),
            lambda: sess.run_without_hooks(step),
            lambda: sess.run_step_fn(step_fn),
        ):
            with pytest.raises(Mine) as caught:
                call()
            assert _innermost(caught.value) == "where_it_happens"


@conforms("MS-046")
def test_innermost_frame_of_a_threads_error_is_where_the_thread_raised_it():
    hook = counting.ReportingThread(Mine("in a thread"), at_run=1)
    with pytest.raises(Mine) as caught:
        with counting.session(hooks=[hook]) as sess:
            sess.run(counting.count)
    assert "_report" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert _innermost(caught.value) == "_report"
