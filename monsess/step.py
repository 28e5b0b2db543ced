"""Steps: functions written for one device, compiled to run on all of them.

A step is `(state, batch) -> (state, outputs)`. The state is replicated and never stacked; the batch is split over the
devices; outputs are reduced to one global value inside the step. Two engines run the same body and give equal bits.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final, overload

import jax

from monsess.errors import StepDefinitionError

Engine = Literal["pmap", "shard_map"]
Reduction: TypeAlias = Literal["mean", "sum", "max", "min"] | None
Reduce: TypeAlias = Reduction | Mapping[str, Reduction]

ENGINES = ("pmap", "shard_map")
REDUCTIONS = ("mean", "sum", "max", "min", None)


class Step:
    """A step function with how it is to be compiled; made by `train_step` and `eval_step`.

    Calling it runs the plain function, for use inside ``jax.vmap(..., axis_name=...)`` in a test.
    """

    #: "train" or "eval".
    kind: Literal["train", "eval"]

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        axis_name: str,
        devices: Sequence[Any] | None,
        donate: bool,
        reduce: Reduce,
        steps_per_run: int,
        engine: Engine,
    ) -> None:
        _refuse_unusable(function)
        if engine not in ENGINES:
            raise StepDefinitionError(f"engine must be one of {', '.join(map(repr, ENGINES))}; found {engine!r}.")
        if isinstance(steps_per_run, bool) or not isinstance(steps_per_run, int) or steps_per_run < 0:
            raise StepDefinitionError(f"steps_per_run must be an integer >= 0, found {steps_per_run!r}.")
        if not isinstance(axis_name, str) or not axis_name:
            raise StepDefinitionError(f"axis_name must be a non-empty string, found {axis_name!r}.")
        _check_reduce(reduce)
        self.function = function
        self.axis_name = axis_name
        if not isinstance(donate, bool):
            raise StepDefinitionError(f"donate must be True or False, found {donate!r}.")
        self.devices = _checked_devices(devices)
        self.donate = donate
        self.reduce: Reduce = dict(reduce) if isinstance(reduce, Mapping) else reduce
        self.steps_per_run = steps_per_run
        self.engine: Engine = engine
        self.name = getattr(function, "__name__", type(function).__name__)
        self.signature = _without_annotations(inspect.signature(function))
        self.parameters, self.required, self.takes_mask, self.variadic = _read_signature(self.name, self.signature)
        self.__doc__ = getattr(function, "__doc__", None)
        self.__name__ = self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plain function, without a session."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{self.kind}_step {self.name}{self.signature}>"

    @property
    def takes_batch(self) -> bool:
        """Whether the function has an argument after the state."""
        return bool(self.parameters) or self.variadic


@final
class TrainStep(Step):
    """A step that updates the state: `(state, batch) -> (state, outputs)`."""

    kind = "train"


@final
class EvalStep(Step):
    """A step that only looks: `(state, batch) -> outputs`."""

    kind = "eval"


@overload
def train_step(function: Callable[..., Any], /) -> TrainStep: ...
@overload
def train_step(
    *,
    axis_name: str = "data",
    devices: Sequence[Any] | None = None,
    donate: bool = True,
    reduce: Reduce = "mean",
    steps_per_run: int = 1,
    engine: Engine = "pmap",
) -> Callable[[Callable[..., Any]], TrainStep]: ...
def train_step(
    function: Callable[..., Any] | None = None,
    /,
    *,
    axis_name: str = "data",
    devices: Sequence[Any] | None = None,
    donate: bool = True,
    reduce: Reduce = "mean",
    steps_per_run: int = 1,
    engine: Engine = "pmap",
) -> Any:
    """Declare a function written for one device to be the training step that runs on all of them.

    The function gets the whole state and its device's share of the batch, leaves ``[per_device_batch, ...]``, and
    returns the new state, of the same structure, shapes and dtypes, and any pytree of outputs. It averages its
    gradients itself (``jax.lax.pmean(grads, "data")``).

    Args:
        function: ``(state, batch, ...) -> (state, outputs)``; ``(state) -> (state, outputs)`` works too.
        axis_name: The name that collectives inside the function use.
        devices: The local devices to run on; None: all of them.
        donate: Let the update reuse the memory of the old state.
        reduce: How outputs become one value over all devices: "mean", "sum", "max", "min", None (stacked, one value
            per local device), or a dict from output name to one of these; outputs that a dict does not name are
            averaged. Narrow floats are reduced, and returned, in float32; "mean" of integers is float32.
        steps_per_run: Updates that one call performs; 0 declares an auxiliary update that counts no step.
        engine: "pmap" or "shard_map"; both give equal bits.

    Returns:
        A step for `MonitoredSession.run`.

    Raises:
        StepDefinitionError: The function is wrapped by ``jax.pmap``, has a signature that cannot be called with a
            state and a batch, or an argument has an impossible value.

    Example:
        >>> import jax, monsess as ms
        >>> @ms.train_step
        ... def step(state, batch):
        ...     gradient = jax.lax.pmean(jax.grad(lambda w: ((w * batch["x"] - batch["y"]) ** 2).mean())(state), "data")
        ...     return state - 0.1 * gradient, {"gradient": gradient}
        >>> step
        <train_step step(state, batch)>
    """

    def declare(function: Callable[..., Any]) -> TrainStep:
        return TrainStep(
            function,
            axis_name=axis_name,
            devices=devices,
            donate=donate,
            reduce=reduce,
            steps_per_run=steps_per_run,
            engine=engine,
        )

    return declare if function is None else declare(function)


@overload
def eval_step(function: Callable[..., Any], /) -> EvalStep: ...
@overload
def eval_step(
    *,
    axis_name: str = "data",
    devices: Sequence[Any] | None = None,
    reduce: Reduce = "mean",
    engine: Engine = "pmap",
) -> Callable[[Callable[..., Any]], EvalStep]: ...
def eval_step(
    function: Callable[..., Any] | None = None,
    /,
    *,
    axis_name: str = "data",
    devices: Sequence[Any] | None = None,
    reduce: Reduce = "mean",
    engine: Engine = "pmap",
) -> Any:
    """Declare a function written for one device to be an evaluation step.

    It never changes the state, never advances the step, never takes a batch from the session's ``data``, and no hook
    sees it.

    Args:
        function: ``(state, batch, ...) -> outputs``.
        axis_name: The name that collectives inside the function use.
        devices: The local devices to run on; None: all of them.
        reduce: As in `train_step`.
        engine: "pmap" or "shard_map".

    Returns:
        A step for `MonitoredSession.run`.

    Raises:
        StepDefinitionError: As in `train_step`.

    Example:
        >>> import monsess as ms
        >>> @ms.eval_step(reduce={"correct": "sum"})
        ... def count(state, batch):
        ...     return {"correct": (batch["x"] * state > 0).sum()}
        >>> count
        <eval_step count(state, batch)>
    """

    def declare(function: Callable[..., Any]) -> EvalStep:
        return EvalStep(
            function,
            axis_name=axis_name,
            devices=devices,
            donate=False,
            reduce=reduce,
            steps_per_run=0,
            engine=engine,
        )

    return declare if function is None else declare(function)


def _refuse_unusable(function: Any) -> None:
    if isinstance(function, Step):
        raise StepDefinitionError(f"{function!r} is a step already; decorate the plain function once.")
    if not callable(function) or inspect.isclass(function):
        raise StepDefinitionError(f"A step must be a function, found {function!r}.")
    code = getattr(function, "__code__", None)
    if code is not None and hasattr(function, "lower") and os.path.basename(code.co_filename) == "pmap.py":
        name = getattr(function, "__name__", "step")
        raise StepDefinitionError(
            f"{name!r} is already wrapped by jax.pmap; monsess does that itself, with an un-stacked state. Replace "
            f"@jax.pmap (or jax.pmap({name}, ...)) by @monsess.train_step and leave the function as it is, for one "
            "device."
        )


def _checked_devices(devices: Any) -> tuple[Any, ...] | None:
    if devices is None:
        return None
    listed = tuple(devices) if isinstance(devices, Iterable) and not isinstance(devices, str) else ()
    if not listed or not all(isinstance(device, jax.Device) for device in listed):
        raise StepDefinitionError(
            f"devices must be local JAX devices, such as jax.local_devices()[:2], or None for all; found {devices!r}."
        )
    return listed


def _check_reduce(reduce: Any) -> None:
    for how in reduce.values() if isinstance(reduce, Mapping) else (reduce,):
        if how not in REDUCTIONS:
            raise StepDefinitionError(
                f'reduce must be "mean", "sum", "max", "min", None or a dict from output name to one of these; '
                f"found {how!r}."
            )


def _without_annotations(signature: inspect.Signature) -> inspect.Signature:
    """The signature as messages show it: names and defaults."""
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=signature.empty)


def _read_signature(name: str, signature: inspect.Signature) -> tuple[tuple[str, ...], int, bool, bool]:
    """Names of the parameters after the state, how many of them have no default, whether there is a mask."""
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not positional and not variadic:
        raise StepDefinitionError(f"{name}{signature} takes no state: a step is written as {name}(state, batch).")
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            if parameter.name != "mask":
                raise StepDefinitionError(
                    f"{name}{signature}: keyword-only parameter {parameter.name!r} has no default and could never be "
                    "given. Make it positional, so that it can be passed to run() or fed by a hook."
                )
    after = [p for p in positional[1:] if p.name != "mask"]
    required = sum(p.default is p.empty for p in after)
    return tuple(p.name for p in after), required, "mask" in signature.parameters, variadic
