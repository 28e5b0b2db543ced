"""What lies in the directory of a run and should not."""

from __future__ import annotations

from collections.abc import Iterable

_BOOKKEEPING = {"run.json", "owner.json"}
_RECORDS = ("metrics", "events.out.tfevents.")


def beside_bookkeeping(names: Iterable[str]) -> set[str]:
    """Of the names in a run's directory, those of neither its bookkeeping nor its records: steps, and leftovers."""
    return {name for name in names if name not in _BOOKKEEPING and not name.startswith(_RECORDS)}
