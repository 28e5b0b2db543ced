"""Waiting for checkpoints that another job writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from monsess import clock
from monsess.checkpoint import CheckpointStore
from monsess.errors import StorageError
from monsess.log import logger
from monsess.timer import check_secs

_SLEEP_SECS = 30.0


def checkpoints_iterator(
    url: str | os.PathLike[str],
    timeout: float | None = None,
    *,
    min_interval_secs: float = 0,
    timeout_fn: Callable[[], Any] | None = None,
    newest_only: bool = True,
    poll_secs: float = 1.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[int]:
    """Yield the committed steps of a directory as they come, each once, for an evaluator beside the training.

    The directory need not exist yet. A yielded step may be gone by the time it is read, if the training keeps only a
    few; and its bytes are not verified here but where it is loaded. A store that does not answer for a while is waited
    for, and never taken for one without checkpoints.

    Args:
        url: The checkpoint directory: a local path or any fsspec URL.
        timeout: Seconds without a new step after which it ends, 0 or more; 0: what is there now; None: never.
        min_interval_secs: Seconds between two yielded steps at least.
        timeout_fn: Called without arguments when ``timeout`` has passed: a true answer ends the iterator, any other
            waits for as long again.
        newest_only: Yield the newest step that is there and leave out those that came meanwhile; False: every step, in
            order.
        poll_secs: Seconds between two looks, above 0.
        storage_options: For fsspec; never shown.

    Returns:
        An iterator of global steps.

    Raises:
        ValueError: A time is none, or ``timeout_fn`` no function.
        StorageError: While iterating: the directory could not be looked at the first time, or for as long as
            ``timeout``.

    Example:
        >>> import monsess as ms
        >>> list(ms.checkpoints_iterator("memory://docs/nothing", timeout=0))
        []
    """
    limit = None if timeout is None else secs_from_zero("timeout", timeout)
    interval = secs_from_zero("min_interval_secs", min_interval_secs)
    check_secs("poll_secs", poll_secs)
    if timeout_fn is not None and not callable(timeout_fn):
        raise ValueError(f"invalid timeout_fn={timeout_fn!r}: expected a function, or None.")
    watch = Watch(CheckpointStore(url, storage_options), newest_only, poll_secs)
    return iterate(watch, limit, interval, timeout_fn)


def wait_for_new_checkpoint(
    url: str | os.PathLike[str],
    last_step: int | None = None,
    *,
    timeout: float | None = None,
    poll_secs: float = 1.0,
    storage_options: Mapping[str, Any] | None = None,
) -> int | None:
    """Wait until the newest committed step of a directory is another one.

    Args:
        url: The checkpoint directory: a local path or any fsspec URL.
        last_step: The step that is known already; None: any step is new.
        timeout: Seconds to wait, 0 or more; None: for ever.
        poll_secs: Seconds between two looks, above 0.
        storage_options: For fsspec; never shown.

    Returns:
        The newest step, or None if it did not change in time.

    Raises:
        ValueError: A time is none.
        StorageError: The directory could not be looked at the first time, or all the time.

    Example:
        >>> import monsess as ms
        >>> ms.wait_for_new_checkpoint("memory://docs/nothing", timeout=0) is None
        True
    """
    limit = None if timeout is None else secs_from_zero("timeout", timeout)
    check_secs("poll_secs", poll_secs)
    watch = Watch(CheckpointStore(url, storage_options), True, poll_secs)
    if last_step is not None:
        watch.seen.add(last_step)
    return watch.next(limit)


def iterate(watch: Watch, limit: float | None, interval: float, timeout_fn: Callable[[], Any] | None) -> Iterator[int]:
    """New steps as `checkpoints_iterator` yields them."""
    while True:
        step = watch.next(limit)
        if step is None:
            if timeout_fn is None or timeout_fn():
                return
            continue
        yielded = clock.monotonic()
        yield step
        watch.pause(yielded + interval - clock.monotonic())


class Watch:
    """Looks again and again for steps that it has not seen.

    Args:
        store: Where.
        newest_only: Whether steps before the newest one are left out.
        poll_secs: Seconds between two looks.
        meanwhile: Called again and again while it waits.
    """

    def __init__(
        self,
        store: CheckpointStore,
        newest_only: bool,
        poll_secs: float,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        self._store = store
        self._meanwhile = meanwhile
        self._newest_only = newest_only
        self._poll_secs = poll_secs
        self._has_looked = False
        self.seen: set[int] = set()

    def next(self, limit: float | None) -> int | None:
        """The next new step; None after ``limit`` seconds without one."""
        begun = clock.monotonic()
        trouble: StorageError | None = None
        while True:
            try:
                there = self._store.steps()
                self._has_looked, trouble = True, None
            except StorageError as error:
                if not self._has_looked:
                    raise
                if trouble is None:
                    logger.warning("%s Waiting for it to answer again.", error)
                there, trouble = [], error
            candidates = there[-1:] if self._newest_only else there
            for step in candidates:
                if step not in self.seen:
                    self.seen.add(step)
                    return step
            left = None if limit is None else begun + limit - clock.monotonic()
            if left is not None and left <= 0:
                if trouble is not None:
                    raise trouble
                return None
            self.pause(self._poll_secs if left is None else min(self._poll_secs, left))

    def pause(self, seconds: float) -> None:
        """Wait."""
        while seconds > 0:
            self._meanwhile()
            clock.sleep(min(seconds, _SLEEP_SECS))
            seconds -= _SLEEP_SECS


def secs_from_zero(name: str, value: Any) -> float:
    """Return ``value`` as seconds, of which there may be none.

    Raises:
        ValueError: It is no length of time.
    """
    return 0.0 if value == 0 and not isinstance(value, bool) else check_secs(name, value)
