"""The hooks that watch, in jobs of several real processes, killed and started again."""

from __future__ import annotations

import json
import shutil

import pytest
import traces
from cluster import all_ended_well, outputs

import monsess as ms

KILLED = 8  # the step at which every process dies
COMMITTED = 5


def note(url):
    return json.loads((url / "goodput.json").read_text())


def killed(cluster, count, url):
    """Train up to step 8, with a checkpoint at 5, and die there."""
    ended = cluster.run(count, call="watching:watched", url=str(url), arguments={"last_step": 12, "dies_at": KILLED})
    assert any(one.code == -9 for one in ended), outputs(ended)
    assert all(one.code != 0 for one in ended), outputs(ended)
    assert ms.CheckpointStore(str(url)).steps() == [COMMITTED]


@pytest.mark.parametrize("count", [1, 2])
def test_lost_work_is_known_to_one_step_after_a_kill(cluster, figures, count):
    url = cluster.folder("checkpoints")
    killed(cluster, count, url)
    first = note(url)
    assert abs(first["step"] - KILLED) <= 1
    ended = cluster.run(count, call="watching:watched", url=str(url), arguments={"last_step": 12})
    all_ended_well(ended)
    for one in ended:
        assert (one.report["began"], one.report["step"]) == (COMMITTED, 12)
    chief = ended[0].report
    assert abs(chief["lost_steps"] - (KILLED - COMMITTED)) <= 1
    assert chief["restarts"] == 1
    totals, last = chief["totals"], note(url)
    assert last["clean"] is True
    assert last["lost_steps"] == chief["lost_steps"]
    seconds = last["time"] - (first["time"] - first["wall"])
    parts = sum(value for name, value in totals.items() if name != "wall")
    figures.append(
        f"{count} process(es), killed at 8 and resumed at 5: {chief['lost_steps']} steps lost, the parts add up to "
        f"{100 * parts / seconds:.1f} % of the wall time ({seconds:.1f} s)"
    )
    assert parts == pytest.approx(seconds, rel=0.02)
    assert totals["lost"] > 0
    assert totals["down"] > 0


def test_each_process_has_a_trace_of_its_own(cluster):
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, call="watching:watched", url=str(url), arguments={"last_step": 6})
    all_ended_well(ended)
    for one in ended:
        (trace,) = one.report["traces"]
        assert trace == f"{url}/profile/process_{one.index}/plugins/profile/steps_3-4"
        assert traces.steps_in(trace) == [3, 4]
    assert "step 6/6 (100.0 %)" in ended[0].output
    assert " step 6/6 " not in ended[1].output  # the chief alone shows the progress
    events = [event for event in ms.read_metrics(str(url)).events if event["event"] == "goodput"]
    assert [event["step"] for event in events] == [4, 6]


@pytest.mark.slow
def test_on_the_chief_alone(cluster):
    url = cluster.folder("checkpoints")
    arguments = {"last_step": 6, "chief_only": True}
    ended = cluster.run(2, call="watching:watched", url=str(url), arguments=arguments)
    all_ended_well(ended)
    assert [len(one.report["traces"]) for one in ended] == [1, 0]
    assert ended[0].report["totals"]["step"] > 0
    shutil.rmtree(url)
