"""Programs of processes that use `allreduce`, `allgather`, `broadcast` and the hooks that compare states."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cluster_child import Options

import monsess as ms


def all_kinds(options: Options) -> dict[str, Any]:
    """Small and large values, negative zeros and 64-bit numbers."""
    mine = {
        "zero": np.float32(-0.0),
        "big": np.array([2**40 + 1 + options.index, 2**63 + 5], np.uint64),
        "half": np.full(3, options.index, jnp.bfloat16),
        "large": np.full(200_000, options.index + 0.5, np.float64),
    }
    gathered = ms.allgather(mine)
    ints = ms.allreduce(np.int64(2**40 + 1), "sum")
    return {
        "zero": gathered["zero"].tobytes().hex(),
        "big": gathered["big"].tolist(),
        "half": gathered["half"].astype(np.float32).tolist(),
        "half dtype": str(gathered["half"].dtype),
        "large": [float(row.sum()) for row in gathered["large"]],
        "mean": float(ms.allreduce(float(options.index))),
        "max": int(ms.allreduce(np.int32(options.index), "max")),
        "ints": [str(ints.dtype), int(ints)],
        "root": int(ms.broadcast(options.index, root=1)),
    }


def out_of_step(options: Options) -> dict[str, Any]:
    """One process calls something else."""
    try:
        ms.allgather(np.zeros(2 + options.index))
    except ms.ProcessesDivergedError as error:
        return {"error": str(error)}
    return {"error": None}


def states_that_differ(options: Options) -> dict[str, Any]:
    """The gradients are averaged over the devices of one process only, so that the states go apart."""

    @ms.train_step
    def step(state: Any, batch: Any) -> Any:
        return state + batch.sum() * (1 + 0 * jax.lax.psum(batch.sum(), "data")), {}

    hooks = [ms.BroadcastGlobalVariablesHook(0), ms.ReplicaCheckHook(every_n_steps=2), ms.StopAtStepHook(last_step=5)]
    data = [np.full(1, options.index, np.float32)] * 8
    try:
        with ms.MonitoredTrainingSession(
            lambda: jnp.zeros(()), data=data, hooks=hooks, check_replicas=False
        ) as session:  # the session itself would find it one step earlier
            while not session.should_stop():
                session.run(step)
    except ms.ReplicasDifferError as error:
        return {"error": str(error), "step": session.global_step}
    return {"error": None}


def synchronous_updates(options: Options) -> dict[str, Any]:
    """Two updates by averaged gradients; process 1 comes to the first one two seconds late."""
    import time

    import optax

    optimizer = ms.DistributedOptimizer(optax.sgd(2.0))

    @ms.train_step
    def step(state: Any, batch: Any) -> Any:
        updates, _ = optimizer.update({"v0": batch.mean(), "v1": batch.mean() + 1}, optimizer.init(state), state)
        return optax.apply_updates(state, updates), {}

    mine = np.full(1, (0.1, 0.9)[options.index], np.float32)
    seen = []
    with ms.MonitoredTrainingSession(lambda: {"v0": 0.0 + options.index, "v1": 1.0}) as session:

        def look() -> None:
            state = jax.device_get(session.state)
            seen.append([session.global_step, float(state["v0"]), float(state["v1"])])

        look()
        if options.index == 1:
            time.sleep(2)
        came = time.monotonic()
        session.run(step, mine)
        look()  # waits for the devices
        done = time.monotonic()
        session.run(step, mine)
        look()
    return {"seen": seen, "came": came, "done": done}
