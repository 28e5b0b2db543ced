"""W-46: a cluster that cannot work is refused where it is described, and a description cannot change."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from traps import trap

import monsess as ms
from monsess.cluster import expected


@trap("W-46")
@pytest.mark.parametrize(
    ("cluster", "kind", "message"),
    [
        ({"worker": ["a:1", "a:1"]}, ValueError, "task 0 of job 'worker' and task 1 of job 'worker' share 'a:1'"),
        ({"chief": ["a:1"], "worker": ["A:01"]}, ValueError, "task 0 of job 'chief' and task 0 of job 'worker' share"),
        ({"worker": {-1: "a:1"}}, ValueError, "must not be negative, found -1"),
        ({"worker": {"-1": "a:1"}}, ValueError, "must not be negative, found -1"),
        ({"worker": {"1": "a:1", 1: "b:1"}}, ValueError, "Task 1 of job 'worker' is named twice"),
        ({"worker": {1.0: "a:1"}}, TypeError, "must be an integer, found 1.0"),
        ({"worker": {True: "a:1"}}, TypeError, "must be an integer, found True"),
        ({"worker": ["a"]}, ValueError, "expected 'host:port', found 'a', which has no port"),
        ({"worker": ["a:"]}, ValueError, "expected 'host:port'"),
        ({"worker": ["a:0"]}, ValueError, "a port from 1 to 65535, found 'a:0'"),
        ({"worker": ["a:65536"]}, ValueError, "a port from 1 to 65535"),
        ({"worker": ["grpc://a:1"]}, ValueError, "expected 'host:port', found 'grpc://a:1'"),
        ({"worker": ["a b:1"]}, ValueError, "expected 'host:port'"),
        ({"worker": ["::1:80"]}, ValueError, "expected 'host:port'"),
        ({"worker": "a:1"}, TypeError, "expected a list of addresses"),
        ({"worker": [1]}, TypeError, "expected 'host:port', found 1"),
        ({1: ["a:1"]}, TypeError, "must be a string, found 1"),
        ({"": ["a:1"]}, ValueError, "must not be empty"),
        ("worker", TypeError, "expected a ClusterSpec or a mapping"),
        (["a:1"], TypeError, "expected a ClusterSpec or a mapping"),
    ],
)
def test_a_cluster_is_checked_when_it_is_described(cluster, kind, message):
    with pytest.raises(kind) as caught:
        ms.ClusterSpec(cluster)
    assert message in str(caught.value)


@trap("W-46")
def test_a_description_has_a_hash_and_does_not_change():
    given = {"worker": ["a:1", "[::1]:80"], "chief": {0: "b:1"}}
    spec = ms.ClusterSpec(given)
    same = ms.ClusterSpec({"chief": ["b:1"], "worker": {"1": "[::1]:80", "0": "a:1"}})
    assert len({spec, same, copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))}) == 1
    given["worker"].append("c:1")
    spec.as_dict()["worker"].append("d:1")
    spec.task_indices("worker").append(7)
    spec.jobs.append("ps")
    assert spec == same
    assert spec != given  # only a description equals a description
    with pytest.raises(AttributeError, match="cannot be changed"):
        spec.jobs = []
    with pytest.raises(AttributeError, match="cannot be changed"):
        spec._jobs = {}


@trap("W-46")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "TF_CONFIG cannot be used"),
        ("[]", "no JSON object"),
        ({"cluster": {"worker": ["a"]}}, "has no port"),
        ({"cluster": {"worker": ["a:1", "b:1"]}}, "Must specify an explicit `task_index`"),
        ({"cluster": {"worker": ["a:1"], "chief": ["b:1"]}}, "Must specify an explicit `job_name`"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}, "No task with index 1"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "boss", "index": 0}}, "No such job in cluster: 'boss'"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "x"}}, "TF_CONFIG cannot be used"),
        ({"cluster": {"worker": ["a:1"]}, "task": "worker"}, "TF_CONFIG cannot be used"),
        ({"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "worker", "index": 0}}, "take the job `ps`"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "ps", "index": 0}}, "take the job `ps`"),
    ],
)
def test_the_environment_is_checked_too(config, message):
    text = config if isinstance(config, str) else json.dumps(config)
    with pytest.raises(ms.ClusterError) as caught:
        expected({"TF_CONFIG": text})
    assert message in str(caught.value)
