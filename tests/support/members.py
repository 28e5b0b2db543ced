"""Processes that find each other as those of a job do, for tests: each ends by itself or is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

#: Seconds after which a process is killed and the test fails.
LIMIT = 90.0

_HEAD = """\
import os, sys, time
import monsess.waiting
monsess.waiting.SAY_SECS = 0.5
import jax, monsess as ms
"""


class Member:
    """One process.

    Args:
        script: What it runs, after imports; lines for people come every half second.
        environ: Changes of the environment.
        folder: Where its output goes.
    """

    def __init__(self, script: str, environ: Mapping[str, str], folder: Path) -> None:
        self._begun = time.monotonic()
        self._output = folder / f"{time.monotonic_ns()}.txt"
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _HEAD + script],
                env=_without_cluster() | {"JAX_PLATFORMS": "cpu", **environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        # JAX keeps SIGTERM from ending a process.
        self._watchdog = threading.Timer(LIMIT, self._process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()

    @property
    def text(self) -> str:
        """What it has written so far."""
        return self._output.read_text(errors="replace")

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._begun

    def wrote(self, text: str) -> Member:
        """Wait until it has written ``text``."""
        while text not in self.text:
            assert self._process.poll() is None, f"it ended with {self._process.returncode}:\n{self.text}"
            assert self.seconds < LIMIT, self.text
            time.sleep(0.02)
        return self

    def send(self, number: signal.Signals) -> Member:
        """Send it a signal."""
        self._process.send_signal(number)
        return self

    def ended(self, code: int | None = 0) -> str:
        """Wait for its end with exit status ``code`` (None: any but 0); what it has written."""
        found = self._process.wait()
        assert self.seconds < LIMIT, f"it had to be killed:\n{self.text}"
        as_wanted = found != 0 if code is None else found == code
        assert as_wanted, f"it ended with {found}, expected {code}:\n{self.text}"
        return self.text

    def kill(self) -> None:
        """End it, if it still runs."""
        self._watchdog.cancel()
        self._process.kill()
        self._process.wait()


class Members:
    """Starts processes, and leaves none behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._members: list[Member] = []

    def start(self, script: str, environ: Mapping[str, str] | None = None) -> Member:
        """Start one; see `Member`."""
        member = Member(script, environ or {}, self._folder)
        self._members.append(member)
        return member

    def job(self, script: str, *environs: Mapping[str, str]) -> list[Member]:
        """Start one for each environment."""
        return [self.start(script, environ) for environ in environs]

    def __enter__(self) -> Members:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self._members:
            member.kill()


def monsess_run(address: str, index: int, count: int = 2, **more: object) -> dict[str, str]:
    """What process ``index`` finds in its environment under `monsess run`."""
    variables = {"COORDINATOR": address, "PROCESS_ID": index, "PROCESS_COUNT": count, "LAUNCH_ID": "ab", **more}
    return {f"MONSESS_{name}": str(value) for name, value in variables.items()}


def _without_cluster() -> dict[str, str]:
    # The flags of this process would give each of them four devices.
    prefixes = ("MONSESS_", "SLURM_", "OMPI_", "TF_CONFIG", "XLA_FLAGS", "JAX_", "KUBERNETES_")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
