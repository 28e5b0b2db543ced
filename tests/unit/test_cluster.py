"""What the environment says about the job of a process."""

from __future__ import annotations

import json

import jax
import pytest

import monsess as ms
from monsess import server
from monsess.cluster import Expected, expected, from_spec

RUN = {"MONSESS_COORDINATOR": "127.0.0.1:4000", "MONSESS_PROCESS_ID": "1", "MONSESS_PROCESS_COUNT": "4"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}


def tf_config(cluster, kind=None, index=None):
    task = {key: value for key, value in (("type", kind), ("index", index)) if value is not None}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})}


def test_nothing_speaks_of_a_cluster():
    assert expected({}) is None
    assert expected({"TF_CONFIG": ""}) is None
    assert expected({"TF_CONFIG": "{}"}) is None
    assert expected({"TF_CONFIG": '{"cluster": {}, "task": {"type": "worker", "index": 0}}'}) is None


def test_monsess_run():
    assert expected(RUN) == Expected(4, 1, "monsess run", coordinator="127.0.0.1:4000")
    more = {"MONSESS_LAUNCH_ID": "ab12", "MONSESS_ATTEMPT": "2", "MONSESS_LOCAL_DEVICES": "8"}
    found = expected(RUN | more)
    assert found is not None
    assert (found.launch, found.attempt, found.local_devices, found.who) == ("ab12", 2, 8, "process 1 of 4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MONSESS_COORDINATOR": None}, "found no MONSESS_COORDINATOR"),
        ({"MONSESS_PROCESS_ID": None, "MONSESS_PROCESS_COUNT": None}, "no MONSESS_PROCESS_ID, MONSESS_PROCESS_COUNT"),
        ({"MONSESS_COORDINATOR": "127.0.0.1"}, "MONSESS_COORDINATOR: expected 'host:port'"),
        ({"MONSESS_PROCESS_ID": "-1"}, "MONSESS_PROCESS_ID must be a whole number, found '-1'"),
        ({"MONSESS_PROCESS_ID": "4"}, "this is process 4, but of 4 processes"),
        ({"MONSESS_PROCESS_COUNT": "0"}, "of 0 processes"),
        ({"MONSESS_ATTEMPT": "x"}, "MONSESS_ATTEMPT must be a whole number"),
    ],
)
def test_incomplete_and_impossible_variables(changes, message):
    environ = {name: value for name, value in {**RUN, **changes}.items() if value is not None}
    with pytest.raises(ms.ClusterError) as caught:
        expected(environ)
    assert message in str(caught.value)


