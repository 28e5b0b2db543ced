"""The behaviours of TensorFlow's monitored session, MS-077 to MS-098 and MS-106."""

from __future__ import annotations

import counting
import jax
import pytest
from conforms import conforms

import monsess as ms


@conforms("MS-077")
def test_session_without_arguments():
    with ms.MonitoredTrainingSession() as sess:
        assert (sess.global_step, sess.state, sess.should_stop()) == (0, {}, False)
        assert sess.is_chief
    with ms.MonitoredTrainingSession(counting.init_fn) as sess:
        assert float(sess.run(counting.read)) == 0
        assert isinstance(sess.state["count"], jax.Array)


@conforms("MS-078", "MS-079", "MS-081")
def test_last_step_is_absolute_and_the_session_usable_after_it(tmp_path):
    with counting.session(hooks=[ms.StopAtStepHook(last_step=3)], checkpoint_dir=tmp_path) as sess:
        sess.run(counting.read)  # read-only, and no step
        assert not sess.should_stop()
        for step in (1, 2):
            assert counting.counted(sess.run(counting.count)) == step
            assert not sess.should_stop()
        assert counting.counted(sess.run(counting.count)) == 3
        assert sess.should_stop()
        assert float(sess.run(counting.read)) == 3
        assert float(sess.state_copy()["count"]) == 3
        sess.request_save()
        assert sess.should_stop()
    assert ms.latest_checkpoint(tmp_path) == 3
    with counting.session(hooks=[ms.StopAtStepHook(last_step=5)], checkpoint_dir=tmp_path) as sess:
        assert sess.global_step == 3
        assert not sess.should_stop()
        sess.run(counting.count)
        assert not sess.should_stop()
        sess.run(counting.count)
        assert sess.should_stop()
        assert sess.global_step == 5
    assert sess.stop_reason == ms.StopReason.LAST_STEP


