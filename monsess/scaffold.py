"""How the first state comes to be, when there is none to restore."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax


@final
class Scaffold:
    """The pieces that make a state ready to be trained.

    Args:
        init_fn: ``() -> state``, any pytree; called only when nothing is restored.
        warm_start_from: Path or URL of a checkpoint of monsess or plain Orbax that gives some leaves of a fresh state:
            a directory of steps, of which the newest is taken, or one of the steps.
        warm_start_paths: Which leaves, as patterns over paths such as ``params/dense/w``; ``*`` matches anything.
        warm_start_options: For the fsspec filesystem of ``warm_start_from``; never shown.
        ready_fn: ``state -> names`` of what is still missing; None, True or an empty result means ready.
        copy_from_scaffold: A Scaffold whose pieces are taken where none is given here.

    Raises:
        TypeError: ``copy_from_scaffold`` is no Scaffold, or a function is not callable.

    Example:
        >>> import monsess as ms
        >>> ms.Scaffold(init_fn=lambda: {"w": 0.0}).finalize().init_fn()
        {'w': 0.0}
    """

    def __init__(
        self,
        init_fn: Callable[[], Any] | None = None,
        *,
        warm_start_from: str | os.PathLike[str] | None = None,
        warm_start_paths: Sequence[str] | None = None,
        warm_start_options: Mapping[str, Any] | None = None,
        ready_fn: Callable[[Any], Any] | None = None,
        copy_from_scaffold: Scaffold | None = None,
    ) -> None:
        if copy_from_scaffold is not None and not isinstance(copy_from_scaffold, Scaffold):
            raise TypeError("copy_from_scaffold is not a Scaffold instance.")
        for name, function in (("init_fn", init_fn), ("ready_fn", ready_fn)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be callable, found {function!r}.")
        source = copy_from_scaffold
        self.init_fn = init_fn if init_fn is not None or source is None else source.init_fn
        self.ready_fn = ready_fn if ready_fn is not None or source is None else source.ready_fn
        self.warm_start_from = (
            warm_start_from if warm_start_from is not None or source is None else source.warm_start_from
        )
        if warm_start_options is None and warm_start_from is None and source is not None:
            warm_start_options = source.warm_start_options  # they belong to the URL that is copied
        self.warm_start_options: dict[str, Any] | None = (
            None if warm_start_options is None else dict(warm_start_options)
        )
        if isinstance(warm_start_paths, str):
            raise TypeError(f"warm_start_paths must be a list of patterns, found the string {warm_start_paths!r}.")
        self.warm_start_paths: tuple[str, ...] | None = (
            tuple(warm_start_paths)
            if warm_start_paths is not None
            else (None if source is None else source.warm_start_paths)
        )

    def finalize(self) -> Scaffold:
        """Fill in the defaults of the pieces that were not given.

        Returns:
            This object. Calling it again changes nothing.
        """
        if self.init_fn is None:
            self.init_fn = dict
        if self.ready_fn is None:
            self.ready_fn = _always_ready
        if self.warm_start_paths is None:
            self.warm_start_paths = ("params/*",)
        return self

    def missing(self, state: Any) -> list[str]:
        """What ``ready_fn`` finds missing from ``state``.

        Args:
            state: The initialised or restored state.

        Returns:
            Names; empty if the state is ready.
        """
        found = None if self.ready_fn is None else self.ready_fn(state)
        if found is None or found is True:
            return []
        if found is False:
            return ["ready_fn returned False"]
        return [str(name) for name in found]


def _always_ready(state: Any) -> None:
    """Every state is ready."""


def describe_state(init_fn: Callable[[], Any]) -> Any:
    """The structure of what ``init_fn`` returns, without computing it where that is possible.

    Args:
        init_fn: ``() -> state``. If it cannot be traced it is called for real on the CPU and its result dropped, so
            that its side effects happen on a resume too.

    Returns:
        The state with `jax.ShapeDtypeStruct` for arrays and other leaves as they are.
    """
    static: dict[int, Any] = {}
    structure: list[Any] = []

    def arrays_only() -> list[Any]:
        leaves, tree = jax.tree.flatten(init_fn())
        structure[:] = [tree]
        static.clear()
        static.update({i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, jax.Array)})
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    try:
        arrays = iter(jax.eval_shape(arrays_only))
    except Exception:  # whatever tracing trips over, the real call decides
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return init_fn()
    count = structure[0].num_leaves
    leaves = [static[i] if i in static else next(arrays) for i in range(count)]
    return jax.tree.unflatten(structure[0], leaves)
