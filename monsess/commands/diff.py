"""Compare the leaves of two steps, of one directory or of two, bit for bit.

    monsess diff URL STEP STEP2
    monsess diff URL STEP URL2 STEP2

Both steps are verified first. "ulp" counts the floating-point numbers between
two values: 1 is the smallest difference there can be; 0 means that only the
sign of a zero differs. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from typing import Any

from monsess.checkpoint.leaves import LeafSpec
from monsess.checkpoint.store import CheckpointStore
from monsess.commands.console import Cell, Console
from monsess.commands.options import (
    Parser,
    UsageError,
    add_store,
    make_store,
    open_store,
    resolve,
    step_or_newest,
    storage_options,
)
from monsess.commands.reading import OpenStep, opened


def configure(parser: Parser) -> None:
    """Add the arguments of ``monsess diff``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "monsess diff [options] URL STEP [URL2] STEP2"
    add_store(parser)
    parser.add_argument("step", metavar="STEP", type=step_or_newest, help="global step, or 'newest'")
    parser.add_argument(
        "other", metavar="STEP2", nargs="+", help="the step to compare with, after its URL2 if it lies elsewhere"
    )
    parser.add_argument(
        "--other-storage-options", metavar="FILE", help="storage options of URL2 (default: those of URL)"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Compare; 0 if every bit is the same."""
    stores = [open_store(args)]
    try:
        other_step = step_or_newest(args.other[-1])
    except argparse.ArgumentTypeError as error:
        raise UsageError(str(error)) from error
    if len(args.other) > 2:
        raise UsageError(f"expected URL STEP STEP2 or URL STEP URL2 STEP2, found {2 + len(args.other)} arguments")
    if len(args.other) == 2:
        if args.other[0].isdigit() and not os.path.exists(args.other[0]):
            raise UsageError(f"two steps can be compared, found three; a folder of that name is ./{args.other[0]}")
        options = args.other_storage_options or args.storage_options
        stores.append(make_store(args.other[0], storage_options(options)))
    elif args.other_storage_options:
        raise UsageError("--other-storage-options needs a URL2")
    steps = [resolve(stores[0], args.step), resolve(stores[-1], other_step)]
    with contextlib.ExitStack() as stack:
        sides = [_open(stack, console, store, step) for store, step in zip((stores[0], stores[-1]), steps, strict=True)]
        rows = _compare(console, *sides)
        leaves = len({spec.keys for side in sides for spec in side.specs})
    differing = [row for row in rows if row["kind"] != "same"]
    console.document(
        {
            "one": {"url": stores[0].url, "step": steps[0]},
            "other": {"url": stores[-1].url, "step": steps[1]},
            "same": not differing,
            "leaves": leaves,
            "differences": differing,
        }
    )
    _say(
        console,
        differing,
        leaves,
        [f"step {n} of {s.url}" for n, s in zip(steps, (stores[0], stores[-1]), strict=True)],
    )
    return 1 if differing else 0


def _open(stack: contextlib.ExitStack, console: Console, store: CheckpointStore, step: int) -> OpenStep:
    with console.progress(f"reading step {step} in {store.url}"):
        return stack.enter_context(opened(store, step))


def _compare(console: Console, one: OpenStep, other: OpenStep) -> list[dict[str, Any]]:
    theirs = {spec.keys: spec for spec in other.specs}
    rows: list[dict[str, Any]] = []
    with console.progress("comparing"):
        for spec in one.specs:
            if (match := theirs.pop(spec.keys, None)) is None:
                rows.append(_row(spec.path, "only in one", str(spec), None))
            elif _type(spec) != _type(match):
                rows.append(_row(spec.path, "type", str(spec), str(match)))
            else:
                rows.append(_values(spec, one.leaf(spec.keys), other.leaf(spec.keys)))
        rows += [_row(spec.path, "only in other", None, str(spec)) for spec in theirs.values()]
    mine, others = ({(e.keys, e.kind) for e in side.specs.empties} for side in (one, other))
    rows += [_row("/".join(keys), "only in one", f"empty ({kind})", None) for keys, kind in sorted(mine - others)]
    rows += [_row("/".join(keys), "only in other", None, f"empty ({kind})") for keys, kind in sorted(others - mine)]
    return rows


def _type(spec: LeafSpec) -> tuple[Any, ...]:
    return spec.kind, spec.shape, spec.dtype, spec.key_impl


def _values(spec: LeafSpec, one: Any, other: Any) -> dict[str, Any]:
    from monsess.commands.bits import difference

    found = difference(one, other)
    if found is None:
        return _row(spec.path, "same", None, None)
    shown = [str(spec)] * 2
    if spec.kind == "python":
        shown = [
            f"{value!r}"[:60] if type(value) is not int or abs(value) < 1 << 200 else "int" for value in (one, other)
        ]
    if spec.kind == "key":  # how far apart two keys are means nothing
        found = dataclasses.replace(found, max_abs=None, max_ulp=None)
    return _row(spec.path, "values", *shown) | dataclasses.asdict(found)


def _row(path: str, kind: str, one: str | None, other: str | None) -> dict[str, Any]:
    numbers = {"differing": None, "elements": None, "max_abs": None, "max_ulp": None, "nan": None}
    return {"leaf": path, "kind": kind, "one": one, "other": other, **numbers}


def _say(console: Console, rows: list[dict[str, Any]], leaves: int, sides: list[str]) -> None:
    if not rows:
        console.say(f"{sides[0]} and {sides[1]} hold the same bits: {leaves} leaves", "good")
        return
    console.say(f"one:   {sides[0]}")
    console.say(f"other: {sides[1]}")
    console.table(
        ("LEAF", "DIFFERENCE", "ELEMENTS", "MAX ABS", "MAX ULP", "NAN"), [_cells(row) for row in rows], "<<>>>>"
    )
    console.say(f"{len(rows)} of {leaves} leaves differ")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    what = {
        "only in one": f"only in one: {row['one']}",
        "only in other": f"only in other: {row['other']}",
        "type": f"{row['one']}, other: {row['other']}",
        "values": row["one"] if row["one"] == row["other"] else f"{row['one']}, other: {row['other']}",
    }[row["kind"]]
    gap = row["max_abs"]
    return (
        row["leaf"] or "(the state)",
        what if row["kind"] == "values" else Cell(what, "bad"),
        "" if row["differing"] is None else f"{row['differing']} of {row['elements']}",
        "" if gap is None else f"{gap:.6g}" if isinstance(gap, float) else str(gap),
        "" if row["max_ulp"] is None else str(row["max_ulp"]),
        str(row["nan"] or ""),
    )
