"""Host values of two processes brought together, and states compared over them."""

from __future__ import annotations

import numpy as np


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
