"""The chief's state for all processes: its bytes travel through the devices as bytes, with their table beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from monsess.checkpoint.leaves import describe, named_dtype, to_host
from monsess.checkpoint.restore import Restored
from monsess.checkpoint.table import empties_as_json, specs_as_json, unpack_specs
from monsess.job import Job

_PART_BYTES = 32 << 20


def send_state(job: Job, state: Any, about: dict[str, Any]) -> None:
    """Give the chief's state to all processes, which `receive_state` it.

    Args:
        job: The processes.
        state: Arrays and typed keys on one device.
        about: JSON-able; goes with it.
    """
    specs = describe(state)
    values = [np.ascontiguousarray(to_host(leaf)) for leaf in jax.tree.leaves(state)]
    header = {**about, "leaves": specs_as_json(specs), "empties": empties_as_json(specs)}
    header["sizes"] = [value.nbytes for value in values]
    job.broadcast(json.dumps(header).encode())
    flat = _Flat(values)
    for begin in range(0, flat.size, _PART_BYTES):
        job.broadcast(flat.read(begin, min(begin + _PART_BYTES, flat.size)))


def receive_state(job: Job) -> tuple[dict[str, Any], Restored]:
    """Take what the chief sends.

    Returns:
        What goes with the state, and the state as if it had been restored.
    """
    header = json.loads(job.broadcast(None))
    specs = unpack_specs(header)
    values = [np.empty(size, np.uint8) for size in header["sizes"]]
    flat = _Flat(values)
    for begin in range(0, flat.size, _PART_BYTES):
        flat.write(begin, job.broadcast(None))
    leaves = []
    for spec, value in zip(specs, values, strict=True):
        dtype = np.dtype(np.uint32) if spec.kind == "key" else named_dtype(spec.dtype)
        leaves.append(value.view(dtype).reshape(spec.shape))
    return header, Restored(header["step"], header["began"], header["session"], leaves, specs)


class _Flat:
    """Several arrays as one run of bytes."""

    def __init__(self, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        self._views = [array.reshape(-1).view(np.uint8) for array in arrays]
        self._begins = np.cumsum([0, *(view.size for view in self._views)])
        self.size = int(self._begins[-1])

    def read(self, begin: int, end: int) -> bytes:
        return b"".join(view.tobytes() for view in self._between(begin, end))

    def write(self, begin: int, data: bytes) -> None:
        source = np.frombuffer(data, np.uint8)
        done = 0
        for view in self._between(begin, begin + source.size):
            view[:] = source[done : done + view.size]
            done += view.size

    def _between(self, begin: int, end: int) -> list[np.ndarray[Any, Any]]:
        found = []
        for view, start in zip(self._views, self._begins, strict=False):
            first, last = max(begin - int(start), 0), min(end - int(start), view.size)
            if first < last:
                found.append(view[first:last])
        return found
