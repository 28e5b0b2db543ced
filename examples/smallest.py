"""The smallest whole example: fit a line on four emulated devices; kill it and start it again as you like."""

import jax
import numpy as np

import monsess as ms

ms.testing.emulate_devices(4)
x = np.random.default_rng(0).uniform(-1, 1, size=64).astype(np.float32)


@ms.train_step(axis_name="data")
def step(line, batch):  # written for one device: it sees its share of the batch
    def loss_fn(line):
        return ((line["slope"] * batch["x"] + line["offset"] - batch["y"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(line)
    grads = jax.lax.pmean(grads, "data")
    return jax.tree.map(lambda value, grad: value - 0.1 * grad, line, grads), {"loss": loss}


with ms.MonitoredTrainingSession(
    lambda: {"slope": np.float32(0), "offset": np.float32(0)},
    data=ms.repeat([{"x": x, "y": 3 * x + 2}]),
    checkpoint_dir="smallest-run",
    hooks=[ms.StopAtStepHook(last_step=200), ms.LoggingTensorHook({"loss": "loss"}, every_n_iter=50)],
) as sess:
    while not sess.should_stop():
        sess.run(step)
    print(sess.state_copy())
