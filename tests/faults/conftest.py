"""Fork servers, and the straight runs that everything is compared with."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kill_child import STEPS, Options
from kills import Ending, Workers, ending, output
from report import COUNTS, DAMAGED, KILLED, MOMENTS, OPERATIONS


@pytest.fixture(scope="session")
def killed(request: pytest.FixtureRequest) -> Any:
    """How many lineages with a kill ended as the straight run, by place."""
    return request.config.stash[COUNTS][KILLED]


@pytest.fixture(scope="session")
def moments(request: pytest.FixtureRequest) -> Any:
    """How many kills at random moments met which phase."""
    return request.config.stash[COUNTS][MOMENTS]


@pytest.fixture(scope="session")
def operations(request: pytest.FixtureRequest) -> Any:
    """By scenario and store, at how many operations a run was killed, of how many."""
    return request.config.stash[COUNTS][OPERATIONS]


@pytest.fixture(scope="session")
def damaged(request: pytest.FixtureRequest) -> Any:
    """How many kinds of damage to how many files were found, by kind."""
    return request.config.stash[COUNTS][DAMAGED]


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders for many small runs, in memory where that is possible; those of failed runs end up in pytest's own."""
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="monsess-kills-", dir=base))
    try:
        yield folder
        left = [path for path in folder.iterdir() if path.name != "cache"]
        if left:
            kept = tmp_path_factory.mktemp("failed-runs")
            for path in left:
                shutil.move(path, kept)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def workers(scratch: Path) -> Iterator[Workers]:
    """Two fork servers."""
    both = Workers(scratch)
    try:
        yield both
    finally:
        both.close()


@pytest.fixture(scope="session")
def cache(workers: Workers) -> str:
    """A directory with the compiled programs of fresh and resumed runs, which is only read after this."""
    directory = str(workers.scratch / "cache")
    options = Options(folder=workers.folder("cache"), last_step=3, cache=directory, fill_cache=True)
    for last_step in (3, 5):
        again = dataclasses.replace(options, last_step=last_step)
        assert workers.servers[0](again) == 0, output(options.folder)
    shutil.rmtree(options.folder)
    return directory


@pytest.fixture(scope="session")
def straight(workers: Workers) -> Callable[[int], Ending]:
    """By its last step, what an undisturbed run ends in that has neither checkpoints nor a cache of programs."""
    known: dict[int, Ending] = {}

    def find(last_step: int = STEPS) -> Ending:
        if last_step not in known:
            options = Options(folder=workers.folder("straight"), store="none", last_step=last_step)
            assert workers.servers[0](options) == 0, output(options.folder)
            known[last_step] = ending(options.folder)
            shutil.rmtree(options.folder)
        return known[last_step]

    return find
