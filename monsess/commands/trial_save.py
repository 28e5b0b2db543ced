"""A small checkpoint saved, verified, restored and deleted by the very code that a session uses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from monsess import clock
from monsess.checkpoint.commit import CommitRecord
from monsess.checkpoint.leaves import describe
from monsess.checkpoint.publish import Writer, publish
from monsess.checkpoint.restore import find_restorable
from monsess.checkpoint.store import CheckpointStore
from monsess.commands.probes import PropertyFailed


def try_out(url: str, options: Mapping[str, Any], lag: float = 0.0) -> str:
    """Save two steps, look at them with fresh eyes, delete one.

    Args:
        url: A directory that nobody else uses.
        options: Storage options.
        lag: By how many seconds listings lag behind.

    Returns:
        What was done.

    Raises:
        PropertyFailed: Something came back otherwise than it was saved.
        StorageError: The store failed.
    """
    writer = Writer(uuid.uuid4().hex[:12], uuid.uuid4().hex[:8], None, clock.wall())
    store, fresh = CheckpointStore(url, options), CheckpointStore(url, options)
    saved: list[CommitRecord] = []
    for step in (1, 2):
        saved.append(_save(store, writer, step))
        store._remember(writer.run_id, saved)  # as a session does right after a commit
        _look(fresh, step)
    time.sleep(2 * lag)  # retention deletes what was committed long ago
    store.delete(1)
    if (left := fresh.steps()) != [2]:
        raise PropertyFailed(f"step 1 of 1 and 2 was deleted; step 2 should be left, found {left}")
    _look(CheckpointStore(url, options), 2)
    return "2 steps saved, verified, restored, 1 deleted"


def _state(step: int) -> dict[str, Any]:
    values = np.arange(20_000, dtype=np.float32).reshape(100, 200) * np.float32(1.1**step)
    return {"w": values, "zero": np.float32(-0.0), "count": np.int64(2**40 + step), "rate": 1e-3, "list": [values[0]]}


def _save(store: CheckpointStore, writer: Writer, step: int) -> CommitRecord:
    specs, values = _leaves(_state(step))
    return publish(store, writer, step, specs, values, {"hooks": {}}, {"step": float(step)}, lambda: None)


def _look(store: CheckpointStore, step: int) -> None:
    if problems := store.verify(step):
        raise PropertyFailed(f"step {step} was saved and is damaged: {'; '.join(problems[:3])}")
    restored = find_restorable(store)
    if restored is None or restored.step != step:
        found = "none" if restored is None else f"step {restored.step}"
        raise PropertyFailed(f"step {step} was saved and should be restored, found {found}")
    specs, values = _leaves(_state(step))
    for spec, saved, found in zip(specs, values, restored.leaves, strict=True):
        if np.asarray(saved).tobytes() != np.asarray(found).tobytes():
            raise PropertyFailed(f"leaf {spec.path!r} of step {step} was restored with other bits than were saved")


def _leaves(state: dict[str, Any]) -> tuple[Any, list[Any]]:
    import jax

    from monsess.checkpoint.leaves import to_host

    return describe(state), [to_host(leaf) for leaf in jax.tree_util.tree_leaves(state)]
