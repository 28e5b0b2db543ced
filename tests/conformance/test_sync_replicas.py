"""What TensorFlow's SyncReplicasOptimizer did and what all processes of a job do in every step."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cluster import Cluster
from conforms import conforms

import monsess as ms


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        ended = cluster.run(2, call="cluster_collectives:synchronous_updates")
        return [process.report for process in ended]


@conforms("SR-001")
def test_the_chief_initialises_and_its_step_is_zero(reports):
    assert reports[0]["seen"][0] == [0, 0.0, 1.0]


@conforms("SR-002")
def test_the_other_process_sees_the_chiefs_state(reports):
    assert reports[1]["seen"][0] == [0, 0.0, 1.0], "its own init_fn would give another one"


@conforms("SR-005", "SR-010")
def test_each_step_is_one_update_by_the_average(reports):
    for report in reports:
        (_, first, second) = report["seen"]
        assert [first[0], second[0]] == [1, 2]
        np.testing.assert_allclose(first[1:], [-2 * 0.5, 1 - 2 * 1.5], rtol=1e-6)
        np.testing.assert_allclose(second[1:], [-4 * 0.5, 1 - 4 * 1.5], rtol=1e-6)


@conforms("SR-009", "SR-015")
def test_a_step_waits_for_the_contribution_of_every_process(reports):
    assert reports[0]["came"] < reports[1]["came"], "one was there first"
    assert reports[0]["done"] > reports[1]["came"], "and its step was not done before the other one came"


@conforms(
    "SR-017",
    instead="There is no hook to set up: averaging is part of the step. A step that forgets it is found after its "
    "first run, with a ReplicasDifferError that says what to add.",
)
def test_a_step_that_forgets_to_average_is_found_after_its_first_run():
    @ms.train_step
    def step(state, batch):
        return state - batch.mean(), {}

    with pytest.raises(ms.ReplicasDifferError, match="pmean"):
        with ms.MonitoredTrainingSession(lambda: jnp.zeros(())) as session:
            session.run(step, np.arange(4, dtype=np.float32))


@conforms("SR-018", instead="The optimiser's wrapper holds nothing, so that it may be made before anything else.")
def test_the_wrapper_may_be_made_before_anything_else():
    optimizer = ms.DistributedOptimizer(optax.sgd(1.0))

    @ms.train_step
    def step(state, batch):
        updates, _ = optimizer.update(batch.mean(), optimizer.init(state), state)
        return state + updates, {}

    with ms.MonitoredTrainingSession(lambda: jnp.zeros(())) as session:
        session.run(step, np.arange(4, dtype=np.float32))
        assert float(session.state) == -1.5
