"""Sessions whose retention ranks checkpoints by an output of the step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import monsess as ms
from monsess.checkpoint.commit import decode

LOSSES = [5.0, 3.0, float("nan"), 1.0, 2.0, 4.0, 6.0]


@ms.train_step
def falls_and_rises(state, batch):
    return state + 1, {"loss": batch.mean(), "each": {"acc": -batch.mean()}, "rows": jnp.zeros(3)}


def run(url: str, keep: ms.Retention, losses: list[float] = LOSSES) -> ms.MonitoredSession:
    rows = jax.local_device_count()
    data = [np.full(rows, loss, np.float32) for loss in losses]
    with ms.MonitoredTrainingSession(
        lambda: jnp.zeros((), jnp.int32), data=data, checkpoint_dir=url, save_checkpoint_steps=1, keep=keep
    ) as session:
        while not session.should_stop():
            session.run(falls_and_rises)
    return session


def test_the_best_and_the_newest_stay(tmp_path):
    run(str(tmp_path), ms.KeepBest(2, "loss"))
    assert ms.CheckpointStore(tmp_path).steps() == [4, 5, 7]


def test_a_path_into_the_outputs_and_the_highest(tmp_path):
    run(str(tmp_path), ms.KeepBest(1, "each/acc", mode="max"))
    assert ms.CheckpointStore(tmp_path).steps() == [4, 7]


def test_the_rank_survives_a_restart(tmp_path):
    run(str(tmp_path), ms.KeepBest(1, "loss"), LOSSES[:5])
    (tmp_path / "run.json").unlink()  # only the commit records tell now
    session = run(str(tmp_path), ms.KeepBest(1, "loss"))
    assert session.restored_from == 5
    assert ms.CheckpointStore(tmp_path).steps() == [4, 5, 7], "the best, the one restored from, and the newest"


def test_a_commit_holds_finite_values_only(tmp_path):
    run(str(tmp_path), ms.KeepLast(9) | ms.KeepBest(1, "loss"))
    record = {step: decode((tmp_path / str(step) / "commit.json").read_bytes(), step) for step in (3, 4)}
    assert record[3].metrics == {}
    assert record[4].metrics == {"loss": 1.0}
    assert record[3].started == record[4].started <= record[3].time


@pytest.mark.parametrize(("name", "text"), [("lost", "Its outputs: .*'loss'"), ("rows", "not a single number")])
def test_what_cannot_be_ranked_is_found_out_in_the_first_step(tmp_path, name, text):
    with pytest.raises(ms.FetchError, match=text):
        run(str(tmp_path), ms.KeepBest(1, name), LOSSES[:1])


def test_a_value_of_an_evaluation_may_come_later(tmp_path):
    run(str(tmp_path), ms.KeepLast(1) | ms.KeepBest(1, "eval/loss"))
    assert ms.CheckpointStore(tmp_path).steps() == [7]
