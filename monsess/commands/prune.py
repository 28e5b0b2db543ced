"""Delete the steps that a policy does not keep.

A step stays if one of the --keep options keeps it. Whatever they say, these stay: the newest step, pinned ones, the one
that the run began from, damaged ones, and those of other runs. Before anything is deleted the newest step is read and
verified; one that turns out damaged does not count. A directory in which a run is training is left to that run, which
has a policy of its own. Exit status 1 if it is refused, or if somebody answers no.
"""

from __future__ import annotations

import argparse
import math
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence

from monsess.checkpoint.commit import CommitRecord, StepRecord
from monsess.checkpoint.evaluations import Evaluations
from monsess.checkpoint.owner import Owner, UnknownOwner, find_owner
from monsess.checkpoint.retention import KeepBest, KeepEvery, KeepLast, Retention
from monsess.checkpoint.store import CheckpointStore, _identity
from monsess.checkpoint.survey import Standing, Survey
from monsess.commands.console import Cell, Console, age_text, count_text, size_text
from monsess.commands.options import Parser, UsageError, add_store, count, nothing_there, open_store
from monsess.commands.ownership import owner_text
from monsess.errors import DamagedCheckpointError, DirectoryInUseError


def configure(parser: Parser) -> None:
    """Add the arguments of ``monsess prune``."""
    add_store(parser)
    parser.add_argument("--keep-last", type=count, metavar="N", help="keep the last N steps")
    parser.add_argument(
        "--keep-best",
        type=_best,
        action="append",
        default=[],
        metavar="N:NAME[:min|max]",
        help="keep the N steps with the lowest (min) or highest (max) value of a metric; may be repeated",
    )
    parser.add_argument("--keep-every-steps", type=count, metavar="N", help="keep one step of each N steps")
    parser.add_argument("--keep-every-hours", type=_hours, metavar="H", help="keep one step of each H hours")
    parser.add_argument("--dry-run", action="store_true", help="show what would go, and delete nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--force", action="store_true", help="even if a run may be training in the directory")
    parser.add_argument("--no-verify", action="store_true", help="trust the newest step without reading it")


def run(args: argparse.Namespace, console: Console) -> int:
    """Prune; 0 if what was to go is gone."""
    policies = _policies(args)
    store = open_store(args)
    with console.progress(f"looking at {store.url}"):
        owner = find_owner(store)
        _refuse_owned(store, owner, args)
        survey = store._survey()
        store._note_damage(store._remembered_damage(store.read_run() or {}), survey)
        evaluations = Evaluations(store._storage)
        evaluations.refresh()
        survey.committed.update({step: evaluations.applied(record) for step, record in survey.committed.items()})
        pinned = store._pins()
    if not survey.committed:
        console.document({"url": store.url, "deleted": [], "kept": [], "freed": 0, "dry_run": args.dry_run})
        console.say(nothing_there(store))
        return 1
    damaged = {*([] if args.no_verify else _damaged(store, survey, console)), *store._damaged}
    if damaged.issuperset(survey.committed):
        raise DamagedCheckpointError(f"Nothing is deleted: no step in {store.url} is sound.")
    reasons = _reasons(survey, policies, pinned, damaged, owner)
    records = survey.committed
    surplus = [step for step in sorted(records) if step not in reasons]
    freed = sum(records[step].size for step in surplus)
    _show(console, store, survey, reasons, surplus)
    if surplus and not args.dry_run and not args.yes and not _agreed(console, surplus, freed, store.url):
        console.say("nothing was deleted")
        return 1
    _refuse_owned(store, find_owner(store), args)  # a run may have begun while somebody thought about it
    gone = [] if args.dry_run else _delete(store, surplus, records, console)
    console.document(
        {
            "url": store.url,
            "dry_run": args.dry_run,
            "deleted": surplus if args.dry_run else gone,
            "kept": [{"step": step, "because": reasons[step]} for step in sorted(reasons)],
            "freed": freed if args.dry_run else sum(records[step].size for step in gone),
        }
    )
    if surplus and not args.dry_run:
        console.say(f"deleted {count_text(len(gone), 'step')} in {store.url}")
    return 0


def _policies(args: argparse.Namespace) -> dict[str, Retention]:
    """What is to be kept, by the option that says so."""
    policies: dict[str, Retention] = {}
    if args.keep_last:
        policies[f"--keep-last {args.keep_last}"] = KeepLast(args.keep_last)
    for best in args.keep_best:
        policies[f"--keep-best {best.n}:{best.metric}:{best.mode}"] = best
    if args.keep_every_steps:
        policies[f"--keep-every-steps {args.keep_every_steps}"] = KeepEvery(steps=args.keep_every_steps)
    if args.keep_every_hours:
        policies[f"--keep-every-hours {args.keep_every_hours:g}"] = KeepEvery(hours=args.keep_every_hours)
    if not policies:
        raise UsageError("say what to keep: --keep-last, --keep-best, --keep-every-steps or --keep-every-hours")
    return policies


def _refuse_owned(store: CheckpointStore, owner: Owner | UnknownOwner | None, args: argparse.Namespace) -> None:
    if owner is None or owner.is_alive is False or args.force or args.dry_run:
        return
    if isinstance(owner, Owner) and owner.is_alive:
        what = (
            f"A run is training in {store.url}, and deletes by its own policy: {owner}. End it first (kill {owner.pid})"
        )
    else:
        what = (
            f"A run may be training in {store.url}, and deletes by its own policy. The {owner_text(owner)}. End it "
            f"first; if it is over: monsess unlock {shlex.quote(store.url)}"
        )
    raise DirectoryInUseError(f"{what}. --force deletes all the same, --dry-run only shows.")


