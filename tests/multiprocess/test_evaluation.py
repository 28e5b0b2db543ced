"""Evaluation and early stopping in jobs of several processes, and in jobs that are killed between two evaluations."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest
from cluster import outputs
from conforms import conforms

import monsess as ms


@conforms("EH-004", instead="Several processes evaluate together, each its share of the data.")
def test_all_take_part_and_every_row_counts_once(cluster):
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, 2, url=str(url), call="cluster_evaluation:different_shares")
    assert [one.code for one in ended] == [0, 0], outputs(ended)
    assert ended[0].report["heard"] == ended[1].report["heard"]
    heard = [(step, values) for step, values in ended[0].report["heard"]]
    steps = [step for step, values in heard if "eval/away" in values]
    assert steps == [0, 5, 10, 12]
    assert [step for step, values in heard if "eval/saved/away" in values] == [3, 6, 9, 12]
    assert [step for step, values in heard if "eval/often/away" in values]  # the chief's clock says when
    shares = [[np.arange(4), np.arange(4) + 10, np.arange(count) + 20] for count in (3, 4)]
    rows = np.concatenate([batch + 100 * index for index, share in enumerate(shares) for batch in share])
    for step, values in heard:
        if "eval/away" in values:
            assert values["eval/rows"] == len(rows) == 23
            assert values["eval/away"] == pytest.approx(rows.mean() - sum(range(step)), rel=1e-6)
    assert "do not have the same number of evaluation batches: it ends where process 1 has no" in ended[0].output
    store = ms.CheckpointStore(str(url))
    assert store.metrics(12)["eval/away"] == pytest.approx(rows.mean() - 66, rel=1e-6)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_breaks_an_evaluation_off_and_the_next_attempt_makes_up_for_it(cluster, count):
    url = cluster.folder("checkpoints")
    call = "cluster_evaluation:long_evaluation"
    with cluster.start(count, url=str(url), call=call, arguments={"secs": 0.1}) as job:
        job.wrote(count - 1, "batch 2")
        job.send(count - 1, signal.SIGTERM)
        sent = time.monotonic()
    assert [one.code for one in job.over] == [143] * count, outputs(job.over)
    assert max(one.at for one in job.over) - sent < 15
    assert "The evaluation of step 3 is broken off, for a signal ends the job." in job.over[0].output
    assert ms.CheckpointStore(str(url)).steps() == [3]
    ended = cluster.run(count, url=str(url), call=call, arguments={"secs": 0.0})
    assert [one.report for one in ended] == [{"heard": [3], "step": 5}] * count, outputs(ended)


@conforms("ES-015", instead="A wish of any process takes effect some runs later, on all at the same step.")
def test_a_wish_of_one_process_stops_all_at_the_same_step(cluster):
    ended = cluster.run(2, call="cluster_evaluation:wishes")
    assert [one.code for one in ended] == [0, 0], outputs(ended)
    first, second = (one.report for one in ended)
    assert first == second
    (by_value, why), by_evaluation, (by_predicate, because), (by_time, reason) = first
    assert by_evaluation == [by_value, why]
    assert (by_value in range(5, 9), why) == (True, "EARLY_STOPPING")
    assert (by_predicate in range(5, 9), because) == (True, "EARLY_STOPPING")
    assert (by_time in range(2, 40), reason) == (True, "REQUESTED")


def chain(cluster, count, kill_after, url):
    """Attempts, each killed after so many evaluations, until one ends by itself; the reports of that."""
    for attempt in range(20):
        arguments = {} if kill_after is None else {"kill_after": kill_after}
        ended = cluster.run(count, url=str(url), call="cluster_evaluation:early", arguments=arguments)
        codes = {one.code for one in ended}
        if codes == {0}:
            return attempt, [one.report for one in ended]
        assert -signal.SIGKILL in codes, outputs(ended)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_after_every_second_evaluation_stops_where_a_straight_one_does(cluster, count):
    """Acceptance: patience 3 and a value that stays the same."""
    _, straight = chain(cluster, count, None, cluster.folder("straight"))
    last = 8
    assert [(one["global_step"], one["reason"]) for one in straight] == [(last, "EARLY_STOPPING")] * count
    url = cluster.folder("killed")
    kills, reports = chain(cluster, count, 2, url)
    assert kills == 2
    assert [one["global_step"] for one in reports] == [last] * count
    assert [one["reason"] for one in reports] == ["EARLY_STOPPING"] * count
    _, again = chain(cluster, count, None, url)
    assert [(one["steps"], one["restored_from"], one["heard"]) for one in again] == [(0, last, [])] * count
    assert [one["reason"] for one in again] == ["EARLY_STOPPING"] * count
    more = cluster.run(count, url=str(url), call="cluster_evaluation:early", arguments={"patience": 5})
    assert [one.report["global_step"] > last for one in more] == [True] * count  # more patience goes on


@pytest.mark.slow
def test_an_evaluator_of_two_processes(cluster):
    url = cluster.folder("checkpoints")
    cluster.run(1, url=str(url), call="cluster_evaluation:early")
    steps = ms.CheckpointStore(str(url)).steps()
    ended = cluster.run(2, url=str(url), call="cluster_evaluation:evaluator")
    assert [one.code for one in ended] == [0, 0], outputs(ended)
    assert ended[0].report["results"] == ended[1].report["results"]
    assert [step for step, _ in ended[0].report["results"]] == steps
    for step, metrics in ended[0].report["results"]:
        assert metrics == {"away": 5.0 - sum(range(step)), "rows": 4.0}
    assert ended[0].report["once"] == [steps[-1], {"away": 5.0 - sum(range(steps[-1])), "rows": 12.0}, 3]
    assert ms.CheckpointStore(str(url)).metrics(steps[-1])["eval/rows"] == 4.0