@conforms(
    "MS-080",
    instead=(
        "init_fn takes no arguments and no session: it makes the state, and may start from another run's checkpoint "
        "with load_checkpoint. Scaffold(warm_start_from=...) does that for leaves chosen by path. Going on where a run "
        "stopped is the session's affair: checkpoint_dir."
    ),
)
def test_first_state_can_come_from_another_runs_checkpoint(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    with counting.session(checkpoint_dir=old) as sess:
        for _ in range(3):
            sess.run(counting.count)

    def init_fn():
        return {"count": ms.load_checkpoint(old)["count"] + 10}

    scaffold = ms.Scaffold(
        lambda: {"count": jax.numpy.zeros(())}, warm_start_from=str(old), warm_start_paths=("count",)
    )
    for start, expected in (({"init_fn": init_fn}, 13), ({"scaffold": scaffold}, 3)):
        with ms.MonitoredTrainingSession(**start) as sess:
            assert float(sess.run(counting.read)) == expected
            assert (sess.global_step, sess.restored_from) == (0, None)  # a new run, not the old one going on
    with ms.MonitoredTrainingSession(init_fn, checkpoint_dir=new) as sess:
        sess.run(counting.count)
    with ms.MonitoredTrainingSession(init_fn, checkpoint_dir=new) as sess:
        assert float(sess.run(counting.read)) == 14  # restored, not made again


@conforms("MS-082", "MS-083")
def test_num_steps_is_relative(tmp_path):
    def run(num_steps):
        hook = ms.StopAtStepHook(num_steps=num_steps)
        with counting.session(hooks=[hook], checkpoint_dir=tmp_path) as sess:
            first = sess.global_step
            counting.train_to_the_end(sess)
        return first, sess.global_step, sess.summary()["steps"]

    assert run(3) == (0, 3, 3)
    assert run(4) == (3, 7, 4)


def _train(url, steps, **arguments):
    with counting.session(checkpoint_dir=url, **arguments) as sess:
        for _ in range(steps):
            sess.run(counting.count)


@conforms("MS-084")
def test_newest_checkpoint_of_a_saver_hook_is_restored(tmp_path):
    off = {"save_checkpoint_secs": None, "save_checkpoint_steps": None}
    with pytest.raises(KeyError):  # so that no final commit is made beside the hook's
        with counting.session(checkpoint_dir=tmp_path, hooks=[ms.CheckpointSaverHook(save_steps=1)], **off) as sess:
            sess.run(counting.count)
            sess.run(counting.count)
            raise KeyError
    with counting.session(checkpoint_dir=tmp_path) as sess:
        assert sess.restored_from == sess.global_step == 2
        assert float(sess.run(counting.read)) == 2


@conforms("MS-085", instead="A checkpoint is named by its step, not by a file: CheckpointOptions(restore_step=2).")
def test_checkpoint_can_be_chosen(tmp_path):
    _train(tmp_path, 2)
    with counting.session(checkpoint_dir=tmp_path, checkpoint=ms.CheckpointOptions(restore_step=2)) as sess:
        assert sess.restored_from == sess.global_step == 2
        assert float(sess.run(counting.read)) == 2
    with pytest.raises(ms.StorageError, match="7"):
        counting.session(checkpoint_dir=tmp_path, checkpoint=ms.CheckpointOptions(restore_step=7))


@conforms(
    "MS-085",
    instead=(
        "Where there are newer steps, whose numbers the session would write again, it is refused unless it says "
        "newer='aside' (W-20)."
    ),
)
def test_steps_newer_than_the_chosen_one_are_never_lost_silently(tmp_path):
    _train(tmp_path, 3, save_checkpoint_steps=1)
    with pytest.raises(ms.MonsessError, match="newer"):
        counting.session(checkpoint_dir=tmp_path, checkpoint=ms.CheckpointOptions(restore_step=1))
    assert ms.CheckpointStore(tmp_path).steps() == [1, 2, 3]
    aside = ms.CheckpointOptions(restore_step=1, newer="aside")
    with counting.session(checkpoint_dir=tmp_path, checkpoint=aside) as sess:
        assert counting.counted(sess.run(counting.count)) == 2
    assert ms.CheckpointStore(tmp_path).steps() == [1, 2]
    assert sorted(path.name[:8] for path in tmp_path.iterdir() if path.name.startswith("aside-")) == [
        "aside-2-",
        "aside-3-",
    ]


@conforms("MS-086")
@pytest.mark.parametrize("error", [counting.AbortedError(), counting.UnavailableError()])
def test_transient_error_of_init_fn_is_met_by_another_try(error):
    calls = []

    def init_fn():
        calls.append(None)
        if len(calls) == 1:
            raise error
        return counting.init_fn()

    policy = counting.recovery(allow_reinit=False)  # nothing was lost: this is no start from nothing
    with ms.MonitoredTrainingSession(init_fn, recovery=policy) as sess:
        assert len(calls) == 2
        assert not sess.should_stop()
        assert float(sess.run(counting.read)) == 0
    assert sess.recoveries == 0


TRANSIENT = {
    "MS-087": counting.AbortedError(),
    "MS-088": counting.UnavailableError(),
    "JAX aborted": jax.errors.JaxRuntimeError("ABORTED: preempted"),
    "JAX unavailable": jax.errors.JaxRuntimeError("UNAVAILABLE: connection to the device was lost"),
}


@conforms(
    "MS-087",
    "MS-088",
    instead=(
        "Without a checkpoint that start from nothing is refused, because all progress would be lost silently (W-13); "
        "Recovery(allow_reinit=True) allows it, and then the call is repeated as in TensorFlow, max_restarts times at "
        "most (W-12). Which errors count is Recovery's is_transient: by default JAX's errors of status ABORTED and "
        "UNAVAILABLE."
    ),
)
@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("name", TRANSIENT)
def test_transient_error_without_a_checkpoint(name, allowed):
    error = TRANSIENT[name]
    default = {"is_transient": None} if isinstance(error, jax.errors.JaxRuntimeError) else {}
    policy = ms.Recovery(
        **{"is_transient": lambda one: one is error, "backoff_secs": 0.0, "allow_reinit": allowed, **default}
    )
    hook = counting.Raising("before", error, 4)
    sess = counting.session(hooks=[hook], recovery=policy)
    with sess:
        assert float(sess.run(counting.read)) == 0
        assert [counting.counted(sess.run(counting.count)) for _ in range(3)] == [1, 2, 3]
        if allowed:
            assert [counting.counted(sess.run(counting.count)) for _ in range(2)] == [1, 2]
            assert not sess.should_stop()
            assert sess.recoveries == 1
            return
        with pytest.raises(RuntimeError, match="no checkpoint to recover from") as caught:
            sess.run(counting.count)
        assert caught.value.__cause__ is error


@conforms("MS-087", instead="Restarts are limited; then the transient error itself is raised.")
def test_restarts_are_limited_and_the_error_then_surfaces():
    error = counting.AbortedError("again and again")
    hook = counting.Raising("before", error, *range(1, 100))
    with pytest.raises(counting.AbortedError) as caught:
        with counting.session(hooks=[hook], recovery=counting.recovery(max_restarts=2)) as sess:
            sess.run(counting.count)
    assert caught.value is error
    assert hook.called("before!") == 3
    assert hook.trace[-1] == "B.on_error"
    assert "2 restarts" in "".join(error.__notes__)


@conforms("MS-089")
def test_transient_error_goes_on_from_the_newest_checkpoint(tmp_path):
    hook = counting.Raising("before", counting.AbortedError(), 3)
    with counting.session(
        hooks=[hook],
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=1,
        recovery=counting.recovery(allow_reinit=False),
    ) as sess:
        values = [counting.counted(sess.run(counting.count)) for _ in range(4)]
        assert not sess.should_stop()
        assert (sess.recoveries, sess.restored_from) == (1, 2)
    assert values == [1, 2, 3, 4]


class Ending(counting.Raising):
    """Raises in the second run."""

    def __init__(self, callback, error, trace=None):
        super().__init__(callback, error, 2, name="B", trace=trace)


@conforms(
    "MS-090",
    "MS-091",
    instead="The signal is EndOfData, which nothing but the input means; an exhausted iterator elsewhere is an error.",
)
@pytest.mark.parametrize("callback", ["before", "after"])
def test_end_of_data_from_a_hook_is_a_clean_end(tmp_path, callback):
    trace = []
    hooks = [Ending(callback, ms.EndOfData("no more"), trace), counting.Recorder("A", trace)]
    with counting.session(hooks=hooks, checkpoint_dir=tmp_path) as sess:
        sess.run(counting.count)
        assert not sess.should_stop()
        sess.run(counting.count)
        raise AssertionError("not reached")
    assert sess.should_stop()
    assert sess.stop_reason == ms.StopReason.END_OF_DATA
    assert trace[-2:] == ["A.end", "B.end"]
    assert ms.latest_checkpoint(tmp_path) == (1 if callback == "before" else 2)


@conforms(
    "MS-092",
    instead=(
        "StopIteration is an error like any other: a bare next() on an iterator of the user's own would otherwise end "
        "training as if all was well (W-01)."
    ),
)
@pytest.mark.parametrize("by", ["hook", "body"])
def test_stop_iteration_is_an_error(tmp_path, by):
    recorder = counting.Recorder()
    hooks = [Ending("before", StopIteration()), recorder] if by == "hook" else [recorder]
    with pytest.raises(StopIteration):
        with counting.session(hooks=hooks, checkpoint_dir=tmp_path) as sess:
            sess.run(counting.count)
            assert not sess.should_stop()
            if by == "body":
                next(iter([]))
            sess.run(counting.count)
            raise AssertionError("not reached")
    assert sess.should_stop()
    assert sess.stop_reason == ms.StopReason.ERROR
    assert (recorder.called("end"), recorder.called("on_error")) == (0, 1)
    assert ms.latest_checkpoint(tmp_path) is None


@conforms("MS-093")
@pytest.mark.parametrize("callback", ["before", "after"])
def test_other_error_of_a_hook_passes_out_of_the_with_block(callback):
    error = RuntimeError("regular exception")
    with pytest.raises(RuntimeError, match="regular exception") as caught:
        with counting.session(hooks=[Ending(callback, error)]) as sess:
            sess.run(counting.count)
            sess.run(counting.count)
            raise AssertionError("not reached")
    assert caught.value is error
    assert sess.should_stop()


@conforms("MS-094", "MS-095", "MS-096")
@pytest.mark.parametrize("leave", ["run on", "look at should_stop"])
def test_error_of_a_thread_is_raised_when_the_with_block_is_left(tmp_path, leave):
    error = RuntimeError("a thread failed")
    hook = counting.ReportingThread(error)
    with pytest.raises(RuntimeError, match="a thread failed") as caught:
        with counting.session(hooks=[hook], checkpoint_dir=tmp_path) as sess:
            assert counting.counted(sess.run(counting.count)) == 1
            assert not sess.should_stop()
            assert counting.counted(sess.run(counting.count)) == 2  # the thread reports here
            if leave == "run on":
                assert counting.counted(sess.run(counting.count)) == 3
            else:
                assert sess.should_stop()
                assert sess.should_stop()
    assert caught.value is error
    assert sess.should_stop()
    assert sess.stop_reason == ms.StopReason.ERROR
    assert ms.latest_checkpoint(tmp_path) is None


@conforms("MS-097")
def test_plain_exit_closes():
    with counting.session() as sess:
        sess.run(counting.count)
        assert not sess.should_stop()
    assert sess.should_stop()
    with pytest.raises(ms.SessionClosedError):
        sess.run(counting.count)
    with pytest.raises(ms.SessionClosedError):
        sess.run(counting.read)
    with pytest.raises(ms.SessionClosedError):
        sess.run_step_fn(lambda step_context: None)
    with pytest.raises(ms.SessionClosedError):
        sess.__enter__()


@conforms("MS-098")
def test_error_of_the_with_body_is_seen_outside():
    error = RuntimeError("regular exception")
    with pytest.raises(RuntimeError, match="regular exception") as caught:
        with counting.session() as sess:
            sess.run(counting.count)
            raise error
    assert caught.value is error
    assert sess.should_stop()
    with pytest.raises(ms.SessionClosedError):
        sess.run(counting.count)


@conforms(
    "MS-106",
    instead="close may be called any number of times, also inside the with-block, and the endings run once (W-09).",
)
def test_close_inside_the_with_block(tmp_path):
    recorder = counting.Recorder()
    with counting.session(hooks=[recorder], checkpoint_dir=tmp_path) as sess:
        sess.run(counting.count)
        sess.close()
        assert ms.latest_checkpoint(tmp_path) == 1
        assert sess.should_stop()
        sess.close()
    sess.close()
    assert recorder.called("end") == 1
    assert recorder.called("on_error") == 0

    with pytest.raises(KeyError, match="after the close"):
        with counting.session(hooks=[recorder]) as sess:
            sess.close()
            raise KeyError("after the close")
    assert recorder.called("end") == 2
    assert recorder.called("on_error") == 0
