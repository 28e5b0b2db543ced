from __future__ import annotations

import collections
import dataclasses
import struct
import uuid
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from checkpoints import assert_same_bits, save

from monsess.checkpoint import CheckpointStore, load_checkpoint
from monsess.checkpoint.leaves import LeafTable, describe, to_host
from monsess.checkpoint.restore import Restored, find_restorable, fit
from monsess.checkpoint.table import empties_as_json, nest, pack, unpack_specs
from monsess.errors import StateMismatchError, UnstorableLeafError

ML = [np.dtype(v) for v in vars(ml_dtypes).values() if isinstance(v, type) and issubclass(v, np.generic)]
DTYPES = [*(np.dtype(c) for c in "?bBhHiIqQefdgFDG"), np.dtype(">f4"), np.dtype(">i8"), *ML]


def every_bit_pattern(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Values of a dtype, made from its bits where that is possible: NaN payloads, both zeros, infinities."""
    if dtype.kind == "b":
        return np.array([True, False, True])
    if dtype in ML and ("int" in dtype.name or dtype.name.startswith(("float4", "float6"))):
        low, high = (-2, 2) if "1" not in dtype.name else (0, 1)
        if dtype.name.startswith("uint"):
            low = 0
        return np.arange(low, high).astype(np.float32).astype(dtype)
    if dtype.char in "gG":
        return np.array([1.5, -0.0, np.inf, np.nan], dtype)
    if dtype.itemsize == 1:
        return np.arange(256, dtype=np.uint8).view(dtype)
    bits = np.random.default_rng(dtype.num).integers(0, 256, 60 * dtype.itemsize, dtype=np.uint8)
    return np.concatenate([bits, np.zeros(dtype.itemsize, np.uint8), np.full(dtype.itemsize, 255, np.uint8)]).view(
        dtype
    )


def round_trip(tree: Any) -> Any:
    url = f"memory://{uuid.uuid4().hex}"
    save(url, 3, state=tree, check_finite=False)
    restored = find_restorable(CheckpointStore(url))
    assert restored is not None
    return fit(restored, tree)


def test_every_dtype_keeps_its_bits():
    state = {}
    for dtype in DTYPES:
        values = every_bit_pattern(dtype)
        state[f"{dtype.str}{dtype.name}"] = {
            "vector": values,
            "scalar": values[-1:].reshape(()),
            "matrix": np.stack([values, values[::-1]]),
            "empty": np.zeros((0, 3), dtype),
            "transposed": np.stack([values, values[::-1]]).T,
        }
    assert_same_bits(round_trip(state), state)


def test_numpy_scalars_stay_what_they_are():
    state = {"a": np.float32(-0.0), "b": np.int64(2**40 + 1), "c": np.bool_(True), "d": np.float64("nan")}
    back = round_trip(state)
    assert {k: type(v) for k, v in back.items()} == {k: type(v) for k, v in state.items()}
    assert_same_bits(back, state)


def test_python_scalars_stay_what_they_are():
    payload = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000ABCDEF))[0]
    state = {
        "bool": True,
        "int": -3,
        "big": 10**5000,
        "float": -0.0,
        "nan": payload,
        "inf": float("-inf"),
        "complex": complex(-0.0, payload),
    }
    back = round_trip(state)
    assert {k: type(v) for k, v in back.items()} == {k: type(v) for k, v in state.items()}
    assert back["big"] == state["big"]
    for name in ("float", "nan", "inf"):
        assert struct.pack("<d", back[name]) == struct.pack("<d", state[name])
    assert struct.pack("<dd", back["complex"].real, back["complex"].imag) == struct.pack("<dd", -0.0, payload)


def test_typed_and_raw_keys():
    state = {
        "one": jax.random.key(3),
        "many": jax.random.split(jax.random.key(1, impl="rbg"), 5),
        "raw": jax.random.PRNGKey(4),
    }
    specs = describe(state)
    assert [(s.path, s.kind, s.key_impl, s.shape, s.dtype) for s in specs] == [
        ("many", "key", "rbg", (5, 4), "uint32"),
        ("one", "key", "threefry2x32", (2,), "uint32"),
        ("raw", "array", None, (2,), "uint32"),
    ]
    back = round_trip(state)
    for name in ("one", "many"):
        assert back[name].tobytes() == np.asarray(jax.random.key_data(state[name])).tobytes()
    assert describe(jax.eval_shape(lambda: state)) == [*specs]


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


@jax.tree_util.register_pytree_node_class
class Plain:
    """A node that does not name its children."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def containers() -> dict[str, Any]:
    w = jnp.ones((2, 3))
    params = {"dense": {"w": w, "b": jnp.zeros(3)}}
    return {
        "named": Point(w, (w, [w, None])),
        "dataclass": Pair(w, {}),
        "ordered": collections.OrderedDict(b=w, a=w),
        "plain": Plain(w, w),
        "empty": {"dict": {}, "list": [], "tuple": (), "none": None, "deep": {"x": [{}, ()]}},
        "ints": {1: w, 2: w},
        "optax": optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(params),
        "flax": nn.Dense(3).init(jax.random.key(0), w),
        "equinox": eqx.filter(eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(1)), eqx.is_array),
    }


