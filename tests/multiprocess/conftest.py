"""Jobs of several processes share what forks them, and a sample of the slow tests stands for all of them.

A job of several processes takes five to ten seconds, and there is one for each place and kind of a fault. How many of
those tests are run goes by MONSESS_RANDOM_KILLS, as with the random kills: a sixteenth, an eighth in the continuous
integration, all in `make soak` and wherever tests are named or chosen with ``-k``. The others are told as *deselected*.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from cluster import Cluster
from report import FIGURES, SEED

HERE = Path(__file__).parent
SHARE = {"4": 1 / 16, "12": 1 / 8}.get(os.environ.get("MONSESS_RANDOM_KILLS") or "4")


@pytest.hookimpl(tryfirst=True)  # before what -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = [item for item in items if item.path.is_relative_to(HERE) and item.get_closest_marker("slow")]
    for item in slow:
        item.add_marker(pytest.mark.soak)
    named = config.option.keyword or any("::" in arg for arg in config.args)
    if SHARE is None or named or not slow:
        return
    seed = config.stash[SEED]
    chosen = random.Random(f"{seed} processes").sample(slow, max(1, round(SHARE * len(slow))))
    left = set(slow).difference(chosen)
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=list(left))
    if getattr(config, "workerinput", {}).get("workerid", "gw0") == "gw0":
        sample = f"{len(chosen)} of {len(slow)} slow tests of several processes were chosen (MONSESS_SEED={seed})"
        config.stash[FIGURES].append(f"{sample}; `make soak` runs all")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster
