"""Take a directory away from a run that is over and could not say so.

A run whose process is dead on this machine, or that has not been heard of for three heartbeats, is replaced by the next
one without any command. `monsess unlock` is for an owner on another machine that will not be waited for. One that is
alive on this machine is left alone unless --force is given, which does not end it: it trains on, and takes the
directory back if no other run has begun. Exit status 1 if the owner is left alone, or if there is no such directory.
"""

from __future__ import annotations

import argparse
import shlex

from monsess.checkpoint.owner import OWNER, Owner, UnknownOwner, unlock
from monsess.commands.console import Console
from monsess.commands.options import Parser, add_store, demand_directory, open_store
from monsess.commands.ownership import owner_as_json
from monsess.errors import DirectoryInUseError


def configure(parser: Parser) -> None:
    """Add the arguments of ``monsess unlock``."""
    add_store(parser)
    parser.add_argument(
        "--force",
        action="store_true",
        help="even if the run is alive on this machine, for a copied folder; it does not end that run: end it yourself",
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Unlock; 0 if nobody owns the directory any more."""
    store = open_store(args)
    with console.progress(f"looking at {store.url}"):
        demand_directory(store)
        try:
            owner = unlock(store, force=args.force)
        except DirectoryInUseError as error:
            raise DirectoryInUseError(
                f"{error} Here that is: monsess unlock --force {shlex.quote(store.url)}"
            ) from error
    console.document({"url": store.url, "removed": owner_as_json(owner)})
    console.say(_what_was_done(store.url, owner))
    return 0


def _what_was_done(url: str, owner: Owner | UnknownOwner | None) -> str:
    if owner is None:
        return f"nobody owned {url}"
    if isinstance(owner, UnknownOwner):
        return f"removed {OWNER} in {url}, which could not be read: a run that is training there all the same goes on"
    what = {
        True: f"that process is alive and goes on: end it (kill {owner.pid}), or it takes the directory back",
        False: "that process is dead",
        None: "if that run is alive all the same, it goes on until another one begins here",
    }[owner.is_alive]
    return f"{url} is unlocked; it belonged to {owner}: {what}"
