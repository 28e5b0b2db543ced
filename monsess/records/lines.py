"""One record as one line of strict JSON, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

#: The file that a local directory has, to which lines are appended.
FILE = "metrics.jsonl"
#: How the names of the sealed parts begin that any other store has.
PART_PREFIX = "metrics-"
SUFFIX = ".jsonl"

_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(record: Mapping[str, Any]) -> bytes:
    """The line of a record, its end included; numbers that JSON does not have become texts."""
    return json.dumps(_strict(record), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode_all(data: bytes) -> Iterator[dict[str, Any]]:
    """The records in ``data``; a line that is none, such as one that a kill has torn, is skipped."""
    for line in data.split(b"\n"):
        record = decode(line)
        if record is not None:
            yield record


def decode(line: bytes) -> dict[str, Any] | None:
    """The record of a line, or None."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return {name: _numbers(value) if isinstance(value, dict) else value for name, value in record.items()}


def _strict(value: Any) -> Any:
    if getattr(value, "shape", None) == ():  # of numpy or of the device
        return _strict(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(name): _strict(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(part) for part in value]
    return value


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a part of a record, where a text that names a number is that number."""
    return {name: _NUMBERS.get(value, value) if isinstance(value, str) else value for name, value in values.items()}
