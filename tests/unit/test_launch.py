"""The launcher's judgement and what it hands to processes, without a process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import signal
import socket
import termios
import threading
import time
import types

import pytest

from monsess import emulation
from monsess.errors import PeerFailedError
from monsess.launch.culprit import Exit, judge
from monsess.launch.environment import environment, free_address
from monsess.launch.output import Output, _Pipe
from monsess.launch.records import Record, read_records, write_record
from monsess.launch.screen import Screen

KILL, ABRT, TERM, INT, SEGV = (
    *(-signal.SIGKILL, -signal.SIGABRT, -signal.SIGTERM, -signal.SIGINT),
    -signal.SIGSEGV,
)
OWN = "ValueError: boom"
CTRL_C = "KeyboardInterrupt"
PEER = "monsess.errors.PeerFailedError: process 0 failed"


@pytest.mark.parametrize(
    ("exits", "records", "signals", "code", "rank"),
    [
        ([(0, 0), (1, 0)], {}, [], 0, None),
        ([(1, 3), (0, 4)], {}, [], 3, 1),
        ([(1, KILL), (0, 1)], {}, [], 137, 1),
        # JAX aborts whom it leaves alone: whoever was killed, or failed, is the cause, seen first or not.
        ([(0, ABRT), (1, KILL)], {}, [], 137, 1),
        ([(0, ABRT), (1, 1)], {}, [], 1, 1),
        ([(0, ABRT), (1, ABRT)], {}, [], 134, 0),
        # A peer of a killed process writes down an error of its own, and may be seen first.
        ([(0, 1), (1, KILL)], {0: (OWN, 99.95)}, [], 137, 1),
        # The chief has failed and stays for a moment; the others leave before it.
        ([(1, 1), (0, 5)], {0: (OWN, 99.0), 1: (PEER, 99.5)}, [], 5, 0),
        ([(1, 1), (0, TERM, signal.SIGTERM)], {0: (OWN, 99.0), 1: (PEER, 99.5)}, [], 1, 0),
        ([(1, 1), (0, 143, signal.SIGTERM)], {0: (OWN, 99.0), 1: (PEER, 99.5)}, [], 1, 0),
        ([(1, 1), (0, KILL, signal.SIGKILL)], {0: (OWN, 99.0), 1: (PEER, 99.5)}, [], 1, 0),
        # Long before the crash of another one.
        ([(1, SEGV), (0, 1)], {0: (OWN, 90.0)}, [], 1, 0),
        # Only peers are left to say anything.
        ([(1, 1), (2, 1)], {1: (PEER, 99.0), 2: (PEER, 99.1)}, [], 1, 1),
        # What a process that ended well wrote down is no cause, nor what nobody is known to have written.
        ([(0, 0), (1, 3)], {0: (OWN, 1.0), 9: (OWN, 1.0)}, [], 3, 1),
        # Told to end from outside: one of them, then by the launcher all.
        ([(1, 143), (0, 143)], {}, [], 143, 1),
        ([(1, TERM), (0, 1)], {}, [], 143, 1),
        ([(0, 143, signal.SIGTERM), (1, TERM, signal.SIGTERM)], {}, [signal.SIGTERM], 143, None),
        ([(0, INT, signal.SIGINT), (1, 130, signal.SIGINT)], {}, [signal.SIGINT], 130, None),
        ([(0, KILL, signal.SIGKILL), (1, KILL, signal.SIGKILL)], {}, [signal.SIGINT] * 2, 130, None),
        # What a process that Ctrl-C ended wrote down is no cause; with another end, or another error, it is.
        (
            [(1, 130, signal.SIGINT), (0, INT, signal.SIGINT)],
            {0: (CTRL_C, 99.9), 1: (CTRL_C, 99.8)},
            [signal.SIGINT],
            130,
            None,
        ),
        ([(0, KILL, signal.SIGKILL)], {0: (CTRL_C, 99.9)}, [signal.SIGINT] * 2, 130, None),
        (  # JAX has aborted one that was left while it ended.
            [(1, ABRT, signal.SIGINT), (0, 130, signal.SIGINT)],
            {0: (CTRL_C, 99.9), 1: (CTRL_C, 99.8)},
            [signal.SIGINT],
            130,
            None,
        ),
        ([(1, SEGV, signal.SIGINT)], {1: (CTRL_C, 99.9)}, [signal.SIGINT], 139, 1),
        ([(1, 1, signal.SIGINT), (0, 130, signal.SIGINT)], {0: (CTRL_C, 99.9)}, [signal.SIGINT], 1, 1),
        ([(1, 130, signal.SIGINT), (0, 130, signal.SIGINT)], {1: (OWN, 99.9)}, [signal.SIGINT], 1, 1),
        ([(1, 130), (0, 143, signal.SIGTERM)], {1: (CTRL_C, 99.9)}, [], 130, 1),
        ([(0, 0, signal.SIGTERM), (1, 0, signal.SIGTERM)], {}, [signal.SIGTERM], 0, None),
        ([(0, 1, signal.SIGTERM), (1, 143, signal.SIGTERM)], {}, [signal.SIGTERM], 1, 0),
    ],
)
def test_judgement(exits, records, signals, code, rank):
    ends = [Exit(who, status, 100 + 0.1 * i, *sent) for i, (who, status, *sent) in enumerate(exits)]
    verdict = judge(ends, {who: Record(error, "", when) for who, (error, when) in records.items()}, signals)
    assert (verdict.code, verdict.rank) == (code, rank)
    assert verdict.end is None or (verdict.end.rank == rank and f"process {rank} failed" in str(verdict))


def test_exits_in_words():
    assert str(Exit(0, 3, 0.0)) == "exit status 3"
    assert str(Exit(0, SEGV, 0.0)) == "killed by SIGSEGV"
    assert str(Exit(0, KILL, 0.0, signal.SIGKILL)) == "killed by SIGKILL"
    assert "out of memory?" in str(Exit(0, KILL, 0.0))
    assert str(Exit(0, -62, 0.0)) == "killed by signal 62"


def made(**changes: object) -> dict[str, str]:
    arguments: dict[str, object] = {
        "coordinator": "127.0.0.1:4711",
        "process_id": 1,
        "process_count": 3,
        "attempt": 2,
        "launch_id": "5f3a",
        "failure_dir": "/tmp/x",
        "base": {"PATH": "/bin", "MONSESS_LOCAL_DEVICES": "9", "XLA_FLAGS": "--xla_dump_to=x"},
    }
    return environment(**{**arguments, **changes})  # type: ignore[arg-type]


def test_environment():
    assert made() == {
        "PATH": "/bin",
        "XLA_FLAGS": "--xla_dump_to=x",
        "PYTHONUNBUFFERED": "1",
        "MONSESS_COORDINATOR": "127.0.0.1:4711",
        "MONSESS_PROCESS_ID": "1",
        "MONSESS_PROCESS_COUNT": "3",
        "MONSESS_ATTEMPT": "2",
        "MONSESS_LAUNCH_ID": "5f3a",
        "MONSESS_FAILURE_DIR": "/tmp/x",
    }
    devices = made(local_devices=4)
    assert devices["MONSESS_LOCAL_DEVICES"] == "4"
    assert devices["JAX_PLATFORMS"] == "cpu"
    assert devices["PJRT_NPROC"] == "16"
    flags = devices["XLA_FLAGS"].split()
    assert flags[:2] == ["--xla_force_host_platform_device_count=4", "--xla_dump_to=x"]
    assert made(base={"PYTHONUNBUFFERED": "", "PJRT_NPROC": "64"}, local_devices=1)["PJRT_NPROC"] == "64"
    assert made(base={"PYTHONUNBUFFERED": ""})["PYTHONUNBUFFERED"] == ""
    # Both would win over what the launcher says.
    exported = {"JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:81", "JAX_NUM_CPU_DEVICES": "4"}
    assert "JAX_COORDINATOR_BIND_ADDRESS" not in made(base=exported)
    assert made(base=exported)["JAX_NUM_CPU_DEVICES"] == "4"
    assert made(base=exported, local_devices=2)["JAX_NUM_CPU_DEVICES"] == "-1"  # by the flag


def test_flags_are_set_once():
    once = emulation.flags("", 4)
    assert emulation.flags(once, 4) == once
    assert emulation.flags(once, 2).split()[0].endswith("=2")
    assert "device_count" not in emulation.flags(once)
    mine = "--xla_cpu_collective_call_terminate_timeout_seconds=7"
    assert mine in emulation.flags(mine, 2)
    assert emulation.flags(mine, 2).count("terminate") == 1


def test_jax_s_own_number_of_devices_does_not_count():
    assert emulation.environment(4, {"JAX_NUM_CPU_DEVICES": "3"})["JAX_NUM_CPU_DEVICES"] == "-1"
    assert "JAX_NUM_CPU_DEVICES" not in emulation.environment(4, {})


def test_a_free_address_can_be_listened_at():
    addresses = [free_address() for _ in range(20)]
    assert len(set(addresses)) > 10
    for address in addresses:
        host, port = address.split(":")
        with socket.socket() as server:
            server.bind((host, int(port)))


def test_records(tmp_path, monkeypatch):
    assert not write_record(ValueError("no launcher"))
    monkeypatch.setenv("MONSESS_FAILURE_DIR", str(tmp_path / "gone"))
    monkeypatch.setenv("MONSESS_PROCESS_ID", "3")
    assert not write_record(ValueError("no folder"))
    monkeypatch.setenv("MONSESS_FAILURE_DIR", str(tmp_path))
    with pytest.raises(ValueError) as caught:
        raise ValueError("bo\udc80om at sftp://me:secret@host")
    assert write_record(caught.value)
    assert not write_record(PeerFailedError("a consequence")), "the first one stays"
    assert sorted(os.listdir(tmp_path)) == ["3.json"]
    assert "sftp://***@host" in (tmp_path / "3.json").read_text()
    assert "secret" not in json.loads((tmp_path / "3.json").read_text())["error"]
    assert json.loads((tmp_path / "3.json").read_text())["process"] == 3
    monkeypatch.setenv("MONSESS_PROCESS_ID", "4")
    assert write_record(PeerFailedError("process 3 failed"))

    (tmp_path / "0.json").write_text('{"error": "torn')
    (tmp_path / "1.json").write_text("[]")
    (tmp_path / "2.json").write_text('{"error": "", "time": "?"}')
    (tmp_path / "x.json").write_text('{"error": "", "time": 1}')
    (tmp_path / "5.json").write_text('{"error": "", "time": 1}')
    records = read_records(str(tmp_path))
    assert sorted(records) == [3, 4, 5]
    assert records[3].error.startswith("ValueError: bo")
    assert "raise ValueError" in records[3].traceback
    assert abs(records[3].time - time.time()) < 60
    assert [records[rank].blames_a_peer for rank in (3, 4, 5)] == [False, True, False]
    assert read_records(str(tmp_path / "gone")) == {}


def test_lines_of_processes(tmp_path):
    out, err = io.StringIO(), io.StringIO()
    with open(tmp_path / "log", "wb", buffering=0) as file:
        screen = Screen(out, err)
        output = Output(screen, {7: file})
        (read_out, write_out), (read_err, write_err) = os.pipe(), os.pipe()
        output.add(7, read_out, read_err)
        output.start()
        written = b"one\ntw" + b"o\r\n" + b"10%\r20%\r30%\r\n" + b"\xff\xe2\x98\x83\n" + b"x" * 70_000 + b"\nlast"
        for start in range(0, len(written), 1000):
            os.write(write_out, written[start : start + 1000])
        os.write(write_err, b"wrong\n")
        os.close(write_out)  # the other one stays open, as a process that was left behind would have it
        output.finish()
        screen.close()
        os.close(write_err)
    lines = out.getvalue().split("\n")
    assert lines[:4] == ["[7] one", "[7] two", "[7] 30%", "[7] \\xff☃"]
    assert "".join(line[4:] for line in lines[4:-2]) == "x" * 70_000
    assert lines[-2:] == ["[7] last", ""]
    assert err.getvalue() == "[7] wrong\n"
    assert (tmp_path / "log").read_bytes().replace(b"wrong\n", b"") == written
    assert {"last", "wrong"} <= set(output.tail(7))


def test_an_unfinished_line_is_shown(monkeypatch):
    monkeypatch.setattr("monsess.launch.output._PATIENCE_SECS", 0.1)
    out = io.StringIO()
    screen = Screen(out, io.StringIO())
    output = Output(screen, {})
    pipes = [os.pipe(), os.pipe()]
    output.add(0, pipes[0][0], pipes[1][0])
    output.start()
    os.write(pipes[0][1], b"1/9\r2/9")
    until = time.monotonic() + 30
    while out.getvalue() != "[0] 2/9\n":
        assert time.monotonic() < until, out.getvalue()
        time.sleep(0.02)
    os.write(pipes[0][1], b"\r3/9")
    for _, write in pipes:
        os.close(write)
    output.finish()
    screen.close()
    assert out.getvalue() == "[0] 2/9\n[0] 3/9\n"


def test_a_line_that_comes_in_parts_is_one_however_long_nothing_was_written(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("monsess.launch.output.time", types.SimpleNamespace(monotonic=lambda: now[0]))
    pipe = _Pipe(0, 1, -1)
    now[0] = 60.0
    assert (pipe.feed(b"devices"), pipe.overdue()) == ([], [])  # print() writes its arguments one after the other
    now[0] = 60.5
    assert (pipe.feed(b" "), pipe.overdue()) == ([], [])
    assert pipe.feed(b"2\n7") == [b"devices 2"]
    now[0] = 61.4
    assert pipe.overdue() == []
    now[0] = 61.6
    assert (pipe.overdue(), pipe.overdue()) == ([b"7"], [])


def test_the_news_of_an_end_come_after_its_last_lines():
    err = io.StringIO()
    screen = Screen(io.StringIO(), err)
    output = Output(screen, {})
    outs, errs = [os.pipe(), os.pipe()], [os.pipe(), os.pipe()]
    for rank in (0, 1):
        output.add(rank, outs[rank][0], errs[rank][0])
    output.note_after(1, "it ended")  # before anything was read
    os.write(errs[1][1], b"why\nno newline")
    os.close(errs[1][1])
    os.close(outs[1][1])
    output.start()
    until = time.monotonic() + 30
    while "it ended" not in err.getvalue():  # though the other process goes on
        assert time.monotonic() < until, err.getvalue()
        time.sleep(0.02)
    output.note_after(0, "somebody keeps its pipes")
    while "keeps" not in err.getvalue():
        assert time.monotonic() < until, err.getvalue()
        time.sleep(0.02)
    os.close(outs[0][1])
    os.close(errs[0][1])
    output.finish()
    output.note_after(0, "late")
    screen.close()
    shown = ["[1] why", "[1] no newline", "monsess: it ended", "monsess: somebody keeps its pipes", "monsess: late", ""]
    assert err.getvalue().split("\n") == shown


def test_a_screen_that_is_gone_or_knows_no_unicode():
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    class Plain(io.StringIO):
        def write(self, text: str) -> int:
            text.encode("ascii")
            return super().write(text)

    err = Plain()
    screen = Screen(Gone(), err)
    screen.line(1, "lost")
    screen.line(2, "é")
    screen.note("a\nb")
    screen.close()
    assert err.getvalue() == "\\xe9\nmonsess: a\nmonsess: b\n"


class Piped:
    """A pipe: a stream to write to, and all that comes out of it."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self.source, sink = os.pipe()
        self.stream = os.fdopen(sink, "w", encoding=encoding)

    def fill(self) -> int:
        """Write until there is no room; how many bytes that took."""
        fd = self.stream.fileno()
        os.set_blocking(fd, False)
        filled = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                filled += os.write(fd, b"x" * 4096)
        os.set_blocking(fd, True)
        return filled

    def read(self, size: int) -> bytes:
        """So many bytes."""
        found = b""
        while len(found) < size:
            found += os.read(self.source, size - len(found))
        return found

    def close(self) -> bytes:
        """All that is left."""
        self.stream.close()
        with open(self.source, "rb") as source:
            return source.read()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("monsess.launch.screen._DRAIN_SECS", 0.5)


