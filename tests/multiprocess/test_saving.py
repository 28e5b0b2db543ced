"""Several processes save as one: whoever is given the directory, and only what is the same on all of them."""

from __future__ import annotations

import os

import pytest
from cluster import outputs

import monsess as ms


def saved(url):
    """The committed steps, all of them sound."""
    store = ms.CheckpointStore(str(url))
    assert all(store.verify(step) == [] for step in store.steps())
    return store.steps()


@pytest.mark.parametrize("on", [[0], pytest.param([0, 1], marks=pytest.mark.slow)], ids=str)
def test_only_the_chief_needs_the_directory(cluster, on):
    """``checkpoint_dir=url if rank == 0 else None``: the line that all Horovod scripts have."""
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, url=str(url), call="cluster_saving:directory_on_some", arguments={"on": on})
    assert [one.code for one in ended] == [0, 0], outputs(ended)
    for one in ended:
        first, second = one.report["sessions"]
        assert [first["global_step"], first["restored_from"], first["last_committed"]] == [7, None, 7]
        assert [second["global_step"], second["restored_from"], second["last_committed"]] == [10, 7, 10]
        assert second["sum"] == sum(number + 5.0 for number in range(10))  # both inputs went on where they were
        assert [first["saves"], second["saves"]] == ([0, 0] if one.index else [3, 2])
    assert saved(url) == [3, 6, 7, 8, 10]
    assert "in the checkpoint_dir of process 0" in ended[1].output or on == [0, 1]


@pytest.mark.parametrize(
    ("steps", "found"),
    [([4, 5], ("every 4 steps", "every 5 steps")), ([4, None], ("every 4 steps", "never, for it is not there"))],
)
def test_processes_that_are_to_save_at_other_steps_are_refused(cluster, steps, found):
    """Before the first step; their saves would wait for each other in vain."""
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, url=str(url), call="cluster_saving:other_schedule", arguments={"steps": steps})
    assert [one.code for one in ended] == [1, 1], outputs(ended)
    for one in ended:
        assert (
            "ProcessesDivergedError: CheckpointSaverHook is to act on all processes at the same steps, but on process "
            f"0 it is due {found[0]}, and on process 1 {found[1]}. Give all processes the same arguments."
        ) in one.output
    assert not saved(url)


def test_a_directory_on_the_others_alone_is_refused(cluster):
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, url=str(url), call="cluster_saving:directory_on_the_others")
    assert [one.code for one in ended] == [1, 1], outputs(ended)
    assert f"ClusterError: This process has checkpoint_dir={url}, and the chief, process 0, has none" in ended[1].output
    assert "PeerFailedError: Process 1 failed at step 0: ClusterError: This process has" in ended[0].output
    assert os.listdir(url) == []


@pytest.mark.slow
def test_a_process_that_does_not_save_with_the_others_is_named(cluster):
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, url=str(url), call="cluster_saving:save_of_the_chief")
    assert [one.code for one in ended] == [1, 1], outputs(ended)
    assert "SaveError: Step 3 was not saved. Process 0 waited 4 s for process 1: the save of step 3." in ended[0].output
    assert "PeerFailedError: Process 0 failed at step 6: SaveError: Step 3" in ended[1].output
    assert 3 not in saved(url)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_forgotten_pmean_is_found_after_the_first_step(cluster, devices):
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, devices, url=str(url), call="cluster_saving:forgotten")
    for one in ended:
        assert one.report["step"] == 1, outputs(ended)
        assert one.report["error"].startswith(
            "ReplicasDifferError: After step 1 the devices of the 2 processes (process 1 unlike the first device of "
            "process 0) hold different values in: sum. Most often"
        )
        assert "pmean" in one.report["error"]
    assert saved(url) == []


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_states_that_go_apart_later_are_not_committed(cluster, devices):
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, devices, url=str(url), call="cluster_saving:from_step_three_on")
    found = (
        "ReplicasDifferError: After step 4 the devices of the 2 processes (process 1 unlike the first device of "
        "process 0) hold different values in: sum."
    )
    assert ended[0].report["error"].startswith(found), outputs(ended)
    said = ended[1].report.get("error", ended[1].output)  # nothing but its output where it is stuck in a collective
    assert "PeerFailedError: Process 0 failed at step " in said, outputs(ended)
    assert found in said
    assert saved(url) == [2]


@pytest.mark.slow
def test_the_comparison_can_be_turned_off(cluster):
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, url=str(url), call="cluster_saving:forgotten", arguments={"check": False})
    assert [one.report.get("sum") for one in ended] == [28.0, 108.0], outputs(ended)
    assert saved(url) == [2, 4, 6, 8]


def test_a_wish_waits_for_the_point_at_which_all_act_on_it(cluster):
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, url=str(url), call="cluster_saving:wishes_that_overlap")
    assert [one.code for one in ended] == [0, 0], outputs(ended)
    assert [one.report["saved_at"] for one in ended] == [[6, 7, 12]] * 2, outputs(ended)
    assert saved(url) == [6, 7, 12]
