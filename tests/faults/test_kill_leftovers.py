"""SIGKILL at any access to a file of the checkpoints: what is listed is sound, and the next commit tidies up."""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path

import pytest
from kill_child import Options
from kills import SIGKILLED, assert_sound, assert_tidy, finish, lineage, output, result

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(1800)]  # `make soak` does ten times as much

#: How many accesses to files are tried, per store.
COUNT = 4 + int(os.environ.get("MONSESS_RANDOM_KILLS") or 4)
#: Three saves, the older ones deleted after each.
SHORT = Options(last_step=6, every=2, keep=1)


@pytest.mark.parametrize("store", ["local", "plain"])
def test_killed_at_an_access_to_a_file_leaves_nothing_behind(store, workers, cache, straight, seed, killed):
    print(f"MONSESS_SEED={seed}")
    short = dataclasses.replace(SHORT, store=store, cache=cache)
    counted = dataclasses.replace(short, folder=workers.folder("count"))
    assert workers.servers[0](counted) == 0, output(counted.folder)
    assert_tidy(counted.folder, counted.store)
    accesses = len(result(counted.folder)["operations"])
    expected = straight(8)

    def kill_and_resume(attempt, number):
        chance = random.Random(f"{seed}/{store}/{number}")
        at = 1 + int((number + chance.random()) / COUNT * accesses)  # one in each part of the run
        options = dataclasses.replace(short, folder=workers.folder("access"), kill="operation", at=at)
        status = attempt(options)
        assert status in (0, SIGKILLED), output(options.folder)
        assert_sound(options.folder, store=options.store)
        # Two more steps, so that there is a commit after the kill whatever was reached.
        finish(attempt, dataclasses.replace(options, last_step=8, kill=""), expected)
        killed[f"access to a file ({store}):"] += status == SIGKILLED

    workers.map(kill_and_resume, range(COUNT))


@pytest.mark.parametrize("store", ["local", "plain"])
def test_killed_again_at_the_first_accesses_of_a_restart(store, workers, cache, straight, seed, killed):
    print(f"MONSESS_SEED={seed}")
    expected = straight(8)

    def kill_twice(attempt, number):
        chance = random.Random(f"{seed}/{store}/again/{number}")
        last = dataclasses.replace(SHORT, store=store, cache=cache, last_step=8, folder=workers.folder("again"))
        first = dataclasses.replace(last, kill="loop", at=5)
        second = dataclasses.replace(last, kill="operation", at=chance.randint(1, 60))
        lineage(attempt, [first, second], last, expected)
        killed[f"twice, then at an access to a file ({store}):"] += 1

    workers.map(kill_twice, range(max(2, COUNT // 4)))


def plant_leftovers(folder):
    """All shapes of what killed saves and killed deletions leave, beside a committed step."""
    root = Path(folder, "checkpoints")
    session = (root / str(assert_sound(folder)[-1]) / "session.json").read_bytes()
    for name in (".staging-98-dead", ".staging-99-dead", ".deleting-7", "9"):
        (root / name / "default" / "d").mkdir(parents=True)
    (root / ".staging-97-dead").mkdir()
    for name in (".staging-99-dead", ".deleting-7"):
        (root / name / "session.json").write_bytes(session)
        (root / name / "default" / "half").write_bytes(b"half")


def test_killed_while_it_tidies_up_the_next_attempt_does_it(workers, cache, straight, seed, killed):
    print(f"MONSESS_SEED={seed}")
    expected = {last_step: straight(last_step) for last_step in (8, 10)}
    accesses = []

    def kill_and_resume(attempt, number):
        last = dataclasses.replace(SHORT, cache=cache, last_step=8, folder=workers.folder("tidying"))
        assert attempt(dataclasses.replace(last, last_step=4)) == 0
        plant_leftovers(last.folder)
        if number is None:
            finish(attempt, last, expected[8], keep=True)
            accesses.append(len(result(last.folder)["operations"]))
            return
        chance = random.Random(f"{seed}/tidying/{number}")
        at = 1 + int((number + chance.random()) / COUNT * accesses[0])
        status = attempt(dataclasses.replace(last, kill="operation", at=at))
        assert status in (0, SIGKILLED), output(last.folder)
        assert_sound(last.folder, store=last.store)
        finish(attempt, dataclasses.replace(last, last_step=10), expected[10])
        killed["at an access to a file, with leftovers:"] += status == SIGKILLED

    workers.map(kill_and_resume, [None])
    workers.map(kill_and_resume, range(COUNT))