def test_tf_config_counts_the_chief_first():
    cluster = {"worker": ["w0:1", "w1:1"], "chief": ["c0:1"], "evaluator": ["e0:1"]}
    for kind, index, process in (("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)):
        found = expected(tf_config(cluster, kind, index))
        assert found is not None
        assert (found.count, found.index, found.coordinator, found.source) == (3, process, "c0:1", "TF_CONFIG")
    found = expected(tf_config({"worker": ["w0:1"], "master": ["m0:1"]}, "worker", "0"))
    assert found is not None
    assert (found.index, found.names) == (1, ("master 0 at m0:1", "worker 0 at w0:1"))


def test_an_evaluator_stands_beside_the_cluster():
    assert expected(tf_config({"worker": ["w0:1", "w1:1"]}, "evaluator", 0)) is None
    assert expected(tf_config({"worker": ["w0:1", "w1:1"]}, "evaluator", 0) | SLURM) is None


def test_slurm_open_mpi_and_kubernetes_leave_the_address_to_jax():
    assert expected(SLURM) == Expected(8, 5, "Slurm", method="slurm")
    assert expected(OPEN_MPI) == Expected(3, 2, "Open MPI", method="mpi4py")
    assert expected(OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://a:1"}) == Expected(3, 2, "Open MPI", method="ompi")
    assert expected(KUBERNETES) == Expected(None, 3, "Kubernetes")


def test_what_is_no_task_of_a_cluster():
    batch_script = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert expected(batch_script) is None
    interactive = expected(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})
    assert interactive is not None
    assert interactive.count == 1
    assert expected({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None


def test_the_order_in_which_it_looks():
    everything = KUBERNETES | OPEN_MPI | SLURM | tf_config({"worker": ["w0:1", "w1:1"]}, "worker", 1) | RUN
    sources = []
    for gone in (RUN, {"TF_CONFIG": ""}, SLURM, OPEN_MPI, KUBERNETES):
        found = expected(everything)
        assert found is not None
        sources.append(found.source)
        everything = {name: value for name, value in everything.items() if name not in gone}
    assert sources == ["monsess run", "TF_CONFIG", "Slurm", "Open MPI", "Kubernetes"]


def test_names_for_people():
    job = from_spec(ms.ClusterSpec({"worker": [f"w{k}:1" for k in range(12)]}), "worker", 0, "a test")
    assert job.processes([3]) == "process 3 (worker 3 at w3:1)"
    assert job.processes([1, 2]) == "processes 1 and 2 (worker 1 at w1:1, worker 2 at w2:1)"
    assert Expected(4, 0, "a test").processes([1, 2, 3]) == "processes 1, 2 and 3"
    assert Expected(12, 0, "a test").processes(range(1, 12)) == "processes 1, 2, 3, 4, 5, 6, 7, 8 and 3 more"


@pytest.fixture
def alone(monkeypatch):
    """A process with a fresh memory, and a function that sets its environment."""
    monkeypatch.setattr(server, "_membership", server._Membership())
    monkeypatch.setattr("os.environ", {})
    return lambda environ: monkeypatch.setattr("os.environ", dict(environ))


@pytest.mark.parametrize("environ", [RUN, SLURM, OPEN_MPI, KUBERNETES])
def test_a_process_that_did_not_join_is_refused(alone, environ):
    server.check_joined()
    alone(environ)
    with pytest.raises(ms.ClusterError, match=r"has not joined the others\. Call monsess\.Server\(\) at the top"):
        server.check_joined()
    ms.Server({})  # it says that it works alone
    server.check_joined()


def test_the_master_of_a_session_is_checked(alone):
    server.check_joined(ms.Server().target)
    with pytest.raises(ValueError, match=r"master='grpc://a:1': expected Server\.target, which is '' here"):
        server.check_joined("grpc://a:1")


def test_a_cluster_of_one_has_nothing_to_join(alone):
    alone(RUN | {"MONSESS_PROCESS_ID": "0", "MONSESS_PROCESS_COUNT": "1"})
    found = ms.Server()
    assert (found.process_index, found.process_count, found.target) == (0, 1, "")
    server.check_joined()
    assert not jax.distributed.is_initialized()


def test_jax_was_used_before(alone):
    jax.devices()
    alone(RUN)
    with pytest.raises(ms.ClusterError, match="JAX has been used before this process joined its job"):
        ms.Server(start_timeout_secs=5)
    assert not jax.distributed.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"cluster": 3}, TypeError, "expected a ClusterSpec or a mapping"),
        ({"cluster": {"worker": ["a:1", "b:1"]}}, ValueError, "Must specify an explicit `task_index`"),
        ({"cluster": {"worker": ["a:1"], "chief": ["b:1"]}}, ValueError, "Must specify an explicit `job_name`"),
        ({"cluster": {"worker": ["a:1"]}, "job_name": "boss"}, ValueError, "No such job in cluster: 'boss'"),
        ({"cluster": {"worker": ["a:1"]}, "task_index": 1}, ValueError, "No task with index 1"),
        ({"job_name": "worker"}, ValueError, "give `cluster` too, or set TF_CONFIG"),
        ({"task_index": 0}, ValueError, "give `cluster` too, or set TF_CONFIG"),
        ({"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "job_name": "ps"}, ms.ClusterError, "take the job `ps` out"),
        ({"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "job_name": "worker"}, ms.ClusterError, "take the job `ps`"),
        ({"start_timeout_secs": 0}, ValueError, "start_timeout_secs must be positive, found 0"),
        ({"start_timeout_secs": "x"}, ValueError, "start_timeout_secs must be a number of seconds"),
        ({"failure_timeout_secs": 0.5}, ValueError, "failure_timeout_secs must be at least 1, found 0.5"),
        ({"failure_timeout_secs": float("inf")}, ValueError, "failure_timeout_secs must be a number of seconds"),
    ],
)
def test_arguments_that_cannot_be_meant(alone, arguments, kind, message):
    with pytest.raises(kind) as caught:
        ms.Server(**arguments)
    assert message in str(caught.value)


def test_an_evaluator_of_an_explicit_cluster_works_alone(alone):
    found = ms.Server({"worker": ["a:1", "b:1"]}, "evaluator", 0)
    assert (found.process_count, found.target) == (1, "")
