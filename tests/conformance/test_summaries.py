"""The behaviours of TensorFlow's tests of summaries: of the default ones of a session, and of `SummarySaverHook`."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import ticks
from conforms import conforms

import monsess as ms

pytest.importorskip("tensorboard")


@ms.train_step
def step(state):
    ms.summary.scalar("my_summary_tag", state["count"])
    return {"count": state["count"] + 1}, {"loss": 1 / (1 + state["count"])}


def in_tensorboard(folder):
    """Of each tag the steps that TensorBoard reads in a directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    return {tag: [event.step for event in found.Tensors(tag)] for tag in found.Tags()["tensors"]}


def train(folder, runs, *hooks, seconds=0.0, the_step=step, **arguments):
    """A session of so many runs, each of which takes ``seconds``."""
    with ms.testing.FakeClock() as clock:
        with ms.MonitoredTrainingSession(
            ticks.init_fn, checkpoint_dir=folder, hooks=[*hooks, ms.StopAtStepHook(last_step=runs)], **arguments
        ) as sess:
            while not sess.should_stop():
                sess.run(the_step)
                clock.advance(seconds)
    return in_tensorboard(folder)


def saver(folder, runs, seconds=0.0, the_step=step, **arguments):
    hook = ms.SummarySaverHook(**arguments)
    return train(folder, runs, hook, seconds=seconds, the_step=the_step, save_summaries_steps=None)


@conforms(
    "MS-019",
    "MS-020",
    instead="Written at step 1 and at multiples of 100, so that a resumed run writes the steps of a straight one, and "
    "into the events and metrics.jsonl alike. The rate is written at multiples of log_step_count_steps.",
)
def test_summaries_by_steps_are_in_the_checkpoint_dir_with_the_rate(tmp_path):
    found = train(tmp_path, 101, save_summaries_steps=100, log_step_count_steps=10, seconds=0.01)
    assert found["my_summary_tag"] == found["loss"] == [1, 100]
    assert found["global_step/sec"] == list(range(10, 101, 10))
    curves = ms.read_metrics(tmp_path).curves
    assert {tag: [point.step for point in points] for tag, points in curves.items()} == found


@conforms("MS-021", "MS-022")
def test_summaries_by_seconds_are_there_with_the_rate(tmp_path):
    arguments = {"save_summaries_steps": None, "save_summaries_secs": 0.1, "log_step_count_steps": 10}
    found = train(tmp_path, 21, seconds=0.03, **arguments)
    assert found["my_summary_tag"] == [1, 5, 9, 13, 17, 21]
    assert found["global_step/sec"] == [10, 20]


@conforms(
    "BH-065",
    instead="Without summaries= the hook logs every scalar output and what the step collects; an empty summaries= is "
    "refused.",
)
def test_nothing_to_summarise_is_refused(tmp_path):
    assert saver(tmp_path, 1, save_steps=1)["loss"] == [1]
    for nothing in ([], {}):
        with pytest.raises(ValueError, match="nothing to log"):
            ms.SummarySaverHook(save_steps=1, summaries=nothing)


@conforms(
    "BH-066",
    instead="There is no scaffold that could name a second one: summaries= says what to log, and what the step "
    "collects by monsess.summary is logged in any case.",
)
def test_what_is_named_is_logged_beside_what_the_step_collects(tmp_path):
    found = saver(tmp_path, 1, save_steps=1, summaries={"named": lambda state, outputs: state["count"]})
    assert found == {"named": [1], "my_summary_tag": [1]}


@conforms("BH-067")
def test_both_cadences_are_refused():
    with pytest.raises(ValueError, match="exactly one of save_steps and save_secs"):
        ms.SummarySaverHook(save_steps=10, save_secs=20, summaries=["loss"])


@conforms("BH-068")
def test_no_cadence_is_refused():
    with pytest.raises(ValueError, match="exactly one of save_steps and save_secs"):
        ms.SummarySaverHook(summaries=["loss"])


@conforms(
    "BH-069",
    "BH-070",
    instead="After the first step the multiples of save_steps: 1, 8, 16, 24 and not 1, 9, 17, 25, so that a resumed "
    "run logs the steps that a straight one logs. A function in summaries= runs for those steps alone.",
)
def test_saves_by_steps_and_looks_at_those_steps_alone(tmp_path):
    import jax

    calls = []

    def counted(state, outputs):
        jax.debug.callback(lambda: calls.append(1))
        return state["count"]

    found = saver(tmp_path, 30, save_steps=8, summaries={"count": counted})
    assert found["count"] == [1, 8, 16, 24]
    jax.effects_barrier()
    assert len(calls) == 4


@conforms("BH-071", instead="At step 1 and at multiples of 8, as everything with save_steps.")
def test_a_list_of_two_is_written_at_the_same_steps(tmp_path):
    def one(state, outputs):
        ms.summary.scalar("first", state["count"])

    def other(state, outputs):
        ms.summary.scalar("second", jnp.float32(2))

    found = saver(tmp_path, 10, save_steps=8, summaries=[one, other])
    assert found["first"] == found["second"] == [1, 8]


@conforms("BH-072")
def test_seconds_that_pass_with_every_step_save_every_step(tmp_path):
    assert saver(tmp_path, 4, seconds=0.5, save_secs=0.5)["loss"] == [1, 2, 3, 4]


@conforms("BH-073")
def test_seconds_that_pass_with_every_third_step(tmp_path):
    assert saver(tmp_path, 8, seconds=3.1, save_secs=9)["loss"] == [1, 4, 7]
