"""examples/digits.py as a module, with its data."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
from sklearn.datasets import load_digits

PATH = Path(__file__).parents[2] / "examples" / "digits.py"


def load() -> ModuleType:
    """The example, imported without running it."""
    spec = importlib.util.spec_from_file_location("digits_example_module", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batches(example: ModuleType, size: int, count: int) -> list[dict[str, np.ndarray]]:
    """The first ``count`` batches of all 1,797 images."""
    images, labels = load_digits(return_X_y=True)
    source = iter(example.Batches(images.reshape(-1, 8, 8).astype(np.float32) / 16, labels.astype(np.int32), size))
    return [next(source) for _ in range(count)]
