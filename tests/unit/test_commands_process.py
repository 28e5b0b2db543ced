"""The command line as a program: terminals, pipes, signals, credentials, and no device started."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from checkpoints import fresh, save
from command_line import CommandLine
from written import three_kills, write

from monsess.commands import COMMANDS, main
from monsess.commands.console import Cell, Console, age_text, size_text
from monsess.errors import StorageError
from monsess.storage_advice import advice_for

PROGRAM = [sys.executable, "-W", "error", "-m", "monsess"]
#: Tests that run in the background ignore Ctrl-C, and what they start would do so, too.
HEEDING_CTRL_C = [
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])",
]


@pytest.fixture
def call(capsys) -> CommandLine:
    return CommandLine(capsys)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_no_device_is_started(tmp_path):
    url = tmp_path / "run"
    save(str(url), 5, 10)
    write(str(url), three_kills())
    code = """
        import sys
        from jax._src import xla_bridge
        from monsess.commands import COMMANDS, _as_a_program, main
        _as_a_program()
        for command in COMMANDS:
            if not command.takes_url:
                continue
            status = main([command.name, sys.argv[1], *command.example])
            assert status == 0, command
            computing = {"cpu"} if command.name in ("check-store", "evaluate") else set()
            assert set(xla_bridge._backends) <= computing, command
        """
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(url)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


def test_a_closed_pipe_is_quiet(tmp_path):
    url = str(tmp_path / "run")
    save(url, 5)
    process = subprocess.Popen([*PROGRAM, "ls", url], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr as errors:
        assert errors.read() == b""
    assert process.wait(timeout=60) == 141


@pytest.mark.parametrize(
    ("number", "status", "size", "moment"),
    [
        (signal.SIGINT, 130, "150", "run/.monsess-check-*/big/object"),
        (signal.SIGTERM, 143, "100000", "monsess-check-*/random-*"),
    ],
    ids=["SIGINT", "SIGTERM"],
)
def test_an_interrupted_check_cleans_up(number, status, size, moment, tmp_path):
    url = tmp_path / "run"
    process = subprocess.Popen(
        [*HEEDING_CTRL_C, *PROGRAM, "check-store", str(url), "--size-mb", size],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(moment)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == status, errors
    assert errors == ("monsess: interrupted\n" if number == signal.SIGINT else "")
    assert not url.exists()
    assert list(tmp_path.iterdir()) == []


def test_errors_are_one_line(call, monkeypatch):
    def fails(*_: object) -> None:
        raise StorageError("Could not list x.\nBecause.")

    monkeypatch.setattr("monsess.checkpoint.store.CheckpointStore._look", fails)
    assert call("ls", "memory://x") == (3, "", "monsess: Could not list x.\\nBecause.\n")

    def breaks(*_: object) -> None:
        raise ZeroDivisionError("in sftp://user:secret@host")

    monkeypatch.setattr("monsess.checkpoint.store.CheckpointStore._look", breaks)
    status, out, err = call("ls", "memory://x")
    assert (status, out) == (3, "")
    assert err == "monsess: this should not happen: ZeroDivisionError: in sftp://***@host\n"


def test_advice_fits_the_command_line(call, monkeypatch):
    def fails(error: Exception) -> str:
        def look(*_: object) -> None:
            raise StorageError(f"Could not list x (storage_options). {advice_for(error, 's3://x', False)}")

        monkeypatch.setattr("monsess.checkpoint.store.CheckpointStore._look", look)
        status, _, err = call("ls", "memory://x")
        assert status == 3
        return err

    class NoCredentialsError(Exception):
        pass

    shell = "the storage options (--storage-options FILE, or MONSESS_STORAGE_OPTIONS)"
    unknown = TypeError("__init__() got an unexpected keyword argument 'anon_'")
    assert fails(unknown).startswith(f"monsess: Could not list x (storage_options). Take that name out of {shell}")
    assert f"Give credentials in {shell}" in fails(NoCredentialsError("Unable to locate credentials"))
    assert f"Check the URL, {shell}" in fails(OSError("gone"))


def test_usage_errors(call, tmp_path, monkeypatch):
    url = "sftp://user:hunter2@host/run"
    for wrong in (
        [],
        ["nosuch", url],
        ["ls"],
        ["ls", url, "more"],
        ["ls", url, "--lastt", "3"],
        ["show", url, "-1"],
        ["show", url, "007"],
        ["verify", url, url],
        ["ls", "s3:/slip"],
    ):
        status, out, err = call(*wrong)
        assert (status, out) == (2, ""), wrong
        assert err.startswith("monsess: ")
        assert err.count("\n") == 1
        assert "hunter2" not in err
    assert "did you mean --last?" in call("ls", url, "--lastt", "3")[2]
    assert "monsess ls --help" in call("ls", url, "--lastt", "3")[2]
    assert "two steps can be compared, found three" in call("diff", url, 5, 6, 7)[2]
    assert call("--help")[0] == 0
    assert call("--version")[1].startswith("monsess ")

    options = tmp_path / "options.json"
    for text in ("{", "[1]", '{"secret": "hunter2"'):
        options.write_text(text)
        status, _, err = call("ls", "memory://x", "--storage-options", options)
        assert (status, "hunter2" in err) == (2, False)
        monkeypatch.setenv("MONSESS_STORAGE_OPTIONS", text)
        status, _, err = call("ls", "memory://x")
        assert (status, "hunter2" in err) == (2, False)
        assert "MONSESS_STORAGE_OPTIONS" in err
        monkeypatch.delenv("MONSESS_STORAGE_OPTIONS")
    assert call("ls", "memory://x", "--storage-options", tmp_path / "nothing")[0] == 2


def test_storage_options_arrive(call, tmp_path, monkeypatch):
    options = tmp_path / "options.json"
    options.write_text(json.dumps({"root": str(tmp_path / "a")}))
    monkeypatch.setenv("MONSESS_STORAGE_OPTIONS", json.dumps({"root": str(tmp_path / "b")}))
    for folder in ("a", "b"):
        save(str(tmp_path / folder / "run"), 5 if folder == "a" else 7)
    assert call.document("ls", "faulty://run", "--storage-options", options)[1]["steps"][0]["step"] == 5
    assert call.document("ls", "faulty://run")[1]["steps"][0]["step"] == 7
    both = ("diff", "faulty://run", 7, "faulty://run", 5, "--other-storage-options", options)
    assert call(*both)[0] == 1
    assert call("diff", "faulty://run", 7, "faulty://run", 5)[0] == 1, "there is no step 5 in the other one"


def test_colour_on_a_terminal_only(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    row = ("5", Cell("sound", "good"))

    def written(out: io.StringIO) -> str:
        Console(out=out, err=io.StringIO()).table(("STEP", "RESULT"), [row], ">")
        return out.getvalue()

    assert written(Terminal()) == "\x1b[1mSTEP\x1b[0m  \x1b[1mRESULT\x1b[0m\n   5  \x1b[32msound\x1b[0m\n"
    plain = "STEP  RESULT\n   5  sound\n"
    assert written(io.StringIO()) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert written(Terminal()) == plain
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert written(Terminal()) == plain


def test_progress_is_taken_away_again(monkeypatch):
    monkeypatch.setattr("monsess.commands.console._TICK_SECS", 0.01)
    err, out = Terminal(), io.StringIO()
    console = Console(out=out, err=err)
    with console.progress("reading step 5"):
        while "reading step 5 … 0 s" not in err.getvalue():
            time.sleep(0.01)
        console.note("something")
    assert "\rmonsess: something\n" in err.getvalue()
    assert err.getvalue().endswith("\r") or "reading" not in err.getvalue().rpartition("\n")[2]
    silent = io.StringIO()
    with Console(out=out, err=silent).progress("reading"):
        time.sleep(0.05)
    assert silent.getvalue() == out.getvalue() == ""


def test_names_cannot_command_the_terminal(capsys):
    console = Console()
    console.table(("A", "B"), [("x\x1b[2J\n", "ünï☃"), ("漢字", "y")])
    console.say("\x07")
    assert capsys.readouterr().out == "A           B\nx\\x1b[2J\\n  ünï☃\n漢字        y\n\\x07\n"


def test_amounts():
    assert [size_text(n) for n in (0, 999, 1000, 99_499, 99_500, 123_456_789, 10**18)] == [
        *("0 B", "999 B", "1.0 kB", "99.5 kB", "100 kB", "123 MB", "1000 PB")
    ]
    assert [age_text(s) for s in (0, 119, 121, 7199, 7201, 10**6)] == [
        "0 s",
        "119 s",
        "2 min",
        "120 min",
        "2 h",
        "12 d",
    ]
    assert age_text(-5) == "in the future"


def test_a_stranger_in_run_json_is_no_reason_to_fail(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = fresh("memory")
    store = save(url, 5)
    write(url, three_kills())
    store._storage.write("run.json", b"[]")
    store._storage.write("owner.json", b"torn")
    for command in (command for command in COMMANDS if command.takes_url):
        status, _, err = call(command.name, url, *command.example)
        assert status == (1 if command.name == "prune" else 0), command.name  # somebody may be training there
        lines = err.splitlines()
        assert all(line.startswith("monsess: ") for line in lines), "as all that a command says"
        assert len(lines) == len(set(lines)), "each warning once"
    store._storage.write("run.json", b"[]")
    assert "run.json" in call("ls", url)[2]


def test_the_module_is_a_program_too():
    done = subprocess.run([*PROGRAM, "ls", "memory://nothing"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")
    assert main(["--version"]) == 0
