"""What a session records of itself: one place that knows whether, where, and in which words."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax

from monsess.agreement import StopReason
from monsess.records.events import Events, is_available
from monsess.records.values import Logged
from monsess.records.writer import Records
from monsess.saving import Saving
from monsess.timer import check_steps

_FLUSH_SECS = 10.0
_CLOSE_SECS = 30.0
_CLOSE_AFTER_ERROR_SECS = 5.0


class Recording:
    """The records of one session; does nothing on other processes than the chief, and where there is no directory.

    Args:
        summary_dir: Where to, or None for ``checkpoint_dir``.
        checkpoint_dir: Where the checkpoints go, or None.
        storage_options: For the checkpoints' filesystem.
        saving: The session's checkpoints.
        chief: Whether this process is the chief.
    """

    def __init__(
        self,
        summary_dir: str | None,
        checkpoint_dir: str | None,
        storage_options: Mapping[str, Any] | None,
        saving: Saving,
        chief: bool,
    ) -> None:
        self._attempt = saving.attempt
        self._records: Records | None = None
        #: str | None: the directory, whichever process writes there.
        self.url = url = checkpoint_dir if summary_dir is None else summary_dir
        if url is not None and chief:
            options = storage_options
            if checkpoint_dir is not None and _scheme(checkpoint_dir) not in ("", _scheme(url)):
                options = None  # they are for another kind of store
            extra = Events(self._attempt) if is_available() else None
            check = _weak(saving.raise_if_lost)  # the thread that writes must keep no session alive
            self._records = Records(url, options, self._attempt, extra, check)
            if summary_dir is not None:  # the other one is looked into, before anything is recorded
                self._records.require_protocol()
            weakref.finalize(self, self._records.abandon).atexit = False

    @property
    def is_on(self) -> bool:
        """Whether this process writes records."""
        return self._records is not None

    def start(
        self, step: int, run_id: str, restored_from: int | None, processes: int, versions: dict[str, str]
    ) -> None:
        """The state of ``step`` was restored or made."""
        if self._records is None:
            return
        device = jax.local_devices()[0]
        self._records.start(
            step,
            run_id=run_id,
            attempt=self._attempt,
            restored_from=restored_from,
            processes=processes,
            devices=jax.device_count(),
            host=socket.gethostname(),
            pid=os.getpid(),
            backend=device.platform,
            device_kind=device.device_kind,
            versions=versions,
        )

    def open(self) -> None:
        """From here on what is recorded is written, and what was recorded so far."""
        if self._records is not None:
            self._records.open()

    def log(
        self, step: int, scalars: Mapping[str, Any], tell: Callable[[int, Mapping[str, float]], None] | None
    ) -> None:
        """Record scalars, and hand them, as numbers, to ``tell``, for which the device is waited for.

        Raises:
            TypeError: ``scalars`` is no mapping, or has a tag that is no text.
            ValueError: A value is no real scalar, or ``step`` is none.
        """
        step = check_steps("step", step, at_least=0)
        found = Logged(scalars)
        if self._records is not None and found:
            self._records.log(step, found)
        numbers = None if tell is None else found.on_host()[0]
        if tell is not None and numbers:
            tell(step, numbers)

    def record(self, event: str, step: int, **fields: Any) -> None:
        """Record an event."""
        if self._records is not None:
            self._records.record(event, step, **fields)

    def committed(self, step: int, facts: Mapping[str, Any]) -> None:
        """A checkpoint was committed."""
        self.record("checkpoint", step, **facts)

    def flush(self) -> None:
        """Have everything in the store that was recorded before this, or give up, within bounds; from any thread.

        A commit waits for it: whoever resumes from that checkpoint finds the curves that led to it.
        """
        if self._records is not None:
            self._records.flush(_FLUSH_SECS)

    def end(
        self,
        step: int,
        reason: StopReason | None,
        error: BaseException | None,
        seconds: Mapping[str, float],
        hooks: Mapping[str, float],
    ) -> None:
        """Record the end, and bring the rest to the store, within bounds."""
        if self._records is None:
            return
        text = None if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")
        self._records.record(
            "end",
            step,
            reason=None if reason is None else reason.name,
            text=None if reason is None else str(reason),
            error=text,
            seconds={name: round(value, 4) for name, value in seconds.items()},
            hooks={name: round(value, 4) for name, value in hooks.items()},
        )
        self.close(_CLOSE_SECS if error is None else _CLOSE_AFTER_ERROR_SECS)

    def close(self, seconds: float = _CLOSE_AFTER_ERROR_SECS) -> None:
        """Bring the rest to the store, within bounds."""
        if self._records is not None:
            self._records.close(seconds)


def _weak(method: Callable[[], None]) -> Callable[[], None]:
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call


def _scheme(url: str) -> str:
    return url.partition("://")[0] if "://" in url and not url.startswith(("file://", "local://")) else ""
