"""A process of a job that fails outside a session leaves its error for the others, and leaves at once."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its exit handler, which waits for executors, has to come after ours
import contextlib
import faulthandler
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Collection
from types import FrameType, TracebackType
from typing import Any, NoReturn

import jax

from monsess.channel import Channel
from monsess.launch.records import write_record
from monsess.log import mask
from monsess.signals import EXIT_CODES

_CHANNEL = "processes"
_LEFT = "left"
_GONE = "gone"
#: Longer than others need that find the same and whose training thread is stuck.
_LINGER_SECS = 5.0
#: Of the failure limit: what is left to run after an error, such as a thread that Python's exit waits for, has that.
_LEAVE_PART = 0.8


class _LastWords:
    """Sees to it that an error of this process ends it at once, with its own exit code.

    JAX's exit waits for all processes of the job, which wait for this one; after minutes it would end them all from
    native code, and this one's exit code with them.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._code: int | None = None
        self._channel: Channel | None = None
        self._failure_secs = math.inf
        self._parted = False
        self._told = False

    def listen(self, failure_secs: float) -> None:
        """From now on: record every error that ends this process, and leave without waiting for the others.

        Args:
            failure_secs: From an error to the end of this process at most, whatever its other threads do.
        """
        if self._before is not None:
            return
        self._failure_secs = failure_secs
        self._before = sys.excepthook
        sys.excepthook = self._hear
        atexit.register(self._leave)
        # Before Python joins threads, which atexit comes after. Without it only the hook, if it is still there, sees
        # an error that early.
        register = getattr(threading, "_register_atexit", None)
        if register is not None:
            register(self._look_back)

    def joined(self) -> None:
        """The job has been joined: the others can be told."""
        self._channel = Channel(_CHANNEL)

    def parted(self) -> None:
        """A session has ended well on all processes: from now on a signal to this one is no failure of the job."""
        self._parted = True

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

    def forget(self) -> None:
        """A child of this process is none of the job, and has no last words for it."""
        if self._before is None:
            return
        atexit.unregister(self._leave)
        if sys.excepthook == self._hear:
            sys.excepthook = self._before
        if signal.getsignal(signal.SIGTERM) == self._end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._before = self._code = self._channel = None

    def _end(self, number: int, frame: FrameType | None) -> NoReturn:
        leave = SystemExit(EXIT_CODES[signal.Signals(number)])
        if not self._parted:
            self.doom(leave)
        raise leave

    def _hear(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.doom(error)
        write_record(error)
        self._before(kind, error, trace)
        self._end_in_time()
        self._tell(_shown(error))

    def _look_back(self) -> None:
        """Find the error that ends this process where another hook has replaced the one above."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if self._before is None or self._code is not None or error is None or hasattr(sys, "ps1"):
            return
        trace = error.__traceback__
        if trace is None or trace.tb_frame.f_back is not None:
            return  # it was printed and dealt with somewhere; it did not pass the end of the script
        self.doom(error)
        write_record(error)
        self._end_in_time()
        self._tell(_shown(error))

    def _end_in_time(self) -> None:
        """End this process soon even if a thread, a handler or the coordination service keeps it."""
        if not jax.distributed.is_initialized():
            return
        seconds = _LEAVE_PART * self._failure_secs
        timer = threading.Timer(seconds, self._cut_off)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # from Python 3.12 on there are no new threads once it waits for the others
            with contextlib.suppress(Exception):  # stderr may be no file
                faulthandler.dump_traceback_later(seconds, exit=True)

    def _tell(self, what: str) -> None:
        """Tell the others, who may wait for this process at the start of a session."""
        if self._channel is None or self._told or not jax.distributed.is_initialized():
            return
        self._told = True
        with contextlib.suppress(Exception):  # the service may be gone
            self._channel.post(f"{_LEFT}/{self._channel.index}", what)

    def _leave(self) -> None:
        self._look_back()
        if not jax.distributed.is_initialized():
            return
        if self._code is None:
            if signal.getsignal(signal.SIGTERM) == self._end:
                # What it ends with is decided. Python would give the signal its default meaning on its way out.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._tell("")
            return
        self._end_in_time()
        self._tell(f"exit code {self._code}")
        if self._channel is not None:  # asked before the join has ended, JAX's client aborts the process
            say_goodbye(self._failure_secs)
        logging.shutdown()  # its own exit handler would have its turn after this one, that is, never
        self._cut_off()

    def _cut_off(self) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        assert self._code is not None
        os._exit(self._code)


def say_goodbye(failure_secs: float, dead: Collection[int] = ()) -> None:
    """Before this process ends: process 0, which holds the coordination service, lets the others go first.

    JAX aborts those that it leaves behind, with an exit code that says nothing.

    Args:
        failure_secs: From any failure to the end of this process; it lingers for a part of that.
        dead: Who need not be waited for.
    """
    with contextlib.suppress(Exception):  # the service may be gone
        channel = Channel(_CHANNEL)
        channel.post(f"{_GONE}/{channel.index}", "")
        deadline = time.monotonic() + min(_LINGER_SECS, failure_secs / 3)
        while channel.index == 0 and time.monotonic() < deadline:
            gone = {*dead, *map(int, channel.under(_GONE))}
            # Whoever has come to its end well waits in JAX's exit for all, and cannot be helped.
            gone.update(int(index) for index, what in channel.under(_LEFT).items() if not what)
            if len(gone) >= channel.count:
                return
            time.sleep(0.05)


def _shown(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return mask(text)


def those_who_left() -> dict[int, str]:
    """The processes of the job that have come to their end outside a session, and how, for people.

    Raises:
        ClusterError: This process has not joined a job.
    """
    ends = {int(index): what for index, what in Channel(_CHANNEL).under(_LEFT).items()}
    return {index: _without_a_session(index, ends[index]) for index in sorted(ends)}


def _without_a_session(index: int, what: str) -> str:
    if what:
        return f"Process {index} has ended outside the session: {what.rstrip('.')}. All processes end."
    return (
        f"Process {index} has reached the end of its script without a session, while others make one, which all "
        "processes of the job have to do. All processes end."
    )


last_words = _LastWords()
if hasattr(os, "register_at_fork"):
    # After that of monsess.signals, imported above, which puts the handler from here back.
    os.register_at_fork(after_in_child=last_words.forget)
