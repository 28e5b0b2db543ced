"""A small training problem with everything that a resume has to get right: optimiser, counter, random stream."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import monsess as ms

ROWS = 8


def init_fn() -> dict[str, Any]:
    """Parameters, momentum, an update counter and a typed key."""
    return {
        "w": jnp.linspace(-1.0, 1.0, 3),
        "momentum": jnp.zeros(3),
        "updates": 0,
        "key": jax.random.key(7),
    }


def _update(state: Any, batch: Any) -> tuple[Any, Any]:
    key, dropout = jax.random.split(state["key"])
    keep = jax.random.bernoulli(ms.per_device_key(dropout), 0.8, batch["x"].shape)

    def loss_fn(w: jax.Array) -> jax.Array:
        return jnp.mean((jnp.where(keep, batch["x"], 0.0) @ w - batch["y"]) ** 2)

    loss, grad = jax.value_and_grad(loss_fn)(state["w"])
    momentum = 0.9 * state["momentum"] + jax.lax.pmean(grad, "data")
    new = {"w": state["w"] - 0.05 * momentum, "momentum": momentum, "updates": state["updates"] + 1, "key": key}
    return new, {"loss": loss, "grad_norm": jnp.linalg.norm(momentum)}


train = ms.train_step(_update)


@ms.eval_step
def evaluate(state: Any, batch: Any) -> Any:
    """The loss without dropout."""
    return {"loss": jnp.mean((batch["x"] @ state["w"] - batch["y"]) ** 2)}


def batch(index: int) -> dict[str, np.ndarray]:
    """Batch number ``index``: the same whenever it is asked for."""
    generator = np.random.default_rng(index)
    x = generator.normal(size=(ROWS, 3)).astype(np.float32)
    return {"x": x, "y": (x @ np.array([1.0, -2.0, 0.5], np.float32))}


def batches(count: int) -> list[dict[str, np.ndarray]]:
    """The first ``count`` batches."""
    return [batch(index) for index in range(count)]


def assert_same_bits(left: Any, right: Any) -> None:
    """Every leaf of two states is equal bit for bit, and so are their structures."""
    left_leaves, left_tree = jax.tree.flatten(left)
    right_leaves, right_tree = jax.tree.flatten(right)
    assert left_tree == right_tree
    for a, b in zip(left_leaves, right_leaves, strict=True):
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)  # a typed key stays one
        a, b = _host(a), _host(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes()


def _host(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def straight(steps: int) -> Any:
    """The state after ``steps`` updates without any interruption."""
    with ms.MonitoredTrainingSession(init_fn, data=batches(steps)) as sess:
        while not sess.should_stop():
            sess.run(train)
        return sess.state_copy()
