"""The outputs of an eval step over many batches as one number each: exact weights, one transfer at the end.

Outputs are put together over the batches as the step puts them together over the devices: "mean" weighted by the rows
of each batch, "sum", "max" and "min" as they say. The step itself counts the rows, on the devices, so that padding,
dropped rows and processes with different numbers of rows weigh what they are worth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from monsess.errors import MonsessError, StepDefinitionError
from monsess.reduction import path_name
from monsess.step import EvalStep, Step, TrainStep

#: Name of the output that holds the number of rows.
ROWS = "_rows"
_BLOCK = 256


def counted_eval_step(step: EvalStep) -> EvalStep:
    """The eval step that also returns the number of rows; its outputs are a flat dict by name.

    Raises:
        StepDefinitionError: Some output is to stay one value per device.
    """
    return EvalStep(
        _with_rows(step),
        axis_name=step.axis_name,
        devices=step.devices,
        donate=False,
        reduce=_reduce(step),
        steps_per_run=0,
        engine=step.engine,
    )


def counted_train_step(step: EvalStep) -> TrainStep:
    """The same as a train step that leaves the state as it is, so that hooks see its runs and ``data`` feeds it.

    Raises:
        StepDefinitionError: As `counted_eval_step`.
    """
    evaluate = _with_rows(step)

    @functools.wraps(step.function)
    def unchanged(state: Any, *args: Any, **named: Any) -> Any:
        return state, evaluate(state, *args, **named)

    return TrainStep(
        unchanged,
        axis_name=step.axis_name,
        devices=step.devices,
        donate=True,
        reduce=_reduce(step),
        steps_per_run=1,
        engine=step.engine,
    )


class OverBatches:
    """Collects the outputs of a counted step on the device, without waiting for any of them.

    Args:
        step: The counted step.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._names: list[str] = []
        self._dtypes: list[np.dtype[Any]] = []
        self._full: list[jax.Array] = []
        self._block: jax.Array | None = None
        #: int: how many batches there were.
        self.batches = 0

    def add(self, outputs: Mapping[str, jax.Array]) -> None:
        """Take the outputs of one more batch.

        Raises:
            StepDefinitionError: One of them is not a single real number.
        """
        leaves = [leaf.addressable_data(0) for leaf in outputs.values()]
        if not self._names:
            self._names = list(outputs)
            self._dtypes = [leaf.dtype for leaf in leaves]
            for name, leaf in zip(outputs, leaves, strict=True):
                self._check(name, leaf)
        place = self.batches % _BLOCK
        if self._block is None or not place:
            if self._block is not None:
                self._full.append(self._block)
            words = sum(_words(dtype) for dtype in self._dtypes)
            self._block = jnp.zeros((_BLOCK, words), jnp.uint32, device=leaves[0].device)
        self._block = _put(self._block, np.int32(place), leaves)
        self.batches += 1

    def results(self) -> dict[str, float]:
        """Wait for all batches, and put their outputs together.

        Raises:
            MonsessError: There was no batch, or no row in any.
        """
        if self._block is None:
            raise MonsessError(
                f"The evaluation with {self._step.name} got no batch, so there is no result. Look at its data: "
                "where a function returns it, that has to begin anew each time."
            )
        words = np.concatenate(jax.device_get([*self._full, self._block]))[: self.batches]
        values = dict(zip(self._names, _columns(words, self._dtypes), strict=True))
        rows = values.pop(ROWS)
        if not rows.sum():
            raise MonsessError(f"The evaluation with {self._step.name} got no row: all of them are padding.")
        reduce = self._step.reduce
        named: Mapping[str, Any] = reduce if isinstance(reduce, Mapping) else {}
        how = {name: named.get(name, "mean") if isinstance(reduce, Mapping) else reduce for name in values}
        return {name: float(_TOGETHER[how[name]](column[rows > 0], rows[rows > 0])) for name, column in values.items()}

    def _check(self, name: str, leaf: jax.Array) -> None:
        if leaf.shape != () or jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise StepDefinitionError(
                f"Output {name!r} of {self._step.name} is {leaf.dtype}{list(leaf.shape)}: what is evaluated over many "
                "batches must be single real numbers. Return its mean, its sum, or one output for each of its parts."
            )


_TOGETHER: dict[Any, Callable[[np.ndarray, np.ndarray], Any]] = {
    "mean": lambda values, rows: (values * rows).sum() / rows.sum(),
    "sum": lambda values, rows: values.sum(),
    "max": lambda values, rows: values.max(),
    "min": lambda values, rows: values.min(),
}


def _with_rows(step: EvalStep) -> Callable[..., Any]:
    """The user's function with a flat dict of outputs, and among them the rows of the whole batch."""
    function, adds_up = step.function, _reduce_of_rows(step) == "sum"

    @functools.wraps(function)
    def evaluate(state: Any, *args: Any, **named: Any) -> Any:
        outputs = function(state, *args, **named)
        flat = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(outputs)[0]}
        rows = jnp.asarray(_rows(args, named), jnp.float32)
        return {**flat, ROWS: rows if adds_up else jax.lax.psum(rows, step.axis_name)}

    return evaluate


def _rows(args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """How many rows this device has."""
    if named.get("mask") is not None:
        return named["mask"].sum()
    leaves = jax.tree.leaves((args, {name: value for name, value in named.items() if name != "mask"}))
    return leaves[0].shape[0] if leaves and leaves[0].ndim else 1


def _reduce(step: EvalStep) -> Any:
    reduce = step.reduce
    if reduce is None or (isinstance(reduce, Mapping) and None in reduce.values()):
        raise StepDefinitionError(
            f"{step.name} keeps an output as one value per device (reduce=None): what is evaluated over many batches "
            'must be single numbers. Choose "mean", "sum", "max" or "min".'
        )
    return {**reduce, ROWS: "sum"} if isinstance(reduce, Mapping) else reduce


def _reduce_of_rows(step: EvalStep) -> Any:
    reduce = _reduce(step)
    return reduce[ROWS] if isinstance(reduce, Mapping) else reduce


def _words(dtype: np.dtype[Any]) -> int:
    return 2 if dtype.itemsize == 8 else 1


@functools.partial(jax.jit, donate_argnums=0)
def _put(block: jax.Array, place: Any, leaves: list[jax.Array]) -> jax.Array:
    """Write the bits of some numbers into a row: no integer is rounded on its way."""
    parts = []
    for leaf in leaves:
        if leaf.dtype.itemsize < 4:  # bool, and what no reduction widens
            leaf = leaf.astype(jnp.float32)
        parts.append(jax.lax.bitcast_convert_type(leaf, jnp.uint32).reshape(-1))
    return jax.lax.dynamic_update_slice(block, jnp.concatenate(parts)[None], (place, jnp.zeros_like(place)))


def _columns(words: np.ndarray, dtypes: list[np.dtype[Any]]) -> list[np.ndarray]:
    """What `_put` has written, as float64 columns."""
    columns, begin = [], 0
    for dtype in dtypes:
        width = _words(dtype)
        part = np.ascontiguousarray(words[:, begin : begin + width])
        columns.append(part.view(np.float32 if dtype.itemsize < 4 else dtype)[:, 0].astype(np.float64))
        begin += width
    return columns
