"""Take a directory away from a run that is over and could not say so.

A run whose process is dead on this machine, or that has not been heard of for three heartbeats, is replaced by the next
one without any command. `monsess unlock` is for an owner on another machine that will not be waited for. One that is
alive on this machine is left alone unless --force is given. Exit status 1 if it is.
"""

from __future__ import annotations

import argparse

from monsess.checkpoint.owner import unlock
from monsess.commands.console import Console
from monsess.commands.options import Parser, add_store, open_store
from monsess.commands.ownership import owner_as_json, owner_text
from monsess.errors import DirectoryInUseError


def configure(parser: Parser) -> None:
    """Add the arguments of ``monsess unlock``."""
    add_store(parser)
    parser.add_argument(
        "--force", action="store_true", help="even if the run is alive: it ends with an error at its next commit"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Unlock; 0 if nobody owns the directory any more."""
    store = open_store(args)
    with console.progress(f"looking at {store.url}"):
        try:
            owner = unlock(store, force=args.force)
        except DirectoryInUseError as error:
            raise DirectoryInUseError(f"{error} Here that is: monsess unlock --force URL.") from error
    console.document({"url": store.url, "removed": owner_as_json(owner)})
    if owner is None:
        console.say(f"nobody owned {store.url}")
    else:
        console.say(f"removed the {owner_text(owner)}")
    return 0
