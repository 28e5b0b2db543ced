"""GoodputHook: the parts add up to the wall time, restarts and lost work included."""

from __future__ import annotations

import gc
import json
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ticks
import toy
from fake_session import FakeSession

import monsess as ms
from monsess.hooks._note import NAME
from monsess.storage import Storage
from monsess.testing import FakeClock

PARTS = {"input", "compile", "step", "hooks", "save", "loop", "start", "lost", "down"}


@pytest.fixture
def clock():
    with FakeClock(start=1000.0) as clock:
        yield clock


def some(**parts):
    """What the totals are expected to be: these parts, the others 0."""
    totals = {**dict.fromkeys(PARTS, 0.0), **parts}
    return pytest.approx({**totals, "wall": sum(totals.values())})


def steps(session, clock, count, seconds=1.0, part="step"):
    """Runs that take so long each, of which half is ``part`` and half the loop's own."""
    for _ in range(count):
        clock.advance(seconds)
        session.seconds[part] += seconds / 2
        session.run(loss=1.0)


def noted(hook, step):
    """Wait until the note is as of a step."""
    note = hook._note
    if note is not None and note._thread is not None:
        ticks.wait_until(lambda: note._newest[0] == step)
        ticks.wait_until(lambda: note.read() is not None and note._storage.read(NAME) == note._content())


class Attempt:
    """One attempt of a run whose checkpoints hold the state of the hook only."""

    def __init__(self, folder, clock, start=0.0, restored=None, step=0, **hook):
        self.hook = ms.GoodputHook(**hook)
        self.clock = clock
        session = self.session = FakeSession.__new__(FakeSession)
        storage = Storage(folder)

        def create(fake=session):
            clock.advance(start)
            fake.storage = storage
            fake.hooks[0].after_create_session(fake, fake.coord)

        session.create = create
        session.__init__(self.hook, step=step, restored=None if restored is None else [restored])

    def run(self, count, seconds=1.0, part="step", wait=True):
        steps(self.session, self.clock, count, seconds, part)
        if wait:
            noted(self.hook, self.session.global_step)  # the thread reads the clock of now
        return json.loads(json.dumps(self.hook.state_dict()))

    def kill(self):
        """Leave behind what a killed attempt does: nothing is told to the hook any more."""
        note = self.hook._note
        if note is not None and note._thread is not None:
            note.stop()
            note._thread.join()


class TestAccount:
    def test_parts_add_up(self, clock):
        hook = ms.GoodputHook()
        session = FakeSession(hook)
        for part in ("input", "compile", "step", "hooks", "save"):
            steps(session, clock, 4, part=part)
        session.hook_seconds = {"GoodputHook": 2.0}
        assert hook.totals == some(input=2, compile=2, step=2, hooks=2, save=2, loop=10)
        assert hook.hooks == {"GoodputHook": 2.0}
        assert hook.goodput == pytest.approx(12 / 20)
        session.end()
        clock.advance(100)
        assert hook.totals["wall"] == 20  # of the session, and not of what follows

    def test_start(self, tmp_path, clock):
        attempt = Attempt(tmp_path, clock, start=7.0)
        attempt.run(2)
        assert attempt.hook.totals == some(start=7, step=1, loop=1)

    def test_recorded_at_multiples_and_at_the_end(self, clock, lines):
        session = FakeSession(ms.GoodputHook(every_n_steps=10))
        steps(session, clock, 25)
        session.end()
        assert [(step, event) for step, event, _ in session.recorded] == [(n, "goodput") for n in (10, 20, 25)]
        fields = session.recorded[0][2]
        assert fields["totals"] == some(step=5, loop=5)
        assert (fields["lost_steps"], fields["restarts"]) == (0, 0)
        assert session.logged == [(n, {"goodput": pytest.approx(1.0)}) for n in (10, 20, 25)]
        assert "goodput 100.0 % of 25.0 s: step 12.5 s, loop 12.5 s" in lines()

    def test_recorded_by_seconds(self, clock):
        session = FakeSession(ms.GoodputHook(every_n_steps=None, every_n_secs=10))
        steps(session, clock, 25)
        assert [step for step, *_ in session.recorded] == [10, 20]

    def test_chief_alone_records(self, clock, lines):
        session = FakeSession(ms.GoodputHook(every_n_steps=2), chief=False, processes=2)
        steps(session, clock, 5)
        session.end()
        assert session.recorded == session.logged == lines() == []

    def test_a_session_without_a_step_records_nothing(self, tmp_path, clock):
        session = FakeSession(ms.GoodputHook())
        session.end()
        attempt = Attempt(tmp_path, clock)
        attempt.session.end()
        assert session.recorded == session.logged == []
        assert list(tmp_path.iterdir()) == []

    def test_an_object_can_be_used_again(self, clock):
        hook = ms.GoodputHook()
        for _ in range(2):
            session = FakeSession(hook)
            steps(session, clock, 4)
            session.end()
            assert hook.totals["wall"] == 4

    @pytest.mark.parametrize("value", [0, -1, True, 1.5])
    def test_cadences(self, value):
        with pytest.raises(ValueError, match="every_n_steps"):
            ms.GoodputHook(every_n_steps=value)
        with pytest.raises(ValueError, match="Either every_n_steps or every_secs"):
            ms.GoodputHook(every_n_steps=None)


