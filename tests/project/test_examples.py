"""The examples run as a person would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import monsess

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_smallest_example_runs_and_runs_again(tmp_path):
    assert "'slope': " in run("smallest.py", cwd=tmp_path)
    state = monsess.load_checkpoint(str(tmp_path / "smallest-run"))
    assert abs(state["slope"] - 3.0) < 0.05
    assert abs(state["offset"] - 2.0) < 0.05
    run("smallest.py", cwd=tmp_path)
    assert monsess.latest_checkpoint(str(tmp_path / "smallest-run")) == 200


def test_digits_example_takes_its_flags(tmp_path):
    flags = ["--checkpoint_dir=digits", "--save_checkpoint_steps=4", "--devices=2", "--batch_size=64"]
    assert "test accuracy" in run("digits.py", *flags, "--last_step=10", cwd=tmp_path)
    assert monsess.CheckpointStore(str(tmp_path / "digits")).steps() == [4, 8, 10]
    run("digits.py", *flags, "--last_step=12", cwd=tmp_path)
    assert monsess.CheckpointStore(str(tmp_path / "digits")).steps() == [4, 8, 10, 12]


def test_digits_example_needs_no_directory(tmp_path):
    assert "test accuracy" in run("digits.py", "--last_step=2", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
