"""What Horovod code calls to begin with the same variables everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from monsess.hook import SessionRunHook

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession


@final
class BroadcastGlobalVariablesHook(SessionRunHook):
    """Makes sure that all processes begin with the state of process 0.

    A session gives the chief's initialised or restored state to all processes anyway, and compares its bits before the
    first step; this hook is there so that Horovod code reads the same, and compares once more after all hooks that
    come before it.

    Args:
        root_rank: The process whose state is taken; 0, which is the chief.

    Raises:
        ValueError: Another ``root_rank``.

    Example:
        >>> import monsess as ms
        >>> hook = ms.BroadcastGlobalVariablesHook(0)
    """

    on_all_processes = True

    def __init__(self, root_rank: int = 0) -> None:
        if isinstance(root_rank, bool) or root_rank != 0:
            raise ValueError(
                f"root_rank must be 0, found {root_rank!r}: the state is initialised and restored by process 0, the "
                "chief."
            )

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Compare the state of all processes."""
        session.compare_replicas()
