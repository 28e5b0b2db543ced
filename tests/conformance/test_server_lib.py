"""The behaviours of TensorFlow's server tests, SL-001 to SL-050."""

from __future__ import annotations

import json
import socket

import jax
import pytest
from conforms import conforms

import monsess as ms
from monsess import server
from monsess.cluster import expected, from_spec

DENSE = {"worker": ["w0:2222", "w1:2222"]}
MIXED = {"ps": ["ps0:2222", "ps1:2222"], "worker": ["w0:2222", "w1:2222", "w2:2222"], "sparse": {0: "s0:1", 3: "s3:1"}}


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    """No test here is part of a job, and none leaves word of one."""
    for name in ("MONSESS_COORDINATOR", "MONSESS_PROCESS_ID", "MONSESS_PROCESS_COUNT", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(server, "_membership", server._Membership())


def there_and_back(spec: ms.ClusterSpec) -> ms.ClusterSpec:
    """Through the form in which a cluster travels, which is JSON."""
    return ms.ClusterSpec(json.loads(json.dumps(spec.as_dict())))


def tf_config(monkeypatch, cluster, **task):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))


@conforms(
    "SL-011",
    instead="There is no `config` and no `start=False`: JAX's own configuration holds, and a definition is a "
    "`ClusterSpec`, which has no side effects.",
)
def test_a_definition_is_made_without_joining_anything():
    from_spec(ms.ClusterSpec(DENSE), "worker", 1, "a test")
    assert not jax.distributed.is_initialized()
    assert server.target() == ""


@conforms("SL-012", instead="What is merged is the task: `job_name` and `task_index` win over those of `TF_CONFIG`.")
def test_explicit_arguments_win_over_the_environment(monkeypatch):
    tf_config(monkeypatch, {"worker": ["w0:2222", "w1:2222"], "chief": ["c0:2222"]}, type="worker", index=0)
    assert expected().index == 1
    assert server._wanted(None, None, 1).index == 2
    assert server._wanted(None, "chief", 0).index == 0
    assert server._wanted(None, "chief", None).index == 0


@conforms("SL-013")
@pytest.mark.parametrize("make", [ms.ClusterSpec, ms.Server])
def test_an_address_without_a_port_is_rejected(make):
    with pytest.raises(ValueError, match="port"):
        make({"local": ["localhost"]})


@conforms("SL-016")
def test_a_port_in_use_is_an_error(monkeypatch):
    monkeypatch.setattr(server, "_refuse_late", lambda: None)  # this process uses JAX, and does not come to joining
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        cluster = {"worker": [f"127.0.0.1:{port}", "127.0.0.1:1"]}
        with pytest.raises(ms.ClusterError, match=rf"cannot listen at 127\.0\.0\.1:{port}"):
            ms.Server(cluster, "worker", 0, start_timeout_secs=5)
    assert not jax.distributed.is_initialized()


@conforms("SL-023", instead="A definition is plain data, `as_dict()`, which survives JSON.")
def test_one_job_one_task():
    spec = ms.ClusterSpec({"local": ["localhost:2222"]})
    job = from_spec(spec, "local", 0, "a test")
    assert (job.count, job.index, job.coordinator) == (1, 0, "localhost:2222")
    assert spec.as_dict() == {"local": ["localhost:2222"]}
    assert there_and_back(spec) == spec


@conforms("SL-024", instead="As SL-023.")
def test_one_job_two_tasks():
    spec = ms.ClusterSpec({"local": ["localhost:2222", "localhost:2223"]})
    job = from_spec(spec, "local", 1, "a test")
    assert (job.count, job.index, job.coordinator) == (2, 1, "localhost:2222")
    assert job.names == ("local 0 at localhost:2222", "local 1 at localhost:2223")
    assert there_and_back(spec) == spec


@conforms("SL-025", instead="As SL-023.")
def test_two_jobs():
    spec = ms.ClusterSpec({"worker": ["w0:1", "w1:1", "w2:1"], "chief": ["c0:1"]})
    assert json.dumps(spec.as_dict()) == '{"chief": ["c0:1"], "worker": ["w0:1", "w1:1", "w2:1"]}'
    assert there_and_back(spec) == spec
    assert from_spec(spec, "worker", 2, "a test").names[0] == "chief 0 at c0:1"
    assert from_spec(spec, "worker", 2, "a test").index == 3


