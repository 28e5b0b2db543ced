"""What a program without monsess does with Orbax's defaults: writes checkpoints in all its layouts, and reads ours.

``python plain_orbax_child.py write FOLDER`` and ``python plain_orbax_child.py read FOLDER ANSWER.npz``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

if __name__ == "__main__":  # not where a test imports it for its names: its own children would inherit this
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["JAX_ENABLE_X64"] = "1"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

WAYS = ("restore", "PyTreeRestore", "StandardRestore", "PyTreeRestore template", "StandardRestore template")


def arrays(step: int) -> dict[str, Any]:
    """A state that plain Orbax can hold, as numpy arrays."""
    odd = np.array([0x7FC0ABCD, 0x80000000, 0xFF800001, 1], np.uint32).view(np.float32)  # NaN payloads, -0.0, tiny
    return {
        "params": {
            "dense": {"w": np.arange(6, dtype=np.float32).reshape(2, 3) + step, "b": odd},
            "layers": [np.array([1, -0.0], ml_dtypes.bfloat16), np.array([3], np.float16)],
            "wide": np.arange(32, dtype=np.int32).reshape(8, 4),
            "a.b": np.array([True, False]),
        },
        "large": {"i": np.array([2**40 + 1, -(2**62)]), "u": np.array([2**63 + 5], np.uint64), "f": np.array([1e300])},
        "small": {
            "i4": np.array([-8, 7], ml_dtypes.int4),
            "f8": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn),
            "c": np.array([complex(-0.0, 2)], np.complex64),
        },
        "count": np.array(step, np.int32),
    }


def state(step: int) -> Any:
    """The same on four devices, one array of it in four parts, with what only JAX and Python have."""
    mesh = jax.make_mesh((4,), ("d",))
    placed = jax.tree.map(
        lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())), arrays(step)
    )
    parts = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    placed["params"]["wide"] = jax.device_put(placed["params"]["wide"], parts)
    placed["opt"] = optax.adam(1e-3).init({"w": jnp.ones(3, jnp.float32)})
    placed |= {"keys": jax.random.split(jax.random.key(step, impl="rbg"), 2), "rate": 0.25, "epoch": step, "on": True}
    return placed | {"nothing": None, "hollow": {}, "list": []}


def write(folder: str) -> None:
    """One folder for each layout."""
    import orbax.checkpoint as ocp
    import orbax.checkpoint.experimental.v1 as v1

    with ocp.CheckpointManager(f"{folder}/manager") as manager:
        for step in (9, 10, 100):
            manager.save(step, args=ocp.args.StandardSave(state(step)))
    named = ocp.CheckpointManagerOptions(step_prefix="step", step_format_fixed_length=6)
    with ocp.CheckpointManager(f"{folder}/prefix", options=named) as manager:
        manager.save(100, args=ocp.args.PyTreeSave(state(100)))
    whole = state(100)
    with ocp.CheckpointManager(f"{folder}/items") as manager:
        rest = {name: value for name, value in whole.items() if name != "params"}
        items = {"state": ocp.args.StandardSave(rest), "params": ocp.args.PyTreeSave(whole["params"])}
        manager.save(100, args=ocp.args.Composite(**items, notes=ocp.args.JsonSave({"by": "hand"})))
    with ocp.CheckpointManager(f"{folder}/model") as manager:
        manager.save(100, args=ocp.args.Composite(model=ocp.args.StandardSave(whole)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{folder}/standard", whole)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(f"{folder}/pytree", whole | {"name": "text"})
    for name, ocdbt, zarr3 in (("folders", False, False), ("zarr3", True, True), ("zarr3-folders", False, True)):
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(f"{folder}/{name}", args=ocp.args.PyTreeSave(whole))
    v1.save(f"{folder}/v1", whole)
    with v1.training.Checkpointer(f"{folder}/v1-manager") as checkpointer:
        checkpointer.save(100, whole)


def read(folder: str, answer: str) -> None:
    """Restore the newest step in every way; all leaves of each go into one file."""
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(folder) as manager:
        assert manager.all_steps() == [10, 20], manager.all_steps()
        step = manager.latest_step()
        template = manager.restore(step)
    found = {}
    for way in WAYS:
        name, *with_template = way.split()
        with ocp.CheckpointManager(folder) as manager:
            if name == "restore":
                tree = manager.restore(step)
            else:
                tree = manager.restore(step, args=getattr(ocp.args, name)(*([template] if with_template else [])))
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            value = np.asarray(leaf)
            about = f"{way}|{jax.tree_util.keystr(path, simple=True, separator='/')}|{value.dtype.name}|{value.shape}"
            found[about] = np.frombuffer(value.tobytes(), np.uint8)
    np.savez(answer, **found)


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](*sys.argv[2:])
