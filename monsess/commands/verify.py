"""Read every byte of steps and compare it with what was committed.

Without STEP and --all the newest committed step is read, which is the one that a restart would take. Exit status 1 if
one of the steps is damaged or not committed; 3 if the store did not answer, which says nothing about the steps.
"""

from __future__ import annotations

import argparse
import shlex
import time
from typing import Any

from monsess.checkpoint.commit import CommitRecord
from monsess.checkpoint.store import CheckpointStore
from monsess.checkpoint.survey import Standing
from monsess.commands.console import Cell, Console, count_text, size_text
from monsess.commands.options import (
    NEWEST,
    Parser,
    UsageError,
    add_store,
    nothing_there,
    open_store,
    resolve,
    step_or_newest,
)
from monsess.errors import StorageError

SOUND, DAMAGED, MISSING, GONE, UNREAD = "sound", "damaged", "not committed", "deleted", "could not be read"
_STYLES = {SOUND: "good", UNREAD: "warn"}
_SHOWN_PROBLEMS = 10
_WORTH_A_SPEED = 1 << 20


def configure(parser: Parser) -> None:
    """Add the arguments of ``monsess verify``."""
    add_store(parser)
    parser.add_argument("steps", metavar="STEP", nargs="*", type=step_or_newest, help="global steps (default: newest)")
    parser.add_argument("--all", action="store_true", help="every step that has a commit record")


def run(args: argparse.Namespace, console: Console) -> int:
    """Verify; 0 if all are sound."""
    if args.all and args.steps:
        raise UsageError("give steps or --all, not both")
    store = open_store(args)
    if args.all:
        with console.progress(f"looking at {store.url}"):
            survey = store._survey()
        wanted = sorted([*survey.committed, *survey.those(Standing.BROKEN)])
    else:
        wanted = sorted({resolve(store, step) for step in args.steps or [NEWEST]})
    rows: list[dict[str, Any]] = []
    try:
        for number, step in enumerate(wanted, start=1):
            with console.progress(f"reading step {step} ({number} of {len(wanted)})"):
                row = _verify(store, step)
            if not (args.all and row["result"] == GONE):  # the retention of a run that goes on
                rows.append(row)
    except KeyboardInterrupt:
        _say(console, store.url, rows)
        raise
    found = {row["result"] for row in rows}
    console.document({"url": store.url, "sound": found == {SOUND}, "steps": rows})
    _say(console, store.url, rows)
    if not rows:
        console.say(nothing_there(store))
    elif args.all or args.steps in ([], [NEWEST]):
        console.say(_what_a_restart_takes(store.url, rows, args.all))
    return 0 if found == {SOUND} else 3 if found <= {SOUND, UNREAD} and rows else 1


def _verify(store: CheckpointStore, step: int) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "result": SOUND, "problems": [], "files": None, "size": None, "seconds": None}
    begun = time.monotonic()
    try:
        record = store._look_at(step, store._look())
        if isinstance(record, CommitRecord):
            row |= {"files": len(record.files), "size": sum(digest.size for digest in record.files.values())}
            problems = store._compare(record, {})
            row["seconds"] = round(time.monotonic() - begun, 3)
            if problems and store._read_commit(step) is None:
                return row | {"result": GONE, "problems": [f"step {step} was deleted while it was read"]}
        else:
            problems = store.verify(step)
            if record is not Standing.BROKEN:
                return row | {"result": MISSING, "problems": problems}
    except StorageError as error:  # the others may well be readable
        return row | {"result": UNREAD, "problems": [str(error)]}
    return row | {"result": DAMAGED, "problems": problems} if problems else row


def _say(console: Console, url: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    table = [
        (
            str(row["step"]),
            "" if row["files"] is None else str(row["files"]),
            size_text(row["size"]),
            _speed(row),
            Cell(row["result"], _STYLES.get(row["result"], "bad")),
        )
        for row in rows
    ]
    console.table(("STEP", "FILES", "SIZE", "SPEED", "RESULT"), table, ">>>>")
    for row in rows:
        for problem in row["problems"][:_SHOWN_PROBLEMS]:
            console.say(f"step {row['step']}: {problem}")
        if len(row["problems"]) > _SHOWN_PROBLEMS:
            console.say(f"step {row['step']}: and {len(row['problems']) - _SHOWN_PROBLEMS} more")
    sound = sum(row["result"] == SOUND for row in rows)
    if sound == len(rows):
        console.say(f"{count_text(sound, 'step')} in {url} sound: every byte is what was committed")
    else:
        console.say(f"{sound} of {count_text(len(rows), 'step')} in {url} sound")


def _what_a_restart_takes(url: str, rows: list[dict[str, Any]], all_of_them: bool) -> str:
    """The end of it; ``rows`` in ascending order, the newest step among them."""
    for row in reversed(rows):
        if row["result"] == SOUND:
            return f"a restart takes step {row['step']}"
        if row["result"] == UNREAD:
            return f"a restart would end with an error: step {row['step']} could not be read"
    if all_of_them:
        return "no step is sound: a restart would end with an error"
    return f"a restart takes an older step, if one is sound: monsess verify --all {shlex.quote(url)}"


def _speed(row: dict[str, Any]) -> str:
    if not row["seconds"] or row["size"] < _WORTH_A_SPEED:
        return ""
    return f"{row['size'] / row['seconds'] / 1e6:.0f} MB/s"
