"""What one process wishes, or does alone, with real processes: all stop and save at the same steps, or all say why not.

`tests/unit/test_agreement_of_processes.py` tries all pairs of lengths and moments in one process.
"""

from __future__ import annotations

import pathlib

import pytest
from cluster import Event, all_ended_well, outputs

import monsess as ms

PAIRS = [(0, 0), (0, 8), (8, 0), (1, 2), (2, 5), (8, 7), (8, 8)]  # of 81, and one more below


def saved(url):
    """The committed steps, all of them sound."""
    store = ms.CheckpointStore(str(url))
    assert all(store.verify(step) == [] for step in store.steps())
    return store.steps()


def same(ended, name):
    """What all processes report alike."""
    found = {str(one.report.get(name)) for one in ended}
    assert len(found) == 1, outputs(ended)
    return ended[0].report.get(name)


def files(url):
    """Every file below a directory, with its content and its time."""
    paths = sorted(path for path in pathlib.Path(url).rglob("*") if path.is_file())
    return {str(path.relative_to(url)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


@pytest.mark.parametrize("pair", [(3, 1), *(pytest.param(one, marks=pytest.mark.slow) for one in PAIRS)], ids=str)
def test_the_shortest_input_ends_all(cluster, pair):
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, url=str(url), batches=pair, steps=None)
    all_ended_well(ended)
    assert same(ended, "global_step") == min(pair)
    assert same(ended, "stop_reason") == "END_OF_DATA"
    assert same(ended, "bits")
    assert (saved(url) or [None])[-1] == same(ended, "last_committed") == min(pair)


@pytest.mark.parametrize("place", ["after_run", pytest.param("body", marks=pytest.mark.slow)])
def test_one_process_asks_to_stop(cluster, place, figures):
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, url=str(url), steps=50, events=[Event(1, place, "request_stop", step=4)])
    all_ended_well(ended)
    last = same(ended, "global_step")
    figures.append(f"one of two processes asks to stop at step 4 ({place}): all stop at step {last}")
    assert 4 <= last <= 4 + 1 + 2
    assert same(ended, "stop_reason") == "REQUESTED"
    assert same(ended, "bits")
    assert saved(url) == sorted({3, 6, last} & set(range(last + 1)))
    assert "process 1" in ended[0].report["reason"]


@pytest.mark.parametrize(
    "who", [None, pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)]
)
def test_a_stop_that_is_asked_for_at_the_start_counts_before_the_first_run(cluster, who):
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, url=str(url), steps=50, events=[Event(who, "created", "request_stop")])
    all_ended_well(ended)
    assert same(ended, "steps") == 0
    assert same(ended, "stop_reason") == "REQUESTED"
    assert saved(url) == [0]


@pytest.mark.parametrize("ending", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_step_that_fails_on_all_may_be_replaced_by_another(cluster, ending):
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, url=str(url), call="cluster_scenarios:falling_back", arguments={"ending": ending})
    assert [one.code for one in ended] == [0, 0], outputs(ended)
    for name in ("failed", "step", "state"):
        same(ended, name)
    assert ended[0].report["failed"] == ["does not fit"] * (1 if ending else 2)
    assert ended[0].report["step"] == (0 if ending else 13)
    if not ending:
        assert ended[0].report["state"] == 7.0  # `smaller` ran once, and then in turn
        # What process 1 asked for goes with the dispatches 1 and 2, after the ones that failed.
        assert saved(url) == [3, 4, 13], outputs(ended)


@pytest.mark.parametrize(
    ("batch", "comes"),
    [
        (8, "late"),
        pytest.param(8, "never", marks=pytest.mark.slow),
        pytest.param(1, "never", marks=pytest.mark.slow),
    ],
)
def test_a_thread_of_one_process_stops_all_while_a_batch_is_waited_for(cluster, batch, comes):
    url = cluster.folder("checkpoints")
    arguments = {"batch": batch, "comes": comes}
    ended = cluster.run(2, url=str(url), call="cluster_alone:stopped_by_a_thread", arguments=arguments)
    assert [one.code for one in ended] == [0, 0], outputs(ended)
    assert same(ended, "global_step") == same(ended, "last_committed") == (8 if batch == 8 else 0)
    assert same(ended, "name") == "REQUESTED"
    assert "process 1" in ended[0].report["reason"]
    assert "a thread" in ended[1].report["reason"]
    assert saved(url) == [8 if batch == 8 else 0]


