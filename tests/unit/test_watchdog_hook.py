"""WatchdogHook alone: what counts as progress, when it has been too long, and what a thread is said to do."""

from __future__ import annotations

import sys
import threading
import time

import jax.numpy as jnp
import pytest
import toy
from fake_session import FakeSession

import monsess as ms
from monsess.hooks._phases import phase_of, stacks
from monsess.testing import FakeClock


@pytest.fixture
def clock():
    with FakeClock() as clock:
        yield clock


def watched(monkeypatch, timeout=60.0, startup=600.0, **session):
    """A hook whose own thread does nothing, and its session."""
    hook = ms.WatchdogHook(timeout, startup)
    monkeypatch.setattr(hook, "_watch", lambda *args: None)
    return hook, FakeSession(hook, **session)


def after(hook, session, clock, seconds):
    """Look every second for so many seconds; when a stall was found, and what was said."""
    for second in range(1, seconds + 1):
        clock.advance(1.0)
        found = hook._look(session)
        if found is not None:
            return second, found
    return None


class TestLimits:
    def test_no_step_for_too_long(self, monkeypatch, clock):
        hook, session = watched(monkeypatch)
        session.run()
        hook._look(session)
        second, text = after(hook, session, clock, 100)
        assert second == 60
        assert text.startswith("WatchdogHook: no progress for 60 s (timeout_secs=60) at step 1: ")
        assert "in the program's own code (" in text

    def test_steps_are_progress(self, monkeypatch, clock):
        hook, session = watched(monkeypatch)
        for _ in range(10):
            session.run()
            assert after(hook, session, clock, 59) is None

    @pytest.mark.parametrize("part", ["input", "compile", "step", "hooks", "save"])
    def test_whatever_ends_is_progress(self, monkeypatch, clock, part):
        hook, session = watched(monkeypatch)
        session.run()
        for _ in range(10):
            session.seconds[part] += 1.0
            assert after(hook, session, clock, 59) is None
        assert after(hook, session, clock, 60) is not None

    def test_the_first_step_may_take_longer(self, monkeypatch, clock):
        hook, session = watched(monkeypatch, step=7)
        hook._look(session)
        second, text = after(hook, session, clock, 1000)
        assert second == 600
        assert "(startup_timeout_secs=600) at step 7: " in text

    def test_a_stopped_process_is_no_stall(self, monkeypatch, clock):
        hook, session = watched(monkeypatch)
        session.run()
        hook._look(session)
        assert after(hook, session, clock, 40) is None
        clock.advance(5000)  # SIGSTOP, or a machine that slept
        assert hook._look(session) is None
        assert after(hook, session, clock, 18) is None
        assert after(hook, session, clock, 10) is not None

    def test_a_recovery_begins_anew(self, monkeypatch, clock):
        hook, session = watched(monkeypatch)
        session.run()
        hook._look(session)
        assert after(hook, session, clock, 50) is None
        session.recover(0)
        assert after(hook, session, clock, 100) is None  # the first step is compiled again, perhaps

    @pytest.mark.parametrize("value", [0, -1, True, "1", float("inf")])
    def test_limits_are_lengths_of_time(self, value):
        with pytest.raises(ValueError, match=f"invalid timeout_secs={value!r}"):
            ms.WatchdogHook(value)
        with pytest.raises(ValueError, match="invalid startup_timeout_secs="):
            ms.WatchdogHook(5, startup_timeout_secs=value)


