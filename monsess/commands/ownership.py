"""What commands say of the run that owns a directory."""

from __future__ import annotations

import dataclasses
from typing import Any

from monsess.checkpoint.owner import OWNER, Owner, UnknownOwner

_MEANINGS = {
    True: "alive",
    False: "its process is dead: the next run takes the directory at once",
    None: "whether it is alive cannot be told from this machine",
}


def owner_as_json(owner: Owner | UnknownOwner | None) -> dict[str, Any] | None:
    """An owner for programs; ``alive`` is null where it cannot be told from here, all is where nothing is known."""
    if isinstance(owner, UnknownOwner):
        return {**{field.name: None for field in dataclasses.fields(Owner)}, "alive": None}
    return None if owner is None else {**dataclasses.asdict(owner), "alive": owner.is_alive}


def owner_text(owner: Owner | UnknownOwner | None) -> str:
    """An owner for people."""
    if owner is None:
        return "owner: none, no run is training here"
    if isinstance(owner, UnknownOwner):
        return f"owner: unknown, {OWNER} cannot be read (a run may be training here)"
    return f"owner: {owner}; {_MEANINGS[owner.is_alive]}"
