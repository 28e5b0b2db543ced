"""Which value goes to which argument of a step, and that no two sources give the same one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from monsess.errors import BatchError, FeedConflictError, StepDefinitionError
from monsess.hook import SessionRunArgs
from monsess.layout import Layout
from monsess.prefetch import Item

if TYPE_CHECKING:
    from monsess.step import Step


class Call(NamedTuple):
    """A step's arguments, laid out over the devices; leaves ``[local devices, per_device, ...]``."""

    args: tuple[Any, ...]
    named: dict[str, Any]


class Feed(NamedTuple):
    """A value for an argument, and who gives it."""

    value: Any
    who: str


def merge_feeds(requests: Mapping[str, SessionRunArgs]) -> dict[str, Feed]:
    """The arguments that hooks feed, by name.

    Args:
        requests: By hook name, what it asks for.

    Raises:
        FeedConflictError: Two hooks feed the same argument; names both.
    """
    feeds: dict[str, Feed] = {}
    for who, request in requests.items():
        for name, value in (request.feed_dict or {}).items():
            if name in feeds:
                raise FeedConflictError(
                    f"Same tensor is fed by two hooks: {name!r} comes from {feeds[name].who} and from {who}. "
                    "Remove one of them."
                )
            feeds[name] = Feed(value, who)
    return feeds


def wants_data(step: Step, given: int, feeds: Mapping[str, Feed]) -> bool:
    """Whether a run of ``step`` takes its batch from the session's data.

    Args:
        step: A train step.
        given: How many arguments the caller passed.
        feeds: What hooks feed.

    Raises:
        FeedConflictError: A hook feeds the batch although the session has data.
    """
    if not step.takes_batch or (given and given + len(feeds) >= step.required):
        return False
    if step.parameters and step.parameters[0] in feeds:
        raise FeedConflictError(
            f"Same tensor is fed by a SessionRunHook and the session's data: {step.parameters[0]!r} of {step.name} "
            f"comes from {feeds[step.parameters[0]].who} and from data=. Remove one of them."
        )
    return True


def move(item: Item, layout: Layout) -> Item:
    """A batch from the session's data for a step that runs on other devices than it was laid out for."""

    def moved(placed: Any) -> Any:
        joined = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), placed)
        return layout.lay_out(joined)[0]

    return Item(moved(item.batch), None if item.mask is None else moved(item.mask), item.index)


def bind(
    step: Step, args: tuple[Any, ...], feeds: Mapping[str, Feed], layout: Layout, item: Item | None, remainder: str
) -> Call:
    """Lay out the arguments of one run.

    Args:
        step: The step.
        args: What the caller passed after the step.
        feeds: What hooks feed.
        layout: The devices.
        item: The batch from the session's data, laid out already, or None.
        remainder: "error", "drop" or "pad", for a batch that the caller or a hook hands over.

    Raises:
        FeedConflictError: A hook and the caller give the same argument.
        BatchError: Too many or too few arguments, or a batch that does not fit the devices.
        StepDefinitionError: ``remainder="pad"`` and the step has no parameter ``mask``.
    """
    names = step.parameters
    offset = 0 if item is None else 1
    if len(args) + offset > len(names) and not step.variadic:
        takes = f"{len(names)} argument{'s' * (len(names) > 1)}" if names else "no argument"
        listed = f" ({', '.join(names)})" if names else ""
        from_data = " besides the batch from data=" if item is not None else ""
        raise BatchError(
            f"{step.name}{step.signature} takes {takes} after the state{listed}, got {len(args)}{from_data}. Leave the "
            "rest out of run(), or add parameters to the step."
        )
    taken = names[: len(args) + offset]
    for name in feeds:
        if name in taken:
            raise FeedConflictError(
                f"Same tensor is fed by a SessionRunHook and user: {name!r} of {step.name} comes from "
                f"{feeds[name].who} and from the caller of run. Remove one of them."
            )
        if name not in names:
            raise BatchError(
                f"{feeds[name].who} feeds {name!r}, but {step.name}{step.signature} has no such argument; it has "
                f"{list(names)}."
            )
    missing = [name for name in names[: step.required] if name not in taken and name not in feeds]
    if missing:
        raise BatchError(
            f"{step.name}{step.signature} was not given {missing}. "
            + (
                f"An eval step takes no batch from data=; pass it: run({step.name}, {', '.join(missing)})."
                if step.kind == "eval"
                else "Pass it to run(step, ...), feed it from a hook, or give the session data=."
            )
        )

    mask = None if item is None else item.mask
    placed: list[Any] = [] if item is None else [item.batch]
    named: dict[str, Any] = {}
    for position, value in enumerate(args, start=offset):
        name = names[position] if position < len(names) else f"argument {position + 1}"
        laid, its_mask = _lay_out(value, name, position == 0, layout, remainder)
        mask = its_mask if position == 0 else mask
        placed.append(laid)
    for name, feed in feeds.items():
        try:
            named[name], its_mask = _lay_out(feed.value, name, name == names[0], layout, remainder)
        except Exception as error:
            error.add_note(f"Fed by {feed.who}.")
            raise
        mask = its_mask if name == names[0] else mask
    # Positional as far as possible, so that one way of calling is one compiled variant.
    while len(placed) < len(names) and names[len(placed)] in named:
        placed.append(named.pop(names[len(placed)]))
    if step.takes_mask:
        named["mask"] = mask if mask is not None else _all_rows(placed, layout)
    elif remainder == "pad" and mask is not None:
        raise StepDefinitionError(
            f'remainder="pad" hands the step a mask of the real rows, but {step.name}{step.signature} has no parameter '
            "'mask'. Add it and average with monsess.masked_mean(values, mask), or use remainder=\"drop\"."
        )
    return Call(tuple(placed), named)


def _lay_out(value: Any, name: str, is_batch: bool, layout: Layout, remainder: str) -> tuple[Any, Any]:
    what = "the batch" if is_batch else f"the argument {name!r}"
    leaves = jax.tree.leaves(value)
    if not is_batch and leaves and all(np.ndim(leaf) == 0 for leaf in leaves):
        return jax.tree.map(lambda leaf: layout.scalar(leaf, what), value), None
    laid, mask, _ = layout.lay_out(value, what=what, remainder=remainder if is_batch else "error", place=False)
    return laid, mask


def _all_rows(placed: list[Any], layout: Layout) -> Any:
    leaves = jax.tree.leaves(placed[0]) if placed else []
    rows = leaves[0].shape[1] if leaves else 1
    masked, _, _ = layout.lay_out(np.ones((layout.device_count * rows,), bool), what="the mask")
    return jnp.asarray(masked)
