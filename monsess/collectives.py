"""Host values of all processes brought together: what Horovod's helpers do, for pytrees, with one process too."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np

from monsess.channel import Channel
from monsess.checkpoint.leaves import dtype_name, named_dtype
from monsess.errors import ProcessesDivergedError

_BY_MESSAGE_BYTES = 256 << 10
#: Where no session is open; the default of ``max_wait_secs``.
_LIMIT_SECS = 7200.0
_numbers = itertools.count()

Operation = Literal["mean", "sum", "min", "max"]
_REDUCTIONS: dict[str, Callable[..., Any]] = {"mean": np.mean, "sum": np.sum, "min": np.min, "max": np.max}


def allgather(tree: Any) -> Any:
    """Stack the values of all processes, in the order of the processes.

    All processes call it at the same point with the same structure, shapes and dtypes; anything else is an error on
    all of them. Values travel as bytes, so that no bit of them changes. It uses host memory of all values together.

    Args:
        tree: A pytree of numpy or fully addressable jax arrays and numbers.

    Returns:
        The pytree with numpy leaves ``[process_count, ...]``.

    Raises:
        ProcessesDivergedError: The processes called different things, or with different shapes.
        HookError: A chief-only hook of a job with several processes calls it.
        ClusterError: A process did not call it within ``max_wait_secs`` of the open session, or two hours without one.

    Example:
        >>> import monsess as ms
        >>> ms.allgather({"loss": 0.5})["loss"].tolist()
        [0.5]
    """
    return _gathered("allgather", tree)


def allreduce(tree: Any, op: Operation = "mean") -> Any:
    """Reduce the values of all processes to one, the same bits on all of them.

    Args:
        tree: As in `allgather`.
        op: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``, in the dtype of the values; a mean of integers is a float64.

    Returns:
        The pytree with numpy leaves of the shapes of ``tree``.

    Raises:
        ValueError: ``op`` is none of those.
        ProcessesDivergedError: As in `allgather`.
        ClusterError: As in `allgather`.

    Example:
        >>> import monsess as ms
        >>> float(ms.allreduce(3.0, "sum"))
        3.0
    """
    if op not in _REDUCTIONS:
        raise ValueError(f"op must be one of {', '.join(map(repr, _REDUCTIONS))}, found {op!r}.")
    reduce = _REDUCTIONS[op]
    found = _gathered("allreduce", tree)
    return jax.tree.map(lambda x: np.asarray(reduce(x, axis=0, **_same_dtype(op, x.dtype))), found)


def broadcast(tree: Any, root: int = 0) -> Any:
    """Give the values of one process to all.

    Args:
        tree: As in `allgather`; on the other processes only structure, shapes and dtypes count.
        root: The process whose values are taken.

    Returns:
        The pytree with numpy leaves.

    Raises:
        ValueError: There is no process ``root``.
        ProcessesDivergedError: As in `allgather`.
        ClusterError: As in `allgather`.

    Example:
        >>> import monsess as ms
        >>> int(ms.broadcast(7))
        7
    """
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < jax.process_count():
        raise ValueError(f"root must be a process from 0 to {jax.process_count() - 1}, found {root!r}.")
    return jax.tree.map(lambda x: x[root], _gathered("broadcast", tree))


def _gathered(what: str, tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    arrays = [np.asarray(leaf) for leaf in leaves]
    if jax.process_count() == 1:
        found = [arrays]
    else:
        from monsess.session import joint_call

        with joint_call(what) as limit:
            found = _exchange(what, arrays, str(structure), _LIMIT_SECS if limit is None else limit)
    return jax.tree.unflatten(structure, [np.stack(parts) for parts in zip(*found, strict=True)])


def _same_dtype(op: str, dtype: np.dtype[Any]) -> dict[str, Any]:
    return {"dtype": dtype} if op == "sum" and dtype.kind != "b" else {}


def _exchange(what: str, arrays: list[np.ndarray], structure: str, limit: float) -> list[list[np.ndarray]]:
    """The arrays of all processes: small ones as messages, large ones as bytes through the devices."""
    channel = Channel("collectives")
    number = next(_numbers)
    about = json.dumps([what, structure, [[list(a.shape), dtype_name(a.dtype)] for a in arrays]])
    data = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)
    small = len(data) <= _BY_MESSAGE_BYTES
    signature = hashlib.sha256(about.encode()).hexdigest()
    message = json.dumps([signature, about[:200], base64.b64encode(data).decode() if small else ""])
    told = [json.loads(one) for one in channel.gather(_key(number), message, limit, _check_sessions)]
    for index, (other, shown, _) in enumerate(told):
        if other != signature:
            raise ProcessesDivergedError(
                f"Process {channel.index} called {about[:200]}, process {index} {shown}. allreduce, allgather and "
                "broadcast have to be called by all processes at the same point, with the same shapes."
            )
    if small:
        parts = [base64.b64decode(one) for _, _, one in told]
    else:
        from jax.experimental import multihost_utils

        rows = np.asarray(multihost_utils.process_allgather(np.frombuffer(data, np.uint8)))
        parts = [row.tobytes() for row in rows.reshape(channel.count, -1)]
    channel.forget(_key(number - 2))
    return [_split(part, arrays) for part in parts]


def _key(number: int) -> str:
    return f"{number} allreduce, allgather or broadcast"  # the same, whichever of them a process calls


def _split(data: bytes, like: list[np.ndarray]) -> list[np.ndarray]:
    found, begin = [], 0
    for array in like:
        part = np.frombuffer(bytearray(data[begin : begin + array.nbytes]), named_dtype(dtype_name(array.dtype)))
        found.append(part.reshape(array.shape))
        begin += array.nbytes
    return found


def _check_sessions() -> None:
    """Raise what an open session knows about the other processes."""
    from monsess.job import check_all

    check_all()
