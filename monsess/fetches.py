"""What hooks fetch: outputs by name, and functions of state and outputs that run on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import jax

from monsess.errors import FetchError
from monsess.log import logger
from monsess.placement import on_first_device
from monsess.reduction import output_names

_MOST_FUNCTIONS = 64


class Fetcher:
    """Evaluates fetches; a callable is compiled once and run only when it is asked for."""

    def __init__(self) -> None:
        self._compiled: OrderedDict[Callable[..., Any], Callable[..., Any]] = OrderedDict()
        self._warned = False

    def __call__(self, fetches: Any, state: Any, outputs: Any, who: str, feeds: Mapping[str, Any] | None = None) -> Any:
        """Evaluate ``fetches``.

        Args:
            fetches: A pytree of names and callables.
            state: The replicated state.
            outputs: The step's outputs, or None if no step ran.
            who: Who asks, for messages.
            feeds: Keyword arguments for the callables.

        Returns:
            The values in the structure of ``fetches``, on their way on the device.

        Raises:
            FetchError: An unknown name, or a leaf that is neither a name nor callable.
        """
        if fetches is None:
            return None
        views: list[Any] = []

        def one(leaf: Any) -> Any:
            if isinstance(leaf, str):
                return _lookup(leaf, outputs, who)
            if callable(leaf):
                if not views:
                    views.append((on_first_device(state), _gathered(outputs)))
                try:
                    return self._function(leaf, who)(*views[0], **(feeds or {}))
                except Exception as error:
                    error.add_note(f"Raised by a function that {who} fetches; it is called as f(state, outputs).")
                    raise
            raise FetchError(f"{who} fetches {leaf!r}: a fetch is an output's name or a function f(state, outputs).")

        return jax.tree.map(one, fetches, is_leaf=callable)

    def _function(self, function: Callable[..., Any], who: str) -> Callable[..., Any]:
        try:
            compiled = self._compiled.get(function)
        except TypeError:
            raise FetchError(f"{who} fetches {function!r}, which cannot be hashed. Use a plain function.") from None
        if compiled is not None:
            self._compiled.move_to_end(function)
            return compiled
        compiled = self._compiled[function] = jax.jit(function)
        if len(self._compiled) > _MOST_FUNCTIONS:
            self._compiled.popitem(last=False)
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s fetches a new function with every run, and each is compiled. Make the function once, in "
                    "__init__, rather than a lambda in before_run.",
                    who,
                )
        return compiled


def _gathered(outputs: Any) -> Any:
    """The outputs on the first device: a copy of the reduced ones, all parts of those that are one per device."""

    def one(x: jax.Array) -> jax.Array:
        if x.sharding.is_fully_replicated:
            return x.addressable_data(0)
        return jax.device_put(x, min(x.devices(), key=lambda device: device.id))

    return jax.tree.map(one, outputs)


def _lookup(name: str, outputs: Any, who: str) -> Any:
    if isinstance(outputs, dict) and name in outputs:
        return outputs[name]
    node = outputs
    for part in name.split("/"):
        node = _child(node, part)
        if node is _NOTHING:
            break
    else:
        return node
    names = [] if outputs is None else output_names(outputs)
    if names == ["output"] and name == "output":
        return outputs
    listed = ", ".join(repr(one) for one in names) if names else "none (no step has run yet, or it returns none)"
    raise FetchError(f"{who} fetches {name!r}, which the step does not return. Its outputs: {listed}.")


_NOTHING = object()


def _child(node: Any, part: str) -> Any:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if str(key) == part:
                return value
        return _NOTHING
    if isinstance(node, (tuple, list)) and not hasattr(node, "_fields"):
        return node[int(part)] if part.isdigit() and int(part) < len(node) else _NOTHING
    if isinstance(node, jax.Array) or part.startswith("_"):
        return _NOTHING
    return getattr(node, part, _NOTHING)
