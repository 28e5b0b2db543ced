"""What a run has recorded: read at once, or followed while it goes on."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, final

from monsess.errors import StorageError
from monsess.records.lines import FILE, PART_PREFIX, SUFFIX, decode, decode_all
from monsess.storage import Storage

_PART = re.compile(rf"{PART_PREFIX}(\d+)-(.+)-(\d+){re.escape(SUFFIX)}")


class Point(NamedTuple):
    """One value of a curve.

    Args:
        step: Completed updates.
        time: When it was logged, in seconds since the epoch.
        value: The value, a float or an int.

    Example:
        >>> import monsess as ms
        >>> metrics = ms.read_metrics("memory://docs/no-run")
        >>> metrics.curves
        {}
    """

    step: int
    time: float
    value: float


@dataclasses.dataclass
class Attempt:
    """One attempt of a run: what it said at its start, and how far it came.

    Args:
        start: The event with which it began.
        events: All its events in their order, that one first.
        last_step: The newest step that it logged or reached.
        last_time: When it wrote last, in seconds since the epoch.

    Example:
        >>> import monsess as ms
        >>> attempt = ms.Attempt({"event": "start", "step": 5}, last_step=8)
        >>> attempt.end is None, attempt.checkpoints
        (True, [])
    """

    start: dict[str, Any]
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    last_step: int = 0
    last_time: float = 0.0

    @property
    def end(self) -> dict[str, Any] | None:
        """The event with which it ended; None while it goes on, or if it was killed."""
        ends = [event for event in self.events if event["event"] == "end"]
        return ends[-1] if ends else None

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        """The events of its commits."""
        return [event for event in self.events if event["event"] == "checkpoint"]


@final
class Metrics:
    """What a run has recorded; made by `read_metrics`.

    Args:
        records: Dicts in the order in which they were written, see `add`.

    Example:
        >>> import monsess as ms
        >>> @ms.train_step
        ... def step(state):
        ...     return state + 1, {"loss": 1.0 / (state + 1)}
        >>> url = "memory://docs/metrics"
        >>> hooks = [ms.StopAtStepHook(last_step=2)]
        >>> with ms.MonitoredTrainingSession(lambda: 0.0, checkpoint_dir=url, hooks=hooks) as sess:
        ...     while not sess.should_stop():
        ...         outputs = sess.run(step)
        ...         sess.log({"twice": 2 * sess.global_step})
        >>> metrics = ms.read_metrics(url)
        >>> [(point.step, point.value) for point in metrics.curves["twice"]]
        [(1, 2), (2, 4)]
        >>> metrics.attempts[0].end["reason"]
        'LAST_STEP'
    """

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        #: list[dict]: all events of all attempts, in order; their kind is under ``"event"``.
        self.events: list[dict[str, Any]] = []
        #: list[Attempt]: in order; a recovery inside a process begins one as a restart does.
        self.attempts: list[Attempt] = []
        self._values: dict[str, dict[int, Point]] = {}  # in the order of their steps, but for these tags
        self._unordered: set[str] = set()
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """Take in one further record, as it stands in a line.

        Args:
            record: A dict with ``"step"`` and either ``"scalars"`` or ``"event"``; anything else is left out.
        """
        scalars, kind, step = record.get("scalars"), record.get("event"), record["step"]
        time = record.get("time")
        time = float(time) if isinstance(time, (int, float)) else 0.0
        if isinstance(scalars, Mapping):
            for tag, value in scalars.items():
                if isinstance(value, (int, float)):
                    values = self._values.setdefault(tag, {})
                    if values and step not in values and step < next(reversed(values)):
                        self._unordered.add(tag)
                    values[step] = Point(step, time, value)
        elif isinstance(kind, str):
            event = dict(record)
            self.events.append(event)
            if kind == "start":
                another = bool(self.attempts) and self.attempts[-1].start.get("run_id") != event.get("run_id")
                self._roll_back(-1 if another else step)
                self.attempts.append(Attempt(event, last_step=step))
            if self.attempts:
                self.attempts[-1].events.append(event)
        else:
            return
        if self.attempts:
            attempt = self.attempts[-1]
            attempt.last_step = max(attempt.last_step, step)
            attempt.last_time = max(attempt.last_time, time)

    @property
    def curves(self) -> dict[str, list[Point]]:
        """Of each tag its points in the order of their steps, each step once, of the run that was the last one there.

        What was rolled back is left out.
        """
        return {tag: [values[step] for step in sorted(values)] for tag, values in self._values.items() if values}

    def _roll_back(self, step: int) -> None:
        for tag, values in self._values.items():
            if tag in self._unordered:
                self._values[tag] = {one: point for one, point in values.items() if one <= step}
                continue
            while values and next(reversed(values)) > step:
                values.popitem()


def read_metrics(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Metrics:
    """Read what the run in a directory has recorded, while it goes on or afterwards.

    Args:
        url: The run's ``summary_dir``, or its ``checkpoint_dir`` if it has none.
        storage_options: Handed to the fsspec filesystem; never shown.

    Returns:
        The `Metrics`; empty if the directory is not there or nothing was recorded in it.

    Raises:
        StorageError: The store could not be read.

    Example:
        >>> import monsess as ms
        >>> ms.read_metrics("memory://docs/no-run").attempts
        []
    """
    return Metrics(Follower(url, storage_options).new())


class Follower:
    """Reads the records of a run, each of them once.

    Args:
        url: As for `read_metrics`.
        storage_options: Likewise.
    """

    def __init__(self, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
        self._storage = Storage(url, storage_options)
        self._read: set[str] = set()  # names of sealed parts
        self._bytes = 0  # of the file, up to the end of a whole line
        self._first = True

    @property
    def url(self) -> str:
        """The directory, with credentials masked."""
        return self._storage.shown

    def new(self) -> list[dict[str, Any]]:
        """The records that came since the last call, in order.

        Raises:
            StorageError: The store could not be read.
        """
        try:
            found = self._storage.list()
        except FileNotFoundError:
            return []
        first, self._first = self._first, False
        lines = self._of_file(first) if FILE in found else []
        parts = self._of_parts(found)
        return _merged(lines, parts) if lines and parts else lines + parts

    def _of_file(self, first: bool) -> list[dict[str, Any]]:
        try:
            data = self._tail()
        except FileNotFoundError:  # taken away just now
            return []
        whole = data.rfind(b"\n") + 1
        self._bytes += whole
        records = list(decode_all(data[:whole]))
        if first and whole < len(data):  # nobody may ever end that line: it counts if it lacks nothing else
            last = decode(data[whole:])
            if last is not None:
                self._bytes += len(data) - whole
                records.append(last)
        return records

    def _tail(self) -> bytes:
        """What the file holds beyond what was read; all of it if it is shorter than that by now."""
        local = self._storage.local_path
        if local is None:
            data = self._storage.read(FILE)
            self._bytes = self._bytes if self._bytes <= len(data) else 0
            return data[self._bytes :]
        try:
            with open(os.path.join(local, FILE), "rb") as file:
                if os.fstat(file.fileno()).st_size < self._bytes:
                    self._bytes = 0
                file.seek(self._bytes)
                return file.read()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageError(f"Could not read {FILE!r} in {self._storage.shown} ({error}).") from error

    def _of_parts(self, found: Iterable[str]) -> list[dict[str, Any]]:
        names = sorted((key, name) for name in found if name not in self._read and (key := part_key(name)) is not None)
        contents = self._storage.map([lambda n=name: self._content(n) for _, name in names])
        self._read.update(name for _, name in names)
        return [record for content in contents for record in decode_all(content)]

    def _content(self, name: str) -> bytes:
        try:
            return self._storage.read(name)
        except FileNotFoundError:  # taken away just now
            return b""


def part_key(name: str) -> tuple[int, str, int] | None:
    """By what a sealed part is sorted: number and name of its attempt, its own number; None if it is no such part."""
    match = _PART.fullmatch(name)
    return None if match is None else (int(match[1]), match[2], int(match[3]))


def _merged(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two sequences of records, of a directory that was copied from one kind of store to another, by attempts."""
    segments: list[tuple[float, list[dict[str, Any]]]] = []
    for records in (one, other):
        began = 0.0
        for record in records:
            if record.get("event") == "start" and isinstance(record.get("time"), (int, float)):
                began = max(began, float(record["time"]))
                segments.append((began, []))
            elif not segments or record is records[0]:
                segments.append((began, []))
            segments[-1][1].append(record)
    segments.sort(key=lambda segment: segment[0])
    return [record for _, records in segments for record in records]
