"""Stopping when a value is no longer finite."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from monsess.errors import NanLossDuringTrainingError
from monsess.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from monsess.hooks._values import fetch_label, flat_fetches, show
from monsess.log import logger


@final
class NanTensorHook(SessionRunHook):
    """Ends training when an output of the step is NaN or infinite, without waiting for any step.

    It looks at the newest finished step, so it may speak up to the session's in-flight bound late; a checkpoint is
    committed only after all steps up to it have been looked at.

    Args:
        loss_tensor: What to look at: the name of an output, a callable ``f(state, outputs)``, or a list or other
            pytree of them, of values of any shape; None: all floating outputs of the step.
        fail_on_nan_loss: True raises `NanLossDuringTrainingError`; False logs a warning and asks for a stop.

    Raises:
        ValueError: ``loss_tensor`` holds something that is neither name nor callable. In the first run: none of the
            values is a floating one.

    Example:
        >>> import jax.numpy as jnp, monsess as ms
        >>> @ms.train_step
        ... def step(state):
        ...     return state - 1, {"loss": jnp.log(state)}
        >>> with ms.MonitoredTrainingSession(lambda: jnp.array(2.0), hooks=[ms.NanTensorHook("loss")]) as sess:
        ...     while not sess.should_stop():
        ...         outputs = sess.run(step)
        Traceback (most recent call last):
        monsess.errors.NanLossDuringTrainingError: NaN loss during training. At step 3: loss = -inf.
    """

    def __init__(self, loss_tensor: Any = None, fail_on_nan_loss: bool = True) -> None:
        fetches = () if loss_tensor is None else tuple(flat_fetches("loss_tensor", loss_tensor))
        self._labels = tuple(fetch_label(fetch) for fetch in fetches)
        self._args = SessionRunArgs(fetches) if fetches else None
        self._fail = bool(fail_on_nan_loss)
        self._finding: str | None = None

    def begin(self) -> None:
        """Forget what another session found."""
        self._finding = None

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Forget what was found before a recovery: the state is another one."""
        self._finding = None

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetch what is to be looked at."""
        return self._args

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Have the values looked at once they are there."""
        step = run_context.global_step
        if self._args is not None:
            self._watch_results(run_context, run_values.results)
        elif run_values.nonfinite is not None and run_context.session._watch_each_run(self._check_count):
            run_context.watch(run_values.nonfinite, partial(self._check_count, step))
        # A check may run in any thread and must not touch the session, so what it found waits here.
        if self._finding is not None:
            run_context.request_stop(self._finding)

    def _sleeps_until(self) -> int | None:
        """See `HookRunner`: what is looked at without being fetched needs no call."""
        return sys.maxsize if self._args is None and self._fail else None

    def _watch_results(self, run_context: SessionRunContext, results: Any) -> None:
        leaves, structure = jax.tree_util.tree_flatten(results)
        if not any(_can_be_nan(leaf) for leaf in leaves):
            raise ValueError(
                f"NanTensorHook: {', '.join(self._labels)} holds no floating value, so it can never be NaN. Name an "
                "output that can, or none for all of them."
            )
        is_array = [leaf.ndim > 0 for leaf in leaves]
        watched = _one_scalar_each(leaves) if any(is_array) else leaves
        run_context.watch(watched, partial(self._check_leaves, run_context.global_step, structure, is_array))

    def _check_leaves(self, step: int, structure: Any, is_array: list[bool], leaves: list[Any]) -> None:
        bad = [i for i, leaf in enumerate(leaves) if _can_be_nan(leaf) and not np.isfinite(np.asarray(leaf)).all()]
        if not bad:
            return
        labels = self._leaf_labels(structure)
        self._found(
            step,
            ", ".join(
                f"{labels[i]} holds NaN or infinity" if is_array[i] else f"{labels[i]} = {show(np.asarray(leaves[i]))}"
                for i in bad
            ),
        )

    def _check_count(self, step: int, nonfinite: Any) -> None:
        if count := int(nonfinite):
            self._found(step, f"{count} of the values in the step's outputs NaN or infinite")

    def _found(self, step: int, what: str) -> None:
        message = f"NaN loss during training. At step {step}: {what}."
        if self._fail:
            logger.error("Model diverged: %s", message)
            raise NanLossDuringTrainingError(message)
        if self._finding is None:
            logger.warning("Model diverged, asking for a stop: %s", message)
        self._finding = message

    def _leaf_labels(self, structure: Any) -> list[str]:
        """One label per leaf of the results: the fetch's, followed by the path below it."""
        blank = jax.tree_util.tree_unflatten(structure, [0] * structure.num_leaves)
        labels: list[str] = []
        for label, part in zip(self._labels, blank, strict=True):
            paths = jax.tree_util.tree_flatten_with_path(part)[0]
            labels.extend(label + jax.tree_util.keystr(path) for path, _ in paths)
        return labels


def _can_be_nan(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, np.inexact))


@jax.jit
def _one_scalar_each(leaves: list[jax.Array]) -> list[jax.Array]:
    """For each array a scalar that is finite if the array is, so that no array has to cross to the host."""
    return [
        leaf if leaf.ndim == 0 or not _can_be_nan(leaf) else jnp.where(jnp.isfinite(leaf).all(), 0.0, jnp.nan)
        for leaf in leaves
    ]
