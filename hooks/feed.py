"""Arguments of the step from a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from monsess.hook import SessionRunArgs, SessionRunContext, SessionRunHook


@final
class FeedFnHook(SessionRunHook):
    """Feeds the step with what a function returns, called anew before each run.

    `EndOfData` raised by the function is a clean end.

    Args:
        feed_fn: Called without arguments; returns a dict from the name of an argument of the step to its value.

    Raises:
        ValueError: ``feed_fn`` cannot be called.

    Example:
        >>> import jax.numpy as jnp, monsess as ms
        >>> @ms.train_step
        ... def step(state, batch):
        ...     return state + batch.sum(), {"sum": batch.sum()}
        >>> hook = ms.FeedFnHook(lambda: {"batch": jnp.ones(8)})
        >>> with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), hooks=[hook]) as sess:
        ...     outputs = sess.run(step)
    """

    on_all_processes = True

    def __init__(self, feed_fn: Callable[[], Mapping[str, Any]]) -> None:
        if not callable(feed_fn):
            raise ValueError(f"invalid feed_fn={feed_fn!r}: expected a callable that returns a dict of arguments.")
        self._feed_fn = feed_fn

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Feed what the function returns.

        Raises:
            TypeError: It does not return a dict.
        """
        feed = self._feed_fn()
        if not isinstance(feed, Mapping):
            raise TypeError(f"feed_fn must return a dict from argument name to value, found {type(feed).__name__}.")
        return SessionRunArgs(feed_dict=feed)
