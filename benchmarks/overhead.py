"""What the session adds per step over a bare `jax.pmap` loop, paired in one run.

Two comparisons, each with the default hooks and no trigger due, on one device and a step of a few microseconds:

(a) a numpy batch is handed over on both sides;
(b) the session reads ``data=`` with prefetch, the bare loop runs over batches that lie on the device already.

The loops alternate in short rounds, so that a change of the machine's speed meets both; the median over the rounds of
the paired differences is printed.

    python benchmarks/overhead.py [--devices N] [--rounds N] [--steps N]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import monsess as ms

ROWS = 8
Sides = tuple[Callable[[], float], Callable[[], float]]  # a round of the bare loop, and one of the monitored loop


def body(state: Any, batch: Any) -> Any:
    """A step of next to no work, so that what is measured is everything around it."""
    return {"w": state["w"] + 1.0}, {"loss": batch["x"].sum()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What the session adds per step over a bare jax.pmap loop.")
    parser.add_argument("--devices", type=int, default=1, help="emulated CPU devices; 0: the devices of the machine")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    if options.devices:
        ms.testing.emulate_devices(options.devices)
    else:
        options.devices = jax.local_device_count()
    logging.getLogger("monsess").setLevel(logging.WARNING)
    print(f"{options.devices} device(s), {options.rounds} rounds of {options.steps} steps; microseconds per step")
    for name, make in (("(a) numpy batch on both sides", numpy_batches), ("(b) data= against placed", prefetched)):
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as open_sessions:
            bare, monitored = make(options.devices, options.steps, functools.partial(session, open_sessions, folder))
            report(name, bare, monitored, options.rounds)


def report(name: str, bare: Callable[[], float], monitored: Callable[[], float], rounds: int) -> None:
    """Run both sides in turn and print the medians and the median of the paired differences."""
    bare()
    monitored()
    pairs = [(bare(), monitored()) if i % 2 else tuple(reversed((monitored(), bare()))) for i in range(rounds)]
    added = [m - b for b, m in pairs]
    quarter = statistics.quantiles(added, n=4)
    print(
        f"{name:32} bare {statistics.median(b for b, _ in pairs):7.1f}   "
        f"monitored {statistics.median(m for _, m in pairs):7.1f}   "
        f"added {statistics.median(added):6.1f}  (quartiles {quarter[0]:.1f} to {quarter[2]:.1f})"
    )


def bare_loop(devices: int) -> tuple[Callable[..., Any], Any]:
    """The loop a user writes by hand: pmap with a replicated state, two steps in flight."""
    from jax.sharding import NamedSharding, PartitionSpec

    from monsess.layout import Layout

    layout = Layout(jax.local_devices())
    step = jax.pmap(body, "data", in_axes=(None, 0), out_axes=(None, None), donate_argnums=0)
    state = jax.device_put({"w": np.zeros((), np.float32)}, NamedSharding(layout.mesh, PartitionSpec()))
    return step, state


def per_step(count: int, run: Callable[[], None]) -> float:
    """Microseconds per step of one round."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) / count * 1e6


def run_bare(step: Any, state: Any, batches: list[Any]) -> tuple[Any, float]:
    """One round of the bare loop."""
    held = [state]

    def run() -> None:
        before = None
        for batch in batches:
            held[0], outputs = step(held[0], batch)
            if before is not None:
                before.block_until_ready()
            before = outputs["loss"]
        before.block_until_ready()  # type: ignore[union-attr]

    spent = per_step(len(batches), run)
    return held[0], spent


def session(open_sessions: contextlib.ExitStack, folder: str, **more: Any) -> ms.MonitoredSession:
    """A session with the default hooks, none of which is due during the measurement; closed with ``open_sessions``."""
    made = ms.MonitoredTrainingSession(
        lambda: {"w": np.zeros((), np.float32)},
        checkpoint_dir=folder,
        save_checkpoint_secs=36_000,
        log_step_count_steps=1_000_000_000,
        **more,
    )
    return open_sessions.enter_context(made)


def numpy_batches(devices: int, steps: int, make_session: Callable[..., ms.MonitoredSession]) -> Sides:
    """Comparison (a)."""
    batch = {"x": np.ones((ROWS * devices, 4), np.float32)}
    split = {"x": batch["x"].reshape(devices, ROWS, 4)}
    step, state = bare_loop(devices)
    held = [state]
    sess = make_session()
    train = ms.train_step(body)

    def bare() -> float:
        held[0], spent = run_bare(step, held[0], [split] * steps)
        return spent

    def monitored() -> float:
        def run() -> None:
            for _ in range(steps - 1):
                sess.run(train, batch)
            sess.run(train, batch)["loss"].block_until_ready()

        return per_step(steps, run)

    return bare, monitored


def prefetched(devices: int, steps: int, make_session: Callable[..., ms.MonitoredSession]) -> Sides:
    """Comparison (b)."""
    from monsess.layout import Layout

    batch = {"x": np.ones((ROWS * devices, 4), np.float32)}
    placed = Layout(jax.local_devices()).lay_out(batch)[0]
    step, state = bare_loop(devices)
    held = [state]
    sess = make_session(data=ms.repeat([batch]))
    train = ms.train_step(body)

    def bare() -> float:
        held[0], spent = run_bare(step, held[0], [placed] * steps)
        return spent

    def monitored() -> float:
        def run() -> None:
            for _ in range(steps - 1):
                sess.should_stop()
                sess.run(train)
            sess.run(train)["loss"].block_until_ready()

        return per_step(steps, run)

    return bare, monitored


if __name__ == "__main__":
    main()
