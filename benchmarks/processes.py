"""What a monitored step costs beside the bare pmap step, with two processes: ratios, paired in one run.

    python benchmarks/processes.py [--leaves 10,200,1000] [--rounds 15] [--steps 40] [--empty] [--json FILE]

Starts two processes with one CPU device each. Blocks of bare pmap steps, of monitored pmap steps and of monitored
shard_map steps take turns; a ratio compares blocks of the same round. All keep at most two steps in flight.

The step is that of a data-parallel training of four million parameters, float32, in so many leaves of equal size: a
gradient of each is averaged over all devices. With ``--empty`` it is one of next to no work, in which everything that
a session does is seen: two processes on two cores have none left that would do it beside the step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from typing import Any

PARAMETERS = 4_000_000


def main() -> None:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", default="10,200,1000", help="sizes of the state, in leaves")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40, help="steps in a block")
    parser.add_argument("--empty", action="store_true", help="a step of next to no work")
    parser.add_argument("--json", help="write the figures there")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is not None:
        measure(args)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, *sys.argv[1:], "--port", str(port), "--process"]
    children = [subprocess.Popen([*command, str(index)], env={**os.environ, "PJRT_NPROC": "16"}) for index in range(2)]
    try:
        codes = [child.wait(900) for child in children]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
    sys.exit(max(map(abs, codes)))


def measure(args: argparse.Namespace) -> None:
    """One of the two processes."""
    import monsess as ms

    ms.testing.emulate_devices(1)
    import jax

    address = f"127.0.0.1:{args.port}"
    jax.distributed.initialize(address, 2, args.process, coordinator_bind_address=address)
    figures = []
    for leaves in map(int, args.leaves.split(",")):
        times = blocks(leaves, args.rounds, args.steps if args.empty else max(4, args.steps // 4), args.empty)
        bare = times["bare pmap"]
        row: dict[str, Any] = {"leaves": leaves, "bare pmap ms": round(1e3 * statistics.median(bare), 3)}
        for kind in ("monitored pmap", "monitored shard_map"):
            pairs = list(zip(times[kind], bare, strict=True))
            row[f"{kind} / bare"] = round(statistics.median(one / other for one, other in pairs), 3)
            row[f"{kind} - bare, ms"] = round(1e3 * statistics.median(one - other for one, other in pairs), 3)
        figures.append(row)
        if args.process == 0:
            print(" ".join(f"{name}: {value}" for name, value in row.items()), flush=True)
    if args.process == 0 and args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


def blocks(leaves: int, rounds: int, steps: int, empty: bool) -> dict[str, list[float]]:
    """Seconds per step of each block, by kind."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import monsess as ms

    width, rows = (16, 8) if empty else (round(math.sqrt(PARAMETERS / leaves)), 32)

    def train(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        def loss_of(state: Any) -> Any:
            return sum(((batch @ leaf - batch) ** 2).mean() for leaf in state.values()) / leaves

        loss, gradients = jax.value_and_grad(loss_of)(state)
        gradients = jax.lax.pmean(gradients, "data")
        return {name: leaf - 1e-2 * gradients[name] for name, leaf in state.items()}, {"loss": loss}

    def hardly_anything(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        mean = jax.lax.pmean(batch.mean(), "data")
        return {name: leaf - 1e-3 * mean for name, leaf in state.items()}, {"loss": batch.mean()}

    update = hardly_anything if empty else train

    def init() -> dict[str, Any]:
        return {f"w{i:04d}": jnp.ones((width, width), jnp.float32) / width for i in range(leaves)}

    def bare_step(state: Any, batch: Any) -> Any:
        state, outputs = update(state, batch)
        return state, jax.lax.pmean(outputs, "data")

    bare = jax.pmap(bare_step, "data", in_axes=(None, 0), out_axes=(None, None), donate_argnums=0)
    batch = np.ones((rows, width), np.float32)

    def session(engine: Any) -> Any:
        return ms.MonitoredTrainingSession(init, log_step_count_steps=None), ms.train_step(engine=engine)(update)

    times: dict[str, list[float]] = {"bare pmap": [], "monitored pmap": [], "monitored shard_map": []}
    state = init()
    flying: deque[Any] = deque()
    pmapped, by_pmap = session("pmap")
    sharded, by_shard_map = session("shard_map")
    with pmapped, sharded:

        def bare_run() -> None:
            nonlocal state
            while len(flying) >= 2:
                flying.popleft().block_until_ready()
            state, outputs = bare(state, batch[None])
            flying.append(outputs["loss"])

        runs = {
            "bare pmap": bare_run,
            "monitored pmap": lambda: pmapped.run(by_pmap, batch),
            "monitored shard_map": lambda: sharded.run(by_shard_map, batch),
        }
        for number in range(rounds + 1):
            for kind in sorted(times, reverse=bool(number % 2)):
                begun = time.perf_counter()
                for _ in range(steps):
                    runs[kind]()
                if number:  # the first round compiles
                    times[kind].append((time.perf_counter() - begun) / steps)
    return times


if __name__ == "__main__":
    main()
