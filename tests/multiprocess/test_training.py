"""Several processes train as one: the same state however the devices are split, and nothing else than steps between."""

from __future__ import annotations

import os
import shutil
import time

import numpy as np
import pytest
from cluster import Event, all_ended_well, outputs

import monsess as ms

SPLITS = [(4, 1), (2, 2), (1, 4)]  # processes, devices of each
REPETITIONS = 60 if os.environ.get("MONSESS_RANDOM_KILLS") else 4


def state_of(ended):
    """The state of a job, after checking that all its processes hold the same bits."""
    assert len({str(one.report["bits"]) for one in ended}) == 1, outputs(ended)
    return {name: np.array(value, dtype) for name, (dtype, value) in ended[0].report["state"].items()}


def assert_close(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        if value.dtype == np.float32:
            np.testing.assert_allclose(value, right[name], rtol=2e-5, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(value, right[name], err_msg=name)


def saved(url):
    """The committed steps, all of them sound."""
    store = ms.CheckpointStore(str(url))
    assert all(store.verify(step) == [] for step in store.steps())
    return store.steps()


def test_two_processes_and_one_train_the_same(cluster):
    url = cluster.folder("checkpoints")
    two = cluster.run(2, 2, url=str(url))
    all_ended_well(two)
    assert [one.report["global_step"] for one in two] == [6, 6]
    assert [one.report["saves"] for one in two] == [2, 0]  # the chief alone writes
    assert len({one.report["run_id"] for one in two}) == 1
    assert saved(url) == [3, 6]
    one = cluster.run(1, 4)
    all_ended_well(one)
    assert_close(state_of(two), state_of(one))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pmap", "shard_map"])
def test_every_split_trains_the_same(cluster, engine):
    states = []
    for count, devices in SPLITS:
        ended = cluster.run(count, devices, steps=12, engine=engine)
        all_ended_well(ended)
        states.append(state_of(ended))
    assert states[0]["updates"] == 12
    assert_close(states[0], states[2])
    assert_close(states[1], states[2])


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("before", SPLITS)
def test_another_split_goes_on_from_the_same_commit(cluster, before, stored):
    original = cluster.folder("checkpoints")
    all_ended_well(cluster.run(*before, url=str(original), stored=stored))
    states = []
    for count, devices in SPLITS:
        url = cluster.folder("copy")
        shutil.copytree(original, url, dirs_exist_ok=True)
        ended = cluster.run(count, devices, url=str(url), stored=stored, steps=11, batches=(11,) * count)
        all_ended_well(ended)
        assert [one.report["restored_from"] for one in ended] == [6] * count
        assert [one.report["global_step"] for one in ended] == [11] * count
        assert saved(url)[-1] == 11
        states.append(state_of(ended))
    assert_close(states[0], states[2])
    assert_close(states[1], states[2])
    assert_close(states[2], state_of(cluster.run(1, 4, steps=11)))  # no batch was left out or came twice


@pytest.mark.slow
def test_the_input_of_another_number_of_processes_is_refused_where_it_cannot_be_split(cluster):
    url = cluster.folder("checkpoints")
    all_ended_well(cluster.run(2, url=str(url), stored=True))
    for one in cluster.run(4, url=str(url), stored=True, redistributable=False, steps=9):
        assert one.code == 1
        assert "run 2 process(es), or give the source a method redistribute" in one.output
    assert saved(url) == [3, 6]


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_delays_change_nothing(cluster, figures, seed):
    expected, slowest = None, 0.0
    for number in range(REPETITIONS):
        url = cluster.folder("checkpoints")
        count = (2, 2, 2, 4)[number % 4]
        ended = cluster.run(count, url=str(url), steps=7, sleeps=seed + number, batches=(40,) * count)
        all_ended_well(ended)
        assert {one.report["reason"] for one in ended} == {"last step 7 reached (StopAtStepHook)"}
        assert saved(url) == [3, 6, 7]
        slowest = max(slowest, *(one.seconds for one in ended))
        if count == 2:
            found = {one.report["bits"]["w"] for one in ended}
            expected = expected or found
            assert found == expected
        shutil.rmtree(url)
    runs = f"{REPETITIONS} runs of several processes with random delays (MONSESS_SEED={seed})"
    figures.append(f"{runs}: all ended with 0, the slowest after {slowest:.1f} s")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["body", "before_run"])
def test_a_commit_does_not_wait_for_a_process_that_stalls_after_the_step(cluster, place, figures):
    url = cluster.folder("checkpoints")
    events = [Event(1, place, "sleep", step=3, seconds=20)]
    with cluster.start(2, url=str(url), events=events) as job:
        stalled = job.happened(1, "sleep")
        job.until(lambda: saved(url) == [3], 15)
        seconds = time.monotonic() - stalled
    all_ended_well(job.over)
    figures.append(f"process 1 stalled for 20 s after step 3, which was committed {seconds:.1f} s later")
    assert seconds < 15
    assert saved(url) == [3, 6]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["joined", "body"])
def test_a_process_may_be_a_minute_late(cluster, place):
    step = 3 if place == "body" else None
    ended = cluster.run(2, events=[Event(1, place, "sleep", step=step, seconds=70)], limit=180)
    all_ended_well(ended)
    assert [one.report["global_step"] for one in ended] == [6, 6]


@pytest.mark.slow
def test_between_first_and_last_step_there_is_no_collective_but_the_steps(cluster):
    url = cluster.folder("checkpoints")
    ended = cluster.run(
        2,
        2,
        url=str(url),
        call="cluster_scenarios:count_collectives",
        environ={"XLA_FLAGS": "--xla_dump_hlo_as_text --xla_dump_to={folder}/dump{index}"},
    )
    assert [one.code for one in ended] == [0, 0], outputs(ended)
    for one in ended:
        assert sum(one.report["programs"].values()) == 2, one.report  # the two steps, with collectives in them
        assert one.report["runs"] == {"train_step_step": 10, "eval_step_look": 2}
        assert one.report["calls"] == []
    assert saved(url) == [3, 6, 9, 10]


@pytest.mark.slow
def test_several_sessions_in_one_job(cluster):
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, url=str(url), call="cluster_scenarios:several_sessions")
    reports = [one.report["sessions"] for one in ended]
    assert reports[0] == reports[1]
    assert [report[:2] for report in reports[0]] == [[None, 4], [4, 7]]
    assert [one.code for one in ended] == [1, 1], outputs(ended)
    assert ended[0].report["error"].startswith("PeerFailedError: Process 1 failed at step 9: ValueError: planned")
    assert saved(url)[:4] == [3, 4, 6, 7]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pmap", "shard_map"])
@pytest.mark.parametrize("devices", ["one", "local", "all"])
def test_a_step_on_some_devices_is_refused(cluster, devices, engine):
    ended = cluster.run(2, 2, call="cluster_scenarios:on_given_devices", engine=engine, arguments={"devices": devices})
    for one in ended:
        if devices == "all":
            assert one.report == {"state": 12.0}, one.output
        else:
            assert one.code == 1
            assert "StepDefinitionError: step is to run on " in one.output, one.output


@pytest.mark.slow
def test_processes_with_different_numbers_of_devices_are_refused(cluster):
    refusal = "ClusterError: Every process of a job needs the same number of devices, found process 0: 1, process 1: 2."
    ended = cluster.run(2, (1, 2))
    for one in ended:
        assert one.code == 1, outputs(ended)
        assert refusal in one.output, outputs(ended)