class TestRestarts:
    def test_killed_and_resumed(self, tmp_path, clock):
        first = Attempt(tmp_path, clock, start=2)
        stored = first.run(5)  # the checkpoint of step 5, at 7 s
        first.run(3)  # up to step 8, at 10 s
        clock.advance(0.5)  # of step 9
        first.kill()
        clock.advance(60)
        second = Attempt(tmp_path, clock, start=4, restored=stored, step=5)
        assert second.hook.totals == some(start=2 + 4, step=2.5, loop=2.5, lost=3, down=60.5)
        assert (second.hook.lost_steps, second.hook.restarts) == (3, 1)
        stored = second.run(5)
        assert second.hook.totals == some(start=6, step=5, loop=5, lost=3, down=60.5)
        assert second.hook.totals["wall"] == clock.monotonic() - 1000

        second.run(2)
        second.kill()
        third = Attempt(tmp_path, clock, restored=stored, step=10)
        third.run(1)
        assert third.hook.totals == some(start=6, step=5.5, loop=5.5, lost=5, down=60.5)
        assert (third.hook.lost_steps, third.hook.restarts) == (5, 2)
        assert third.hook.totals["wall"] == clock.monotonic() - 1000

    def test_killed_again_and_again_before_a_newer_checkpoint(self, tmp_path, clock):
        first = Attempt(tmp_path, clock)
        stored = first.run(5)
        first.run(2)
        first.kill()
        for number in (1, 2, 3):
            clock.advance(10)
            attempt = Attempt(tmp_path, clock, start=1, restored=stored, step=5)
            assert (attempt.hook.lost_steps, attempt.hook.restarts) == (2 * number, number)
            attempt.run(2)
            attempt.kill()
        assert attempt.hook.totals == some(step=2.5 + 1, loop=2.5 + 1, start=1, lost=2 + 3 + 3, down=30)
        assert attempt.hook.totals["wall"] == clock.monotonic() - 1000

    def test_killed_before_the_first_checkpoint(self, tmp_path, clock):
        first = Attempt(tmp_path, clock, start=2)
        first.run(4)
        first.kill()
        clock.advance(10)
        second = Attempt(tmp_path, clock, start=3)
        assert second.hook.totals == some(start=3, lost=6, down=10)
        assert (second.hook.lost_steps, second.hook.restarts) == (4, 1)

    def test_killed_before_its_first_step(self, tmp_path, clock):
        first = Attempt(tmp_path, clock)
        stored = first.run(5)
        first.run(2)
        first.kill()
        clock.advance(10)
        Attempt(tmp_path, clock, start=5, restored=stored, step=5).kill()
        clock.advance(10)
        third = Attempt(tmp_path, clock, restored=stored, step=5)
        assert third.hook.totals == some(step=2.5, loop=2.5, lost=2, down=25)
        assert third.hook.totals["wall"] == clock.monotonic() - 1000

    def test_an_error_counts_as_a_kill(self, tmp_path, clock):
        first = Attempt(tmp_path, clock)
        stored = first.run(5)
        first.run(2)
        clock.advance(1)
        first.hook.on_error(first.session, ValueError())
        clock.advance(10)
        second = Attempt(tmp_path, clock, restored=stored, step=5)
        assert second.hook.totals == some(step=2.5, loop=2.5, lost=3, down=10)

    def test_a_clean_end_costs_nothing(self, tmp_path, clock):
        first = Attempt(tmp_path, clock)
        stored = first.run(5)
        clock.advance(2)  # the final save
        first.session.seconds["save"] += 2
        first.session.end()
        clock.advance(10**6)
        second = Attempt(tmp_path, clock, start=1, restored=stored, step=5)
        second.run(2)
        assert second.hook.totals == some(step=3.5, loop=3.5, save=2, start=1)
        assert (second.hook.lost_steps, second.hook.restarts) == (0, 0)

    def test_a_preemption_costs_the_time_until_the_run_goes_on(self, tmp_path, clock):
        first = Attempt(tmp_path, clock)
        stored = first.run(5)
        first.session.stop_reason = ms.StopReason.PREEMPTED
        first.session.end()
        clock.advance(30)
        second = Attempt(tmp_path, clock, restored=stored, step=5)
        assert second.hook.totals == some(step=2.5, loop=2.5, down=30)
        assert (second.hook.lost_steps, second.hook.restarts) == (0, 1)

    def test_going_back_from_a_clean_end(self, tmp_path, clock):
        first = Attempt(tmp_path, clock)
        stored = first.run(5)
        first.run(4)
        first.session.end()
        clock.advance(1000)
        second = Attempt(tmp_path, clock, restored=stored, step=5)
        assert second.hook.totals == some(step=2.5, loop=2.5, lost=4)
        assert (second.hook.lost_steps, second.hook.restarts) == (4, 1)

    def test_recovery_inside_the_process(self, tmp_path, clock):
        attempt = Attempt(tmp_path, clock, start=1)
        stored = attempt.run(5)
        attempt.run(3)
        attempt.session.left_behind = 8, clock.monotonic()
        clock.advance(2)  # the back-off
        attempt.hook.load_state_dict(stored)
        attempt.session.recoveries += 1
        attempt.session.global_step = 5
        attempt.session.create()
        assert attempt.hook.totals == some(start=1 + 2 + 1, step=2.5, loop=2.5, lost=3)
        attempt.run(2)
        assert attempt.hook.totals == some(start=4, step=3.5, loop=3.5, lost=3)
        assert (attempt.hook.lost_steps, attempt.hook.restarts) == (3, 1)
        attempt.kill()
        second = Attempt(tmp_path, clock, restored=stored, step=5)  # killed before a newer checkpoint
        assert (second.hook.lost_steps, second.hook.restarts) == (5, 2)
        assert second.hook.totals["wall"] == clock.monotonic() - 1000

    def test_another_run_in_the_same_place_is_another_account(self, tmp_path, clock):
        first = Attempt(tmp_path, clock)
        first.run(5)
        first.kill()
        note = json.loads((tmp_path / NAME).read_text())
        (tmp_path / NAME).write_text(json.dumps({**note, "run_id": "another"}))
        second = Attempt(tmp_path, clock, start=1)
        assert second.hook.totals == some(start=1)

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"run_id": "run"}', '{"run_id": "run", "step": "x"}'])
    def test_a_note_that_cannot_be_read_is_no_obstacle(self, tmp_path, clock, content):
        (tmp_path / NAME).write_text(content)
        attempt = Attempt(tmp_path, clock, start=1)
        attempt.run(2)
        assert attempt.hook.totals == some(start=1, step=1, loop=1)


