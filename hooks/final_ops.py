"""Values of the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from monsess.errors import EndOfData
from monsess.hook import SessionRunHook
from monsess.hooks._values import flat_fetches, to_host
from monsess.log import logger

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession


@final
class FinalOpsHook(SessionRunHook):
    """Evaluates fetches once, at a clean end, on the final state and the outputs of the last run.

    A session that ran no step, such as that of a finished run that is started again, has no outputs: it evaluates
    callables only, with None for the outputs, and nothing at all if a name is among the fetches.

    Args:
        final_ops: What to evaluate: the name of an output, a callable ``f(state, outputs)``, a pytree of them, or
            None for nothing.
        final_ops_feed_dict: Keyword arguments for the callables, arrays or numbers:
            ``f(state, outputs, **final_ops_feed_dict)``.

    Raises:
        ValueError: ``final_ops`` holds something else, or there are arguments but no callable to take them.

    Example:
        >>> import jax.numpy as jnp, monsess as ms
        >>> @ms.train_step
        ... def step(state):
        ...     return state + 1, {}
        >>> hook = ms.FinalOpsHook(lambda state, outputs, factor: state * factor, {"factor": 10})
        >>> with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), hooks=[hook]) as sess:
        ...     outputs = sess.run(step)
        >>> float(hook.final_ops_values)
        10.0
    """

    def __init__(self, final_ops: Any, final_ops_feed_dict: Mapping[str, Any] | None = None) -> None:
        leaves = [] if final_ops is None else flat_fetches("final_ops", final_ops)
        feed = dict(final_ops_feed_dict or {})
        if not all(isinstance(name, str) for name in feed):
            raise ValueError(f"invalid final_ops_feed_dict: expected names of arguments as keys, found {list(feed)!r}.")
        if feed and not any(callable(leaf) for leaf in leaves):
            raise ValueError(
                f"final_ops_feed_dict has {', '.join(feed)}, but final_ops={final_ops!r} has no callable to take "
                "arguments."
            )
        self._fetches = final_ops
        self._names = [leaf for leaf in leaves if isinstance(leaf, str)]
        self._feed = feed or None
        self._start = 0
        self._values: Any = None

    @property
    def final_ops_values(self) -> Any:
        """The values as numpy arrays, in the structure of ``final_ops``; None before a clean end or without any."""
        return self._values

    def begin(self) -> None:
        """Forget the values of another session."""
        self._values = None

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Note the step, to see at the end whether any was run."""
        self._start = session.global_step

    def end(self, session: MonitoredSession) -> None:
        """Evaluate."""
        if self._fetches is None:
            return
        if self._names and session.global_step == self._start:
            logger.info("FinalOpsHook: no step was run, so there is no %s to take.", ", ".join(self._names))
            return
        try:
            self._values = to_host(session.evaluate(self._fetches, self._feed))
        except EndOfData:
            logger.warning(
                "FinalOpsHook met the end of the data. The final values are taken after training has ended, so they "
                "must not have a dependency back to some input source: let them use the state and the last outputs "
                "only."
            )
            raise
