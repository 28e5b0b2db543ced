"""The local launcher: all processes of a job on this machine, started again together when one fails."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

from monsess.errors import ClusterError
from monsess.launch import environment
from monsess.launch.attempt import Attempt, Events, Signalled, Watch
from monsess.launch.culprit import Verdict, judge
from monsess.launch.records import read_records
from monsess.launch.screen import Screen
from monsess.launch.signals import delivered
from monsess.timer import check_secs, check_steps

__all__ = ["run"]

#: Exit statuses after which nothing is started again: called wrongly; told to end.
FINAL = frozenset({2, 128 + signal.SIGINT, 128 + signal.SIGTERM})
_FIRST_BACKOFF_SECS = 1.0
_LONGEST_BACKOFF_SECS = 30.0
#: After an attempt of this length the next failure is a new one, and waited for as briefly as the first.
_LONG_ATTEMPT_SECS = 600.0
#: What comes back in the same words comes from the same checkpoint and data, and so it would every time.
_COMES_BACK = ("NanLossDuringTrainingError", "NonFiniteStateError")
#: How Python begins the line with an error; what is noted on the error stands below.
_AN_ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt|Exit)(:|$)")


def run(
    command: Sequence[str],
    processes: int,
    *,
    max_restarts: int = 0,
    devices_per_process: int | None = None,
    log_dir: str | None = None,
    failure_timeout_secs: float = 15.0,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run a command as several processes of one job on this machine, and wait for its end.

    Every process runs the same command; ``MONSESS_PROCESS_ID`` and the other variables that `monsess.Server` reads
    tell it who it is. The first process that fails ends the attempt: the others get SIGTERM a second later, and SIGKILL
    within ``failure_timeout_secs``. Then all of them are started again, while ``max_restarts`` allows, with a new
    coordinator port and a back-off of 1, 2, 4, ... at most 30 seconds. After exit status 2 (called wrongly), 130 and
    143 (told to end), after a signal to the launcher itself, and after a loss or state that was not finite in the same
    way twice in a row, nothing is started again. In the main thread SIGINT
    and SIGTERM are passed on to the processes for as long as this runs; a second SIGINT kills them.

    Args:
        command: Program and arguments, such as ``[sys.executable, "train.py"]``.
        processes: How many, at least 1. Process 0 is the chief.
        max_restarts: How often all of them are started again, in total.
        devices_per_process: CPU devices that each process emulates; None leaves the devices alone.
        log_dir: Local folder for one file per process, ``process-<k>.log``, to which attempts append; None for none.
        failure_timeout_secs: Seconds from the first failure to the end of all processes, > 0.
        env: The environment of the processes; None for that of this one.

    Returns:
        0 if every process ended with 0. Otherwise the exit status of the process that failed first, 128 + n if signal n
        killed it.

    Raises:
        ValueError: A number out of its range, or an empty command.
        ClusterError: ``log_dir`` cannot be written, or no process could be started.

    Example:
        >>> import sys
        >>> from monsess.launch import local
        >>> local.run([sys.executable, "-c", "import os; assert os.environ['MONSESS_PROCESS_COUNT'] == '2'"], 2)
        0
    """
    if isinstance(command, str) or not command:
        raise ValueError(f"invalid command={command!r}: expected a list, such as [sys.executable, 'train.py'].")
    launch = _Launch(
        command=[os.fspath(part) for part in command],
        processes=check_steps("processes", processes),
        max_restarts=check_steps("max_restarts", max_restarts, at_least=0),
        devices=None if devices_per_process is None else check_steps("devices_per_process", devices_per_process),
        log_dir=log_dir,
        limit=check_secs("failure_timeout_secs", failure_timeout_secs),
        env=dict(os.environ if env is None else env),
    )
    return launch.run()


