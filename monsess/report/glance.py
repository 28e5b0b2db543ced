"""How a run stands, from a few small reads: the owner token and the last of its records, however long those are."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from typing import Any

from monsess.checkpoint.owner import OWNER, find_owner
from monsess.checkpoint.store import RUN, CheckpointStore
from monsess.errors import StorageError
from monsess.records.lines import FILE, decode_all
from monsess.records.reading import part_key
from monsess.report.standing import Standing, standing
from monsess.report.story import tell

_LAST_BYTES = 1 << 16
_LAST_PARTS = 2


@dataclasses.dataclass(frozen=True)
class Glance:
    """How a run stands, and how far it came.

    Args:
        standing: Its state.
        step: The newest step in its last records; None if there are none.
        run_id: The lineage, or None.
    """

    standing: Standing
    step: int | None
    run_id: str | None

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "state": self.standing.state,
            "why": self.standing.why,
            "step": self.step,
            "heard": self.standing.heard,
            "run_id": self.run_id,
        }


def is_run(names: Collection[str]) -> bool:
    """Whether a directory with these names in it is that of a run."""
    return RUN in names or OWNER in names or FILE in names or any(part_key(name) is not None for name in names)


def glance(store: CheckpointStore, names: Collection[str]) -> Glance:
    """Look at the run in a directory.

    Args:
        store: The directory.
        names: What lies in it.

    Raises:
        StorageError: It could not be read.
    """
    from monsess.report import cleaner

    owner = find_owner(store) if OWNER in names else None
    records = map(cleaner(store), _last_records(store, names))
    story = tell(records)
    last = story.last
    told = [one.start.get("run_id") for one in story.attempts] + [getattr(owner, "run_id", None)]
    run_id = next((one for one in reversed(told) if one), None) or (store.read_run() or {}).get("run_id")
    found = standing(owner, story, at_home=RUN in names)
    return Glance(found, None if last is None else last.last_step, None if run_id is None else str(run_id))


def _last_records(store: CheckpointStore, names: Collection[str]) -> list[dict[str, Any]]:
    local = store._storage.local_path
    data = b""
    try:
        if FILE in names and local is not None:
            with open(os.path.join(local, FILE), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
                data = file.read()
        else:
            parts = sorted((key, name) for name in names if (key := part_key(name)) is not None)
            chosen = [name for _, name in parts[-_LAST_PARTS:]] or [FILE] * (FILE in names)
            data = b"\n".join(store._storage.map([lambda n=name: store._storage.read(n) for name in chosen]))
    except FileNotFoundError:  # taken away just now
        pass
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"Could not read {FILE!r} in {store.url} ({error}).") from error
    return list(decode_all(data))
