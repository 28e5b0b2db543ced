"""Every kind of leaf that a state may hold, with the values that get lost; saved and restored by a real session.

``python leaf_matrix.py DEVICES DIRECTORY LAST_STEP`` restores what is there, compares every bit on every device with
what `expected` says, and trains to LAST_STEP with a step that hands the state through.
"""

from __future__ import annotations

import dataclasses
import re
import struct
import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import monsess as ms

_SCALAR_TYPE = re.compile(r"(bfloat|float|int|uint|complex|bool)[0-9]*(_e\w+)?_?")
#: ``jax.numpy`` has names for these, but the runtime of jax 0.10 has no arrays of them: it refuses, or crashes.
_NAMES_ONLY = {"float6_e2m3fn", "float6_e3m2fn", "int1", "uint1"}
_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000ABCDEF))[0]


def dtypes() -> list[np.dtype[Any]]:
    """All dtypes of which JAX makes arrays."""
    found = {}
    for name in dir(jnp):
        scalar = getattr(jnp, name)
        if _SCALAR_TYPE.fullmatch(name) and hasattr(scalar, "dtype"):
            found[np.dtype(scalar.dtype).name] = np.dtype(scalar.dtype)
    return [found[name] for name in sorted(found) if name not in _NAMES_ONLY]


def values(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Values of a dtype by their bits: zeros of both signs, NaN payloads, infinities, the ends of the range."""
    if dtype == np.bool_:
        return np.array([True, False, True])
    if match := re.fullmatch(r"(u?)int([24])", dtype.name):
        low, high = (0, 2 ** int(match[2])) if match[1] else (-(2 ** (int(match[2]) - 1)), 2 ** (int(match[2]) - 1))
        return np.arange(low, high).astype(dtype)
    if dtype.name.startswith("float4"):
        return np.array([0, -0.0, 0.5, -0.5, 1, 1.5, 2, 3, 4, 6, -6], np.float32).astype(dtype)
    if dtype.itemsize == 1:
        return np.arange(256, dtype=np.uint8).view(dtype)
    bits = np.random.default_rng(dtype.itemsize).integers(0, 256, 60 * dtype.itemsize, dtype=np.uint8)
    ends = [np.zeros(dtype.itemsize, np.uint8), np.full(dtype.itemsize, 255, np.uint8)]
    found = np.concatenate([bits, *ends]).view(dtype)
    if dtype.kind in "iu" and dtype.itemsize == 8:
        return np.concatenate([found, np.array([2**40 + 1, 2**63 + 5 if dtype.kind == "u" else -(2**63) + 5], dtype)])
    if dtype.kind == "f" or dtype.kind == "c":
        return np.concatenate([found, np.array([-0.0, np.inf, -np.inf, np.nan], dtype)])
    return found


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


def expected() -> dict[str, Any]:
    """The state; the same in every process."""
    w = jnp.arange(6, dtype=jnp.float32).reshape(2, 3) - 2.5
    params = {"dense": {"w": w, "b": jnp.array([-0.0, 1e-45, 3.0])}}
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3), optax.ema(0.9))
    _, stepped = chain.update(params, chain.init(params), params)
    model = nn.Sequential([nn.Dense(3), nn.BatchNorm(use_running_average=True)])
    variables = model.init(jax.random.key(0), w)
    module = eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(1))
    arrays, _ = eqx.partition(module, eqx.is_array)
    return {
        "dtype": {
            dtype.name: {
                "vector": values(dtype),
                "scalar": values(dtype)[-1:].reshape(()),
                "matrix": np.stack([values(dtype), values(dtype)[::-1]]),
                "empty": np.zeros((2, 0, 3), dtype),
            }
            for dtype in dtypes()
        },
        "keys": {
            "threefry": jax.random.key(3),
            "rbg": jax.random.split(jax.random.key(1, impl="rbg"), (2, 3)),
            "unsafe": jax.random.key(5, impl="unsafe_rbg"),
            "raw": jax.random.PRNGKey(4),
            "none": jax.random.split(jax.random.key(6), 0),
        },
        "python": {
            "bool": True,
            "int": -3,
            "large": 2**40 + 1,
            "larger": 2**63 + 5,
            "float": -0.0,
            "nan": _NAN,
            "inf": float("-inf"),
            "complex": complex(-0.0, float("inf")),
        },
        "numpy": {"f": np.float32(-0.0), "i": np.int64(2**40 + 1), "u": np.uint64(2**63 + 5), "b": np.bool_(True)},
        "hollow": {"none": None, "dict": {}, "list": [], "tuple": (), "deep": {"x": [{}, (), None]}, "size": [[]]},
        "nodes": {
            "named": Point(w, (w, [w, None])),
            "dataclass": Pair(w, {"a": w}),
            "ordered": OrderedDict(b=w, a=-w),
            "numbers": {1: w, 2: -w, 10: w},
            "a.b/c d": w,
        },
        "optax": stepped,
        "flax": TrainState.create(apply_fn=None, params=variables, tx=chain).replace(tx=None),
        "equinox": arrays,
    }


def bits(leaf: Any) -> tuple[str, str, tuple[int, ...], bytes]:
    """What a leaf is: key implementation, dtype, shape, and every bit."""
    impl = ""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        impl, leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return impl, array.dtype.name, array.shape, array.tobytes()


def compare(state: Any, wanted: Any) -> int:
    """How many leaves there are; raises if one of them, on any device, differs in a bit."""
    assert jax.tree.structure(state) == jax.tree.structure(wanted)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(wanted)[0]]
    for path, leaf, other in zip(paths, jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        copies = leaf.addressable_shards
        assert len(copies) == jax.local_device_count(), path
        for copy in copies:
            assert bits(copy.data) == bits(other), path
    return len(paths)


def main(devices: int, directory: str, last_step: int) -> None:
    ms.testing.emulate_devices(devices)
    jax.config.update("jax_enable_x64", True)
    wanted = expected()

    @ms.train_step
    def handed_through(state):
        return state, {}

    def init() -> Any:
        """The state itself the first time, then zeros of its structure: nothing of it may come from here."""
        return wanted if last_step == 1 else jax.tree.map(_zero, wanted)

    def compared(session: Any) -> None:
        print("restored", session.restored_from, "leaves", compare(session._dispatcher.state, wanted))

    with ms.MonitoredTrainingSession(
        init,
        checkpoint_dir=directory,
        checkpoint=ms.CheckpointOptions(check_finite=False),
        hooks=[ms.StopAtStepHook(last_step=last_step)],
    ) as sess:
        compared(sess)
        while not sess.should_stop():
            sess.run(handed_through)
        compared(sess)
    loaded = ms.load_checkpoint(directory)
    for name, kinds in wanted["dtype"].items():
        for kind, value in kinds.items():
            assert bits(loaded["dtype"][name][kind]) == bits(value), (name, kind)
    for name, key in wanted["keys"].items():
        assert bits(loaded["keys"][name])[1:] == bits(key)[1:], name
    print("loaded", len(wanted["dtype"]), "dtypes")


def _zero(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.zeros_like(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return np.zeros(np.shape(leaf), leaf.dtype)
    return 2**63 if type(leaf) is int and leaf >= 2**63 else type(leaf)()  # NumPy's dtype for a number that large


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
