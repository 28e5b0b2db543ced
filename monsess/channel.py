"""Small messages between the processes of a job, through JAX's coordination service: no collective and no device.

This is the only module that uses a private part of JAX: the client of that service, which has no public face.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax

from monsess.errors import ClusterError
from monsess.log import logger

_FIRST_LOOK_SECS = 0.002
_LOOK_SECS = 0.1
_SAY_SECS = 10.0


class Channel:
    """The key-value store of a job, below a prefix of its own.

    Args:
        name: The prefix; the same on all processes.

    Raises:
        ClusterError: This process has not joined a job.
    """

    def __init__(self, name: str) -> None:
        from jax._src import distributed

        client = distributed.global_state.client
        if client is None:
            raise ClusterError("This process has not joined a job. Call monsess.Server() at the top of the script.")
        self._client = client
        self._prefix = f"monsess/{name}/"
        self.index = jax.process_index()
        self.count = jax.process_count()

    def post(self, key: str, value: str) -> None:
        """Write a message, over an earlier one of that key."""
        self._client.key_value_set(self._prefix + key, value, allow_overwrite=True)

    def under(self, key: str) -> dict[str, str]:
        """All messages below ``key``, by the rest of their keys."""
        prefix = f"{self._prefix}{key}/"
        return {name.removeprefix(prefix): value for name, value in self._client.key_value_dir_get(prefix)}

    def gather(self, what: str, value: str, limit_secs: float, check: Callable[[], None]) -> list[str]:
        """Give a value and wait for those of all processes.

        Args:
            what: What is waited for, in words; unique among all calls of this channel.
            value: That of this process.
            limit_secs: How long to wait.
            check: Called now and then while it waits; what it raises ends the wait.

        Returns:
            The values in the order of the processes.

        Raises:
            ClusterError: Some processes did not come; names them.
        """
        self.post(f"{what}/{self.index}", value)
        return self.collect(what, limit_secs, check)

    def collect(self, what: str, limit_secs: float, check: Callable[[], None]) -> list[str]:
        """Wait for what all processes have posted below ``what``; as `gather`, from any thread."""
        found = self._wait(what, range(self.count), limit_secs, check)
        return [found[str(index)] for index in range(self.count)]

    def forget(self, what: str) -> None:
        """Delete all messages below ``what``."""
        self._client.key_value_delete(f"{self._prefix}{what}/")

    def tell(self, what: str, value: str) -> None:
        """Give a value to all processes, which `hear` it; only the chief does that."""
        self.post(f"{what}/{self.index}", value)

    def hear(self, what: str, limit_secs: float, check: Callable[[], None], who: int = 0) -> str:
        """Wait for what the chief tells.

        Raises:
            ClusterError: It did not come within ``limit_secs``.
        """
        return self._wait(what, [who], limit_secs, check)[str(who)]

    def _wait(self, what: str, wanted: range | list[int], limit: float, check: Callable[[], None]) -> dict[str, str]:
        begun = said = time.monotonic()
        pause = _FIRST_LOOK_SECS
        while True:
            found = self.under(what)
            missing = [index for index in wanted if str(index) not in found]
            if not missing:
                return found
            check()
            now = time.monotonic()
            if now - begun > limit:
                raise ClusterError(
                    f"Process {self.index} waited {limit:g} s for {processes(missing)}: {_words(what)}. Look at the "
                    "log of that process; the limits are arguments of MonitoredTrainingSession."
                )
            if now - said > _SAY_SECS:
                said = now
                logger.info(
                    "process %d waits for %s: %s (%.0f s)", self.index, processes(missing), _words(what), now - begun
                )
            time.sleep(pause)
            pause = min(_LOOK_SECS, 1.5 * pause)


def _words(what: str) -> str:
    return what.lstrip("0123456789 ")  # the number only makes it unique


def processes(indices: list[int]) -> str:
    """Processes in words: ``process 1``, ``processes 1, 2``."""
    listed = ", ".join(map(str, indices[:8])) + (f" and {len(indices) - 8} more" if len(indices) > 8 else "")
    return f"process {listed}" if len(indices) == 1 else f"processes {listed}"
