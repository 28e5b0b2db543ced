"""With one process the helpers mean the same."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import monsess as ms


def test_allgather_adds_an_axis():
    found = ms.allgather({"a": jnp.arange(3), "b": [np.float32(-0.0)]})
    assert found["a"].tolist() == [[0, 1, 2]]
    assert found["b"][0].tobytes() == np.float32(-0.0).tobytes()
    assert found["b"][0].shape == (1,)


@pytest.mark.parametrize("op", ["mean", "sum", "min", "max"])
def test_allreduce_of_one_is_the_value(op):
    assert ms.allreduce(np.float32(2.5), op) == np.float32(2.5)


def test_sums_keep_their_dtype():
    assert ms.allreduce(np.int32([1, 2]), "sum").dtype == np.int32


def test_bad_arguments():
    with pytest.raises(ValueError, match="'mean', 'sum', 'min', 'max', found 'product'"):
        ms.allreduce(1.0, "product")  # type: ignore[arg-type]
    for root in (1, -1, True, "0"):
        with pytest.raises(ValueError, match="root must be a process from 0 to 0"):
            ms.broadcast(1.0, root)  # type: ignore[arg-type]


def test_hooks_that_compare():
    with pytest.raises(ValueError, match="root_rank must be 0, found 1"):
        ms.BroadcastGlobalVariablesHook(1)
    with pytest.raises(ValueError, match="every_n_steps"):
        ms.ReplicaCheckHook(0)


def test_replicas_are_compared_when_it_is_due():
    compared = []

    @ms.train_step
    def step(state):
        return state + 1, {}

    hooks = [ms.ReplicaCheckHook(every_n_steps=2), ms.StopAtStepHook(last_step=5)]
    with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), hooks=hooks) as session:
        compare = session.compare_replicas
        session.compare_replicas = lambda: (compared.append(session.global_step), compare())
        while not session.should_stop():
            session.run(step)
        del session.compare_replicas
    assert compared == [2, 4]
