"""Who is here: before JAX joins the processes of a job, they report at the address of process 0.

JAX's own join cannot tell who is missing, ends the process from native code when its time is over, and lets in whoever
calls itself process 1, be it left over from an earlier attempt. So process 0 first listens there itself, hears who
comes, tells all of them who is missing, and refuses who does not belong. Once all are here it frees the port, on which
JAX's coordination service then listens. Each message is one line of JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any

from monsess.cluster import Expected
from monsess.cluster_spec import split_address
from monsess.errors import ClusterError
from monsess.log import logger
from monsess.waiting import Waiting

_TELL_SECS = 1.0
_SILENT_SECS = 5.0
_CONNECT_SECS = 5.0
_LOOK_SECS = 0.2
_FIRST_PAUSE_SECS = 0.02
_LONGEST_PAUSE_SECS = 0.5
_REOPEN_SECS = 5.0
_ANSWER_SECS = 2.0
_BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
_LONGEST_LINE = 4096


def hold_or_attend(expected: Expected, waiting: Waiting) -> None:
    """Return as soon as all processes of the job are here.

    Args:
        expected: The job, with ``count`` and ``coordinator``.
        waiting: Says how long to wait, and tells people for whom.

    Raises:
        ClusterError: Somebody did not come in time, this process does not belong to the job that meets there, or, on
            process 0, the port is taken.
    """
    if expected.index == 0:
        _Host(expected, waiting).hold()
    else:
        _Guest(expected, waiting).attend()


def bind_address(coordinator: str) -> tuple[str, int]:
    """Where process 0 listens: on loopback only if its address is there, else on all interfaces (an empty host).

    ``JAX_COORDINATOR_BIND_ADDRESS`` wins, as it does for JAX.

    Raises:
        ClusterError: That variable is something else than ``host:port``.
    """
    bound = os.environ.get(_BIND_ADDRESS) or None
    try:
        host, port = split_address(coordinator if bound is None else bound)
    except ValueError as error:
        if bound is None:
            raise
        raise ClusterError(
            f"The environment variable {_BIND_ADDRESS}, which says where process 0 listens: {error} Unset it, or name "
            f"an address of this machine, with the port of {coordinator}."
        ) from error
    if host == "localhost":
        return "127.0.0.1", port
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "", port
    if bound is not None and not address.is_unspecified:
        return host, port
    return (host if address.is_loopback else ""), port


@dataclasses.dataclass(eq=False)
class _Caller:
    """One connection to process 0, and whose it is once that was said."""

    socket: socket.socket
    address: str
    index: int | None = None
    who: str = ""
    received: bytes = b""


class _Host:
    """Process 0's side."""

    def __init__(self, expected: Expected, waiting: Waiting) -> None:
        assert expected.count is not None
        assert expected.coordinator is not None
        self._expected = expected
        self._waiting = waiting
        self._address = expected.coordinator
        self._others = range(1, expected.count)
        self._here: dict[int, _Caller] = {}
        self._refused: list[str] = []
        self._leaving: str | None = None  # who does not wait any longer
        self._selector = selectors.DefaultSelector()
        self._told = 0.0

    def hold(self) -> None:
        """Listen until all are here."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            listener = self._listen()
            self._selector.register(listener, selectors.EVENT_READ)
            while missing := self._missing():
                if not self._waiting.left_secs or self._leaving is not None:
                    raise self._give_up(missing)
                for key, _ in self._selector.select(min(_LOOK_SECS, self._waiting.left_secs)):
                    if key.fileobj is listener:
                        self._accept(listener)
                    else:
                        self._hear(key.data)
                if self._missing() != missing or time.monotonic() - self._told > _TELL_SECS:
                    self._tell({"missing": self._missing()})
                self._waiting.say(self._expected.processes(missing) + self._remarks())
            self._selector.unregister(listener)
            listener.close()  # before the others are told: the next one on this port has to be JAX
            self._tell({"go": True})

    def _listen(self) -> socket.socket:
        host, port = bind_address(self._address)
        try:
            if host:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                listener = socket.create_server((host, port), family=family, backlog=512)
            elif socket.has_dualstack_ipv6():
                listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
            else:
                listener = socket.create_server(("", port), backlog=512)
        except OSError as error:
            raise ClusterError(
                f"Process 0 cannot listen at {self._address}: {error.strerror or error}. If another process has the "
                "port, such as an earlier run that is not over or a second process 0, end it or take another port. If "
                "this is not the machine of that address, the processes are numbered wrongly."
            ) from error
        listener.setblocking(False)
        return listener

    def _missing(self) -> list[int]:
        return [index for index in self._others if index not in self._here]

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except OSError:  # it is gone again
            return
        connection.setblocking(False)
        caller = _Caller(connection, f"{address[0]}:{address[1]}")
        self._selector.register(connection, selectors.EVENT_READ, caller)

    def _hear(self, caller: _Caller) -> None:
        try:
            received = caller.socket.recv(_LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        *lines, caller.received = (caller.received + received).split(b"\n")
        if not received or len(caller.received) > _LONGEST_LINE:
            self._drop(caller)
            return
        for line in lines:
            if caller.index is not None:
                if "leaving" in _message(line):
                    self._leaving = f"process {caller.index}"
            elif not self._meet(caller, line):
                return

    def _meet(self, caller: _Caller, line: bytes) -> bool:
        """Hear who somebody is; False if it does not belong here, and is gone."""
        hello = _message(line)
        if "process" not in hello:  # somebody who looked at the port, or no process of monsess
            self._drop(caller)
            return False
        caller.who = f"process {hello['process']} from {hello.get('host')} (pid {hello.get('pid')})"
        own = self._expected
        if hello.get("launch") == own.launch and _newer(hello.get("attempt"), own.attempt):
            self._drop(caller)
            raise ClusterError(
                f"This process 0 is left over from attempt {own.attempt}: {caller.who} already belongs to attempt "
                f"{hello['attempt']} of the same launch. It ends and makes room."
            )
        why = self._objection(hello)
        if why is None:
            caller.index = hello["process"]
            self._here[hello["process"]] = caller
            return True
        self._refused.append(f"{caller.who}: {why}")
        logger.warning("%s refused %s: %s", own.who, caller.who, why)
        _send(caller.socket, {"refused": why})
        self._drop(caller)
        return False

    def _objection(self, hello: dict[str, Any]) -> str | None:
        own, index = self._expected, hello["process"]
        if hello.get("launch") != own.launch:
            return "it belongs to another launch"
        if hello.get("attempt") != own.attempt:
            return f"it is left over from attempt {hello.get('attempt')}, this is attempt {own.attempt}"
        if hello.get("count") != own.count:
            return f"it expects {hello.get('count')} processes, process 0 expects {own.count}"
        if index not in self._others:
            return f"there is no room for it: the others are numbered from 1 to {own.count - 1 if own.count else 0}"
        if index in self._here:
            return f"that number is taken by {self._here[index].who}; each process needs its own"
        return None

    def _drop(self, caller: _Caller) -> None:
        self._selector.unregister(caller.socket)
        caller.socket.close()
        if caller.index is not None and self._here.get(caller.index) is caller:
            del self._here[caller.index]
            logger.warning("%s: %s went away before the job began", self._expected.who, caller.who)

    def _tell(self, message: dict[str, Any]) -> None:
        self._told = time.monotonic()
        for caller in list(self._here.values()):
            if not _send(caller.socket, message) and "go" not in message:
                self._drop(caller)

    def _remarks(self) -> str:
        return f"; refused: {'; '.join(self._refused[-3:])}" if self._refused else ""

    def _give_up(self, missing: list[int]) -> ClusterError:
        early = self._leaving is not None and self._waiting.left_secs > _TELL_SECS
        remarks = self._remarks() + (f"; {self._leaving}, which began earlier, has given up" if early else "")
        error = _nobody_came(self._expected, self._waiting, missing, remarks)
        self._tell({"late": missing})
        return error

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()


class _Guest:
    """The side of every other process."""

    def __init__(self, expected: Expected, waiting: Waiting) -> None:
        assert expected.coordinator is not None
        self._expected = expected
        self._waiting = waiting
        self._host, self._port = split_address(expected.coordinator)
        self._why = ""

    def attend(self) -> None:
        """Report to process 0, again where the connection is lost, until all are here."""
        pause = _FIRST_PAUSE_SECS
        while self._waiting.left_secs:
            connection = self._connect()
            if connection is not None:
                with connection:
                    if self._converse(connection):
                        self._await_service()
                        return
            self._waiting.say(f"process 0: {self._why}")
            time.sleep(min(pause, self._waiting.left_secs))
            pause = min(_LONGEST_PAUSE_SECS, 1.5 * pause)
        raise _nobody_came(self._expected, self._waiting, [0], f"; {self._why}")

    def _connect(self) -> socket.socket | None:
        address = self._expected.coordinator
        connection = None
        try:
            limit = min(_CONNECT_SECS, max(0.1, self._waiting.left_secs))
            connection = socket.create_connection((self._host, self._port), timeout=limit)
            # A port that nobody listens on yet may be lent to this very connection, which then talks to itself.
            if connection.getsockname() != connection.getpeername():  # an error if it is gone again
                return connection
        except socket.gaierror:
            self._why = f"the name in {address} is not known here"
        except ConnectionRefusedError:
            self._why = f"nothing listens at {address} yet"
        except OSError as error:
            self._why = f"{address} cannot be reached ({error})"
        if connection is not None:
            connection.close()
        return None

    def _converse(self, connection: socket.socket) -> bool:
        """Report and listen; True once all are here, False if the connection is lost.

        Raises:
            ClusterError: Process 0 refuses this process, or gave up; or nobody else came in time.
        """
        own = self._expected
        hello = {"process": own.index, "count": own.count, "launch": own.launch, "attempt": own.attempt}
        lost = f"what listens at {own.coordinator} is no process 0 that waits for others, such as a job under way"
        if not _send(connection, {**hello, "host": socket.gethostname(), "pid": os.getpid()}):
            self._why = lost
            return False
        missing: list[int] | None = None
        heard = time.monotonic()
        leaving: float | None = None
        for message in self._messages(connection):
            if message is None:
                if leaving is not None and time.monotonic() - leaving > _ANSWER_SECS:
                    break
                if not self._waiting.left_secs:
                    if missing is None:
                        break
                    if leaving is None:
                        # Process 0 may have begun later: it ends with this one, and tells all for whom they waited.
                        leaving = time.monotonic()
                        _send(connection, {"leaving": missing})
                    continue
                silent = time.monotonic() - heard
                whom = own.processes(missing) if missing else "process 0"
                self._waiting.say(whom + (f"; process 0 has been silent for {silent:.0f} s" * (silent > _SILENT_SECS)))
                continue
            heard = time.monotonic()
            if message.get("go"):
                return True
            if "refused" in message:
                raise ClusterError(
                    f"Process 0 at {own.coordinator} refuses this {own.who}: {message['refused']}. Start each process "
                    "of a job once, all with the same cluster."
                )
            if "late" in message:
                raise _nobody_came(own, self._waiting, message["late"], "; process 0 has given up")
            missing = message.get("missing", missing)
        if not self._waiting.left_secs:
            raise _nobody_came(own, self._waiting, missing or [0], "; process 0 is here" if missing else "")
        self._why = lost if missing is None else f"it was at {own.coordinator} and went away before the job began"
        return False

    def _messages(self, connection: socket.socket) -> Iterator[dict[str, Any] | None]:
        """The messages of process 0, and None whenever there was none for a moment."""
        received = b""
        while len(received) <= 2**20:
            connection.settimeout(min(_LOOK_SECS, self._waiting.left_secs or _LOOK_SECS))
            try:
                new = connection.recv(_LONGEST_LINE)
            except TimeoutError:
                yield None
                continue
            except OSError:
                return
            if not new:
                return
            *lines, received = (received + new).split(b"\n")
            for line in lines:
                yield _message(line)
            yield None

    def _await_service(self) -> None:
        """Wait until JAX's service listens: its client would pause for a second after a first attempt in vain."""
        end = time.monotonic() + _REOPEN_SECS
        while time.monotonic() < end:
            connection = self._connect()
            if connection is not None:
                connection.close()
                return
            time.sleep(_FIRST_PAUSE_SECS)


def _nobody_came(expected: Expected, waiting: Waiting, missing: list[int], remark: str) -> ClusterError:
    return ClusterError(
        f"{expected.who[0].upper()}{expected.who[1:]} waited {waiting.passed_secs:.0f} s (start_timeout_secs="
        f"{waiting.limit_secs:g}) for {expected.processes(missing)} in vain{remark}. Look why it did not start; if the "
        "machines only need longer, raise start_timeout_secs."
    )


def _newer(attempt: Any, own: int) -> bool:
    return isinstance(attempt, int) and attempt > own


def _send(connection: socket.socket, message: dict[str, Any]) -> bool:
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return False
    return True


def _message(line: bytes) -> dict[str, Any]:
    """The message in a line; empty if it is none of ours."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
