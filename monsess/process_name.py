"""What can be known about a process from its name: where it runs, and whether it is still there."""

from __future__ import annotations

import dataclasses
import os
import socket

_PF_EXITING = 0x4  # of the Linux kernel: the process runs no code of its own any more


@dataclasses.dataclass(frozen=True)
class ProcessName:
    """One process, told apart from every other one that ever was; what the system does not tell is empty.

    Args:
        host: Name of the machine.
        boot_id: Of the machine's current start.
        pid_namespace: Where ``pid`` means this process: a container has one of its own.
        pid: Process id.
        start_time: In the machine's clock ticks since it was started; ids are used again, these are not.
    """

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_time: str


def this_process() -> ProcessName:
    """The name of the calling process; not kept, because a fork changes it."""
    return ProcessName(
        socket.gethostname(),
        _line("/proc/sys/kernel/random/boot_id"),
        _namespace(),
        os.getpid(),
        (_stat(os.getpid()) or ("", False))[0],
    )


def is_here(name: ProcessName) -> bool:
    """Whether this process can tell if the named one is alive: same machine, same start of it, same namespace."""
    own = this_process()
    return (name.host, name.boot_id, name.pid_namespace) == (own.host, own.boot_id, own.pid_namespace)


def is_alive(name: ProcessName) -> bool:
    """Whether a process that `is_here` can still do something; a zombie, or one that is being killed, cannot."""
    try:
        os.kill(name.pid, 0)
    except ProcessLookupError:
        return False
    except OverflowError:
        return False  # no process ever had such an id
    except OSError:
        pass  # somebody else's process is one, too
    found = _stat(name.pid)
    if found is None:
        return True  # the system does not show more
    start_time, over = found
    return not over and (not name.start_time or start_time == name.start_time)


def _stat(pid: int) -> tuple[str, bool] | None:
    """Start time of a process, and whether it is over; None where that cannot be read."""
    # The name of the program, in brackets, may hold spaces and brackets itself.
    fields = _line(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    return fields[19], fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _line(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
