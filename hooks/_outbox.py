"""Calls to a service that may be slow, away or wrong, made by a thread of their own and in order."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

from monsess.log import logger, mask

_MOST = 10_000
_BACKOFF_SECS = (1.0, 60.0)
_TRIES = 3


class Outbox:
    """Makes calls in order; one that fails is tried again, with a warning once, and training never hears of it.

    While none is taken the service is away, and all wait. A call that fails where the next one does not is given up.

    Args:
        service: What is called, for people.
        backoff_secs: Seconds before a call is tried again, at first and at most.
    """

    def __init__(self, service: str, backoff_secs: tuple[float, float] = _BACKOFF_SECS) -> None:
        self._service = service
        self._first_backoff, self._most_backoff = backoff_secs
        self._calls: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._dropped = 0
        self._said = False

    def put(self, call: Callable[[], object]) -> None:
        """Have ``call`` made after those before it; beyond a bound the oldest are given up."""
        with self._changed:
            if self._closing:
                return
            self._calls.append(call)
            if len(self._calls) > _MOST:
                del self._calls[2]  # the first ones may be on their way
                self._dropped += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="monsess-outbox", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, seconds: float) -> None:
        """Let the rest go out, and end; never raises.

        Args:
            seconds: How long at most.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is None:
            return
        self._thread.join(seconds)
        lost = self._dropped + len(self._calls)
        if lost:
            logger.warning("%s did not take %d of the calls of this run.", self._service, lost)

    def _work(self) -> None:
        backoff, failures = self._first_backoff, 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closing)
                if not self._calls:
                    return
                calls, closing = list(itertools.islice(self._calls, 2)), self._closing
            error = _made(calls[0])
            if error is None:
                self._done(1)
                backoff, failures = self._first_backoff, 0
                continue
            self._say(error)
            failures += 1
            if (failures >= _TRIES or closing) and len(calls) > 1 and _made(calls[1]) is None:
                self._dropped += 1  # the service takes others: that call itself is at fault
                self._done(2)
                backoff, failures = self._first_backoff, 0
                continue
            if closing:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closing, backoff)
            backoff = min(backoff * 2, self._most_backoff)

    def _done(self, count: int) -> None:
        with self._changed:
            for _ in range(count):
                self._calls.popleft()

    def _say(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if not self._said:
            self._said = True
            logger.warning("%s does not take what is logged; training goes on: %s", self._service, mask(text))
        else:
            logger.debug("%s: %s", self._service, mask(text))


def _made(call: Callable[[], object]) -> Exception | None:
    """Why a call failed; None if it did not."""
    try:
        call()
    except Exception as error:
        return error
    return None
