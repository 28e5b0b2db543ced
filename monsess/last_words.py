"""A process of a job that fails outside a session leaves its error for the launcher, and leaves at once."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, NoReturn

import jax

from monsess.launch.records import write_record


class _LastWords:
    """Sees to it that an error of this process ends it at once, with its own exit code.

    JAX's exit waits for all processes of the job, which wait for this one; after minutes it would end them all from
    native code, and this one's exit code with them.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._code: int | None = None

    def listen(self) -> None:
        """From now on: record every error that ends this process, and leave without waiting for the others."""
        if self._before is None:
            self._before = sys.excepthook
            sys.excepthook = self._hear
            atexit.register(self._leave)

    def doom(self, error: BaseException) -> None:
        """Leave that way whatever follows: a join that was begun and did not end cannot be taken back."""
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            self._code = error.code
        else:
            self._code = 130 if isinstance(error, KeyboardInterrupt) else 1

    def keep_sigterm(self, before: Any) -> None:
        """Give SIGTERM its meaning back, which JAX takes away as it joins: it would do nothing from then on.

        Args:
            before: The handler that was there before, which is put back; where there was none, the process ends with
                exit code 143. A session has a handler of its own.
        """
        if before is None or threading.current_thread() is not threading.main_thread():
            return  # not Python's, or not to be changed from here
        signal.signal(signal.SIGTERM, self._end if before is signal.SIG_DFL else before)

    def _end(self, number: int, frame: FrameType | None) -> NoReturn:
        leave = SystemExit(128 + number)
        self.doom(leave)
        raise leave

    def _hear(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.doom(error)
        write_record(error)
        self._before(kind, error, trace)

    def _leave(self) -> None:
        if self._code is None or not jax.distributed.is_initialized():
            return
        logging.shutdown()  # its own exit handler would have its turn after this one, that is, never
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(self._code)


last_words = _LastWords()