def test_containers_come_back():
    state = containers()
    back = round_trip(state)
    assert_same_bits(back, state)
    assert isinstance(back["named"], Point)
    assert back["empty"] == state["empty"]


def test_bare_and_hollow_states():
    assert_same_bits(round_trip(np.arange(3.0)), np.arange(3.0))
    assert round_trip({"a": {}, "b": None}) == {"a": {}, "b": None}
    assert round_trip({}) == {}
    assert_same_bits(round_trip([np.zeros((0,))]), [np.zeros((0,))])


def test_odd_names_and_those_that_orbax_would_mix_up():
    names = ["a.b", "", "%20", "a/b", "é☃", "a#?*[1]", "..", ".", "new\nline", "k" * 300, "x'y", "a,b"]
    state: dict[str, Any] = {name: np.full(2, i, np.float32) for i, name in enumerate(names)}
    state["a"] = {"b": np.zeros(3), "c": np.ones(1)}
    state["layer/~/w"] = np.ones(2)
    state["layer"] = np.ones(5)
    assert_same_bits(round_trip(state), state)


def test_load_checkpoint_shows_the_tree_as_stored():
    state = containers()
    url = f"memory://{uuid.uuid4().hex}"
    save(url, 3, state=state)
    tree = load_checkpoint(url)
    assert tree["empty"] == {"dict": {}, "list": [], "tuple": [], "none": None, "deep": {"x": [{}, []]}}
    assert sorted(tree["named"]) == ["x", "y"]
    assert tree["named"]["y"][1][1] is None
    assert isinstance(tree["optax"], list)
    assert sorted(tree["ints"]) == ["1", "2"]
    assert tree["named"]["x"].dtype == np.float32
    assert isinstance(tree["named"]["x"], np.ndarray)


def test_every_unstorable_leaf_is_named():
    state = {
        "name": "resnet",
        "net": {"rng": np.random.default_rng(0), "ok": np.ones(2)},
        "text": np.array(["a", "b"]),
        "object": np.array([None, 1], object),
        "record": np.zeros(2, [("a", "f4")]),
        "when": np.datetime64("2026-01-01"),
        "mask": np.ma.ones(3),
        "function": len,
    }
    with pytest.raises(UnstorableLeafError) as caught:
        describe(state)
    text = str(caught.value)
    for path in ("name", "net/rng", "text", "object", "record", "when", "mask", "function"):
        assert f"  {path}: " in text
    assert "net/ok" not in text


