"""Both engines give equal bits, and data parallelism gives the gradient of the joined batch."""

from __future__ import annotations

import digits_example
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy

import monsess as ms

digits = digits_example.load()


@pytest.fixture(scope="module")
def data():
    return digits_example.batches(digits, 32, 100)


def train(engine, count, data):
    step = ms.train_step(engine=engine, devices=jax.local_devices()[:count])(digits.train.function)
    losses = []
    with ms.MonitoredTrainingSession(digits.init_fn, data=data) as sess:
        while not sess.should_stop():
            losses.append(sess.run(step)["loss"])
        return sess.state_copy(), np.array([float(loss) for loss in losses])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_hundred_adam_steps_give_equal_bits_with_both_engines(data, count):
    pmapped, pmapped_losses = train("pmap", count, data)
    sharded, sharded_losses = train("shard_map", count, data)
    toy.assert_same_bits(pmapped, sharded)
    assert pmapped_losses.tobytes() == sharded_losses.tobytes()
    assert pmapped_losses[-10:].mean() < 0.5 * pmapped_losses[:10].mean()


@pytest.mark.parametrize("engine", ["pmap", "shard_map"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradient_is_that_of_the_joined_batch(data, engine, count):
    def loss_fn(params, batch):
        logits = digits.logits_fn(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    @ms.train_step(engine=engine, devices=jax.local_devices()[:count])
    def step(params, batch):
        return params, {"gradient": jax.lax.pmean(jax.grad(loss_fn)(params, batch), "data")}

    params = digits.init_fn().params
    with ms.MonitoredTrainingSession(lambda: params) as sess:
        parallel = sess.run(step, data[0])["gradient"]
    joined = jax.jit(jax.grad(loss_fn))(params, data[0])
    for name, expected in joined.items():
        scale = float(jnp.abs(expected).max())
        np.testing.assert_allclose(parallel[name], expected, rtol=0, atol=4e-6 * scale, err_msg=name)
        assert scale > 0
