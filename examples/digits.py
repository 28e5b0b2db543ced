"""A convolutional network on scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels.

Kill it at any moment and start the same command again: it goes on from the last checkpoint and ends in the same bits
as a run that nobody disturbed.

    python examples/digits.py --checkpoint_dir /tmp/digits --last_step 300
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import monsess as ms

optimizer = optax.adam(2e-3)


class State(NamedTuple):
    """All that training changes; the whole of it is in every checkpoint."""

    params: Any
    opt_state: optax.OptState
    key: jax.Array


def init_fn() -> State:
    key, *keys = jax.random.split(jax.random.key(0), 5)
    he = jax.nn.initializers.he_normal()
    params = {
        "conv1": he(keys[0], (3, 3, 1, 16)),
        "conv2": he(keys[1], (3, 3, 16, 32)),
        "dense": he(keys[2], (4 * 4 * 32, 64)),
        "dense_bias": jnp.zeros(64),
        "out": he(keys[3], (64, 10)),
        "out_bias": jnp.zeros(10),
    }
    return State(params, optimizer.init(params), key)


def logits_fn(params: Any, images: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
    """Images [n, 8, 8] -> logits [n, 10]; with a key, half of the hidden units are dropped."""
    x = images[..., None]
    for name in ("conv1", "conv2"):
        dimensions = ("NHWC", "HWIO", "NHWC")
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, params[name], (1, 1), "SAME", dimension_numbers=dimensions))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(x.reshape(len(x), -1) @ params["dense"] + params["dense_bias"])
    if dropout_key is not None:
        x = jnp.where(jax.random.bernoulli(dropout_key, 0.5, x.shape), 2.0 * x, 0.0)
    return x @ params["out"] + params["out_bias"]


@ms.train_step(axis_name="data")
def train(state: State, batch: dict[str, jax.Array]) -> tuple[State, dict[str, Any]]:
    key, step_key = jax.random.split(state.key)
    dropout_key = ms.per_device_key(step_key)  # each device drops other units

    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = logits_fn(params, batch["image"], dropout_key)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, (logits.argmax(-1) == batch["label"]).mean()

    (loss, accuracy), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    gradients = jax.lax.pmean(gradients, "data")
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state, key), {"loss": loss, "accuracy": accuracy}


class Batches:
    """Endless batches in an order that depends on the seed alone; iterating again begins again.

    After a restart the session iterates again and skips what was consumed before.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, batch_size: int) -> None:
        self.images, self.labels, self.batch_size = images, labels, batch_size

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        random = np.random.default_rng(0)
        while True:
            order = random.permutation(len(self.images))
            for start in range(0, len(order) - self.batch_size + 1, self.batch_size):
                rows = order[start : start + self.batch_size]
                yield {"image": self.images[rows], "label": self.labels[rows]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint_dir", help="a folder or any fsspec URL; without it nothing is kept")
    parser.add_argument("--last_step", type=int, default=300)
    parser.add_argument("--save_checkpoint_steps", type=int, default=50)
    parser.add_argument("--devices", type=int, default=4, help="emulated CPU devices; 0: the devices of the machine")
    parser.add_argument("--batch_size", type=int, default=128, help="over all devices together")
    flags = parser.parse_args()
    if flags.devices:
        ms.testing.emulate_devices(flags.devices)

    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images, np.float32).reshape(-1, 8, 8) / 16.0
    labels = np.asarray(labels, np.int32)
    train_rows, test_rows = train_test_split(np.arange(len(labels)), test_size=360, stratify=labels, random_state=0)

    hooks = [
        ms.StopAtStepHook(last_step=flags.last_step),
        ms.LoggingTensorHook({"loss": "loss", "accuracy": "accuracy"}, every_n_iter=20),
        ms.NanTensorHook("loss"),
    ]
    with ms.MonitoredTrainingSession(
        init_fn,
        data=Batches(images[train_rows], labels[train_rows], flags.batch_size),
        checkpoint_dir=flags.checkpoint_dir,
        save_checkpoint_steps=flags.save_checkpoint_steps,
        hooks=hooks,
    ) as sess:
        while not sess.should_stop():
            sess.run(train)
        guesses = jax.jit(logits_fn)(sess.state.params, images[test_rows]).argmax(-1)
        print(f"test accuracy {np.mean(guesses == labels[test_rows]):.4f}")


if __name__ == "__main__":
    main()
