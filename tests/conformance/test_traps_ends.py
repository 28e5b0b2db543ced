"""W-01, W-02, W-05 to W-09 and W-33: no silent end, and one ending for every hook, whatever happens."""

from __future__ import annotations

import logging
import signal
import threading

import pytest
from names import shown
from traps import Recorder, WithThread, count, drive, endings, init_fn, steps_of, trap

import monsess as ms


def empty_next(*_):
    """What a bare ``next()`` on an exhausted iterator does to whoever calls it."""
    raise StopIteration


class Calls(ms.CheckpointSaverListener):
    def __init__(self, **methods):
        self.__dict__.update(methods)


@trap("W-01")
@pytest.mark.parametrize(
    "place", ["body", "before_run", "after_run", "step", "feed", "before_save", "after_save", "data"]
)
def test_a_bare_stop_iteration_is_an_error_wherever_it_is_raised(tmp_path, place):
    @ms.train_step
    def stop_iteration(state):
        return next(iter([]))

    @ms.train_step
    def fed(state, batch=0.0):
        return state, {}

    def data():
        yield from ()
        yield next(iter([]))

    recorder = Recorder()
    hooks = [recorder]
    step = stop_iteration if place == "step" else fed if place == "feed" else count
    if place in ("before_run", "after_run"):
        recorder.raises = {place: StopIteration()}
    elif place == "feed":
        hooks.append(ms.FeedFnHook(empty_next))
    elif place in ("before_save", "after_save"):
        hooks.append(ms.CheckpointSaverHook(save_steps=1, listeners=[Calls(**{place: empty_next})]))
    error = RuntimeError if place == "data" else StopIteration  # Python itself says so for generators
    with pytest.raises(error):
        with ms.MonitoredTrainingSession(
            init_fn,
            hooks=hooks,
            data=data() if place == "data" else None,
            checkpoint_dir=tmp_path,
            save_checkpoint_secs=None,
        ) as sess:
            if place == "data":
                sess.run(fed)
            sess.run(step)
            if place == "body":
                next(iter([]))
            drive(sess, step)
    assert endings(recorder.trace) == ["A.on_error"]
    assert sess.stop_reason == ms.StopReason.ERROR
    assert (steps_of(tmp_path)[:1] == [1]) == (place == "after_save")  # an error saves nothing of its own


@trap("W-01", "W-56")
def test_the_end_of_the_sessions_own_input_is_a_clean_end_and_is_logged(caplog):
    recorder = Recorder()

    @ms.train_step
    def step(state, batch):
        return state, {}

    with caplog.at_level(logging.INFO, "monsess"):
        with ms.MonitoredTrainingSession(init_fn, data=iter([1.0 * i for i in ()]), hooks=[recorder]) as sess:
            drive(sess, step)
    assert endings(recorder.trace) == ["A.end"]
    assert sess.stop_reason == ms.StopReason.END_OF_DATA
    assert "the input has ended" in caplog.text


class MyEnd(ms.EndOfData):
    """A subclass counts as what it is derived from."""


@trap("W-02")
@pytest.mark.parametrize("place", ["body", "before_run", "after_run", "feed", "step_fn"])
def test_end_of_data_is_a_clean_end_wherever_it_is_raised(tmp_path, place):
    def end(*_):
        raise MyEnd("enough")

    @ms.train_step
    def fed(state, batch=0.0):
        return state, {}

    recorder = Recorder()
    hooks = [recorder]
    step = count
    if place in ("before_run", "after_run"):
        recorder.raises, recorder.at_step = {place: MyEnd("enough")}, 1
    elif place == "feed":
        hooks.append(ms.FeedFnHook(end))
        step = fed
    with ms.MonitoredTrainingSession(init_fn, hooks=hooks, checkpoint_dir=tmp_path) as sess:
        if place == "step_fn":
            sess.run_step_fn(lambda step_context: end())
        sess.run(step)
        if place == "body":
            end()
        drive(sess, step)
    assert endings(recorder.trace) == ["A.end"]
    assert steps_of(tmp_path) == [sess.global_step]
    assert sess.stop_reason is not None
    assert sess.stop_reason.name == ("BODY_LEFT" if place == "body" else "END_OF_DATA")


@trap("W-02", "W-50")
def test_end_of_data_in_after_run_hides_the_step_from_no_hook(tmp_path):
    """The step is made and will be committed, so every hook has to see it before."""
    trace = []
    hooks = [Recorder("A", trace, after_run=MyEnd("enough"), at_step=2), Recorder("B", trace)]
    with ms.MonitoredTrainingSession(init_fn, hooks=hooks, checkpoint_dir=tmp_path) as sess:
        drive(sess)
    assert trace[-4:] == ["A.after_run@2", "B.after_run@2", "B.end", "A.end"]
    assert steps_of(tmp_path) == [2]


