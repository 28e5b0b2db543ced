"""Runs of `kill_child`, killed and started again, and the comparison of what they end in with a straight run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import kill_child
import kill_stores
from kill_child import Options
from leftovers import beside_bookkeeping

import monsess as ms

CHILD = kill_child.__file__
#: Seconds after which an attempt counts as hanging. It takes one or two.
LIMIT = 120
SIGKILLED = -signal.SIGKILL

Attempt = Callable[[Options], int]  # returns the exit status


class ForkServer:
    """A process that has imported everything and forks an attempt at a time; may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", CHILD, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, options: Options, kill_after: float | None = None) -> int:
        """Make an attempt and return its exit status.

        Args:
            options: The attempt.
            kill_after: Seconds after its fork at which it gets a SIGKILL, unless it has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"options": dataclasses.asdict(options), "timeout": LIMIT, "kill_after": kill_after}
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        assert line, f"the fork server ended with {self._process.wait(LIMIT)}"
        reply = json.loads(line)
        assert not reply["timed_out"], f"an attempt hung for {LIMIT} s: {options}\n{output(options.folder)}"
        return reply["status"]

    def close(self) -> None:
        """End the server; an attempt in progress gets its own time limit."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(LIMIT + 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


def start(options: Options) -> subprocess.Popen[bytes]:
    """Start an attempt as a process of its own, whose imports are part of what can be killed."""
    with open(os.path.join(options.folder, "output"), "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-W", "error", CHILD, json.dumps(dataclasses.asdict(options))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def attempt_in_new_process(options: Options, kill_after: float | None = None) -> int:
    """Make an attempt in a new process and return its exit status.

    Args:
        options: The attempt.
        kill_after: Seconds after which it gets a SIGKILL, unless it has ended.
    """
    process = start(options)
    try:
        return process.wait(LIMIT if kill_after is None else kill_after)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        assert kill_after is not None, f"an attempt hung for {LIMIT} s: {options}\n{output(options.folder)}"
        return process.returncode
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


class Workers:
    """Two fork servers, and lineages distributed over them."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.servers = [ForkServer() for _ in range(2)]
        self._free: SimpleQueue[ForkServer] = SimpleQueue()
        for server in self.servers:
            self._free.put(server)
        self._pool = ThreadPoolExecutor(len(self.servers))
        self._numbers = itertools.count(1)

    def folder(self, name: str) -> str:
        """A new folder."""
        path = self.scratch / f"{next(self._numbers)}-{re.sub('[^a-z0-9]+', '-', name)}"
        path.mkdir()
        return str(path)

    def map(self, work: Callable[[Attempt, Any], None], items: Iterable[Any]) -> None:
        """Do ``work(attempt, item)`` for all items, two at a time; raise what failed, all of it."""

        def one(item: Any) -> Exception | None:
            server = self._free.get()
            try:
                work(server, item)
            except Exception as error:
                error.add_note(f"with {item}")
                print(f"with {item}: {error!r:.300}")
                return error
            finally:
                self._free.put(server)
            return None

        errors = [error for error in self._pool.map(one, items) if error is not None]
        if errors:
            raise errors[0] if len(errors) == 1 else ExceptionGroup("several did not end as the straight run", errors)

    def close(self) -> None:
        """End everything."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for server in self.servers:
            server.close()


@dataclasses.dataclass(frozen=True)
class Ending:
    """What a run ended in: all that has to be the same whatever happened on the way."""

    leaves: dict[str, list[Any]]
    step: int
    used: list[int]
    hooks: list[dict[str, Any]]
    stop: str
    curve: list[str]


def result(folder: str) -> dict[str, Any]:
    """What the last attempt that came to its end wrote down."""
    path = Path(folder, "result.json")
    assert path.exists(), f"the last attempt wrote no result; it came to {phases(folder)[-3:]}\n{output(folder)}"
    return json.loads(path.read_text())


def ending(folder: str) -> Ending:
    """What the run in ``folder`` ended in."""
    found = result(folder)
    names = {field.name for field in dataclasses.fields(Ending)} - {"curve"}
    return Ending(**{name: found[name] for name in names}, curve=curve(folder))


def curve(folder: str) -> list[str]:
    """The logged curve, one line per step; a step that was repeated has to have logged the same bits."""
    text = Path(folder, "curve").read_text()
    assert text.endswith("\n"), f"the last line of the curve is torn: {text[-200:]!r}"
    lines: dict[int, str] = {}
    for line in text.splitlines():
        step = int(line.split()[0])
        assert lines.setdefault(step, line) == line, (
            f"step {step} was repeated with other values:\n{lines[step]}\n{line}"
        )
    return [lines[step] for step in sorted(lines)]


def phases(folder: str) -> list[tuple[float, str]]:
    """How far the attempts in ``folder`` came, all of them in one list: when (`time.monotonic`), and where."""
    path = Path(folder, "phases")
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(when), where) for when, where in (line.split(" ", 1) for line in lines)]


def output(folder: str) -> str:
    """What the attempts printed, the end of it."""
    path = Path(folder, "output")
    return path.read_text(errors="replace")[-6000:] if path.exists() else ""


