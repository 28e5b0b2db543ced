"""A store that fails on demand, for tests; public as `monsess.testing`. `Faults` does without importing fsspec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monsess.faulty.faults import Faults as Faults
from monsess.faulty.operations import Operation as Operation

if TYPE_CHECKING:
    from monsess.faulty.filesystem import FaultyFileSystem as FaultyFileSystem

__all__ = ["Faults", "FaultyFileSystem", "Operation"]


def __getattr__(name: str) -> Any:
    if name == "FaultyFileSystem":
        from monsess.faulty.filesystem import FaultyFileSystem

        return FaultyFileSystem
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
