"""Write ``docs/conformance.md``: for each behaviour of TensorFlow 1 the test that covers it, or what there is instead.

The inventory is ``tests/conformance/cases.json``; the marks are the ``conforms(...)`` decorators of the tests, read
from the source, so that the page needs neither JAX nor a test run. ``--check`` writes nothing and fails if a
behaviour has no test, a test names an unknown behaviour, or the page is not what would be written.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SHOWN = 20  # problems that are printed one by one

TITLES = {
    "MS": "Sessions (`monitored_session_test.py`)",
    "BH": "Built-in hooks (`basic_session_run_hooks_test.py`)",
    "CO": "Coordinator (`coordinator_test.py`)",
    "SL": "Clusters (`server_lib_test.py` and its siblings)",
    "SR": "Synchronous replicas (`sync_replicas_optimizer_test.py`)",
    "ES": "Early stopping (Estimator's `early_stopping_test.py`)",
    "EH": "Evaluation in the loop (Estimator's `hooks_test.py`)",
    "IP": "Input position (`checkpoint_input_pipeline_hook_test.py`)",
    "EV": "Evaluation beside the training (contrib's `evaluation_test.py`)",
}

HEAD = """\
# Conformance with TensorFlow 1

*Written by `scripts/conformance.py`; do not edit.*

