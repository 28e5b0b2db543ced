"""One attempt of a job: start the processes, pass signals on, and see to it that the end of one is the end of all."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, BinaryIO, NamedTuple

from monsess.launch import guard
from monsess.launch.culprit import Exit
from monsess.launch.output import Output
from monsess.launch.screen import Screen

#: Between the first failure and the SIGTERM: processes that notice by themselves say more than those that are told.
_HEAD_START_SECS = 1.0
#: Share of the time limit after which SIGKILL follows; the rest is for the system to do it.
_KILL_SHARE = 0.8
_REMIND_SECS = 30.0
#: What a process leaves behind in its group, such as data workers, may take so long to notice by itself.
_LEFTOVER_SECS = 2.0


class Exited(NamedTuple):
    """A process has ended."""

    rank: int
    status: int
    seen: float


class Signalled(NamedTuple):
    """The launcher was sent a signal."""

    number: int


Events = queue.SimpleQueue[Exited | Signalled]


class Watch:
    """The process that outlives the launcher for as long as it takes to kill what it leaves.

    Args:
        folder: What it removes after that.
    """

    def __init__(self, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, "watch", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._lock = threading.Lock()

    def add(self, group: int) -> None:
        """Have a process group killed when the launcher dies."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """The group is over, and its number may be given away."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End it; groups that were not forgotten are killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError):  # somebody killed it; the job goes on all the same
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()


class Attempt:
    """The processes of one attempt, started when this is made.

    Args:
        command: What each process runs.
        environments: Per process its whole environment.
        events: Where exits and signals arrive.
        watch: The launch's.
        screen: Where lines go.
        files: Per process a file for what it writes, or nothing.
        failure_timeout_secs: From the first failure to the end of all.
        signals: Those of the launch so far; this attempt adds its own.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        events: Events,
        watch: Watch,
        screen: Screen,
        files: dict[int, BinaryIO],
        failure_timeout_secs: float,
        signals: list[int],
    ) -> None:
        self._events = events
        self._watch = watch
        self._screen = screen
        self._signals = signals
        self._limit = failure_timeout_secs
        self._sent: dict[int, int] = {}
        self._ending = False
        self._term_at = self._kill_at = self._remind_at = math.inf
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._waiters: list[threading.Thread] = []
        #: list of Exit: in the order in which they were seen.
        self.exits: list[Exit] = []
        #: Output: what the processes write.
        self.output = Output(screen, files)
        try:
            for rank, environment in enumerate(environments):
                self._start(rank, command, environment)
            self.output.start()
        except BaseException:
            self.close()
            raise

    def supervise(self) -> None:
        """Return when all processes have ended."""
        while self._running:
            due = min(self._term_at, self._kill_at, self._remind_at) - time.monotonic()
            try:
                event = self._events.get(timeout=None if due == math.inf else max(0.0, due))
            except queue.Empty:
                self._act_on_time()
                continue
            if isinstance(event, Exited):
                self._on_exit(event)
            else:
                self._on_signal(event.number)

    def close(self) -> None:
        """Kill what still runs, read what was written, and wait for all of it."""
        self._send(signal.SIGKILL)
        for waiter in self._waiters:
            if waiter.ident is not None:  # else the system had no thread for it
                waiter.join()
        self.output.finish()
        with contextlib.suppress(queue.Empty):
            while self._running:
                event = self._events.get_nowait()
                if isinstance(event, Exited):
                    self._on_exit(event)

    def _start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, "gate", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            # Ctrl-C on the terminal reaches the launcher alone, and what a process has started ends with it.
            start_new_session=True,
        )
        self._running[rank] = process
        waiter = threading.Thread(target=self._wait, args=(rank, process), name=f"monsess-wait-{rank}", daemon=True)
        self._waiters.append(waiter)
        self.output.add(rank, _own(process.stdout), _own(process.stderr))
        self._watch.add(process.pid)
        waiter.start()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # killed already
            process.stdin.write(b"\n")
            process.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()

    def _wait(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        self._events.put(Exited(rank, status, time.time()))
        until = time.monotonic() + _LEFTOVER_SECS
        while _kill_group(process.pid, 0) and time.monotonic() < until:
            time.sleep(0.02)
        _kill_group(process.pid, signal.SIGKILL)
        self._watch.forget(process.pid)

    def _on_exit(self, event: Exited) -> None:
        del self._running[event.rank]
        self.exits.append(Exit(*event, self._sent.get(event.rank)))
        if event.status == 0 or self._ending:
            return
        self._ending = True
        now = time.monotonic()
        self._term_at = now + min(_HEAD_START_SECS, self._limit * _KILL_SHARE / 2)
        self._kill_at = now + self._limit * _KILL_SHARE
        self._remind_at = now + _REMIND_SECS
        if self._running:
            news = f"process {event.rank} ended: {self.exits[-1]}; the others end with it"
            self.output.note_after(event.rank, news)

    def _on_signal(self, number: int) -> None:
        again = number == signal.SIGINT and signal.SIGINT in self._signals
        self._signals.append(number)
        self._remind_at = time.monotonic() + _REMIND_SECS
        if again:
            self._send(signal.SIGKILL)
            self._screen.note("interrupted again: the processes are killed")
        else:
            self._send(number)
            more = "; Ctrl-C again kills them" if number == signal.SIGINT else ""
            self._screen.note(f"{signal.Signals(number).name} passed on to {self._who()}{more}")

    def _act_on_time(self) -> None:
        now = time.monotonic()
        if now >= self._term_at:
            self._term_at = math.inf
            if not self._signals:  # they have been told
                self._send(signal.SIGTERM)
        if now >= self._kill_at:
            self._kill_at = math.inf
            self._send(signal.SIGKILL)
            self._screen.note(f"SIGKILL sent to {self._who()}, {self._limit * _KILL_SHARE:.3g} s after the first end")
        if now >= self._remind_at:
            self._remind_at = now + _REMIND_SECS
            self._screen.note(f"waiting for {self._who()} to end")

    def _send(self, number: int) -> None:
        for rank, process in self._running.items():
            self._sent[rank] = number
            if number == signal.SIGKILL:
                _kill_group(process.pid, number)
            else:
                process.send_signal(number)

    def _who(self) -> str:
        ranks = sorted(self._running)
        return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _own(stream: IO[bytes] | None) -> int:
    """A descriptor of its own for a pipe whose file object goes away."""
    assert stream is not None
    with stream:
        return os.dup(stream.fileno())


def _kill_group(group: int, number: int) -> bool:
    """Send a signal to a process group; whether there was one."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except OSError:  # there is one that may not be killed
        pass
    return True