def assert_same(folder: str, straight: Ending) -> None:
    """The run in ``folder`` ended in the bits of the straight one, and used each batch exactly once."""
    found = ending(folder)
    for field in dataclasses.fields(Ending):
        assert getattr(found, field.name) == getattr(straight, field.name), (
            f"{field.name} is not that of a straight run"
        )
    once = [int(index < found.step) for index in range(len(found.used))]
    consumed = [[index, kill_child.checksum(index)] for index in range(found.step)]
    assert found.used == once
    assert [hook["consumed"] for hook in found.hooks] == [consumed] * 3
    assert [hook["steps"] for hook in found.hooks] == [found.step] * 3
    assert [hook["place"] for hook in found.hooks] == ["first", "middle", "last"]
    assert [int(line.split()[0]) for line in found.curve] == list(range(1, found.step + 1))
    assert [int(line.split()[-2]) for line in found.curve] == list(range(found.step))
    assert_recorded(folder, found.curve)


def assert_recorded(folder: str, curve: Sequence[str]) -> None:
    """The records in a store hold each step once, with all bits, whatever was killed."""
    if not os.path.isdir(os.path.join(folder, "checkpoints")):
        return  # nothing was stored, or elsewhere
    recorded = ms.read_metrics(os.path.join(folder, "checkpoints")).curves
    rows = [line.split() for line in curve]
    for place, name in enumerate(kill_child.FETCHED[:4], start=1):
        expected = [(int(row[0]), float.fromhex(row[place])) for row in rows]
        found = [(point.step, point.value) for point in recorded.get(name, [])]
        assert found == expected, f"the recorded curve of {name} has other steps or values: {found}"


def assert_sound(folder: str, damaged: Collection[int] = (), store: str = "plain") -> list[int]:
    """Every step that is listed verifies, whatever was killed, but those damaged on purpose; returns the steps."""
    kill_stores.register()
    # Looked at as a path only where it was one: what a killed upload leaves in the folder of an emulated bucket is a
    # leftover, and would be damage on a local path.
    url = os.path.join(folder, "checkpoints") if store == "local" else f"plain://{os.path.join(folder, 'checkpoints')}"
    store = ms.CheckpointStore(url)
    steps = [step for step in store.steps() if step not in damaged or not store.verify(step)]
    problems = {step: store.verify(step) for step in steps}
    assert not any(problems.values()), problems
    assert ms.latest_checkpoint(url) == (steps[-1] if steps else None)
    return steps


def assert_tidy(folder: str, store: str = "plain") -> None:
    """Nothing is left of killed saves: the directory holds committed steps, and they hold what was committed."""
    root = Path(folder, "checkpoints")
    steps = {str(step) for step in assert_sound(folder, store=store)}
    kept = {path.name for path in root.iterdir() if path.name.startswith(("aside-", "damaged-"))}
    left = beside_bookkeeping(path.name for path in root.iterdir()) - {"pins"} - steps - kept
    inside = [path.relative_to(root).as_posix() for name in sorted(left) for path in sorted((root / name).rglob("*"))]
    assert not left, f"left behind: {sorted(left)}, in it: {inside}"
    for step in steps:
        committed = json.loads((root / step / "commit.json").read_text())["files"]
        files = {path.relative_to(root / step).as_posix() for path in (root / step).rglob("*") if path.is_file()}
        assert files == {*committed, "commit.json"}, f"step {step}"
    pins = [path.name for path in root.glob("pins/*")]
    assert all(name in steps for name in pins), f"in pins: {pins}"
    staging = Path(folder, "staging")
    assert not staging.exists() or not list(staging.rglob("*"))


def lineage(attempt: Attempt, kills: Sequence[Options], last: Options, straight: Ending) -> None:
    """Make attempts that kill themselves, then one that does not, and compare what it ends in.

    Args:
        attempt: How.
        kills: The attempts that are killed, in order.
        last: The one that ends; all have the same folder.
        straight: What it has to end in.
    """
    folder = last.folder
    for options in kills:
        assert options.folder == folder
        status = attempt(options)
        assert status == SIGKILLED, f"ended with {status} instead of killing itself: {options}\n{output(folder)}"
        assert_sound(folder, store=options.store)
    finish(attempt, last, straight)


def finish(attempt: Attempt, last: Options, straight: Ending, keep: bool = False) -> None:
    """Make an attempt that comes to its end, compare what it ends in, and remove the folder unless told to keep it."""
    folder = last.folder
    Path(folder, "result.json").unlink(missing_ok=True)
    known = run_id(folder)
    status = attempt(last)
    assert status == 0, f"the last attempt ended with {status}\n{output(folder)}"
    try:
        assert_same(folder, straight)
        found = result(folder)
        assert assert_sound(folder, store=last.store)[-1] == found["step"]
        assert known in (None, found["run_id"]), "it goes on under another name"
        if found["saves"]:
            assert_tidy(folder, last.store)
        else:
            assert found["restored_from"] == found["step"]
    except AssertionError as error:
        error.add_note(output(folder))
        raise
    if not keep:
        shutil.rmtree(folder)


def run_id(folder: str) -> str | None:
    """The name of the run, if there is one yet; a kill may leave half of the file."""
    try:
        return json.loads(Path(folder, "checkpoints", "run.json").read_bytes())["run_id"]
    except (FileNotFoundError, ValueError):
        return None
