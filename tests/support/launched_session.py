"""A training of several processes for the launcher's tests, in a session.

``launched_session.py FOLDER STEPS`` ends with its parameters in ``FOLDER/final-<rank>``. Each process says that it
steps in ``FOLDER/step-<attempt>-<rank>``: its process id, and the step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import monsess as ms

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
rank = ms.Server().process_index


def write(name: str, text: str) -> None:
    """Replace a file as a whole."""
    temporary = folder / f"{name}.{os.getpid()}"
    temporary.write_text(text)
    temporary.replace(folder / name)


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    """Of one device."""
    return jnp.mean(jnp.sin(x @ w) ** 2)


@ms.train_step
def train(state: Any, x: jax.Array) -> Any:
    """One step of all devices."""
    value, gradient = jax.value_and_grad(loss)(state["w"], x)
    return {"w": state["w"] - 0.1 * jax.lax.pmean(gradient, "data")}, {"loss": value}


class Says(ms.SessionRunHook):
    """Says that the process steps, and gives a killer time to read it."""

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Write it down."""
        write(f"step-{os.environ['MONSESS_ATTEMPT']}-{rank}", f"{os.getpid()} {run_context.session.global_step}")
        time.sleep(0.02)


with ms.MonitoredTrainingSession(
    lambda: {"w": jnp.linspace(-1.0, 1.0, 4)},
    data=[np.random.default_rng(i).normal(size=(2, 6, 4)).astype(np.float32)[rank] for i in range(steps)],
    checkpoint_dir=str(folder / "checkpoints"),
    save_checkpoint_steps=5,
    hooks=[Says()],
) as sess:
    while not sess.should_stop():
        sess.run(train)
    write(f"final-{rank}", np.asarray(sess.state_copy()["w"]).tobytes().hex())
