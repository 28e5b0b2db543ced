"""The golden traces G1 to G6 of TensorFlow's sessions: which hook is called when, also around recoveries."""

from __future__ import annotations

import threading

import counting
import pytest
from conforms import conforms

import monsess as ms

BEGINS = "A.begin B.begin C.begin"
CREATED = "A.acs B.acs C.acs"
RUN = "A.before B.before C.before A.after B.after C.after"
ENDS = "C.end B.end A.end"


def traced(callback=None, *at):
    """Three hooks, of which B meets a transient error at some calls; and their common trace."""
    trace = []
    middle = counting.Recorder("B", trace)
    if callback:
        middle = counting.Raising(callback, counting.AbortedError(), *at, trace=trace)
    return [counting.Recorder("A", trace), middle, counting.Recorder("C", trace)], trace


def two_runs(hooks, **arguments):
    with counting.session(hooks=hooks, recovery=counting.recovery(**arguments)) as sess:
        return [counting.counted(sess.run(counting.count)) for _ in range(2)]


@conforms("MS-067")
def test_g1_two_runs():
    hooks, trace = traced()
    assert two_runs(hooks) == [1, 2]
    assert trace == f"{BEGINS} {CREATED} {RUN} {RUN} {ENDS}".split()


@conforms("MS-051", "MS-087")
def test_g2_transient_error_before_a_run():
    hooks, trace = traced("before")
    assert two_runs(hooks) == [1, 2]
    assert trace == f"{BEGINS} {CREATED} A.before B.before! {CREATED} {RUN} {RUN} {ENDS}".split()


@conforms("MS-051", "MS-087")
def test_g3_transient_error_after_a_run():
    hooks, trace = traced("after")
    assert two_runs(hooks) == [1, 2]
    before_all = "A.before B.before C.before A.after B.after!"
    assert trace == f"{BEGINS} {CREATED} {before_all} {CREATED} {RUN} {RUN} {ENDS}".split()


@conforms("MS-086")
def test_g4_transient_error_while_hooks_are_told_of_the_session():
    hooks, trace = traced("acs")
    assert two_runs(hooks, allow_reinit=False) == [1, 2]
    assert trace == f"{BEGINS} A.acs B.acs! {CREATED} {RUN} {RUN} {ENDS}".split()


@conforms("MS-087")
@pytest.mark.parametrize("allowed", [True, False])
def test_g5_goal_of_a_stop_hook_outlives_a_recovery(allowed):
    hooks = [counting.Raising("before", counting.AbortedError(), 4), ms.StopAtStepHook(num_steps=5)]
    values = []

    def loop():
        with counting.session(hooks=hooks, recovery=counting.recovery(allow_reinit=allowed)) as sess:
            while not sess.should_stop():
                values.append(counting.counted(sess.run(counting.count)))
        assert sess.stop_reason == ms.StopReason.LAST_STEP

    if allowed:
        loop()
        assert values == [1, 2, 3, 1, 2, 3, 4, 5]
    else:
        with pytest.raises(RuntimeError, match="no checkpoint to recover from"):
            loop()
        assert values == [1, 2, 3]


class Listener(ms.CheckpointSaverListener):
    """Writes down what a saver tells."""

    def __init__(self):
        self.told = []

    def begin(self):
        self.told.append("begin")

    def before_save(self, session, step):
        self.told.append(f"before@{step}")

    def after_save(self, session, step):
        self.told.append(f"after@{step}")

    def end(self, session, step):
        self.told.append(f"end@{step}")


def saving_session(url, listener, *hooks):
    return counting.session(
        hooks=[*hooks, ms.CheckpointSaverHook(save_steps=2, listeners=[listener])],
        checkpoint_dir=url,
        save_checkpoint_steps=None,
        save_checkpoint_secs=None,
        recovery=counting.recovery(allow_reinit=False),
    )


@conforms("MS-089")
def test_g6_recovery_from_a_checkpoint_saves_no_step_twice(tmp_path):
    listener = Listener()
    hook = counting.Raising("before", counting.AbortedError(), 4)
    with saving_session(tmp_path, listener, hook) as sess:
        assert [counting.counted(sess.run(counting.count)) for _ in range(5)] == [1, 2, 3, 3, 4]
        assert (sess.recoveries, sess.restored_from) == (1, 2)
    # TensorFlow saves at the creation, and the restored step once more after the recovery (W-19)
    assert listener.told == ["begin", "before@2", "after@2", "before@4", "after@4", "end@4"]
    assert ms.CheckpointStore(tmp_path).steps() == [2, 4]
    assert sess.summary()["saves"] == 2


@conforms("MS-089")
def test_g6_listener_is_told_of_a_commit_that_arrives_during_the_recovery(tmp_path):
    recovering = threading.Event()

    class HoldTheCommit(ms.SessionRunHook):
        """Step 2 is looked at before it is committed, and that takes until the recovery has begun."""

        def after_run(self, run_context, run_values):
            if run_context.global_step == 2 and not recovering.is_set():
                run_context.watch(0, lambda value: recovering.wait(60))

    class Abort(counting.Raising):
        def _note(self, callback):
            if callback == "before" and self.called("before") == 3:
                recovering.set()
            super()._note(callback)

    listener = Listener()
    hooks = [HoldTheCommit(), Abort("before", counting.AbortedError(), 4)]
    with saving_session(tmp_path, listener, *hooks) as sess:
        assert [counting.counted(sess.run(counting.count)) for _ in range(3)] == [1, 2, 3]
        assert listener.told == ["begin", "before@2"]
        assert counting.counted(sess.run(counting.count)) == 3
        assert sess.restored_from == 2
    assert listener.told[:3] == ["begin", "before@2", "after@2"]
    assert listener.told.count("after@2") == 1
