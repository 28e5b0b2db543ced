"""What a checkpoint costs, paired in one run with Orbax's own checkpointers, a raw write, and a plain upload.

    python benchmarks/checkpoint.py [--sizes 10,400,2000] [--rounds N] [--folder DIR] [--s3 | --url URL] [--json FILE]
                                    [--check]

Save, on local disk: how long the training thread is held, the time until the step is committed, MB/s, and how much the
process grew, for a monsess session, Orbax's ``AsyncCheckpointer`` and ``CheckpointManager``, and a raw write with
fsync. Load: a verified load against Orbax's and a raw read, from the page cache. Upload: the files of one checkpoint,
hashed on the way, against a plain ``put`` of fsspec; ``--s3`` starts a SeaweedFS for it, ``--url`` takes a store of
your own (options as JSON in MONSESS_STORAGE_OPTIONS).

Every round runs all sides in another order, so that a change of the machine's speed meets all of them. Printed are
the medians over the rounds, and the median of the ratios to Orbax's (or the plain) side of the same round, which is
what counts on a busy machine. With ``--check`` a missed goal makes the exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import itertools
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import monsess as ms

LEAVES = 20
STEPS_AFTER = 5  # steps right after a save: what holds them up belongs to the save
Figures = dict[str, float]
GOALS = {
    "stall not above AsyncCheckpointer's": ("save", "monsess", "stall", "AsyncCheckpointer", 1.0),
    "stall not above CheckpointManager's": ("save", "monsess", "stall", "CheckpointManager", 1.0),
    "commit within 1.15 of AsyncCheckpointer's": ("save", "monsess", "commit", "AsyncCheckpointer", 1.15),
    "commit within 1.15 of CheckpointManager's": ("save", "monsess", "commit", "CheckpointManager", 1.15),
    "upload at 0.9 of plain fsspec": ("upload", "monsess", "seconds", "plain put", 1 / 0.9),
}


def main() -> int:
    """Measure and print; 1 if ``--check`` is given and a goal was missed."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--sizes", default="10,400,2000", help="MB, separated by commas")
    parser.add_argument("--rounds", type=int, default=0, help="0: as many as the size asks for")
    parser.add_argument("--folder", help="on the disk to measure; default: the directory for temporary files")
    parser.add_argument("--s3", action="store_true", help="start SeaweedFS and measure uploads to it")
    parser.add_argument("--url", help="measure uploads to this store")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal was missed")
    options = parser.parse_args()
    logging.getLogger("monsess").setLevel(logging.ERROR)
    logging.getLogger("absl").setLevel(logging.ERROR)
    results: list[dict[str, Any]] = []
    missed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="monsess-benchmark-", dir=options.folder) as folder:
        for size in (int(part) for part in options.sizes.split(",")):
            rounds = options.rounds or (11 if size < 100 else 7 if size < 1000 else 3)
            leaves = make_leaves(size)
            results.append(measure("save", size, save_sides(leaves, folder), rounds))
            results.append(measure("load", size, load_sides(leaves, folder), rounds))
            if options.s3 or options.url:
                with remote(options.url, folder) as (url, storage_options):
                    sides = upload_sides(leaves, folder, url, storage_options)
                    results.append(measure("upload", size, sides, rounds if size < 1000 else min(rounds, 5)))
            missed += report_goals(results, size)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    if missed:
        print(f"missed: {'; '.join(missed)}")
    return 1 if missed and options.check else 0


