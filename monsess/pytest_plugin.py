"""Fixtures for pytest; a ``conftest.py`` asks for them with ``pytest_plugins = ["monsess.pytest_plugin"]``."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from monsess.testing import FakeClock, Faults


class FaultyStore(NamedTuple):
    """An empty store in memory.

    Args:
        url: For ``checkpoint_dir``.
        storage_options: To be given with it.
        faults: What goes wrong in it: nothing yet.
    """

    url: str
    storage_options: dict[str, Any]
    faults: Faults


@pytest.fixture
def faulty_store() -> Iterator[FaultyStore]:
    """A store of this test's own in which things can be made to go wrong."""
    faults = Faults()
    yield FaultyStore(f"faulty://{uuid.uuid4().hex}/run", {"faults": faults}, faults)
    faults.heal()  # no thread stays blocked in it


@pytest.fixture
def fake_clock() -> Iterator[FakeClock]:
    """A clock that stands still until the test moves it."""
    with FakeClock() as clock:
        yield clock
