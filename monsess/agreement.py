"""What all processes decide together: stop, save, end of data.

A decision is taken at one point of the loop, after the hooks of a run. With one process a wish is a decision; with
several the wishes will travel in a vector inside the steps, which is why everything that wants to stop or save goes
through here and nothing in the session looks at a hook's wish directly.
"""

from __future__ import annotations

import signal
import threading
from typing import ClassVar, final


@final
class StopReason:
    """Why a session stopped; equal to another reason of the same name, whatever the text.

    Args:
        name: One of LAST_STEP, END_OF_DATA, REQUESTED, EARLY_STOPPING, PREEMPTED, BODY_LEFT, ERROR.
        text: A sentence for people.
        by: Who asked: a hook, "the training loop", "the input".

    Example:
        >>> import monsess as ms
        >>> reason = ms.StopReason("REQUESTED", "loss is low enough", by="MyHook")
        >>> reason == ms.StopReason.REQUESTED, reason.by
        (True, 'MyHook')
    """

    LAST_STEP: ClassVar[StopReason]
    END_OF_DATA: ClassVar[StopReason]
    REQUESTED: ClassVar[StopReason]
    EARLY_STOPPING: ClassVar[StopReason]
    PREEMPTED: ClassVar[StopReason]
    BODY_LEFT: ClassVar[StopReason]
    ERROR: ClassVar[StopReason]

    __slots__ = ("by", "name", "text")

    def __init__(self, name: str, text: str = "", by: str = "") -> None:
        if name not in _RANK:
            raise ValueError(f"StopReason must be one of {', '.join(_RANK)}; found {name!r}.")
        self.name = name
        self.text = text or _TEXT[name]
        self.by = by

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StopReason) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<StopReason.{self.name}: {self}>"

    def __str__(self) -> str:
        return f"{self.text} ({self.by})" if self.by else self.text

    def outranks(self, other: StopReason | None) -> bool:
        """Whether this reason is the one to report when both hold."""
        return other is None or _RANK[self.name] < _RANK[other.name]


_RANK = {
    name: rank
    for rank, name in enumerate(
        ("ERROR", "LAST_STEP", "END_OF_DATA", "EARLY_STOPPING", "REQUESTED", "PREEMPTED", "BODY_LEFT")
    )
}
_TEXT = {
    "ERROR": "an error ended the session",
    "LAST_STEP": "the last step is reached",
    "END_OF_DATA": "the input has ended",
    "EARLY_STOPPING": "early stopping",
    "REQUESTED": "a stop was requested",
    "PREEMPTED": "the job was preempted",
    "BODY_LEFT": "the with-block was left",
}
for _name in _RANK:
    setattr(StopReason, _name, StopReason(_name))


class Agreement:
    """Turns wishes into decisions; this one serves a single process, where a wish counts at once.

    Wishes may come from any thread. A wish is kept until it is acted on.
    """

    #: Runs between a wish and its effect on all processes.
    lag: int = 0
    process_count: int = 1
    process_index: int = 0

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may run while its own thread holds it
        self._stop: StopReason | None = None
        self._save = False
        self._log = False
        #: int | None: the signal that preempts the job, once that is decided.
        self.signal: int | None = None
        #: bool: whether the stop came from outside, at a moment that the training loop could not know of.
        self.unforeseen = False

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints."""
        return self.process_index == 0

    @property
    def stop(self) -> StopReason | None:
        """The agreed stop, or None."""
        return self._stop

    def want_stop(self, reason: StopReason, everywhere: bool = False) -> None:
        """Wish for a stop; of several reasons the highest in rank is reported."""
        with self._lock:
            if reason.outranks(self._stop):
                self._stop = reason

    def want_preemption(self, number: int) -> None:
        """Wish for a stop because the signal ``number`` asks for it."""
        self._preempted(number)

    def _preempted(self, number: int, by: str = "") -> None:
        self.signal = number
        self.unforeseen = True
        Agreement.want_stop(self, StopReason("PREEMPTED", f"{signal.Signals(number).name} received", by))

    def withdraw_stop(self) -> StopReason | None:
        """Forget the agreed stop, because the run in which it was agreed on is rolled back, and return it."""
        with self._lock:
            stop, self._stop = self._stop, None
        return stop

    def want_save(self, everywhere: bool = False) -> None:
        """Wish for a checkpoint after the current run."""
        with self._lock:
            self._save = True

    def save_agreed(self) -> bool:
        """Whether a save was agreed on and not yet acted on."""
        return self._save

    def save_taken(self) -> None:
        """The agreed save has been acted on."""
        with self._lock:
            self._save = False

    def want_log(self) -> None:
        """Wish that all processes log after the same run."""
        with self._lock:
            self._log = True

    def log_agreed(self) -> bool:
        """Whether all log after the current run."""
        return self._log

    def log_taken(self) -> None:
        """The current run is over."""
        if self._log:
            with self._lock:
                self._log = False
