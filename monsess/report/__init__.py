"""What a run did, told from its directory: for a page (`monsess report`), a live view and a list."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from monsess.checkpoint.owner import find_owner
from monsess.checkpoint.store import CheckpointStore
from monsess.log import mask
from monsess.records.reading import Follower, Metrics
from monsess.report.standing import standing
from monsess.report.story import Story, tell
from monsess.report.view import View

__all__ = ["records_of", "view_of"]

_REMEMBERED = 4096
_LARGEST = 2**63 - 1
_LARGEST_TIME = 1e11


def records_of(store: CheckpointStore) -> list[dict[str, Any]]:
    """All that is recorded in a directory, in order, fit to be shown.

    Raises:
        StorageError: It could not be read.
    """
    return list(map(cleaner(store), follower_of(store).new()))


def follower_of(store: CheckpointStore) -> Follower:
    """What reads the records in a directory, each of them once."""
    return Follower(store._storage.url, store._storage._options)


def cleaner(store: CheckpointStore) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """What makes a record fit to be shown, whoever wrote it.

    The credentials that its directory is reached with are taken out, and what nobody can show: halves of characters,
    numbers that fit nowhere, a time that is none.
    """
    secrets = store._storage._secrets

    @functools.lru_cache(_REMEMBERED)  # tags come again and again
    def text(value: str) -> str:
        return mask(value if value.isascii() else value.encode(errors="backslashreplace").decode(), secrets)

    def cleaned(value: Any) -> Any:
        if isinstance(value, str):
            return text(value)
        if isinstance(value, int):
            return value if -_LARGEST <= value <= _LARGEST else _LARGEST if value > 0 else -_LARGEST
        if isinstance(value, Mapping):
            return {text(str(name)): cleaned(part) for name, part in value.items()}
        return [cleaned(part) for part in value] if isinstance(value, list) else value

    def clean(record: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = cleaned(record)
        time = found.get("time")
        if isinstance(time, (int, float)) and not -_LARGEST_TIME < time < _LARGEST_TIME:
            del found["time"]
        return found

    return clean


def view_of(store: CheckpointStore) -> View:
    """Everything that a page shows of a directory.

    Raises:
        StorageError: It could not be read.
    """
    from monsess import __version__

    owner = find_owner(store)
    records = records_of(store)
    run = store.read_run()
    survey = store._survey(store._remembered(run))
    story = tell(records, survey.committed.values())
    return View(
        url=store.url,
        run_id=_run_id(story, run),
        standing=standing(owner, story, at_home=run is not None),
        story=story,
        curves=Metrics(records).curves,
        kept=survey.committed,
        pinned=frozenset(store._pins()),
        made=time.time(),
        version=__version__,
    )


def _run_id(story: Story, run: Mapping[str, Any] | None) -> str | None:
    started = [attempt.start["run_id"] for attempt in story.attempts if attempt.start.get("run_id")]
    run_id = started[-1] if started else (run or {}).get("run_id")
    return None if run_id is None else str(run_id)
