"""A ready-made evaluation: how large a state is, and whether it is finite.

``monsess evaluate URL monsess.state_norm:evaluator`` shows it for any checkpoint, without a line of code.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from monsess.evaluation import Evaluator
from monsess.step import eval_step


@eval_step(reduce="max")  # all devices hold the same state
def state_norm(state: Any) -> dict[str, jax.Array]:
    """The Euclidean norm of all floating values together, and how many of them are not finite.

    Example:
        >>> from monsess.state_norm import state_norm
        >>> {name: float(value) for name, value in state_norm({"w": jnp.array([3.0, 4.0])}).items()}
        {'nonfinite': 0.0, 'norm': 5.0}
    """
    floating = [x for x in map(jnp.asarray, jax.tree.leaves(state)) if jnp.issubdtype(x.dtype, jnp.floating)]
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in floating]
    nonfinite = [jnp.sum(~jnp.isfinite(x)) for x in floating]
    return {
        "nonfinite": jnp.asarray(sum(nonfinite), jnp.float32),
        "norm": jnp.sqrt(jnp.asarray(sum(squares), jnp.float32)),
    }


evaluator = Evaluator(state_norm)
