"""Every public hook with two processes, in one job that runs through and in one that is killed and started again."""

from __future__ import annotations

from typing import Any

import pytest
from cluster import Cluster, outputs
from every_hook import ELSEWHERE, EVERY, LAST_STEP

import monsess as ms

DIES_AT = 15
BEGINS_AT = 12
PUBLIC = sorted({name for name in ms.__all__ if name.endswith("Hook")} - ELSEWHERE)


class Job:
    """What both processes report, and what lies in the directory."""

    def __init__(self, url: Any, ended: Any) -> None:
        assert [one.code for one in ended] == [0, 0], outputs(ended)
        self.reports = [one.report for one in ended]
        self.outputs = [one.output for one in ended]
        self.chief, self.other = self.reports
        self.saved = ms.CheckpointStore(str(url)).steps()
        self.curves = ms.read_metrics(str(url)).curves

    def both(self, name: str) -> Any:
        """What both processes report alike."""
        assert self.chief[name] == self.other[name]
        return self.chief[name]

    def curve(self, tag: str) -> list[tuple[int, float]]:
        """The points of a curve."""
        return [(point.step, point.value) for point in self.curves[tag]]

    def lines(self, start: str, index: int = 0) -> list[str]:
        """What a process has logged that begins so, without the time in brackets."""
        return [line.partition(" (")[0] for line in self.reports[index]["lines"] if line.startswith(start)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """The straight job, and the second attempt of one whose process 1 was killed."""
    with Cluster(tmp_path_factory.mktemp("jobs")) as cluster:
        url = cluster.folder("straight")
        straight = Job(url, cluster.run(2, url=str(url), call="every_hook:train"))
        url = cluster.folder("killed")
        first = cluster.run(2, url=str(url), call="every_hook:train", arguments={"dies_at": DIES_AT})
        assert first[1].code == -9, outputs(first)
        assert first[0].code != 0, outputs(first)
        yield straight, Job(url, cluster.run(2, url=str(url), call="every_hook:train"))


def test_every_hook_is_there(jobs):
    straight, resumed = jobs
    assert straight.both("hooks") == resumed.both("hooks") == PUBLIC
    assert (straight.both("began"), resumed.both("began")) == (0, BEGINS_AT)
    assert straight.both("bits") == resumed.both("bits")


def test_the_states_of_all_hooks_are_those_of_a_straight_run(jobs):
    """But that of GoodputHook, which counts seconds."""
    straight, resumed = jobs
    assert straight.both("states") == resumed.both("states")
    assert straight.chief["states"]["EarlyStoppingHook:eval/loss"]["now"][0] is not None


def of_stop_at_step(job):
    assert job.both("step") == LAST_STEP
    assert job.both("reason") == f"last step {LAST_STEP} reached (StopAtStepHook)"


def of_stop_at_time(job):
    assert not job.lines("StopAtTimeHook")


def of_checkpoint_saver(job):
    assert job.saved == list(range(EVERY, LAST_STEP + 1, EVERY))


def of_summary_saver(job):
    return job.curve("loss")


def of_step_counter(job):
    assert [step for step, _ in job.curve("global_step/sec")] == job.saved
    assert min(job.chief["rate"], job.other["rate"]) > 0


def of_logging_tensor(job):
    assert job.lines("loss = ") == job.lines("loss = ", 1)
    return [line for line in job.lines("loss = ") if int(line.split()[-1]) > BEGINS_AT]


def of_nan_tensor(job):
    assert not [line for line in job.lines("") if "NaN" in line]


def of_evaluation(job):
    return job.both("evaluated"), job.curve("eval/loss")


def of_early_stopping(job):
    return job.both("states")["EarlyStoppingHook:eval/loss"]


def of_profiler(job):
    assert job.both("traces") == 1


def of_progress_bar(job):
    assert f"step {LAST_STEP}/{LAST_STEP} (100.0 %)" in job.outputs[0]
    assert "100.0 %" not in job.outputs[1]


def of_watchdog(job):
    assert not [line for line in job.lines("") if "WatchdogHook" in line]


def of_goodput(job):
    began = job.both("began")
    assert job.chief["goodput"] == [1, DIES_AT - BEGINS_AT] if began else [0, 0]


def of_replica_check(job):
    assert job.both("compared")[1:] == [step for step in job.saved if step > job.both("began")]


def of_final_ops(job):
    assert job.both("final") == pytest.approx(job.curve("loss")[-1][1])
    return job.both("final")


def of_feed_fn(job):
    assert job.both("fed") == LAST_STEP - job.both("began")


def of_waiter(job):
    assert not job.lines("Waiting for global step")


def of_broadcast(job):
    assert job.both("compared")[0] == job.both("began")
    return job.both("bits")


def of_mlflow(job):
    return of_service(job, "mlflow")


def of_wandb(job):
    return of_service(job, "wandb")


def of_service(job, name):
    """The chief alone calls it, with all that is logged."""
    assert job.other["services"][name] == []
    logged = [(step, tags) for step, tags in job.chief["services"][name] if "loss" in tags]
    assert [step for step, _ in logged] == [step for step, _ in job.curve("loss") if step > job.both("began")]
    return [one for one in logged if one[0] > BEGINS_AT]


WHAT = {
    "StopAtStepHook": of_stop_at_step,
    "StopAtTimeHook": of_stop_at_time,
    "CheckpointSaverHook": of_checkpoint_saver,
    "SummarySaverHook": of_summary_saver,
    "StepCounterHook": of_step_counter,
    "LoggingTensorHook": of_logging_tensor,
    "NanTensorHook": of_nan_tensor,
    "EvaluationHook": of_evaluation,
    "EarlyStoppingHook": of_early_stopping,
    "ProfilerHook": of_profiler,
    "ProgressBarHook": of_progress_bar,
    "WatchdogHook": of_watchdog,
    "GoodputHook": of_goodput,
    "ReplicaCheckHook": of_replica_check,
    "FinalOpsHook": of_final_ops,
    "FeedFnHook": of_feed_fn,
    "GlobalStepWaiterHook": of_waiter,
    "BroadcastGlobalVariablesHook": of_broadcast,
    "MLflowHook": of_mlflow,
    "WandbHook": of_wandb,
}


@pytest.mark.parametrize("name", PUBLIC)
def test_after_a_kill_it_goes_on_as_if_nothing_had_happened(jobs, name):
    """What it does is right in each job, and what it gives is the same in both."""
    straight, resumed = jobs
    assert WHAT[name](straight) == WHAT[name](resumed)
