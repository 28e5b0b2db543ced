"""A batch lies on the devices as it should, and is the session's own from then on."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from monsess.errors import BatchError
from monsess.layout import Layout, NothingLeftError

N = 4


@pytest.fixture
def layout() -> Layout:
    return Layout(jax.local_devices()[:N])


def rows_of_each_device(x: jax.Array) -> list[list[float]]:
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start)
    assert [shard.device for shard in shards] == jax.local_devices()[:N]
    return [np.asarray(shard.data)[0].tolist() for shard in shards]


def test_rows_go_to_the_devices_in_order(layout):
    placed, mask, per_device = layout.lay_out({"x": np.arange(8), "y": np.zeros((8, 3), np.float32)})
    assert (mask, per_device, layout.device_count) == (None, 2, N)
    assert rows_of_each_device(placed["x"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert placed["y"].shape == (N, 2, 3)
    assert placed["x"].sharding.is_equivalent_to(NamedSharding(layout.mesh, PartitionSpec("data")), 2)


def test_axis_name_names_the_mesh_axis():
    assert Layout(jax.local_devices()[:2], "batch").mesh.axis_names == ("batch",)


@pytest.mark.parametrize(
    ("given", "placed"),
    [
        (np.int64, np.int32),
        (np.float64, np.float32),
        (np.uint64, np.uint32),
        (np.bool_, np.bool_),
        (np.float16, np.float16),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
        (np.dtype(">f4"), np.float32),
    ],
)
def test_dtypes(layout, given, placed):
    out, _, _ = layout.lay_out(np.ones((N, 2), given))
    assert out.dtype == placed
    assert np.asarray(out, np.float32).tolist() == [[[1, 1]]] * N


def aligned(rows: int) -> np.ndarray:
    """Ones ``[rows, 16]`` that begin at a multiple of 64 bytes: memory that JAX shares on the CPU."""
    memory = np.ones(rows * 16 + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    return memory[start : start + rows * 16].reshape(rows, 16)


@pytest.mark.parametrize("rows", [N, 64, 4096])
def test_a_refilled_buffer_does_not_reach_the_batch(layout, rows):
    buffer = aligned(rows)
    shared = jax.device_put(buffer.reshape(N, -1, 16), layout.sharding)
    placed, _, _ = layout.lay_out({"x": buffer, "y": buffer.T.copy().T})
    buffer[:] = 2
    assert float(placed["x"].min()) == float(placed["x"].max()) == 1
    assert float(shared.max()) == 2, "the test proves nothing: this memory was not shared"


@pytest.mark.parametrize("remainder", ["error", "drop", "pad"])
def test_unplaced_host_leaves_are_private_copies_of_the_same_shape(layout, remainder):
    buffer = aligned(8)
    out, _, per_device = layout.lay_out({"x": buffer, "y": jnp.arange(8)}, place=False, remainder=remainder)
    assert type(out["x"]) is np.ndarray
    assert out["x"].shape == (N, per_device, 16)
    assert out["y"].sharding.is_equivalent_to(layout.sharding, 2)
    buffer[:] = 2
    assert out["x"].max() == 1


def test_a_refilled_buffer_behind_a_jax_array_does_not_reach_the_batch(layout):
    buffer = aligned(1 << 20)
    placed, _, _ = layout.lay_out(jax.device_put(buffer))
    buffer[::-1] = 2
    assert float(placed.max()) == 1


def test_the_callers_device_array_may_be_deleted(layout):
    for x in (jnp.arange(8.0), jax.device_put(np.arange(8.0), layout.sharding)):
        placed, _, _ = layout.lay_out(x)
        x.delete()
        assert np.asarray(placed).ravel().tolist() == list(range(8))


def shardings() -> dict[str, object]:
    devices = jax.local_devices()[:N]
    everywhere = Mesh(np.array(devices), ("data",))
    return {
        "one": devices[0],
        "last": devices[-1],
        "replicated": NamedSharding(everywhere, PartitionSpec()),
        "rows": NamedSharding(everywhere, PartitionSpec("data")),
        "columns": NamedSharding(everywhere, PartitionSpec(None, "data")),
        "two devices": NamedSharding(Mesh(np.array(devices[:2]), ("a",)), PartitionSpec("a")),
        "backwards": NamedSharding(Mesh(np.array(devices[::-1]), ("data",)), PartitionSpec("data")),
    }


@pytest.mark.parametrize("where", ["one", "last", "replicated", "rows", "columns", "two devices", "backwards"])
def test_device_resident_leaves_wherever_they_lie(layout, where):
    sharding = shardings()[where]
    values = np.arange(32.0).reshape(8, 4)
    x = jax.device_put(values, sharding)
    keys = jax.random.split(jax.random.key(0), 8 * 4).reshape(8, 4)
    with jax.transfer_guard("disallow"):
        placed, _, _ = layout.lay_out({"x": x, "k": jax.device_put(keys, sharding)})
    assert rows_of_each_device(placed["x"]) == values.reshape(N, 2, 4).tolist()
    assert placed["k"].shape == (N, 2, 4)
    assert jnp.array_equal(jax.random.key_data(placed["k"]).reshape(8, 4, 2), jax.random.key_data(keys))
    assert placed["k"].dtype == keys.dtype


@pytest.mark.parametrize("where", ["one", "replicated", "rows", "two devices"])
def test_device_resident_remainders(where):
    three = Layout(jax.local_devices()[:3])
    x = jax.device_put(np.arange(8), {**shardings()}[where])
    with jax.transfer_guard("disallow"):
        padded, mask, _ = three.lay_out(x, remainder="pad")
        dropped, none, _ = three.lay_out(x, remainder="drop")
    assert np.asarray(padded).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 7]]
    assert np.asarray(mask).tolist() == [[True] * 3, [True] * 3, [True, True, False]]
    assert np.asarray(dropped).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert none is None


def test_pad_repeats_the_last_row_and_masks_it(layout):
    placed, mask, per_device = layout.lay_out({"x": np.arange(10).reshape(5, 2)}, remainder="pad")
    assert per_device == 2
    assert rows_of_each_device(placed["x"]) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [8, 9]], [[8, 9], [8, 9]]]
    assert np.asarray(mask).tolist() == [[True, True], [True, True], [True, False], [False, False]]
    assert mask.dtype == bool
    assert mask.sharding.is_equivalent_to(placed["x"].sharding, 2)


def test_pad_gives_a_mask_for_full_batches_too(layout):
    _, mask, _ = layout.lay_out(np.zeros(8), remainder="pad")
    assert np.asarray(mask).tolist() == [[True, True]] * N


def test_drop_leaves_out_the_last_rows(layout):
    placed, mask, per_device = layout.lay_out(np.arange(11), remainder="drop")
    assert (np.asarray(placed).tolist(), mask, per_device) == ([[0, 1], [2, 3], [4, 5], [6, 7]], None, 2)


def test_drop_with_fewer_rows_than_devices_is_an_error(layout):
    with pytest.raises(NothingLeftError, match=r"\[3, 2\].*4 local devices"):
        layout.lay_out(np.zeros((3, 2)), remainder="drop")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"a": {"x": np.zeros((6, 2))}},
            r"Leaf 'a/x' of the batch has the shape \[6, 2\].* 6 is not divisible by the 4 local",
        ),
        (np.zeros((3, 2)), r"The batch has the shape \[3, 2\].*Make it 4 rows, or pass remainder='drop'"),
        ({"x": np.zeros((8, 2)), "y": [np.zeros(4)]}, r"'x' .* \[8, 2\]\. Leaf 'y/0' of the batch has \[4\]"),
        ({"x": 3.0}, r"'x' .* no leading axis.*4 local devices.*float64"),
        ({"x": np.array(["a"] * N)}, r"'x' .* dtype <U1"),
        ({"x": np.zeros(N, [("a", "f4")])}, r"'x' .* dtype"),
        ({"x": np.zeros(N, "M8[s]")}, r"'x' .* dtype datetime64"),
        ({"x": np.zeros((0, 2))}, r"'x' .* \[0, 2\]: it holds no rows"),
        ({}, r"holds no arrays, found \{\}"),
        (None, "holds no arrays"),
    ],
)
def test_messages_name_leaf_shape_and_devices(layout, batch, message):
    with pytest.raises(BatchError, match=message):
        layout.lay_out(batch)


def test_what_a_message_calls_the_batch(layout):
    with pytest.raises(BatchError, match="Leaf '0' of the argument 'extra'"):
        layout.lay_out([np.zeros(5)], what="the argument 'extra'")


def test_unreadable_leaves_name_their_path(layout):
    class Odd:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("no numbers here")

    with pytest.raises(BatchError, match=r"Leaf 'x' .* Odd .*no numbers here") as caught:
        layout.lay_out({"x": Odd()})
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_unknown_remainder_is_refused(layout):
    with pytest.raises(ValueError, match="'skip'"):
        layout.lay_out(np.zeros(4), remainder="skip")


def test_no_devices_are_refused():
    with pytest.raises(ValueError, match="at least one device"):
        Layout([])


def test_scalars_lie_on_every_device(layout):
    assert np.asarray(layout.scalar(2.5)).tolist() == [2.5] * N
    assert layout.scalar(np.int64(3)).dtype == np.int32
    key = jax.random.key(3)
    on_device = jnp.float32(1.5)
    with jax.transfer_guard("disallow"):
        keys, ones = layout.scalar(key), layout.scalar(on_device)
    assert keys.shape == (N,)
    assert keys.dtype == key.dtype
    assert np.asarray(ones).tolist() == [1.5] * N
    assert keys.sharding.is_equivalent_to(layout.sharding, 1)
    with pytest.raises(BatchError, match=r"\[2\]"):
        layout.scalar(np.zeros(2))


def test_a_placed_batch_feeds_pmap_without_being_moved(layout):
    placed, _, _ = layout.lay_out(np.arange(8, dtype=np.float32))
    step = jax.pmap(lambda x: jax.lax.psum(x.sum(), "data"), "data", devices=jax.local_devices()[:N])
    with jax.transfer_guard("disallow"):
        out = step(placed)
    assert np.asarray(out).tolist() == [28.0] * N


def test_the_whole_tree_costs_one_transfer_call(layout, monkeypatch):
    calls = []
    real = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *args: calls.append(args) or real(*args))
    layout.lay_out({"x": np.zeros((8, 2)), "y": np.zeros(8), "z": [np.zeros(8)]}, remainder="pad")
    assert len(calls) == 1


def test_laying_out_costs_little_beyond_the_transfer(layout):
    batch = {"x": np.zeros((64, 8, 8, 1), np.float32), "y": np.zeros(64, np.int32)}
    bare = [batch["x"].reshape(N, 16, 8, 8, 1), batch["y"].reshape(N, 16)]

    def best(call, rounds=200):
        taken = []
        for _ in range(rounds):
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
        return sorted(taken)[rounds // 10]

    cost = best(lambda: layout.lay_out(batch)) - best(lambda: jax.device_put(bare, layout.sharding))
    assert cost < 200e-6, f"{cost * 1e6:.0f} µs"  # about 20 µs on an idle machine
