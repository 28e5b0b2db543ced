"""Arguments that commands share: the directory, credentials that never stand on a command line, steps."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
from collections.abc import Mapping
from typing import Any, NoReturn

from monsess.checkpoint.commit import COMMIT, SESSION
from monsess.checkpoint.store import CheckpointStore
from monsess.errors import MonsessError
from monsess.log import mask

#: str: the environment variable that holds storage options as JSON.
OPTIONS_VARIABLE = "MONSESS_STORAGE_OPTIONS"
#: str: stands for the newest committed step.
NEWEST = "newest"
_STEP = re.compile(r"0|[1-9][0-9]*")


class UsageError(Exception):
    """The command was called with something that cannot be meant."""


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` whose complaints never repeat credentials, and name one way to help."""

    def error(self, message: str) -> NoReturn:
        """Leave with exit status 2."""
        raise UsageError(f"{mask(message)} (try: {self.prog} --help)")

    def parse_known_args(self, *args: Any, **named: Any) -> Any:
        """Complain of what a subcommand does not know here, where its own options are known."""
        found, unknown = super().parse_known_args(*args, **named)
        if unknown and self.prog != "monsess":
            options = [flag for action in self._actions for flag in action.option_strings]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], options, 1)
            hint = f"; did you mean {near[0]}?" if near and unknown[0].startswith("-") else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add what every command about a directory takes."""
    parser.add_argument("url", metavar="URL", help="checkpoint directory: a local path or any fsspec URL")
    parser.add_argument(
        "--storage-options",
        metavar="FILE",
        help=f"JSON file with the options of the fsspec filesystem; without it {OPTIONS_VARIABLE} is taken, if set",
    )
    parser.add_argument("--json", action="store_true", help="write one JSON document instead of tables")


def open_store(args: argparse.Namespace) -> CheckpointStore:
    """The store that the arguments of `add_store` describe."""
    return make_store(args.url, storage_options(args.storage_options))


def make_store(url: str, options: Mapping[str, Any]) -> CheckpointStore:
    """A store, or a `UsageError` where ``url`` cannot be one."""
    try:
        return CheckpointStore(url, options)
    except ValueError as error:
        raise UsageError(str(error)) from error


def storage_options(file: str | None) -> dict[str, Any]:
    """Storage options from ``file``, or from the environment."""
    where = file
    if file is not None:
        try:
            with open(file, encoding="utf-8") as reader:
                text = reader.read()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"could not read the storage options in {file} ({type(error).__name__})") from None
    else:
        text, where = os.environ.get(OPTIONS_VARIABLE, ""), OPTIONS_VARIABLE
        if not text.strip():
            return {}
    try:
        options = json.loads(text)
    except ValueError as error:  # the text may hold secrets: only the place is told
        place = f"line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else "?"
        raise UsageError(f"the storage options in {where} are not valid JSON ({place})") from None
    if not isinstance(options, dict):
        raise UsageError(f'the storage options in {where} must be a JSON object, such as {{"key": "..."}}')
    return options


def step_or_newest(text: str) -> int | str:
    """The type of an argument: a global step, or the word for the newest."""
    return NEWEST if text == NEWEST else step(text)


def step(text: str) -> int:
    """The type of an argument: a global step."""
    if not _STEP.fullmatch(text):
        raise argparse.ArgumentTypeError(f"a step is a whole number from 0 on, found {mask(text)!r}")
    return int(text)


def count(text: str) -> int:
    """The type of an argument: a whole number from 1 on."""
    if not _STEP.fullmatch(text) or text == "0":
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, found {mask(text)!r}")
    return int(text)


def whole(text: str) -> int:
    """The type of an argument: a whole number from 0 on."""
    if not _STEP.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, found {mask(text)!r}")
    return int(text)


def resolve(store: CheckpointStore, wanted: int | str) -> int:
    """The number of the wanted step; the newest committed one is looked up.

    Raises:
        MonsessError: There is no committed checkpoint.
    """
    if isinstance(wanted, int):
        return wanted
    steps = store.steps()
    if not steps:
        raise MonsessError(nothing_there(store))
    return steps[-1]


def demand_directory(store: CheckpointStore) -> None:
    """Complain of a local directory that does not exist; elsewhere a folder without an object is as good as none.

    Raises:
        MonsessError: There is no such directory.
    """
    if store._storage.local_path is not None and not os.path.lexists(store._storage.local_path):
        raise MonsessError(f"There is no directory {store.url}")


def nothing_there(store: CheckpointStore) -> str:
    """Why there is no committed checkpoint: no directory, a step in its place, or just none.

    Raises:
        StorageError: The store could not be looked at.
    """
    try:
        demand_directory(store)
    except MonsessError as error:
        return str(error)
    folder, _, name = store.url.rstrip("/").rpartition("/")
    if _STEP.fullmatch(name) and not {COMMIT, SESSION}.isdisjoint(store._list_root()):
        return f"{store.url} is a step itself: monsess show {shlex.quote(folder or '/')} {name}"
    if store.url.startswith("memory://"):
        return f"There is no committed checkpoint in {store.url}, and what others put into memory:// is not seen here"
    return f"There is no committed checkpoint in {store.url}"