def test_finite_flags():
    specs = describe(
        {
            "fine": np.array([1.0, np.nan]),
            "best": np.array([np.inf, 1.0]),
            "int": np.arange(3),
            "f8": np.array([np.inf], ml_dtypes.float8_e5m2),
            "jax": jnp.array([-jnp.inf], jnp.bfloat16),
            "python": float("inf"),
            "complex": np.array([complex(0, np.inf)]),
        }
    )
    flags = {s.path: s.finite for s in specs}
    assert flags == {
        "fine": True,
        "best": False,
        "int": None,
        "f8": False,
        "jax": False,
        "python": False,
        "complex": False,
    }
    later = describe({"fine": np.ones(2), "best": np.ones(2), "new": np.ones(2)})
    assert {s.path: s.finite for s in later.with_finite_of(specs)} == {"fine": True, "best": False, "new": True}


def test_describing_leaves_buffers_donatable():
    x = jnp.ones((64, 64))
    pointer = x.unsafe_buffer_pointer()
    describe({"x": x})
    y = jax.jit(lambda v: v + 1, donate_argnums=0)(x)
    assert y.unsafe_buffer_pointer() == pointer


def test_replicated_arrays_have_no_device_axis():
    mesh = jax.make_mesh((4,), ("d",))
    x = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    assert describe({"x": x})[0].shape == (8,)
    assert to_host(x).tolist() == list(range(8))


def test_the_table_survives_json():
    state = containers()
    specs = describe(state)
    rows, tree = pack(specs, [to_host(leaf) for leaf in jax.tree.leaves(state)])
    back = unpack_specs({"leaves": rows, "empties": empties_as_json(specs)})
    assert back == specs
    assert back.empties == specs.empties
    assert jax.tree.structure(nest(back, jax.tree.leaves(state), back.empties)) == jax.tree.structure(tree)


def restored_from(state: Any) -> Restored:
    return Restored(4, 0.0, {}, [to_host(leaf) for leaf in jax.tree.leaves(state)], LeafTable(describe(state)))


