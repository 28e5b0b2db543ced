"""What every process gives the chief for a save: its place in the input, its hooks' states, the bits of its state."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from monsess.channel import Channel
from monsess.errors import ClusterError, SaveError
from monsess.log import logger

_KEPT_SAVES = 8  # a second try of a final save asks for the same step again


class HandingIn:
    """Brings to the chief what the others have for its saves; no process but the chief waits for that.

    Args:
        channel: Of this session.
        limit_secs: How long the chief waits for the others.
    """

    def __init__(self, channel: Channel, limit_secs: float) -> None:
        self._channel = channel
        self._limit = limit_secs
        self._steps: deque[int] = deque()
        self._error: Exception | None = None

    def give(self, step: int, value: Any, late: Callable[[], Any]) -> None:
        """On another process than the chief: give what belongs to the save of ``step``.

        Args:
            step: Of the save.
            value: JSON-able.
            late: Called in a thread of its own, since it waits for the device; returns something JSON-able.
        """
        text = json.dumps(value)

        def post() -> None:
            try:
                rest = json.dumps(late())
            except Exception as error:  # the training thread meets it too, at its next wait for the device
                logger.debug("nothing is handed in for the save of step %d: %r", step, error)
                return
            try:
                self._channel.post(f"{_name(step)}/{self._channel.index}", f"[{text}, {rest}]")
            except Exception as error:
                self._error = error

        threading.Thread(target=post, name="monsess-hand-in", daemon=True).start()

    def take(self, step: int, value: Any, late: Callable[[], Any], check: Callable[[], None]) -> list[Any]:
        """On the chief: ``[value, late()]`` of every process for the save of ``step``, in their order.

        Args:
            step: Of the save.
            value: That of the chief.
            late: That of the chief.
            check: Called while it waits; what it raises ends the wait.

        Raises:
            SaveError: Some processes gave nothing; names them.
        """
        what = _name(step)
        try:
            found = self._channel.gather(what, json.dumps([value, late()]), self._limit, check)
        except ClusterError as error:
            raise SaveError(
                f"Step {step} was not saved. {error} All processes have to save at the same steps: give them the same "
                "save_checkpoint_steps= and the same hooks, and call request_save(everywhere=True) on all or on none."
            ) from error
        self._steps.append(step)
        if len(self._steps) > _KEPT_SAVES:
            self._channel.forget(_name(self._steps.popleft()))
        return [json.loads(one) for one in found]

    def check(self) -> None:
        """Raise what kept this process from handing something in, if anything did."""
        if self._error is not None:
            raise SaveError(f"The chief did not get what it needs for a save: {self._error!r}") from self._error


def _name(step: int) -> str:
    return f"the save of step {step}"
