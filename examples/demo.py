"""Show the point of monsess: train, kill -9, start again, and compare every bit with a run that nobody disturbed.

Called by ``make demo``; needs nothing but ``pip install -e '.[examples]'``.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import monsess as ms

DIGITS = Path(__file__).with_name("digits.py")
LAST_STEP = 400
SAVE_STEPS = 50
WANTED_ACCURACY = 0.95


def say(text: str) -> None:
    print(f"\n>>> {text}", flush=True)


def train(name: str, directory: Path, devices: int, kill_when: Callable[[list[str]], bool] | None = None) -> list[str]:
    """Run digits.py in a process of its own, show what it prints, and return it.

    Args:
        name: What stands before each line.
        directory: Its checkpoint directory.
        devices: Emulated CPU devices, or 0 for those of the machine.
        kill_when: Asked at each line with all lines so far; at the first True the process is killed by SIGKILL.
    """
    command = [sys.executable, "-u", str(DIGITS), f"--checkpoint_dir={directory}"]
    command += [f"--last_step={LAST_STEP}", f"--save_checkpoint_steps={SAVE_STEPS}", "--batch_size=128"]
    command += [f"--devices={devices}"]
    lines: list[str] = []
    killed = False
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            print(f"{name:>9} | {lines[-1]}", flush=True)
            if kill_when is not None and not killed and kill_when(lines):
                process.kill()
                killed = True
                print(f"{name:>9} | *** SIGKILL ***", flush=True)
    if kill_when is not None and process.returncode == 0:
        sys.exit(f"{name}: digits.py came to its end before it could be killed")
    if process.returncode != (0 if kill_when is None else -9):
        sys.exit(f"{name}: digits.py ended with exit code {process.returncode}")
    return lines


def last_number(pattern: str, lines: list[str]) -> int | None:
    """What the group in ``pattern`` matches in the last line that it fits."""
    found = [match for match in (re.search(pattern, line) for line in lines) if match]
    return int(found[-1].group(1)) if found else None


def accuracy_of(lines: list[str]) -> float:
    return next(float(line.split()[-1]) for line in reversed(lines) if line.startswith("test accuracy"))


def curve_of(lines: list[str]) -> dict[str, str]:
    """What was logged at which step."""
    found = (re.search(r"(accuracy = .*), step = (\d+)", line) for line in lines)
    return {match.group(2): match.group(1) for match in found if match}


def bits(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
    """All that a leaf is: dtype, shape and bytes; of a typed key, those of its data."""
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", np.dtype(bool)), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return str(array.dtype), array.shape, array.tobytes()


def differing_leaves(one: Path, other: Path) -> list[str]:
    """Compare the newest checkpoints of two directories leaf by leaf; return the paths that differ."""
    trees = [ms.load_checkpoint(str(directory)) for directory in (one, other)]
    first, second = (
        {jax.tree_util.keystr(p): bits(v) for p, v in jax.tree_util.tree_leaves_with_path(t)} for t in trees
    )
    print(f"{len(first)} leaves, {sum(len(data) for _, _, data in first.values()):,} bytes compared")
    return sorted(path for path in first.keys() | second.keys() if first.get(path) != second.get(path))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the kill moment")
    parser.add_argument("--devices", type=int, default=4, help="emulated CPU devices; 0: the devices of the machine")
    flags = parser.parse_args()
    seed, devices = flags.seed, flags.devices
    chance = random.Random(seed)
    kill_step = chance.randrange(2 * SAVE_STEPS, LAST_STEP // 2)

    with tempfile.TemporaryDirectory(prefix="monsess-demo-") as scratch:
        straight, disturbed = Path(scratch, "straight"), Path(scratch, "disturbed")

        where = f"{devices} emulated devices" if devices else "the devices of this machine"
        say(f"1. A straight run: {LAST_STEP} steps on {where}, a checkpoint every {SAVE_STEPS} steps.")
        wanted = curve_of(train("straight", straight, devices))

        say(f"2. The same run, killed by SIGKILL somewhat after step {kill_step} (chosen by --seed {seed}).")

        def kill_when(lines: list[str]) -> bool:
            if (last_number(r"\bstep = (\d+)", lines) or 0) < kill_step:
                return False
            if last_number(r"saved step (\d+)", lines) is None:
                return False  # not before there is something to go on from
            time.sleep(chance.uniform(0.0, 0.2))  # at no particular place
            return True

        before = train("killed", disturbed, devices, kill_when)

        say("3. The same command again.")
        lines = train("resumed", disturbed, devices)

        say("4. The final checkpoints of both, compared.")
        steps = [ms.latest_checkpoint(str(directory)) for directory in (straight, disturbed)]
        restored = last_number(r"restored step (\d+)", lines)
        if steps != [LAST_STEP, LAST_STEP] or restored is None:
            print(f"the last checkpoints are of the steps {steps}, not {LAST_STEP}; restored step: {restored}")
            return 1
        differing = differing_leaves(straight, disturbed)
        curve = curve_of(before) | curve_of(lines)
        same = sum(curve.get(step) == value for step, value in wanted.items())
        accuracy = accuracy_of(lines)
        for path in differing:
            print(f"differs: {path}")
        print(f"restored step {restored}, went on to step {LAST_STEP}")
        print(f"{same} of {len(wanted)} logged lines as in the uninterrupted run")
        print(f"same bits as the uninterrupted run: {'no' if differing else 'yes'}")
        print(f"test accuracy: {accuracy:.4f} (at least {WANTED_ACCURACY} wanted)")
        return 1 if differing or same < len(wanted) or accuracy < WANTED_ACCURACY else 0


if __name__ == "__main__":
    sys.exit(main())
