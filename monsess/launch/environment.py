"""What a process finds in its environment when a launcher has started it."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping

from monsess import emulation

COORDINATOR = "MONSESS_COORDINATOR"
PROCESS_ID = "MONSESS_PROCESS_ID"
PROCESS_COUNT = "MONSESS_PROCESS_COUNT"
ATTEMPT = "MONSESS_ATTEMPT"
LAUNCH_ID = "MONSESS_LAUNCH_ID"
LOCAL_DEVICES = "MONSESS_LOCAL_DEVICES"
FAILURE_DIR = "MONSESS_FAILURE_DIR"

_LOOPBACK = "127.0.0.1"
_PORTS = (20000, 32768)
_TRIES = 50


def environment(
    base: Mapping[str, str],
    *,
    coordinator: str,
    process_id: int,
    process_count: int,
    attempt: int,
    launch_id: str,
    failure_dir: str,
    local_devices: int | None = None,
) -> dict[str, str]:
    """The environment of one process.

    Args:
        base: The environment that it is based on. What an outer launcher put there is replaced.
        coordinator: ``host:port`` at which process 0 may listen.
        process_id: Number of the process, from 0.
        process_count: How many processes there are.
        attempt: Number of the attempt, from 0.
        launch_id: The same in all attempts.
        failure_dir: Local folder where a process that fails leaves ``<process_id>.json``.
        local_devices: CPU devices to emulate; None leaves the devices alone.

    Example:
        >>> found = environment(
        ...     {"PATH": "/bin"}, coordinator="127.0.0.1:4711", process_id=1, process_count=2, attempt=0,
        ...     launch_id="5f3a", failure_dir="/tmp/x", local_devices=4)
        >>> found["MONSESS_PROCESS_ID"], found["MONSESS_LOCAL_DEVICES"]
        ('1', '4')
        >>> found["XLA_FLAGS"].split()[0]
        '--xla_force_host_platform_device_count=4'
    """
    found = dict(base)
    # A pipe instead of a terminal: without this, lines would come late, and the last ones not at all after a SIGKILL.
    found.setdefault("PYTHONUNBUFFERED", "1")
    found.pop(LOCAL_DEVICES, None)
    # The others look for process 0 at the coordinator's address, wherever this would have it listen.
    found.pop("JAX_COORDINATOR_BIND_ADDRESS", None)
    found.update(
        {
            COORDINATOR: coordinator,
            PROCESS_ID: str(process_id),
            PROCESS_COUNT: str(process_count),
            ATTEMPT: str(attempt),
            LAUNCH_ID: launch_id,
            FAILURE_DIR: failure_dir,
        }
    )
    if local_devices is not None:
        found[LOCAL_DEVICES] = str(local_devices)
        found.update(emulation.environment(local_devices, found))
    return found


def free_address() -> str:
    """``host:port`` on loopback at which nothing listens.

    Process 0 comes to listen there seconds later only, so the port is one that the system does not hand out to
    outgoing connections meanwhile.
    """
    for _ in range(_TRIES):
        port = random.SystemRandom().randrange(*_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((_LOOPBACK, port))
            except OSError:
                continue
            return f"{_LOOPBACK}:{port}"
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return f"{_LOOPBACK}:{probe.getsockname()[1]}"
