"""What a run records of itself: `metrics.jsonl` in its directory, whatever the store, and how that is read."""

from __future__ import annotations

from monsess.records.reading import Attempt, Follower, Metrics, Point, read_metrics

__all__ = ["Attempt", "Follower", "Metrics", "Point", "read_metrics"]
