"""SIGKILL from outside at random moments, from the start of the interpreter to its exit."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from kill_child import Options
from kills import (
    SIGKILLED,
    Ending,
    assert_sound,
    attempt_in_new_process,
    ending,
    finish,
    output,
    phases,
)

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(1800)]  # `make soak` does ten times as much

COUNT = int(os.environ.get("MONSESS_RANDOM_KILLS") or 4)
#: What a killed attempt was doing, by the last thing that it had noted.
DOING = {
    "": "starting Python",
    "importing": "importing",
    "imported": "creating the session",
    "created": "compiling and making the first step",
    "ending": "ending, with the final commit",
    "closed": "writing its result",
    "written": "exiting",
}


@dataclasses.dataclass(frozen=True)
class Straight:
    """An undisturbed run in a process of its own: how it ends and, while another one runs, how long it takes."""

    ending: Ending
    created: float  # seconds from the start of the process until it trains
    seconds: float  # until it has exited


@pytest.fixture(scope="module")
def runs(tmp_path_factory, seed, moments):
    """All random runs, two at a time, on a real disk; each test waits for its own."""
    scratch = tmp_path_factory.mktemp("moments")
    with ThreadPoolExecutor(2) as pool:
        straight = _straight(pool, scratch)
        futures = [pool.submit(_run, number, seed, scratch, straight, moments) for number in range(COUNT)]
        try:
            yield futures
        finally:
            pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("number", range(COUNT))
def test_killed_at_random_moments_and_started_again_equals_the_straight_run(number, runs: list[Future[str]], killed):
    print(runs[number].result())
    killed["at random moments:"] += 1


def _straight(pool, scratch):
    """The straight runs, by how often they save."""

    def run(every):
        options = Options(folder=str(scratch / f"straight-{every}"), every=every)
        os.mkdir(options.folder)
        begun = time.monotonic()
        assert attempt_in_new_process(options) == 0, output(options.folder)
        seconds = time.monotonic() - begun
        created = next(when - begun for when, phase in phases(options.folder) if phase == "created")
        found = Straight(ending(options.folder), created, seconds)
        shutil.rmtree(options.folder)
        return found

    one, three = pool.map(run, [1, 3])
    assert one.ending == three.ending
    return {1: one, 3: three}


def _moment(chance, straight):
    """Half of the moments lie anywhere in the life of the process, half of them where it trains, saves and ends."""
    return chance.uniform(chance.choice([0.0, straight.created]), straight.seconds)


def _run(number, seed, scratch, straight, moments):
    """Kill one to three attempts in a row, let the next one end, compare; says what it did."""
    chance = random.Random(f"{seed}/{number}")
    last = Options(
        folder=str(scratch / f"moment-{number}"),
        every=chance.choice([1, 1, 3]),
        saver=chance.choice(["default", "first", "middle", "last"]),
        store=chance.choice(["local", "local", "plain"]),
    )
    straight = straight[last.every]
    os.mkdir(last.folder)
    said = [f"MONSESS_SEED={seed}, run {number}: {last}"]
    try:
        kills, nearer = 0, 1.0
        wanted = chance.choice([1, 1, 2, 3])
        for _ in range(wanted + 5):  # an attempt may end before its moment has come, if the machine was faster
            moment = nearer * _moment(chance, straight)
            before = len(phases(last.folder))
            status = attempt_in_new_process(last, kill_after=moment)
            assert status in (0, SIGKILLED), f"ended with {status}"
            phase = ["", *(phase for _, phase in phases(last.folder)[before:])][-1]
            doing = DOING.get(phase, "training and saving") if status else "nothing any more"
            said.append(f"killed {moment:.3f} s after its start (of {straight.seconds:.3f} s), {phase!r}: {doing}")
            if status == SIGKILLED:
                moments[f"{doing}:"] += 1
                kills += 1
                said.append(f"  committed and sound: {assert_sound(last.folder, store=last.store)}")
            elif kills == 0:
                shutil.rmtree(last.folder)  # nothing was killed: once more from the beginning
                os.mkdir(last.folder)
                nearer *= 0.6
            if kills >= wanted or (kills and status == 0):
                break
        assert kills, "every attempt had ended before its moment"
        finish(attempt_in_new_process, last, straight.ending)
    except AssertionError as error:
        error.add_note("\n".join(said))
        error.add_note(re.sub(r"^", "    ", output(last.folder), flags=re.MULTILINE))
        raise
    return "\n".join(said)
