"""The behaviours of TensorFlow's CheckpointSaverHook tests, BH-029 to BH-053, in real sessions."""

from __future__ import annotations

import pytest
import ticks
from conforms import conforms

import monsess as ms

OFF = {"save_checkpoint_secs": None, "save_checkpoint_steps": None}


class Listener(ms.CheckpointSaverListener):
    """Writes down its calls; asks for a stop once it is told to."""

    def __init__(self):
        self.calls = []
        self.stop = None

    def begin(self):
        self.calls.append(("begin", None))

    def before_save(self, session, step):
        self.calls.append(("before_save", step))

    def after_save(self, session, step):
        self.calls.append(("after_save", step))
        return self.stop

    def end(self, session, step):
        self.calls.append(("end", step))

    def steps(self, what="before_save"):
        return [step for call, step in self.calls if call == what]

    def counts(self):
        names = [name for name, _ in self.calls]
        return {name: names.count(name) for name in ("begin", "before_save", "after_save", "end")}


def session(directory, *listeners, **cadence):
    """A session whose only saver is a hook in ``hooks``, as in TensorFlow's tests."""
    hook = ms.CheckpointSaverHook(directory, listeners=listeners, **cadence)
    return ms.MonitoredTrainingSession(
        ticks.init_fn,
        checkpoint_dir=directory,
        hooks=[hook],
        keep=ms.KeepLast(100),
        log_step_count_steps=None,
        **OFF,
    )


def saved(directory):
    return ms.CheckpointStore(directory).steps()


def run_at(sess, clock, *times):
    """Run once at each of these times."""
    for time in times:
        clock.advance(time - clock.monotonic())
        sess.run(ticks.one)


def restored_step(directory):
    with ms.MonitoredTrainingSession(ticks.init_fn, checkpoint_dir=directory) as sess:
        assert float(sess.state["count"]) == sess.global_step == sess.restored_from
        return sess.global_step


class TestArguments:
    @conforms(
        "BH-029",
        instead="There is no saver to choose or to fall back to: a hook without any always makes the session save its "
        "own state into its own directory (W-49).",
    )
    def test_hook_without_a_saver(self, tmp_path):
        with session(tmp_path, save_steps=1) as sess:
            sess.run(ticks.one)
            ticks.wait_for_saves(sess, 1)
            assert saved(tmp_path) == [1]
        assert restored_step(tmp_path) == 1

    @conforms(
        "BH-030",
        instead="Neither argument exists, so passing one or both is a TypeError: the session decides how it is saved "
        "(W-49).",
    )
    @pytest.mark.parametrize("extra", [{"saver": None}, {"scaffold": None}, {"saver": None, "scaffold": None}])
    def test_saver_and_scaffold(self, extra):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            ms.CheckpointSaverHook("anywhere", save_steps=1, **extra)

    @conforms(
        "BH-031",
        instead="Both cadences may be given: whichever comes first saves, and neither resets the other's schedule "
        "(W-35).",
    )
    @pytest.mark.parametrize("of", ["hook", "session"])
    def test_both_cadences(self, tmp_path, of):
        with ms.testing.FakeClock() as clock:
            if of == "hook":
                sess = session(tmp_path, save_secs=10, save_steps=3)
            else:
                sess = ms.MonitoredTrainingSession(
                    ticks.init_fn,
                    checkpoint_dir=tmp_path,
                    save_checkpoint_secs=10,
                    save_checkpoint_steps=3,
                    keep=ms.KeepLast(100),
                )
            with sess:
                run_at(sess, clock, *(2.5 * run for run in range(1, 14)))
        assert saved(tmp_path) == [3, 4, 6, 8, 9, 12, 13]

    @conforms("BH-032")
    def test_no_cadence(self, tmp_path):
        with pytest.raises(ValueError, match="Either save_secs or save_steps should be provided"):
            session(tmp_path)


