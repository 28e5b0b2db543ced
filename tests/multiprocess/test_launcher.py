"""``monsess run``: the first failure ends all, restarts, signals, and nobody outlives the launcher."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from launches import LIMIT, NOTES, STUBBORN, Launches, signalled, wait_until

from monsess.commands import main
from monsess.errors import ClusterError
from monsess.launch import local

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = pytest.mark.timeout(180)

# A process that says that it is there, and ends 143 when told to.
PLIANT = """
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
open(here + f'there-{rank}', 'w').close()
"""
FOREVER = "\nwhile True: time.sleep(0.05)\n"


@pytest.fixture
def launches(tmp_path):
    with Launches(tmp_path) as launches:
        yield launches


@pytest.fixture
def quick(monkeypatch):
    """No polite waiting."""
    monkeypatch.setattr("monsess.launch.attempt._HEAD_START_SECS", 0.1)
    monkeypatch.setattr("monsess.launch.local._FIRST_BACKOFF_SECS", 0.1)


def test_every_process_knows_who_it_is(launches, capfd, quick):
    script = """
import json
mine = {name[8:]: value for name, value in os.environ.items() if name.startswith('MONSESS_') and 'TEST' not in name}
assert os.path.isdir(mine['FAILURE_DIR']) and sys.stdin.read() == '' and signal.getsignal(signal.SIGTERM) == 0
print(json.dumps(mine))
print('to stderr', file=sys.stderr)
sys.exit(attempt == 0)
"""
    assert launches.run(script, 3, max_restarts=1, devices_per_process=2) == 0
    out, err = capfd.readouterr()
    found: dict[tuple[str, int], dict[str, str]] = {}
    for line in out.splitlines():
        prefix, _, text = line.partition(" ")
        found[prefix, int(json.loads(text)["ATTEMPT"])] = json.loads(text)
    assert sorted(found) == [(f"[{rank}]", attempt) for rank in range(3) for attempt in range(2)]
    for (prefix, attempt), mine in found.items():
        assert (f"[{mine['PROCESS_ID']}]", mine["PROCESS_COUNT"], mine["LOCAL_DEVICES"]) == (prefix, "3", "2")
        assert mine["COORDINATOR"] == found["[0]", attempt]["COORDINATOR"]
    assert len({mine["LAUNCH_ID"] for mine in found.values()}) == 1
    assert len({mine["COORDINATOR"] for mine in found.values()}) == 2
    assert err.count("to stderr") == 6
    assert "restart 1 of 1" in err
    assert "all processes ended well, in attempt 1" in err


def test_the_first_failure_decides(launches, capfd):
    script = (
        NOTES
        + PLIANT
        + "if rank == 1:\n"
        + "    while not os.path.exists(here + 'there-0'): time.sleep(0.01)\n"
        + "    note('failed')\n"
        + "    1 / 0"
        + FOREVER
    )
    assert launches.run(script, 3, max_restarts=0) == 1
    assert time.monotonic() - launches.noted("failed") < 10, "who ends when told to is not waited for"
    err = capfd.readouterr().err
    end = err[err.index("monsess: process 1 failed") :]
    assert "exit status 1" in end
    assert "monsess:   [1] ZeroDivisionError: division by zero" in end


def test_who_does_not_listen_is_killed_within_the_limit(launches, quick, capfd):
    script = (
        NOTES
        + STUBBORN
        + "if rank == 0:\n"
        + "    while not os.path.exists(here + 'there-1'): time.sleep(0.01)\n"
        + "    note('fails')\n"
        + "    sys.exit(7)"
    )
    assert launches.run(script + FOREVER, 2, failure_timeout_secs=5) == 7
    assert time.monotonic() - launches.noted("fails") < 5
    assert (launches.folder / f"heard-1-{signal.SIGTERM:d}").exists()
    assert "SIGKILL sent to process 1" in capfd.readouterr().err


def test_a_killed_process_is_named(launches, capfd, quick):
    script = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)" + FOREVER
    assert launches.run(script) == 137
    assert "process 1 failed, killed by SIGKILL (out of memory?)" in capfd.readouterr().err


def test_the_cause_is_named_though_its_peer_leaves_first(launches, capfd, quick):
    script = """
import json
def record(error, trace):
    with open(os.environ['MONSESS_FAILURE_DIR'] + f'/{rank}.json', 'w') as file:
        json.dump({'process': rank, 'error': error, 'traceback': trace, 'time': time.time()}, file)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == 0:
    record('ValueError: boom', 'Traceback\\n  in the step\\nValueError: boom')
    open(here + 'failed', 'w').close()
    while not os.path.exists(here + 'left'): time.sleep(0.01)
    sys.exit(5)
