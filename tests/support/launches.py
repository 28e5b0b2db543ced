"""Launches for tests: what they leave behind is found by a mark in its environment, and does not stay."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from monsess.launch import local

_MARK = "MONSESS_TEST_MARK"
#: Seconds after which something counts as hanging.
LIMIT = 60.0

# A process that says that it is there, then what signals it gets, and ends at the end of the world.
STUBBORN = """
def heard(number, frame):
    open(here + f'heard-{rank}-{number}', 'w').close()
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, heard)
open(here + f'there-{rank}', 'w').close()
"""
# For what is measured without the start of the interpreters, which takes its time on a busy machine.
NOTES = """
def note(name):
    with open(here + name + '.new', 'w') as file:
        file.write(str(time.monotonic()))
    os.rename(here + name + '.new', here + name)
"""


class Launches:
    """Starts launches that can be told apart from everything else on the machine.

    Args:
        folder: Where scripts lie and processes stand.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.env = {**os.environ, _MARK: self.mark, "TMPDIR": str(folder), "HERE": str(folder)}

    def run(self, script: str, processes: int = 2, **options: object) -> int:
        """Launch a script from this process; it sees ``rank``, ``attempt``, `os`, `sys`, `time` and `signal`."""
        code = (
            "import os, signal, sys, time\n"
            "rank, attempt = int(os.environ['MONSESS_PROCESS_ID']), int(os.environ['MONSESS_ATTEMPT'])\n"
            "here = os.environ['HERE'] + '/'\n" + script
        )
        command = [sys.executable, "-I", "-S", "-c", code]
        return local.run(command, processes, env=self.env, **options)  # type: ignore[arg-type]

    def program(self, *arguments: object) -> subprocess.Popen[str]:
        """``python -m monsess run`` as a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "monsess", "run", *map(str, arguments)],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def alive(self) -> dict[int, str]:
        """The processes that carry the mark, this one excepted: their ids and command lines."""
        found = {}
        for name in os.listdir("/proc"):
            if name.isdecimal() and int(name) != os.getpid():
                with contextlib.suppress(OSError):
                    if f"{_MARK}={self.mark}".encode() in Path("/proc", name, "environ").read_bytes():
                        command = Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ")
                        if command:  # a zombie has none
                            found[int(name)] = command.decode(errors="replace")
        return found

    def wait_for(self, what: str, there: bool = True) -> None:
        """Wait until there is a file, or there is none."""
        wait_until(lambda: (self.folder / what).exists() == there, what)

    def noted(self, name: str) -> float:
        """When a script called ``note(name)`` of `NOTES`."""
        return float((self.folder / name).read_text())

    def left(self) -> dict[int, str]:
        """What does not go away; a process that was sent SIGKILL takes a moment to."""
        until = time.monotonic() + 5
        while self.alive() and time.monotonic() < until:
            time.sleep(0.02)
        return self.alive()

    def __enter__(self) -> Launches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self.left()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert left == {}, "processes were left behind"
        assert list(self.folder.glob("monsess-run-*")) == []


def wait_until(condition: object, what: str = "") -> None:
    """Poll until ``condition()`` holds."""
    until = time.monotonic() + LIMIT
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until, f"waited for {what} for {LIMIT:.0f} s"
        time.sleep(0.02)


@contextlib.contextmanager
def signalled(number: int, when: object) -> Iterator[None]:
    """Send this process a signal as soon as ``when()`` holds."""

    def send() -> None:
        wait_until(when)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()
