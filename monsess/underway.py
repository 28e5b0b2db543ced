"""What this process is just changing in its stores, by whatever session or connection.

A call to a store that was given up may still take effect, hours later: who is about to use its name asks here before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_names: dict[object, tuple[int, str]] = {}  # with the process: a fork has not got the threads that would end these


@contextlib.contextmanager
def underway(name: str) -> Iterator[None]:
    """Inside the block, ``name`` is being changed."""
    key = object()
    _names[key] = os.getpid(), name
    try:
        yield
    finally:
        del _names[key]


def is_underway(name: str) -> bool:
    """Whether ``name``, or something below it, is being changed."""
    return any(pid == os.getpid() and f"{one}/".startswith(f"{name}/") for pid, one in tuple(_names.values()))