while not os.path.exists(here + 'failed'): time.sleep(0.01)
record('monsess.errors.PeerFailedError: process 0 failed', '')
open(here + 'left', 'w').close()
sys.exit(1)
"""
    assert launches.run(script) == 5
    err = capfd.readouterr().err
    assert "process 0 failed, exit status 5: ValueError: boom;" in err
    assert "its traceback:\nmonsess:   [0] Traceback\nmonsess:   [0]   in the step\n" in err


def test_restarts_have_an_end(launches, capfd, quick):
    assert launches.run("sys.exit(3)", 2, max_restarts=2) == 3
    err = capfd.readouterr().err
    assert err.count("starting 2 processes") == 3
    assert "restart 2 of 2 in 0.2 s" in err, "the back-off doubles"
    assert "the last of 3" in err


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(2)", 2), ("sys.exit(130)", 130), ("sys.exit(143)", 143), ("os.kill(os.getpid(), 15)", 143)],
)
def test_nothing_is_started_again_after(end, code, launches, capfd, quick):
    assert launches.run(f"if rank == 1: {end}\ntime.sleep(600)", 2, max_restarts=5) == code
    err = capfd.readouterr().err
    assert err.count("starting 2 processes") == 1
    assert ("process 1 was told to end" in err) == (code != 2)


def test_logs(launches, quick, tmp_path, capfd):
    script = "print('attempt', attempt)\nsys.stderr.write('no newline')\nsys.exit(attempt == 0)"
    assert launches.run(script, 2, max_restarts=1, log_dir=str(tmp_path / "logs" / "here")) == 0
    for rank in range(2):
        text = (tmp_path / "logs" / "here" / f"process-{rank}.log").read_text()
        heads = [line for line in text.splitlines() if "monsess run: launch" in line]
        assert len(heads) == 2
        assert "attempt 1, " in heads[1]
        assert text.count("no newline") == 2
    (tmp_path / "file").touch()
    with pytest.raises(ClusterError, match="file"):
        launches.run("", 1, log_dir=str(tmp_path / "file" / "logs"))


def test_what_a_process_has_started_ends_with_it(launches, quick):
    script = """
