"""Whether a run is running, stopped, failed or dead, as its owner token and its records tell."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

from monsess.checkpoint.owner import Owner, UnknownOwner
from monsess.report.story import Attempt, Story

#: Per state its colour on a console.
STYLES = {"running": "good", "failed": "bad", "died": "bad", "silent": "warn", "unknown": "dim", "unreadable": "warn"}
#: An owner on another machine that was not heard of for so many of its heartbeats is silent.
_BEATS = 3
#: So long may a heartbeat take that a store holds up.
_SLACK_SECS = 60.0


@dataclasses.dataclass(frozen=True)
class Standing:
    """How a run stands.

    Args:
        state: ``"running"``; ``"stopped"``, a clean end; ``"failed"``, an end with an error; ``"died"``, killed without
            an end; ``"silent"``, on another machine and not heard of for a while; ``"unknown"``.
        why: The reason of a stop, the error, or what makes it unknown.
        heard: When it was heard of last, in seconds since the epoch; None if never.
    """

    state: str
    why: str
    heard: float | None

    @property
    def style(self) -> str:
        """Its colour on a console."""
        return STYLES.get(self.state, "")


def standing(
    owner: Owner | UnknownOwner | None, story: Story, now: float | None = None, at_home: bool = True
) -> Standing:
    """How a run stands.

    Args:
        owner: Who owns its directory (`monsess.checkpoint.owner.find_owner`).
        story: What its records tell.
        now: Seconds since the epoch.
        at_home: Whether it is the run's checkpoint directory; where only records lie, nobody says who is alive.
    """
    now = time.time() if now is None else now
    last = story.last
    heard = None if last is None else last.last_time
    if isinstance(owner, UnknownOwner):
        return Standing("unknown", "owner.json cannot be read", heard)
    if owner is not None:
        beat = owner.since + owner.beat * owner.interval
        heard = max(beat, heard or 0.0)
        if owner.is_alive is False:
            return Standing("died", "its process is gone", heard)
        if owner.is_alive or now - heard <= _BEATS * owner.interval + _SLACK_SECS:
            return Standing("running", "", heard)
        return Standing("silent", f"on {owner.host}, not heard of for {now - heard:.0f} s", heard)
    if last is None:
        return Standing("unknown", "nothing is recorded", None)
    if last.end is None and not at_home:
        return Standing("unknown", "it has no end, and owner.json lies elsewhere, with its checkpoints", heard)
    if last.end is None:
        return Standing("died", "it has no end, and nobody owns the directory", heard)
    return Standing("failed" if is_failure(last) else "stopped", reason_of(last), heard)


def is_failure(attempt: Attempt) -> bool:
    """Whether an attempt that has ended did so with an error."""
    end = attempt.end or {}
    return bool(end.get("error")) or end.get("reason") == "ERROR"


def reason_of(attempt: Attempt) -> str:
    """Why an attempt ended, in one line; empty where it did not, or did not say."""
    end: Mapping[str, Any] = attempt.end or {}
    words: Iterable[Any] = (end.get("reason"), end.get("error") or end.get("text"))
    name, text = (str(word or "").strip().split("\n")[0] for word in words)
    return f"{name}: {text}" if name and text and text != name else name or text