def make_leaves(size: int) -> dict[str, np.ndarray[Any, Any]]:
    """A state of ``size`` MB of random floats, which hardly compress."""
    draw = np.random.default_rng(0)
    rows = max(1, size * 1_000_000 // 4 // LEAVES // 100)
    return {f"w{i:02}": draw.standard_normal((rows, 100), dtype=np.float32) for i in range(LEAVES)}


def measure(kind: str, size: int, sides: dict[str, Callable[[], Figures]], rounds: int) -> dict[str, Any]:
    """Run all sides in turn, print a table of medians and return every figure."""
    found: dict[str, list[Figures]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(-1, rounds):  # the round before the first one warms up and does not count
        order = names[number % len(names) :] + names[: number % len(names)]
        for name in order if number % 2 else order[::-1]:
            print(f"\r\033[K{size} MB {kind}: round {max(number, 0) + 1}/{rounds}, {name}", end="", file=sys.stderr)
            gc.collect()
            os.sync()
            figures = sides[name]()
            if number >= 0:
                found[name].append(figures)
    print("\r\033[K", end="", file=sys.stderr)
    last = "commit" if kind == "save" else "seconds"
    print(f"{size} MB {kind}, {rounds} rounds")
    for name, figures in found.items():
        parts = [f"{key} {1000 * median(figures, key):8.1f} ms" for key in ("stall", last) if key in figures[0]]
        rate, grown = size / median(figures, last), median(figures, "peak_mb")
        text = f"  {name:18} {'  '.join(parts):>38}  {rate:7.0f} MB/s  memory +{grown:6.0f} MB"
        text += f"  processor {1000 * median(figures, 'cpu'):6.0f} ms"
        if name == "monsess":
            against = [other for other in names if other != name]
            text += "   to " + ", ".join(f"{other} {ratio(found, name, last, other):.2f}" for other in against)
        print(text, flush=True)
    return {"kind": kind, "mb": size, "rounds": rounds, "sides": found}


def median(figures: list[Figures], key: str) -> float:
    """Over the rounds."""
    return statistics.median(one[key] for one in figures)


def ratio(found: dict[str, list[Figures]], name: str, key: str, other: str) -> float:
    """The median over the rounds of the paired ratios."""
    pairs = zip(found[name], found[other], strict=True)
    return statistics.median(one[key] / max(two[key], 1e-9) for one, two in pairs)


def report_goals(results: list[dict[str, Any]], size: int) -> list[str]:
    """Say which goals hold, and return those that do not."""
    missed = []
    for text, (kind, name, key, other, limit) in GOALS.items():
        for result in results:
            if result["kind"] == kind and result["mb"] == size:
                value = ratio(result["sides"], name, key, other)
                print(f"  goal: {text}: {value:.2f} (limit {limit:.2f}) {'yes' if value <= limit else 'NO'}")
                if value > limit:
                    missed.append(f"{text} ({size} MB: {value:.2f})")
    return missed


class Meter:
    """Time, processor time and the growth of resident memory since it was made, in seconds and MB."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts anew
        self._memory = status_mb("VmRSS")
        self._cpu = time.process_time()
        self._begun = time.perf_counter()

    def seconds(self) -> float:
        """So far."""
        return time.perf_counter() - self._begun

    def read(self, name: str = "seconds") -> Figures:
        """All figures; the time under ``name``."""
        figures = {name: self.seconds(), "cpu": time.process_time() - self._cpu}
        return {**figures, "peak_mb": max(0.0, status_mb("VmHWM") - self._memory)}


def status_mb(name: str) -> float:
    """One size from /proc/self/status; 0 where there is none."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 / 1e6 for line in file if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return 0.0


@contextlib.contextmanager
def fresh(folder: str) -> Iterator[str]:
    """An empty directory that is gone afterwards."""
    path = tempfile.mkdtemp(dir=folder)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def body(state: Any, _: Any) -> Any:
    """A step that touches little of a big state."""
    return {**state, "n": state["n"] + 1}, {"n": state["n"] * 1.0}


class Training:
    """A session over the state, its steps, and how long they usually take."""

    def __init__(self, leaves: Any, **settings: Any) -> None:
        self.session = ms.MonitoredTrainingSession(
            lambda: {**leaves, "n": np.zeros((), np.int32)},
            save_checkpoint_secs=None,
            log_step_count_steps=1_000_000,
            check_replicas=False,
            **settings,
        )
        self._train = ms.train_step(body)
        self._batch = np.zeros((1, 1), np.float32)
        self.step()
        self.usual = statistics.median(self.steps(1) for _ in range(20))

    def step(self) -> None:
        """One step, until it is done."""
        self.session.run(self._train, self._batch)["n"].block_until_ready()

    def extra(self) -> float:
        """By how many seconds the next few steps are late."""
        return self.steps(STEPS_AFTER) - STEPS_AFTER * self.usual

    def steps(self, count: int) -> float:
        """The seconds that ``count`` steps take."""
        begun = time.perf_counter()
        for _ in range(count):
            self.step()
        return time.perf_counter() - begun


class _Done(Exception):
    """Leaves a session without a last save."""


def save_sides(leaves: Any, folder: str) -> dict[str, Callable[[], Figures]]:
    """A save to local disk."""
    import orbax.checkpoint as ocp

    def monsess() -> Figures:
        with fresh(folder) as path:
            return monsess_save(leaves, path)

    def asynchronous() -> Figures:
        with fresh(folder) as path, ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            return orbax(
                lambda state: checkpointer.save(f"{path}/1", args=ocp.args.StandardSave(state)),
                checkpointer.wait_until_finished,
            )

    def manager() -> Figures:
        with fresh(folder) as path, ocp.CheckpointManager(path) as manager:
            return orbax(lambda state: manager.save(1, args=ocp.args.StandardSave(state)), manager.wait_until_finished)

    def orbax(save: Callable[[Any], Any], wait: Callable[[], Any]) -> Figures:
        figures: Figures = {}
        training = Training(leaves)
        with training.session as session:
            meter = Meter()
            save(session.state)
            figures["stall"] = meter.seconds() + training.extra()
            wait()
            figures |= meter.read("commit")
        return figures

    def raw() -> Figures:
        with fresh(folder) as path:
            figures = timed(lambda: write_raw(leaves, f"{path}/raw"))
            return {"stall": figures["seconds"], "commit": figures["seconds"], **figures}

    return {"monsess": monsess, "AsyncCheckpointer": asynchronous, "CheckpointManager": manager, "raw write": raw}


def monsess_save(leaves: Any, url: str, storage_options: dict[str, Any] | None = None) -> Figures:
    """One save of a session."""
    figures: Figures = {}
    with contextlib.suppress(_Done):
        training = Training(leaves, checkpoint_dir=url, storage_options=storage_options)
        with training.session as session:
            meter = Meter()
            session.request_save()
            figures["stall"] = meter.seconds() + training.extra()
            while not session.summary()["saves"]:
                time.sleep(0.001)
            figures |= meter.read("commit")
            raise _Done
    return figures


def load_sides(leaves: Any, folder: str) -> dict[str, Callable[[], Figures]]:
    """A load into host memory, from the page cache."""
    import orbax.checkpoint as ocp

    path = tempfile.mkdtemp(dir=folder)
    monsess_save(leaves, f"{path}/monsess")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{path}/orbax", leaves)
    write_raw(leaves, f"{path}/raw")

    def checked(load: Callable[[], Any]) -> Figures:
        found: list[Any] = []
        figures = timed(lambda: found.append(load()))
        assert all(np.array_equal(found[0][name], leaf) for name, leaf in leaves.items())
        return figures

    def orbax() -> Any:
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in leaves}
        with ocp.PyTreeCheckpointer() as checkpointer:
            return checkpointer.restore(f"{path}/orbax", args=ocp.args.PyTreeRestore(restore_args=as_numpy))

    def raw() -> Any:
        with open(f"{path}/raw", "rb") as file:
            return {
                name: np.frombuffer(file.read(leaf.nbytes), leaf.dtype).reshape(leaf.shape)
                for name, leaf in leaves.items()
            }

    return {
        "monsess": lambda: checked(lambda: ms.load_checkpoint(f"{path}/monsess")),
        "Orbax": lambda: checked(orbax),
        "raw read": lambda: checked(raw),
    }


def timed(work: Callable[[], Any]) -> Figures:
    """What ``work`` takes."""
    meter = Meter()
    work()
    return meter.read()


def write_raw(leaves: Any, path: str) -> None:
    """The bytes one after the other, forced to disk."""
    with open(path, "wb") as file:
        for leaf in leaves.values():
            file.write(leaf)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def remote(url: str | None, folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The store to upload to, and its options."""
    if url is not None:
        yield url, json.loads(os.environ.get("MONSESS_STORAGE_OPTIONS", "{}"))
        return
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
    servers: Any = importlib.import_module("servers")

    class Roomy(servers.S3):
        """What is deleted is not given back while it runs."""

        def prepare(self) -> None:
            super().prepare()
            self._command += ["-master.volumeSizeLimitMB=1024", "-volume.max=60"]  # the last one counts

    with fresh(folder) as path, Roomy(Path(path)) as store:
        yield f"{store.url}/benchmark", store.options


def upload_sides(leaves: Any, folder: str, url: str, options: dict[str, Any]) -> dict[str, Callable[[], Figures]]:
    """The files of one checkpoint to a store, and a whole save."""
    import fsspec

    from monsess.storage import Storage

    path = tempfile.mkdtemp(dir=folder)
    monsess_save(leaves, path)
    local = f"{path}/{ms.latest_checkpoint(path)}"
    names = [os.path.relpath(os.path.join(at, name), local) for at, _, files in os.walk(local) for name in files]
    filesystem, root = fsspec.url_to_fs(url, **options)
    counter = itertools.count()

    def cleaned(work: Callable[[int], Any]) -> Figures:
        number = next(counter)
        figures = timed(lambda: work(number))
        filesystem.invalidate_cache()
        filesystem.rm(f"{root}/{number}", recursive=True)
        return figures

    storage = Storage(url, options)

    def monsess(number: int) -> None:
        storage.map([lambda n=name: storage.upload(f"{number}/{n}", os.path.join(local, n)) for name in names])

    def plain(number: int) -> None:
        filesystem.put([os.path.join(local, name) for name in names], [f"{root}/{number}/{name}" for name in names])

    def save() -> Figures:
        figures = monsess_save(leaves, f"{url}/save{next(counter)}", options)
        return {**figures, "seconds": figures["commit"]}

    return {
        "monsess": lambda: cleaned(monsess),
        "plain put": lambda: cleaned(plain),
        "whole save": save,
    }


if __name__ == "__main__":
    sys.exit(main())
