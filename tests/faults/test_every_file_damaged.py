"""Every file of a checkpoint, damaged in every way: found before a value reaches the state, reported, left there."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import uuid
from collections.abc import Callable
from typing import Any

import kill_child
import mixed_leaves
import pytest
import ticks
import toy
from checkpoints import saver, snapshot

import monsess as ms
from monsess.checkpoint.restore import find_restorable
from monsess.errors import DamagedCheckpointError, MonsessError

#: How many of the cases a session is started for, per store; None: for all of them.
COUNT = {"4": 6, "12": 40}.get(os.environ.get("MONSESS_RANDOM_KILLS") or "4")
STEPS = (2, 4, 6)
NEWEST, BEFORE = 6, 4

pytestmark = pytest.mark.timeout(900)


def flip(whole: bytes, at: int) -> bytes:
    return whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :]


#: What becomes of a file, given its bytes, those of another step's file of that name, and a source of random numbers.
DAMAGES: dict[str, Callable[[bytes, bytes, random.Random], bytes | None]] = {
    "first byte flipped": lambda whole, other, chance: flip(whole, 0),
    "middle byte flipped": lambda whole, other, chance: flip(whole, len(whole) // 2),
    "last byte flipped": lambda whole, other, chance: flip(whole, len(whole) - 1),
    "some byte flipped": lambda whole, other, chance: flip(whole, chance.randrange(len(whole))),
    "last byte cut": lambda whole, other, chance: whole[:-1],
    "first byte cut": lambda whole, other, chance: whole[1:],
    "half cut": lambda whole, other, chance: whole[: len(whole) // 2],
    "emptied": lambda whole, other, chance: b"",
    "zeros of the same size": lambda whole, other, chance: bytes(len(whole)),
    "a byte added": lambda whole, other, chance: whole + b"\n",
    "removed": lambda whole, other, chance: None,
    "another step's": lambda whole, other, chance: other,
}


class Place:
    """A directory with committed steps, whose files are changed behind the back of everybody."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._storage = self.fresh()._storage

    def fresh(self) -> ms.CheckpointStore:
        """A store that knows nothing yet."""
        return ms.CheckpointStore(self.url)

    def files(self, folder: object) -> dict[str, bytes]:
        """All files below a folder, with their bytes."""
        return {name: self._storage.read(f"{folder}/{name}") for name in sorted(self._storage.walk(str(folder)))}

    def folders(self, prefix: str) -> list[str]:
        return sorted(name for name in self._storage.list() if name.startswith(prefix))

    def put(self, name: str, data: bytes | None) -> None:
        if data is None:
            self._storage.delete(name)
        else:
            self._storage.write(name, data)

    def copy(self, folder: str) -> Place:
        """A copy, which is never put back."""
        if self._storage.local_path is not None:
            shutil.copytree(self._storage.local_path, folder)
            return Place(folder)
        there = Place(f"faulty://{uuid.uuid4().hex}/run")
        for name, entry in self._storage.list().items():
            for below in self._storage.walk(name) if entry.is_dir else [""]:
                path = f"{name}/{below}".rstrip("/")
                there.put(path, self._storage.read(path))
        return there

    def cases(self, seed: int) -> list[tuple[str, str, bytes | None]]:
        """Every file of the newest step with everything that is done to it, but for what changes no byte."""
        found = []
        others = self.files(BEFORE)
        for name, whole in self.files(NEWEST).items():
            # Where names are random: the file in that folder whose size comes nearest.
            near = [data for other, data in others.items() if os.path.dirname(other) == os.path.dirname(name)]
            twin = others.get(name) or min(near, key=lambda data: abs(len(data) - len(whole)))
            for how, damage in DAMAGES.items():
                data = damage(whole, twin, random.Random(f"{seed}/{how}/{len(found)}"))
                if data != whole:
                    found.append((name, how, data))
        return found


def train(place: Place, last_step: int, **options: Any) -> int:
    """Train on until ``last_step``, which is saved; returns the step that the session began with."""
    with ms.MonitoredTrainingSession(
        ticks.init_fn,
        checkpoint_dir=place.url,
        checkpoint=ms.CheckpointOptions(**options),
        keep=ms.KeepLast(10),
        save_checkpoint_steps=2,
        hooks=[ms.StopAtStepHook(last_step=last_step)],
    ) as session:
        began = session.global_step
        assert float(session.state_copy()["count"]) == began, "the state is not that of the step"
        while not session.should_stop():
            session.run(ticks.one)
    return began


def new_place(kind: str, factory: pytest.TempPathFactory) -> Place:
    return Place(str(factory.mktemp("damage") / "run") if kind == "local" else f"faulty://{uuid.uuid4().hex}/run")


@pytest.fixture(scope="module", params=["local", "faulty"])
def twelve(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Three sound steps of twelve leaves, as a run left them."""
    place = new_place(request.param, tmp_path_factory)
    state, store = kill_child.init_fn(), place.fresh()
    writer = saver(store)
    for step in STEPS:
        state = {**state, "used": state["used"] + step, "mixed": mixed_leaves.advance(state["mixed"])}
        writer.submit(snapshot(step, state))
        assert writer.wait() == [step]
    writer.close()
    return place


@pytest.fixture(scope="module", params=["local", "faulty"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Three sound steps that a session left."""
    place = new_place(request.param, tmp_path_factory)
    train(place, NEWEST)
    assert place.fresh().steps() == list(STEPS)
    return place


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.name.startswith("monsess")]
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


