"""Calls to a service that may be slow, away or wrong, made by a thread of their own and in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from monsess.log import logger, mask

_MOST = 10_000
_BACKOFF_SECS = (1.0, 60.0)
_TRIES = 3


class Outbox:
    """Makes calls in order; one that fails is tried again, with a warning once, and training never hears of it.

    While none is taken the service is away, and all wait. Calls that fail where a later one does not are given up.

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

    def put(self, call: Callable[[], object], closes: bool = False) -> None:
        """Have ``call`` made after those before it; it is given up where too many wait, unless it ``closes``."""
        with self._changed:
            if self._closing:
                return
            if len(self._calls) < _MOST or closes:
                self._calls.append(call)
            else:
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
                if self._closing:
                    break
                # After some tries of the first call, each time a further one shows whether the service takes others.
                ahead = min(failures - _TRIES + 1, len(self._calls) - 1)
                call, probe = self._calls[0], self._calls[ahead] if ahead > 0 else None
            error = _made(call)
            if error is not None:
                self._say(error)
                failures += 1
                if probe is None or _made(probe) is not None:
                    with self._changed:
                        self._changed.wait_for(lambda: self._closing, backoff)
                    backoff = min(backoff * 2, self._most_backoff)
                    continue
                self._dropped += ahead  # those before it are at fault themselves
            self._done(1 if error is None else ahead + 1)
            backoff, failures = self._first_backoff, 0
        self._work_off()

    def _work_off(self) -> None:
        """At the end each call is made once more; its caller waits for as long as it likes."""
        while self._calls:
            error = _made(self._calls[0])
            if error is not None:
                self._say(error)
                self._dropped += 1
            self._done(1)

    def _done(self, count: int) -> None:
        with self._changed:
            for _ in range(count):
                self._calls.popleft()

    def _say(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        if not self._said:
            self._said = True
            logger.warning("%s does not take what is logged; training goes on: %s", self._service, mask(text))
        else:
            logger.debug("%s: %s", self._service, mask(text))


def _made(call: Callable[[], object]) -> BaseException | None:
    """Why a call failed; None if it did not."""
    try:
        call()
    except BaseException as error:  # a library that wants to end the process ends no thread of ours
        return error
    return None
