"""A save that was accepted ends as committed, or as an error in the training thread; nothing waits for ever.

Acceptance: writes that fail from step 10 on end a real process with an exit code that tells, within one save interval
if the error is permanent and within ``save_timeout_secs`` if it is retried; a store that never answers does not stop
training before that limit, and not the exit; credentials that run out are renewed; and a single fault at any operation
of a save neither loses it nor lets it pass for committed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import failing_run
import pytest
import toy
from checkpoints import saver, snapshot
from failing_run import LAST_STEP, SAVE_STEPS, URL, until
from leftovers import beside_bookkeeping
from names import shown

import monsess as ms
from monsess.checkpoint import CheckpointStore
from monsess.storage import Storage
from monsess.testing import Faults, FaultyFileSystem

#: How many faults of each kind are set, at positions drawn at random; None: one at every position.
COUNT = {"4": 3, "12": 8}.get(os.environ.get("MONSESS_RANDOM_KILLS") or "4")


# ---- in a real process


@dataclasses.dataclass
class Attempt:
    """How an attempt ended."""

    options: dict[str, Any]
    code: int
    steps: list[int]
    raised_after: float
    ended_after: float
    errors: str


#: How writes go wrong, and the time limit of a save, seconds.
HOW = {"denied": ("PermissionError", 60.0), "refused": ("ConnectionError", 6.0), "blocked": ("blocked", 6.0)}
#: By so many seconds a busy machine may be late; and how long a process may take to end after its session has raised.
SLACK_SECS, EXIT_SECS = 20.0, 30.0


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    """One attempt of each kind; they run side by side, since most of their time is waiting."""
    folders = {name: tmp_path_factory.mktemp(name) for name in HOW}
    children = {name: _start(folders[name], *HOW[name]) for name in HOW}
    with ThreadPoolExecutor(len(HOW)) as pool:  # so that the end of each is seen when it comes
        return dict(zip(HOW, pool.map(lambda name: _ending(children[name], folders[name]), HOW), strict=True))


def _start(folder: Path, how: str, limit: float) -> subprocess.Popen[str]:
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        child = subprocess.Popen(
            [sys.executable, "-W", "error", failing_run.__file__],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            env={**os.environ, "PYTHONPATH": os.path.dirname(failing_run.__file__)},
            text=True,
        )
    assert child.stdin is not None
    child.stdin.write(json.dumps({"root": str(folder / "store"), "how": how, "limit": limit}))
    child.stdin.close()
    return child


def _ending(child: subprocess.Popen[str], folder: Path) -> Attempt:
    try:
        code = child.wait(timeout=240)  # an exit that is held would take for ever
        ended = time.monotonic()
    finally:
        child.kill()
    errors = (folder / "err").read_text()
    first, *lines = (folder / "out").read_text().splitlines() or [errors]
    assert first == "set", errors
    *steps, last = lines
    after, at = last.removeprefix("raised after").split(" s at ")
    attempt = Attempt(
        {"root": str(folder / "store")},
        code,
        [int(line.split()[1]) for line in steps],
        float(after),
        ended - float(at),
        errors,
    )
    assert attempt.ended_after < EXIT_SECS, "the exit was held"
    return attempt


def assert_the_newest_is_intact_and_training_goes_on_from_it(attempt: Attempt) -> None:
    store = ms.CheckpointStore(URL, attempt.options)
    assert store.steps() == [SAVE_STEPS]
    assert store.verify(SAVE_STEPS) == []
    sess = failing_run.train(attempt.options)
    assert sess.restored_from == SAVE_STEPS
    toy.assert_same_bits(sess.state_copy(), toy.straight(LAST_STEP))


def test_denied_writes_end_the_run_within_one_save_interval(attempts):
    attempt = attempts["denied"]
    assert attempt.code == 1
    assert "SaveError: Step 10 was not saved" in attempt.errors
    assert "PermissionError: 503 or 403" in attempt.errors
    assert "storage_options may list, read and write there" in attempt.errors, "what to do about it"
    assert 10 <= attempt.steps[-1] <= 10 + SAVE_STEPS
    assert attempt.raised_after < SLACK_SECS, "nothing is tried again"
    assert_the_newest_is_intact_and_training_goes_on_from_it(attempt)


def test_failing_writes_end_the_run_within_the_time_limit(attempts):
    attempt = attempts["refused"]
    assert attempt.code == 1
    assert "SaveError: Step 10 was not saved" in attempt.errors
    assert "ConnectionError: 503 or 403" in attempt.errors
    assert "trying again, for" in attempt.errors, "it was warned of before"
    assert attempt.raised_after < HOW["refused"][1] + SLACK_SECS
    assert attempt.steps[-1] > 10 + SAVE_STEPS, "training went on"
    assert_the_newest_is_intact_and_training_goes_on_from_it(attempt)


def test_a_write_that_blocks_for_ever_ends_the_run_at_the_limit(attempts):
    attempt = attempts["blocked"]
    assert attempt.code == 1
    assert "monsess.errors.SaveError: " in attempt.errors
    assert "save of step 10 did not end within 6 s and nothing is committed any more" in attempt.errors
    assert "The save of step 10 to faulty://errors/run has taken" in attempt.errors, "it was warned of before"
    assert "training goes on" in attempt.errors
    assert HOW["blocked"][1] <= attempt.raised_after < HOW["blocked"][1] + SLACK_SECS
    assert attempt.steps[-1] > 10 + SAVE_STEPS, "training went on"
    assert_the_newest_is_intact_and_training_goes_on_from_it(attempt)


# ---- in a session


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def url() -> str:
    return f"faulty://{uuid.uuid4().hex}/run"


def test_one_save_in_flight_one_waits_and_the_third_holds_training(url, faults, caplog):
    caplog.set_level(logging.WARNING, "monsess")
    seen = []

    def after_run(session: Any, step: int) -> None:
        if step == 4:
            faults.block("write", times=None)  # hits the save of step 5
        elif step in (6, 11):
            assert faults.wait_until_blocked()
            seen.append(step)
        elif step == 14:
            threading.Timer(1.0, faults.release).start()

    begun = time.monotonic()
    sess = failing_run.train({"faults": faults}, after_run, url=url, keep=ms.KeepLast(100))
    assert seen == [6, 11], "steps went on with one save in flight, and with one waiting"
    assert time.monotonic() - begun > 1.0, "the third one was held until the first had ended"
    store = ms.CheckpointStore(url, {"faults": faults})
    assert store.steps() == [5, 10, 15, 20, 25]
    assert {step: store.verify(step) for step in store.steps()} == {step: [] for step in store.steps()}
    toy.assert_same_bits(sess.state_copy(), toy.straight(LAST_STEP))


@pytest.mark.parametrize("after", [0, 3, 20])
def test_credentials_that_run_out_are_renewed(url, faults, after, caplog):
    caplog.set_level(logging.WARNING, "monsess")

    def after_run(session: Any, step: int) -> None:
        if step in (4, 14):
            faults.expire_credentials(after=after)

    sess = failing_run.train({"faults": faults}, after_run, url=url, keep=ms.KeepLast(100))
    refused = [one for one in faults.log if one.outcome == "PermissionError"]
    assert refused, "they did run out"
    assert min(one.instance for one in faults.log[refused[-1].number :] if one.outcome == "done") > refused[0].instance
    store = ms.CheckpointStore(url, {"faults": faults})
    assert store.steps() == [5, 10, 15, 20, 25]
    assert {step: store.verify(step) for step in store.steps()} == {step: [] for step in store.steps()}
    assert [record for record in caplog.records if record.name == "monsess"] == []
    toy.assert_same_bits(sess.state_copy(), toy.straight(LAST_STEP))


def test_a_store_whose_listings_lag_behind_loses_no_save_and_no_restart_begins_anew(url):
    faults = Faults(stale_listing_secs=3600)
    options, exact = {"faults": faults}, {"faults": Faults()}

    def after_run(session: Any, step: int) -> None:
        if step == 14:
            until(lambda: set(ms.CheckpointStore(url, exact).read_run().get("steps", ())) == {"5", "10"})
            raise InterruptedError("the power is cut")

    with pytest.raises(InterruptedError):
        failing_run.train(options, after_run, url=url, keep=ms.KeepLast(100))
    assert FaultyFileSystem(**options).ls(url.removesuffix("/run")) == []
    assert ms.latest_checkpoint(url, storage_options=options) == 10
    sess = failing_run.train(options, url=url, keep=ms.KeepLast(100))
    assert sess.restored_from == 10
    toy.assert_same_bits(sess.state_copy(), toy.straight(LAST_STEP))
    for each in (options, exact):
        store = ms.CheckpointStore(url, each)
        assert store.steps() == [5, 10, 15, 20, 25]
        assert {step: store.verify(step) for step in store.steps()} == {step: [] for step in store.steps()}


@pytest.mark.parametrize(
    ("kind", "most", "when"),
    [
        ("write", 6, "before"),
        ("write", 6, "middle"),
        ("write", 6, "after"),
        ("any", 15, "before"),  # the read of what is not there has no middle
        ("any", 15, "after"),
    ],
)
@pytest.mark.parametrize("times", [None, 1], ids=["the whole store", "one request"])
def test_silence_longer_than_a_request_may_take(url, faults, times, kind, most, when, seed, monkeypatch):
    """What was given up comes back, and writes what was written anew in the meantime."""
    monkeypatch.setitem(Storage.__init__.__kwdefaults__, "stall_secs", 0.3)
    n = random.Random(f"{seed} {times} {kind} {when}").randint(1, most)
    print(f"MONSESS_SEED={seed}: {kind} number {n}")
    options = {"faults": faults}
    before: list[int] = []

    def is_blocked() -> bool:
        return faults.wait_until_blocked(timeout_secs=0)

    def is_over() -> bool:
        """Whether the one that was to be blocked has ended, and the next one, too."""
        since = [one for one in faults.log[before[0] :] if kind in ("any", one.kind)]
        return len(since) > n + 1 and all(one.outcome != "running" for one in since[: n + 2])

    def after_run(session: Any, step: int) -> None:
        if step == SAVE_STEPS - 1:
            before.append(len(faults.log))
            faults.block(kind, n, times=times, when=when)
        elif step == 3 * SAVE_STEPS - 1:  # two saves were begun, which together have as many operations
            until(lambda: is_blocked() or is_over())
            if not is_blocked():  # nothing comes after an answer that is an error: the next write is hit instead
                assert (times, when) == (1, "after")
                faults.block("write", when=when)
            if times is None:
                threading.Timer(1.5, faults.release).start()
        elif step == LAST_STEP - 2 and times is not None:
            assert faults.wait_until_blocked()
            until(lambda: 15 in ms.CheckpointStore(url, {"faults": Faults()}).steps())
            faults.release()

    sess = failing_run.train(options, after_run, url=url, keep=ms.KeepLast(100))
    until(lambda: not any(one.outcome == "running" for one in faults.log))
    store = ms.CheckpointStore(url, options)
    assert store.steps() == [5, 10, 15, 20, 25]
    assert {step: store.verify(step) for step in store.steps()} == {step: [] for step in store.steps()}
    sess = failing_run.train(options, url=url, keep=ms.KeepLast(100))
    assert sess.restored_from == LAST_STEP
    toy.assert_same_bits(sess.state_copy(), toy.straight(LAST_STEP))


@pytest.mark.parametrize("error", [PermissionError, ConnectionError])
def test_the_last_save_that_fails_is_an_error_of_the_session(url, faults, error):
    def after_run(session: Any, step: int) -> None:
        if step == LAST_STEP - 1:
            until(lambda: ms.CheckpointStore(url, {"faults": faults}).steps() == [5, 10, 15, 20])
            faults.fail("write", times=None, error=error("no more"))

    options = ms.CheckpointOptions(save_timeout_secs=6)
    with pytest.raises(ms.SaveError, match=r"[Ss]tep 25 .*no more"):
        failing_run.train({"faults": faults}, after_run, url=url, checkpoint=options, keep=ms.KeepLast(9))
    faults.heal()
    assert ms.latest_checkpoint(url, storage_options={"faults": faults}) == 20


@pytest.mark.timeout(120)
def test_a_store_that_was_silent_for_the_whole_limit_is_not_waited_for_twice(url, faults, monkeypatch):
    """Two saves are under way when a session ends; the second one is tried, and not for as long once more."""
    monkeypatch.setitem(Storage.__init__.__kwdefaults__, "stall_secs", 0.2)
    silent_since = []

    def after_run(session: Any, step: int) -> None:
        if step == LAST_STEP - 6:
            until(lambda: ms.CheckpointStore(url, {"faults": faults}).steps() == [5, 10, 15])
            faults.block("any", times=None)
            silent_since.append(time.monotonic())

    limit = 15.0
    with pytest.raises(ms.SaveError, match=r"[Ss]tep 20 .*no answer within 0.2 s") as caught:
        failing_run.train(
            {"faults": faults}, after_run, url=url, checkpoint=ms.CheckpointOptions(save_timeout_secs=limit)
        )
    took = time.monotonic() - silent_since[0]
    assert any("step 25 " in note.lower() for note in caught.value.__notes__), "it was tried"
    assert 0.8 * limit < took < 1.6 * limit
    faults.heal()
    faults.release()
    assert ms.latest_checkpoint(url, storage_options={"faults": faults}) == 15


@pytest.mark.parametrize(
    ("error", "permanent"),
    [
        (PermissionError("403"), True),
        (OSError(28, "no space left"), True),
        (OSError(30, "read-only"), True),
        (NotImplementedError("no"), True),
        (ValueError("no such bucket"), True),
        (ConnectionResetError("reset"), False),
        (TimeoutError("slow"), False),
        (OSError(5, "I/O error"), False),
        (OSError(16, "SlowDown"), False),
        (RuntimeError("session is closed"), False),
        (KeyError("an error of the library"), False),
    ],
    ids=shown,
)
def test_what_can_pass_is_tried_again_and_what_cannot_is_not(url, faults, error, permanent):
    store = store_of(url, faults)
    writer = saver(store, save_timeout_secs=4.0)  # enough for the first try on a busy machine
    faults.fail("write", times=None, error=error, path="session.json")
    writer.submit(snapshot(1))
    with pytest.raises(ms.SaveError, match=re.escape(str(error))):  # whichever limit is met first
        writer.wait()
    writer.close()
    tries = sum(one.kind == "write" and "session.json" in one.path for one in faults.log)
    assert tries <= 2 if permanent else tries >= 4
    assert store.steps() == []


# ---- one fault at every operation of a save


def store_of(url: str, faults: Faults) -> CheckpointStore:
    store = CheckpointStore(url, {"faults": faults})
    store._storage._backoff_secs = 0.001
    return store


#: What happens at the n-th operation of a save and its clean-up, and whether the save is committed all the same: what
#: passes is ridden out, and so is what the store only says to have done; what stays is an error.
KINDS: dict[str, tuple[Callable[[Faults, int], None], bool]] = {
    "fails once": (lambda f, n: f.fail("any", n, error=ConnectionError), True),
    "fails three times": (lambda f, n: f.fail("any", n, times=3, error=ConnectionError), True),
    "breaks off in the middle": (lambda f, n: f.fail("any", n, error=ConnectionError, when="middle"), True),
    "is done and the answer lost": (lambda f, n: f.fail("any", n, error=ConnectionError, when="after"), True),
    "finds the credentials expired": (lambda f, n: f.expire_credentials(after=n - 1), True),
    "is lost though it said it was done": (lambda f, n: f.lose("write", n), True),
    "arrives cut off": (lambda f, n: f.truncate("write", n, keep_bytes=1), True),
    "arrives short": (lambda f, n: f.short_write(n), True),
    "is denied from there on": (lambda f, n: f.fail("any", n, times=None, error=PermissionError), False),
    "is full from there on": (lambda f, n: f.fail("write", n, times=None, error=OSError(28, "full")), False),
}
WRITES = ("is lost though it said it was done", "arrives cut off", "arrives short", "is full from there on")


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_operation_that(kind, seed, figures):
    chance = random.Random(f"{seed} {kind}")
    both = [False, True] if COUNT is None else [chance.random() < 0.5]
    for directories in both:
        figures.append(f"a save of which one operation {kind}: {_with_faults(kind, directories, chance)}")


def _with_faults(kind: str, directories: bool, chance: random.Random) -> str:
    faults, url = Faults(directories=directories), f"faulty://{uuid.uuid4().hex}/run"
    arm, comes_through = KINDS[kind]
    begun = len(faults.log)
    for step in (1, 2, 3):
        begun = len(faults.log)
        assert commit(url, faults, step) == "committed"
    operations = [one for one in faults.log[begun:] if kind not in WRITES or one.kind == "write"]
    positions = range(1, len(operations) + 2)  # the last one hits nothing
    if COUNT is not None:
        positions = sorted(chance.sample(positions, min(COUNT, len(positions))))

    newest, ends = 3, []
    for step, position in enumerate(positions, start=4):
        ends.append(commit(url, faults, step, lambda p=position: arm(faults, p)))
        faults.heal()
        store = store_of(url, faults)
        committed = store.steps()
        if ends[-1] == "committed":
            newest = step
        assert ends[-1] in ("committed", "failed")
        assert not comes_through or ends[-1] == "committed", (position, operations)
        assert newest in committed, (position, "what was committed is there")
        assert store.verify(newest) == [], (position, "and whole")
        assert max(committed) in (newest, step), (position, "what was reported as failed may have been committed")
    assert commit(url, faults, 10**6) == "committed"
    left = beside_bookkeeping(store_of(url, faults)._storage.list())
    assert left == {str(step) for step in store_of(url, faults).steps()}, "leftovers"
    return (
        f"{len(positions)} of {len(operations) + 1} tried ({'directories' if directories else 'objects only'}), "
        f"{ends.count('committed')} committed, {ends.count('failed')} raised"
    )


def commit(url: str, faults: Faults, step: int, arm: Callable[[], None] = lambda: None) -> str:
    """Save one step, in a saver of its own, and let its clean-up end; how the save ended."""
    store = store_of(url, faults)
    store.steps()  # the credentials are good
    arm()
    writer = saver(store, keep=2, save_timeout_secs=60.0)
    try:
        writer.submit(snapshot(step))
        return "committed" if writer.wait() == [step] else "lost without a word"
    except ms.MonsessError as error:
        return "failed" if f"tep {step}" in str(error) else f"failed without its step: {error}"
    finally:
        writer.close()
