"""Every example in every docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import monsess

MODULES = ["monsess", *(module.name for module in pkgutil.walk_packages(monsess.__path__, "monsess."))]
MODULES += [
    f"monsess.hooks.{module.name}" for module in pkgutil.iter_modules(importlib.import_module("monsess.hooks").__path__)
]


@pytest.mark.parametrize("name", sorted(set(MODULES)))
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example may write where it stands
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, raise_on_error=False)
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = sum(len(test.examples) for name in set(MODULES) for test in finder.find(importlib.import_module(name)))
    assert examples > 50
