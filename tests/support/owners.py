"""Owners of a directory that a test makes up."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from monsess.checkpoint.owner import Owner
from monsess.checkpoint.ownership import Ownership
from monsess.checkpoint.store import CheckpointStore
from monsess.process_name import ProcessName, _stat, this_process


def process_of(pid: int) -> ProcessName:
    """The name of a process of this machine."""
    found = _stat(pid)
    assert found is not None
    return dataclasses.replace(this_process(), pid=pid, start_time=found[0])


def forge(**more: Any) -> Owner:
    """An owner: by default a process of this machine that is dead."""
    here = this_process()
    values: dict[str, Any] = {
        **dataclasses.asdict(here),
        "start_time": "1",
        "run_id": "run",
        "attempt": "before",
        "launch": None,
        "beat": 3,
        "interval": 10.0,
        "restored_from": None,
        "since": 1_700_000_000.0,
    }
    return Owner(**{**values, **more})


@contextlib.contextmanager
def acquired(store: CheckpointStore, attempt: str, **more: Any) -> Iterator[Ownership]:
    """An ownership that is given back at the end of the block."""
    own = Ownership(store, attempt=attempt, **more)
    own.acquire()
    try:
        yield own
    finally:
        own.release()
