"""What a step returns over several devices: reductions, stacking, bounded work in flight, random streams."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import monsess as ms

X = np.arange(8, dtype=np.float32)


@pytest.fixture(params=["pmap", "shard_map"])
def engine(request):
    return request.param


def run(step, *args, init=lambda: jnp.zeros(())):
    with ms.MonitoredTrainingSession(init) as sess:
        return jax.tree.map(np.asarray, sess.run(step, *args))


def test_every_reduction(engine):
    @ms.eval_step(
        engine=engine, reduce={"sum": "sum", "max": "max", "min": "min", "each": None, "any": "max", "n": "mean"}
    )
    def step(state, batch):
        x = batch["x"]
        return {
            "mean": x.mean(),
            "sum": x.sum(),
            "max": x.max(),
            "min": x.min(),
            "each": x.sum(),
            "any": (x > 6).any(),
            "n": jnp.int32(3) + jax.lax.axis_index("data"),
            "deep": {"z": x.mean() * 1j},
        }

    found = run(step, {"x": X})
    assert found["mean"] == 3.5
    assert found["sum"] == 28
    assert found["max"] == 7
    assert found["min"] == 0
    assert found["each"].tolist() == [1, 5, 9, 13]
    assert found["any"].dtype == np.bool_
    assert bool(found["any"])
    assert found["n"].dtype == np.float32
    assert found["n"] == 4.5
    assert found["deep"]["z"] == 3.5j


def test_narrow_floats_are_reduced_in_float32(engine):
    @ms.eval_step(engine=engine)
    def step(state, batch):
        return {"half": jnp.float16(30_000), "brain": jnp.bfloat16(3)}

    found = run(step, {"x": X})
    assert found["half"] == 30_000
    assert found["half"].dtype == np.float32
    assert found["brain"] == 3


def test_narrow_integers_do_not_overflow(engine):
    kinds = {"mean": jnp.int8(100), "sum": jnp.uint8(200), "max": jnp.int16(30_000), "wide": jnp.int32(2**30)}

    @ms.eval_step(engine=engine, reduce={"mean": "mean", "sum": "sum", "max": "max", "wide": "mean"})
    def step(state, batch):
        return dict(kinds)

    found = run(step, {"x": X})
    assert found["mean"] == 100
    assert found["sum"] == 200 * jax.local_device_count()
    assert (found["max"], found["max"].dtype) == (30_000, np.int16)
    assert found["wide"] == 2**30


@pytest.mark.parametrize("how", ["max", "min", "mean", "sum"])
def test_nan_on_one_device_is_nan_for_all(engine, how):
    @ms.eval_step(engine=engine, reduce={"loss": how})
    def step(state, batch):
        return {"loss": jnp.where(jax.lax.axis_index("data") == 3, jnp.nan, batch["x"].sum())}

    assert np.isnan(run(step, {"x": X})["loss"])


def test_reduce_none_stacks_everything(engine):
    @ms.eval_step(engine=engine, reduce=None)
    def step(state, batch):
        return batch["x"] * 2, {"device": jax.lax.axis_index("data")}

    values, more = run(step, {"x": X})
    assert values.tolist() == (X * 2).reshape(4, 2).tolist()
    assert more["device"].tolist() == [0, 1, 2, 3]


def test_step_without_a_batch_and_step_with_further_arguments(engine):
    @ms.train_step(engine=engine)
    def count(state):
        return state + 1, {"before": state}

    @ms.train_step(engine=engine)
    def scaled(state, batch, factor=1.0):
        return state + jax.lax.pmean(batch["x"].mean(), "data") * factor, {}

    with ms.MonitoredTrainingSession(lambda: jnp.zeros(())) as sess:
        assert float(sess.run(count)["before"]) == 0
        assert sess.run(count) is not None
        sess.run(scaled, {"x": X})
        assert float(sess.state) == 5.5
        sess.run(scaled, {"x": X}, 10.0)
        assert float(sess.state) == 40.5
        assert sess.global_step == 4


def test_steps_per_run_counts_updates_and_auxiliary_steps_do_not(tmp_path):
    @ms.train_step(steps_per_run=3)
    def three(state, batch):
        def one(carry, _):
            return carry + jax.lax.pmean(batch["x"].mean(), "data"), None

        return jax.lax.scan(one, state, None, length=3)[0], {}

    @ms.train_step(steps_per_run=0)
    def generator(state):
        return state + 100, {}

    with ms.MonitoredTrainingSession(
        lambda: jnp.zeros(()),
        data=ms.repeat([{"x": np.ones(8, np.float32)}]),
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=4,
        hooks=[ms.StopAtStepHook(last_step=9)],
    ) as sess:
        while not sess.should_stop():
            sess.run(generator)
            sess.run(three)
        assert sess.global_step == 9
        assert float(sess.state) == 309
    assert ms.CheckpointStore(tmp_path).steps() == [6, 9]


def test_auxiliary_step_before_a_clean_end_is_an_error(tmp_path):
    @ms.train_step(steps_per_run=0)
    def generator(state):
        return state + 100, {}

    with pytest.raises(ms.MonsessError, match="auxiliary update"):
        with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), checkpoint_dir=tmp_path) as sess:
            sess.run(generator)
    assert ms.latest_checkpoint(tmp_path) is None


def test_per_device_keys_differ_while_the_state_agrees(engine):
    @ms.train_step(engine=engine, reduce={"draw": None})
    def step(state, batch):
        key, use = jax.random.split(state["key"])
        draw = jax.random.uniform(ms.per_device_key(use))
        return {"key": key, "w": state["w"] + jax.lax.pmean(draw, "data")}, {"draw": draw}

    with ms.MonitoredTrainingSession(lambda: {"key": jax.random.key(0), "w": jnp.zeros(())}) as sess:
        first = np.asarray(sess.run(step, {"x": X})["draw"])
        second = np.asarray(sess.run(step, {"x": X})["draw"])
    assert len(set(first.tolist()) | set(second.tolist())) == 8


@pytest.mark.parametrize("kind", ["float", "key", "int"])
def test_forgotten_pmean_is_found_after_the_first_step(engine, kind):
    @ms.train_step(engine=engine)
    def step(state, batch):
        new = dict(state)
        if kind == "float":
            new["w"] = state["w"] - 0.1 * batch["x"].mean()
        if kind == "key":
            new["key"] = ms.per_device_key(state["key"])
        if kind == "int":
            new["n"] = state["n"] + jax.lax.axis_index("data")
        return new, {}

    wrong = {"float": "w", "key": "key", "int": "n"}[kind]
    with pytest.raises(ms.ReplicasDifferError, match=rf"different values in: {wrong}\. .*pmean"):
        with ms.MonitoredTrainingSession(
            lambda: {"w": jnp.ones(3), "key": jax.random.key(0), "n": 0, "same": 1.0}
        ) as sess:
            sess.run(step, {"x": X})
    assert sess.global_step == 1


def test_a_state_of_one_leaf_is_called_the_state_where_it_differs():
    @ms.train_step
    def step(state, batch):
        return state - batch["x"].mean(), {}

    with pytest.raises(ms.ReplicasDifferError, match=r"the 4 local devices hold different values in: state\."):
        with ms.MonitoredTrainingSession(lambda: jnp.zeros(())) as sess:
            sess.run(step, {"x": X})


def test_check_replicas_can_be_turned_off():
    @ms.train_step
    def step(state, batch):
        return state - batch["x"].mean(), {}

    with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), check_replicas=False) as sess:
        sess.run(step, {"x": X})
        assert sess.global_step == 1


def test_replicas_that_differ_later_are_never_committed(tmp_path):
    @ms.train_step
    def step(state, batch):
        drift = jnp.where(state["n"] >= 3, jax.lax.axis_index("data"), 0)
        return {"n": state["n"] + 1, "w": state["w"] + drift}, {}

    with (
        pytest.raises(ms.ReplicasDifferError, match="w"),
        ms.MonitoredTrainingSession(
            lambda: {"n": 0, "w": 0}, checkpoint_dir=tmp_path, save_checkpoint_steps=1, data=[{"x": X}] * 9
        ) as sess,
    ):
        while not sess.should_stop():
            sess.run(step)
    assert ms.latest_checkpoint(tmp_path) == 3


def test_masked_mean_over_uneven_rows():
    @ms.train_step
    def step(state, batch, *, mask):
        return state, {"mean": ms.masked_mean(batch["x"], mask)}

    data = [{"x": np.arange(n, dtype=np.float32)} for n in (8, 5, 1)]
    means = []
    with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), data=data, remainder="pad") as sess:
        while not sess.should_stop():
            means.append(float(sess.run(step)["mean"]))
    assert means == [3.5, 2.0, 0.0]


def test_pad_needs_a_mask_parameter():
    @ms.train_step
    def step(state, batch):
        return state, {"mean": batch["x"].mean()}

    with pytest.raises(ms.StepDefinitionError, match="no parameter 'mask'"):
        with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), data=[{"x": X}], remainder="pad") as sess:
            sess.run(step)


def test_steps_of_other_devices_share_the_state():
    devices = jax.local_devices()

    @ms.train_step(devices=devices[:2], axis_name="batch")
    def half(state, batch):
        return state + jax.lax.pmean(batch["x"].mean(), "batch"), {}

    @ms.eval_step
    def whole(state, batch):
        return {"sum": state + batch["x"].mean()}

    with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), data=[{"x": X}] * 2) as sess:
        sess.run(half)
        assert float(sess.run(whole, {"x": X})["sum"]) == 7.0
        sess.run(half)
        assert float(sess.state) == 7.0


def test_distributed_optimizer_averages():
    import optax

    transformation = ms.DistributedOptimizer(optax.sgd(1.0))

    @ms.train_step
    def step(state, batch):
        grads = jax.grad(lambda w: (w * batch["x"]).mean())(state["w"])
        updates, optimizer = transformation.update(grads, state["optimizer"], state["w"])
        return {"w": optax.apply_updates(state["w"], updates), "optimizer": optimizer}, {}

    with ms.MonitoredTrainingSession(lambda: {"w": jnp.zeros(()), "optimizer": transformation.init(0.0)}) as sess:
        sess.run(step, {"x": X})
        assert float(sess.state["w"]) == -3.5


def test_plain_function_of_a_step_can_be_called():
    new, outputs = jax.vmap(toy.train, in_axes=(None, 0), axis_name="data")(
        jax.tree.map(jnp.asarray, toy.init_fn()), jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), toy.batch(0))
    )
    assert outputs["loss"].shape == (4,)
    assert new["updates"].tolist() == [1] * 4