class TestPhases:
    """What a thread does, found in its stack."""

    @staticmethod
    def seen(work, until=lambda phase: True):
        """The phase of a thread that does ``work``."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        deadline = time.monotonic() + 20
        while True:
            phase = phase_of(sys._current_frames().get(thread.ident))
            if until(phase):
                return phase
            assert time.monotonic() < deadline, phase
            time.sleep(0.01)

    def test_own_code(self):
        over = threading.Event()
        phase = self.seen(over.wait, lambda phase: "threading.py" in phase.text)
        over.set()
        assert phase.kind == "loop"
        assert phase.text.startswith("in the program's own code (")

    def test_input(self):
        over = threading.Event()

        def batches():
            over.wait(30)
            yield from ()

        def train():
            with ms.MonitoredTrainingSession(toy.init_fn, data=batches(), log_step_count_steps=None) as sess:
                sess.should_stop()

        phase = self.seen(train, lambda phase: phase.kind == "input")
        over.set()
        assert phase.text == "waiting for the next batch of the input"

    def test_hook_and_what_it_calls(self):
        over = threading.Event()

        class Waits(ms.SessionRunHook):
            def after_run(self, run_context, run_values):
                over.wait(30)

        @ms.train_step
        def step(state):
            return state, {}

        def train():
            with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), hooks=[Waits()], log_step_count_steps=None) as sess:
                sess.run(step)

        phase = self.seen(train, lambda phase: phase.kind == "hook" and "Waits" in phase.text)
        over.set()
        assert phase.text.startswith("in hook TestPhases.test_hook_and_what_it_calls.<locals>.Waits.after_run (")

    @pytest.mark.parametrize(("module", "function"), [("bdb", "stop"), ("pdb", "stop"), ("pydevd", "_do_wait_suspend")])
    def test_debuggers(self, module, function):
        over = threading.Event()
        names = {"__name__": module, "over": over}
        exec(f"def {function}():\n    over.wait(30)", names)
        phase = self.seen(names[function], lambda phase: phase.kind == "debugger")
        over.set()
        assert phase.text == "in a debugger"

    def test_starting_again_after_an_error(self, tmp_path, monkeypatch):
        """A restore may take longer than a step; that of a session's beginning is not watched at all."""
        over, restoring = threading.Event(), threading.Event()

        class Fails(ms.SessionRunHook):
            failed = False

            def after_run(self, run_context, run_values):
                if not self.failed:
                    self.failed = True
                    raise OSError("planned")

        def slow(state, *rest):
            if fails.failed:
                restoring.set()
                over.wait(30)
            return state

        fails = Fails()

        def train():
            with ms.MonitoredTrainingSession(
                lambda: slow(toy.init_fn()),
                data=toy.batches(3),
                hooks=[fails],
                recovery=ms.Recovery(
                    is_transient=lambda error: isinstance(error, OSError), backoff_secs=0, allow_reinit=True
                ),
                log_step_count_steps=None,
            ) as sess:
                while not sess.should_stop():
                    sess.run(toy.train)

        phase = self.seen(train, lambda phase: phase.starting and restoring.is_set())
        over.set()
        assert phase.starting

    def test_no_thread(self):
        assert phase_of(None).text == "the thread that trains has ended"

    def test_stacks_of_all_threads_with_their_names(self):
        over = threading.Event()
        thread = threading.Thread(target=over.wait, name="somebody's", daemon=True)
        thread.start()
        text = stacks()
        over.set()
        assert "Thread somebody's (most recent call last):\n" in text
        assert "test_stacks_of_all_threads_with_their_names" not in text  # that of the thread that asks


class TestInSession:
    def test_a_run_that_goes_on_is_left_alone(self):
        hook = ms.WatchdogHook(30)
        with ms.MonitoredTrainingSession(
            toy.init_fn, data=toy.batches(5), hooks=[hook], log_step_count_steps=None
        ) as sess:
            thread = hook._thread
            assert thread.is_alive()
            while not sess.should_stop():
                sess.run(toy.train)
        assert not thread.is_alive()
        toy.assert_same_bits(sess.state_copy(), toy.straight(5))

    def test_an_input_that_hangs_ends_as_an_error(self, caplog):
        """The training thread is reached, and the hooks are told."""
        over = threading.Event()

        def batches():
            yield from toy.batches(4)
            over.wait(60)

        class Told(ms.SessionRunHook):
            error = None

            def on_error(self, session, error):
                self.error = error

        told = Told()
        hooks = [ms.WatchdogHook(1.5, startup_timeout_secs=60), told]
        begun = time.monotonic()
        with pytest.raises(ms.MonsessError, match=r"WatchdogHook: no progress for .* at step 4: waiting for the next"):
            with ms.MonitoredTrainingSession(
                toy.init_fn, data=batches(), hooks=hooks, log_step_count_steps=None
            ) as sess:
                while not sess.should_stop():
                    sess.run(toy.train)
        over.set()
        assert time.monotonic() - begun < 40
        assert isinstance(told.error, ms.MonsessError)
        assert "Thread MainThread (most recent call last):" in caplog.text

    def test_a_session_that_nobody_closes_is_not_kept_alive(self):
        hook = ms.WatchdogHook(30)
        sess = ms.MonitoredTrainingSession(toy.init_fn, hooks=[hook], log_step_count_steps=None)
        thread = hook._thread
        sess.close()
        thread.join(5)
        assert not thread.is_alive()
