"""Helpers for tests of checkpoints: a state, a saver, and bit-for-bit comparison."""

from __future__ import annotations

import uuid
from typing import Any

import jax
import numpy as np

from monsess.checkpoint import CheckpointOptions, CheckpointStore, KeepLast
from monsess.checkpoint.leaves import describe
from monsess.checkpoint.saver import Saver, Snapshot


def fresh(protocol: str) -> str:
    return f"{protocol}://{uuid.uuid4().hex}"


def toy(value: float = 1.0) -> dict[str, Any]:
    return {
        "params": {"w": np.full((4, 3), value, np.float32), "b": np.arange(3, dtype=np.float32)},
        "opt": [{"mu": np.full((4, 3), -value, np.float32)}, np.int32(7)],
    }


def snapshot(step: int, state: Any = None, **more: Any) -> Snapshot:
    state = toy(step) if state is None else state
    return Snapshot(step, jax.tree.leaves(state), describe(state), more.pop("session", {"hooks": {}}), **more)


def saver(store: CheckpointStore, keep: int = 100, run_id: str = "run", attempt: str = "a1", **more: Any) -> Saver:
    protect = more.pop("protect", set())
    return Saver(store, CheckpointOptions(**more), KeepLast(keep), attempt=attempt, run_id=run_id, protect=protect)


def save(url: str, *steps: int, **more: Any) -> CheckpointStore:
    """Commit toy states of ``steps`` and return the store."""
    store = CheckpointStore(url)
    state = more.pop("state", None)
    writer = saver(store, **more)
    for step in steps:
        writer.submit(snapshot(step, state))
        assert writer.wait() == [step]
    writer.close()
    return store


def assert_same_bits(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
