"""Every trap has a test, but those of what is not built yet."""

from __future__ import annotations

import ast
from pathlib import Path

# Not here: W-47, which belongs to what is not built yet.
REQUIRED = {f"W-{n:02d}" for n in (*range(1, 47), *range(48, 57))}


def _marked(path: Path) -> set[str]:
    """The ids of ``@trap(...)`` on the test functions of a file."""
    return {
        argument.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "trap"
        for argument in decorator.args
        if isinstance(argument, ast.Constant)
    }


def test_every_trap_has_a_test():
    marked = set().union(*(_marked(path) for path in Path(__file__).parent.glob("test_traps_*.py")))
    assert sorted(REQUIRED - marked) == []
    assert sorted(marked - REQUIRED) == []