@pytest.mark.slow
def test_one_process_asks_for_a_checkpoint(cluster):
    url = cluster.folder("checkpoints")
    more = {"save_checkpoint_steps": 100}
    ended = cluster.run(2, url=str(url), steps=12, session=more, events=[Event(1, "body", "save", step=4)])
    all_ended_well(ended)
    assert saved(url)[-1] == 12
    assert len(saved(url)) == 2
    assert 4 < saved(url)[0] <= 4 + 1 + 2


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one_process_breaks_out_of_the_loop(cluster, who):
    url = cluster.folder("checkpoints")
    events = [Event(None, "body", "sleep", step=4, seconds=5), Event(who, "body", "break", step=5)]
    ended = cluster.run(2, url=str(url), steps=50, events=events)
    all_say(ended, "LeftAloneError")
    for one in ended:
        assert f"Process {who} left the loop after step 5 while process {1 - who} went on to step 6" in one.output
        assert "request_stop()" in one.output
    assert saved(url) == [3]
    assert max(one.at for one in ended) - when(ended, "break") < 15


def all_say(ended, name):
    """All processes end with an error; one whose training thread is stuck in a collective says it all the same."""
    for one in ended:
        assert one.code == 1, outputs(ended)
        assert one.error.startswith(f"{name}: ") or f"errors.{name}: " in one.output, outputs(ended)


def when(ended, what):
    """When something planned happened."""
    return min(at for one in ended for at, do, _, _ in one.events if do == what)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pmap", "shard_map"])
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("what", ["eval", "without_hooks", "other_shape"])
def test_one_process_runs_another_program(cluster, what, who, engine, figures):
    """An eval step on the chief only, say: its collective would silently mix into the others' training step."""
    url = cluster.folder("checkpoints")
    all_ended_well(cluster.run(2, url=str(url), steps=3, engine=engine))
    before = files(url)
    events = [Event(who, "body", what, step=6)]
    ended = cluster.run(2, 2, url=str(url), steps=10, engine=engine, events=events, session=NO_SAVES)
    seconds = max(one.at for one in ended) - when(ended, what)
    figures.append(f"{what} on process {who} only, {engine}: all ended {seconds:.1f} s later")
    assert seconds < 15
    all_say(ended, "ProcessesDivergedError")
    assert saved(url) == [3]
    assert {name: found for name, found in files(url).items() if name.startswith("3/")} == {
        name: found for name, found in before.items() if name.startswith("3/")
    }


NO_SAVES = {"save_checkpoint_steps": None, "save_checkpoint_secs": None}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["eval", "without_hooks", "other_shape"])
def test_nothing_is_saved_after_processes_went_different_ways(cluster, what):
    url = cluster.folder("checkpoints")
    events = [Event(None, "body", "sleep", step=4, seconds=5), Event(0, "body", what, step=5)]
    ended = cluster.run(2, url=str(url), steps=50, events=events, session={"save_checkpoint_steps": 3})
    all_say(ended, "ProcessesDivergedError")
    assert saved(url) == [3]


@pytest.mark.slow
def test_clocks_that_differ_save_at_the_same_steps(cluster):
    url = cluster.folder("checkpoints")
    ended = cluster.run(
        2,
        url=str(url),
        steps=40,
        clock_ahead=(0.0, 10.0),
        session={"save_checkpoint_secs": 0.5},
        events=[Event(0, "body", "sleep", step=step, seconds=0.2) for step in range(2, 38)],
    )
    all_ended_well(ended)
    assert same(ended, "bits")
    assert len(saved(url)) >= 4
    assert saved(url)[-1] == same(ended, "global_step") == 40
    assert same(ended, "saved_at")[-5:] == saved(url)


@pytest.mark.slow
def test_early_stopping_on_a_local_metric(cluster):
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, url=str(url), steps=None, call="cluster_scenarios:early_stopping")
    assert [one.code for one in ended] == [0, 0], outputs(ended)
    last = same(ended, "global_step")
    assert 8 <= last <= 8 + 1 + 2  # process 1 finds at step 8 that its own metric did not fall
    assert same(ended, "name") == "EARLY_STOPPING"
    assert saved(url)[-1] == last
    assert "process 1" in ended[0].report["reason"]
    assert "own metric" in ended[1].report["reason"]


@pytest.mark.slow
def test_all_evaluate_at_the_end_one_of_them_late(cluster):
    events = [Event(1, "end", "sleep", seconds=2), Event(None, "ending", "eval")]
    all_ended_well(cluster.run(2, events=events))


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_only_one_evaluates_at_the_end(cluster, who):
    url = cluster.folder("checkpoints")
    ended = cluster.run(2, url=str(url), events=[Event(who, "ending", "eval")])
    all_say(ended, "ProcessesDivergedError")
    assert saved(url) == [3, 6]  # the training was over


@pytest.mark.slow
def test_steps_that_alternate_hardly_wait_for_each_other(cluster):
    ended = cluster.run(2, call="cluster_scenarios:alternating")
    assert [one.code for one in ended] == [0, 0], outputs(ended)
    for one in ended:
        print(one.report)
        assert one.report["meetings"] == 2 + 400 // 50