class TestSeconds:
    @conforms(
        "BH-033",
        instead="The first run is not saved: seconds are counted from the creation of the session (W-19, W-34).",
    )
    def test_first_run_is_not_saved(self, tmp_path):
        listener = Listener()
        with ms.testing.FakeClock() as clock, session(tmp_path, listener, save_secs=2) as sess:
            run_at(sess, clock, 0.0, 1.9)
            assert listener.steps() == []
            run_at(sess, clock, 2.0)
            assert listener.steps() == [3]

    @conforms(
        "BH-034",
        instead="Two runs within save_secs and the end make one save, the final one: nothing is saved at the first run "
        "(W-19).",
    )
    def test_listener_is_called_at_begin_and_end(self, tmp_path):
        listener = Listener()
        with ms.testing.FakeClock(), session(tmp_path, listener, save_secs=2) as sess:
            sess.run(ticks.one)
            sess.run(ticks.one)
        assert listener.calls == [("begin", None), ("before_save", 2), ("after_save", 2), ("end", 2)]

    @conforms(
        "BH-042",
        instead="Saved at 2.5 s (step 3) and 10 s (step 6), not at 0.5, 2.6 or 2.7 s, as in TensorFlow; but not at the "
        "first run, since seconds are counted from the creation of the session (W-19).",
    )
    def test_saves_periodically(self, tmp_path):
        listener = Listener()
        with ms.testing.FakeClock() as clock, session(tmp_path, listener, save_secs=2) as sess:
            run_at(sess, clock, 0.0, 0.5, 2.5, 2.6, 2.7)
            assert listener.steps() == [3]
            run_at(sess, clock, 10.0)
            assert listener.steps() == [3, 6]
            run_at(sess, clock, 10.1)
        assert saved(tmp_path) == [3, 6, 7]

    @conforms(
        "BH-043",
        instead="Saves at 3.0 and 6.5 s and at the end; none at 3.5, 4.0 or 7.0 s, as in TensorFlow; but none at the "
        "first run, since seconds are counted from the creation of the session (W-19).",
    )
    def test_listener_is_called_periodically(self, tmp_path):
        listener = Listener()
        with ms.testing.FakeClock() as clock, session(tmp_path, listener, save_secs=2) as sess:
            run_at(sess, clock, 0.5)
            assert listener.counts()["before_save"] == 0
            run_at(sess, clock, 3.0)
            assert listener.counts()["before_save"] == 1
            run_at(sess, clock, 3.5, 4.0)
            assert listener.counts()["before_save"] == 1
            run_at(sess, clock, 6.5)
            assert listener.counts()["before_save"] == 2
            run_at(sess, clock, 7.0, 7.5)
            assert listener.counts()["before_save"] == 2
        assert listener.counts() == {"begin": 1, "before_save": 3, "after_save": 3, "end": 1}
        assert listener.steps() == listener.steps("after_save") == [2, 5, 7]


class TestListeners:
    @conforms(
        "BH-035",
        "BH-038",
        instead="Two saves, of steps 1 and 2, where TensorFlow makes three: nothing is saved at the creation. None is "
        "doubled at the end, and the listener's end is called once (W-19).",
    )
    @conforms("BH-036", "BH-039")
    def test_counts_in_a_full_session(self, tmp_path):
        listener = Listener()
        with session(tmp_path, listener, save_steps=1) as sess:
            sess.run(ticks.one)
            sess.run(ticks.one)
            assert sess.global_step == 2
        assert listener.counts() == {"begin": 1, "before_save": 2, "after_save": 2, "end": 1}
        assert listener.steps() == listener.steps("after_save") == saved(tmp_path) == [1, 2]
        assert restored_step(tmp_path) == 2

    @conforms(
        "BH-037",
        instead="after_save is called at the first run after the commit, for saves are written in the background; None "
        "goes on, True makes should_stop() true after that run (W-25).",
    )
    def test_stop_in_after_save(self, tmp_path):
        listener = Listener()
        with session(tmp_path, listener, save_steps=1) as sess:
            for step in (1, 2):
                sess.run(ticks.one)
                ticks.wait_for_saves(sess, step)
                assert not sess.should_stop()
            assert listener.steps("after_save") == [1]
            listener.stop = True
            sess.run(ticks.one)
            assert listener.steps("after_save") == [1, 2]
            assert sess.should_stop()
        assert sess.stop_reason == ms.StopReason.REQUESTED
        assert saved(tmp_path) == [1, 2, 3]

    @conforms("BH-040", "BH-041")
    def test_two_listeners(self, tmp_path):
        first, second = Listener(), Listener()
        with session(tmp_path, first, second, save_steps=1) as sess:
            sess.run(ticks.one)
            sess.run(ticks.one)
        assert first.calls == second.calls
        assert first.counts() == {"begin": 1, "before_save": 2, "after_save": 2, "end": 1}
        assert restored_step(tmp_path) == 2


