"""Show what one step holds: its leaves, and what hooks, input and versions its session noted down.

Only commit.json and session.json are read, and session.json is verified; `monsess verify` reads the rest. Exit status 1
if the step is not committed, or one of the two is damaged.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from monsess.checkpoint.commit import CommitRecord
from monsess.checkpoint.leaves import LeafSpec, named_dtype
from monsess.commands.console import Console, count_text, size_text, time_text
from monsess.commands.options import NEWEST, Parser, add_store, open_store, resolve, step_or_newest
from monsess.commands.reading import commit_of, session_of

_ABOUT_LEAVES = ("leaves", "empties", "format", "step", "run_id", "attempt", "metrics")


def configure(parser: Parser) -> None:
    """Add the arguments of ``monsess show``."""
    add_store(parser)
    parser.add_argument(
        "step", metavar="STEP", nargs="?", type=step_or_newest, default=NEWEST, help="global step (default: newest)"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Show; 0 if the step is committed."""
    from monsess.checkpoint.table import unpack_specs

    store = open_store(args)
    with console.progress(f"reading {store.url}"):
        record = commit_of(store, resolve(store, args.step))
        session = session_of(store, record)
        pinned = record.step in store._pins()
    leaves = [_leaf(spec) for spec in unpack_specs(session)]
    noted = {name: value for name, value in session.items() if name not in _ABOUT_LEAVES}
    console.document({"url": store.url, **_facts(record, pinned), "leaves": leaves, "session": noted})
    _say(console, store.url, record, pinned, leaves, noted)
    return 0


def _facts(record: CommitRecord, pinned: bool) -> dict[str, Any]:
    return {
        "step": record.step,
        "run_id": record.run_id,
        "attempt": record.attempt,
        "time": record.time,
        "started": record.started,
        "size": sum(digest.size for digest in record.files.values()),
        "files": {name: {"size": d.size, "sha256": d.sha256} for name, d in sorted(record.files.items())},
        "metrics": dict(record.metrics),
        "pinned": pinned,
    }


def _leaf(spec: LeafSpec) -> dict[str, Any]:
    size = None
    if spec.kind != "python":
        size = math.prod(spec.shape) * named_dtype(spec.dtype).itemsize
    return {
        "path": spec.path,
        "kind": spec.kind,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "key_impl": spec.key_impl,
        "bytes": size,
    }


def _say(
    console: Console, url: str, record: CommitRecord, pinned: bool, leaves: list[dict[str, Any]], noted: dict[str, Any]
) -> None:
    size = sum(digest.size for digest in record.files.values())
    console.say(f"step {record.step} in {url}{', pinned' if pinned else ''}", "head")
    console.say(f"  committed  {time_text(record.time)}")
    console.say(f"  run        {record.run_id}, attempt {record.attempt}, since {time_text(record.started)}")
    console.say(f"  files      {len(record.files)}, {size_text(size)}")
    for name, value in sorted(record.metrics.items()):
        console.say(f"  metric     {name} = {value!r}")
    for name, value in sorted(noted.items()):
        _say_noted(console, name, value)
    console.say()
    rows = [
        (
            leaf["path"] or "(the state)",
            f"{leaf['kind']} {leaf['key_impl']}" if leaf["key_impl"] else leaf["kind"],
            "" if leaf["kind"] == "python" else str(leaf["shape"]),
            leaf["dtype"],
            "" if leaf["bytes"] is None else str(leaf["bytes"]),
        )
        for leaf in leaves
    ]
    console.table(("LEAF", "KIND", "SHAPE", "DTYPE", "BYTES"), rows, "<<<<>")
    total = sum(leaf["bytes"] or 0 for leaf in leaves)
    console.say(
        f"{count_text(len(leaves), 'leaf') if len(leaves) == 1 else f'{len(leaves)} leaves'}, {size_text(total)}"
    )


def _say_noted(console: Console, name: str, value: Any) -> None:
    if not isinstance(value, dict):
        console.say(f"  {name:<9}  {json.dumps(value, ensure_ascii=False)}")
        return
    for i, (key, inner) in enumerate(sorted(value.items())):
        text = inner if isinstance(inner, str) else json.dumps(inner, ensure_ascii=False, sort_keys=True)
        console.say(f"  {'' if i else name:<9}  {key}: {text}")