import subprocess
keeps_the_pipe = subprocess.Popen(['sleep', '600'])
time.sleep(0.1)
note(f'ends-{rank}')
"""
    assert launches.run(NOTES + script, 2) == 0
    assert time.monotonic() - max(launches.noted(f"ends-{rank}") for rank in range(2)) < 15
    assert launches.left() == {}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_passed_on(number, code, launches, capfd):
    script = STUBBORN + f"while not os.path.exists(here + f'heard-{{rank}}-{number:d}'): time.sleep(0.01)\n"
    there = [launches.folder / f"there-{rank}" for rank in range(2)]
    handler = signal.getsignal(number)
    with signalled(number, lambda: all(file.exists() for file in there)):
        assert launches.run(script + f"sys.exit({code})", 2, max_restarts=3) == code
    assert signal.getsignal(number) == handler
    err = capfd.readouterr().err
    assert err.count("starting 2 processes") == 1
    assert f"{number.name} passed on to processes 0, 1" in err
    for file in launches.folder.glob("*-*"):
        file.unlink()
    with signalled(number, lambda: all(file.exists() for file in there)):
        assert launches.run(script, 2) == 0, "a job that was done all the same"


def test_an_error_after_a_signal_is_an_error(launches, capfd):
    script = STUBBORN + "while not os.path.exists(here + f'heard-{rank}-15'): time.sleep(0.01)\n"
    there = [launches.folder / f"there-{rank}" for rank in range(2)]
    with signalled(signal.SIGTERM, lambda: all(file.exists() for file in there)):
        assert launches.run(script + "sys.exit(1 if rank else 143)", 2, max_restarts=3) == 1
    assert "process 1 failed, exit status 1" in capfd.readouterr().err


def test_a_second_interrupt_kills(launches):
    there = [launches.folder / f"there-{rank}" for rank in range(2)]
    heard = [launches.folder / f"heard-{rank}-2" for rank in range(2)]
    with signalled(signal.SIGINT, lambda: all(file.exists() for file in there)):
        with signalled(signal.SIGINT, lambda: all(file.exists() for file in heard)):
            assert launches.run(STUBBORN + FOREVER, 2) == 130


def test_a_signal_while_nothing_runs(launches, capfd, monkeypatch):
    monkeypatch.setattr("monsess.launch.local._FIRST_BACKOFF_SECS", 600.0)
    waits, wait = threading.Event(), local._Launch._asked_within

    def waiting(launch: local._Launch, seconds: float) -> bool:
        waits.set()
        return wait(launch, seconds)

    monkeypatch.setattr(local._Launch, "_asked_within", waiting)
    with signalled(signal.SIGTERM, waits.is_set):
        assert launches.run("sys.exit(1)", 1, max_restarts=1) == 143
    err = capfd.readouterr().err
    assert "restart 1 of 1 in 600 s" in err
    assert err.count("starting 1 process") == 1


def test_outside_the_main_thread(launches):
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(launches.run("sys.exit(rank)", 2)))
    thread.start()
    thread.join(LIMIT)
    assert codes == [1]


def test_what_cannot_be_run(launches, capfd):
    assert local.run(["/no/such/program"], 1, env=launches.env) == 127
    assert "could not run /no/such/program" in capfd.readouterr().err
    for wrong in ({"processes": 0}, {"processes": True}, {"max_restarts": -1}, {"devices_per_process": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            local.run(["true"], **{"processes": 1, **wrong})
    for command in ("true", []):
        with pytest.raises(ValueError, match="expected a list"):
            local.run(command, 1)
    with pytest.raises(ValueError, match="failure_timeout_secs"):
        local.run(["true"], 1, failure_timeout_secs=0)


def test_the_command_line(launches, tmp_path):
    environment = {name: value for name, value in launches.env.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    launches.env = environment
    text = "import os, sys\nprint(sys.argv[1:], os.environ.get('JAX_PLATFORMS'), __name__)\nsys.exit(len(sys.argv) - 1)"
    (tmp_path / "script.py").write_text(text)
    process = launches.program("-n", 1, "--max-restarts", 0, "script.py", "-n", "7", "--", "--max-restarts")
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (4, "[0] ['-n', '7', '--', '--max-restarts'] None __main__\n"), err
    process = launches.program("-n", 2, "-m", "script")
    out, _ = process.communicate(timeout=LIMIT)
    assert (process.returncode, sorted(out.split("\n"))) == (0, ["", "[0] [] None __main__", "[1] [] None __main__"])


@pytest.mark.parametrize(
    "wrong",
    [
        ["-n", "2"],
        ["script.py"],
        ["-n", "0", __file__],
        ["-n", "2", "--max-restarts", "x", __file__],
        ["-n", "2", "no"],
    ],
)
def test_wrong_calls(wrong, capsys):
    assert main(["run", *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("moment", ["start", "run", "restart"])
def test_nobody_outlives_a_killed_launcher(moment, launches, tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, signal, subprocess, sys, time\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
        "rank, attempt = os.environ['MONSESS_PROCESS_ID'], os.environ['MONSESS_ATTEMPT']\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "open(f'there-{rank}-{attempt}', 'w').close()\n"
        "while attempt == '1' or not os.path.exists('fail'): time.sleep(0.01)\n"
        "sys.exit(1)\n"
    )
    process = launches.program("-n", 2, "--max-restarts", 1, "script.py")
    assert process.stderr is not None
    assert "starting" in process.stderr.readline()
    if moment == "start":
        time.sleep(random.random() * 0.2)
    else:
        launches.wait_for("there-0-0")
        launches.wait_for("there-1-0")
    if moment == "restart":
        (tmp_path / "fail").touch()
        launches.wait_for("there-1-1")
    os.kill(process.pid, signal.SIGKILL)
    process.wait(LIMIT)
    begun = time.monotonic()
    wait_until(lambda: not launches.alive(), "the end of all processes")
    assert time.monotonic() - begun < 10
    wait_until(lambda: not list(tmp_path.glob("monsess-run-*")), "the removal of the folder")
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("script", ["launched_session.py", "launched_plain.py"])
def test_a_training_that_is_killed_three_times_ends_in_the_same_bits(script, launches, tmp_path, capfd, figures, seed):
    """In a session; and in plain JAX, which hangs or is aborted where a process is lost, and does not hear SIGTERM."""
    steps = 200  # seconds after the last of the kills

    def train(folder: Path, **options: object) -> list[str]:
        folder.mkdir()
        command = [sys.executable, str(SUPPORT / script), str(folder), str(steps)]
        options = {"devices_per_process": 2, "env": launches.env, **options}
        assert local.run(command, 2, **options) == 0  # type: ignore[arg-type]
        return [(folder / f"final-{rank}").read_text() for rank in range(2)]

    straight = train(tmp_path / "straight")
    assert straight[0] == straight[1]

    killed = []
    over = threading.Event()
    chance = random.Random(f"{seed} {script}")

    def kill() -> None:
        for attempt in range(3):
            victim = chance.randrange(2)
            file = tmp_path / "killed" / f"step-{attempt}-{victim}"
            while len(killed) == attempt:
                if over.wait(0.02):
                    return
                pid, step = file.read_text().split() if file.exists() else ("", "0")
                if int(step) > 10 + 15 * attempt:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                        killed.append((victim, int(step), time.monotonic()))

    killer = threading.Thread(target=kill)
    killer.start()
    begun = time.monotonic()
    try:
        assert train(tmp_path / "killed", max_restarts=3) == straight
    finally:
        over.set()
        killer.join()
    assert len(killed) == 3
    err = capfd.readouterr().err
    assert err.count("killed by SIGKILL") >= 3
    assert "all processes ended well, in attempt 3" in err
    kills = [(who, at, round(when - begun, 1)) for who, at, when in killed]
    figures.append(f"monsess run, {script}, MONSESS_SEED={seed}: killed (process, step, after s): {kills}; equal bits")
