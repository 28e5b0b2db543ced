"""The same in TensorBoard's form, made by TensorBoard's own library.

Each attempt writes files of its own, whose names sort after those of all attempts before, whatever the clocks say; a
mark at the start of an attempt tells TensorBoard to forget what an earlier one wrote of later steps.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import re
import socket
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from monsess.records.streams import Stream
from monsess.storage import Storage
from monsess.summary import Histogram, Image, Text

PREFIX = "events.out.tfevents."
_STAMP = re.compile(rf"{re.escape(PREFIX)}(\d+)\.")


def is_available() -> bool:
    """Whether TensorBoard's library is installed; it is not imported."""
    return importlib.util.find_spec("tensorboard") is not None


class Events:
    """Makes TensorBoard's records; the library is imported by the thread that writes, when it writes first.

    Args:
        attempt: Name of the attempt, part of file names.
    """

    def __init__(self, attempt: str) -> None:
        self._attempt = attempt

    def open(self, storage: Storage, names: list[str]) -> Stream:
        """The bytes of this attempt on their way to ``storage``, where there are files called ``names``."""
        before = [int(found[1]) for name in names if (found := _STAMP.match(name))]
        stamp = max([int(time.time()), *(one + 1 for one in before)])
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()) or "host"
        name = f"{PREFIX}{stamp:010d}.{host}.{self._attempt}"
        header = _framed(_event(0, time.time(), file_version="brain.Event:2"))
        return Stream(storage, lambda n: name if n is None else f"{name}.{n:06d}", header)

    def is_one(self, name: str) -> bool:
        """Whether a file of that name is TensorBoard's."""
        return name.startswith(PREFIX)

    def start(self, step: int, when: float) -> bytes:
        """A mark: what came before it of ``step`` and later ones is void."""
        session_log = _proto("event_pb2").SessionLog
        return _framed(_event(step, when, session_log=session_log(status=session_log.START)))

    def values(self, step: int, when: float, values: Mapping[str, Any]) -> bytes:
        """Numbers, histograms, images and texts of a step, by tag."""
        summary = _proto("summary_pb2").Summary()
        for tag, value in values.items():
            summary.value.add().CopyFrom(_value(tag, value))
        return _framed(_event(step, when, summary=summary)) if values else b""


def _proto(name: str) -> Any:
    """A module of TensorBoard's messages, which are made when it is imported."""
    return importlib.import_module(f"tensorboard.compat.proto.{name}")


def _event(step: int, when: float, **what: Any) -> bytes:

    return _proto("event_pb2").Event(step=step, wall_time=when, **what).SerializeToString()


def _framed(data: bytes) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(data)
    return buffer.getvalue()


def _value(tag: str, value: Any) -> Any:
    tag = _utf8(tag)
    if isinstance(value, Histogram):
        return _histogram(tag, np.asarray(value.table, np.float64))
    if isinstance(value, Image):
        return _image(tag, np.asarray(value.pixels))
    if isinstance(value, Text):
        from tensorboard.plugins.text.summary_v2 import text_pb

        return text_pb(tag, _utf8(value.text)).value[0]
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb

    return scalar_pb(tag, _float32(value)).value[0]


def _utf8(text: str) -> str:
    """The text as its messages can hold it."""
    return text.encode("utf-8", "replace").decode()


@functools.cache
def _limit() -> float:
    return float(np.finfo(np.float32).max)


def _float32(value: float) -> np.float32:
    """The value as TensorBoard has it, without a warning for one that is too large there."""
    if value == value and abs(value) > _limit():
        return np.float32(np.inf if value > 0 else -np.inf)
    return np.float32(value)


def _histogram(tag: str, table: np.ndarray) -> Any:
    from tensorboard.plugins.histogram.metadata import create_summary_metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    low, high, counts = table[0], table[1], table[2:]
    edges = low + (high / 2 - low / 2) * (2 * np.arange(len(counts) + 1) / len(counts))
    edges[-1] = high
    rows = np.stack([edges[:-1], edges[1:], counts], axis=1)
    metadata = create_summary_metadata(display_name=None, description=None)
    return _proto("summary_pb2").Summary.Value(
        tag=tag, metadata=metadata, tensor=make_tensor_proto(rows, dtype=np.float64)
    )


def _image(tag: str, pixels: np.ndarray) -> Any:
    from tensorboard.plugins.image.metadata import create_summary_metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    _, height, width, _ = pixels.shape
    parts = [str(width).encode(), str(height).encode(), *map(_png, pixels)]
    metadata = create_summary_metadata(display_name=None, description=None, converted_to_tensor=None)
    return _proto("summary_pb2").Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto(parts))


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image as Pillow  # TensorBoard depends on it

    buffer = io.BytesIO()
    Pillow.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(buffer, "PNG")
    return buffer.getvalue()