class TestNote:
    @pytest.mark.parametrize("state", [{}, {"totals": {}}, {"totals": [], "hooks": {}, "lost_steps": 0, "restarts": 0}])
    def test_a_state_that_cannot_be_read_is_no_obstacle(self, tmp_path, clock, lines, state):
        attempt = Attempt(tmp_path, clock, restored=state, step=5)
        attempt.run(2)
        assert attempt.hook.totals == some(step=1, loop=1)
        assert any("The account of the checkpoint cannot be read" in line for line in lines())

    def test_as_of_the_newest_step_on_a_local_path(self, tmp_path, clock):
        attempt = Attempt(tmp_path, clock)
        for step in range(1, 8):
            attempt.run(1)
            ticks.wait_until(lambda n=step: (attempt.hook._note.read() or {}).get("step") == n, seconds=5)
        attempt.kill()

    def test_every_step_is_noted_however_the_steps_come(self, tmp_path):
        """The hook sleeps while the thread looks by itself, and wakes it once that has ended."""
        seed = random.randrange(10**6)
        print("seed", seed)
        choose = random.Random(seed)
        hook, asleep = ms.GoodputHook(), []
        with ms.MonitoredTrainingSession(
            ticks.init_fn, checkpoint_dir=tmp_path, hooks=[hook], save_checkpoint_secs=None, log_step_count_steps=None
        ) as sess:
            for _ in range(60):
                for _ in range(choose.randint(1, 6)):
                    sess.run(ticks.one)
                    asleep.append(bool(sess._hooks._asleep))
                if choose.random() < 0.5:
                    time.sleep(choose.uniform(0, 0.05))
                else:
                    ticks.wait_until(lambda: (hook._note.read() or {}).get("step") == sess.global_step, 10)
        assert any(asleep)

    def test_a_file_that_is_slow_is_written_less_often(self, tmp_path, clock, monkeypatch):
        from monsess.hooks import _note

        def slow(file, data, offset, pwrite=_note.os.pwrite):
            slept.append(1)
            time.sleep(0.01)
            return pwrite(file, data, offset)

        slept = []
        monkeypatch.setattr(_note.os, "pwrite", slow)
        attempt = Attempt(tmp_path, clock)
        begun = time.monotonic()
        while time.monotonic() < begun + 2.2:
            attempt.run(1, seconds=0.01, wait=False)
            time.sleep(0.005)
        # From the second on each is followed by half a second without one; it would be 200.
        assert 3 <= len(slept) <= 6
        attempt.hook._note.close(None, 5)

    def test_a_full_disk_costs_the_note_only(self, tmp_path, clock, monkeypatch, lines):
        from monsess.hooks import _note

        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(_note.os, "pwrite", full)
        attempt = Attempt(tmp_path, clock)
        attempt.run(1, wait=False)
        ticks.wait_until(lambda: (tmp_path / NAME).exists())
        attempt.run(4, wait=False)
        attempt.hook._note._thread.join(5)
        assert len([line for line in lines() if "No space left on device" in line]) == 1
        assert attempt.hook.totals["wall"] == 5

    def test_on_a_store(self, clock):
        url = "memory://goodput-note"
        first = Attempt(url, clock)
        stored = first.run(5, wait=False)
        first.run(1, wait=False)
        ticks.wait_until(lambda: first.hook._note.read() is not None)
        first.kill()  # as of some seconds ago is as of step 1 here
        note = json.loads(first.session.storage.read(NAME))
        assert 1 <= note["step"] <= 6
        second = Attempt(url, clock, restored=stored, step=5)
        assert second.hook.lost_steps <= 1
        second.run(2, wait=False)
        second.session.end()
        assert json.loads(second.session.storage.read(NAME))["clean"] is True