def test_exactly_the_differing_leaves_are_listed():
    stored = {
        "same": np.ones(2),
        "gone": np.ones(3),
        "shape": np.ones((2, 3)),
        "dtype": np.ones(2, np.float32),
        "key": jax.random.key(0),
        "impl": jax.random.key(0),
        "python": 3,
        "list": [np.ones(1), np.ones(1)],
    }
    live = {
        "same": np.ones(2),
        "new": np.ones(3),
        "shape": np.ones((3, 2)),
        "dtype": np.ones(2, np.float64),
        "key": np.zeros(2, np.uint32),
        "impl": jax.random.key(0, impl="rbg"),
        "python": np.int32(3),
        "list": [np.ones(1)],
    }
    with pytest.raises(StateMismatchError, match="step 4") as caught:
        fit(restored_from(stored), live)
    lines = [line.strip() for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert lines == [
        "dtype: float32[2] in the checkpoint, the state has float64[2]",
        "impl: PRNG key threefry2x32[] in the checkpoint, the state has PRNG key rbg[]",
        "key: PRNG key threefry2x32[] in the checkpoint, the state has uint32[2]",
        "new: missing in the checkpoint, the state has float64[3]",
        "python: Python int in the checkpoint, the state has int32[]",
        "shape: float64[2, 3] in the checkpoint, the state has float64[3, 2]",
        "gone: float64[3] in the checkpoint, the state has no such leaf",
        "list/1: float64[1] in the checkpoint, the state has no such leaf",
    ]


def test_reordered_fields_find_their_values():
    class Swapped(NamedTuple):
        y: Any
        x: Any

    back = fit(restored_from(Point(np.ones(2), np.zeros(2))), Swapped(np.ones(2), np.ones(2)))
    assert back.x.tolist() == [1, 1]
    assert back.y.tolist() == [0, 0]


def test_convert_casts_values_and_nothing_else():
    stored = {"a": np.array([1.5, 2], np.float32), "n": 3, "s": np.array(4, np.int64), "k": jax.random.key(0)}
    live = {"a": jax.ShapeDtypeStruct((2,), jnp.bfloat16), "n": np.float32(0), "s": 0, "k": jax.random.key(0)}
    back = fit(restored_from(stored), live, convert=True)
    assert back["a"].dtype == ml_dtypes.bfloat16
    assert back["a"].astype(float).tolist() == [1.5, 2]
    assert (type(back["n"]), back["n"]) == (np.float32, 3)
    assert (type(back["s"]), back["s"]) == (int, 4)
    for wrong in ({**live, "a": np.ones(3)}, {**live, "k": np.zeros(2, np.uint32)}, {**live, "z": 1}):
        with pytest.raises(StateMismatchError):
            fit(restored_from(stored), wrong, convert=True)
    with pytest.raises(StateMismatchError, match="complex"):
        fit(restored_from({"a": np.ones(1, complex)}), {"a": np.ones(1)}, convert=True)


@pytest.mark.parametrize(
    ("stored", "live", "lost"),
    [
        (np.array([1, 2**40 + 1]), np.zeros(2, np.int32), "1099511627777 does not fit into int32"),
        (np.array([-1]), np.zeros(1, np.uint64), "-1 does not fit into uint64"),
        (np.array([1.5]), np.zeros(1, np.int32), "1.5 does not fit into int32"),
        (np.array([np.nan]), np.zeros(1, np.int32), "nan does not fit into int32"),
        (np.array([2]), np.zeros(1, bool), "2 does not fit into bool"),
        (np.array([1e300]), np.zeros(1, np.float32), "1e+300 does not fit into float32"),
        (np.array([1e6], np.float32), np.zeros(1, ml_dtypes.float8_e4m3fn), "1e+06 does not fit|1000000.0 does not"),
        (np.array(0.5), 0, "0.5 does not fit into a Python int"),
        (float("inf"), 0, "inf does not fit into a Python int"),
        (2, True, "2 does not fit into a Python bool"),
    ],
)
def test_convert_rounds_and_never_loses_a_value(stored, live, lost):
    with pytest.raises(StateMismatchError, match=lost.replace("+", r"\+")) as caught:
        fit(restored_from({"a": stored, "b": np.ones(1)}), {"a": live, "b": np.ones(1, np.float32)}, convert=True)
    assert "  b:" not in str(caught.value)


def test_convert_keeps_what_is_no_number_to_lose():
    stored = {"f": np.array([np.nan, np.inf, -0.0, 1 / 3]), "i": np.array([-128, 127]), "b": np.array([0, 1.0])}
    live = {"f": np.zeros(4, np.float16), "i": np.zeros(2, np.int8), "b": np.zeros(2, bool)}
    back = fit(restored_from(stored), live, convert=True)
    assert_same_bits(back, {name: stored[name].astype(live[name].dtype) for name in live})


def test_a_template_from_eval_shape_fits():
    state = {"w": jnp.ones((2, 3)), "k": jax.random.key(0)}
    back = fit(restored_from(state), jax.eval_shape(lambda: state))
    assert back["w"].tolist() == np.ones((2, 3)).tolist()


@pytest.mark.parametrize("folder", ["run", "run[1]", "a*b", "sp ace#?%20", "ünï"])
def test_plain_orbax_restores_it(tmp_path, folder):
    state = {"params": {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}, "n": None, "scale": 2.5, "count": 3}
    state["opt"] = optax.adam(1e-3).init(state["params"])
    path = tmp_path / folder
    save(str(path), 5, 10, state=state)
    if folder != "run":  # plain Orbax itself cannot read from such a folder
        (tmp_path / "plain").symlink_to(path)
        path = tmp_path / "plain"
    for arguments in (
        {},
        {"args": ocp.args.PyTreeRestore()},
        {"args": ocp.args.StandardRestore()},
        {"args": ocp.args.PyTreeRestore(state)},
        {"args": ocp.args.StandardRestore(state)},
    ):
        with ocp.CheckpointManager(path) as manager:
            assert manager.all_steps() == [5, 10]
            assert manager.latest_step() == 10
            back = manager.restore(10, **arguments)
        assert np.asarray(back["params"]["w"]).tolist() == np.ones((2, 3)).tolist()
        assert (back["scale"], back["count"], back["n"]) == (2.5, 3, None)
        count = back["opt"][0]["count"] if isinstance(back["opt"][0], dict) else back["opt"][0].count
        assert int(count) == 0
