"""Threads for calls that may block: as many run at once as there are places."""

from __future__ import annotations

import threading

from monsess.workers import Workers


def test_as_many_jobs_run_at_once_as_there_are_places():
    """A thread that has just taken a job is not idle, however soon others are handed over."""
    for _ in range(100):
        workers = Workers(8, "test-workers")
        workers.call(lambda: None, 10)
        together = threading.Barrier(8)
        assert len(workers.map([lambda together=together: together.wait(10)] * 8, 20)) == 8
        workers.close()