class TestInSession:
    """A real training."""

    def test_adds_up_to_the_wall_time(self, tmp_path, figures):
        @ms.eval_step
        def evaluate(state, batch):
            return {"loss": jnp.mean(batch["x"])}

        class Evaluates(ms.SessionRunHook):
            def after_run(self, run_context, run_values):
                if run_context.global_step % 5 == 0:
                    outputs = run_context.session.run(evaluate, toy.batch(0))
                    float(outputs["loss"])
                    time.sleep(0.05)

        class Slow:
            def __iter__(self):
                for index in range(30):
                    time.sleep(0.01)
                    yield toy.batch(index)

        hook = ms.GoodputHook(every_n_steps=10)
        begun = time.monotonic()
        with ms.MonitoredTrainingSession(
            toy.init_fn, data=Slow(), checkpoint_dir=tmp_path, save_checkpoint_steps=10, hooks=[hook, Evaluates()]
        ) as sess:
            made = time.monotonic()
            while not sess.should_stop():
                sess.run(toy.train)
                time.sleep(0.01)
        wall = time.monotonic() - begun
        totals = hook.totals
        figures.append(f"goodput: the parts add up to {100 * totals['wall'] / wall:.1f} % of the wall time")
        # The session's own making before its hooks begin, and what follows their end, are not theirs.
        assert totals["wall"] == pytest.approx(wall, rel=0.02, abs=0.15)
        assert totals["start"] <= made - begun
        assert totals["hooks"] >= 6 * 0.05
        assert totals["input"] + totals["loop"] >= 0.25
        assert sum(sess.seconds.values()) <= wall
        events = [event for event in ms.read_metrics(tmp_path).events if event["event"] == "goodput"]
        assert [event["step"] for event in events] == [10, 20, 30, 30]
        assert set(events[-1]["totals"]) == {*PARTS, "wall"}
        assert events[-1]["hooks"]["TestInSession.test_adds_up_to_the_wall_time.<locals>.Evaluates"] >= 6 * 0.05
        assert ms.CheckpointStore(tmp_path).steps() == [10, 20, 30]

    def test_a_recovery_that_needs_two_attempts_counts_what_was_lost_once(self, tmp_path):
        class Passing(Exception):
            pass

        class Fails(ms.SessionRunHook):
            created, failed = 0, False

            def after_create_session(self, session, coord):
                self.created += 1
                if self.created == 2:
                    raise Passing

            def after_run(self, run_context, run_values):
                if run_context.global_step == 17 and not self.failed:
                    self.failed = True
                    raise Passing

        hook = ms.GoodputHook()
        with ms.MonitoredTrainingSession(
            ticks.init_fn,
            checkpoint_dir=tmp_path,
            hooks=[hook, Fails(), ms.StopAtStepHook(20)],
            save_checkpoint_steps=10,
            recovery=ms.Recovery(backoff_secs=0.01, is_transient=lambda error: isinstance(error, Passing)),
        ) as sess:
            while not sess.should_stop():
                sess.run(ticks.one)
        assert hook.lost_steps == 7
        assert hook.totals["lost"] > 0

    def test_a_session_that_nobody_closes_leaves_no_thread_behind(self, tmp_path):
        def thread():
            hook = ms.GoodputHook()
            sess = ms.MonitoredTrainingSession(ticks.init_fn, checkpoint_dir=tmp_path, hooks=[hook])
            sess.__enter__()
            sess.run(ticks.one)
            return hook._note._thread

        left = thread()
        gc.collect()
        left.join(10)
        assert not left.is_alive()

    def test_training_is_the_same(self, tmp_path):
        with ms.MonitoredTrainingSession(
            toy.init_fn, data=toy.batches(6), checkpoint_dir=tmp_path, hooks=[ms.GoodputHook(every_n_steps=2)]
        ) as sess:
            while not sess.should_stop():
                sess.run(toy.train)
        toy.assert_same_bits(sess.state_copy(), toy.straight(6))

    def test_eval_steps_of_hooks_are_counted_once(self):
        slept = 0.2

        @ms.eval_step
        def evaluate(state, batch):
            def wait(x):
                time.sleep(slept)
                return np.float32(0)

            return {"x": jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), batch["x"][0, 0])}

        class Evaluates(ms.SessionRunHook):
            def after_run(self, run_context, run_values):
                if run_context.global_step > 1:
                    float(run_context.session.run(evaluate, toy.batch(0))["x"])

            def end(self, session):
                float(session.run(evaluate, toy.batch(0))["x"])

        with ms.MonitoredTrainingSession(
            toy.init_fn, data=toy.batches(5), hooks=[Evaluates()], log_step_count_steps=None
        ) as sess:
            while not sess.should_stop():
                sess.run(toy.train)
            begun = time.monotonic()
        spent = sess.seconds
        assert time.monotonic() - begun >= slept
        assert spent["hooks"] >= 5 * slept
        assert spent["step"] < 4 * slept