@trap("W-02")
@pytest.mark.parametrize("method", ["begin", "after_create_session"])
def test_end_of_data_before_the_first_run_is_a_clean_end_without_any(tmp_path, method):
    """The constructor stands outside the with-block; it returns a session that has nothing to do."""
    trace = []
    hooks = [Recorder("A", trace, **{method: MyEnd("nothing to do")}), Recorder("B", trace)]
    with ms.MonitoredTrainingSession(init_fn, hooks=hooks, checkpoint_dir=tmp_path) as sess:
        assert sess.should_stop()
        drive(sess)
    assert [line for line in trace if "run" not in line] == [
        *("A.begin", "B.begin", "A.after_create_session@0", "B.after_create_session@0", "B.end", "A.end")
    ]
    assert sess.stop_reason == ms.StopReason.END_OF_DATA
    assert steps_of(tmp_path) == [0]


@trap("W-02")
def test_end_of_data_means_the_same_without_a_with_block(tmp_path):
    recorder = Recorder(before_run=MyEnd("enough"), at_step=1)
    sess = ms.MonitoredTrainingSession(init_fn, hooks=[recorder], checkpoint_dir=tmp_path)
    sess.run(count)
    with pytest.raises(MyEnd):
        sess.run(count)
    assert sess.should_stop()
    with pytest.raises(ms.EndOfData):
        sess.run(count)
    sess.close()
    assert endings(recorder.trace) == ["A.end"]
    assert steps_of(tmp_path) == [1]
    assert sess.stop_reason == ms.StopReason.END_OF_DATA


@trap("W-05")
def test_a_stop_request_outlives_the_failure_of_a_later_hook():
    class Stopper(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            run_context.request_stop("low enough")

    with ms.MonitoredTrainingSession(init_fn, hooks=[Stopper(), Recorder(after_run=KeyError("B"))]) as sess:
        with pytest.raises(KeyError, match="B"):
            sess.run(count)
        assert sess.should_stop()
        with pytest.raises(ms.RunAfterStopError, match="low enough"):
            sess.run(count)
    assert sess.stop_reason == ms.StopReason.REQUESTED


@trap("W-06")
def test_a_failing_end_robs_nobody_of_theirs_and_costs_no_checkpoint(tmp_path):
    trace = []
    first, second = KeyError("C"), ValueError("A")
    hooks = [Recorder("A", trace, end=second), Recorder("B", trace), Recorder("C", trace, end=first)]
    bad = ms.FinalOpsHook(lambda state, outputs: state["nothing like that"])
    with pytest.raises(KeyError) as caught:
        with ms.MonitoredTrainingSession(init_fn, hooks=[*hooks, bad], checkpoint_dir=tmp_path) as sess:
            sess.run(count)
    assert endings(trace) == ["C.end", "B.end", "A.end"]
    assert "FinalOpsHook" in str(caught.value.__notes__)  # the first failing end, since ends go in reverse
    assert any("KeyError('C')" in note for note in caught.value.__notes__)
    assert any("ValueError('A')" in note for note in caught.value.__notes__)
    assert steps_of(tmp_path) == [1]
    with pytest.raises(ms.SessionClosedError):
        sess.run(count)


@trap("W-07")
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=shown)
def test_every_error_gives_hooks_their_other_ending_and_saves_nothing_new(tmp_path, error):
    trace = []
    hooks = [Recorder("A", trace), Recorder("B", trace)]
    with pytest.raises(type(error)) as caught:
        with ms.MonitoredTrainingSession(
            init_fn, hooks=hooks, checkpoint_dir=tmp_path, save_checkpoint_steps=2
        ) as sess:
            for _ in range(3):
                sess.run(count)
            raise error
    assert caught.value is error
    assert endings(trace) == ["B.on_error", "A.on_error"]
    assert hooks[0].errors == [error]
    assert steps_of(tmp_path) == [2]  # the save that was in flight is waited for, step 3 is not saved


@trap("W-07")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_a_clean_end_with_a_final_checkpoint(tmp_path, number, code):
    trace = []
    handler = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught:
        with ms.MonitoredTrainingSession(
            init_fn, hooks=[Recorder("A", trace)], checkpoint_dir=tmp_path, save_checkpoint_steps=2
        ) as sess:
            while not sess.should_stop():
                sess.run(count)
                if sess.global_step == 3:
                    signal.raise_signal(number)
    assert caught.value.code == code
    assert endings(trace) == ["A.end"]
    assert steps_of(tmp_path) == [2, 3]
    assert sess.stop_reason == ms.StopReason.PREEMPTED
    assert signal.getsignal(number) is handler


