"""Values of checkpoints that come after the commit: those of an evaluation at the end, or of a job of its own.

A commit.json never changes, so each such piece of news is an object of its own, ``evals/<step>-<id>``, written once by
whoever has it. It names the attempt that wrote the step, so that it is never taken for a value of another step of that
number.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
import uuid
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from monsess.checkpoint.commit import StepRecord
from monsess.storage import Storage

EVALS = "evals"
#: What the names of values that come from an evaluation begin with.
EVAL_PREFIX = "eval/"
_NAME = re.compile(r"(0|[1-9][0-9]*)-[0-9a-f]+")
R = TypeVar("R", bound=StepRecord)


class News(NamedTuple):
    """Values of one step that came at one time.

    Args:
        step: Global step.
        attempt: The attempt that wrote the checkpoint.
        time: When they came, in seconds since the epoch.
        metrics: The values, finite.
    """

    step: int
    attempt: str
    time: float
    metrics: Mapping[str, float]


class Evaluations:
    """The values of a directory's checkpoints that came after their commits, each object read once.

    Args:
        storage: The checkpoint directory.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._names: list[str] = []
        self._read: dict[str, News] = {}
        self._by_step: dict[int, list[News]] = {}

    def add(self, record: StepRecord, metrics: Mapping[str, float]) -> None:
        """Write values of a committed step.

        Raises:
            StorageError: They could not be written.
        """
        news = News(record.step, record.attempt, round(time.time(), 3), dict(metrics))
        name = f"{record.step}-{uuid.uuid4().hex[:12]}"
        self._storage.write(f"{EVALS}/{name}", json.dumps(news._asdict(), sort_keys=True).encode())
        self._take(name, news)

    def refresh(self, steps: Collection[int] | None = None) -> None:
        """List the objects, and read those that are new; one that cannot be understood may be half of one, for now.

        Args:
            steps: Read only values of these steps; None: of all.

        Raises:
            StorageError: The store could not be read.
        """
        try:
            names = [name for name in self._storage.list(EVALS) if _NAME.fullmatch(name)]
        except FileNotFoundError:
            names = []
        unread = [n for n in names if n not in self._read and (steps is None or _step_of(n) in steps)]
        found = self._storage.map([lambda n=n: self._news(n) for n in unread])
        before, self._names, self._read, self._by_step = self._read, names, {}, {}
        for name, news in [*((n, before[n]) for n in names if n in before), *zip(unread, found, strict=True)]:
            if news is not None:
                self._take(name, news)

    def applied(self, record: R) -> R:
        """A record with the values of its step that came later; of one name the newest."""
        fitting = [one for one in self._by_step.get(record.step, ()) if one.attempt == record.attempt]
        if not fitting:
            return record
        metrics = dict(record.metrics)
        for one in sorted(fitting, key=lambda one: one.time):
            metrics.update(one.metrics)
        return dataclasses.replace(record, metrics=metrics)

    def orphans(self, steps: Collection[int]) -> list[str]:
        """The objects, relative to the directory, of steps that are not among ``steps``, as of the last `refresh`."""
        return [f"{EVALS}/{name}" for name in self._names if _step_of(name) not in steps]

    def of(self, steps: Collection[int]) -> list[str]:
        """The objects, relative to the directory, of these steps, as of the last `refresh`."""
        return [f"{EVALS}/{name}" for name in self._names if _step_of(name) in steps]

    def _take(self, name: str, news: News) -> None:
        self._read[name] = news
        self._by_step.setdefault(news.step, []).append(news)

    def _news(self, name: str) -> News | None:
        try:
            data = self._storage.read(f"{EVALS}/{name}")
        except FileNotFoundError:
            return None
        try:
            body: dict[str, Any] = json.loads(data)
            news = News(int(body["step"]), str(body["attempt"]), float(body["time"]), dict(body["metrics"]))
            fits = news.step == _step_of(name) and all(map(_is_finite, news.metrics.values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None  # torn: a value that is not known
        return news if fits else None


def _step_of(name: str) -> int:
    return int(name.partition("-")[0])


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