@conforms("SL-026", instead="As SL-023.")
def test_dense_and_sparse_jobs():
    spec = ms.ClusterSpec({"dense": ["d0:1", "d1:1"], "sparse": {2: "s2:1", 0: "s0:1"}})
    assert spec.as_dict() == {"dense": ["d0:1", "d1:1"], "sparse": {0: "s0:1", 2: "s2:1"}}
    assert there_and_back(spec) == spec
    assert [from_spec(spec, "sparse", index, "a test").index for index in (0, 2)] == [2, 3]


@conforms("SL-027")
def test_str_lists_the_jobs_by_name():
    spec = ms.ClusterSpec({"worker": ["w0:1", "w1:1"], "ps": ["ps0:1"]})
    assert str(spec) == repr(spec) == "ClusterSpec({'ps': ['ps0:1'], 'worker': ['w0:1', 'w1:1']})"


@conforms("SL-028")
def test_all_constructions_are_equivalent():
    spec = ms.ClusterSpec(MIXED)
    assert ms.ClusterSpec(spec) == ms.ClusterSpec(spec.as_dict()) == there_and_back(spec) == spec


@conforms("SL-029")
def test_an_empty_job_survives_all_constructions():
    spec = ms.ClusterSpec({"worker": []})
    assert ms.ClusterSpec(spec) == ms.ClusterSpec(spec.as_dict()) == there_and_back(spec) == spec
    assert spec.jobs == ["worker"]
    assert (spec.num_tasks("worker"), spec.task_indices("worker"), spec.job_tasks("worker")) == (0, [], [])


@conforms("SL-030")
def test_as_dict_is_what_was_given():
    assert ms.ClusterSpec(MIXED).as_dict() == MIXED


@conforms("SL-031", "SL-033", "SL-036", "SL-038")
def test_tasks_of_dense_and_sparse_jobs():
    spec = ms.ClusterSpec(MIXED)
    assert [spec.num_tasks(job) for job in ("ps", "worker", "sparse")] == [2, 3, 2]
    assert spec.task_address("worker", 1) == "w1:2222"
    assert [spec.task_address("sparse", index) for index in (0, 3)] == ["s0:1", "s3:1"]
    assert (spec.task_indices("worker"), spec.task_indices("sparse")) == ([0, 1, 2], [0, 3])
    assert spec.job_tasks("ps") == ["ps0:2222", "ps1:2222"]
    assert spec.job_tasks("sparse") == ["s0:1", None, None, "s3:1"]


@conforms("SL-032", "SL-034", "SL-037", "SL-039")
@pytest.mark.parametrize("name", ["num_tasks", "task_indices", "job_tasks", "task_address"])
def test_an_unknown_job_is_an_error(name):
    arguments = (0,) if name == "task_address" else ()
    with pytest.raises(ValueError, match="No such job in cluster: 'unknown'"):
        getattr(ms.ClusterSpec(MIXED), name)("unknown", *arguments)


@conforms("SL-035")
@pytest.mark.parametrize(("job", "index"), [("worker", 3), ("sparse", 2), ("worker", -1)])
def test_a_missing_index_is_an_error(job, index):
    with pytest.raises(ValueError, match=f"No task with index {index} in job '{job}'"):
        ms.ClusterSpec(MIXED).task_address(job, index)


@conforms("SL-040", "SL-041")
def test_an_empty_spec_is_false():
    assert not ms.ClusterSpec({})
    assert ms.ClusterSpec(DENSE)


@conforms("SL-042")
def test_equal_specs():
    assert ms.ClusterSpec({}) == ms.ClusterSpec({})
    assert ms.ClusterSpec({"job": ["host:2222"]}) == ms.ClusterSpec({"job": ("host:2222",)})
    assert ms.ClusterSpec({"job": {0: "host:2222"}}) == ms.ClusterSpec({"job": ["host:2222"]})


@conforms("SL-043")
def test_unequal_specs():
    spec = ms.ClusterSpec({"job": ["a:1", "b:1"]})
    for other in ({}, {"jobs": ["a:1", "b:1"]}, {"job": ["a:1", "c:1"]}, {"job": ["b:1", "a:1"]}):
        assert spec != ms.ClusterSpec(other)


@conforms("SL-044", instead="There is no placement: the only task known is process 0 of 1, and nothing is joined.")
def test_a_server_that_knows_its_own_sparse_index_only():
    found = ms.Server({"local": {37: "localhost:2222"}})
    assert (found.process_index, found.process_count, found.target) == (0, 1, "")
    found.join()  # returns: there is no job to wait for
    assert not jax.distributed.is_initialized()
