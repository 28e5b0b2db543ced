"""Summaries: values that a step, or the loop around it, says it wants to be seen.

::

    @ms.train_step
    def step(state, batch):
        ...
        ms.summary.scalar("gradient_norm", optax.global_norm(grads))
        ms.summary.histogram("logits", logits)
        return new_state, {"loss": loss}

Inside a step they become outputs of it that only `SummarySaverHook` looks at: reduced over all devices of all
processes, and brought to the host only when they are due. Called in the loop, or in a hook, they are logged at once, as
of the session's step. In an eval step, and where there is no session, they do nothing, so that a model may hold them.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer

from monsess.errors import StepDefinitionError
from monsess.step import Reduction

__all__ = ["histogram", "image", "scalar", "text"]

_BUCKETS = 30
_REDUCTIONS = ("mean", "sum", "max", "min", None)


class Histogram:
    """How often values lie in each of some buckets of equal width.

    Args:
        table: float32 ``[2 + buckets]``: the smallest value, the largest one, and the counts.
    """

    def __init__(self, table: Any) -> None:
        self.table = table


class Image:
    """One or more images.

    Args:
        pixels: uint8 ``[images, height, width, channels]``.
    """

    def __init__(self, pixels: Any) -> None:
        self.pixels = pixels


class Text:
    """A text.

    Args:
        text: It.
    """

    def __init__(self, text: str) -> None:
        self.text = text


#: What is logged under a tag: a real number, or one of the above.
Value: TypeAlias = Any


def scalar(tag: str, value: Any, reduce: Reduction = "mean") -> None:
    """Have one number seen, in every step that `SummarySaverHook` is due.

    Args:
        tag: Its name; each once in a step.
        value: A real number, shape ``[]``.
        reduce: Inside a step, over all devices: "mean", "sum", "max", "min", or None for each device's own, under
            ``tag/0``, ``tag/1``, ….

    Raises:
        StepDefinitionError: The tag is taken, the value is no real number, or it was computed inside a ``scan``, a
            ``cond`` or a ``jit`` within the step, which hands out nothing but what it returns.

    Example:
        >>> import monsess as ms
        >>> @ms.train_step
        ... def step(state):
        ...     ms.summary.scalar("doubled", 2.0 * state)
        ...     return state + 1, {}
        >>> url = "memory://docs/summary"
        >>> with ms.MonitoredTrainingSession(
        ...     lambda: 0.0, checkpoint_dir=url, hooks=[ms.StopAtStepHook(2), ms.SummarySaverHook(save_steps=1)],
        ...     save_summaries_steps=None,
        ... ) as sess:
        ...     while not sess.should_stop():
        ...         outputs = sess.run(step)
        >>> [point.value for point in ms.read_metrics(url).curves["doubled"]]
        [0.0, 2.0]
    """
    if reduce not in _REDUCTIONS:
        raise StepDefinitionError(
            f'summary.scalar({tag!r}): reduce must be "mean", "sum", "max", "min" or None, found {reduce!r}.'
        )
    found = _collector()
    if found is not None:
        found.add(tag, ("scalar", reduce), _real(tag, value, ()))
    elif (session := _session(value)) is not None:
        session.log({tag: value})


def histogram(tag: str, values: Any, buckets: int = _BUCKETS) -> None:
    """Have the distribution of values seen, in TensorBoard.

    Inside a step it is that of the values of all devices, and computed there: only ``buckets + 2`` numbers are brought
    to the host. It is computed in every step; for what is in the state, such as the weights, a function for
    `SummarySaverHook` costs nothing in between.

    Args:
        tag: Its name; each once in a step.
        values: Real, any shape; those that are not finite are left out.
        buckets: How many, of equal width, at least 1.

    Raises:
        StepDefinitionError: As for `scalar`.

    Example:
        >>> import jax.numpy as jnp, monsess as ms
        >>> @ms.train_step
        ... def step(state):
        ...     ms.summary.histogram("state", state)
        ...     return state + 1, {}
        >>> with ms.MonitoredTrainingSession(lambda: jnp.zeros(3)) as sess:
        ...     outputs = sess.run(step)
    """
    if isinstance(buckets, bool) or not isinstance(buckets, int) or buckets < 1:
        raise StepDefinitionError(f"summary.histogram({tag!r}): buckets must be at least 1, found {buckets!r}.")
    found = _collector()
    if found is not None:
        found.add(tag, ("histogram", buckets), _real(tag, values, None))
    elif (session := _session(values)) is not None:
        session.log({tag: Histogram(_table(jnp.asarray(values), buckets, None))})


def image(tag: str, images: Any, max_outputs: int = 3) -> None:
    """Have images seen, in TensorBoard; inside a step those of the chief's first device.

    Args:
        tag: Their name; each once in a step.
        images: ``[height, width]``, ``[height, width, channels]`` or ``[images, height, width, channels]`` with 1, 3
            or 4 channels; floating in 0 … 1, or uint8.
        max_outputs: How many of them.

    Raises:
        StepDefinitionError: As for `scalar`, or the shape or type is another one.

    Example:
        >>> import jax.numpy as jnp, monsess as ms
        >>> @ms.train_step
        ... def step(state):
        ...     ms.summary.image("state", state)
        ...     return state, {}
        >>> with ms.MonitoredTrainingSession(lambda: jnp.zeros((8, 8))) as sess:
        ...     outputs = sess.run(step)
    """
    found = _collector()
    if found is not None:
        found.add(tag, ("image", None), _pixels(tag, images, max_outputs))
    elif (session := _session(images)) is not None:
        session.log({tag: Image(_pixels(tag, images, max_outputs))})


def text(tag: str, text: str) -> None:
    """Have a text seen; inside a step it is part of the program, and seen once.

    Args:
        tag: Its name; each once in a step.
        text: The text; TensorBoard shows it as Markdown.

    Raises:
        StepDefinitionError: It is no text, or as for `scalar`.

    Example:
        >>> import monsess as ms
        >>> with ms.MonitoredTrainingSession(lambda: 0.0, checkpoint_dir="memory://docs/text") as sess:
        ...     ms.summary.text("note", "a *fresh* start")
    """
    if not isinstance(text, str):
        raise StepDefinitionError(f"summary.text({tag!r}) takes a str, found a {type(text).__name__}.")
    found = _collector()
    if found is not None:
        found.add(tag, ("text", text), None)
    elif (session := _session(None)) is not None:
        session.log({tag: Text(text)})


# ---- inside a step


@jax.tree_util.register_pytree_node_class
class Collected:
    """What one trace has collected: arrays by tag, and what each of them is; a pytree node.

    Args:
        kinds: Of each tag its kind with what belongs to it; part of the tree structure.
        leaves: Of each tag its array, or None for a text.
    """

    def __init__(self, kinds: Mapping[str, tuple[str, Any]] | None = None, leaves: Any = None) -> None:
        self._kinds: dict[str, tuple[str, Any]] = dict(kinds or {})
        self._leaves: dict[str, Any] = dict(leaves or {})

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def tree_flatten(self) -> tuple[list[Any], tuple[tuple[str, tuple[str, Any]], ...]]:
        """The arrays, and the kinds as static data."""
        return list(self._leaves.values()), tuple(self._kinds.items())

    @classmethod
    def tree_unflatten(cls, static: tuple[tuple[str, tuple[str, Any]], ...], leaves: Any) -> Collected:
        """Undo `tree_flatten`."""
        return cls(dict(static), zip((tag for tag, _ in static), leaves, strict=True))

    def add(self, tag: str, kind: tuple[str, Any], leaf: Any) -> None:
        """Take in one summary.

        Raises:
            StepDefinitionError: The tag is no text, or taken.
        """
        if not isinstance(tag, str) or not tag:
            raise StepDefinitionError(f"expected a text as the tag of a summary, found {tag!r}.")
        if tag in self._kinds:
            raise StepDefinitionError(f"Two summaries of the step are called {tag!r}. Give each a tag of its own.")
        self._kinds[tag], self._leaves[tag] = kind, leaf

    def reduced(self, axis_name: str | None, like: Any = None) -> Collected:
        """The same over all devices, while the step is traced; ``axis_name`` None: there is one device only.

        Args:
            axis_name: The step's axis.
            like: A value of the function that is traced, where there is no axis.

        Raises:
            StepDefinitionError: A value belongs to a ``scan``, ``cond`` or ``jit`` within the step.
        """
        if axis_name is not None:
            like = jax.lax.axis_index(axis_name)
        found = Collected(self._kinds)
        scalars: list[tuple[str, Any]] = []  # with their reductions
        for tag, (kind, how) in self._kinds.items():
            leaf = self._leaves[tag]
            if like is not None and isinstance(leaf, Tracer) and _level(leaf) is not _level(like):
                raise StepDefinitionError(
                    f"summary {tag!r} was computed inside a scan, cond, vmap, checkpoint or jit within the step, from "
                    "which only what it returns comes out. Return the value from there, and call monsess.summary with "
                    "it in the step itself."
                )
            if kind == "scalar" and how is not None and axis_name is not None:
                scalars.append((tag, how))
            found._leaves[tag] = _reduced(kind, how, leaf, axis_name)
        if axis_name is not None:
            from monsess.reduction import reduce_leaves

            tags = [tag for tag, _ in scalars]
            totals = reduce_leaves([self._leaves[tag] for tag in tags], [how for _, how in scalars], axis_name)
            found._leaves |= zip(tags, totals, strict=True)
        return found

    def values(self, texts: bool = True) -> dict[str, Value]:
        """By tag what is to be logged, still on the device.

        Args:
            texts: Whether the texts, which never change, are among it.
        """
        found: dict[str, Value] = {}
        for tag, (kind, how) in self._kinds.items():
            leaf = self._leaves[tag]
            if kind == "scalar":
                one_each = enumerate(leaf) if how is None and leaf.ndim else None
                found.update({tag: leaf} if one_each is None else {f"{tag}/{i}": value for i, value in one_each})
            elif kind == "histogram":
                found[tag] = Histogram(leaf)
            elif kind == "image":
                found[tag] = Image(leaf)
            elif texts:
                found[tag] = Text(how)
        return found


@contextlib.contextmanager
def collecting(active: bool = True) -> Iterator[Collected]:
    """Inside the block, this thread's summaries are collected.

    Args:
        active: False: they are dropped.
    """
    before = getattr(_local, "collected", None)
    _local.collected = found = Collected()
    found_active = getattr(_local, "active", True)
    _local.active = active
    try:
        yield found
    finally:
        _local.collected, _local.active = before, found_active


_local = threading.local()


class _Dropping(Collected):
    """Where nothing is collected."""

    def add(self, tag: str, kind: tuple[str, Any], leaf: Any) -> None:
        """Nothing."""


_DROPPING = _Dropping()


def _collector() -> Collected | None:
    found: Collected | None = getattr(_local, "collected", None)
    return found if found is None or _local.active else _DROPPING


def _reduced(kind: str, how: Any, leaf: Any, axis_name: str | None) -> Any:
    if kind == "histogram":
        return _table(leaf, how, axis_name)
    if kind == "scalar" and how is None and axis_name is not None:
        return jax.lax.all_gather(leaf, axis_name)
    return leaf  # of an image the first device's is taken, since outputs of a step count as equal on all of them


def _table(values: Any, buckets: int, axis_name: str | None) -> Any:
    """float32 ``[2 + buckets]``: smallest, largest, counts; of the finite values of all devices."""
    flat = jnp.ravel(values).astype(jnp.float32)
    finite = jnp.isfinite(flat)
    low = jnp.min(flat, where=finite, initial=jnp.inf)
    high = jnp.max(flat, where=finite, initial=-jnp.inf)
    if axis_name is not None:
        low, high = jax.lax.pmin(low, axis_name), jax.lax.pmax(high, axis_name)
    # Halved, so that the width of all floats is no infinity.
    width = jnp.where(high > low, (high / 2 - low / 2) / buckets, 1.0)
    place = jnp.clip(jnp.floor((flat / 2 - low / 2) / width), 0, buckets - 1)
    place = jnp.where(high > low, place, buckets - 1)  # as TensorBoard has it where all values are equal
    hits = (place[:, None] == jnp.arange(buckets)) & finite[:, None]
    counts = jnp.sum(hits, axis=0, dtype=jnp.int32)
    if axis_name is not None:
        counts = jax.lax.psum(counts, axis_name)
    some = high >= low
    ends = jnp.stack([jnp.where(some, low, 0.0), jnp.where(some, high, 0.0)])
    return jnp.concatenate([ends, counts.astype(jnp.float32)])


def _level(value: Any) -> Any:
    """Which function a traced value belongs to."""
    return getattr(value, "_trace", None)


def _real(tag: str, value: Any, shape: tuple[int, ...] | None) -> jax.Array:
    try:
        array = jnp.asarray(value)
    except TypeError:
        raise StepDefinitionError(f"summary {tag!r} is a {type(value).__name__}; expected real numbers.") from None
    real = jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)
    if not real and array.dtype != jnp.bool_:
        raise StepDefinitionError(f"summary {tag!r} is {array.dtype}; expected real numbers.")
    if shape is not None and array.shape != shape:
        raise StepDefinitionError(
            f"summary.scalar({tag!r}) takes one number, found {array.dtype}{list(array.shape)}. Take its mean or norm, "
            "or use summary.histogram."
        )
    return _out_of_gradients(array)


def _out_of_gradients(array: jax.Array) -> jax.Array:
    """The value itself, in a function that is being differentiated: outside of it the tangents mean nothing."""
    return jax.lax.stop_gradient(array)


def _pixels(tag: str, images: Any, most: int) -> jax.Array:
    array = _real(tag, images, None)
    shaped = array[..., None] if array.ndim == 2 else array
    shaped = shaped[None] if shaped.ndim == 3 else shaped
    if shaped.ndim != 4 or shaped.shape[-1] not in (1, 3, 4) or 0 in shaped.shape:
        raise StepDefinitionError(
            f"summary.image({tag!r}) takes [height, width], [height, width, channels] or [images, height, width, "
            f"channels] with 1, 3 or 4 channels; found {list(array.shape)}."
        )
    shaped = shaped[:most]
    if array.dtype == jnp.uint8:
        return shaped
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise StepDefinitionError(f"summary.image({tag!r}) takes floats in 0 … 1 or uint8, found {array.dtype}.")
    scaled = jnp.nan_to_num(shaped.astype(jnp.float32)) * 255.0
    return jnp.clip(jnp.round(scaled), 0, 255).astype(jnp.uint8)


# ---- outside of one

_open: list[weakref.ref[Any]] = []


def session_opened(session: Any) -> None:
    """From here on summaries outside of steps, in the session's thread, are logged by it."""
    _open.append(weakref.ref(session))


def session_closed(session: Any) -> None:
    """The end of that."""
    _open[:] = [one for one in _open if one() is not None and one() is not session]


def _session(value: Any) -> Any:
    """The newest session of this thread; None if there is none, or if somebody else traces a function just now."""
    if isinstance(value, Tracer):
        return None
    for one in reversed(_open):
        session = one()
        if session is not None and session._thread == threading.get_ident():
            return session
    return None
