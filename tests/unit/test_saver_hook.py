"""CheckpointSaverHook alone: its schedule, its listeners, its directory."""

from __future__ import annotations

import pytest
from conforms import conforms
from fake_session import FakeSession

from monsess.errors import HookError
from monsess.hooks import CheckpointSaverHook, CheckpointSaverListener
from monsess.testing import FakeClock


class Listener(CheckpointSaverListener):
    def __init__(self, name="l", calls=None, failing=False):
        self.name, self.calls, self.failing = name, [] if calls is None else calls, failing

    def begin(self):
        self.calls.append(f"{self.name}.begin")

    def end(self, session, step):
        self.calls.append(f"{self.name}.end@{step}")
        if self.failing:
            raise ValueError(self.name)


class TestCheckpointSaver:
    @conforms("BH-032")
    def test_no_cadence(self):
        with pytest.raises(ValueError, match="Either save_secs or save_steps should be provided"):
            CheckpointSaverHook("/ckpt")

    @pytest.mark.parametrize("value", [0, -1, True, "1"])
    def test_impossible_cadences(self, value):
        with pytest.raises(ValueError, match=f"invalid save_steps={value!r}"):
            CheckpointSaverHook(save_steps=value)
        with pytest.raises(ValueError, match=f"invalid save_secs={value!r}"):
            CheckpointSaverHook(save_secs=value)

    def test_saves_at_crossed_multiples(self):
        session = FakeSession(CheckpointSaverHook(save_steps=10))
        for _ in range(25):
            session.run()
        assert session.saves == [(10, True), (20, True)]

    def test_resumed_run_saves_at_the_same_steps(self):
        session = FakeSession(CheckpointSaverHook(save_steps=10), step=13)
        for _ in range(20):
            session.run()
        assert session.saved_steps == [20, 30]

    def test_several_steps_per_run(self):
        session = FakeSession(CheckpointSaverHook(save_steps=10))
        for _ in range(10):
            session.run(steps=4)
        assert session.saved_steps == [12, 20, 32, 40]

    def test_multiple_crossed_by_a_run_without_hooks_is_saved_at_the_next_run(self):
        session = FakeSession(CheckpointSaverHook(save_steps=10), step=8)
        session.run()
        session.global_step += 1
        session.run()
        assert session.saves == [(11, True)]

    def test_saves_by_seconds(self):
        with FakeClock() as clock:
            session = FakeSession(CheckpointSaverHook(save_secs=10))
            for _ in range(14):
                clock.advance(2.0)
                session.run()
        assert session.saves == [(5, False), (10, False)]

    def test_seconds_are_counted_from_the_start_of_the_session(self):
        with FakeClock() as clock:
            hook = CheckpointSaverHook(save_secs=10)
            clock.advance(100)
            session = FakeSession(hook)
            session.run()
        assert session.saves == []

    @conforms(
        "BH-031",
        instead="Both cadences may be given: whichever comes first saves, and neither resets the other's schedule.",
    )
    def test_both_cadences_keep_their_own_schedules(self):
        with FakeClock() as clock:
            session = FakeSession(CheckpointSaverHook(save_secs=10, save_steps=3))
            for _ in range(12):
                clock.advance(2.5)
                session.run()
        assert session.saves == [(3, True), (4, False), (6, True), (8, False), (9, True), (12, True)]

    def test_chief_alone_decides_about_seconds(self):
        with FakeClock() as clock:
            session = FakeSession(CheckpointSaverHook(save_secs=10, save_steps=100), chief=False, processes=2)
            for _ in range(101):
                clock.advance(5.0)
                session.run()
        assert session.saves == [(100, True)]

    def test_listeners_begin_are_registered_once_and_end(self):
        calls = []
        first, second = Listener("a", calls), Listener("b", calls)
        session = FakeSession(CheckpointSaverHook(save_steps=2, listeners=[first, second]))
        assert session.listeners == [first, second]
        session.run()
        session.recover(0)
        assert session.listeners == [first, second]
        for _ in range(3):
            session.run()
        session.end()
        assert calls == ["a.begin", "b.begin", "a.end@3", "b.end@3"]

    def test_listeners_are_registered_with_each_session(self):
        hook = CheckpointSaverHook(save_steps=2, listeners=[Listener()])
        assert len(FakeSession(hook).listeners) == 1
        assert len(FakeSession(hook).listeners) == 1

    def test_w06_every_listener_is_ended(self):
        calls = []
        listeners = [Listener("a", calls, failing=True), Listener("b", calls, failing=True), Listener("c", calls)]
        session = FakeSession(CheckpointSaverHook(save_steps=2, listeners=listeners))
        with pytest.raises(ValueError, match="a") as caught:
            session.end()
        assert calls[-3:] == ["a.end@0", "b.end@0", "c.end@0"]
        assert caught.value.__notes__ == ["raised by Listener.end", "a further listener failed: ValueError: b"]

    def test_no_listeners(self):
        assert FakeSession(CheckpointSaverHook(save_steps=2, listeners=None)).listeners == []

    def test_unusable_listeners(self):
        class NoEnd:
            begin = before_save = after_save = staticmethod(lambda *args: None)

        class Wrong(CheckpointSaverListener):
            def before_save(self, session):
                pass

        def refused(listeners, match):
            with pytest.raises(HookError, match=match):
                CheckpointSaverHook(save_steps=1, listeners=listeners)

        refused([Listener(), NoEnd()], r"listeners\[1\] \(TestCheckpointSaver.*NoEnd\) has no method 'end'")
        refused([Wrong()], r"before_save\(session\) cannot be called as before_save\(session, step\)")
        refused([Listener], r"is the class Listener, not an object. Write Listener\(\.\.\.\)")
        refused("listener", "must be an iterable")
        refused(Listener(), "must be an iterable of CheckpointSaverListener, found Listener")
        same = Listener()
        refused([same, same], r"listeners\[1\]: the same Listener object is listed twice")

    @pytest.mark.parametrize(
        ("hook_dir", "session_dir"),
        [
            ("/ckpt/run", "/ckpt/run/"),
            ("/ckpt/./run", "/ckpt/run"),
            ("file:///ckpt/run", "/ckpt/run"),
            ("memory://run/", "memory://run"),
            (None, "memory://run"),
        ],
    )
    def test_same_directory(self, hook_dir, session_dir):
        FakeSession(CheckpointSaverHook(hook_dir, save_steps=1), checkpoint_dir=session_dir)

    def test_path_objects_are_directories(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        FakeSession(CheckpointSaverHook(tmp_path / "run", save_steps=1), checkpoint_dir="run")

    def test_another_directory_is_refused(self):
        hook = CheckpointSaverHook("s3://key:secret@host/a", save_steps=1)
        with pytest.raises(ValueError, match=r"has checkpoint_dir .*, the session has") as caught:
            FakeSession(hook, checkpoint_dir="s3://key:secret@host/b")
        assert "secret" not in str(caught.value)

    def test_session_without_a_directory_is_refused(self):
        for hook_dir in (None, "/ckpt"):
            with pytest.raises(ValueError, match="the session has no checkpoint_dir"):
                FakeSession(CheckpointSaverHook(hook_dir, save_steps=1), checkpoint_dir=None)
