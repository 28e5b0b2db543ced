"""When to act: TensorFlow's timer, and the schedule that the built-in hooks share.

The two differ on purpose. `SecondOrStepTimer` counts from its last trigger, as TensorFlow's does, for hooks that
were written for it. `Cadence` fires at multiples of N, so that a resumed run acts at the steps of a straight one.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any, final

from monsess import clock


def check_steps(name: str, value: Any, at_least: int = 1) -> int:
    """Return ``value`` as an int after checking that it counts steps.

    Args:
        name: The argument's name, for the message.
        value: A whole number: an int, a numpy integer, anything with ``__index__``; a bool is none.
        at_least: The smallest value that is allowed.

    Raises:
        ValueError: Naming the argument and the value.
    """
    try:
        steps = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        steps = None
    if steps is None or steps < at_least:
        raise ValueError(f"invalid {name}={value!r}: expected a whole number, at least {at_least}.")
    return steps


def check_secs(name: str, value: Any) -> float:
    """Return ``value`` as a float after checking that it is a length of time.

    Args:
        name: The argument's name, for the message.
        value: Seconds: a finite real number above zero; a bool is none.

    Raises:
        ValueError: Naming the argument and the value.
    """
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or value <= 0:
        raise ValueError(f"invalid {name}={value!r}: expected a finite number of seconds, above 0.")
    return float(value)


@final
class SecondOrStepTimer:
    """TensorFlow's timer: triggers every so many seconds or steps, counted from the last trigger.

    The first question always gets a yes, and a step that has triggered never triggers again. Seconds are those of
    monsess's monotonic clock, so a change of the wall clock has no effect.

    Args:
        every_secs: Seconds between two triggers, above 0.
        every_steps: Steps between two triggers, at least 1. Exactly one of the two is given.

    Raises:
        ValueError: Both, neither, or a value that is no length of time or count of steps.

    Example:
        >>> import monsess as ms
        >>> timer = ms.SecondOrStepTimer(every_steps=3)
        >>> timer.should_trigger_for_step(1)
        True
        >>> timer.update_last_triggered_step(1)
        (None, None)
        >>> [step for step in range(1, 6) if timer.should_trigger_for_step(step)]
        [4, 5]
    """

    __slots__ = ("_every_secs", "_every_steps", "_last_step", "_last_time")

    def __init__(self, every_secs: float | None = None, every_steps: int | None = None) -> None:
        if every_secs is None and every_steps is None:
            raise ValueError("Either every_secs or every_steps should be provided.")
        if every_secs is not None and every_steps is not None:
            raise ValueError("Can not provide both every_secs and every_steps.")
        self._every_secs = None if every_secs is None else check_secs("every_secs", every_secs)
        self._every_steps = None if every_steps is None else check_steps("every_steps", every_steps)
        self.reset()

    def reset(self) -> None:
        """Forget every trigger: the next question gets a yes."""
        self._last_step: int | None = None
        self._last_time = 0.0

    def should_trigger_for_step(self, step: int) -> bool:
        """Whether ``step`` is due; asking changes nothing.

        Args:
            step: The global step.
        """
        if self._last_step is None:
            return True
        if step == self._last_step:
            return False
        if self._every_secs is not None:
            return clock.monotonic() >= self._last_time + self._every_secs
        assert self._every_steps is not None
        return step >= self._last_step + self._every_steps

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Record that ``step`` has triggered.

        Args:
            step: The global step.

        Returns:
            Seconds and steps since the trigger before; ``(None, None)`` if this is the first. The steps are negative
            if training went back to an earlier checkpoint.
        """
        now = clock.monotonic()
        elapsed: tuple[float | None, int | None] = (None, None)
        if self._last_step is not None:
            elapsed = (now - self._last_time, step - self._last_step)
        self._last_step, self._last_time = step, now
        return elapsed

    def last_triggered_step(self) -> int | None:
        """The step that triggered last, or None."""
        return self._last_step


@final
class Cadence:
    """The schedule of the built-in hooks: multiples of a number of steps, a number of seconds, or both.

    Whether the steps are due depends on nothing but the step before and after a run, also where a run adds several
    steps; so a resumed run is due at the same steps as a straight one, and nothing has to be stored. The seconds
    have a schedule of their own: they are counted from the last `rearm`, and steps do not reset them.

    Args:
        every_n_steps: Due when a run crosses a multiple of it; None switches steps off.
        every_secs: Due when so many seconds have passed since the last `rearm`; None switches seconds off.
        fire_at_first_run: Also due at the run that leaves step 0. A restore never makes a run due, except that of
            step 0, whose next run is the first one of the straight run as well.

    Raises:
        ValueError: Neither is given, or a value is no count of steps or length of time.

    Example:
        >>> from monsess.timer import Cadence
        >>> cadence = Cadence(every_n_steps=10, fire_at_first_run=True)
        >>> [step for step in range(1, 31) if cadence.due(step - 1, step)]
        [1, 10, 20, 30]
        >>> [step for step in range(4, 31, 4) if cadence.due(step - 4, step)]
        [4, 12, 20]
    """

    __slots__ = ("_every_n_steps", "_every_secs", "_fire_at_first_run", "_since")

    def __init__(
        self,
        every_n_steps: int | None = None,
        every_secs: float | None = None,
        *,
        fire_at_first_run: bool = False,
    ) -> None:
        if every_n_steps is None and every_secs is None:
            raise ValueError("Either every_n_steps or every_secs should be provided.")
        self._every_n_steps = None if every_n_steps is None else check_steps("every_n_steps", every_n_steps)
        self._every_secs = None if every_secs is None else check_secs("every_secs", every_secs)
        self._fire_at_first_run = fire_at_first_run
        self._since = clock.monotonic()

    def __str__(self) -> str:
        steps = None if self._every_n_steps is None else f"every {self._every_n_steps} steps"
        secs = None if self._every_secs is None else f"every {self._every_secs:g} s"
        return " and ".join(filter(None, (steps, secs)))

    def rearm(self) -> None:
        """Count the seconds from now: when a session starts or recovers, and when the seconds have been due."""
        self._since = clock.monotonic()

    def crossed(self, before: int, after: int) -> bool:
        """Whether a run from step ``before`` to step ``after`` is due by its steps."""
        n = self._every_n_steps
        if n is not None and before // n < after // n:
            return True
        return self._fire_at_first_run and before == 0 < after

    def next_due(self, step: int) -> int | None:
        """The first step after ``step`` at which a run may be due; None if that is a matter of seconds."""
        n = self._every_n_steps
        return None if n is None or self._every_secs is not None else (step // n + 1) * n

    def elapsed(self) -> bool:
        """Whether the seconds are due now; stays so until `rearm`."""
        secs = self._every_secs
        return secs is not None and clock.monotonic() >= self._since + secs

    def due(self, before: int, after: int) -> bool:
        """Whether a run from step ``before`` to step ``after`` is due by steps or seconds."""
        return self.crossed(before, after) or self.elapsed()
