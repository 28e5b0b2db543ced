"""Seven leaves of as many kinds, which with those of `kill_child` make a state of twelve; every step changes them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def init_fn() -> dict[str, Any]:
    """The leaves before the first step."""
    return {
        "bfloat16": jnp.linspace(0.0, 1.0, 300, dtype=jnp.bfloat16),
        "float16": jnp.arange(5, dtype=jnp.float16),
        "int8": jnp.arange(-3, 9, dtype=jnp.int8).reshape(3, 4),
        "raw_key": jax.random.PRNGKey(3),
        "bool": jnp.array([True, False, False]),
        "complex64": jnp.array([1.0, 0.0, -0.5], jnp.complex64),
        "empty": jnp.zeros((0, 3)),  # Orbax refuses it: it lies in session.json
    }


def advance(leaves: dict[str, Any]) -> dict[str, Any]:
    """The leaves after one more step; all values stay finite."""
    return {
        "bfloat16": (leaves["bfloat16"] * 0.75 + 0.5).astype(jnp.bfloat16),
        "float16": -leaves["float16"] + jnp.float16(0.5),
        "int8": leaves["int8"] + jnp.int8(7),
        "raw_key": jax.random.split(leaves["raw_key"])[0],
        "bool": jnp.roll(leaves["bool"], 1),
        "complex64": leaves["complex64"] * jnp.complex64(0.6 + 0.8j),
        "empty": leaves["empty"],
    }
