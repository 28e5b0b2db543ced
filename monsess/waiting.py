"""A wait with a limit that says, every ten seconds, for whom."""

from __future__ import annotations

import time

from monsess.log import logger

SAY_SECS = 10.0


class Waiting:
    """One such wait; it begins when it is made.

    Args:
        who: Who waits, for people.
        limit_secs: How long at most.
    """

    def __init__(self, who: str, limit_secs: float) -> None:
        self.who = who
        self.limit_secs = limit_secs
        self._begun = self._said = time.monotonic()

    @property
    def passed_secs(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._begun

    @property
    def left_secs(self) -> float:
        """Until the limit; 0 from then on."""
        return max(0.0, self.limit_secs - self.passed_secs)

    def say(self, for_whom: str) -> None:
        """Tell people whom this process waits for, if that was not said within the last ten seconds."""
        now = time.monotonic()
        if now - self._said < SAY_SECS:
            return
        self._said = now
        logger.warning(
            "%s waits for %s: %.0f s of %g s have passed", self.who, for_whom, now - self._begun, self.limit_secs
        )
