"""Several processes log as one: global values, told on all, written by the chief."""

from __future__ import annotations

import os

from cluster import outputs

import monsess as ms


def test_values_are_those_of_all_processes_and_the_chief_alone_writes(cluster):
    url = cluster.folder("curves")
    ended = cluster.run(2, 2, call="cluster_curves:summaries", url=str(url))
    assert [process.code for process in ended] == [0, 0], outputs(ended)
    logged = {"mean": 1.5, "sum": 6.0, "each/0": 0.0, "each/1": 1.0, "each/2": 2.0, "each/3": 3.0}
    for index, process in enumerate(ended):
        expected = [[1, logged], [2, logged], [3, {"own": index}], [4, logged]]
        assert process.report["heard"] == {"pmap": expected, "shard_map": expected}, outputs(ended)
    for engine in ("pmap", "shard_map"):
        folder = url / engine
        metrics = ms.read_metrics(folder)
        assert [(p.step, p.value) for p in metrics.curves["sum"]] == [(1, 6.0), (2, 6.0), (4, 6.0)]
        assert [(p.step, p.value) for p in metrics.curves["own"]] == [(3, 0)]
        (start,) = [event for event in metrics.events if event["event"] == "start"]
        assert (start["processes"], start["devices"]) == (2, 4)
        assert len([name for name in os.listdir(folder) if name.startswith(("metrics", "events"))]) <= 2


def test_the_chiefs_clock_decides_and_all_log_after_the_same_step(cluster):
    url = cluster.folder("clock")
    ended = cluster.run(2, call="cluster_curves:by_the_clock", url=str(url))
    assert [process.code for process in ended] == [0, 0], outputs(ended)
    one, other = (process.report["heard"] for process in ended)
    assert one == other
    assert one[0] == 1
    assert 3 <= len(one) <= 5  # every ten steps, and the runs that an agreement takes
    assert [point.step for point in ms.read_metrics(url).curves["mean"]] == one
