"""All built-in hooks at once: what they bring to the host, and that a step in which none is due hardly costs more.

What it costs exactly is measured by ``benchmarks/hooks.py``, on a quiet machine.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import monsess as ms

HOOKS = Path(__file__).parents[2] / "hooks"
DOCS = Path(__file__).parents[2] / "docs"
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "hooks.py"
EVERY = 100


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_of_hooks", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_at_most_one_transfer_of_each_hook_whenever_it_is_due(benchmark, figures):
    steps = 4 * EVERY
    makers = benchmark.hooks(rows=8 * 4)
    made = [make() for make in makers.values()]
    found = benchmark.count_transfers(made, devices=4, steps=steps)
    by_owner = defaultdict(dict)
    for (owner, step), count in found.items():
        by_owner[owner][step] = count
    figures.append(
        f"transfers of {len(made)} hooks in {steps} steps: "
        + ", ".join(f"{owner} {sum(counts.values())}" for owner, counts in sorted(by_owner.items()))
    )
    # It looks at every step, once that is finished: its trigger is the step.
    nan = by_owner.pop("nan")
    assert sum(nan.values()) <= steps
    assert max(nan.values()) <= 3
    assert {"evaluation", "log_values", "progress_bar", "summary_saver"} <= set(by_owner)
    for owner in {path.stem for path in HOOKS.glob("[a-z]*.py")} & set(by_owner):
        counts = by_owner[owner]
        assert max(counts.values()) == 1, (owner, counts)
        # Every hundred steps, the first run included; the bar goes by seconds.
        assert len(counts) <= steps // EVERY + 1 or owner == "progress_bar", (owner, counts)


def test_hooks_that_are_not_due_hardly_cost_anything(benchmark, figures):
    makers = benchmark.hooks(rows=8 * 4)
    found = benchmark.added(lambda: [make() for make in makers.values()], devices=4, rounds=3, pairs=1)
    figures.append(
        f"{len(makers)} hooks add {found.clock:.0f} us to an untriggered step, {found.cpu:.0f} us of CPU, on a machine "
        f"on which it takes {found.without:.0f} us (goal: 25, on a quiet one; benchmarks/hooks.py)"
    )
    assert found.cpu < 500


def test_the_list_is_complete(benchmark):
    """Every public hook is in it, but those that have something to do in every run or need another service."""
    others = {"FeedFnHook", "ProfilerHook", "MLflowHook", "WandbHook", "StopAfterNEvalsHook"}
    public = {name for name in ms.__all__ if name.endswith("Hook") and name != "SessionRunHook"}
    assert public - others <= set(benchmark.hooks(rows=8))


@pytest.mark.parametrize("name", sorted({name for name in ms.__all__ if name.endswith("Hook")} - {"SessionRunHook"}))
def test_every_hook_has_a_place_in_the_documentation_and_an_example(name):
    """`test_doctests.py` and `test_documents.py` run them."""
    assert ">>> " in getattr(ms, name).__doc__
    assert name in (DOCS / "hooks.md").read_text()
    assert f"monsess.{name}" in (DOCS / "reference.md").read_text()
