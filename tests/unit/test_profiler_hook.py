"""ProfilerHook: when it traces, where the traces lie, and that nothing about it disturbs a training."""

from __future__ import annotations

import glob
import gzip
import json
import os
import tempfile

import jax
import numpy as np
import pytest
import toy
import traces
from conforms import conforms
from fake_session import FakeSession

import monsess as ms
from monsess.testing import FakeClock

SMALL = jax.profiler.ProfileOptions()
SMALL.python_tracer_level = 0


def traced(folder, process="process_0"):
    """The names of the traces of a process, in the order of their steps."""
    places = glob.glob(f"{glob.escape(str(folder))}/{process}/plugins/profile/*")
    return sorted((os.path.basename(place) for place in places), key=lambda name: int(name.split("_")[1].split("-")[0]))


def steps_in(folder, name, process="process_0"):
    """The numbers of the steps that a trace shows."""
    return traces.steps_in(f"{folder}/{process}/plugins/profile/{name}")


def run(hook, runs, seconds=0.0, clock=None, steps=1, **session):
    """Runs of a fake session, each ``seconds`` after the one before; the traces there were after each of them."""
    fake = FakeSession(hook, **session)
    kept = []
    for _ in range(runs):
        if clock is not None:
            clock.advance(seconds)
        fake.run(steps=steps, loss=1.0)
        if hook._stored is not None:
            assert hook._stored.wait(60)
        kept.append([os.path.basename(place) for place in hook.traces])
    fake.end()
    return kept


def session(*hooks, **more):
    return ms.MonitoredTrainingSession(
        toy.init_fn, data=toy.batches(20), hooks=hooks, log_step_count_steps=None, **more
    )


def train(sess):
    while not sess.should_stop():
        sess.run(toy.train)


@pytest.fixture(scope="module")
def straight():
    return toy.straight(9)


class TestSchedule:
    @conforms("BH-082", "BH-083")
    def test_exactly_one_cadence(self):
        for cadences in ({}, {"save_steps": 1, "save_secs": 1}, {"save_steps": 1, "window": (1, 2)}):
            with pytest.raises(ValueError, match="exactly one of save_steps, save_secs and window"):
                ms.ProfilerHook(**cadences)

    @pytest.mark.parametrize("window", [3, (1,), (1, 2, 3), (0, 2), (3, 2), ("a", "b"), ()])
    def test_window_is_a_pair_of_steps(self, window):
        with pytest.raises(ValueError, match="window"):
            ms.ProfilerHook(window=window)

    @conforms("BH-086")
    def test_steps_of_a_window_are_given_once(self):
        with pytest.raises(ValueError, match="num_steps=3 was given with a window"):
            ms.ProfilerHook(window=(3, 4), num_steps=3)

    def test_options_are_those_of_jax(self):
        with pytest.raises(ValueError, match="invalid options="):
            ms.ProfilerHook(save_steps=5, options={"python_tracer_level": 0})

    def test_the_first_run_is_not_traced(self, tmp_path):
        kept = run(ms.ProfilerHook(save_steps=1, output_dir=tmp_path, options=SMALL), runs=2)
        assert kept == [[], ["step_2"]]

    @conforms("BH-087")
    def test_by_steps(self, tmp_path):
        kept = run(ms.ProfilerHook(save_steps=2, output_dir=tmp_path, options=SMALL), runs=5)
        assert [len(names) for names in kept] == [0, 1, 1, 2, 2]
        assert traced(tmp_path) == ["step_2", "step_4"]

    @conforms("BH-084", "BH-085")
    def test_by_seconds(self, tmp_path):
        with FakeClock() as clock:
            hook = ms.ProfilerHook(save_secs=2, output_dir=tmp_path, options=SMALL)
            fake = FakeSession(hook)
            kept = []
            for seconds in (0.0, 2.5, 0.1, 1.8, 0.1):
                clock.advance(seconds)
                fake.run(loss=1.0)
                assert hook._stored is None or hook._stored.wait(60)
                kept.append(len(hook.traces))
            fake.end()
        assert kept == [0, 1, 1, 1, 2]  # at 0, 2.5, 2.6, 4.4 and 4.5 s
        assert traced(tmp_path) == ["step_2", "step_5"]

    @conforms(
        "BH-088",
        instead="A trace is a folder `step_2` of the files that TensorBoard reads; there is no run metadata.",
    )
    def test_a_trace_has_the_name_of_its_step(self, tmp_path):
        run(ms.ProfilerHook(save_steps=1, output_dir=tmp_path, options=SMALL), runs=2)
        assert traced(tmp_path) == ["step_2"]
        assert steps_in(tmp_path, "step_2") == [2]

    def test_several_steps_in_one_trace(self, tmp_path):
        run(ms.ProfilerHook(save_steps=4, num_steps=3, output_dir=tmp_path, options=SMALL), runs=8)
        assert traced(tmp_path) == ["steps_4-6", "step_8"]  # the run ends inside the second one

    def test_runs_of_several_steps(self, tmp_path):
        run(ms.ProfilerHook(save_steps=10, output_dir=tmp_path, options=SMALL), runs=4, steps=5)
        assert traced(tmp_path) == ["steps_6-10", "steps_16-20"]

    def test_object_can_be_used_again(self, tmp_path):
        hook = ms.ProfilerHook(save_steps=2, output_dir=tmp_path, options=SMALL)
        for _ in range(2):
            assert run(hook, runs=2) == [[], ["step_2"]]