class TestSteps:
    @conforms(
        "BH-044",
        "BH-045",
        instead="Saved at the multiples of save_steps (2, 4) and at the end (5), so that a resumed run saves at the "
        "steps of a straight one; not at 1, 3, 5 (W-34).",
    )
    def test_saves_at_multiples(self, tmp_path):
        listener = Listener()
        with session(tmp_path, listener, save_steps=2) as sess:
            sess.run(ticks.one)
            assert listener.steps() == []
            for _ in range(4):
                sess.run(ticks.one)
            assert listener.steps() == [2, 4]
        assert saved(tmp_path) == [2, 4, 5]

    @conforms("BH-046")
    def test_end_saves_a_step_that_was_not_saved(self, tmp_path):
        listener = Listener()
        with session(tmp_path, listener, save_steps=100) as sess:
            sess.run(ticks.one)
            sess.run(ticks.one)
            assert listener.steps() == []
        assert saved(tmp_path) == listener.steps() == [2]

    @conforms(
        "BH-048",
        instead="Nothing is saved at the creation (W-19); a session that ends without a run commits the step at which "
        "it started, unless it restored it.",
    )
    @conforms("BH-049", "BH-050")
    def test_no_save_before_the_first_run(self, tmp_path):
        listener = Listener()
        directory = tmp_path / "run"
        with session(directory, listener, save_steps=2) as sess:
            assert listener.steps() == saved(directory) == []
            sess.run(ticks.one)
            assert listener.steps() == []
            sess.run(ticks.one)
            ticks.wait_for_saves(sess, 1)
            assert saved(directory) == [2]
            assert ms.load_checkpoint(directory)["count"] == 2
        assert listener.steps() == [2]
        for _ in range(2):  # the second session restores step 0 and does not save it again
            listener = Listener()
            with session(tmp_path / "idle", listener, save_steps=2) as sess:
                restored = sess.restored_from
            assert listener.steps() == ([0] if restored is None else [])
        assert restored == 0
        assert saved(tmp_path / "idle") == [0]


class TestSeveralStepsPerRun:
    @conforms(
        "BH-051",
        "BH-052",
        instead="Saved at the multiples of save_steps (10, 20) and not at the first run (5), 15 or 25, so that a "
        "resumed run saves at the steps of a straight one (W-30, W-34).",
    )
    def test_saves_at_multiples(self, tmp_path):
        listener = Listener()
        with session(tmp_path, listener, save_steps=10) as sess:
            sess.run(ticks.adding(5))
            assert listener.steps() == []
            for _ in range(4):
                sess.run(ticks.adding(5))
            assert listener.steps() == [10, 20]

    @conforms("BH-053")
    def test_end_saves(self, tmp_path):
        with session(tmp_path, save_steps=10) as sess:
            sess.run(ticks.adding(5))
            sess.run(ticks.adding(5))
        assert saved(tmp_path) == [10]
        with session(tmp_path, save_steps=10) as sess:
            sess.run(ticks.adding(5))
        assert saved(tmp_path) == [10, 15]
