"""Where batches come from: the three kinds of source, their stored state, and how to tell one batch from another."""

from __future__ import annotations

import base64
import importlib
import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from monsess.errors import BatchError, InputPositionError
from monsess.log import logger

#: Names of the methods that read and write an iterator's state: Grain's, and those of PyTorch's loaders.
STATE_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))

_TAG = "__monsess__"
_ABSENT: Any = object()


class Source:
    """One user's source of batches, read by one thread at a time.

    ``kind`` is ``"stateful"`` (the iterator, or the iterable itself, has one of `STATE_METHODS`), ``"re-iterable"``, or
    ``"iterator"`` for a bare one, which cannot go back. Of an iterable it is known for sure after `restart`.

    Args:
        data: What the user passed.

    Raises:
        BatchError: ``data`` is nothing that yields batches.
    """

    def __init__(self, data: Any) -> None:
        _check_iterable(data)
        self.data = data
        self.is_iterator = hasattr(data, "__next__") and iter(data) is data
        self._iterator: Iterator[Any] | None = data if self.is_iterator else None
        self._methods = _state_methods(data)
        self._data_holds_state = self._methods is not None

    @property
    def kind(self) -> str:
        """Whether it has a state, can be iterated again, or neither."""
        if self._methods is not None:
            return "stateful"
        return "iterator" if self.is_iterator else "re-iterable"

    @property
    def started(self) -> bool:
        """Whether there is an iterator to read from."""
        return self._iterator is not None

    @property
    def redistribute(self) -> Callable[..., Any] | None:
        """The source's own ``redistribute(states, process_index, process_count)``, or None."""
        found = getattr(self.data, "redistribute", None) or getattr(self._iterator, "redistribute", None)
        return found if callable(found) else None

    def restart(self, state: Any = _ABSENT) -> None:
        """Begin a new pass, at the start or at ``state``; a bare iterator just goes on.

        Raises:
            InputPositionError: The source refused ``state``, or hands out the iterator that was read before.
        """
        if state is not _ABSENT and self._data_holds_state:
            self._write_state(state)
        if not self.is_iterator:
            previous = self._iterator
            if inspect.isgenerator(previous):
                self._close(previous)  # first, since its ``finally`` may touch what the new one reads
            self._iterator = iter(self.data)
            if not self._data_holds_state:
                self._methods = _state_methods(self._iterator)
            if self._iterator is not previous:
                self._close(previous)
            elif self._methods is None:
                raise InputPositionError(
                    f"{type(self.data).__name__}.__iter__ returned the iterator that it had returned before, so that "
                    "the input cannot go back. Return a new iterator each time."
                )
        if state is not _ABSENT and not self._data_holds_state:
            self._write_state(state)

    def __next__(self) -> Any:
        if self._iterator is None:
            self.restart()
        assert self._iterator is not None
        return next(self._iterator)

    def read_state(self) -> Any:
        """The state as the source gives it; None if it has none."""
        return None if self._methods is None else self._methods[0]()

    def _write_state(self, state: Any) -> None:
        if self._methods is None:
            raise InputPositionError(
                f"The checkpoint holds the state of an iterator, but {type(self.data).__name__} has none to set "
                "(get_state/set_state or state_dict/load_state_dict). Pass the kind of input that the checkpoint was "
                "written with."
            )
        try:
            self._methods[1](state)
        except Exception as error:
            raise InputPositionError(
                f"The input refused its stored state ({type(error).__name__}: {error}). Pass the source that the "
                "checkpoint was written with."
            ) from error

    def close(self) -> None:
        """Close the iterator if it can be closed; an error of it is logged, not raised."""
        self._close(self._iterator)

    @staticmethod
    def _close(iterator: Any) -> None:
        close = getattr(iterator, "close", None)
        if callable(close):
            try:
                close()
            except Exception:
                logger.warning("The training input raised while it was closed.", exc_info=True)


def _check_iterable(data: Any) -> None:
    kind = type(data).__name__
    if isinstance(data, (Mapping, str, bytes)):
        raise BatchError(f"data= must yield batches, found one {kind}. For a single batch pass [batch].")
    if inspect.isgeneratorfunction(data) or inspect.isclass(data):
        name = data.__qualname__
        raise BatchError(f"data= must yield batches, found {name} itself. Call it: {name}(...).")
    if not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise BatchError(f"data= must be an iterable of batches, found {kind}, which cannot be iterated.")


