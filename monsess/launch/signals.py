"""Signals to the launcher, as events of its one loop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from monsess.launch.attempt import Events, Signalled


@contextlib.contextmanager
def delivered(events: Events) -> Iterator[None]:
    """Have SIGINT and SIGTERM, and SIGHUP as SIGTERM, put into ``events`` inside the block, unless they are ignored.

    Outside the main thread, where Python allows no handler, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def put(number: int, frame: FrameType | None) -> None:
        events.put(Signalled(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM))

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # nohup, a shell's background
    before = {number: signal.signal(number, put) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
