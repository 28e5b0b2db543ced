"""The programs that a process of a job dispatches, and before which of them all processes wait for each other."""

from __future__ import annotations

from typing import Any

import jax

from monsess.ballot import fingerprint_of
from monsess.binding import Call
from monsess.step import Step

#: Dispatches between two at which the processes wait for each other because another program follows.
_MEET_EVERY = 50


class Programs:
    """Remembers what was dispatched, by fingerprint.

    Collectives that do not match are no error: Gloo mixes them up, or aborts a process. So a program is met for at its
    first run, and when it follows another one, but not more often than steps that alternate can bear. All that agree
    so far meet at the same dispatches; one that runs something else there is found by the watch.
    """

    def __init__(self) -> None:
        #: int: the fingerprint of the newest one.
        self.newest = 0
        self._fingerprints: dict[Any, int] = {}
        self._ran: set[int] = set()
        self._met_before = 0  # the newest dispatch before which all processes met
        self._met_for: dict[int, int] = {}  # the dispatch before which they did for the first run of a program
        self._undo = (0, 0)

    @property
    def is_sure(self) -> bool:
        """Whether the newest one was dispatched before; another one may fail while it is compiled."""
        return self.newest in self._ran

    def choose(self, step: Step, call: Call, with_hooks: bool) -> int:
        """The fingerprint of the program that is to be dispatched next."""
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves((call.args, call.named)))
        key = (step, shapes, with_hooks)
        if key not in self._fingerprints:
            parts = (step.kind, step.name, step.engine, step.steps_per_run, shapes, with_hooks)
            self._fingerprints[key] = fingerprint_of(*parts)
        self._undo = (self.newest, self._met_before)
        self.newest = self._fingerprints[key]
        return self.newest

    def needs_meeting(self, number: int) -> bool:
        """Whether all processes are to meet before dispatch ``number``, of the newest program, which they then do."""
        if self.is_sure:
            needed = self.newest != self._undo[0] and number >= self._met_before + _MEET_EVERY
        else:
            needed = self._met_for.get(self.newest) != number  # not again where a first try has failed on this one only
        if needed:
            self._met_before = self._met_for[self.newest] = number
        return needed

    def started(self) -> bool:
        """The newest one was dispatched; says whether it was for the first time."""
        if self.is_sure:
            return False
        self._ran.add(self.newest)
        return True

    def take_back(self) -> None:
        """The newest one could not be dispatched."""
        self.newest, self._met_before = self._undo
