"""A step, a batch, and a check of the whole message: what the tests of bad input share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import monsess as ms

ONES = np.ones(8, np.float32)


def init_fn() -> dict[str, Any]:
    return {"n": 0.0}


@ms.train_step
def train(state: Any, batch: Any) -> Any:
    return {"n": state["n"] + 1.0}, {"mean": jax.tree.leaves(batch)[0].mean()}


@ms.train_step
def count(state: Any) -> Any:
    return {"n": state["n"] + 1.0}, {}


def refused(error: type[BaseException], *parts: str, call: Callable[[], Any]) -> BaseException:
    """``call`` raises ``error`` with all ``parts`` in its message; return the error."""
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    for part in parts:
        assert part in text, text
    return caught.value


def run(step: Any, *args: Any, initial: Callable[[], Any] = init_fn, **more: Any) -> Any:
    with ms.MonitoredTrainingSession(initial, **more) as sess:
        return sess.run(step, *args)
