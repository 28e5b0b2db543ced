"""Records as lines for people who look on, and whether the run that writes them is still there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from monsess.checkpoint.owner import Owner, UnknownOwner
from monsess.commands.console import size_text
from monsess.report.words import counted, duration_text, moment_text, number_text, whole_text

_SHOWN = {"start", "end", "checkpoint", "goodput"}
_MOST_TEXT = 300


def lines_of(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a record says, line by line, each with its style on a console.

    Example:
        >>> record = {"step": 100, "time": 0.0, "scalars": {"loss": 0.25, "eval/accuracy": 0.5}}
        >>> list(lines_of(record))
        [('00:00:00  step 100  loss 0.25  eval/accuracy 0.5', '')]
    """
    when = _moment(record)[11:]
    step = whole_text(record["step"])
    scalars, kind = record.get("scalars"), record.get("event")
    if isinstance(scalars, Mapping):
        values = (f"{tag} {number_text(v)}" for tag, v in scalars.items() if isinstance(v, (int, float)))
        yield "  ".join([f"{when}  step {step}", *values]), ""
    elif kind == "start":
        yield f"{_moment(record)} UTC  {_start(record)}", "head"
    elif kind == "checkpoint":
        size, took = record.get("bytes"), record.get("seconds")
        text = f"{when}  step {step}  checkpoint committed"
        text += f", {size_text(size)}" if isinstance(size, int) else ""
        text += f", in {duration_text(took)}" if isinstance(took, (int, float)) else ""
        yield text, "good"
    elif kind == "end":
        failed = bool(record.get("error")) or record.get("reason") == "ERROR"
        first, *more = str(record.get("error") or record.get("text") or "").strip().split("\n")
        reason = str(record.get("reason") or "")
        text = f"{reason}: {first}" if reason and first and first != reason else reason or first
        yield f"{_moment(record)} UTC  step {step}  ended: {text}", "bad" if failed else "head"
        for line in more:
            yield f"          {line}", "bad" if failed else ""
    elif isinstance(kind, str) and kind not in _SHOWN:
        rest = "  ".join(f"{n} {v}" for n, v in record.items() if n not in ("event", "step", "time"))
        yield f"{when}  step {step}  {kind}: {rest[:_MOST_TEXT]}", "dim"


def _moment(record: Mapping[str, Any]) -> str:
    time = record.get("time")
    return moment_text(float(time) if isinstance(time, (int, float)) else 0.0)


def _start(record: Mapping[str, Any]) -> str:
    restored = record.get("restored_from")
    text = f"restored step {whole_text(restored)}" if isinstance(restored, int) else "started at step 0"
    devices, processes = record.get("devices"), record.get("processes")
    if isinstance(devices, int) and isinstance(processes, int):
        text += f", {counted(devices, 'device')} in {counted(processes, 'process', 'processes')}"
    text += f" on {record['host']}" if record.get("host") else ""
    return text + (f", run {record['run_id']}, attempt {record.get('attempt')}" if record.get("run_id") else "")


class Pulse:
    """Tells from heartbeats whether the owner of a directory is alive, by the clock of who looks.

    Args:
        beats: How many heartbeats may be missed.
    """

    def __init__(self, beats: int = 3) -> None:
        self._beats = beats
        self._last: tuple[str, int] | None = None
        self._since = 0.0

    def is_dead(self, owner: Owner | UnknownOwner | None, now: float) -> bool | None:
        """Whether the owner is dead, or has been silent for too long; None if there is none, or nobody can tell.

        Args:
            owner: As found just now.
            now: Of a monotonic clock.
        """
        if not isinstance(owner, Owner):
            self._last = None
            return None
        if owner.is_alive is not None:
            return not owner.is_alive
        beat = owner.attempt, owner.beat
        if beat != self._last:
            self._last, self._since = beat, now
        return now - self._since > self._beats * owner.interval + 1.0
