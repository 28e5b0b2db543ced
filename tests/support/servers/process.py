"""Processes that end with the one who started them, and what the servers made of them have in common."""

from __future__ import annotations

import abc
import contextlib
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

#: Where this is set, a server that is not installed is a failure instead of a skip.
REQUIRED = "MONSESS_REQUIRE_SERVERS"
KEY, SECRET = "AKIAMONSESSSMOKETEST", "s3cr3t/of+the-smoke.test"
#: Seconds that a server may take to start, or to recover from a SIGKILL, on a machine with other things to do.
START_SECS = 120

# The server must not outlive a test run that is killed: the shell's standard input ends with the one who started it.
_LEASH = 'log=$1; shift; "$@" >> "$log" 2>&1 & server=$!; echo $server; read -r _; kill -9 $server 2> /dev/null'


def require(module: str | None = None, binary: str | None = None, *, file: str | None = None, server: str = "") -> str:
    """Skip the test that needs what is not installed, or fail it where servers are required.

    Args:
        module: An importable module.
        binary: A program, of this Python's environment, on the path, or in a directory for administrators' programs.
        file: A path that a system package installs.
        server: What is needed, in words.

    Returns:
        The path of ``binary``, if asked for.
    """
    missing = [] if module is None or importlib.util.find_spec(module) else [module]
    where = (sysconfig.get_path("scripts"), os.environ["PATH"], "/usr/sbin", "/sbin")
    found = binary and shutil.which(binary, path=os.pathsep.join(where))
    if binary is not None and not found:
        missing.append(binary)
    if file is not None and not os.path.exists(file):
        missing.append(file)
    if missing:
        what = f"{server}, a server," if server else "a server"
        reason = (
            f"needs {what} and this machine lacks {' and '.join(missing)}: `make servers` installs S3, HDFS and "
            "Chromium, `scripts/servers.sh` any of them"
        )
        (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(reason)
    return found or ""


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on right now.

    They lie below those that the system gives to outgoing connections. Otherwise one of these could take the port while
    a server is being restarted, or a client that knocks at it again and again could get connected to itself.
    """
    try:
        below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        below = 32768
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = random.SystemRandom().randrange(min(20000, below - 5000), below)
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                found.append(port)
    return found


def wait_until_free(port: int) -> None:
    """Wait until a server may listen on a port of 127.0.0.1, which one that was just killed may still hold."""
    deadline = time.monotonic() + 30
    while True:
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("127.0.0.1", port))
                one.listen()
            except OSError:
                assert time.monotonic() < deadline, f"port {port} stays taken"
                time.sleep(0.02)
            else:
                return


def answers(port: int) -> bool:
    """Whether somebody listens on a port of 127.0.0.1."""
    with socket.socket() as one:
        one.settimeout(5)
        return one.connect_ex(("127.0.0.1", port)) == 0


class Process:
    """A server's process, in a session of its own; it and its children get a SIGKILL when its starter is gone.

    Args:
        command: Program and arguments.
        log: File to which it appends what it prints.
        env: Its whole environment, besides ``PATH``.
        cwd: Its working directory.
    """

    def __init__(self, command: Sequence[str], log: Path, *, env: Mapping[str, str], cwd: Path) -> None:
        self._log = log
        self._shell = subprocess.Popen(
            ["sh", "-c", _LEASH, "sh", str(log), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], **env},
            cwd=cwd,
            start_new_session=True,  # Ctrl-C at a terminal would end the shell and leave the server
            text=True,
        )
        assert self._shell.stdout is not None
        #: int: of the server, not of the shell that watches over it.
        self.pid = int(self._shell.stdout.readline())

    def check(self) -> None:
        """Raise RuntimeError, with the end of the log, if the process has ended."""
        if not is_running(self.pid):
            raise RuntimeError(f"the server has ended:\n{self.tail()}")

    def wait(self) -> None:
        """Wait until the process has ended by itself."""
        deadline = time.monotonic() + START_SECS
        while is_running(self.pid):
            assert time.monotonic() < deadline, f"does not end:\n{self.tail()}"
            time.sleep(0.05)
        self.kill()

    def tail(self) -> str:
        """The end of the log."""
        return self._log.read_text(errors="replace")[-3000:]

    def signal(self, number: int) -> None:
        """Send a signal to the process and all it has started."""
        for pid in _family(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """SIGKILL; returns when nothing of it runs any more."""
        if self._shell.poll() is not None:
            return
        family = _family(self.pid)
        self.signal(signal.SIGKILL)
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.close()
        self._shell.wait(timeout=30)
        self._shell.stdout.close()
        deadline = time.monotonic() + 30
        while any(map(is_running, family)):
            assert time.monotonic() < deadline, f"does not end after SIGKILL: {family}"
            time.sleep(0.02)


class Server(abc.ABC):
    """A store on loopback: a context manager that starts and ends it.

    Args:
        folder: Where its data and logs lie; they survive `kill`.
    """

    #: str: what it is called in the names of tests.
    name: ClassVar[str]
    #: str: the URL below which directories may be made.
    url: str
    #: dict: the storage options for `url`.
    options: dict[str, Any]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Process] = []

    @abc.abstractmethod
    def prepare(self) -> None:
        """Choose ports and write the configuration, once; skip the test if something is not installed."""

    @abc.abstractmethod
    def launch(self) -> None:
        """Start all processes, which may take further time until they answer."""

    @abc.abstractmethod
    def knock(self) -> None:
        """Use the store through monsess's own client library; any exception says that it is not ready."""

    def start(self, wait: bool = True) -> None:
        """Start it, with the data that it has, and wait until it takes objects unless told not to."""
        self.launch()
        if wait:
            self.until(self.knock)

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        for process in self.processes:
            process.kill()
        self.processes = []

    def pause(self) -> None:
        """Let it hang: connections are taken by the system, and nobody answers."""
        for process in self.processes:
            process.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End a `pause`."""
        for process in self.processes:
            process.signal(signal.SIGCONT)

    def run(self, command: Sequence[str], log: Path, **env: str) -> Process:
        """Start one of its processes."""
        process = Process(command, log, env={"HOME": str(self.folder), **env}, cwd=self.folder)
        self.processes.append(process)
        return process

    def until(self, works: Callable[[], None]) -> None:
        """Call ``works`` until it does, as long as all processes run."""
        deadline = time.monotonic() + START_SECS
        while True:
            try:
                works()
            except Exception as error:
                for process in self.processes:
                    process.check()
                if time.monotonic() > deadline:
                    tails = "\n".join(process.tail() for process in self.processes)
                    raise RuntimeError(f"{self.name} is not ready ({error!r}):\n{tails}") from error
                time.sleep(0.1)
            else:
                return

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.prepare()
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def is_running(pid: int) -> bool:
    """Whether there is such a process, other than one that has ended and was not waited for."""
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
            return True
        # Its first thread may have ended before the others, which still hold its files and its ports.
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def _family(pid: int) -> list[int]:
    """A process and those that it and they have started."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry))
    family = [pid]
    for one in family:
        family += parents.get(one, [])
    return family
