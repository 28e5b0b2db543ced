"""SIGTERM and Ctrl-C: a common last step, one commit of it, an exit status that tells, and a restart that goes on.

Acceptance: a signal to process 0, to 1, to all and twice, at every place of a training and at random moments. Within
60 s all processes have ended with 143, or with 0 where the last step is reached, after the same step, which is
committed; or, where they cannot come to a common step, the last periodic checkpoint stays and is named as such.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Ended, Event, Running, outputs
from members import Members

import monsess as ms

pytestmark = pytest.mark.timeout(200)
slow = pytest.mark.slow

LAST = 10
WITHIN = 60.0
#: How many random moments; as many as `make soak` asks for.
MOMENTS = int(os.environ.get("MONSESS_RANDOM_KILLS") or "4") * 3 // 4

PLACES = [
    ("begin", None),
    ("created", 0),
    ("step", None),  # the first compile
    ("before_run", 0),
    ("after_run", 5),
    ("body", 4),  # where an evaluation follows
    ("before_run", 7),  # the last three steps: less than a vote takes
    ("after_run", 8),
    ("after_run", 9),
    ("after_run", 10),
    ("left", None),
    ("end", 10),
]
ON_THE_CHIEF = [("init", None), ("before_save", 6), ("commit", 6), ("after_save", 6)]
WHO: dict[str, Sequence[int | None]] = {"0": [0], "1": [1], "all": [None], "twice": [1, 1]}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("signals")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def straight(cluster: Cluster) -> dict[int, dict[str, str]]:
    """The bits of the state at the end of an undisturbed run, by the number of processes."""
    bits = {}
    for count in (1, 2):
        ended = cluster.run(count, steps=LAST)
        assert [one.code for one in ended] == [0] * count, outputs(ended)
        bits[count] = ended[0].report["bits"]
    return bits


def stopped(ended: Sequence[Ended], url: Path, code: int = 143) -> int:
    """Check that a job has stopped as a signal asks it to; returns its last step."""
    assert {one.code for one in ended} in ({code}, {0}), outputs(ended)
    steps = {one.report["global_step"] for one in ended}
    assert len(steps) == 1, f"{steps}\n{outputs(ended)}"
    step = steps.pop()
    if ended[0].code == 0:
        assert step == LAST, outputs(ended)
    assert all(one.report["last_committed"] == step for one in ended), outputs(ended)
    store = ms.CheckpointStore(str(url))
    assert store.steps()[-1] == step
    assert store.verify(step) == []
    assert not [name for name in os.listdir(url) if name.startswith((".", "damaged"))], os.listdir(url)
    assert all(one.report["threads"] == [] for one in ended), outputs(ended)
    return step


def goes_on(cluster: Cluster, url: Path, count: int, straight: dict[int, dict[str, str]], **options: Any) -> None:
    """Check that a restart continues and ends in the bits of an undisturbed run."""
    ended = cluster.run(count, url=str(url), steps=LAST, **options)
    assert [one.code for one in ended] == [0] * count, outputs(ended)
    assert [one.report["bits"] for one in ended] == [straight[count]] * count, outputs(ended)


def interrupted(cluster: Cluster, straight: dict[int, dict[str, str]], events: list[Event], count: int = 2) -> int:
    """A job whose events send it a signal, and its restart; returns the step in between."""
    url = cluster.folder("interrupted") / "checkpoints"
    ended = cluster.run(count, url=str(url), steps=LAST, events=events)
    sent = [at for one in ended for at, do, _, _ in one.events if do in ("term", "int", "preempt")]
    assert sent, f"there was no signal\n{outputs(ended)}"
    seconds = max(one.at for one in ended) - min(sent)
    step = stopped(ended, url, 130 if any(event.do == "int" for event in events) else 143)
    print(f"{seconds:.1f} s after the signal all had ended with {ended[0].code}, at step {step}")
    assert seconds < WITHIN
    goes_on(cluster, url, count, straight)
    return step


def moments(places: list[tuple[str, int | None]], who: list[str]) -> list[Any]:
    """Parameters: a sample runs always, all of them in the full suite."""
    quick = {("after_run", 5, "1"), ("after_run", 8, "all")}
    return [
        pytest.param(at, step, name, id=f"{at}-{step}-{name}", marks=[] if (at, step, name) in quick else [slow])
        for at, step in places
        for name in who
    ]


@pytest.mark.parametrize(("at", "step", "who"), moments(PLACES, list(WHO)) + moments(ON_THE_CHIEF, ["0"]))
def test_sigterm_anywhere(cluster, straight, at, step, who):
    events = [Event(process, at, "term", step=step) for process in WHO[who]]
    if who == "twice":
        later = {"step": "after_run", "begin": "created", "left": "end"}.get(at, at)
        events[1] = Event(1, later, "term", step=step if later == at and at not in ("created", "end") else None)
    if at == "body":
        events += [Event(None, "body", "eval", step=evaluated) for evaluated in (5, 6)]
    reached = interrupted(cluster, straight, events)
    if (at, step) in (("after_run", 9), ("after_run", 10), ("left", None), ("end", 10)):
        assert reached == LAST
    elif (at, step) in (("created", 0), ("before_run", 0), ("begin", None), ("step", None)):
        assert reached <= 4  # two steps after the one that carries the wish


@slow
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("waits", [0, 1])
def test_sigterm_while_one_waits_for_its_input(cluster, straight, waits, who):
    url = cluster.folder("waiting") / "checkpoints"
    late = Event(waits, "input", "sleep", step=7, seconds=4)
    with cluster.start(2, url=str(url), steps=LAST, events=[late]) as job:
        job.happened(waits, "sleep")
        time.sleep(1.5)
        job.send(who, signal.SIGTERM)
    stopped(job.over, url)
    goes_on(cluster, url, 2, straight)


@slow
@pytest.mark.parametrize("who", [0, 1])
def test_without_a_common_step_the_last_periodic_checkpoint_stays(cluster, straight, who, figures):
    url = cluster.folder("stuck") / "checkpoints"
    with cluster.start(2, url=str(url), steps=LAST, events=[Event(1, "input", "hang", step=9)]) as job:
        job.happened(1, "hang")
        time.sleep(3)
        job.send(who, signal.SIGTERM)
        sent = time.monotonic()
    seconds = max(one.at for one in job.over) - sent
    figures.append(f"SIGTERM to {who}, process 1 stuck: {seconds:.1f} s after the signal both had ended")
    assert [one.code for one in job.over] == [143, 143], outputs(job.over)
    assert seconds < WITHIN
    for one in job.over:
        assert "came to no common step within 40 s of the signal" in one.output, outputs(job.over)
        assert "the newest checkpoint is the last periodic one" in one.output, outputs(job.over)
    steps = ms.CheckpointStore(str(url)).steps()
    assert steps, outputs(job.over)
    assert steps[-1] % 3 == 0
    goes_on(cluster, url, 2, straight)


@pytest.mark.parametrize("who", [pytest.param(0, marks=slow), 1])
def test_sigterm_after_the_last_dispatch_is_heard_at_the_end(cluster, straight, who):
    """All break out of the loop: no step carries the wish any more."""
    events = [Event(who, "after_run", "term", step=6), Event(None, "body", "break", step=6)]
    assert interrupted(cluster, straight, events) == 6


@slow
@pytest.mark.parametrize("who", [0, 1])
def test_sigterm_during_a_long_evaluation_after_the_last_step(cluster, straight, who):
    url = cluster.folder("evaluating") / "checkpoints"
    events = [Event(who, "after_run", "term", step=LAST), Event(None, "left", "sleep", seconds=45)]
    ended = cluster.run(2, url=str(url), steps=LAST, events=events)
    assert [one.code for one in ended] == [0, 0], outputs(ended)
    assert stopped(ended, url) == LAST


@slow
def test_sigterm_during_a_long_evaluation_after_a_common_stop(cluster, straight):
    url = cluster.folder("evaluating") / "checkpoints"
    events = [Event(1, "after_run", "term", step=4), Event(None, "left", "sleep", seconds=60)]
    ended = cluster.run(2, url=str(url), steps=LAST, events=events)
    assert [one.code for one in ended] == [143, 143], outputs(ended)
    for one in ended:
        assert "but did not all leave the loop within 40 s of the signal" in one.output, outputs(ended)
    goes_on(cluster, url, 2, straight)


@pytest.mark.parametrize("count", [1, 2])
def test_a_stop_may_name_a_preemption_as_its_reason(cluster, count):
    ended = cluster.run(count, call="cluster_scenarios:preempting_itself")
    assert [one.code for one in ended] == [0] * count, outputs(ended)
    assert [one.report["code"] for one in ended] == [143] * count, outputs(ended)
    assert {one.report["reason"] for one in ended} == {"PREEMPTED"}


@slow
@pytest.mark.timeout(3000)
@pytest.mark.soak
def test_sigterm_at_random_moments(cluster, straight, figures, seed):
    for number in range(max(MOMENTS, 3)):
        chance = random.Random(f"{seed} {number}")
        who = chance.choice(list(WHO))
        url = cluster.folder(f"random{number}") / "checkpoints"
        marks = [Event(None, "begin", "sleep")]
        with cluster.start(2, url=str(url), steps=LAST, events=marks, sleeps=seed + number) as job:
            for index in (0, 1):
                job.happened(index, "sleep")
            delay = chance.uniform(0, 5)
            time.sleep(delay)
            _send(job, who, chance)
            sent = time.monotonic()
        seconds = max(one.at for one in job.over) - sent
        codes = [one.code for one in job.over]
        where = f"MONSESS_SEED={seed}, moment {number}: SIGTERM to {who} after {delay:.2f} s"
        late = len(set(codes)) > 1  # it was over: one got the signal after its session, and takes nobody with it
        figures.append(f"{where}: {codes}, step {job.over[0].report.get('global_step')}, {seconds:.1f} s")
        assert set(codes) <= {0, 143}, outputs(job.over)
        assert not late or all(one.report.get("last_committed") == LAST for one in job.over), outputs(job.over)
        if not late:
            stopped(job.over, url)
        assert seconds < WITHIN, where
        goes_on(cluster, url, 2, straight)


@pytest.mark.parametrize("process", [pytest.param(0, marks=slow), 1])
def test_a_sigterm_after_the_session_takes_nobody_with_it(cluster, process):
    url = cluster.folder("closed") / "checkpoints"
    ended = cluster.run(2, url=str(url), steps=LAST, events=[Event(process, "closed", "term")])
    assert [one.code for one in ended] == [143 if one.index == process else 0 for one in ended], outputs(ended)
    assert [one.report["last_committed"] for one in ended] == [LAST] * 2
    assert [one.report["stop_reason"] for one in ended] == ["LAST_STEP"] * 2


def _send(job: Running, who: str, chance: random.Random) -> None:
    for process in WHO[who]:
        for index in (0, 1) if process is None else (process,):
            job.send(index, signal.SIGTERM)
        time.sleep(chance.choice((0.0, 0.1, 0.5)) if who == "twice" else 0)


@pytest.mark.parametrize(
    "process", [pytest.param(0, marks=slow), 1, pytest.param(None, marks=slow)], ids=["0", "1", "all"]
)
def test_the_first_ctrl_c_is_a_clean_stop(cluster, straight, process):
    interrupted(cluster, straight, [Event(process, "after_run", "int", step=4)])


@slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_second_ctrl_c_aborts(cluster, process):
    url = cluster.folder("aborted") / "checkpoints"
    waits = Event(None, "body", "sleep", step=3, seconds=5)  # until the checkpoint of step 3 is committed
    events = [waits, Event(process, "after_run", "int", step=4), Event(process, "before_run", "int", step=4)]
    ended = cluster.run(2, url=str(url), steps=LAST, events=events)
    assert ended[process].error.startswith("KeyboardInterrupt"), outputs(ended)
    assert ended[process].code == 130, outputs(ended)
    assert ended[1 - process].code != 0, outputs(ended)
    assert f"Process {process} failed at step " in ended[1 - process].output, outputs(ended)
    assert max(one.at for one in ended) - ended[process].events[2][0] < 15
    assert ms.CheckpointStore(str(url)).steps() == [3]


@slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_preemption_can_be_asked_for_from_a_thread(cluster, straight, process):
    assert interrupted(cluster, straight, [Event(process, "after_run", "preempt", step=4)]) in (6, 7)


@slow
def test_it_returns_if_it_is_to(cluster, straight):
    url = cluster.folder("returning") / "checkpoints"
    events = [Event(1, "after_run", "term", step=4)]
    ended = cluster.run(2, url=str(url), steps=LAST, events=events, session={"on_preemption": "return"})
    assert [one.code for one in ended] == [0, 0], outputs(ended)
    assert [one.report["stop_reason"] for one in ended] == ["PREEMPTED"] * 2
    assert "SIGTERM received" in ended[1].report["reason"]
    assert len({one.report["global_step"] for one in ended}) == 1
    assert ms.CheckpointStore(str(url)).steps()[-1] == ended[0].report["global_step"] < LAST
    goes_on(cluster, url, 2, straight)


# ---- one process, which belongs to no job


@pytest.mark.parametrize(
    ("at", "step", "do"),
    [
        pytest.param("begin", None, "term", marks=slow),
        pytest.param("init", None, "term", marks=slow),
        pytest.param("created", 0, "term", marks=slow),
        pytest.param("step", None, "term", marks=slow),
        ("body", 4, "term"),  # between should_stop() and run()
        ("after_run", 5, "term"),
        pytest.param("after_run", 9, "term", marks=slow),
        pytest.param("after_run", 10, "term", marks=slow),
        pytest.param("commit", 6, "term", marks=slow),
        pytest.param("left", None, "term", marks=slow),
        pytest.param("end", 10, "term", marks=slow),
        pytest.param("after_run", 5, "int", marks=slow),
        pytest.param("after_run", 5, "preempt", marks=slow),
    ],
)
def test_alone(cluster, straight, at, step, do):
    interrupted(cluster, straight, [Event(0, at, do, step=step)], count=1)


@slow
def test_alone_waiting_for_an_input_that_never_comes(cluster, straight):
    url = cluster.folder("waiting") / "checkpoints"
    with cluster.start(1, url=str(url), steps=LAST, events=[Event(0, "input", "hang", step=7)]) as job:
        job.happened(0, "hang")
        time.sleep(2)
        job.send(0, signal.SIGTERM)
        sent = time.monotonic()
    assert job.over[0].code == 143, outputs(job.over)
    assert job.over[0].report["global_step"] == 7
    assert job.over[0].at - sent < 20  # a source that is busy is given some seconds
    assert ms.CheckpointStore(str(url)).steps()[-1] == 7
    goes_on(cluster, url, 1, straight)


@pytest.fixture
def heard():
    """What came before is heard by now: the thread that reads signals ends after it has read them all."""
    for thread in threading.enumerate():
        if thread.name == "monsess-signals":
            thread.join(20)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("holder", ["_agreement", "_signals"])
def test_a_handler_may_interrupt_whoever_holds_its_lock(holder):
    with ms.MonitoredTrainingSession(lambda: 0.0, on_preemption="return") as sess:
        with getattr(sess, holder)._lock:
            signal.raise_signal(signal.SIGTERM)
        assert sess.should_stop()
    assert sess.stop_reason == ms.StopReason.PREEMPTED


@pytest.mark.timeout(30)
def test_people_are_told_from_another_thread(heard, caplog):
    """The handler may have interrupted whoever writes to the same stream."""
    with ms.MonitoredTrainingSession(lambda: 0.0, on_preemption="return") as sess:
        signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)  # the thread has not heard of it
        assert sess.should_stop()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        while not (told := [one for one in caplog.records if "SIGTERM: stopping cleanly" in one.message]):
            time.sleep(0.01)
    assert [one.threadName for one in told] == ["monsess-signals"]


@pytest.mark.timeout(30)
def test_what_is_read_late_stops_no_later_session(heard):
    """The thread that reads signals may be held, by a log that blocks, until its sessions have long ended."""
    free = threading.Event()

    class Blocked(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:  # without a lock, which would hold the main thread too
            if threading.current_thread().name == "monsess-signals":
                assert free.wait(20)
            return True

    handler = Blocked()
    logging.getLogger("monsess").addHandler(handler)
    try:
        with ms.MonitoredTrainingSession(lambda: 0.0, on_preemption="return") as sess:
            signal.raise_signal(signal.SIGTERM)
            reader = next(one for one in threading.enumerate() if one.name == "monsess-signals")
            signal.raise_signal(signal.SIGTERM)  # may be read together with the first one
            time.sleep(0.1)
            signal.raise_signal(signal.SIGTERM)
            assert sess.should_stop()
        with ms.MonitoredTrainingSession(lambda: 0.0, on_preemption="return") as later:
            free.set()
            reader.join(20)
            assert not reader.is_alive()
            assert not later.should_stop()
    finally:
        free.set()
        logging.getLogger("monsess").removeHandler(handler)


def test_an_ignored_signal_stays_ignored():
    """A shell starts a job in the background so, and its Ctrl-C is meant for another program."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ms.MonitoredTrainingSession(lambda: 0.0, on_preemption="return") as sess:
            signal.raise_signal(signal.SIGINT)
            assert not sess.should_stop()
            signal.raise_signal(signal.SIGTERM)
            assert sess.should_stop()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("first", [0, 1])