class TestInSession:
    """A real training: it ends in the same bits, whatever becomes of the profiler."""

    def test_traces_are_readable_and_lie_beside_the_checkpoints(self, tmp_path, straight, monkeypatch):
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        hook = ms.ProfilerHook(window=(3, 5))
        run = tmp_path / "run"
        with session(hook, ms.StopAtStepHook(last_step=9), checkpoint_dir=run) as sess:
            train(sess)
        toy.assert_same_bits(sess.state_copy(), straight)
        place = run / "profile"
        assert hook.traces == [f"{place}/process_0/plugins/profile/steps_3-5"]
        assert steps_in(place, "steps_3-5") == [3, 4, 5]
        (path,) = glob.glob(f"{hook.traces[0]}/*.trace.json.gz")
        with gzip.open(path) as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert any(name and name.startswith("$") for name in names)  # Python's functions
        assert ms.CheckpointStore(run).steps() == [9]
        assert ms.latest_checkpoint(run) == 9
        assert list(temporary.iterdir()) == []

    def test_on_a_store(self, straight):
        hook = ms.ProfilerHook(save_steps=4, options=SMALL)
        url = f"memory://{os.urandom(4).hex()}"
        with session(hook, ms.StopAtStepHook(last_step=9), checkpoint_dir=url) as sess:
            train(sess)
        toy.assert_same_bits(sess.state_copy(), straight)
        assert [place.rpartition("/")[2] for place in hook.traces] == ["step_4", "step_8"]
        storage = ms.CheckpointStore(url)._storage
        assert [name.rpartition(".")[2] for name in sorted(storage.walk("profile"))].count("pb") == 2
        assert ms.CheckpointStore(url).steps() == [9]

    def test_exception_inside_the_window(self, tmp_path, straight):
        class Fails(ms.SessionRunHook):
            def after_run(self, run_context, run_values):
                if run_context.global_step == 7:
                    raise ConnectionError("planned")

        hook = ms.ProfilerHook(window=(5, 8), output_dir=tmp_path, options=SMALL)
        with pytest.raises(ConnectionError, match="planned"):
            with session(hook, Fails(), checkpoint_dir=tmp_path / "run", save_checkpoint_steps=3) as sess:
                train(sess)
        assert steps_in(tmp_path, "steps_5-7") == [5, 6, 7]
        assert ms.latest_checkpoint(tmp_path / "run") == 6
        again = ms.ProfilerHook(window=(5, 8), output_dir=tmp_path, options=SMALL)
        with session(again, ms.StopAtStepHook(last_step=9), checkpoint_dir=tmp_path / "run") as sess:
            train(sess)  # resumed into the window
        toy.assert_same_bits(sess.state_copy(), straight)
        assert steps_in(tmp_path, "steps_7-8") == [7, 8]

    def test_recovery_inside_the_window(self, tmp_path, straight):
        class FailsOnce(ms.SessionRunHook):
            def after_run(self, run_context, run_values):
                if run_context.global_step == 6 and not run_context.session.recoveries:
                    raise ConnectionError("planned")

        recovery = ms.Recovery(is_transient=lambda error: isinstance(error, ConnectionError), backoff_secs=0)
        hook = ms.ProfilerHook(window=(5, 8), output_dir=tmp_path, options=SMALL)
        hooks = [hook, FailsOnce(), ms.StopAtStepHook(last_step=9)]
        with session(*hooks, checkpoint_dir=tmp_path / "run", save_checkpoint_steps=4, recovery=recovery) as sess:
            train(sess)
        assert sess.recoveries == 1
        toy.assert_same_bits(sess.state_copy(), straight)
        assert {"steps_5-6", "steps_5-8"} == set(traced(tmp_path))
        assert steps_in(tmp_path, "steps_5-8") == [5, 6, 7, 8]

    def test_end_inside_the_window(self, tmp_path, straight):
        hook = ms.ProfilerHook(window=(8, 12), output_dir=tmp_path, options=SMALL)
        with session(hook, ms.StopAtStepHook(last_step=9)) as sess:
            train(sess)
        toy.assert_same_bits(sess.state_copy(), straight)
        assert steps_in(tmp_path, "steps_8-9") == [8, 9]

    def test_end_of_the_data_inside_the_window(self, tmp_path):
        hook = ms.ProfilerHook(window=(20, 24), output_dir=tmp_path, options=SMALL)
        with session(hook) as sess:
            with pytest.raises(ms.EndOfData):
                while True:
                    sess.run(toy.train)
        assert traced(tmp_path) == ["step_20"]

    def test_window_beyond_the_end(self, tmp_path, straight, lines):
        hook = ms.ProfilerHook(window=(10, 12), output_dir=tmp_path, options=SMALL)
        with session(hook, ms.StopAtStepHook(last_step=9)) as sess:
            train(sess)
        toy.assert_same_bits(sess.state_copy(), straight)
        assert traced(tmp_path) == hook.traces == []
        assert "ProfilerHook: the run ends at step 9, before the window (10, 12)." in lines()

    def test_two_profilers(self, tmp_path, straight, lines):
        first = ms.ProfilerHook(window=(3, 5), output_dir=tmp_path / "first", options=SMALL)
        second = ms.ProfilerHook(window=(4, 5), output_dir=tmp_path / "second", options=SMALL)
        with session(first, second, ms.StopAtStepHook(last_step=9)) as sess:
            train(sess)
        toy.assert_same_bits(sess.state_copy(), straight)
        assert steps_in(tmp_path / "first", "steps_3-5") == [3, 4, 5]
        assert second.traces == []
        said = [line for line in lines() if line.startswith("ProfilerHook: no trace from step 4 on: RuntimeError")]
        assert len(said) == 1

    def test_somebody_elses_profiler_goes_on(self, tmp_path, straight):
        hook = ms.ProfilerHook(save_steps=3, output_dir=tmp_path / "hook", options=SMALL)
        with jax.profiler.trace(str(tmp_path / "other"), profiler_options=SMALL):
            with session(hook, ms.StopAtStepHook(last_step=9)) as sess:
                train(sess)
        toy.assert_same_bits(sess.state_copy(), straight)
        assert hook.traces == []
        assert glob.glob(f"{tmp_path}/other/plugins/profile/*/*.xplane.pb")

    def test_store_that_refuses_costs_the_trace_only(self, tmp_path, straight, lines):
        (tmp_path / "file").write_text("in the way")
        hook = ms.ProfilerHook(save_steps=4, output_dir=tmp_path / "file", options=SMALL)
        with session(hook, ms.StopAtStepHook(last_step=9)) as sess:
            train(sess)
        toy.assert_same_bits(sess.state_copy(), straight)
        assert hook.traces == []
        assert len([line for line in lines() if line.startswith("The trace of step 4 is lost: StorageError")]) == 1

    def test_without_a_directory_nothing_is_recorded(self, lines):
        hook = ms.ProfilerHook(save_steps=2)
        with session(hook, ms.StopAtStepHook(last_step=5)) as sess:
            train(sess)
        assert hook.traces == []
        assert "ProfilerHook records nothing here: there is no output_dir and no checkpoint_dir." in lines()

    def test_options_without_a_directory(self):
        with pytest.raises(ValueError, match="storage_options were given without an output_dir"):
            ms.ProfilerHook(save_steps=1, storage_options={"key": "value"})

    def test_trace_holds_the_work_of_the_devices(self, tmp_path):
        @ms.train_step
        def matmul(state):
            return state, {"mean": (state @ state).mean()}

        hook = ms.ProfilerHook(window=(3, 3), output_dir=tmp_path, options=SMALL)
        with ms.MonitoredTrainingSession(
            lambda: np.ones((200, 200), np.float32),
            hooks=[hook, ms.StopAtStepHook(last_step=5)],
            log_step_count_steps=None,
        ) as sess:
            while not sess.should_stop():
                sess.run(matmul)
        names = {name for name, _ in traces.events_in(hook.traces[0])}
        assert any("psum" in name for name in names), sorted(names)  # the mean over the devices
