"""What tests count and measure, shown at the end of a run; pytest-xdist's workers hand it to the one who prints."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest

KILLED = "killed, started again, and equal to the straight run"
MOMENTS = "killed while"
OPERATIONS = "killed at an operation of the store, started again, and equal to the straight run"
DAMAGED = "files of a checkpoint damaged in one way each"

COUNTS = pytest.StashKey[dict[str, dict[str, Any]]]()
FIGURES = pytest.StashKey[list[str]]()
SEED = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of the whole run, workers included, and begin to count."""
    seed = os.environ.setdefault("MONSESS_SEED", str(random.SystemRandom().randrange(10**6)))
    config.stash[SEED] = int(seed)
    config.stash[COUNTS] = {KILLED: Counter(), MOMENTS: Counter(), OPERATIONS: {}, DAMAGED: Counter()}
    config.stash[FIGURES] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker of pytest-xdist: hand over what was counted."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        counts = {what: dict(found) for what, found in session.config.stash[COUNTS].items()}
        output["monsess_report"] = [counts, session.config.stash[FIGURES]]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """In the one who prints: take what a worker counted."""
    counts, figures = getattr(node, "workeroutput", {}).get("monsess_report", [{}, []])
    for what, found in counts.items():
        node.config.stash[COUNTS][what].update(found)  # a Counter adds; places are of one worker each
    node.config.stash[FIGURES].extend(figures)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print."""
    for what, counts in config.stash[COUNTS].items():
        if counts:
            listed = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
            terminalreporter.write_line(f"{what} (MONSESS_SEED={config.stash[SEED]}): {listed}")
    for line in config.stash[FIGURES]:
        terminalreporter.write_line(line)
