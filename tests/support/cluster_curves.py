"""Programs of processes that log: from inside a step, by hooks, and in the loop."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from cluster_child import Options

import monsess as ms


class Listener(ms.SessionRunHook):
    """What a process hears."""

    def __init__(self) -> None:
        self.heard: list[list[Any]] = []

    def log(self, step: int, scalars: Any) -> None:
        self.heard.append([step, dict(scalars)])


def summaries(options: Options) -> dict[str, Any]:
    """Both engines, one after the other: a step that collects, with a hook on each process that listens."""
    heard = {}
    for engine in ("pmap", "shard_map"):

        @ms.train_step(engine=engine)
        def step(state: Any, batch: Any) -> Any:
            ms.summary.scalar("sum", batch.sum(), reduce="sum")
            ms.summary.scalar("each", batch[0], reduce=None)
            ms.summary.histogram("batch", batch, buckets=4)
            ms.summary.image("first", batch[:1, None] / 10)
            return state + jax.lax.pmean(batch.mean(), "data"), {"mean": batch.mean()}

        devices = jax.local_device_count()
        first = options.index * devices
        data = [np.arange(first, first + devices, dtype=np.float32)] * 4
        listener = Listener()
        with ms.MonitoredTrainingSession(
            lambda: 0.0,
            data=data,
            checkpoint_dir=f"{options.url}/{engine}",
            save_summaries_steps=2,
            log_step_count_steps=None,
            hooks=[listener],
        ) as session:
            while not session.should_stop():
                session.run(step)
                if session.global_step == 3:
                    session.log({"own": options.index})
        heard[engine] = listener.heard
    return {"heard": heard}


def by_the_clock(options: Options) -> dict[str, Any]:
    """The chief's clock says when; the other process is the slower one and has another clock."""

    @ms.train_step
    def step(state: Any, batch: Any) -> Any:
        return state + 1, {"mean": batch.mean()}

    data = [np.ones(jax.local_device_count(), np.float32)] * 40
    listener = Listener()
    with ms.testing.FakeClock() as clock:
        with ms.MonitoredTrainingSession(
            lambda: 0.0,
            data=data,
            checkpoint_dir=options.url,
            save_summaries_secs=10,
            log_step_count_steps=None,
            hooks=[listener],
        ) as session:
            while not session.should_stop():
                session.run(step)
                clock.advance((1.0, 7.0)[options.index])
    return {"heard": [at for at, _ in listener.heard]}
