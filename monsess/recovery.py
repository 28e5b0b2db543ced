"""Recovery inside the process: which errors pass by themselves, and how often to try again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from monsess import clock
from monsess.checkpoint.saver import ValuesLostError
from monsess.errors import EndOfData
from monsess.log import logger
from monsess.timer import check_secs, check_steps

_TRANSIENT_STATUS = ("ABORTED", "UNAVAILABLE")


def is_transient_error(error: BaseException) -> bool:
    """Whether an error is of the kind that TensorFlow 1 recovered from: an aborted or unavailable runtime.

    Args:
        error: What a run raised.

    Returns:
        True for JAX runtime errors whose status is ABORTED or UNAVAILABLE.
    """
    return isinstance(error, jax.errors.JaxRuntimeError) and str(error).lstrip().startswith(_TRANSIENT_STATUS)


@dataclass(frozen=True)
class Recovery:
    """What a session does about errors that may pass by themselves.

    It restores the newest checkpoint, rewinds the input, gives the hooks back their state, calls
    ``after_create_session`` again and repeats the call that failed.

    Args:
        max_restarts: Restarts allowed until a newer checkpoint shows progress; 0 turns recovery off.
        backoff_secs: Seconds before the first restart; doubled for each further one, at most 60.
        is_transient: ``error -> bool``; None: JAX runtime errors with status ABORTED or UNAVAILABLE.
        allow_reinit: Start again from ``init_fn`` where there is no checkpoint, instead of raising.

    Raises:
        ValueError: A value that is no such number, or no function.

    Example:
        >>> import monsess as ms
        >>> ms.Recovery(max_restarts=1).backoff(0)
        1.0
    """

    max_restarts: int = 3
    backoff_secs: float = 1.0
    is_transient: Callable[[BaseException], bool] | None = None
    allow_reinit: bool = False

    def __post_init__(self) -> None:
        check_steps("max_restarts", self.max_restarts, at_least=0)
        if self.backoff_secs != 0:
            check_secs("backoff_secs", self.backoff_secs)
        if self.is_transient is not None and not callable(self.is_transient):
            raise ValueError(f"is_transient must be a function of the error, found {self.is_transient!r}.")

    def covers(self, error: BaseException) -> bool:
        """Whether ``error`` is transient by this policy; a save that a failed step took with it is judged by that."""
        if isinstance(error, ValuesLostError) and error.__cause__ is not None:
            error = error.__cause__
        return self.max_restarts > 0 and (self.is_transient or is_transient_error)(error)

    def backoff(self, restarts: int) -> float:
        """Seconds to wait before restart number ``restarts`` (from 0)."""
        return min(60.0, self.backoff_secs * 2**restarts)


class Restarts:
    """Makes calls, and makes them again from the newest checkpoint after errors that pass by themselves.

    Args:
        policy: Which errors, and how often.
        create: Restores or initialises the state and tells the hooks.
        reported: The error that a thread of the session has reported, or None. If it is transient it counts as the
            cause of whatever else fails.
        settle: Lets saves in flight end, which may restore the budget.
        forget_threads: Ends the session's threads and clears what they reported.
        obstacle: Why the state could not be gone back to without losing something, or None.
        step: The global step.
    """

    def __init__(
        self,
        policy: Recovery,
        create: Callable[[], None],
        reported: Callable[[], BaseException | None],
        settle: Callable[[], None],
        forget_threads: Callable[[], None],
        obstacle: Callable[[], str | None],
        step: Callable[[], int],
    ) -> None:
        self._policy = policy
        self._create = create
        self._reported = reported
        self._settle = settle
        self._forget_threads = forget_threads
        self._obstacle = obstacle
        self._step = step
        self._since_commit = 0
        #: tuple of int and float: the step that the last recovery went back from, and when that was, by the clock.
        self.left_behind = 0, 0.0
        #: int: how often the session has recovered.
        self.recoveries = 0

    def progress(self) -> None:
        """A newer checkpoint was committed: the budget is whole again."""
        self._since_commit = 0

    def create(self) -> None:
        """Create the session's state, again after a transient error."""
        try:
            self._create()
        except EndOfData:
            raise
        except Exception as error:
            if not self._recover(error, recreating=False):
                raise

    def call(self, call: Callable[[], Any]) -> Any:
        """Return ``call()``, made again after a recovery from a transient error."""
        while True:
            try:
                return call()
            except EndOfData:
                raise
            except Exception as error:
                if not self._recover(error):
                    raise

    def look_at_threads(self) -> BaseException | None:
        """Recover from the transient errors that threads have reported.

        Returns:
            What a thread has reported and cannot be recovered from, or None.
        """
        reported = self._reported()
        while isinstance(reported, Exception) and self._recover(reported):
            reported = self._reported()
        return reported

    def _settle_for(self, cause: Exception) -> None:
        try:
            self._settle()
        except Exception as lost:
            # A lost checkpoint is worse than what passes by itself, unless it was lost to the very same thing.
            if lost is not cause and not self._policy.covers(lost):
                raise lost from cause
            self._settle()

    def _recover(self, error: Exception, recreating: bool = True) -> bool:
        """Create the state anew if ``error`` is transient and the budget allows; say whether that was done."""
        reported = self._reported()
        cause = reported if isinstance(reported, Exception) and self._policy.covers(reported) else error
        if not self._policy.covers(cause):
            return False
        obstacle = self._obstacle()
        if obstacle is not None:
            error.add_note(obstacle)
            return False
        self.left_behind = self._step(), clock.monotonic()
        self._settle_for(cause)
        while self._policy.covers(cause):
            if self._since_commit >= self._policy.max_restarts:
                error.add_note(f"Gave up after {self._since_commit} restarts without a newer checkpoint.")
                return False
            delay = self._policy.backoff(self._since_commit)
            self._since_commit += 1
            self.recoveries += recreating
            logger.warning(
                "%s: %s; restart %d of %d from the newest checkpoint in %.1f s",
                type(cause).__name__,
                cause,
                self._since_commit,
                self._policy.max_restarts,
                delay,
            )
            clock.sleep(delay)
            try:
                self._forget_threads()
                self._create()
                return True
            except Exception as again:
                if not self._policy.covers(again):
                    raise again from cause
                cause = again
        return False
