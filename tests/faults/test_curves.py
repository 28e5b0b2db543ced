"""Kill at 8 with a checkpoint at 5, resume to 12: whoever reads the records sees each step once.

TensorBoard itself is asked, over HTTP, in both of its ways to read files: its own server's and the old one's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
import servers
from kill_child import Options
from kills import SIGKILLED, curve, output

import monsess as ms

pytest.importorskip("tensorboard")
pytestmark = pytest.mark.slow

STORES = ("local", "faulty", "s3")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that was killed and resumed.

    Args:
        url: Where it stored.
        options: For that store.
        files: A local folder with its records.
        resumed: When the second attempt began.
        losses: What a straight run computes, by step.
    """

    url: str
    options: dict[str, Any] | None
    files: Path
    resumed: float
    losses: list[float]


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with servers.s3_server(tmp_path_factory.mktemp("s3")) as options:
        yield options


@pytest.fixture(scope="module", params=STORES)
def run(request, workers, cache):
    """The run in one store."""
    options = Options(workers.folder(request.param), store=request.param, last_step=12, every=5, cache=cache)
    where: tuple[str, dict[str, Any] | None] = (os.path.join(options.folder, "checkpoints"), None)
    if request.param == "s3":
        where = "s3://smoke/curves", request.getfixturevalue("s3")
        Path(options.folder, "store.json").write_text(json.dumps({"url": where[0], "options": where[1]}))
        options = dataclasses.replace(options, store="real")
    attempt = workers.servers[0]
    killed = dataclasses.replace(options, kill="recorded", at=8)
    assert attempt(killed) == SIGKILLED, output(options.folder)
    before = ms.read_metrics(*where)
    assert [point.step for point in before.curves["loss"]] == list(range(1, 9))
    assert [event["step"] for event in before.attempts[0].checkpoints] in (
        [],
        [5],
    )  # it was told of it, or just not yet
    resumed = time.time()
    assert attempt(options) == 0, output(options.folder)
    files = Path(options.folder, "checkpoints")
    if request.param == "s3":
        fsspec.filesystem("s3", **where[1]).get("smoke/curves/", str(files) + "/", recursive=True)
    losses = [float.fromhex(line.split()[1]) for line in curve(options.folder)]
    yield Run(*where, files, resumed, losses)
    shutil.rmtree(options.folder)


def assert_whole(run: Run, points: list[tuple[float, int, float]]) -> None:
    """The points ``(time, step, value)`` are each step once, from step 6 on those of the second attempt."""
    assert [step for _, step, _ in points] == list(range(1, 13))
    assert [value for _, _, value in points] == pytest.approx(run.losses, rel=1e-6)
    assert [step for when, step, _ in points if when >= run.resumed] == list(range(6, 13))


def test_monsess_reads_each_step_once(run):
    metrics = ms.read_metrics(run.url, run.options)
    assert_whole(run, [(point.time, point.step, point.value) for point in metrics.curves["loss"]])
    assert [attempt.start["restored_from"] for attempt in metrics.attempts] == [None, 5]
    assert [attempt.end and attempt.end["reason"] for attempt in metrics.attempts] == [None, "LAST_STEP"]


def test_nothing_else_appears_on_this_machine(run):
    assert not [path for path in Path.cwd().iterdir() if path.name.startswith(("s3:", "faulty:", "memory:", "file:"))]


@pytest.mark.parametrize("load_fast", ["true", "false"])
def test_tensorboard_shows_each_step_once(run, load_fast, tmp_path):
    if load_fast == "true":
        pytest.importorskip("tensorboard_data_server")
    logs = tmp_path / "logs"
    logs.mkdir()
    for path in run.files.glob("events.out.tfevents.*"):
        shutil.copy(path, logs)
    with tensorboard(logs, load_fast, tmp_path) as address:
        assert_whole(run, scalars(address, "loss"))


@pytest.mark.parametrize("run", ["s3"], indirect=True)
def test_tensorboard_reads_the_store_itself(run, tmp_path):
    assert run.options is not None
    environment = {
        "AWS_ACCESS_KEY_ID": run.options["key"],
        "AWS_SECRET_ACCESS_KEY": run.options["secret"],
        "FSSPEC_S3_ENDPOINT_URL": run.options["endpoint_url"],
    }
    with tensorboard(run.url, "false", tmp_path, environment) as address:
        assert_whole(run, scalars(address, "loss"))


@contextlib.contextmanager
def tensorboard(logs: Path | str, load_fast: str, folder: Path, environment: Mapping[str, str] | None = None):
    """TensorBoard on loopback; gives its address."""
    (port,) = servers.free_ports(1)
    options = [f"--logdir={logs}", "--host=127.0.0.1", f"--port={port}", f"--load_fast={load_fast}"]
    with open(folder / "tensorboard.txt", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tensorboard.main", *options, "--reload_interval=1"],
            stdout=log,
            stderr=log,
            env={**os.environ, **(environment or {})},
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def scalars(address: str, tag: str) -> list[tuple[float, int, float]]:
    """A curve, once TensorBoard has read it to its end."""
    deadline = time.monotonic() + 90
    found: list[Any] = []
    while True:
        with contextlib.suppress(OSError):  # it has not begun, or not read this tag yet
            url = f"{address}/data/plugin/scalars/scalars?tag={tag}&run=."
            with urllib.request.urlopen(url, timeout=10) as reply:
                found = json.load(reply)
        if found and found[-1][1] == 12:
            return [(float(when), int(step), float(value)) for when, step, value in found]
        assert time.monotonic() < deadline, f"TensorBoard shows {found}"
        time.sleep(0.3)