def _damaged(store: CheckpointStore, survey: Survey, console: Console) -> list[int]:
    """The newest steps that are damaged, down to the first that is sound."""
    damaged: list[int] = []
    for step in sorted(survey.committed, reverse=True):
        record = survey.committed[step]
        with console.progress(f"verifying step {step}"):
            problems = store._compare(record, {}) if isinstance(record, CommitRecord) else store.verify(step)
        if not problems:
            return damaged
        console.note(f"step {step} in {store.url} is damaged and does not count: {'; '.join(problems[:3])}")
        damaged.append(step)
    return damaged


def _reasons(
    survey: Survey,
    policies: Mapping[str, Retention],
    pinned: set[int],
    damaged: set[int],
    owner: Owner | UnknownOwner | None,
) -> dict[int, str]:
    """Why each step that stays does."""
    records = survey.committed
    sound = [step for step in sorted(records) if step not in damaged]
    run_id = records[sound[-1]].run_id
    own = [records[step] for step in sound if records[step].run_id == run_id]
    _check_metrics(policies.values(), own)
    kept = {option: policy.keep(own) for option, policy in policies.items()}
    reasons: dict[int, str] = {}
    for step in sorted(records):
        if step in damaged:
            reasons[step] = "damaged"
        elif records[step].run_id != run_id:
            reasons[step] = "another run's"
        elif step == sound[-1]:
            reasons[step] = "newest"
        elif step in pinned:
            reasons[step] = "pinned"
        elif owner is not None and step == owner.restored_from:
            reasons[step] = "the run began from it"
        elif options := [option for option, steps in kept.items() if step in steps]:
            reasons[step] = ", ".join(options)
    return reasons


def _check_metrics(policies: Iterable[Retention], records: Sequence[StepRecord]) -> None:
    """Refuse a metric that no step has: misspelt, it would keep nothing."""
    there = sorted({name for record in records for name in record.metrics})
    for name in (name for policy in policies for name in policy.metrics if name not in there):
        known, _, mode = name.rpartition(":")
        if known in there:
            raise UsageError(f"the mode of the metric {known!r} is min or max, found {mode!r}")
        raise UsageError(f"no step has the metric {name!r}; metrics there: {', '.join(there) or 'none'}")


def _show(
    console: Console, store: CheckpointStore, survey: Survey, reasons: dict[int, str], surplus: list[int]
) -> None:
    now = time.time()
    rows = [
        (
            str(step),
            age_text(now - record.time),
            size_text(record.size),
            record.run_id,
            " ".join(f"{name}={value:g}" for name, value in sorted(record.metrics.items())),
            Cell(f"stays: {reasons[step]}", "dim") if step in reasons else Cell("goes", "bad"),
        )
        for step, record in sorted(survey.committed.items())
    ]
    console.table(("STEP", "AGE", "SIZE", "RUN", "METRICS", "WHAT"), rows, ">>>")
    others = survey.those(Standing.BROKEN, Standing.UNFINISHED, Standing.UNCOMMITTED)
    if others:
        names = [f"{step} (damaged)" if survey.others[step] is Standing.BROKEN else str(step) for step in others]
        console.say(f"not committed, left alone: {', '.join(names)}")
    size = size_text(sum(survey.committed[step].size for step in surplus))
    console.say(
        f"{count_text(len(surplus), 'step')} of {len(survey.committed)} in {store.url} "
        f"{'goes' if len(surplus) == 1 else 'go'}" + (f", {size}" if surplus else "")
    )


def _agreed(console: Console, surplus: list[int], freed: int, url: str) -> bool:
    answer = None
    if not console.as_json:  # which does not show what would go
        answer = console.confirm(f"Delete {count_text(len(surplus), 'step')}, {size_text(freed)}, in {url} for good?")
    if answer is None:
        raise UsageError("nobody can be asked here: say --yes to delete, or --dry-run to see what would go")
    return answer


def _delete(store: CheckpointStore, surplus: list[int], records: dict[int, StepRecord], console: Console) -> list[int]:
    gone: list[int] = []
    for number, step in enumerate(surplus, start=1):
        with console.progress(f"deleting step {step} ({number} of {len(surplus)})"):
            if step in store._pins():
                console.note(f"step {step} was pinned meanwhile and stays")
                continue
            found = store._look_at(step, store._look())
            if isinstance(found, CommitRecord) and _identity(found) != _identity(records[step]):
                console.note(f"step {step} was written anew meanwhile and stays")
                continue
            store._forget(step)
            store._delete_step(step)
        gone.append(step)
    evaluations = Evaluations(store._storage)
    evaluations.refresh(steps=())
    for name in evaluations.of(gone):
        store._storage.delete(name)
    return gone


def _best(text: str) -> KeepBest:
    number, _, rest = text.partition(":")
    name, _, mode = rest.rpartition(":")
    if mode not in ("min", "max"):
        name, mode = rest, "min"
    try:
        return KeepBest(count(number), name, mode)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected N:NAME or N:NAME:max, found {text!r}") from None


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if not 0 < hours < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of hours above 0, found {text!r}")
    return hours
