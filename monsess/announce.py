"""The one line at the start of a session and the one at its end."""

from __future__ import annotations

from monsess.agreement import StopReason
from monsess.log import logger


def announce_start(run_id: str, restored_from: int | None, devices: int, processes: int, place: str | None) -> None:
    """Say what begins, where from, on what, and where it is saved (a URL with credentials masked)."""
    start = "fresh start at step 0" if restored_from is None else f"restored step {restored_from}"
    where = "no checkpoint_dir, nothing is saved" if place is None else f"in {place}"
    logger.info(
        "run %s: %s; %s in %s; %s",
        run_id,
        start,
        _count(devices, "device", "devices"),
        _count(processes, "process", "processes"),
        where,
    )


def announce_end(
    run_id: str, steps: int, seconds: float, step: int, reason: StopReason | None, last_commit: int | None
) -> None:
    """Say how far it came, why it ended, and what is safe."""
    logger.info(
        "run %s: %s in %.1f s, now at step %d; stopped: %s; %s",
        run_id,
        _count(steps, "step", "steps"),
        seconds,
        step,
        str(reason).split("\n")[0].rstrip(".: "),
        "nothing saved" if last_commit is None else f"last commit is step {last_commit}",
    )


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
