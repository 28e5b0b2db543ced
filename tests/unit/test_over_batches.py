"""Outputs of an eval step over many batches: exact weights, every reduction, and one transfer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import monsess as ms
from monsess import over_batches
from monsess.over_batches import OverBatches, counted_eval_step, counted_train_step

RANDOM = np.random.default_rng(5)


@pytest.fixture(scope="module")
def session():
    with ms.MonitoredTrainingSession(lambda: 2.0) as sess:
        yield sess


@pytest.fixture(scope="module")
def padding():
    with ms.MonitoredTrainingSession(lambda: 2.0, remainder="pad") as sess:
        yield sess


def results(session, step, batches, counted=counted_eval_step):
    step = counted(step)
    sums = OverBatches(step)
    for batch in batches:
        sums.add(session.run(step, *batch))
    return sums.results()


@ms.eval_step(reduce={"rows": "sum", "most": "max", "least": "min", "any": "max"})
def looks(state, batch, mask):
    x = batch["x"]
    return {
        "mean": ms.masked_mean(x, mask) * state,
        "rows": mask.sum(),
        "most": x.max(),
        "least": x.min(),
        "any": mask.any(),
        "deep": {"mean": ms.masked_mean(x, mask)},
    }


def test_every_row_counts_once_whatever_is_padded(padding):
    parts = [RANDOM.normal(size=rows).astype(np.float32) for rows in (8, 8, 3, 1)]
    found = results(padding, looks, [({"x": x},) for x in parts])
    rows = np.concatenate(parts)
    assert found["rows"] == 20
    assert found["mean"] == pytest.approx(2 * rows.mean(), rel=1e-6)
    assert found["deep/mean"] == pytest.approx(rows.mean(), rel=1e-6)
    assert (found["most"], found["least"], found["any"]) == (rows.max(), rows.min(), 1.0)
    assert all(type(value) is float for value in found.values())


@pytest.mark.parametrize(
    ("reduce", "engine"),
    [("mean", "pmap"), ("sum", "pmap"), ("max", "pmap"), ("min", "pmap"), ("mean", "shard_map")],
)
def test_outputs_are_put_together_as_over_the_devices(session, reduce, engine):
    step = ms.eval_step(reduce=reduce, engine=engine)(lambda state, batch: batch.mean())
    parts = [RANDOM.normal(size=rows).astype(np.float32) for rows in (4, 8, 16)]
    per_device = np.concatenate([part.reshape(4, -1).mean(axis=1) for part in parts])
    weights = np.repeat([1, 2, 4], 4)
    expected = {"mean": np.average(per_device, weights=weights), "sum": per_device.sum()}
    expected |= {"max": per_device.max(), "min": per_device.min()}
    assert results(session, step, [(part,) for part in parts]) == {"output": pytest.approx(expected[reduce], rel=1e-5)}


def test_large_whole_numbers_are_not_rounded(session):
    step = ms.eval_step(reduce={"big": "max", "small": "min", "unsigned": "max"})(
        lambda state: {"big": jnp.int32(2**31 - 1), "small": jnp.int32(-(2**31)), "unsigned": jnp.uint32(2**32 - 1)}
    )
    assert results(session, step, [()]) == {"big": 2.0**31 - 1, "small": -(2.0**31), "unsigned": 2.0**32 - 1}


def test_not_a_number_stays_one(session):
    step = ms.eval_step(lambda state, batch: {"loss": jnp.log(batch).mean(), "fine": batch.mean()})
    found = results(session, step, [(np.full(4, 1, np.float32),), (np.full(4, -1, np.float32),)])
    assert np.isnan(found["loss"])
    assert found["fine"] == 0.0


def test_more_batches_than_a_block_holds(session, monkeypatch):
    monkeypatch.setattr(over_batches, "_BLOCK", 4)
    step = ms.eval_step(reduce={"n": "sum"})(lambda state, batch: {"mean": batch.mean(), "n": jnp.int32(1)})
    batches = [(np.full(4, number, np.float32),) for number in range(11)]
    assert results(session, step, batches) == {"mean": 5.0, "n": 44.0}


def test_one_transfer_to_the_host(session, monkeypatch):
    step = counted_eval_step(ms.eval_step(lambda state, batch: {"mean": batch.mean(), "double": 2 * batch.mean()}))
    sums = OverBatches(step)
    transfers = []
    monkeypatch.setattr(
        over_batches.jax, "device_get", lambda arrays: transfers.append(arrays) or jax.tree.map(np.asarray, arrays)
    )
    with jax.transfer_guard_device_to_host("disallow"):
        for number in range(20):
            sums.add(session.run(step, np.full(4, number, np.float32)))
    assert sums.results() == {"double": 19.0, "mean": 9.5}
    assert [len(arrays) for arrays in transfers] == [1]


def test_hooks_see_the_outputs_by_their_names():
    step = counted_train_step(looks)
    seen = []

    class Sees(ms.SessionRunHook):
        def before_run(self, run_context):
            return ms.SessionRunArgs({"mean": "mean", "deep": "deep/mean"})

        def after_run(self, run_context, run_values):
            seen.append(jax.tree.map(float, run_values.results))

    with ms.MonitoredTrainingSession(lambda: 2.0, hooks=[Sees()], remainder="pad") as sess:
        state = float(sess.state)
        sess.run(step, {"x": np.arange(8, dtype=np.float32)})
        assert float(sess.state) == state
    assert seen == [{"mean": 7.0, "deep": 3.5}]


def test_one_value_per_device_is_refused():
    for reduce in (None, {"loss": None}):
        step = ms.eval_step(reduce=reduce)(lambda state, batch: {"loss": batch.mean()})
        with pytest.raises(ms.StepDefinitionError, match=r"keeps an output as one value per device \(reduce=None\)"):
            counted_eval_step(step)


def test_what_is_no_single_number_is_refused(session):
    step = ms.eval_step(lambda state, batch: {"confusion": jnp.zeros((2, 2)), "loss": batch.mean()})
    with pytest.raises(ms.StepDefinitionError, match=r"Output 'confusion' of .* is float32\[2, 2\]: what is evaluated"):
        results(session, step, [(np.zeros(4, np.float32),)])


def test_nothing_to_evaluate_is_an_error():
    with pytest.raises(ms.MonsessError, match="got no batch, so there is no result"):
        OverBatches(counted_eval_step(looks)).results()
