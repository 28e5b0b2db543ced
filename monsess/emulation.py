"""What JAX has to find in its environment to emulate CPU devices on a machine with few cores."""

from __future__ import annotations

import re
from collections.abc import Mapping

_COUNT = "--xla_force_host_platform_device_count"
_OPTION = "JAX_NUM_CPU_DEVICES"
_PATIENCE = {
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 60,
    "--xla_cpu_collective_call_terminate_timeout_seconds": 300,
}


def flags(present: str, count: int | None = None) -> str:
    """``XLA_FLAGS`` with ``count`` devices, or without a count, and minutes for the devices to meet.

    Args:
        present: What ``XLA_FLAGS`` holds; it keeps what it says of the time limits.
        count: Number of devices; None takes away whatever ``present`` says of it.

    Example:
        >>> flags("--xla_force_host_platform_device_count=2 --xla_dump_to=x", 4).split()[:2]
        ['--xla_force_host_platform_device_count=4', '--xla_dump_to=x']
    """
    found = re.sub(rf"{_COUNT}=\d+", "", present).split()
    if count is not None:
        found.insert(0, f"{_COUNT}={count}")
    return " ".join([*found, *(f"{flag}={seconds}" for flag, seconds in _PATIENCE.items() if flag not in present)])


def environment(count: int, present: Mapping[str, str]) -> dict[str, str]:
    """The variables that make a process started with them see ``count`` CPU devices and nothing else.

    Args:
        count: Number of devices, at least 1.
        present: The environment to which they are added; a thread pool that it sizes itself keeps its size.
    """
    found = {
        "XLA_FLAGS": flags(present.get("XLA_FLAGS", ""), count),
        "JAX_PLATFORMS": "cpu",
        # With fewer threads jax 0.10 dies in a rendezvous: the collectives of all devices have to meet.
        "PJRT_NPROC": present.get("PJRT_NPROC", str(max(16, 2 * count))),
    }
    if _OPTION in present:
        found[_OPTION] = "-1"  # JAX's default: it would count more than the flag
    return found
