"""SIGKILL at every single operation of the store: started again, the run ends in the bits of a straight one.

Twelve leaves are saved, committed, saved and committed again, and what is no longer wanted is deleted. `make soak`
kills at every operation of a local path and of a store without rename and directories; otherwise a sample is taken,
whose seed is printed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from kill_child import Options
from kill_stores import STORES
from kills import SIGKILLED, assert_sound, finish, output, result

import monsess as ms

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(7200)]

#: How many places are tried per store, over all scenarios; None: all of them.
SAMPLE = {"4": 4, "12": 20}.get(os.environ.get("MONSESS_RANDOM_KILLS") or "4")
#: Stores beside the two that the promise is made for: many places, but not all of them.
FURTHER = {"plain": 150, "bucket": 150}
#: How often a place is tried that was not reached: the number of operations varies by a few with the order of threads.
TRIES = 6
#: Two saves, the first deleted after the second.
CYCLE = Options(last_step=4, every=2, keep=1)


def nothing(options: Options, attempt: Callable[[Options], int]) -> None:
    """A fresh start: the first save there ever was is among what is killed."""


def killed_before(options: Options, attempt: Callable[[Options], int]) -> None:
    """A first attempt was killed while the save of step 4 was on its way: the restart is what is killed again."""
    first = dataclasses.replace(options, kill="loop", at=4, last_step=6)
    assert attempt(first) == SIGKILLED, output(options.folder)


def newer_steps(options: Options, attempt: Callable[[Options], int]) -> None:
    """An older step is chosen: two newer ones move aside."""
    assert attempt(dataclasses.replace(options, last_step=6, keep=9, restore_step=None)) == 0, output(options.folder)
    remember(options.folder, "aside", 4, 6)


def damaged_step(options: Options, attempt: Callable[[Options], int]) -> None:
    """The newest step is damaged, and its number is needed."""
    assert attempt(dataclasses.replace(options, keep=9)) == 0, output(options.folder)
    flip(Path(options.folder, "checkpoints", "4", "session.json"))
    remember(options.folder, "damaged", 4)


def pinned(options: Options, attempt: Callable[[Options], int]) -> None:
    """A step is pinned first, which the policy lets go; the kill meets the pin as well."""
    assert attempt(dataclasses.replace(options, last_step=2, pin=0)) == 0, output(options.folder)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is there before the attempt that is killed, and what that attempt does.

    Args:
        before: Prepares the directory.
        options: What is different from `CYCLE`.
        damaged: Steps that are not sound before that attempt.
    """

    before: Callable[[Options, Callable[[Options], int]], None]
    options: dict[str, int] = dataclasses.field(default_factory=dict)
    damaged: tuple[int, ...] = ()

    def prepare(self, options: Options, attempt: Callable[[Options], int]) -> Options:
        options = dataclasses.replace(options, **self.options)
        self.before(options, attempt)
        Path(options.folder, "result.json").unlink(missing_ok=True)
        return options


SCENARIOS = {
    "a fresh start": Scenario(nothing),
    "a restart": Scenario(killed_before, {"last_step": 6}),
    "newer steps moved aside": Scenario(newer_steps, {"restore_step": 2}),
    "a damaged step moved aside": Scenario(damaged_step, damaged=(4,)),
    "a pinned step": Scenario(pinned, {"pin": 2}),
}


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:9] + bytes([data[9] ^ 1]) + data[10:])


def remember(folder: str, name: str, *steps: int) -> None:
    """Keep a copy of steps of which no byte may be lost."""
    for step in steps:
        shutil.copytree(Path(folder, "checkpoints", str(step)), Path(folder, "remembered", f"{name}-{step}-"))


def assert_nothing_lost(folder: str) -> None:
    """Each step that was remembered lies aside with every byte, and no half of any step does."""
    aside = [path for path in Path(folder, "checkpoints").iterdir() if path.name.startswith(("aside-", "damaged-"))]
    for kept in Path(folder).glob("remembered/*"):
        whole = [path for path in aside if path.name.startswith(kept.name) and contents(path) == contents(kept)]
        assert len(whole) == 1, f"{kept.name}: {whole} of {aside}"
        aside.remove(whole[0])
    for path in aside:  # of a step that the killed attempt had made anew
        committed = json.loads((path / "commit.json").read_text())["files"]
        committed = {name: digest["size"] for name, digest in committed.items()}
        sizes = {name: len(data) for name, data in contents(path).items() if name != "commit.json"}
        assert sizes == committed, f"half a step: {path.name}"


