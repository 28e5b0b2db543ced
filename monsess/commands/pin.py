"""Protect steps from deletion by retention, by `monsess prune` and by `CheckpointStore.delete`.

A pin is an object pins/STEP in the directory; a run that is going on sees it before its next deletion. Exit status 1 if
a step is not committed; then nothing is changed.
"""

from __future__ import annotations

import argparse

from monsess.commands.console import Console
from monsess.commands.options import Parser, add_store, demand_directory, open_store, resolve, step_or_newest
from monsess.commands.reading import commit_of


def configure(parser: Parser) -> None:
    """Add the arguments of ``monsess pin``."""
    add_store(parser)
    parser.add_argument("steps", metavar="STEP", nargs="+", type=step_or_newest, help="global steps, or 'newest'")
    parser.add_argument("--remove", action="store_true", help="take the pins away")


def run(args: argparse.Namespace, console: Console) -> int:
    """Pin or unpin; 0 if done."""
    store = open_store(args)
    with console.progress(f"writing to {store.url}"):
        demand_directory(store)
        steps = sorted({resolve(store, step) for step in args.steps})
        before = store._pins()
        if args.remove:
            for step in steps:
                store.unpin(step)
        else:
            for step in steps:
                commit_of(store, step)  # all of them before the first is pinned
            for step in steps:
                store.pin(step)
        after = store._pins()
    console.document({"url": store.url, "steps": steps, "pinned": sorted(after)})
    for step in steps:
        if args.remove:
            console.say(f"step {step} is not pinned any more" if step in before else f"step {step} was not pinned")
        else:
            console.say(f"step {step} was pinned already" if step in before else f"step {step} is now pinned")
    console.say(f"pinned in {store.url}: {', '.join(map(str, sorted(after))) or 'none'}")
    return 0