def assert_named_once(warnings: list[str], name: str) -> None:
    """There was one warning; it names the step and the file."""
    assert len(warnings) == 1, warnings
    assert warnings[0].startswith("Damaged checkpoint in "), warnings
    assert f"step {NEWEST} ({name} " in warnings[0], warnings


def test_every_damage_to_every_file_is_found(twelve, seed, caplog, tmp_path, damaged):
    print(f"MONSESS_SEED={seed}")
    expected = ms.load_checkpoint(twelve.url, BEFORE)
    whole = twelve.files(NEWEST)
    assert {"commit.json", "session.json", "_CHECKPOINT_METADATA", "commit_success.txt"} <= set(whole)
    cases = twelve.cases(seed)
    with pytest.raises(DamagedCheckpointError, match="step 6"):
        spoiled = twelve.copy(str(tmp_path / "chosen"))
        spoiled.put(f"{NEWEST}/session.json", b"")
        ms.load_checkpoint(spoiled.url, NEWEST)
    assert len(cases) > len(DAMAGES) * len(whole) - 5  # what two steps have in common is few
    for name, how, data in cases:
        twelve.put(f"{NEWEST}/{name}", data)
        changed = twelve.files(NEWEST)
        assert changed != whole
        try:
            caplog.clear()
            toy.assert_same_bits(ms.load_checkpoint(twelve.url), expected)
            assert_named_once(warnings_of(caplog), name)
            assert ms.latest_checkpoint(twelve.url) == BEFORE
            assert name in " ".join(twelve.fresh().verify(NEWEST))
            with pytest.raises(DamagedCheckpointError, match=rf"step {NEWEST} \({name} "):
                find_restorable(twelve.fresh(), strict=True)
            assert twelve.files(NEWEST) == changed, "looking at it changed it"
        except BaseException as error:
            error.add_note(f"{name}: {how}")
            raise
        finally:
            twelve.put(f"{NEWEST}/{name}", whole[name])
        damaged["found"] += 1
        damaged["total"] += 1
    assert twelve.fresh().verify(NEWEST) == []
    assert ms.latest_checkpoint(twelve.url) == NEWEST


def test_a_session_takes_the_step_before_and_leaves_the_damaged_one_until_its_number_is_needed(
    trained, seed, caplog, tmp_path, damaged
):
    print(f"MONSESS_SEED={seed}")
    expected = ms.load_checkpoint(trained.url, NEWEST)
    cases = trained.cases(seed)
    random.Random(f"{seed}/{trained.fresh()}").shuffle(cases)
    for number, (name, how, data) in enumerate(cases[:COUNT]):
        place = trained.copy(str(tmp_path / str(number)))
        place.put(f"{NEWEST}/{name}", data)
        changed = place.files(NEWEST)
        try:
            with pytest.raises(DamagedCheckpointError, match=rf"step {NEWEST} \({name} "):
                train(place, BEFORE + 1, strict=True)
            caplog.clear()
            assert train(place, BEFORE + 1) == BEFORE
            assert_named_once(warnings_of(caplog), name)
            assert place.files(NEWEST) == changed, "it was touched before its number was needed"
            assert ms.latest_checkpoint(place.url) == BEFORE + 1
            assert train(place, NEWEST) == BEFORE + 1
            aside = place.folders("damaged-")
            assert len(aside) == 1
            assert aside[0].startswith(f"damaged-{NEWEST}-")
            assert place.files(aside[0]) == changed, "bytes of the damaged step were lost"
            assert place.fresh().verify(NEWEST) == []
            toy.assert_same_bits(ms.load_checkpoint(place.url, NEWEST), expected)
            assert train(place, NEWEST + 1) == NEWEST
        except BaseException as error:
            error.add_note(f"{name}: {how}")
            raise
        damaged["of them by a session that trains on"] += 1


def test_a_step_that_is_another_one_as_a_whole_is_damaged(trained, tmp_path, caplog):
    """``cp -r 4 6``: each file is sound, and they are not those of step 6."""
    place = trained.copy(str(tmp_path / "copied"))
    for name in place.files(NEWEST):
        place.put(f"{NEWEST}/{name}", None)
    for name, data in place.files(BEFORE).items():
        place.put(f"{NEWEST}/{name}", data)
    caplog.clear()
    assert train(place, BEFORE + 1) == BEFORE
    assert_named_once(warnings_of(caplog), "commit.json")