def nearer(folder: str, place: Options) -> Options:
    """Where to kill instead, after an attempt that ended before the kill came: at its last operation, or sooner."""
    operations = result(folder)["operations"]
    count = sum(place.kind in ("any", kind) for kind in operations)
    if place.late:
        return dataclasses.replace(place, at=min(place.at, count), late=place.late / 4)
    assert count < place.at, f"not killed at {place.kind} number {place.at} of {count}\n{output(folder)}"
    return dataclasses.replace(place, at=count)


def sweep(options: Options) -> None:
    """Take away what a store without directories does not show of the folder that it keeps its objects in."""
    if options.store in ("bucket", "faulty"):
        for folder, _, names in os.walk(os.path.join(options.folder, "checkpoints"), topdown=False):
            for name in names:
                if name.startswith(".faulty-tmp-") and options.store == "bucket":
                    os.unlink(os.path.join(folder, name))
            if not os.listdir(folder):
                os.rmdir(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def places(store: str, operations: list[str]) -> list[Options]:
    """Where to kill: before every operation, and where half of one may be done."""
    found = [Options(kill="operation", at=number) for number in range(1, len(operations) + 1)]
    if store in ("local", "plain"):  # writes are not seen from inside: a little later they may be half done
        opened = [number for number, operation in enumerate(operations, 1) if operation in ("open", "mkdir")]
        late = itertools.cycle([0.0003, 0.001, 0.003, 0.01])
        return found + [Options(kill="operation", at=number, late=next(late)) for number in opened[::3]]
    for kind in ("write", "copy"):
        count = operations.count(kind)
        found += [Options(kill="operation", kind=kind, when="middle", at=n) for n in range(1, count + 1)]
    return found


@pytest.mark.parametrize("store", [name for name in STORES if name not in ("none", "real")])
def test_killed_at_every_operation(store, workers, cache, straight, seed, operations):
    print(f"MONSESS_SEED={seed}")
    expected = {last_step: straight(last_step) for last_step in (6, 8)}
    base = dataclasses.replace(CYCLE, store=store, cache=cache)
    there: dict[str, list[Options]] = {}
    killed: Counter[str] = Counter()
    again: Counter[str] = Counter()  # attempts that ended before the kill came

    def start(attempt, name):
        return SCENARIOS[name].prepare(dataclasses.replace(base, folder=workers.folder(name)), attempt)

    def count(attempt, name):
        options = start(attempt, name)
        assert attempt(options) == 0, output(options.folder)
        there[name] = places(store, result(options.folder)["operations"])
        shutil.rmtree(options.folder)

    def kill_and_resume(attempt, item):
        name, place = item
        for _ in range(TRIES):
            options = start(attempt, name)
            where = {field: getattr(place, field) for field in ("kill", "at", "kind", "when", "late")}
            status = attempt(dataclasses.replace(options, **where))
            sweep(options)
            if status == SIGKILLED:
                break
            assert status == 0, f"ended with {status}\n{output(options.folder)}"
            assert_sound(options.folder, SCENARIOS[name].damaged, store)
            place = nearer(options.folder, place)
            again[name] += 1
        assert status == SIGKILLED, f"not killed in {TRIES} attempts, at last to be at {place}"
        assert_sound(options.folder, SCENARIOS[name].damaged, store)
        # Two more steps, so that there is a commit after the kill whatever was reached.
        last = dataclasses.replace(options, last_step=options.last_step + 2)
        finish(attempt, last, expected[last.last_step], keep=True)
        assert_nothing_lost(options.folder)
        if options.pin:
            assert ms.CheckpointStore(os.path.join(options.folder, "checkpoints")).verify(options.pin) == []
        shutil.rmtree(options.folder)
        killed[name] += 1

    chance = random.Random(f"{seed}/{store}")
    few = SAMPLE is not None and len(SCENARIOS) > SAMPLE
    workers.map(count, chance.sample(sorted(SCENARIOS), SAMPLE) if few else SCENARIOS)
    limit = FURTHER.get(store) if SAMPLE is None else SAMPLE
    chosen = [(name, place) for name in sorted(there) for place in there[name]]
    if limit is not None:
        turns = itertools.islice(itertools.cycle(sorted(there)), limit)
        chosen = [(name, place) for name, k in Counter(turns).items() for place in chance.sample(there[name], k=k)]
    try:
        workers.map(kill_and_resume, chosen)
    finally:
        for name in sorted(there):
            done = f"{killed[name]} killed and ended well"
            tries = f" ({again[name]} more ended before the kill and were tried nearer)" if again[name] else ""
            operations[f"\n  {store}, {name}:"] = f"{done}, of {len(there[name])} that there are{tries}"
    assert killed.total() == len(chosen)
