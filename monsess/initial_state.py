"""The state that a session begins with: from ``init_fn``, or from a checkpoint that fits it."""

from __future__ import annotations

from typing import Any

from monsess.checkpoint import CheckpointOptions
from monsess.checkpoint.leaves import describe
from monsess.checkpoint.restore import Restored, fit
from monsess.errors import StateNotReadyError
from monsess.placement import placed_structure, with_typed_keys
from monsess.scaffold import Scaffold, describe_state
from monsess.warm_start import warm_started


def initial_state(scaffold: Scaffold, restored: Restored | None, options: CheckpointOptions) -> Any:
    """Restore or initialise a state and ask the scaffold whether it is ready.

    Args:
        scaffold: Finalised.
        restored: The checkpoint, or None for a fresh start.
        options: Whether to cast dtypes and Python numbers that differ, and where to download to.

    Returns:
        The state, not yet placed; host leaves if it was restored.

    Raises:
        UnstorableLeafError: ``init_fn`` describes a leaf that no checkpoint can hold.
        StateMismatchError: The checkpoint has another structure.
        StateNotReadyError: Something is missing.
    """
    state = _fresh(scaffold, options) if restored is None else _restored(scaffold, restored, options.convert)
    missing = scaffold.missing(state)
    if missing:
        raise StateNotReadyError(
            f"Init operations did not make model ready: Scaffold.ready_fn found missing: {', '.join(missing)}."
        )
    return state


def _fresh(scaffold: Scaffold, options: CheckpointOptions) -> Any:
    assert scaffold.init_fn is not None
    try:
        state = scaffold.init_fn()
    except Exception as error:
        error.add_note("Raised by init_fn, which is called without arguments.")
        raise
    describe(state)  # what no checkpoint can hold is refused now, with its path
    return warm_started(state, scaffold, options)


def _restored(scaffold: Scaffold, restored: Restored, convert: bool) -> Any:
    assert scaffold.init_fn is not None
    structure = describe_state(scaffold.init_fn)
    describe(structure)
    structure = placed_structure(structure)
    return with_typed_keys(fit(restored, structure, convert=convert), describe(structure))
