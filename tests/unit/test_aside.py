"""Moving a step aside on a store that cannot rename, cut off at every operation: each byte is there once in the end."""

from __future__ import annotations

import os

import pytest
from checkpoints import fresh, save

import monsess as ms
from monsess.checkpoint import aside
from monsess.errors import StorageError

MOVED = 4
STRIDE = 1 if int(os.environ.get("MONSESS_RANDOM_KILLS") or 4) >= 40 else 7  # `make soak` takes every operation


def contents(store: ms.CheckpointStore, folder: object) -> dict[str, bytes]:
    return {name: store._storage.read(f"{folder}/{name}") for name in store._storage.walk(str(folder))}


def opened(url: str, faults: ms.testing.Faults) -> ms.CheckpointStore:
    return ms.CheckpointStore(url, {"faults": faults})


def cut_off(n: int, damage: str) -> tuple[str, dict[str, bytes], bool]:
    """Move step 4 of a new directory aside, with nothing possible any more from operation ``n`` on."""
    url, faults = fresh("faulty"), ms.testing.Faults()
    store = save(url, 2, MOVED)
    if damage == "commit.json gone":
        store._storage.delete(f"{MOVED}/commit.json")
    elif damage:
        store._storage.write(f"{MOVED}/{damage}", b"?")
    before = contents(store, MOVED)
    faults.fail("any", n, times=None, error=PermissionError("dead"), when=("before", "middle", "after")[n % 3])
    try:
        opened(url, faults).set_aside(MOVED, "dead", "damaged")
    except StorageError:
        return url, before, True
    return url, before, False


def places(url: str, before: dict[str, bytes]) -> tuple[list[str], list[str]]:
    """Where the step lies whole, and where parts of it lie."""
    store = ms.CheckpointStore(url)
    names = [name for name in store._storage.list() if name.startswith("damaged-") or name == str(MOVED)]
    found = {name: contents(store, name) for name in names}
    whole = [name for name in names if found[name] == before]
    return whole, [name for name in names if name not in whole]


@pytest.mark.soak
@pytest.mark.parametrize("damage", ["", "session.json", "commit.json", "commit.json gone"])
def test_cut_off_anywhere_no_byte_is_lost_and_none_is_there_twice(damage):
    number = len(damage) % STRIDE
    cut = True
    while cut:
        number += STRIDE
        url, before, cut = cut_off(number, damage)
        whole, _ = places(url, before)
        assert whole, f"operation {number}: the bytes are nowhere together"
        save(url, 6, attempt="a2")  # whose clean-up looks after it
        whole, parts = places(url, before)
        assert len(whole) == 1 or damage == "commit.json gone", f"operation {number}: {whole}"
        assert whole, f"operation {number}"
        assert not parts, f"operation {number}: {parts}"
        assert not aside.marks(ms.CheckpointStore(url)._storage.list())
        assert ms.latest_checkpoint(url) == 6
    assert number > 25


@pytest.mark.soak
def test_the_next_attempt_moves_it_once():
    number = 2 % STRIDE
    cut = True
    while cut:
        number += STRIDE
        url, before, cut = cut_off(number, "session.json")
        save(url, MOVED, attempt="a2")
        assert ms.CheckpointStore(url).verify(MOVED) == [], f"operation {number}"
        whole, parts = places(url, before)
        assert len(whole) == 1, f"operation {number}: {whole}"
        assert parts == [str(MOVED)], f"operation {number}: {parts}"


def test_a_mark_of_an_attempt_that_may_still_be_at_work_is_left_alone():
    names = [".moving-aside-4-a1", ".moving-damaged-10-a1-2", ".moving-aside-4-a11", ".moving-4", "moving-aside-4-a1"]
    assert aside.marks(names, but_of="a1") == [".moving-aside-4-a11"]
    assert len(aside.marks(names)) == 3
