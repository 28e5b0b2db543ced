"""SIGKILL at every step, at every place inside a step: started again, the run ends in the bits of a straight one."""

from __future__ import annotations

import dataclasses
import random
import shutil

import pytest
from kill_child import PLACES, STEPS, Options
from kills import assert_same, lineage, phases, result

pytestmark = pytest.mark.slow

SAVERS = ("default", "first", "middle", "last")


def variants(step: int) -> list[Options]:
    """The ways of killing at ``step``: saves in flight all the time or now and then, the saver anywhere in the list."""
    saver = [SAVERS[(step + turn) % len(SAVERS)] for turn in range(len(SAVERS))]
    further = ("after_run of the first hook", "before_save", "after_save")[step % 3]
    return [
        Options(kill="loop", at=step, every=1, saver=saver[0]),
        Options(kill="after_run", at=step, every=3, saver=saver[1]),
        Options(kill="before_run", at=step, every=(3, 1)[step % 2], saver=saver[2]),
        Options(kill="state_dict", at=step, every=1, saver=saver[3]),
        Options(kill=further, at=step, every=1, saver=saver[(step // 3) % 4], store="plain"),
    ]


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_killed_at_a_step_and_started_again_equals_the_straight_run(step, workers, cache, straight, killed):
    expected = straight()

    def kill_and_resume(attempt, options):
        options = dataclasses.replace(options, folder=workers.folder(options.kill), cache=cache)
        lineage(attempt, [options], dataclasses.replace(options, kill=""), expected)
        killed[f"{options.kill}, saved every {options.every}:"] += 1

    workers.map(kill_and_resume, variants(step))


def test_killed_at_each_step_in_turn_one_lineage_equals_the_straight_run(workers, cache, straight, seed, killed):
    print(f"MONSESS_SEED={seed}")
    expected = straight()

    def kill_again_and_again(attempt, every):
        chance = random.Random(f"{seed}/{every}")
        # Not after_save, which comes some steps later: the next attempt might begin beyond the step where it is to die.
        places = ["before_run", "after_run of the first hook", "after_run", "loop"]
        places += ["before_save", "state_dict"] if every == 1 else []
        last = Options(folder=workers.folder("chain"), every=every, cache=cache, keep=2)
        kills = [dataclasses.replace(last, kill=chance.choice(places), at=step) for step in range(1, STEPS + 1)]
        lineage(attempt, kills, last, expected)
        killed[f"{STEPS} times in one lineage, saved every {every}:"] += 1

    workers.map(kill_again_and_again, [1, 3])


@pytest.mark.parametrize("moment", ["begin", "after_create_session"])
def test_killed_while_it_is_restored(moment, workers, cache, straight, killed):
    expected = straight()

    def kill_twice(attempt, store):
        last = Options(folder=workers.folder(moment), cache=cache, store=store)
        first = dataclasses.replace(last, kill=moment)
        second = dataclasses.replace(last, kill="loop", at=8)
        lineage(attempt, [first, second, first], last, expected)
        killed[f"{moment}:"] += 1

    workers.map(kill_twice, ["local", "plain"])


@pytest.mark.parametrize("moment", ["end", "closed"])
def test_killed_after_the_final_commit_trains_no_further_step(moment, workers, cache, straight, killed):
    folder = workers.folder(moment)
    last = Options(folder=folder, cache=cache)

    def attempt(options):
        status = workers.servers[0](options)
        if not options.kill:
            before, last_attempt = " ".join(phase for _, phase in phases(folder)).rsplit("importing", 1)
            assert f"step {STEPS}" in before
            assert "step" not in last_attempt
            assert result(folder)["restored_from"] == STEPS
            assert result(folder)["saves"] == 0
        return status

    lineage(attempt, [dataclasses.replace(last, kill=moment)], last, straight())
    killed[f"{moment}:"] += 1


def test_straight_runs_are_equal_however_they_are_saved_and_compiled(workers, cache, straight):
    expected = straight()

    def run(attempt, options):
        options = dataclasses.replace(options, folder=workers.folder("straight"))
        assert attempt(options) == 0
        assert_same(options.folder, expected)
        shutil.rmtree(options.folder)

    workers.map(
        run,
        [
            Options(every=1, cache=cache),
            Options(every=3, cache=cache, store="plain", keep=1),
            Options(every=3, saver="last"),
            Options(store="none", cache=cache),
        ],
    )


def test_every_place_is_among_the_variants():
    assert {options.kill for step in range(1, 4) for options in variants(step)} == set(PLACES)
