"""A step that counts, for tests that only look at what happens when."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import monsess as ms


def init_fn() -> dict[str, Any]:
    """Nothing counted yet."""
    return {"count": jnp.zeros(())}


@functools.cache
def adding(steps: int) -> Any:
    """A train step without a batch whose runs add ``steps`` steps; returns the count after and before the run."""

    @ms.train_step(steps_per_run=steps)
    def add(state: Any) -> Any:
        count = state["count"] + max(steps, 1)
        return {"count": count}, {"count": count, "before": state["count"]}

    return add


one = adding(1)


@ms.eval_step
def look(state: Any) -> Any:
    """The count; changes nothing."""
    return {"count": state["count"]}


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Return as soon as ``condition()`` holds; fail when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def wait_for_saves(session: ms.MonitoredSession, saves: int) -> None:
    """Return as soon as the session has committed ``saves`` checkpoints."""
    wait_until(lambda: session.summary()["saves"] >= saves)
