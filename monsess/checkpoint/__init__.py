"""Checkpoints: a step directory that Orbax can read, a commit record written last, and nothing trusted without it."""

from __future__ import annotations

from monsess.checkpoint.commit import StepRecord
from monsess.checkpoint.options import CheckpointOptions
from monsess.checkpoint.restore import latest_checkpoint, load_checkpoint
from monsess.checkpoint.retention import KeepBest, KeepEvery, KeepLast, Retention
from monsess.checkpoint.store import CheckpointStore

__all__ = [
    "CheckpointOptions",
    "CheckpointStore",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "Retention",
    "StepRecord",
    "latest_checkpoint",
    "load_checkpoint",
]