@dataclasses.dataclass
class _Launch:
    """What was asked for, and what all attempts share."""

    command: list[str]
    processes: int
    max_restarts: int
    devices: int | None
    log_dir: str | None
    limit: float
    env: dict[str, str]
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    screen: Screen = dataclasses.field(default_factory=lambda: Screen(sys.stdout, sys.stderr))
    events: Events = dataclasses.field(default_factory=queue.SimpleQueue)
    signals: list[int] = dataclasses.field(default_factory=list)

    def run(self) -> int:
        if self.log_dir is not None:
            with _explained(f"Could not make the folder for logs, {self.log_dir}"):
                os.makedirs(self.log_dir, exist_ok=True)
        with _explained("Could not make a temporary folder (TMPDIR says where)"):
            folder = tempfile.mkdtemp(prefix="monsess-run-")
        try:
            with delivered(self.events):
                with _explained("Could not start a process"):
                    watch = Watch(folder)
                try:
                    return self._attempts(folder, watch)
                finally:
                    watch.close()
                    self.screen.close()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _attempts(self, folder: str, watch: Watch) -> int:
        number, backoff, before = 0, _FIRST_BACKOFF_SECS, ""
        while True:
            begun = time.monotonic()
            verdict, tail = self._attempt(number, os.path.join(folder, str(number)), watch)
            lasted = time.monotonic() - begun
            if verdict.code == 0:
                if number:
                    self.screen.note(f"all processes ended well, in attempt {number}")
                return 0
            if self.signals or verdict.code in FINAL or number == self.max_restarts:
                self._report(verdict, tail, number, lasted)
                return verdict.code
            found, before = before, _not_finite(verdict, tail)
            if before and before == found:
                self._report(verdict, tail, number, lasted)
                self.screen.note("it failed so twice in a row, and starting again would not help: nothing is restarted")
                return verdict.code
            backoff = _FIRST_BACKOFF_SECS if lasted > _LONG_ATTEMPT_SECS else backoff
            number += 1
            self.screen.note(f"{verdict}; restart {number} of {self.max_restarts} in {backoff:g} s")
            if self._asked_within(backoff):
                self.screen.note("told to end; nothing is started again")
                return 128 + self.signals[0]
            backoff = min(_LONGEST_BACKOFF_SECS, 2 * backoff)

    def _attempt(self, number: int, failures: str, watch: Watch) -> tuple[Verdict, list[str]]:
        """Make one attempt; what it came to, and the last lines of the process that is the cause."""
        coordinator = environment.free_address()
        os.mkdir(failures)
        environments = [
            environment.environment(
                self.env,
                coordinator=coordinator,
                process_id=rank,
                process_count=self.processes,
                attempt=number,
                launch_id=self.id,
                failure_dir=failures,
                local_devices=self.devices,
            )
            for rank in range(self.processes)
        ]
        count = "1 process" if self.processes == 1 else f"{self.processes} processes"
        self.screen.note(f"starting {count}, attempt {number}, launch {self.id[:8]}, coordinator {coordinator}")
        files = self._files(number)
        with _explained("Could not start a process"):
            attempt = Attempt(
                self.command,
                environments,
                events=self.events,
                watch=watch,
                screen=self.screen,
                files=files,
                failure_timeout_secs=self.limit,
                signals=self.signals,
            )
        try:
            attempt.supervise()
        finally:
            attempt.close()
        verdict = judge(attempt.exits, read_records(failures), self.signals)
        return verdict, [] if verdict.rank is None else attempt.output.tail(verdict.rank)

    def _files(self, number: int) -> dict[int, BinaryIO]:
        if self.log_dir is None:
            return {}
        files: dict[int, BinaryIO] = {}
        with contextlib.ExitStack() as opened, _explained(f"Could not write the logs in {self.log_dir}"):
            for rank in range(self.processes):
                path = os.path.join(self.log_dir, f"process-{rank}.log")
                # Unbuffered: it is read while it is written.
                files[rank] = opened.enter_context(open(path, "ab", buffering=0))
                when = time.strftime("%Y-%m-%d %H:%M:%S %z")
                files[rank].write(f"--- monsess run: launch {self.id[:8]}, attempt {number}, {when} ---\n".encode())
            opened.pop_all()
        return files

    def _asked_within(self, seconds: float) -> bool:
        """Wait; whether the launcher is told to end before the time is over."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                event = self.events.get(timeout=left)
                if isinstance(event, Signalled):
                    self.signals.append(event.number)
                    return True
        return False

    def _report(self, verdict: Verdict, tail: list[str], number: int, lasted: float) -> None:
        """Say at the very end, where it is looked for, what the cause was."""
        note = self.screen.note
        if verdict.rank is None or (verdict.code in FINAL and verdict.code != 2):
            who = "the job" if verdict.rank is None else f"process {verdict.rank}"
            note(f"{who} was told to end, and did ({verdict.code})")
            return
        spent = f", the last of {self.max_restarts + 1}" if self.max_restarts and number == self.max_restarts else ""
        note(f"{verdict}; in attempt {number}{spent}, after {lasted:.1f} s")
        trace = verdict.record.traceback.rstrip() if verdict.record is not None else ""
        lines = trace.splitlines() or tail
        if lines:
            note("its traceback:" if trace else "its last lines:")
            note("\n".join(f"  [{verdict.rank}] {line}" for line in lines))
        if self.log_dir is not None:
            note(f"its log: {os.path.join(self.log_dir, f'process-{verdict.rank}.log')}")


def _not_finite(verdict: Verdict, tail: Sequence[str]) -> str:
    """The error of an attempt that ended for values that are not finite; empty for any other one."""
    if verdict.record is not None:
        lines = verdict.record.error.splitlines()[:1]
    elif verdict.end is not None and verdict.end.status > 0:  # what a process that was killed had said is not why
        lines = list(tail)
    else:
        return ""
    # The last error counts: one before it was handled, or has led to another.
    last = next((line for line in reversed(lines) if _AN_ERROR.match(line)), "")
    return last if last.partition(":")[0].rpartition(".")[2] in _COMES_BACK else ""


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn an error of the system into one that says what it kept us from."""
    try:
        yield
    except OSError as error:
        raise ClusterError(f"{what}: {error.strerror or error}.") from error