def test_of_several_damaged_steps_each_is_named_once_and_the_oldest_may_be_the_sound_one(trained, tmp_path, caplog):
    place = trained.copy(str(tmp_path / "several"))
    for step, name in ((6, "session.json"), (4, "default/_METADATA")):
        place.put(f"{step}/{name}", flip(place.files(step)[name], 7))
    caplog.clear()
    assert train(place, 3) == 2
    assert [text.split("step ")[1].split()[0] for text in warnings_of(caplog)] == ["6", "4"]
    for step in (2, 3):
        place.put(f"{step}/commit_success.txt", None)
    with pytest.raises(DamagedCheckpointError, match=r"step 6 .*step 4 .*step 3 .*and 1 more: monsess verify --all "):
        train(place, 7)
    assert place.fresh().steps() == [2, 3, 4, 6], "beside damaged steps there is no fresh start"


@pytest.mark.parametrize("name", ["notes.txt", "default/extra", "default/d/00", "default/ocdbt.process_0/d/zz"])
def test_a_file_of_somebody_else_in_a_step_changes_no_value_and_stays(trained, tmp_path, caplog, name):
    place = trained.copy(str(tmp_path / "foreign"))
    expected = ms.load_checkpoint(place.url, NEWEST)
    place.put(f"{NEWEST}/{name}", b"somebody else's")
    assert place.fresh().verify(NEWEST) == []
    caplog.clear()
    assert train(place, NEWEST + 1) == NEWEST
    assert warnings_of(caplog) == []
    toy.assert_same_bits(ms.load_checkpoint(place.url, NEWEST), expected)
    assert place.files(NEWEST)[name] == b"somebody else's"


BOOKS = {
    "emptied": b"",
    "zeros": bytes(400),
    "not JSON": b"\xff\xfe{",
    "a list": b"[1, 2]",
    "other kinds inside": b'{"run_id": 7, "steps": [3], "nonfinite": {}, "started": "x", "beat": "x", "pid": []}',
    "null inside": b'{"run_id": null, "steps": null, "nonfinite": null, "started": null, "pid": null, "host": null}',
    "a wrong index": b'{"steps": {"99": {"run_id": "x"}, "6": {}, "x": 1}}',
    "a step that is not there": b'{"steps": {"99": {"run_id": "x", "attempt": "y", "time": 1.0, "started": 1.0}}}',
    "removed": None,
}


@pytest.mark.parametrize(
    ("name", "how"),
    [*(("run.json", how) for how in BOOKS), *(("owner.json", how) for how in ("emptied", "not JSON", "null inside"))],
)
def test_no_checkpoint_depends_on_the_books(trained, tmp_path, name, how):
    place = trained.copy(str(tmp_path / "books"))
    run_id = json.loads(place.files(NEWEST)["commit.json"])["run_id"]
    place.put(name, BOOKS[how])
    assert ms.latest_checkpoint(place.url) == NEWEST
    assert place.fresh().steps() == list(STEPS)
    assert train(place, 8) == NEWEST
    assert json.loads(place.files(8)["commit.json"])["run_id"] == run_id
    assert place.fresh().steps() == [*STEPS, 8]
    assert ms.latest_checkpoint(place.url) == 8


def test_a_step_that_the_books_know_may_be_damaged_all_the_same(trained, tmp_path, caplog):
    place = trained.copy(str(tmp_path / "remembered"))
    train(place, 7)
    for step in (7, 6):
        place.put(f"{step}/commit.json", b"{}")
    caplog.clear()
    assert train(place, 5) == BEFORE
    assert len(warnings_of(caplog)) == 2
    for step in (7, 6):
        with pytest.raises(MonsessError, match="not a committed"):
            place.fresh().delete(step)
    for step in (5, 4, 2):
        place.put(f"{step}/commit.json", b"{}")
    with pytest.raises(DamagedCheckpointError):
        train(place, 8)


@pytest.mark.parametrize("data", [None, b"", b"{}"], ids=["gone", "emptied", "another"])
def test_a_damaged_commit_record_is_remembered_as_damage_over_many_attempts(trained, tmp_path, data):
    place = trained.copy(str(tmp_path / "long"))
    train(place, 20)
    place.put("20/commit.json", data)
    changed = place.files(20)
    for step in range(8, 20, 2):
        place.fresh().delete(step)
    for last_step in (7, 8, 9, 10):  # attempts that do not need the number
        assert train(place, last_step) == max(NEWEST, last_step - 1)
        assert place.files(20) == changed, f"after the attempt that ended at step {last_step}"


def test_without_its_commit_record_a_step_that_no_book_knows_is_none(trained, tmp_path, caplog):
    """On a store nothing tells it from a save that was killed: it is named, and removed after the next commit."""
    place = trained.copy(str(tmp_path / "unknown"))
    place.put("run.json", None)
    place.put(f"{NEWEST}/commit.json", None)
    caplog.clear()
    if place.fresh()._storage.local_path is not None:  # no save or deletion leaves that on a path: it is damage
        with pytest.raises(DamagedCheckpointError, match=rf"step {NEWEST} \(commit.json is missing"):
            train(place, BEFORE + 1, strict=True)
        return
    assert train(place, BEFORE + 1, strict=True) == BEFORE
    assert len(warnings_of(caplog)) == 1
    assert warnings_of(caplog)[0].endswith(f"because they are not committed checkpoints: {NEWEST}.")
    assert place.fresh().steps() == [2, BEFORE, BEFORE + 1]
    assert place.folders(f"{NEWEST}") == place.folders("damaged") == []
