"""The smallest whole example: fit a line on four emulated devices; kill it and start it again as you like."""

import jax
import numpy as np

import monsess as ms

ms.testing.emulate_devices(4)

x = np.linspace(-1.0, 1.0, 64, dtype=np.float32)
batches = [{"x": part, "y": 3.0 * part + 2.0} for part in np.split(np.random.default_rng(0).permutation(x), 4)]


@ms.train_step(axis_name="data")
def step(line, batch):  # written for one device: its share of the batch
    def loss_fn(line):
        return ((line["slope"] * batch["x"] + line["offset"] - batch["y"]) ** 2).mean()

    loss, gradient = jax.value_and_grad(loss_fn)(line)
    gradient = jax.lax.pmean(gradient, "data")
    return jax.tree.map(lambda value, slope: value - 0.1 * slope, line, gradient), {"loss": loss}


with ms.MonitoredTrainingSession(
    lambda: {"slope": np.float32(0.0), "offset": np.float32(0.0)},
    data=ms.repeat(batches),
    checkpoint_dir="smallest-run",
    hooks=[ms.StopAtStepHook(last_step=200), ms.LoggingTensorHook({"loss": "loss"}, every_n_iter=50)],
) as sess:
    while not sess.should_stop():
        sess.run(step)
    print(sess.state_copy())