def _state_methods(holder: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    for names in STATE_METHODS:
        read, write = (getattr(holder, name, None) for name in names)
        if callable(read) and callable(write):
            return read, write
    return None


class Checksum:
    """A checksum over the paths, dtypes, shapes and bytes of a batch's leaves.

    Host leaves are read at once, since a loader may refill them; leaves on an accelerator when `value` is asked for,
    since most batches are never asked.

    Args:
        batch: The batch as the source gave it.
    """

    def __init__(self, batch: Any) -> None:
        leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
        self._parts = [(jax.tree_util.keystr(path), leaf if _is_far(leaf) else _digest(leaf)) for path, leaf in leaves]

    def value(self) -> str | None:
        """The checksum, or None if an array of the batch has been deleted since."""
        for i, (path, part) in enumerate(self._parts):
            if not isinstance(part, str):
                if part.is_deleted():
                    return None
                self._parts[i] = path, _digest(part)
        return f"crc32:{zlib.crc32(repr(self._parts).encode()):08x}"


def _is_far(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and any(device.platform != "cpu" for device in leaf.sharding.device_set)


def _digest(leaf: Any) -> str:
    if isinstance(leaf, jax.Array):
        is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        leaf = jax.device_get(jax.random.key_data(leaf) if is_key else leaf)
    array = np.ascontiguousarray(leaf)
    content = zlib.crc32(array.reshape(-1).view(np.uint8).data) if array.size else 0  # bfloat16 has no buffer itself
    return f"{array.dtype.name} {array.shape} {content:08x}"


def encode(value: Any, where: str = "state") -> Any:
    """Return ``value`` in JSON's terms, a copy that `decode` turns back into equal values of the same types.

    Args:
        value: None, bool, int, float, str, bytes, lists, tuples, dicts, numpy, jax and torch arrays, typed keys.
        where: How messages call it.

    Raises:
        InputPositionError: Something in it is none of these; names its place and type.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if type(value) is tuple:
        return {_TAG: "tuple", "items": encode(list(value), where)}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        return {_TAG: "dict", "items": [[encode(k, where), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: type(value).__name__, "data": base64.b64encode(value).decode()}
    if isinstance(value, jax.Array):
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            impl = str(jax.random.key_impl(value))
            return _encode_array(jax.device_get(jax.random.key_data(value)), "key", where) | {"impl": impl}
        return _encode_array(jax.device_get(value), "jax", where)
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return _encode_array(np.asarray(value), "array" if type(value) is np.ndarray else "scalar", where)
    if type(value).__module__ == "torch" and type(value).__name__ == "Tensor":
        return _encode_array(value.numpy(force=True), "torch", where)
    raise InputPositionError(
        f"The state of the training input cannot be stored: {where} is a {type(value).__module__}."
        f"{type(value).__qualname__}. Expected None, bool, int, float, str, bytes, lists, tuples, dicts and arrays."
    )


def _encode_array(array: np.ndarray, tag: str, where: str) -> dict[str, Any]:
    dtype = array.dtype
    if dtype.hasobject or dtype.names:
        raise InputPositionError(f"The state of the training input cannot be stored: {where} has the dtype {dtype}.")
    name = dtype.str if np.dtype(dtype.str) == dtype else dtype.name  # the first is exact, but void for bfloat16
    data = base64.b64encode(array.tobytes()).decode()
    return {_TAG: tag, "dtype": name, "shape": list(array.shape), "data": data}


def decode(value: Any) -> Any:
    """Turn back what `encode` returned.

    Raises:
        InputPositionError: It is not something that `encode` returns.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {key: decode(item) for key, item in value.items()}
    if tag == "tuple":
        return tuple(decode(value["items"]))
    if tag == "dict":
        return {decode(key): decode(item) for key, item in value["items"]}
    if tag == "bytes":
        return base64.b64decode(value["data"])
    if tag == "bytearray":
        return bytearray(base64.b64decode(value["data"]))
    if tag not in ("array", "scalar", "jax", "key", "torch"):
        raise InputPositionError(
            f"The stored state of the training input holds a {tag!r}, which this version does not know. It was "
            "written by a newer monsess; use that one."
        )
    array = np.frombuffer(base64.b64decode(value["data"]), np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    if tag == "torch":
        return importlib.import_module("torch").from_numpy(array)
    if tag == "jax":
        return jax.device_put(array)
    if tag == "key":
        return jax.random.wrap_key_data(jax.device_put(array), impl=value["impl"])
    return array[()] if tag == "scalar" else array
