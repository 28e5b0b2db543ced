"""Jobs of several real processes for tests: each run is bounded in time and leaves no process behind.

::

    with Cluster(tmp_path) as cluster:
        first, second = cluster.run(2, events=[Event(1, "after_run", "raise", step=4)])
        assert first.code == 1
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import cluster_fork
from cluster_child import Event, Options

from monsess.launch.environment import free_address

__all__ = ["Cluster", "Ended", "Event", "Options", "Running"]

#: Seconds after which the processes of a job are killed and the test fails.
LIMIT = 90.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """What one process has left.

    Args:
        index: Which one.
        code: Its exit status; negative: the signal that ended it.
        at: When it ended, as `time.monotonic` says.
        seconds: From the start of the job to its end.
        output: All that it wrote.
        report: What `cluster_child` reports; empty if it did not get there.
        events: When what was planned happened: ``(at, what, place, step)``.
    """

    index: int
    code: int
    at: float
    seconds: float
    output: str
    report: dict[str, Any]
    events: list[tuple[float, str, str, str]]

    @property
    def error(self) -> str:
        """What ended its training, as ``"Type: message"``."""
        return self.report.get("error", "")


class Running:
    """A job whose processes run.

    Args:
        folder: For their outputs and reports.
        pids: Process ids by index.
    """

    def __init__(self, folder: Path, pids: dict[int, int]) -> None:
        self.begun = time.monotonic()
        self.folder = folder
        self.pids = pids
        self.over: list[Ended] = []

    def output(self, index: int) -> str:
        """What a process has written so far."""
        path = self.folder / f"{index}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def wrote(self, index: int, text: str, seconds: float = LIMIT) -> None:
        """Wait until a process has written ``text``."""
        self.until(lambda: text in self.output(index), seconds, f"process {index} did not write {text!r}")

    def happened(self, index: int, what: str, seconds: float = LIMIT) -> float:
        """Wait until something planned has happened in a process; when it did."""

        def when() -> list[float]:
            return [at for at, do, _, _ in _events(self.folder, index) if do == what]

        self.until(when, seconds, f"{what} did not happen in process {index}")
        return when()[0]

    def until(self, condition: Any, seconds: float = LIMIT, otherwise: str = "waited in vain") -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            outputs = [f"--- {index}\n{self.output(index)}" for index in self.pids]
            assert time.monotonic() < deadline, "\n".join([otherwise, *outputs])
            time.sleep(0.01)

    def has_ended(self, index: int) -> bool:
        """Whether a process is gone."""
        try:
            os.kill(self.pids[index], 0)
        except ProcessLookupError:
            return True
        return False

    def send(self, index: int, number: signal.Signals) -> None:
        """Send a process a signal, if it is still there."""
        try:
            os.kill(self.pids[index], number)
        except ProcessLookupError:
            pass


class Cluster:
    """Starts jobs, one at a time.

    Args:
        scratch: Where it may make folders.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._numbers = itertools.count(1)
        with open(scratch / "server.txt", "ab") as errors:
            self._server = subprocess.Popen(
                [sys.executable, "-W", "error", cluster_fork.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=_without_cluster(),
            )

    def folder(self, name: str) -> Path:
        """A new folder."""
        path = self._scratch / f"{next(self._numbers)}-{name}"
        path.mkdir()
        return path

    def run(self, count: int, devices: int | Sequence[int] = 1, limit: float = LIMIT, **options: Any) -> list[Ended]:
        """Run a job to its end.

        Args:
            count: How many processes.
            devices: Of each, or those of one after the other.
            limit: Seconds after which they are killed, and the test fails.
            **options: See `Options`; ``events`` may be any sequence.
        """
        with self.start(count, devices, limit, **options) as job:
            pass
        return job.over

    @contextmanager
    def start(
        self, count: int, devices: int | Sequence[int] = 1, limit: float = LIMIT, **options: Any
    ) -> Iterator[Running]:
        """Run a job; inside the with-block it runs, after it `Running.over` says how it ended."""
        folder = self.folder("job")
        address = free_address() if count > 1 else None
        options["events"] = tuple(options.get("events", ()))
        numbers = [devices] * count if isinstance(devices, int) else devices
        processes = [
            dataclasses.asdict(Options(str(folder), index, count, address, numbers[index], **options))
            for index in range(count)
        ]
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps({"processes": processes, "limit": limit}) + "\n")
        self._server.stdin.flush()
        job = Running(folder, {int(index): pid for index, pid in self._read()["pids"].items()})
        ends: list[dict[str, Any]] = []
        reader = threading.Thread(target=lambda: ends.extend(self._read() for _ in range(count)), daemon=True)
        reader.start()
        try:
            yield job
        except BaseException:
            for index in range(count):
                job.send(index, signal.SIGKILL)
            raise
        finally:
            reader.join(limit + 30)
        assert len(ends) == count, f"the processes of {folder} do not end"
        job.over = [self._ended(job, end) for end in sorted(ends, key=lambda end: end["ended"])]
        late = [one.index for one in job.over if one.seconds > limit]
        assert not late, f"killed after {limit:g} s: {late}\n{outputs(job.over)}"
        assert not any(end["left_processes"] for end in ends), f"a process was left behind\n{outputs(job.over)}"

    def _ended(self, job: Running, end: dict[str, Any]) -> Ended:
        index = end["ended"]
        path = job.folder / f"{index}.json"
        report = json.loads(path.read_text()) if path.exists() else {}
        events = _events(job.folder, index)
        return Ended(index, end["code"], end["at"], end["at"] - job.begun, job.output(index), report, events)

    def _read(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, f"the server ended:\n{(self._scratch / 'server.txt').read_text()}"
        return json.loads(line)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            self._server.kill()  # its children die with it
            raise
        finally:
            self._server.wait()
            self._server.stdout.close()


def outputs(ended: Sequence[Ended]) -> str:
    """All that the processes wrote, for messages."""
    return "\n".join(f"--- process {one.index}: {one.code} after {one.seconds:.1f} s\n{one.output}" for one in ended)


def all_ended_well(ended: Sequence[Ended]) -> None:
    """Every process ended with 0, and no thread was left in it."""
    assert [one.code for one in ended] == [0] * len(ended), outputs(ended)
    assert [one.report["threads"] for one in ended] == [[]] * len(ended), outputs(ended)


def _events(folder: Path, index: int) -> list[tuple[float, str, str, str]]:
    path = folder / f"{index}.events"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [line.split() for line in lines]
    return [(float(one[0]), one[1], one[2], one[3]) for one in found if len(one) == 4]


def _without_cluster() -> dict[str, str]:
    # The flags of this process would give each of them four devices; a pool of threads does not survive a fork.
    prefixes = ("MONSESS_", "SLURM_", "OMPI_", "TF_CONFIG", "XLA_FLAGS", "JAX_", "KUBERNETES_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return kept | {"OPENBLAS_NUM_THREADS": "1"}
