"""Dispatches compiled steps with a bound on how far the device may fall behind."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import jax
import numpy as np

from monsess import clock
from monsess.binding import Call
from monsess.engine import Compiled, compile_step
from monsess.errors import StepDefinitionError
from monsess.job import Job
from monsess.layout import Layout
from monsess.log import logger
from monsess.placement import replicated
from monsess.reduction import merge
from monsess.step import Step
from monsess.summary import Collected

_now = clock.monotonic
_MOST_BALLOTS = 64


class Count:
    """How many values of a step's outputs are not finite, read once, when the step is waited for.

    Waiting and reading each let go of the interpreter for a moment, and to get it back takes longer than either does.

    Args:
        nonfinite: int32 scalar on the device.
        alone: Whether it is on one device only; otherwise reading it does not wait for all of them.
    """

    __slots__ = ("_alone", "_count", "_nonfinite")

    def __init__(self, nonfinite: Any, alone: bool) -> None:
        self._nonfinite, self._alone = nonfinite, alone
        self._count: int | None = None

    def is_ready(self) -> bool:
        """Whether the step is done."""
        return self._nonfinite.is_ready()

    def block_until_ready(self) -> Count:
        """Wait for the step, on all devices."""
        if not self._alone:
            self._nonfinite.block_until_ready()
        int(self)
        return self

    def __int__(self) -> int:
        if self._count is None:
            self._count = int(np.asarray(self._nonfinite))  # a fifth of what int() alone takes
        return self._count


class Outcome(NamedTuple):
    """A dispatched step.

    Args:
        outputs: In the user's structure.
        nonfinite: The count of non-finite values in them.
        told: The sum of what all processes told each other, or None.
        summaries: What the step has collected by `monsess.summary`, or ``()``.
        counted: That count as one that is read once, where somebody reads it.
    """

    outputs: Any
    nonfinite: jax.Array
    told: jax.Array | None
    summaries: Collected | tuple[()] = ()
    counted: Count | None = None


class Dispatcher:
    """Owns the replicated state and the steps in flight.

    Args:
        layout: The devices that the state begins on.
        max_in_flight: Steps that may be dispatched and unfinished at once.
        job: Waits for values of the device, and explains errors whose cause is another process.
    """

    def __init__(self, layout: Layout, max_in_flight: int, job: Job) -> None:
        self._job = job
        self._signals: dict[tuple[Layout, bytes], jax.Array] = {}
        self._max_in_flight = max_in_flight
        self._compiled: dict[Step, Compiled] = {}
        self._layouts: dict[Any, Layout] = {}
        self._fillers: dict[Layout, jax.Array] = {}
        self._in_flight: deque[tuple[int, jax.Array | Count]] = deque()
        self.state: Any = None
        #: Layout: the devices that the state lies on.
        self.state_layout: Layout = layout
        #: int: every step up to this one is known to be finished on the devices.
        self.finished_step = 0
        #: dict of str to float: seconds spent compiling, and dispatching and waiting for steps.
        self.seconds = {"compile": 0.0, "step": 0.0}

    def put_state(self, state: Any, layout: Layout, step: int) -> None:
        """Take over a placed state, as of ``step``."""
        self.state = state
        self.state_layout = layout
        self._in_flight.clear()
        self.finished_step = step

    def layout_for(self, step: Step, default: Layout) -> Layout:
        """The devices that ``step`` runs on.

        Raises:
            StepDefinitionError: They are not those of the whole job, where it has several processes.
        """
        if step.devices is None:
            return default
        if self._job.process_count > 1:
            if list(step.devices) != jax.devices():
                raise StepDefinitionError(
                    f"{step.name} is to run on {len(step.devices)} of the {jax.device_count()} devices. With "
                    f"{self._job.process_count} processes every step runs on all devices, since all vote in it: leave "
                    "devices= out."
                )
            return default
        if step.devices == default.devices:
            return default
        if step.devices not in self._layouts:
            self._layouts[step.devices] = Layout(step.devices, step.axis_name)
        return self._layouts[step.devices]

    def run(
        self,
        step: Step,
        call: Call,
        layout: Layout,
        step_after: int,
        ballot: np.ndarray | None = None,
        reads: bool = False,
    ) -> Outcome:
        """Dispatch ``step`` and return without waiting for it.

        Args:
            step: The step.
            call: Its arguments, laid out.
            layout: The devices that it runs on.
            step_after: The global step once it is done.
            ballot: What this process tells the others with it, float32 ``[slots]``.
            reads: Whether somebody reads how many of its values are not finite.
        """
        start = _now()
        first = step not in self._compiled
        try:
            result = self._start(step, call, layout, ballot)
        except Exception:
            self._job.unsent()
            raise
        self._job.under_way()
        if step.kind == "train":
            self.state = result.state
        count = Count(result.nonfinite, layout.device_count == 1) if reads else None
        self._in_flight.append((step_after, result.nonfinite if count is None else count))
        self.seconds["compile" if first else "step"] += _now() - start
        return Outcome(merge(result.reduced, result.stacked), result.nonfinite, result.agreed, result.summaries, count)

    def _start(self, step: Step, call: Call, layout: Layout, ballot: np.ndarray | None) -> Any:
        while len(self._in_flight) >= self._max_in_flight:
            self._wait_for_oldest()
        state = self._state_on(layout, keep=step.kind == "train")
        if step not in self._compiled:
            self._compiled[step] = compile_step(step, layout)
        signals = None if ballot is None else self._placed(ballot, layout)
        filler = self._filler(layout) if signals is None and not call.args and not call.named else None
        try:
            return self._compiled[step](state, mapped=(signals, call.args, call.named, filler))
        except Exception as error:
            explained = self._job.explained(error)
            if explained is error:
                raise
            raise explained from error

    def _placed(self, ballot: np.ndarray, layout: Layout) -> jax.Array:
        """The ballot on the devices, where the first one votes; most of the time it is the one before again."""
        key = (layout, ballot.tobytes())
        if key not in self._signals:
            if len(self._signals) > _MOST_BALLOTS:
                self._signals.clear()
            rows = np.zeros((layout.device_count, *ballot.shape), ballot.dtype)
            rows[0] = ballot
            self._signals[key] = jax.device_put(rows, layout.sharding)
        return self._signals[key]

    def _filler(self, layout: Layout) -> jax.Array:
        if layout not in self._fillers:
            self._fillers[layout] = layout.scalar(np.int32(0))
        return self._fillers[layout]

    def wait(self) -> None:
        """Wait for everything in flight."""
        start = _now()
        while self._in_flight:
            self._wait_for_oldest()
        self.seconds["step"] += _now() - start

    def abandon(self) -> None:
        """Wait for everything in flight whatever becomes of it: a recovery must not run beside what it replaces."""
        while self._in_flight:
            try:
                self._wait_for_oldest()
            except Exception as error:
                logger.debug("a step that is rolled back has failed: %s", error)

    def _wait_for_oldest(self) -> None:
        step, token = self._in_flight.popleft()
        try:
            self._job.wait_for(token)
        except Exception as error:
            error.add_note(f"Raised on the devices by the run that led to step {step}.")
            raise
        self.finished_step = max(self.finished_step, step)

    def _state_on(self, layout: Layout, keep: bool) -> Any:
        if self.state_layout is layout or self.state_layout.devices == layout.devices:
            return self.state
        moved = jax.device_put(self.state, replicated(layout))
        if keep:
            self.state, self.state_layout = moved, layout
        return moved