def test_two_sessions_close_in_any_order(heard, first):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    pair = [ms.MonitoredTrainingSession(lambda: 0.0, on_preemption="return") for _ in range(2)]
    pair[first].close()
    signal.raise_signal(signal.SIGTERM)
    assert pair[1 - first].should_stop()
    pair[1 - first].close()
    assert pair[1 - first].stop_reason == ms.StopReason.PREEMPTED
    assert pair[first].stop_reason != ms.StopReason.PREEMPTED
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.timeout(30)
def test_a_signal_stops_all_sessions_and_the_second_ctrl_c_aborts():
    with ms.MonitoredTrainingSession(lambda: 0.0, on_preemption="return") as outer:
        with ms.MonitoredTrainingSession(lambda: 0.0, on_preemption="return") as inner:
            signal.raise_signal(signal.SIGINT)
            assert inner.should_stop()
            assert outer.should_stop()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


def test_a_worker_that_was_forked_can_be_ended(tmp_path):
    script = """
import multiprocessing, jax.numpy as jnp
import warnings
warnings.simplefilter("ignore")

def work():
    while True:
        time.sleep(0.05)

@ms.train_step
def step(state):
    return state + 1, {}

fork = multiprocessing.get_context("fork")
with ms.MonitoredTrainingSession(lambda: jnp.float32(0), hooks=[ms.StopAtStepHook(last_step=5)]) as sess:
    while not sess.should_stop():
        sess.run(step)
        for pause in (0, 0.3):
            worker = fork.Process(target=work, daemon=True)
            worker.start()
            time.sleep(pause)
            worker.terminate()
            worker.join(10)
            print("worker", worker.exitcode, flush=True)
            worker.kill()
print("ended at", sess.global_step, sess.stop_reason.name)
"""
    with Members(tmp_path) as members:
        text = members.start(script).ended()
    assert text.count("worker -15") == 10
    assert "ended at 5 LAST_STEP" in text


@slow
def test_a_long_final_commit_is_waited_for(cluster, straight):
    url = cluster.folder("long") / "checkpoints"
    events = [Event(1, "after_run", "term", step=8), Event(0, "commit", "sleep", step=LAST, seconds=45)]
    ended = cluster.run(2, url=str(url), steps=LAST, events=events)
    assert [one.code for one in ended] == [0, 0], outputs(ended)
    assert ms.CheckpointStore(str(url)).steps()[-1] == LAST
    assert ended[0].report["bits"] == straight[2]
