"""Host values of two processes brought together, and states compared over them."""

from __future__ import annotations

import numpy as np
import pytest
from cluster import outputs


def test_every_bit_arrives_and_all_get_the_same(cluster):
    ended = cluster.run(2, call="cluster_collectives:all_kinds")
    one, other = (process.report for process in ended)
    assert one == other
    assert one == {
        "zero": np.float32([-0.0, -0.0]).tobytes().hex(),
        "big": [[2**40 + 1, 2**63 + 5], [2**40 + 2, 2**63 + 5]],
        "half": [[0.0] * 3, [1.0] * 3],
        "half dtype": "bfloat16",
        "large": [100_000.0, 300_000.0],
        "mean": 0.5,
        "max": 1,
        "ints": ["int64", 2 * (2**40 + 1)],
        "root": 1,
    }


def test_what_is_not_the_same_call_is_an_error_on_both(cluster):
    ended = cluster.run(2, call="cluster_collectives:out_of_step")
    for process in ended:
        assert "called by all processes at the same point" in process.report["error"]


def test_states_that_went_apart_end_training_on_both(cluster):
    ended = cluster.run(2, call="cluster_collectives:states_that_differ")
    for process in ended:
        assert process.report["step"] == 2
        assert "The 2 processes hold different values in the state of step 2" in process.report["error"]


def test_a_hook_on_the_chief_alone_may_not_do_what_all_have_to_do(cluster):
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, url=str(url), call="cluster_alone:refused_to_the_chief")
    assert [one.code for one in ended] == [0, 0], outputs(ended)
    told = ended[0].report["told"]
    assert set(told) == {
        "broadcast at the start",
        "compare at the start",
        "request_stop",
        "request_save",
        "run_context.request_stop",
        "stop_at_step",
        "compare_replicas",
        "run",
        "allreduce",
    }
    assert "Tries is among chief_only_hooks and calls allreduce, which all processes" in told["allreduce"]
    assert all("hooks=" in text for text in told.values())
    assert ended[1].report["told"] == {}
    assert [one.report["global_step"] for one in ended] == [8, 8]


def test_a_built_in_hook_that_all_have_to_run_is_refused_at_once(cluster):
    ended = cluster.run(2, call="cluster_alone:compared_by_the_chief")
    for one in ended:
        assert one.code == 1, outputs(ended)
        assert "HookError: ReplicaCheckHook is among chief_only_hooks, but does what all processes" in one.output
        assert one.seconds < 30


@pytest.mark.slow
def test_a_hook_on_the_chief_alone_may_not_feed_the_step(cluster):
    ended = cluster.run(2, call="cluster_alone:fed_by_the_chief")
    assert [one.code for one in ended] == [1, 1], outputs(ended)
    assert "Feeds is among chief_only_hooks and feeds the step, which all" in ended[0].output
    assert "PeerFailedError: Process 0 failed at step 0: HookError: " in ended[1].output, outputs(ended)


CASES = [
    ("body", "allreduce", 0),
    *[
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("body", "allreduce", 1),
            ("body", "compare_replicas", 0),
            ("start", "allreduce", 0),
            ("left", "allreduce", 1),
            ("end", "allreduce", 0),
        )
    ],
]


@pytest.mark.parametrize(("place", "what", "who"), CASES)
def test_a_call_that_only_one_process_makes_ends_all(cluster, place, what, who):
    arguments = {"place": place, "what": what, "who": who}
    ended = cluster.run(2, call="cluster_alone:called_by_one", arguments=arguments)
    for one in ended:
        assert one.code == 1, outputs(ended)
        assert "errors.ProcessesDivergedError: " in one.output, outputs(ended)
        assert one.seconds < 40
    assert any(f"process {who} (calling {what}) calls {what}" in one.output for one in ended), outputs(ended)


def test_calls_that_all_make_disturb_nothing_and_wait_as_long_as_the_session_says(cluster):
    ended = cluster.run(2, call="cluster_alone:called_by_all")
    assert [one.code for one in ended] == [0, 0], outputs(ended)
    assert ended[0].report["found"] == ended[1].report["found"]
    for one in ended:
        assert one.report["found"][0] == 3.0
        assert set(one.report["found"][1:]) == {1.0}
        assert one.report["inside"] == [1234]
        assert one.report["outside"] == [7200]
