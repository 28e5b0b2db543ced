"""List the steps of a checkpoint directory, how its run stands, what else lies there, and who owns it.

Of a directory that holds no run itself, the runs in the folders right below it are listed with their states.

The commit records of the newest steps are read, no other file of a step: "damaged" means that the record itself is not
valid. Of older steps it shows what run.json remembers, so that a directory of thousands is listed at once.
`monsess verify` reads everything. Exit status 1 if there is no committed step, 3 if a commit record could not be read.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from monsess.checkpoint.commit import ORBAX_MARKERS, SESSION, StepRecord
from monsess.checkpoint.evaluations import EVALS, Evaluations
from monsess.checkpoint.owner import find_owner
from monsess.checkpoint.store import PINS, CheckpointStore
from monsess.checkpoint.survey import DELETING_PREFIX, STAGING_PREFIX, Listing, Standing
from monsess.commands.console import Cell, Console, age_text, count_text, size_text
from monsess.commands.options import Parser, add_store, count, nothing_there, open_store
from monsess.commands.ownership import owner_as_json, owner_text
from monsess.errors import StorageError
from monsess.report.glance import Glance, glance, is_run
from monsess.report.standing import STYLES

_STYLES = {
    "committed": "",
    "pinned": "good",
    "unfinished": "warn",
    "foreign": "dim",
    "damaged": "bad",
    "unreadable": "warn",
}
#: Folders of monsess's own that are there for a moment, or hold no step.
_OWN = (STAGING_PREFIX, DELETING_PREFIX)
_READ = 20
_NAMED_ERRORS = 3
_WIDEST_REASON = 100


def configure(parser: Parser) -> None:
    """Add the arguments of ``monsess ls``."""
    add_store(parser)
    parser.add_argument("-n", "--last", type=count, metavar="N", help="only the N highest step numbers")


def run(args: argparse.Namespace, console: Console) -> int:
    """List; 0 if there is a committed step."""
    store = open_store(args)
    with console.progress(f"looking at {store.url}"):
        found = store._look()
        numbers = found.numbers[-args.last :] if args.last else found.numbers
        known = {
            s: one for s, one in store._remembered().items() if s not in found.pending and s not in numbers[-_READ:]
        }
        looks = store._storage.map([lambda s=s: known.get(s) or _look_at(store, s, found) for s in numbers])
        pins = store._pins()
        evaluations = Evaluations(store._storage)
        evaluations.refresh(numbers[-_READ:])
        looks = [evaluations.applied(look) if isinstance(look, StepRecord) else look for look in looks]
        rows = [
            _row(store, step, look, step in pins)
            for step, look in zip(numbers, looks, strict=True)
            # Some stores list the folder of a deleted step for ever.
            if look is not Standing.UNCOMMITTED or not store._is_hollow(step, pending=True)
        ]
        there = store._list_root()
        folders = [name for name, entry in there.items() if entry.is_dir]
        steps = {str(step) for step in found.numbers}
        aside = sorted(n for n in folders if n not in steps and n not in (PINS, EVALS) and not n.startswith(_OWN))
        owner = find_owner(store)
        own = glance(store, there) if is_run(there) else None
        runs = [] if rows or own else _runs_below(store, aside)
        # A folder that is not there at all, or is a step, is worth more words.
        nothing = "" if rows or runs else nothing_there(store)
    console.document(
        {
            "url": store.url,
            "steps": rows,
            "left_out": len(found.numbers) - len(numbers),
            "other_folders": aside,
            "owner": owner_as_json(owner),
            "run": None if own is None else own.as_json(),
            "runs": runs,
        }
    )
    now = time.time()
    if runs:
        return _say_runs(console, store, runs, now)
    console.table(
        ("STEP", "AGE", "SIZE", "STATE", "RUN", "ATTEMPT", "METRICS"),
        [_cells(row, now) for row in rows],
        ">>>",
    )
    committed = [row for row in rows if row["state"] == "committed"]
    if rows:
        more = f", {len(found.numbers) - len(numbers)} older not shown" if args.last else ""
        total = size_text(sum(row["size"] for row in committed))
        console.say(f"{count_text(len(committed), 'committed step')}, {total}{more}, in {store.url}")
    else:
        console.say(nothing)
        if not nothing.startswith("There is no committed"):  # no directory at all, or a step in its place
            return 1
    if aside:
        console.say(f"not steps: {', '.join(aside)}")
    if own is not None:
        console.say(_run_text(own, now), own.standing.style)
    console.say(owner_text(owner))
    errors = [str(look) for look in looks if isinstance(look, StorageError)]
    for error in errors[:_NAMED_ERRORS]:
        console.note(error)
    if len(errors) > _NAMED_ERRORS:
        console.note(f"and {len(errors) - _NAMED_ERRORS} more steps could not be looked at")
    return 3 if errors else 0 if committed else 1


def _runs_below(store: CheckpointStore, folders: list[str]) -> list[dict[str, Any]]:
    """The runs in the folders of a directory that is none itself."""

    def look(folder: str) -> dict[str, Any] | None:
        row: dict[str, Any] = {"folder": folder, "checkpoints": None, "newest": None, "unreadable": None}
        below = CheckpointStore(f"{store._storage.url.rstrip('/')}/{folder}", store._storage._options)
        try:
            names = below._list_root()
            if not is_run(names):
                return None
            # Steps that are being written are among them: what is certain is a matter of one directory at a time.
            steps = sorted(int(name) for name, entry in names.items() if entry.is_dir and name.isdecimal())
            row |= {"checkpoints": len(steps), "newest": steps[-1] if steps else None}
            return row | glance(below, names).as_json()
        except StorageError as error:
            nothing = {"state": "unreadable", "why": "", "step": None, "heard": None, "run_id": None}
            return row | nothing | {"unreadable": str(error)}

    return [row for row in store._storage.map([lambda f=folder: look(f) for folder in folders]) if row is not None]


def _say_runs(console: Console, store: CheckpointStore, runs: list[dict[str, Any]], now: float) -> int:
    console.table(
        ("FOLDER", "STATE", "STEP", "HEARD OF", "CHECKPOINTS", "NEWEST", "RUN", "WHY"),
        [
            (
                row["folder"],
                Cell(row["state"], STYLES.get(row["state"], "")),
                "" if row["step"] is None else str(row["step"]),
                "" if row["heard"] is None else f"{age_text(now - row['heard'])} ago",
                "" if row["checkpoints"] is None else str(row["checkpoints"]),
                "" if row["newest"] is None else str(row["newest"]),
                row["run_id"] or "",
                row["why"][:_WIDEST_REASON],
            )
            for row in runs
        ],
        "<<>>>>",
    )
    console.say(f"{count_text(len(runs), 'run')} in {store.url}")
    errors = [row["unreadable"] for row in runs if row["unreadable"]]
    for error in errors[:_NAMED_ERRORS]:
        console.note(error)
    return 3 if errors else 0


def _run_text(own: Glance, now: float) -> str:
    state, why, heard = own.standing.state, own.standing.why, own.standing.heard
    text = f"run: {state}" + (f", {why}" if why else "") + (f", at step {own.step}" if own.step is not None else "")
    return text + (f", heard of {age_text(now - heard)} ago" if heard is not None else "")


def _look_at(store: CheckpointStore, step: int, listing: Listing) -> StepRecord | Standing | StorageError:
    """One step; that it cannot be read is its state and does not hide the others."""
    try:
        return store._look_at(step, listing)
    except StorageError as error:
        return error


def _row(store: CheckpointStore, step: int, look: StepRecord | Standing | StorageError, pinned: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "state": "committed", "pinned": pinned}
    if isinstance(look, StepRecord):
        return {
            **row,
            "time": look.time,
            "size": look.size,
            "run_id": look.run_id,
            "attempt": look.attempt,
            "metrics": dict(look.metrics),
        }
    if isinstance(look, StorageError):
        nothing: dict[str, Any] = {"time": None, "size": None, "run_id": None, "attempt": None, "metrics": {}}
        return {**row, **nothing, "state": "unreadable"}
    session: dict[str, Any] = store._session_of(str(step)) or {}
    row |= {"time": None, "size": None, "run_id": session.get("run_id"), "attempt": session.get("attempt")}
    row["metrics"] = {}
    row["state"] = "damaged" if look is Standing.BROKEN else "unfinished"
    if look is Standing.UNCOMMITTED and not session and _is_foreign(store, step):
        row["state"] = "foreign"
    return row


def _is_foreign(store: CheckpointStore, step: int) -> bool:
    """Whether a step is a checkpoint that monsess did not write."""
    try:
        names = store._storage.list(str(step))
    except FileNotFoundError:
        return False
    return SESSION not in names and not set(ORBAX_MARKERS).isdisjoint(names)


def _cells(row: dict[str, Any], now: float) -> tuple[str, ...]:
    state = row["state"]
    return (
        str(row["step"]),
        "" if row["time"] is None else age_text(now - row["time"]),
        size_text(row["size"]),
        Cell(f"{state}, pinned" if row["pinned"] else state, _STYLES["pinned" if row["pinned"] else state]),
        str(row["run_id"] or ""),
        str(row["attempt"] or ""),
        " ".join(f"{name}={value:g}" for name, value in sorted(row["metrics"].items())),
    )
