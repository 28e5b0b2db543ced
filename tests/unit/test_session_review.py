"""Faults that a review found, each with the run that showed it."""

from __future__ import annotations

import queue
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import monsess as ms


class History(ms.SessionRunHook):
    """Keeps a list that it goes on changing while a checkpoint is being written."""

    def begin(self):
        self.steps = []

    def after_run(self, run_context, run_values):
        self.steps.append(run_context.global_step)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_commit_holds_the_hook_state_of_its_step(tmp_path):
    written = threading.Event()

    class HoldTheWriter(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.global_step == 2:
                run_context.watch(None, lambda value: written.wait(20) and None)

    with ms.MonitoredTrainingSession(
        toy.init_fn,
        data=toy.batches(6),
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=2,
        max_in_flight=9,
        hooks=[History(), HoldTheWriter()],
    ) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
        written.set()
    from monsess.checkpoint.restore import find_restorable

    for step in (2, 4, 6):
        restored = find_restorable(ms.CheckpointStore(tmp_path), restore_step=step)
        assert restored is not None
        assert restored.session["hooks"]["History"] == {"steps": list(range(1, step + 1))}


def test_second_life_does_not_change_what_a_third_one_gets():
    seen = []

    class FailsOnce(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.global_step == 3 and len(seen) < 2:
                seen.append(list(history.steps))
                raise ConnectionError("passes by itself")

    history = History()
    with ms.MonitoredTrainingSession(
        toy.init_fn,
        data=toy.batches(4),
        hooks=[history, FailsOnce()],
        recovery=ms.Recovery(
            backoff_secs=0, is_transient=lambda error: isinstance(error, ConnectionError), allow_reinit=True
        ),
    ) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
    assert seen == [[1, 2, 3]] * 2
    assert history.steps == [1, 2, 3, 4]


def test_host_snapshot_of_a_typed_key_outlives_the_next_step(tmp_path):
    for last_step in (4, 8):
        with ms.MonitoredTrainingSession(
            toy.init_fn,
            data=toy.batches(8),
            checkpoint_dir=tmp_path,
            save_checkpoint_steps=1,
            checkpoint=ms.CheckpointOptions(snapshot="host"),
            hooks=[ms.StopAtStepHook(last_step=last_step)],
        ) as sess:
            while not sess.should_stop():
                sess.run(toy.train)
    toy.assert_same_bits(sess.state_copy(), toy.straight(8))


class Pump(ms.SessionRunHook):
    """Feeds the queue that the data reads, from a thread that fails after some batches."""

    def __init__(self, batches, error=None):
        self.queue = queue.Queue()
        self.batches = batches
        self.error = error
        self.lives = 0

    def after_create_session(self, session, coord):
        self.lives += 1

        def work():
            with coord.stop_on_exception():
                for index in range(self.batches):
                    self.queue.put(toy.batch(index))
                if self.error is not None:
                    raise self.error
                coord.request_stop()

        coord.register_thread(thread := threading.Thread(target=work, daemon=True))
        thread.start()

    def __iter__(self):
        while True:
            yield self.queue.get()


def test_wait_for_the_input_ends_when_its_thread_has_failed():
    pump = Pump(2, OSError("the source is gone"))
    with pytest.raises(OSError, match="the source is gone"):
        with ms.MonitoredTrainingSession(toy.init_fn, data=pump, hooks=[pump]) as sess:
            while not sess.should_stop():
                sess.run(toy.train)
    assert sess.stop_reason == ms.StopReason.ERROR


def test_wait_for_the_input_in_run_ends_when_its_thread_has_failed():
    pump = Pump(1, OSError("the source is gone"))
    with pytest.raises(OSError, match="the source is gone"):
        with ms.MonitoredTrainingSession(toy.init_fn, data=pump, hooks=[pump]) as sess:
            for _ in range(3):
                sess.run(toy.train)


def test_wait_for_the_input_ends_when_a_thread_asks_for_a_stop():
    pump = Pump(1)
    with ms.MonitoredTrainingSession(toy.init_fn, data=pump, hooks=[pump]) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
    assert sess.stop_reason == ms.StopReason.REQUESTED


def test_thread_that_fails_for_good_is_not_forgotten():
    pump = Pump(0, ConnectionError("again and again"))
    recovery = ms.Recovery(
        max_restarts=2, backoff_secs=0, is_transient=lambda e: isinstance(e, ConnectionError), allow_reinit=True
    )
    with pytest.raises(ConnectionError, match="again and again"):
        with ms.MonitoredTrainingSession(
            toy.init_fn, data=toy.batches(10_000), hooks=[pump], recovery=recovery
        ) as sess:
            while not sess.should_stop():
                sess.run(toy.train)
    assert pump.lives == 3


@pytest.mark.parametrize("engine", ["pmap", "shard_map"])
def test_functions_see_all_parts_of_a_stacked_output(engine):
    seen = {}

    class Look(ms.SessionRunHook):
        def before_run(self, run_context):
            return ms.SessionRunArgs({"name": "each", "function": lambda state, outputs: outputs["each"] * 1})

        def after_run(self, run_context, run_values):
            seen.update(jax.tree.map(np.asarray, run_values.results))

    @ms.train_step(engine=engine, reduce={"each": None})
    def step(state, batch):
        return state, {"each": batch["x"].sum(), "mean": batch["x"].mean()}

    with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), hooks=[Look()]) as sess:
        sess.run(step, {"x": np.arange(8, dtype=np.float32)})
    assert seen["name"].tolist() == seen["function"].tolist() == [1, 5, 9, 13]