@trap("W-06", "W-07", "W-08")
@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("begin", ["B.on_error", "A.on_error"]),
        ("after_create_session", ["C.on_error", "B.on_error", "A.on_error"]),
        ("before_run", ["C.on_error", "B.on_error", "A.on_error"]),
        ("after_run", ["C.on_error", "B.on_error", "A.on_error"]),
        ("end", ["C.end", "B.end", "A.end"]),
    ],
)
def test_exactly_one_ending_for_every_hook_that_began(method, expected):
    trace = []
    error = KeyError("B")
    hooks = [Recorder("A", trace), Recorder("B", trace, **{method: error}), Recorder("C", trace)]
    with pytest.raises(KeyError) as caught:
        with ms.MonitoredTrainingSession(init_fn, hooks=hooks) as sess:
            sess.run(count)
    assert caught.value is error
    assert f"Raised by hook Recorder in {method}." in error.__notes__
    assert endings(trace) == expected


@trap("W-07")
def test_a_failing_on_error_robs_nobody_and_does_not_replace_the_error():
    trace = []
    hooks = [Recorder("A", trace), Recorder("B", trace, on_error=KeyError("second"))]
    with pytest.raises(ValueError, match="first") as caught:
        with ms.MonitoredTrainingSession(init_fn, hooks=hooks):
            raise ValueError("first")
    assert endings(trace) == ["B.on_error", "A.on_error"]
    assert any("second" in note for note in caught.value.__notes__)


@trap("W-08")
@pytest.mark.parametrize("method", ["after_create_session", "init_fn"])
def test_a_session_that_could_not_be_made_leaves_nothing_behind(tmp_path, method):
    closed = threading.Event()

    def data():
        try:
            while True:
                yield [0.0] * 8
        finally:
            closed.set()

    def broken():
        raise KeyError("B")

    source = data()
    next(source)
    before = set(threading.enumerate())
    hook = WithThread()
    hooks = [hook] if method == "init_fn" else [hook, Recorder(after_create_session=KeyError("B"))]
    with pytest.raises(KeyError, match="B"):
        ms.MonitoredTrainingSession(
            broken if method == "init_fn" else init_fn, hooks=hooks, data=source, checkpoint_dir=tmp_path
        )
    assert closed.wait(10)
    if method != "init_fn":
        hook.thread.join(10)
        assert hook.coord.should_stop()
    assert [thread for thread in set(threading.enumerate()) - before if not thread.daemon] == []
    with ms.MonitoredTrainingSession(init_fn, checkpoint_dir=tmp_path) as sess:
        assert sess.restored_from is None


@trap("W-09")
def test_close_can_be_called_again_and_everything_else_says_clearly_that_it_is_closed(tmp_path):
    recorder = Recorder()
    with ms.MonitoredTrainingSession(init_fn, hooks=[recorder], checkpoint_dir=tmp_path) as sess:
        sess.run(count)
        sess.close()
        sess.close()
        assert sess.should_stop()
    sess.close()
    assert endings(recorder.trace) == ["A.end"]
    reason = str(sess.stop_reason)
    for call in (
        lambda: sess.run(count),
        lambda: sess.run_without_hooks(count),
        lambda: sess.run_step_fn(lambda step_context: None),
        lambda: sess.request_stop("too late"),
        lambda: sess.request_save(),
        lambda: sess.__enter__(),
    ):
        with pytest.raises(ms.SessionClosedError, match="closed"):
            call()
    assert str(sess.stop_reason) == reason
    assert sess.global_step == 1
    assert sess.summary()["last_committed"] == 1


@trap("W-33")
@pytest.mark.parametrize("where", ["body", "after_create_session", "before_run"])
def test_anybody_can_ask_for_a_stop_and_say_why(tmp_path, where):
    class Asks(ms.SessionRunHook):
        def after_create_session(self, session, coord):
            if where == "after_create_session":
                session.request_stop("good enough")

        def before_run(self, run_context):
            if where == "before_run":
                run_context.request_stop("good enough")

    with ms.MonitoredTrainingSession(init_fn, hooks=[Asks()], checkpoint_dir=tmp_path) as sess:
        while not sess.should_stop():
            sess.run(count)
            if where == "body":
                sess.request_stop("good enough")
    assert sess.stop_reason == ms.StopReason.REQUESTED
    assert sess.stop_reason is not None
    assert sess.stop_reason.text == "good enough"
    assert sess.global_step == (0 if where == "after_create_session" else 1)
    assert steps_of(tmp_path) == [sess.global_step]