For people who come from TensorFlow 1's monitored sessions. The behaviours that TensorFlow's own tests check were
written down one by one, in our words; each row says which test of monsess covers it, or what monsess does instead
and why. *No counterpart* marks what exists only because of TensorFlow's graphs. TensorFlow's session creators and
private wrapper sessions are not ported: their behaviours are tested through the one public session.
"""


@dataclass(frozen=True)
class Case:
    """One behaviour of the inventory."""

    id: str
    applies: bool
    behaviour: str
    tf_test: str
    note: str | None = None
    deferred: bool = False


@dataclass(frozen=True)
class Mark:
    """One id on one test."""

    test: str
    instead: str | None


@dataclass
class Found:
    """What the tests say: the marks by id, and what is wrong with them."""

    marks: dict[str, list[Mark]] = field(default_factory=lambda: defaultdict(list))
    problems: list[str] = field(default_factory=list)


def load_cases(path: Path) -> list[Case]:
    """Read the inventory."""
    return [Case(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def collect(tests: Path) -> Found:
    """Read the marks of all tests below ``tests``."""
    found = Found()
    for path in sorted(tests.rglob("test_*.py")):
        scan(path.read_text(encoding="utf-8"), path.relative_to(tests).as_posix(), found)
    return found


def scan(source: str, name: str, found: Found) -> None:
    """Add the marks of one test file to ``found``.

    Args:
        source: The text of the file.
        name: Its path below ``tests``.
        found: Where the marks and the problems go.
    """
    tree = ast.parse(source, name)
    on_tests: set[int] = set()
    for function, qualified in _tests(tree.body):
        marks = [call for decorator in function.decorator_list for call in _conforms_calls(decorator)]
        on_tests.update(id(call) for call in marks)
        if marks and any(_never_runs(decorator) for decorator in function.decorator_list):
            found.problems.append(
                f"{name}:{function.lineno} {qualified} is skipped or expected to fail: it shows nothing"
            )
            continue
        for call in marks:
            _read(call, f"{name}::{qualified}", found)
    for call in _conforms_calls(tree):
        if id(call) not in on_tests:
            found.problems.append(f"{name}:{call.lineno} conforms(...) is not the decorator of a test function")


def _tests(body: Sequence[ast.stmt], inside: str = "") -> Iterator[tuple[ast.FunctionDef, str]]:
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield node, inside + node.name
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _tests(node.body, f"{inside}{node.name}::")


def _conforms_calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", None)
            if name == "conforms":
                yield node


def _never_runs(decorator: ast.expr) -> bool:
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(function, ast.Attribute) and function.attr in ("skip", "xfail")


def _read(call: ast.Call, test: str, found: Found) -> None:
    try:
        ids = [ast.literal_eval(argument) for argument in call.args]
        keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except ValueError:
        found.problems.append(f"{test}: the arguments of conforms(...) must be plain strings")
        return
    if not ids:
        found.problems.append(f"{test}: conforms() names no behaviour")
    for id_ in ids:
        found.marks[id_].append(Mark(test, keywords.get("instead")))


def gaps(cases: Sequence[Case], found: Found) -> list[str]:
    """Return what stands between the tests and the inventory, one sentence each; empty if nothing does."""
    known = {case.id for case in cases}
    unknown = [
        f"{marks[0].test} names {id_}, which is not in cases.json"
        for id_, marks in found.marks.items()
        if id_ not in known
    ]
    missing = [
        f"{case.id} has no test: {case.behaviour}"
        for case in cases
        if case.applies and not case.deferred and case.id not in found.marks
    ]
    return [*found.problems, *unknown, *missing]


def render(cases: Sequence[Case], found: Found) -> str:
    """Return the text of the page."""
    rows = [(case, *_status(case, found)) for case in cases]
    parts = [HEAD, _counts(rows)]
    for prefix, title in TITLES.items():
        parts.append(f"\n## {title}\n\n| id | behaviour in TensorFlow 1 | in monsess |\n|---|---|---|\n")
        parts += [
            f"| {case.id} | {_cell(_prose(case.behaviour))} | {_cell(text)} |\n"
            for case, _, text in rows
            if case.id.startswith(prefix)
        ]
    return "".join(parts)


def _status(case: Case, found: Found) -> tuple[str, str]:
    marks = found.marks.get(case.id, [])
    if not case.applies:
        return "no counterpart", f"*No counterpart:* {case.note}." + "".join(f" {_name(mark)}" for mark in marks)
    tests = "<br>".join(dict.fromkeys(_name(mark) for mark in marks))
    instead = list(dict.fromkeys(mark.instead for mark in marks if mark.instead))
    if instead:
        return "instead", f"*Instead:* {_prose(' '.join(instead))}<br>{tests}"
    if marks:
        return "same", tests
    return ("later", "*Later:* the hook is not built yet.") if case.deferred else ("missing", "**missing**")


def _name(mark: Mark) -> str:
    return f"`{mark.test}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _prose(text: str) -> str:
    return text.replace("<", "&lt;")


def _counts(rows: Sequence[tuple[Case, str, str]]) -> str:
    columns = ["same", "instead", "later", "no counterpart"]
    if any(status == "missing" for _, status, _ in rows):
        columns.append("missing")
    lines = [f"\n| list | behaviours | {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) + 1)]
    for label, prefixes in [*((prefix, (prefix,)) for prefix in TITLES), ("**all**", tuple(TITLES))]:
        statuses = [status for case, status, _ in rows if case.id.startswith(prefixes)]
        counts = " | ".join(str(statuses.count(column)) for column in columns)
        lines.append(f"| {label} | {len(statuses)} | {counts} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or check it; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on gaps and on a stale page")
    check = parser.parse_args(arguments).check
    cases = load_cases(ROOT / "tests" / "conformance" / "cases.json")
    found = collect(ROOT / "tests")
    page = ROOT / "docs" / "conformance.md"
    problems = gaps(cases, found)
    text = render(cases, found)
    if not check:
        page.write_text(text, encoding="utf-8")
    elif not page.exists() or page.read_text(encoding="utf-8") != text:
        problems.append("docs/conformance.md is stale: run `make conformance`")
    for problem in problems[:SHOWN]:
        print(problem, file=sys.stderr)
    if len(problems) > SHOWN:
        print(f"... and {len(problems) - SHOWN} more", file=sys.stderr)
    covered = sum(1 for case in cases if case.applies and not case.deferred and case.id in found.marks)
    wanted = sum(1 for case in cases if case.applies and not case.deferred)
    print(f"conformance: {covered} of {wanted} behaviours have a test, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