def test_nobody_waits_for_a_reader_that_does_not_read(impatient):
    out, err = Piped(), Piped()
    filled = out.fill()
    screen = Screen(out.stream, err.stream)
    screen.line(1, "one")
    screen.note("two")
    assert err.read(13) == b"monsess: two\n", "whoever reads the other stream does not wait either"
    assert screen.has_room(0)
    screen.line(1, "x" * 100_000)
    assert not screen.has_room(0.01)
    begun = time.monotonic()
    screen.close()
    assert time.monotonic() - begun < 5
    screen.line(1, "after the end")
    assert (len(out.close()), err.close()) == (filled, b"")


def test_a_reader_that_is_slow_misses_nothing(impatient):
    out = Piped("ascii")
    out.stream.write("before\n")
    screen = Screen(out.stream, out.stream)
    expected = ["before"]
    for number in range(300):
        expected.append(f"{number} {'é' if number % 50 == 0 else 'e'}{'x' * (number * 7)}")
        screen.line(1 + number % 2, expected[-1])
    found, read = b"", threading.Event()

    def reads() -> None:
        nonlocal found
        while data := os.read(out.source, 8192):
            found += data
            time.sleep(0.01)
        read.set()

    threading.Thread(target=reads, daemon=True).start()
    screen.close()
    out.stream.close()
    assert read.wait(30)
    os.close(out.source)
    assert found.decode("ascii").replace("\\xe9", "é").split("\n") == [*expected, ""], "in the order of the calls"


def test_a_terminal_that_is_stopped_holds_nobody(impatient):
    leader, follower = pty.openpty()
    termios.tcflow(follower, termios.TCOOFF)  # Ctrl-S
    with open(follower, "w") as stream:
        screen = Screen(stream, stream)
        screen.note("one")
        assert select.select([leader], [], [], 0.3)[0] == []
        termios.tcflow(follower, termios.TCOON)
        assert os.read(leader, 100) == b"monsess: one\r\n"
        termios.tcflow(follower, termios.TCOOFF)
        screen.note("two")
        begun = time.monotonic()
        screen.close()
        assert time.monotonic() - begun < 5
        termios.tcflow(follower, termios.TCOON)
    os.close(leader)


def test_a_pipe_whose_reader_is_gone_is_given_up():
    out = Piped()
    os.close(out.source)
    screen = Screen(out.stream, io.StringIO())
    screen.line(1, "lost")
    assert screen.has_room(30)
    screen.close()
    out.stream.write("goes nowhere")
    out.stream.close()
