"""The roll call before a job begins: who is here, who is missing, who does not belong."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import struct
import threading
import time

import pytest

from monsess import roll_call, waiting
from monsess.cluster import Expected
from monsess.errors import ClusterError
from monsess.launch.environment import free_address
from monsess.roll_call import bind_address, hold_or_attend
from monsess.waiting import Waiting


@pytest.fixture
def free():
    """An address on loopback that nobody uses."""
    return free_address()


class Process:
    """One process of a job, as a thread; ``error`` is what it ended with."""

    def __init__(self, address: str, index: int, count: int, limit: float = 10.0, **more) -> None:
        names = tuple(f"worker {k}" for k in range(count))
        job = Expected(count, index, "a test", coordinator=address, names=names)
        self.job = dataclasses.replace(job, **more)
        self.error: ClusterError | None = None
        self.waiting = Waiting(self.job.who, limit)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            hold_or_attend(self.job, self.waiting)
        except ClusterError as error:
            self.error = error

    def ended(self) -> str:
        """Wait for its end; its error, or ``"joined"``."""
        self.thread.join(20)
        assert not self.thread.is_alive()
        return "joined" if self.error is None else str(self.error)


@pytest.fixture(autouse=True)
def _no_service_follows(monkeypatch):
    """Nothing listens on the port afterwards here, where JAX would."""
    monkeypatch.setattr(roll_call, "_REOPEN_SECS", 0.0)


def test_all_meet_whatever_their_order(free):
    processes = [Process(free, index, 5) for index in (3, 1)]
    time.sleep(0.2)
    processes += [Process(free, index, 5) for index in (0, 4)]
    time.sleep(0.2)
    assert all(process.thread.is_alive() for process in processes)
    processes.append(Process(free, 2, 5))
    assert {process.ended() for process in processes} == {"joined"}


def test_the_port_is_free_afterwards(free):
    processes = [Process(free, index, 2) for index in (0, 1)]
    assert {process.ended() for process in processes} == {"joined"}
    with socket.create_server(("127.0.0.1", int(free.rpartition(":")[2]))):
        pass


def test_all_say_who_is_missing(free, monkeypatch, lines):
    monkeypatch.setattr(waiting, "SAY_SECS", 0.3)
    processes = [Process(free, index, 4, limit=1.5) for index in (0, 2)]
    for process, remark in zip(processes, ("", "; process 0 has given up"), strict=True):
        text = process.ended()
        assert text.startswith(f"Process {process.job.index} of 4 waited ")
        assert f"for processes 1 and 3 (worker 1, worker 3) in vain{remark}. " in text
    told = lines()
    for index in (0, 2):
        assert any(
            line.startswith(f"process {index} of 4 waits for processes 1 and 3 (worker 1, worker 3): ") for line in told
        )


def test_whoever_began_first_ends_all_of_them_with_the_same_list(free):
    processes = {index: Process(free, index, 4, limit=limit) for index, limit in ((2, 1.0), (0, 60.0), (3, 60.0))}
    texts = {index: process.ended() for index, process in processes.items()}
    assert all("for process 1 (worker 1) in vain; " in text for text in texts.values()), texts
    assert "; process 2, which began earlier, has given up. " in texts[0]
    assert "; process 0 has given up. " in texts[2]
    assert "; process 0 has given up. " in texts[3]


def test_one_that_wants_to_leave_stays_if_all_are_there(free, monkeypatch):
    with socket.create_server(("127.0.0.1", int(free.rpartition(":")[2]))) as server:
        leaving = Process(free, 1, 3, limit=0.5)
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as lines:
            assert json.loads(lines.readline())["process"] == 1
            connection.sendall(b'{"missing": [2]}\n')
            assert json.loads(lines.readline()) == {"leaving": [2]}
            connection.sendall(b'{"go": true}\n')
            assert leaving.ended() == "joined"


def test_without_process_0_the_others_say_so(free, monkeypatch, lines):
    monkeypatch.setattr(waiting, "SAY_SECS", 0.2)
    text = Process(free, 1, 2, limit=0.8).ended()
    assert f"for process 0 (worker 0) in vain; nothing listens at {free} yet." in text
    assert any(f"waits for process 0: nothing listens at {free} yet" in line for line in lines())


def test_a_name_that_is_not_known_is_waited_for():
    text = Process("nowhere.invalid:4000", 1, 2, limit=0.5).ended()
    assert "the name in nowhere.invalid:4000 is not known here" in text


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"attempt": 0}, "it is left over from attempt 0, this is attempt 1"),
        ({"launch": "other", "attempt": 7}, "it belongs to another launch"),
        ({"count": 3}, "it expects 3 processes, process 0 expects 2"),
        ({"index": 5}, "there is no room for it: the others are numbered from 1 to 1"),
    ],
)
def test_who_does_not_belong_is_refused_and_the_others_still_meet(free, more, why, lines):
    mine = {"launch": "mine", "attempt": 1}
    chief = Process(free, 0, 2, **mine)
    stranger = Process(free, **{"index": 1, "count": 2, **mine, **more})
    assert f"refuses this {stranger.job.who}: {why}. " in stranger.ended()
    assert chief.thread.is_alive()
    assert any(line.endswith(why) and "(pid " in line for line in lines())
    assert [chief.ended() for _ in [Process(free, 1, 2, **mine)]] == ["joined"]


def test_the_number_of_another_is_refused(free):
    chief, first = Process(free, 0, 3), Process(free, 1, 3)
    time.sleep(0.3)
    assert "that number is taken by process 1 from " in Process(free, 1, 3).ended()
    assert [Process(free, 2, 3).ended(), chief.ended(), first.ended()] == ["joined"] * 3


def test_a_refusal_is_part_of_what_process_0_reports(free):
    chief = Process(free, 0, 2, limit=1.0)
    Process(free, 1, 3).ended()
    assert "refused: process 1 from " in chief.ended()


def test_a_process_0_that_is_left_over_makes_room(free):
    old = Process(free, 0, 2, launch="mine", attempt=0)
    time.sleep(0.1)
    new = Process(free, 1, 2, launch="mine", attempt=1)
    assert "is left over from attempt 0" in old.ended()
    assert "process 1 from " in old.ended()
    assert [Process(free, 0, 2, launch="mine", attempt=1).ended(), new.ended()] == ["joined", "joined"]


def test_one_that_goes_away_is_missing_again(free, caplog):
    chief, waiting_one = Process(free, 0, 4), Process(free, 2, 4)
    with connected(free) as connection:
        connection.sendall(json.dumps({"process": 1, "count": 4, "launch": "", "attempt": 0}).encode() + b"\n")
        assert b"missing" in connection.recv(100)
    until(lambda: "went away before the job began" in caplog.text)
    assert chief.thread.is_alive()
    others = [Process(free, index, 4) for index in (1, 3)]
    assert [process.ended() for process in (*others, chief, waiting_one)] == ["joined"] * 4


def test_process_0_may_come_again(free):
    first = Process(free, 1, 2)
    with contextlib.suppress(ClusterError):
        hold_or_attend(Expected(2, 0, "a test", coordinator=free, launch="x"), Waiting("a test", 0.3))
    assert "it belongs to another launch" in first.ended()
    second = Process(free, 1, 2)
    assert [Process(free, 0, 2).ended(), second.ended()] == ["joined", "joined"]


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 10_000, b"[]\n", b'{"process": [], "count": 2}\n', b"null\n", b""]
)
def test_what_is_no_process_of_monsess_harms_nobody(free, junk):
    chief = Process(free, 0, 2)
    with connected(free) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(junk)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1000)
    assert [Process(free, 1, 2).ended(), chief.ended()] == ["joined", "joined"]


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00\x12\x04"])
def test_something_else_at_the_address_is_no_process_0(answer):
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = Process(f"127.0.0.1:{server.getsockname()[1]}", 1, 2, limit=3.0)
        server.settimeout(0.1)
        while process.thread.is_alive():
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(answer)
        assert "is no process 0 that waits for others, such as a job under way" in process.ended()


def test_a_connection_that_is_reset_at_once_is_tried_again(free, monkeypatch):
    begins = socket.create_connection

    def reset(*args, **kwargs):
        connection = begins(*args, **kwargs)
        accepted, _ = server.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
        return connection

    with socket.create_server(("127.0.0.1", int(free.rpartition(":")[2]))) as server:
        monkeypatch.setattr(roll_call.socket, "create_connection", reset)
        assert f"for process 0 (worker 0) in vain; {free} cannot be reached (" in Process(free, 1, 2, limit=0.5).ended()


def test_a_silent_process_0_is_named(monkeypatch, lines):
    monkeypatch.setattr(waiting, "SAY_SECS", 0.3)
    monkeypatch.setattr(roll_call, "_SILENT_SECS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:  # the system accepts, nobody reads
        process = Process(f"127.0.0.1:{server.getsockname()[1]}", 1, 2, limit=1.0)
        assert "for process 0 (worker 0) in vain" in process.ended()
    assert any("process 0 has been silent for" in line for line in lines())


@pytest.mark.parametrize(
    ("address", "bound"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("127.0.0.9:80", ("127.0.0.9", 80)),
        ("localhost:80", ("127.0.0.1", 80)),
        ("[::1]:80", ("::1", 80)),
        ("10.0.0.1:80", ("", 80)),
        ("trainer-0.jobs:80", ("", 80)),
    ],
)
def test_loopback_stays_on_loopback(address, bound, monkeypatch):
    assert bind_address(address) == bound
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "10.0.0.7:81")
    assert bind_address(address) == ("10.0.0.7", 81)
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "0.0.0.0:81")
    assert bind_address(address) == ("", 81)
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "")
    assert bind_address(address) == bound


def test_a_bind_address_that_cannot_be_read_is_named(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "10.0.0.7")
    with pytest.raises(ClusterError, match=r"JAX_COORDINATOR_BIND_ADDRESS.*found '10\.0\.0\.7', which"):
        bind_address("127.0.0.1:80")


@contextlib.contextmanager
def connected(address: str):
    """A connection to process 0, as soon as it listens."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection((host, int(port)), timeout=5)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with connection:
        yield connection


def until(predicate) -> None:
    deadline = time.monotonic() + 10
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.01)
