"""Training runs in one directory, each a process of its own, which a test kills, freezes and lets go on.

``python owner_child.py`` imports everything, touches no device, and forks what each line of JSON on its standard input
asks for: a start without the imports. It ends, and everything it has forked, when its input does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from typing import Any

#: Seconds after which something counts as hanging.
LIMIT = 120


class Runs:
    """The process that forks, as a test sees it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def train(self, log: str, url: str, **options: Any) -> Run:
        """Start a training run that appends to the file ``log``; see `train` for the options."""
        return Run(self, self._ask({"do": "train", "log": log, "url": url, **options}), log)

    def race(self, url: str, count: int, rounds: int, storage_options: dict[str, Any] | None = None) -> list[Any]:
        """Have ``count`` processes begin in one directory at the same moment; see `race`."""
        request = {"do": "race", "url": url, "count": count, "rounds": rounds, "storage_options": storage_options}
        return self._ask(request)

    def wait(self, pid: int) -> int:
        """The exit status of a run."""
        return self._ask({"do": "wait", "pid": pid})

    def close(self) -> None:
        """End it and what it has forked."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(LIMIT)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process that forks ended with {self._process.wait(LIMIT)}"
        return json.loads(line)


class Run:
    """One training run."""

    def __init__(self, runs: Runs, pid: int, log: str) -> None:
        self._runs = runs
        self._log = log
        self.pid = pid

    @property
    def lines(self) -> list[str]:
        """What it has said so far."""
        try:
            with open(self._log, encoding="utf-8") as file:
                return file.read().splitlines()
        except FileNotFoundError:
            return []

    def until(self, text: str) -> None:
        """Wait until it has said ``text``."""
        deadline = time.monotonic() + LIMIT
        while not any(text in line for line in self.lines):
            assert time.monotonic() < deadline, f"no {text!r} in\n" + "\n".join(self.lines)
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def stop(self) -> None:
        """Have it end cleanly."""
        with open(f"{self._log}.stop", "w"):
            pass

    def wait(self) -> int:
        """Wait for its end; the exit status."""
        return self._runs.wait(self.pid)


def prepare() -> None:
    """Import all that training needs; no device is touched and no thread started."""
    from monsess.testing import emulate_devices

    emulate_devices(1)
    import orbax.checkpoint  # noqa: F401
    import tensorstore  # noqa: F401

    import monsess.faulty.filesystem  # noqa: F401


def pretend(host: str | None, interval: float | None, launch: str | None) -> None:
    """Be on another machine, with quicker heartbeats."""
    import socket

    from monsess.checkpoint import ownership

    if host is not None:
        socket.gethostname = lambda: host
    if interval is not None:
        ownership.INTERVAL_SECS = interval
    if launch is not None:
        os.environ[ownership.LAUNCH_ID] = launch


def train(request: dict[str, Any]) -> int:
    """Count to ``last`` or until told to stop, and save every other step; returns the exit status."""
    import logging

    import jax.numpy as jnp

    import monsess as ms

    def say(text: str) -> None:
        os.write(1, f"{text}\n".encode())

    pretend(request.get("host"), request.get("interval"), request.get("launch"))
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    options = storage_options(request)
    if options is not None and "kill" in request:
        options["faults"].kill(**request["kill"])

    @ms.train_step
    def count(state: Any) -> Any:
        return {"n": state["n"] + 1}, {}

    try:
        with ms.MonitoredTrainingSession(
            lambda: {"n": jnp.zeros(())},
            checkpoint_dir=request["url"],
            storage_options=options,
            save_checkpoint_steps=2,
            keep=ms.KeepLast(1000),
            hooks=[ms.StopAtStepHook(last_step=request["last"])],
        ) as sess:
            say(f"from {sess.restored_from}")
            while not sess.should_stop():
                time.sleep(request.get("pause", 0.05))
                sess.run(count)
                say(f"step {sess.global_step}")
                if os.path.exists(f"{request['log']}.stop"):
                    sess.request_stop()
        say("ended")
        return 0
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
        return 1


def race(request: dict[str, Any]) -> list[list[str]]:
    """Have several processes begin at once; per round, who still has the directory when all have looked twice."""
    context = multiprocessing.get_context("fork")
    outcomes = []
    for number in range(request["rounds"]):
        together = context.Barrier(request["count"])
        results = context.SimpleQueue()
        racers = [
            context.Process(target=_run_in_race, args=(request, f"{number}-{one}", together, results))
            for one in range(request["count"])
        ]
        for racer in racers:
            racer.start()
        outcomes.append(sorted(results.get() for _ in racers))
        for racer in racers:
            racer.join()
    return outcomes


def _run_in_race(request: dict[str, Any], attempt: str, together: Any, results: Any) -> None:
    from monsess.checkpoint import ownership
    from monsess.checkpoint.owner import read_owner
    from monsess.checkpoint.ownership import Ownership
    from monsess.checkpoint.store import CheckpointStore
    from monsess.errors import DirectoryInUseError

    store = CheckpointStore(request["url"], storage_options(request))
    ownership._DYING_SECS = 0.1  # nobody here is about to die
    own = Ownership(store, attempt=attempt)
    went_on = False
    together.wait(LIMIT)
    try:
        own.acquire()
        own.check()
        went_on = True
    except DirectoryInUseError:
        pass
    together.wait(LIMIT)
    try:
        if went_on:
            own.check()  # as before a commit
            owner = read_owner(store)
            assert owner is not None
            assert owner.attempt == attempt
    except DirectoryInUseError:
        went_on = False
    results.put("owns" if went_on else "refused")
    together.wait(LIMIT)
    own.release()


def storage_options(request: dict[str, Any]) -> dict[str, Any] | None:
    """Storage options with the faults that the request describes."""
    options = request.get("storage_options")
    if not options:
        return None
    from monsess.testing import Faults

    return {**options, "faults": Faults(**options.get("faults", {}))}


def serve() -> None:
    """Do what the lines of the standard input say, and answer each with a line."""
    prepare()
    replies = os.dup(1)
    os.dup2(2, 1)
    children: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "train":
            answer: Any = _forked(request)
            children.add(answer)
        elif request["do"] == "race":
            answer = race(request)
        else:
            answer = _wait(request["pid"])
            children.discard(request["pid"])
        os.write(replies, (json.dumps(answer) + "\n").encode())
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _forked(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for descriptor, number in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(descriptor, number)
    sys.exit(train(request))


def _wait(pid: int) -> int:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    serve()
