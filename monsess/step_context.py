"""What a function given to `MonitoredSession.run_step_fn` gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, final

from monsess.errors import EndOfData
from monsess.step import Step

if TYPE_CHECKING:
    from monsess.session import MonitoredSession


@final
class StepContext:
    """What the function given to `MonitoredSession.run_step_fn` can do.

    Args:
        session: The session; its ``run_without_hooks`` triggers no hook.

    Example:
        >>> import monsess as ms
        >>> with ms.MonitoredTrainingSession() as sess:
        ...     sess.run_step_fn(lambda step_context: step_context.session.global_step)
        0
    """

    def __init__(self, session: MonitoredSession) -> None:
        self._session = session

    @property
    def session(self) -> MonitoredSession:
        """The session."""
        return self._session

    def run_with_hooks(self, step: Step, *args: Any) -> Any:
        """Run a step as `MonitoredSession.run` does; a transient error repeats the whole function.

        Args:
            step: The step.
            *args: Its arguments after the state.

        Returns:
            The step's outputs.
        """
        self._session._require_open(step)
        return self._session._run_guarded(step, args, with_hooks=True)

    def request_stop(self, reason: Any = None) -> NoReturn:
        """Leave the function at once and end the session cleanly.

        Args:
            reason: A sentence for people, or a `StopReason`.

        Raises:
            EndOfData: Always; inside the with-block this is a clean end.
        """
        self._session.request_stop(reason)
        raise LeaveStepFn("StepContext.request_stop was called")


class LeaveStepFn(EndOfData):
    """Carries a stop request out of a step function; the stop reason is set already."""
