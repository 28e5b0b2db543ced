"""What is worth trying on an accelerator, in under four minutes: a prepared script, not a pytest file.

    python tests/gpu/check.py [--devices N]

Runs with XLA's deterministic flags on the devices of the machine: the digits example straight, killed and resumed, all
bits compared; a hundred steps with both engines, compared; the overhead of a monitored step. With ``--devices N`` on N
emulated CPU devices, as the tests do, so that the script itself is known to work. Exit status 0 if everything held.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "--xla_gpu_deterministic_ops=true"


def main() -> int:
    """Run everything, and say what held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=0, help="emulated CPU devices; 0: those of the machine")
    parser.add_argument("--engines-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engines_only:
        return compare_engines(args.devices)
    env = dict(os.environ)
    if not args.devices:
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {FLAGS}".strip()
    devices = f"--devices={args.devices}"
    parts = {
        "engines": [__file__, "--engines-only", devices],
        "digits, killed and resumed": [str(ROOT / "examples" / "demo.py"), devices, "--seed=7"],
        "overhead": [str(ROOT / "benchmarks" / "overhead.py"), devices, "--rounds=5", "--steps=200"],
    }
    failed = []
    for name, command in parts.items():
        print(f"\n=== {name}", flush=True)
        begun = time.monotonic()
        code = subprocess.run([sys.executable, *command], env=env, timeout=150, check=False).returncode
        print(f"=== {name}: exit {code}, {time.monotonic() - begun:.0f} s", flush=True)
        if code:
            failed.append(name)
    print("failed: " + ", ".join(failed) if failed else "everything held")
    return 1 if failed else 0


def compare_engines(devices: int) -> int:
    """A hundred steps of a small network by both engines; equal bits are wanted, and what is found is said."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import monsess as ms

    if devices:
        ms.testing.emulate_devices(devices)
    print(jax.devices(), "jax", jax.__version__)

    def step(
        state: dict[str, jax.Array], batch: dict[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        def loss_fn(w: dict[str, jax.Array]) -> jax.Array:
            return ((jnp.tanh(batch["x"] @ w["a"]) @ w["b"] - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state)
        grads = jax.lax.pmean(grads, "data")
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), {"loss": loss}

    rng = np.random.default_rng(0)
    rows = 32 * jax.local_device_count()
    batches = [
        {"x": rng.normal(size=(rows, 16)).astype("f"), "y": rng.normal(size=(rows, 1)).astype("f")} for _ in range(10)
    ]
    init = {"a": rng.normal(size=(16, 32)).astype("f") / 4, "b": rng.normal(size=(32, 1)).astype("f") / 6}
    ends = {}
    for engine in ("pmap", "shard_map"):
        train = ms.train_step(engine=engine)(step)
        hooks = [ms.StopAtStepHook(last_step=100)]
        with ms.MonitoredTrainingSession(lambda: init, data=ms.repeat(batches), hooks=hooks) as session:
            while not session.should_stop():
                session.run(train)
            ends[engine] = jax.tree.map(np.asarray, session.state_copy())
    furthest = max(float(np.abs(ends["pmap"][name] - ends["shard_map"][name]).max()) for name in init)
    equal = all(ends["pmap"][name].tobytes() == ends["shard_map"][name].tobytes() for name in init)
    print(f"pmap and shard_map: {'equal bits' if equal else f'furthest apart {furthest:.3g}'} after 100 steps")
    return 0 if equal or furthest < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
