"""A training of several processes for the launcher's tests, in plain JAX: it does not know monsess.

``launched_plain.py FOLDER STEPS`` ends with its parameters in ``FOLDER/final-<rank>``, and goes on from where the
chief has saved them. Each process says that it steps in ``FOLDER/step-<attempt>-<rank>``: its process id, and the step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
rank, attempt = int(os.environ["MONSESS_PROCESS_ID"]), os.environ["MONSESS_ATTEMPT"]
jax.distributed.initialize(
    os.environ["MONSESS_COORDINATOR"],
    int(os.environ["MONSESS_PROCESS_COUNT"]),
    rank,
    coordinator_bind_address=os.environ["MONSESS_COORDINATOR"],
    heartbeat_timeout_seconds=10,
)
assert jax.process_count() == 2
assert jax.local_device_count() == int(os.environ["MONSESS_LOCAL_DEVICES"])


def write(name: str, text: str) -> None:
    """Replace a file as a whole."""
    temporary = folder / f"{name}.{os.getpid()}"
    temporary.write_text(text)
    temporary.replace(folder / name)


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    """Of one device."""
    return jnp.mean(jnp.sin(x @ w) ** 2)


def update(w: jax.Array, x: jax.Array) -> jax.Array:
    """One step of all devices."""
    return w - 0.1 * jax.lax.pmean(jax.grad(loss)(w, x), "data")


train = jax.pmap(update, axis_name="data", in_axes=(None, 0), out_axes=None)
done, w = 0, np.linspace(-1, 1, 4, dtype=np.float32)
if (folder / "saved").exists():
    first, second = (folder / "saved").read_text().split()
    done, w = int(first), np.frombuffer(bytes.fromhex(second), np.float32)
while done < steps:
    batch = np.random.default_rng(done).normal(size=(2, jax.local_device_count(), 3, 4)).astype(np.float32)
    w = np.asarray(train(w, batch[rank]))
    done += 1
    if rank == 0 and done % 5 == 0:
        write("saved", f"{done} {w.tobytes().hex()}")
    write(f"step-{attempt}-{rank}", f"{os.getpid()} {done}")
    time.sleep(0.02)
write(f"final-{rank}", w.tobytes().hex())
