"""`monsess tail`: each record once, until there is nothing to wait for; and `monsess ls` of runs."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import written
from checkpoints import fresh, save
from command_line import CommandLine, Files
from written import checkpoint, end, start, values, write

from monsess.checkpoint.owner import OWNER, Owner, encode
from monsess.errors import StorageError
from monsess.process_name import this_process
from monsess.records.lines import FILE
from monsess.records.lines import encode as line
from monsess.records.reading import Follower
from monsess.report.progress import Pulse
from monsess.testing import FakeClock


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path) -> str:
    return str(tmp_path / "run") if request.param == "local" else fresh("memory")


@pytest.fixture
def call(capsys) -> CommandLine:
    return CommandLine(capsys)


class Meanwhile(FakeClock):
    """A clock of a world in which something happens whenever the command sleeps."""

    def __init__(self, *happenings: Callable[[], Any]) -> None:
        super().__init__(1000.0)
        self._happenings = list(happenings)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self._happenings:
            self._happenings.pop(0)()


def owner(url: str, **more: Any) -> None:
    """A run elsewhere owns the directory."""
    fields: dict[str, Any] = {
        "host": "elsewhere",
        "boot_id": "b",
        "pid_namespace": "p",
        "pid": 7,
        "start_time": "1",
        "run_id": "r",
        "attempt": "a1",
        "launch": None,
        "beat": 1,
        "interval": 10.0,
        "restored_from": None,
        "since": time.time(),
        **more,
    }
    Files(url).write(OWNER, encode(Owner(**fields)))


def dead(url: str) -> None:
    """A run on this machine owned the directory, and its process is gone."""
    owner(url, **dataclasses.asdict(dataclasses.replace(this_process(), pid=4194300)))  # beyond any that there is


FIRST = [start(0, 0), values(1, 1, loss=0.5), checkpoint(1, 2)]
REST = [values(2, 3, loss=0.25, eval__accuracy=0.5), end(2, 4)]


def test_a_run_that_has_ended(url, call):
    write(url, [*FIRST, *REST])
    status, out, err = call("tail", url)
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        f"2025-11-30 01:43:20 UTC  started at step 0, 4 devices in 1 process on here, run {written.RUN_ID}, attempt a1",
        "01:43:21  step 1  loss 0.5",
        "01:43:22  step 1  checkpoint committed, 3.0 kB, in 500 ms",
        "01:43:23  step 2  loss 0.25  eval/accuracy 0.5",
        "2025-11-30 01:43:24 UTC  step 2  ended: LAST_STEP: step 2 is reached",
    ]
    assert call("tail", url, "-n", 1)[1].startswith("2025-11-30 01:43:24 UTC  step 2  ended")
    assert call("tail", url, "-n", 0)[1] == ""


def test_for_programs(url, call):
    odd = {"event": "goodput", "step": 1, "time": 1.0, "totals": {"step": float("nan")}}
    write(url, [*FIRST, odd, *REST])
    status, out, err = call("tail", url, "--json", "-n", 100)
    assert (status, err) == (0, "")
    assert out.encode() == b"".join(map(line, [*FIRST, odd, *REST]))
    assert [json.loads(one)["step"] for one in out.splitlines()] == [0, 1, 1, 1, 2, 2]


def test_each_record_once_while_it_runs(url, call):
    write(url, FIRST)
    owner(url)
    torn = line(REST[0])[:20]
    whole = Files(url)

    def begin_a_line() -> None:
        whole.write(FILE, whole.read(FILE) + torn)

    def end_it() -> None:
        whole.write(FILE, whole.read(FILE) + line(REST[0])[20:])

    with Meanwhile(
        lambda: None, begin_a_line, lambda: None, end_it, lambda: write(url, REST[1:], append=True)
    ) as clock:
        status, out, err = call("tail", url, "--interval", 2)
    assert (status, err) == (0, "")
    assert [text.split("  ")[1] for text in out.splitlines()][1:] == ["step 1", "step 1", "step 2", "step 2"]
    assert clock.slept == [2.0] * 5


def test_parts_of_a_store_that_cannot_append(call):
    url = fresh("memory")
    files = Files(url)
    files.write("metrics-0001-a1-000000.jsonl", b"".join(map(line, FIRST)))
    owner(url)
    with Meanwhile(lambda: files.write("metrics-0001-a1-000001.jsonl", b"".join(map(line, REST)))):
        status, out, err = call("tail", url)
    assert (status, err) == (0, "")
    assert len(out.splitlines()) == len([*FIRST, *REST])


def test_a_failed_attempt_and_the_next_one(url, call):
    failed = end(1, 3, "ERROR", error="ValueError: no\n  at line 5")
    write(url, [*FIRST, failed])
    again = [start(1, 9, "a2"), *REST]
    with Meanwhile(*[lambda: None] * 3, lambda: write(url, again, append=True)):
        status, out, err = call("tail", url)
    assert status == 0
    assert "ended: ERROR: ValueError: no\n            at line 5\n" in out
    assert "restored step 1" in out
    assert err == "monsess: the run failed; waiting for the next attempt, 60 s at most\n"
    with Meanwhile() as clock:
        write(url, [*FIRST, failed])
        status, out, err = call("tail", url, "--wait", 5)
    assert status == 1
    assert clock.slept == [1.0] * 5
    assert err.splitlines()[-1] == "monsess: the run failed; nothing more to wait for"


def test_a_preempted_run_is_waited_for_and_is_no_failure(url, call):
    write(url, [*FIRST, end(1, 3, "PREEMPTED")])
    with Meanwhile():
        status, _, err = call("tail", url, "--wait", 2)
    assert status == 0
    assert "was preempted" in err


def test_a_run_that_died(url, call):
    save(url, 1)
    Files(url).write("run.json", b'{"run_id": "r"}')
    write(url, FIRST)
    dead(url)
    with Meanwhile():
        status, out, err = call("tail", url, "--wait", 3)
    assert status == 1
    assert len(out.splitlines()) == 3
    assert "the run died: its process is gone; nothing more to wait for" in err


def test_a_run_elsewhere_whose_heart_stops(url, call):
    write(url, FIRST)
    owner(url)
    with Meanwhile() as clock:
        status, _, err = call("tail", url, "--wait", 0)
    assert status == 1
    assert "no heartbeat from elsewhere" in err
    assert 30 <= sum(clock.slept) <= 40, "three of its heartbeats"


def test_a_run_elsewhere_that_is_alive_is_looked_on_for_ever(url, call):
    write(url, FIRST)
    owner(url)
    beats = [lambda n=n: owner(url, beat=n) for n in range(2, 200)]
    with Meanwhile(*beats, lambda: write(url, REST, append=True)) as clock:
        assert call("tail", url, "--wait", 0)[0] == 0
    assert len(clock.slept) == 199


def test_records_apart_from_the_checkpoints_say_nothing_of_an_owner(url, call):
    write(url, FIRST)
    with Meanwhile(*[lambda: None] * 20, lambda: write(url, REST, append=True)):
        assert call("tail", url, "--wait", 5)[0] == 0


def test_nothing_there(url, call):
    with Meanwhile():
        status, out, err = call("tail", url, "--wait", 2)
    assert (status, out) == (1, "")
    assert f"nothing is recorded in {url} yet; waiting for an attempt, 2 s at most" in err
    with Meanwhile(lambda: write(url, [*FIRST, *REST])):
        assert call("tail", url)[0] == 0


def test_a_store_that_does_not_answer_for_a_while(url, call, monkeypatch):
    write(url, FIRST)
    owner(url)
    looks = Follower.new

    def lose() -> None:
        def fail(self):
            raise StorageError("Could not read it.")

        monkeypatch.setattr(Follower, "new", fail)

    def find() -> None:
        monkeypatch.setattr(Follower, "new", looks)
        write(url, REST, append=True)

    with Meanwhile(lose, lambda: None, lambda: None, find):
        status, out, err = call("tail", url)
    assert status == 0
    assert len(out.splitlines()) == len([*FIRST, *REST])
    assert err.count("Could not read it.") == 1
    write(url, FIRST)
    with Meanwhile(lose) as clock:
        assert call("tail", url, "--wait", 3)[0] == 3
    assert len(clock.slept) == 4
    lose()
    assert call("tail", url)[0] == 3, "of a store that never answered nobody knows whether it will"


def test_records_that_cannot_be_read(tmp_path, call):
    url = str(tmp_path / "run")
    save(url, 5)
    Files(url).write("run.json", b'{"run_id": "r"}')
    os.mkdir(f"{url}/{FILE}")  # as unreadable to root as to anybody
    for command in (["tail"], ["report", "-o", os.devnull], ["ls"]):
        status, _, err = call(command[0], url, *command[1:])
        assert status == 3, command
        assert err.startswith(f"monsess: Could not read 'metrics.jsonl' in {url} ("), command
    status, out, err = call("ls", tmp_path)
    assert status == 3
    assert "unreadable" in out
    assert err.count("Could not read 'metrics.jsonl'") == 1


def test_ctrl_c_ends_it(tmp_path):
    url = str(tmp_path / "run")
    write(url, FIRST)
    owner(url)
    heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    program = [sys.executable, "-W", "error", "-m", "monsess", "tail", url, "--interval", "0.1"]
    process = subprocess.Popen(
        [sys.executable, "-c", heed, *program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in FIRST]
        write(url, REST[:1], append=True)
        lines.append(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert [line.split("  ")[1].strip() for line in lines[1:]] == ["step 1", "step 1", "step 2"]
    assert (process.returncode, out, err) == (130, "", "monsess: interrupted\n")


def test_called_wrongly(url, call):
    for wrong in (["--interval", "0"], ["--interval", "nan"], ["--interval", "soon"], ["-n", "-1"], ["--wait", "x"]):
        status, out, err = call("tail", url, *wrong)
        assert (status, out) == (2, ""), wrong
        assert "expected" in err


def test_a_pulse_is_taken_by_the_watch_of_who_looks():
    beating = Owner(
        host="elsewhere",
        boot_id="b",
        pid_namespace="p",
        pid=7,
        start_time="1",
        run_id="r",
        attempt="a1",
        launch=None,
        beat=1,
        interval=10.0,
        restored_from=None,
        since=0.0,
    )
    pulse = Pulse()
    assert pulse.is_dead(beating, 0.0) is False
    assert pulse.is_dead(beating, 31.0) is False
    assert pulse.is_dead(dataclasses.replace(beating, beat=2), 40.0) is False
    assert pulse.is_dead(dataclasses.replace(beating, beat=2), 71.5) is True
    assert pulse.is_dead(None, 72.0) is None
    assert pulse.is_dead(dataclasses.replace(beating, beat=2), 80.0) is False
    assert socket.gethostname() != beating.host


# ---- ls


def test_ls_says_how_the_run_stands(url, call):
    save(url, 1)
    write(url, [*FIRST, *REST])
    status, out, _ = call("ls", url)
    assert status == 0
    assert "run: stopped, LAST_STEP: step 2 is reached, at step 2, heard of" in out
    _, document = call.document("ls", url)
    assert document["runs"] == []
    run = document["run"]
    assert (run["state"], run["step"], run["run_id"]) == ("stopped", 2, written.RUN_ID)
    assert run["heard"] == REST[-1]["time"]
    owner(url)
    assert "run: running, at step 2" in call("ls", url)[1]


def test_ls_of_a_directory_of_runs(url, call):
    for name, records in {
        "ended": [*FIRST, *REST],
        "failed": [*FIRST, end(1, 5, "ERROR", error="ValueError: no")],
        "died": FIRST,
        "running": FIRST,
        "elsewhere": FIRST,
    }.items():
        write(f"{url}/{name}", records)
        if name != "elsewhere":
            Files(f"{url}/{name}").write("run.json", b'{"run_id": "of-run-json"}')
    save(f"{url}/checkpoints-only", 5, 10)
    Files(f"{url}/checkpoints-only").write("run.json", b'{"run_id": "of-run-json"}')
    owner(f"{url}/running")
    Files(url).write("notes/today", b"")
    status, out, err = call("ls", url)
    assert (status, err) == (0, "")
    rows = {row.split()[0]: row.split()[1] for row in out.splitlines()[1:-1]}
    assert rows == {
        "ended": "stopped",
        "failed": "failed",
        "died": "died",
        "running": "running",
        "elsewhere": "unknown",
        "checkpoints-only": "unknown",
    }
    assert out.splitlines()[-1] == f"6 runs in {url}"
    _, document = call.document("ls", url)
    found = {row["folder"]: row for row in document["runs"]}
    assert found["ended"]["step"] == 2
    assert found["ended"]["run_id"] == written.RUN_ID
    assert found["checkpoints-only"]["run_id"] == "of-run-json"
    assert (found["checkpoints-only"]["checkpoints"], found["checkpoints-only"]["newest"]) == (2, 10)
    assert document["run"] is None


def test_ls_reads_the_end_of_long_records_only(tmp_path, call):
    url = str(tmp_path / "run")
    many = [values(step, step, loss=1.0) for step in range(1, 5000)]
    write(url, [start(0, 0), *many, end(5000, 5000)])
    assert os.path.getsize(f"{url}/{FILE}") > 1 << 17
    _, document = call.document("ls", str(tmp_path))
    assert [(row["state"], row["step"]) for row in document["runs"]] == [("stopped", 5000)]
