"""Optimiser helpers in the manner of Horovod, for any optax transformation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax


class GradientTransformation(Protocol):
    """What is asked of an optax transformation: its two functions."""

    @property
    def init(self) -> Callable[..., Any]:
        """``params -> optimiser state``."""
        ...

    @property
    def update(self) -> Callable[..., Any]:
        """``(gradients, state, params) -> (updates, state)``."""
        ...


class _Averaged(NamedTuple):
    """An optax ``GradientTransformation`` by shape; optax is not imported."""

    init: Callable[..., Any]
    update: Callable[..., Any]


def DistributedOptimizer(transformation: GradientTransformation, axis_name: str = "data") -> Any:
    """Average gradients over all devices before the wrapped optax update, as Horovod's wrapper does.

    Do not average them a second time in the step: the mean of a mean is the same, but costs a collective.

    Args:
        transformation: An optax ``GradientTransformation``.
        axis_name: The step's axis.

    Returns:
        A named tuple with ``init`` and ``update``, usable wherever optax expects a ``GradientTransformation``.

    Example:
        >>> import jax, jax.numpy as jnp, optax, monsess as ms
        >>> tx = ms.DistributedOptimizer(optax.sgd(1.0))
        >>> def update(grad):
        ...     updates, _ = tx.update(grad, tx.init(grad))
        ...     return updates
        >>> jax.vmap(update, axis_name="data")(jnp.array([1.0, 3.0])).tolist()
        [-2.0, -2.0]
    """

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return transformation.update(jax.lax.pmean(gradients, axis_name), state, params, **extra)

    return _Averaged(transformation.init, update)


def linear_scaled_lr(
    base_lr: float, base_batch: int, global_batch: int, warmup_steps: int
) -> Callable[[Any], jax.Array]:
    """The linear scaling rule with gradual warm-up, as an optax schedule.

    The rate grows linearly from ``base_lr`` to ``base_lr * global_batch / base_batch`` over ``warmup_steps`` and stays
    there. Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017, sections 2.1-2.2.

    Args:
        base_lr: The rate that suits ``base_batch``.
        base_batch: Rows per update that ``base_lr`` was tuned for.
        global_batch: Rows per update over all devices of all processes.
        warmup_steps: Updates until the full rate is reached, >= 0.

    Returns:
        ``step -> rate``, float32.

    Raises:
        ValueError: A size or a rate that is not positive, or a negative ``warmup_steps``.

    Example:
        >>> import monsess as ms
        >>> rate = ms.linear_scaled_lr(0.1, 256, 1024, warmup_steps=10)
        >>> [round(float(rate(step)), 3) for step in (0, 5, 10, 99)]
        [0.1, 0.25, 0.4, 0.4]
    """
    for name, value in (("base_lr", base_lr), ("base_batch", base_batch), ("global_batch", global_batch)):
        if not value > 0:
            raise ValueError(f"linear_scaled_lr: {name} must be positive, found {value!r}.")
    if warmup_steps < 0:
        raise ValueError(f"linear_scaled_lr: warmup_steps must be >= 0, found {warmup_steps!r}.")
    target = base_lr * global_batch / base_batch

    def schedule(step: Any) -> jax.Array:
        import jax.numpy as jnp

        done = jnp.minimum(jnp.asarray(step, jnp.float32) / max(warmup_steps, 1), 1.0) if warmup_steps else 1.0
        return jnp.asarray(base_lr + (target - base_lr) * done, jnp.float32)

    return schedule
