"""Look on while a run records values and events, wherever it runs: each record once, until the run ends.

After an end with an error, a preemption or a kill the next attempt is waited for (--wait); so is the first one. With
--json each record is one line of JSON, as the run wrote it. Exit status 0 if the run ended cleanly, 1 if it failed,
died, or never began.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from monsess import clock
from monsess.checkpoint.owner import Owner, UnknownOwner, find_owner
from monsess.checkpoint.store import CheckpointStore
from monsess.commands.console import Console
from monsess.commands.options import Parser, add_store, open_store, whole
from monsess.errors import StorageError
from monsess.records.lines import encode
from monsess.report import cleaner, follower_of
from monsess.report.progress import Pulse, lines_of

#: Ends after which the run goes on, if somebody starts it again.
_TO_BE_CONTINUED = ("ERROR", "PREEMPTED")
_INTERVAL_SECS = 1.0


def configure(parser: Parser) -> None:
    """Add the arguments of ``monsess tail``."""
    add_store(parser)
    parser.add_argument("-n", "--last", type=whole, metavar="N", default=10, help="begin N records back (default: 10)")
    parser.add_argument(
        "--wait",
        type=whole,
        metavar="SECS",
        default=60,
        help="how long to wait for the first attempt, or for the next one after a failure (default: 60)",
    )
    parser.add_argument(
        "--interval", type=_seconds, metavar="SECS", default=_INTERVAL_SECS, help="seconds between looks (default: 1)"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Look on; 0 if the run ended cleanly."""
    store = open_store(args)
    follower, clean = follower_of(store), cleaner(store)
    watch = _Watch(store, console, args.wait)
    began = True
    while True:
        try:
            records = list(map(clean, follower.new()))
        except StorageError as error:
            if began or watch.gives_up(error):
                raise
            clock.sleep(args.interval)
            continue
        for record in records:
            watch.take(record)
        shown = [record for record in records if console.as_json or any(lines_of(record))]
        for record in shown[max(0, len(shown) - args.last) :] if began else shown:
            _show(record, console)
        began = False
        sys.stdout.flush()
        status = watch.verdict(bool(records))
        if status is not None:
            return status
        clock.sleep(args.interval)


class _Watch:
    """Decides when there is nothing to wait for any more.

    Args:
        store: The directory.
        console: Where it says why.
        wait: Seconds to wait for an attempt.
    """

    def __init__(self, store: CheckpointStore, console: Console, wait: float) -> None:
        self._store, self._console, self._wait = store, console, wait
        self._pulse = Pulse()
        self._attempt: Mapping[str, Any] | None = None
        self._end: Mapping[str, Any] | None = None
        self._waiting_since: float | None = None
        self._lost_since: float | None = None
        self._said = ""

    def take(self, record: Mapping[str, Any]) -> None:
        """Take in a record."""
        if record.get("event") == "end":
            self._end = record
        elif record.get("event") == "start" or self._attempt is None:
            self._attempt, self._end = record, None

    def gives_up(self, error: StorageError) -> bool:
        """Whether a store that could be read before has not answered for too long."""
        now = clock.monotonic()
        if self._lost_since is None:
            self._lost_since = now
            self._console.note(str(error))
        return now - self._lost_since >= self._wait

    def verdict(self, news: bool) -> int | None:
        """The exit status; None as long as there may be more.

        Args:
            news: Whether there were records just now.
        """
        now = clock.monotonic()
        self._lost_since = None
        if news:
            self._waiting_since, self._said = None, ""
        if self._end is not None and not self._is_failed(self._end) and self._end.get("reason") not in _TO_BE_CONTINUED:
            return 0
        why = self._obstacle(now, news)
        if why is None:
            self._waiting_since = None
            return None
        if self._waiting_since is None:
            self._waiting_since = now
        left = self._wait - (now - self._waiting_since)
        if left <= 0:
            self._console.note(f"{why}; nothing more to wait for")
            return 0 if self._end is not None and not self._is_failed(self._end) else 1
        if why != self._said:
            self._said = why
            self._console.note(
                f"{why}; waiting for {'the next' if self._attempt else 'an'} attempt, {left:.0f} s at most"
            )
        return None

    def _obstacle(self, now: float, news: bool) -> str | None:
        """Why nothing may come any more; None while a run is at work."""
        if self._end is not None:
            return f"the run {'failed' if self._is_failed(self._end) else 'was preempted'}"
        try:
            owner = find_owner(self._store)
        except StorageError as error:
            self._console.note(str(error))
            return None
        dead = self._pulse.is_dead(owner, now)
        if self._attempt is None:
            return None if owner is not None and not dead else f"nothing is recorded in {self._store.url} yet"
        if dead or (owner is None and not news and self._store.read_run() is not None):  # else it is elsewhere
            return "the run died: " + (
                "its process is gone" if owner is None or owner.is_alive is False else _silent(owner)
            )
        return None

    @staticmethod
    def _is_failed(end: Mapping[str, Any]) -> bool:
        return bool(end.get("error")) or end.get("reason") == "ERROR"


def _silent(owner: Owner | UnknownOwner) -> str:
    return f"no heartbeat from {owner.host}" if isinstance(owner, Owner) else "nobody knows whose it is"


def _show(record: Mapping[str, Any], console: Console) -> None:
    if console.as_json:
        sys.stdout.write(encode(record).decode())
    for text, style in lines_of(record):
        console.say(text, style)


def _seconds(text: str) -> float:
    """The type of an argument: seconds from a twentieth on."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds from 0.05 to 3600, found {text!r}")
    return seconds
