"""One process fails, and all end: soon, with an exit status that tells, and with the name of the culprit.

Acceptance: an exception, a SIGKILL, a SIGSTOP or a hang, in process 0 or 1, at every place of a training. From the
fault to the last exit it takes ``failure_timeout_secs`` at most; a hang is noticed after ``stall_timeout_secs``, which
comes on top. The table is printed at the end.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Ended, Event, outputs

import monsess as ms

pytestmark = pytest.mark.timeout(150)
slow = pytest.mark.slow

LIMIT = 15.0  # failure_timeout_secs
STALL = 10.0  # stall_timeout_secs, where something hangs
COMMITTED = 3  # the step that each job begins with
LAST = 10  # the step at which it would end; every third one is saved

RAISES = [
    *[("begin", None, index) for index in (0, 1)],
    ("init", None, 0),
    *[("restore", None, index) for index in (0, 1)],
    *[("created", None, index) for index in (0, 1)],
    *[("step", None, index) for index in (0, 1)],
    *[("input", 7, index) for index in (0, 1)],
    *[("before_run", 4, index) for index in (0, 1)],
    *[("after_run", 5, index) for index in (0, 1)],
    *[("body", 5, index) for index in (0, 1)],
    ("before_save", 6, 0),
    ("commit", 6, 0),
    ("after_save", 6, 0),
    *[("left", None, index) for index in (0, 1)],
    *[("end", None, index) for index in (0, 1)],
    *[("closed", None, index) for index in (0, 1)],
]
HANGS = [
    ("init", None, 0),
    *[("restore", None, index) for index in (0, 1)],
    *[("created", None, index) for index in (0, 1)],
    *[("input", 7, index) for index in (0, 1)],
    *[("after_run", 5, index) for index in (0, 1)],
    *[("left", None, index) for index in (0, 1)],
    *[("end", None, index) for index in (0, 1)],
]
KILLS = [
    *[("restore", None, index) for index in (0, 1)],
    *[("created", None, index) for index in (0, 1)],
    *[("input", 7, index) for index in (0, 1)],
    *[("after_run", 5, index) for index in (0, 1)],
    ("commit", 6, 0),
    *[("left", None, index) for index in (0, 1)],
    *[("end", None, index) for index in (0, 1)],
]
QUICK = {("raise", "after_run", 1), ("kill", "after_run", 1), ("raise", "commit", 0)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("failures")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def trained(cluster: Cluster) -> Path:
    """A directory with a checkpoint of step 3."""
    url = cluster.folder("trained") / "checkpoints"
    ended = cluster.run(2, url=str(url), steps=COMMITTED)
    assert [one.code for one in ended] == [0, 0], outputs(ended)
    return url


@pytest.fixture(scope="module")
def table(figures) -> Iterator[list[str]]:
    """Rows that are shown when all is over."""
    rows: list[str] = []
    yield rows
    figures.append("fault in               process  seconds until the exit of process 0, 1; statuses; newest commit")
    figures.extend(rows)


def cases(do: str, places: list[tuple[str, int | None, int]]) -> list[Any]:
    """Parameters; all but a few take their time in the full suite only."""
    return [
        pytest.param(*place, id=f"{place[0]}-{place[2]}", marks=[] if (do, place[0], place[2]) in QUICK else [slow])
        for place in places
    ]


def fail(
    cluster: Cluster, trained: Path, table: list[str], fault: Event, limit: float = LIMIT, **session: Any
) -> tuple[list[Ended], list[int], Path]:
    """Run a job into a fault; checks what holds for all of them, and returns it with the steps that it leaves."""
    url = cluster.folder("failing") / "checkpoints"
    begins_anew = fault.at in ("begin", "init")
    if not begins_anew:
        shutil.copytree(trained, url)
    ended = cluster.run(2, url=str(url), steps=LAST, events=[fault], failure_secs=LIMIT, session=session)
    assert fault.process is not None
    culprit, other = ended[fault.process], ended[1 - fault.process]
    assert len(culprit.events) == 1, f"the fault did not happen\n{outputs(ended)}"
    seconds = [one.at - culprit.events[0][0] for one in ended]
    steps = ms.CheckpointStore(str(url)).steps()
    table.append(
        f"{fault.do + ' ' + fault.at:22} {fault.process}        {seconds[0]:5.1f} {seconds[1]:5.1f}   "
        f"{[one.code for one in ended]}   {steps[-1] if steps else None}"
    )
    assert max(seconds) < limit, f"{seconds}\n{outputs(ended)}"
    assert culprit.code != 0, outputs(ended)
    if fault.at != "closed":
        assert other.code != 0, outputs(ended)
    return ended, steps, url


def committed_before(fault: Event, steps: list[int], ended: list[Ended]) -> bool:
    """Whether nothing was committed that not every process had done before the fault; saves in flight may end."""
    if fault.at in ("end", "closed"):
        return steps[-1] == LAST  # it is committed before that
    if fault.at == "after_save":
        # The listener is told at the next run after the commit of step 6, or at the end, where all saves have ended.
        at = ended[0].report["global_step"]
        allowed = {9: [[3, 6], [3, 6, 9]], LAST: [[3, 6, 9, LAST]]}
        return fault.step == 6 <= at and steps in allowed.get(at, [[3, 6]])
    newest = {"begin": 0, "init": 0, "input": 6, "left": 9}
    if fault.at == "commit" and fault.do == "raise":  # the save of a later step may be on its way
        return 6 not in steps
    return max(steps, default=0) <= newest.get(fault.at, COMMITTED)


@pytest.mark.parametrize(("at", "step", "process"), cases("raise", RAISES))
def test_an_exception_ends_all_in_time(cluster, trained, table, at, step, process):
    fault = Event(process, at, "raise", step=step)
    ended, steps, _ = fail(cluster, trained, table, fault)
    culprit, other = ended[process], ended[1 - process]
    assert "Traceback (most recent call last):" in culprit.output, outputs(ended)
    assert f"planned in process {process}, {at}" in culprit.output, outputs(ended)
    assert committed_before(fault, steps, ended), f"{steps}\n{outputs(ended)}"
    if at != "closed":
        assert culprit.code == 1, outputs(ended)
        assert f"PeerFailedError: Process {process} failed at step " in other.output, outputs(ended)
        assert f"planned in process {process}, {at}" in other.output, outputs(ended)


@pytest.mark.parametrize(("at", "step", "process"), cases("kill", KILLS))
def test_a_kill_ends_all_in_time(cluster, trained, table, at, step, process):
    fault = Event(process, at, "kill", step=step)
    ended, steps, _ = fail(cluster, trained, table, fault)
    other = ended[1 - process]
    assert ended[process].code == -signal.SIGKILL, outputs(ended)
    assert committed_before(fault, steps, ended), f"{steps}\n{outputs(ended)}"
    if process == 1:  # process 0 takes the coordination service with it: JAX then aborts the others at once
        assert "PeerFailedError: Process 1 has been silent for " in other.output, outputs(ended)
        assert other.code == 1, outputs(ended)


@slow
@pytest.mark.parametrize(("at", "step", "process"), cases("hang", HANGS))
def test_a_hang_is_noticed_in_time(cluster, trained, table, at, step, process):
    fault = Event(process, at, "hang", step=step)
    ended, steps, _ = fail(cluster, trained, table, fault, limit=STALL + LIMIT, stall_timeout_secs=STALL)
    noticed = (
        f"No process has made any progress for 10 s (stall_timeout_secs). Process {process} is furthest behind",
        f"Process {1 - process} waited 10 s for process {process}: ",
    )
    for one in ended:
        assert any(line in one.output for line in noticed), outputs(ended)
        assert one.code == 1, outputs(ended)
    stack = ended[process].output.partition("Stack of the training thread")[2]
    assert "time.sleep(1)" in stack or at == "input", f"no stack of what hangs\n{outputs(ended)}"
    assert committed_before(fault, steps, ended), f"{steps}\n{outputs(ended)}"


@pytest.mark.parametrize("what", ["data", pytest.param("hooks", marks=slow), pytest.param("store", marks=slow)])
def test_a_session_that_one_process_cannot_make_ends_all_in_time(cluster, what):
    call, joined = "cluster_alone:a_session_that_cannot_be_made", Event(1, "joined", "sleep")
    ended = cluster.run(2, call=call, arguments={"what": what}, events=[joined])
    assert [one.code for one in ended] == [1, 1], outputs(ended)
    error = {"data": "OSError: no state today", "hooks": "HookError: The same ", "store": "ValueError: "}[what]
    assert error in ended[1].output, outputs(ended)
    assert f"PeerFailedError: Process 1 failed at step 0: {error}" in ended[0].output, outputs(ended)
    assert max(one.at for one in ended) - ended[1].events[0][0] < LIMIT - 5


@slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_is_stopped_counts_as_lost(cluster, trained, table, process):
    url = cluster.folder("stopped") / "checkpoints"
    shutil.copytree(trained, url)
    fault = Event(process, "after_run", "freeze", step=5)
    with cluster.start(2, url=str(url), steps=LAST, events=[fault], failure_secs=LIMIT) as job:
        at = job.happened(process, "freeze")
        job.until(lambda: job.has_ended(1 - process), LIMIT + 5, "the other process did not end")
        job.send(process, signal.SIGKILL)
    other = job.over[1 - process]
    table.append(f"freeze after_run       {process}        {other.at - at:5.1f} (the other one)   {other.code}")
    assert other.at - at < LIMIT, outputs(job.over)
    assert other.code != 0, outputs(job.over)
    if process == 1:
        # Between them JAX may abort the process, by the phase of its heartbeats.
        assert "rocess 1 has been silent for " in other.output, outputs(job.over)
    assert committed_before(fault, ms.CheckpointStore(str(url)).steps(), job.over)


@slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_thread_that_does_not_end_holds_nobody(cluster, trained, table, process):
    fault = Event(process, "after_run", "raise_beside_thread", step=5)
    ended, steps, _ = fail(cluster, trained, table, fault)
    assert f"Process {process} failed at step " in ended[1 - process].output, outputs(ended)
    assert committed_before(fault, steps, ended)


@slow
@pytest.mark.parametrize("process", [0, 1])
def test_after_a_kill_the_job_goes_on_from_what_is_committed(cluster, trained, table, process):
    _, _, url = fail(cluster, trained, table, Event(process, "after_run", "kill", step=5))
    again = cluster.run(2, url=str(url), steps=LAST)
    straight = cluster.run(2, steps=LAST)
    assert [one.code for one in (*again, *straight)] == [0] * 4, outputs(again)
    assert [one.report["bits"] for one in again] == [straight[0].report["bits"]] * 2


@slow
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("at", ["joining", "begin"])
def test_twenty_seconds_late_is_not_too_late(cluster, process, at):
    ended = cluster.run(2, steps=6, events=[Event(process, at, "sleep", seconds=20)])
    assert [one.code for one in ended] == [0, 0], outputs(ended)
    assert f"waits for process {process}" in ended[1 - process].output, outputs(ended)


def test_an_error_of_a_collective_in_the_body_names_the_culprit(monkeypatch):
    lost = ms.PeerFailedError("Process 1 has been silent for 5 s.")
    gloo = ValueError("Gloo all-reduce failed: Connection closed by peer")
    with pytest.raises(ms.PeerFailedError) as caught:
        with ms.MonitoredTrainingSession(lambda: 0.0) as sess:
            monkeypatch.setattr(sess._job, "explained", lambda error: lost)
            raise gloo  # as reading an output does once a peer is gone
    assert caught.value is lost
    assert caught.value.__cause__ is gloo
    assert sess.stop_reason == ms.StopReason.ERROR
    assert "silent" in str(sess.stop_reason)


@pytest.mark.parametrize("where", ["begin", "created", "leaving", "end"])
def test_an_error_of_a_collective_anywhere_names_the_culprit(monkeypatch, where):
    lost = ms.PeerFailedError("Process 1 has been silent for 5 s.")
    gloo = ValueError("Gloo all-reduce failed: Connection closed by peer")
    told, reported = [], []
    monkeypatch.setattr("monsess.job.Job.explained", lambda self, error: lost if error is gloo else error)
    monkeypatch.setattr("monsess.job.Job.report", lambda self, error: reported.append(error))
    if where == "leaving":
        monkeypatch.setattr("monsess.job.Job.settle", lambda self: _raise(gloo))

    class Hook(ms.SessionRunHook):
        def begin(self):
            if where == "begin":
                raise gloo

        def after_create_session(self, session, coord):
            if where == "created":
                raise gloo

        def end(self, session):
            if where == "end":
                raise gloo

        def on_error(self, session, error):
            told.append(error)

    with pytest.raises(ms.PeerFailedError) as caught:
        with ms.MonitoredTrainingSession(lambda: 0.0, hooks=[Hook()]):
            pass
    assert caught.value is lost
    assert caught.value.__cause__ is gloo
    assert reported == [lost]
    assert told == ([] if where == "end" else [lost])


def _raise(error: BaseException) -> None:
    raise error


@slow
def test_hooks_are_told_of_a_failure_that_a_save_has_met(cluster):
    url = cluster.folder("told") / "checkpoints"
    ended = cluster.run(2, url=str(url), call="cluster_scenarios:told_of_a_failure_by_the_saver")
    assert [one.code for one in ended] == [1, 1], outputs(ended)
    assert "the hook was told" in ended[0].output, outputs(ended)
    assert "Process 1 failed at step 4" in ended[0].output, outputs(ended)


def test_a_chief_that_closes_slowly_has_ended_well(cluster):
    url = cluster.folder("slow") / "checkpoints"
    ended = cluster.run(2, url=str(url), failure_secs=5.0, call="cluster_scenarios:closing_slowly")
    assert [one.code for one in ended] == [0, 0], outputs(ended)
    assert [one.report["last_committed"] for one in ended] == [6, 6]


@slow
@pytest.mark.parametrize("process", [0, 1])
def test_one_that_comes_late_has_not_stalled(cluster, process):
    late = Event(process, "joined", "sleep", seconds=16)
    ended = cluster.run(2, events=[late], session={"stall_timeout_secs": 8})
    assert [one.code for one in ended] == [0, 0], outputs(ended)
