"""W-41 to W-45: several processes stop, save and wait together, or end in bounded time and say why."""

from __future__ import annotations

import re

import pytest
from cluster import Cluster, Event, all_ended_well, outputs
from traps import steps_of, trap

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@trap("W-41")
@pytest.mark.parametrize("late", [0, 1])
def test_nobody_leaves_before_the_final_checkpoint(cluster, late):
    url = cluster.folder("checkpoints")
    events = [Event(0, "commit", "sleep", step=7, seconds=3), Event(late, "left", "sleep", seconds=2)]
    ended = cluster.run(2, url=str(url), steps=7, events=events)
    all_ended_well(ended)
    assert steps_of(url) == [3, 6, 7]
    committing = next(at for at, _, place, step in ended[0].events if (place, step) == ("commit", "7"))
    assert min(one.at for one in ended) > committing + 3
    again = cluster.run(2, url=str(url), steps=7)  # whoever comes late finds that there is nothing to do
    all_ended_well(again)
    assert [one.report["began"] for one in again] == [7, 7]


@trap("W-41")
def test_a_slow_ending_of_one_process_is_waited_for(cluster):
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, url=str(url), events=[Event(1, "end", "sleep", seconds=4)])
    all_ended_well(ended)
    assert ended[0].at > ended[1].events[0][0] + 4  # the coordination service lives in process 0


@trap("W-42")
def test_clocks_and_wishes_of_one_process_count_for_all(cluster):
    url = cluster.folder("checkpoints")
    events = [Event(0, "body", "sleep", step=step, seconds=0.15) for step in range(2, 30)]
    events.append(Event(1, "after_run", "request_stop", step=25))
    ended = cluster.run(
        2, url=str(url), steps=60, clock_ahead=(0.0, 10.0), session={"save_checkpoint_secs": 0.5}, events=events
    )
    all_ended_well(ended)
    first, second = (one.report for one in ended)
    assert first["global_step"] == second["global_step"] <= 28
    assert first["saved_at"] == second["saved_at"]
    assert first["bits"] == second["bits"]
    assert len(steps_of(url)) >= 3
    assert steps_of(url) == first["saved_at"][-5:]


@trap("W-43")
def test_a_wait_says_who_is_missing_and_ends(cluster):
    ended = cluster.run(2, events=[Event(1, "joined", "sleep", seconds=25)], session={"max_wait_secs": 4})
    first, second = ended
    assert first.code == 1, outputs(ended)
    assert first.error.startswith("ClusterError: Process 0 waited 4 s for process 1: "), first.error
    assert first.at - second.events[0][0] < 20
    assert second.code != 0


@trap("W-43")
def test_a_wait_is_over_as_soon_as_there_is_nothing_to_wait_for(cluster):
    events = [Event(0, "restore", "sleep", seconds=2), Event(None, "created", "sleep")]
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, url=str(url), events=events)
    all_ended_well(ended)
    first, second = (next(at for at, _, place, _ in one.events if place == "created") for one in ended)
    assert abs(first - second) < 5  # a poll would come every 10 to 30 s


@trap("W-44")
@pytest.mark.parametrize("dies", [0, 1])
def test_a_process_that_waits_for_another_run_ends_with_its_job(cluster, dies):
    ended = cluster.run(2, call="cluster_scenarios:waiting", arguments={"dies": dies}, limit=60)
    killed, other = ended[dies], ended[1 - dies]
    assert killed.code == -9
    assert other.code != 0
    assert other.at - killed.at < 15
    print(f"\nprocess {dies} died, the other one ended {other.at - killed.at:.1f} s later")


@trap("W-44")
def test_such_a_wait_has_a_limit(cluster):
    ended = cluster.run(2, call="cluster_scenarios:waiting", arguments={"dies": None}, limit=60)
    assert [one.code for one in ended] == [1, 1], outputs(ended)
    waited = re.search(r"GlobalStepWaiterHook has waited (\S+) s for", outputs(ended))
    assert waited is not None, outputs(ended)
    assert 3 <= float(waited[1]) < 10


@trap("W-45")
def test_no_round_is_lost_and_nothing_waits_for_tokens(cluster):
    ended = cluster.run(2, steps=None, batches=(5, 7))  # the end of the shorter input is the end of training for all
    all_ended_well(ended)
    for one in ended:
        assert one.report["global_step"] == one.report["state"]["updates"][1] == 5
    ended = cluster.run(2, steps=50, events=[Event(1, "body", "kill", step=4)])
    assert ended[1].code == -9
    assert ended[0].code == 1, outputs(ended)
    assert ended[0].error.startswith("PeerFailedError: Process 1 "), outputs(ended)
    assert ended[0].at - ended[1].at < 15
