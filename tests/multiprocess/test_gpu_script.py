"""The script for an accelerator works, on emulated devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "gpu" / "check.py"


@pytest.mark.slow
@pytest.mark.timeout(430)  # above that of the script
def test_the_script_for_an_accelerator_runs_on_emulated_devices():
    ended = subprocess.run([sys.executable, str(SCRIPT), "--devices=2"], capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "everything held" in ended.stdout
    assert "pmap and shard_map: equal bits" in ended.stdout
    assert "same bits as the uninterrupted run: yes" in ended.stdout
