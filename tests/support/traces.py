"""Reads profiler traces."""

from __future__ import annotations

import glob
import warnings

import jax


def events_in(folder: str) -> list[tuple[str, int | None]]:
    """The names of all events of a trace, and for those of a step its number, as JAX's own reader gives them."""
    (path,) = glob.glob(f"{glob.escape(folder)}/*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(path)
    found: list[tuple[str, int | None]] = []
    with warnings.catch_warnings():
        # On Python 3.13 jax 0.12 makes a type that is deprecated so, and aborts where that is an error.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in data.planes:
            for line in plane.lines:
                for event in line.events:
                    number = dict(event.stats).get("step_num") if event.name == "train" else None
                    found.append((event.name, number))
    return found


def steps_in(folder: str) -> list[int]:
    """The numbers of the steps that a trace shows."""
    return sorted({number for name, number in events_in(folder) if name == "train" and number is not None})
