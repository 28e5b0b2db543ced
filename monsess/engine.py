"""Compiles a step for a set of devices: one body, two engines, equal bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from monsess.across import Across, to_local
from monsess.errors import StepDefinitionError
from monsess.layout import Layout
from monsess.reduction import Stacked, path_name, reduce_outputs
from monsess.step import Step
from monsess.summary import Collected, collecting


class Dispatched(NamedTuple):
    """What a compiled step returns, all still on its way on the devices.

    Args:
        state: The new state, replicated; the old one for an eval step is left alone and this is None.
        reduced: Outputs, or the reduced ones among them as a list.
        stacked: The outputs that stay one per device, or ``()``.
        nonfinite: int32 count of non-finite values in floating outputs; ready when the step is done.
        agreed: The sum of all processes' signals, or None where there are no signals.
        summaries: What the step has collected by `monsess.summary`, or ``()``.
    """

    state: Any
    reduced: Any
    stacked: Stacked | tuple[()]
    nonfinite: jax.Array
    agreed: jax.Array | None
    summaries: Collected | tuple[()] = ()


Mapped = tuple[Any, tuple[Any, ...], dict[str, Any], Any]  # signals, positional and named arguments, a filler
Compiled = Callable[..., Dispatched]


def compile_step(step: Step, layout: Layout) -> Compiled:
    """Compile a step, lazily, for the devices of ``layout``.

    Args:
        step: The step.
        layout: The local devices.

    Returns:
        ``(state, mapped=(signals, args, named, filler)) -> Dispatched``; the mapped leaves have a leading axis of the
        local device count, the state has none and is donated if the step says so. The filler is used for nothing:
        pmap needs one mapped leaf, and None is enough where there is another.
    """
    axis = step.axis_name
    body = partial(_body, step)
    body.__name__ = body.__qualname__ = f"{step.kind}_step_{step.name}"  # type: ignore[attr-defined]
    donate = (0,) if step.kind == "train" and step.donate else ()
    if step.engine == "pmap":
        # Mapped leaves go by keyword: pmap mixes up the axes of positional arguments when their number happens to be
        # that of all leaves (jax 0.10.2 and 0.12.0.1).
        mapped_step = jax.pmap(
            body,
            axis,
            in_axes=(None,),
            out_axes=Dispatched(None, None, 0, None, None, None),  # type: ignore[arg-type]
            donate_argnums=donate,
            devices=step.devices,
        )
        if jax.process_count() == 1:
            return mapped_step
        return lambda state, mapped: mapped_step(to_local(state, layout), mapped=mapped)

    def per_device(state: Any, mapped: Mapped) -> Dispatched:
        result = body(state, mapped=jax.tree.map(lambda x: x.squeeze(0), mapped))
        return result._replace(stacked=jax.tree.map(lambda x: jnp.expand_dims(x, 0), result.stacked))

    split, whole = PartitionSpec(axis), PartitionSpec()
    if layout.axis_name != axis:
        layout = Layout(layout.devices, axis)
    across = None if jax.process_count() == 1 else Across(layout, axis)
    sharded = jax.shard_map(
        per_device,
        mesh=layout.mesh if across is None else across.mesh,
        in_specs=(whole, split),
        out_specs=Dispatched(whole, whole, split, whole, whole, whole),  # type: ignore[arg-type]
        check_vma=False,  # check_vma=True makes the usual pmean(grads) N times too large
    )

    def run(state: Any, mapped: Mapped) -> Dispatched:
        return sharded(state, mapped)

    run.__name__ = run.__qualname__ = body.__name__  # type: ignore[attr-defined]
    compiled = jax.jit(run, donate_argnums=donate)
    if across is None:
        return compiled

    def run_across(state: Any, mapped: Mapped) -> Dispatched:
        result = compiled(across.replicated(state), across.split(mapped))
        return result._replace(  # the state stays as it is: the next step takes it so
            reduced=across.local(result.reduced),
            stacked=across.local_rows(result.stacked),
            nonfinite=across.local(result.nonfinite),
            agreed=across.local(result.agreed),
            summaries=across.local(result.summaries),
        )

    return run_across


def _body(step: Step, state: Any, *, mapped: Mapped) -> Dispatched:
    """What every device runs: the user's function, the reduction of its outputs, the sum of the signals."""
    signals, args, named, _ = mapped
    with collecting(active=step.kind == "train") as collected:
        result = step.function(state, *args, **named)
    if step.kind == "eval":
        new_state, outputs = None, result
    else:
        new_state, outputs = _split(step, result)
        new_state = _checked_state(step, state, new_state)
    reduced = reduce_outputs(outputs, step.reduce, step.axis_name, signals)
    return Dispatched(new_state, *reduced, collected.reduced(step.axis_name) if collected else ())


def _split(step: Step, result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        found = f"a tuple of {len(result)}" if isinstance(result, tuple) else _shown(result)
        found = f"an array {found}" if isinstance(result, jax.Array) else found
        raise StepDefinitionError(
            f"{step.name} must return (state, outputs), found {found}. Without outputs return (state, {{}})."
        )
    return result


def _checked_state(step: Step, old: Any, new: Any) -> Any:
    """The new state with strong dtypes, after checking that it has the structure of the old one."""
    old_paths, old_structure = jax.tree_util.tree_flatten_with_path(old)
    new_paths, new_structure = jax.tree_util.tree_flatten_with_path(new)
    before = {path_name(path): leaf for path, leaf in old_paths}
    after = {path_name(path): leaf for path, leaf in new_paths}
    problems = [f"{name}: missing from the new state" for name in before if name not in after]
    problems += [f"{name}: only in the new state" for name in after if name not in before]
    for name in before.keys() & after.keys():
        was, now = before[name], _strong(after[name])
        if now is None:
            problems.append(f"{name}: was {_shown(was)}, is {_shown(after[name])}")
            continue
        if (was.shape, was.dtype) != (now.shape, now.dtype):
            problems.append(f"{name}: was {_shown(was)}, is {_shown(now)}")
    if not problems and old_structure != new_structure:
        problems = [f"containers differ: was {old_structure}, is {new_structure}"]
    if problems:
        raise StepDefinitionError(
            f"{step.name} must return a state of the structure that it got. Differing: " + "; ".join(sorted(problems))
        )
    return jax.tree_util.tree_unflatten(old_structure, [_strong(leaf) for _, leaf in new_paths])


def _strong(leaf: Any) -> Any:
    """The leaf without a weak dtype, which would compile the step once more at its second run; None if it is none."""
    if isinstance(leaf, jax.Array) and not getattr(leaf, "weak_type", False):
        return leaf
    try:
        array = jnp.asarray(leaf)
    except TypeError:
        return None
    return jnp.asarray(array, dtype=array.dtype)


def _shown(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, jax.Array) else f"a {type(leaf).__name__}"
