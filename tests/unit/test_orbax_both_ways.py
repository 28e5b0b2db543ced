"""Plain Orbax, in a process without monsess and with its defaults, reads what we wrote, and we read what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import plain_orbax_child
import pytest

import monsess as ms
from monsess.checkpoint import plain_orbax
from monsess.checkpoint.leaves import named_dtype
from monsess.storage import Storage
from monsess.warm_start import warm_started

CHILD = Path(plain_orbax_child.__file__)
#: What `plain_orbax_child.write` makes, each with its newest step where it has steps.
LAYOUTS = {
    "manager": "100",
    "prefix": "step_000100",
    "items": "100",
    "model": "100",
    "standard": "",
    "pytree": "",
    "folders": "",
    "zarr3": "",
    "zarr3-folders": "",
    "v1": "",
    "v1-manager": "100",
}


def child(*arguments: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, str(CHILD), *arguments], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


# ---- plain Orbax reads ours


def ours() -> dict[str, Any]:
    params = {"w": jnp.array([[1.5, -0.0]]), "b": jnp.array([3, -0.0], jnp.bfloat16)}
    return {
        "params": params,
        "opt": optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(params),
        "bits": np.array([0x80000000, 0xFF800001, 1], np.uint32).view(np.float32),
        "small": {"i4": jnp.array([-8, 7], jnp.int4), "f8": jnp.array([0.5, -0.0], jnp.float8_e4m3fn)},
        "complex": jnp.array([complex(-0.0, 1)]),
        "on": jnp.array([True, False]),
        "key": jax.random.key(3),
        "lists": [jnp.ones(2), (jnp.zeros(1), None, {})],
        "only_in_the_table": {"u4": jnp.ones(3, jnp.uint4), "hollow": jnp.zeros((0, 3))},
        "n": 3,
    }


@pytest.fixture(scope="module")
def read_by_orbax(tmp_path_factory):
    """Path, dtype, shape and bytes of every leaf, by the way in which plain Orbax restored it."""
    folder = tmp_path_factory.mktemp("ours")

    @ms.train_step
    def same(state):
        return state, {}

    with ms.MonitoredTrainingSession(
        ours,
        checkpoint_dir=folder / "run",
        save_checkpoint_steps=10,
        checkpoint=ms.CheckpointOptions(check_finite=False),
        hooks=[ms.StopAtStepHook(last_step=20)],
    ) as sess:
        while not sess.should_stop():
            sess.run(same)
    child("read", str(folder / "run"), str(folder / "answer.npz"))
    found: dict[str, dict[str, tuple[str, str, bytes]]] = {way: {} for way in plain_orbax_child.WAYS}
    with np.load(folder / "answer.npz") as answer:
        for about in answer.files:
            way, path, dtype, shape = about.split("|")
            found[way][path] = (dtype, shape, answer[about].tobytes())
    return found


@pytest.mark.parametrize("way", plain_orbax_child.WAYS)
def test_plain_orbax_restores_what_a_session_saved_bit_for_bit(read_by_orbax, way):
    expected = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(ours())[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.startswith("only_in_the_table"):
            continue
        if name == "key":
            leaf = jax.random.key_data(leaf)
        array = np.asarray(jnp.asarray(leaf))
        expected[name] = (array.dtype.name, str(array.shape), array.tobytes())
    assert read_by_orbax[way] == expected


# ---- we read what plain Orbax wrote


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    child("write", str(folder))
    return folder


def at(kind: str, folder: Path) -> str:
    """The checkpoint on the local disk, or a copy in another fsspec filesystem."""
    if kind == "local":
        return str(folder)
    url = f"memory://{uuid.uuid4().hex}"
    memory = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"{url}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return url


def opened(url: str, wanted: Any) -> Any:
    storage = Storage(url)
    found = plain_orbax.look_for(storage)
    assert found is not None
    assert not found.is_ours
    assert found.folder is not None
    return plain_orbax.opened(storage, found.folder, wanted)


def expected_leaves(step: int) -> dict[tuple[str, ...], np.ndarray[Any, Any]]:
    expected = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(plain_orbax_child.arrays(step))[0]:
        expected[tuple(str(getattr(key, "key", getattr(key, "idx", None))) for key in path)] = leaf
    return {
        **expected,
        ("rate",): np.array(0.25),
        ("epoch",): np.array(step),
        ("on",): np.array(True),
        ("opt", "0", "count"): np.array(0, np.int32),
        ("opt", "0", "mu", "w"): np.zeros(3, np.float32),
        ("keys",): np.asarray(jax.random.key_data(jax.random.split(jax.random.key(step, impl="rbg"), 2))),
    }


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_bit_for_bit(written, layout, kind):
    expected = expected_leaves(100)
    absent = [("nothing",), ("hollow",), ("params",), ("params", "dense"), ("name",), ("notes",), ()]
    url = at(kind, written / layout)
    steps = [url] if not LAYOUTS[layout] else [url, f"{url}/{LAYOUTS[layout]}"]
    for place in steps:
        with opened(place, [*expected, *absent]) as leaves:
            assert set(leaves.specs) == set(expected)
            values = dict(zip(expected, leaves.read(list(expected)), strict=True))
            for keys, array in expected.items():
                spec, value = leaves.specs[keys], values[keys]
                assert (spec.kind, spec.key_impl) == (("key", "rbg") if keys == ("keys",) else ("array", None))
                assert (value.dtype, value.shape) == (named_dtype(spec.dtype), spec.shape), keys
                assert (value.dtype, value.shape) == (array.dtype, array.shape), keys
                assert value.tobytes() == array.tobytes(), keys


def live() -> dict[str, Any]:
    return {
        "params": {
            "dense": {"w": jnp.zeros((2, 3)), "b": jnp.zeros(4)},
            "layers": (jnp.zeros(2, jnp.bfloat16), jnp.zeros(1, jnp.float16)),
            "wide": jnp.zeros((8, 4), jnp.int32),
            "a.b": jnp.zeros(2, bool),
        },
        "opt": optax.adam(1e-3).init({"w": jnp.ones(3)}),
        "keys": jax.random.split(jax.random.key(0, impl="rbg"), 2),
        "rate": 0.0,
        "epoch": 0,
        "head": jnp.full(7, 5.0),
    }


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize("layout", ["manager", "items", "folders", "v1"])
def test_a_session_starts_from_it(written, layout, kind):
    scaffold = ms.Scaffold(
        live,
        warm_start_from=at(kind, written / layout),
        warm_start_paths=["params/*", "opt/*", "keys", "rate", "epoch"],
    )
    with ms.MonitoredTrainingSession(scaffold=scaffold) as sess:
        state = sess.state
        arrays = expected_leaves(100)
        assert np.asarray(state["params"]["dense"]["b"]).tobytes() == arrays["params", "dense", "b"].tobytes()
        assert np.asarray(state["params"]["layers"][0]).tobytes() == arrays["params", "layers", "0"].tobytes()
        assert np.asarray(state["params"]["wide"]).tolist() == arrays["params", "wide"].tolist()
        assert jax.random.key_data(state["keys"]).tolist() == arrays["keys",].tolist()
        assert (float(state["rate"]), int(state["epoch"])) == (0.25, 100)
        assert np.asarray(state["head"]).tolist() == [5.0] * 7
        assert sess.global_step == 0
        assert sess.restored_from is None


def test_one_item_of_several_can_be_named(written):
    place = written / "items" / "100" / "params"
    warm = warm_started({"wide": jnp.zeros((8, 4), jnp.int32)}, scaffold(place, "*"), ms.CheckpointOptions())
    assert np.asarray(warm["wide"]).tolist() == np.arange(32).reshape(8, 4).tolist()


def scaffold(url: Any, *patterns: str) -> ms.Scaffold:
    return ms.Scaffold(warm_start_from=url, warm_start_paths=patterns).finalize()


def test_the_error_lists_exactly_what_differs(written):
    state = {
        "params": {"dense": {"w": jnp.zeros((2, 4)), "b": jnp.zeros(4, jnp.bfloat16), "c": jnp.zeros(1)}},
        "count": jnp.zeros((), jnp.int32),
        "keys": jax.random.key(0),
        "nothing": jnp.zeros(1),
    }
    with pytest.raises(ms.StateMismatchError) as caught:
        warm_started(state, scaffold(written / "manager", "*"), ms.CheckpointOptions())
    assert str(caught.value).split(": ", 1)[1].split(". Leave")[0].split("; ") == [
        "keys is PRNG key threefry2x32[], stored PRNG key rbg[2]",
        "nothing is not stored there",
        "params/dense/b is bfloat16[4], stored float32[4]",
        "params/dense/c is not stored there",
        "params/dense/w is float32[2, 4], stored float32[2, 3]",
    ]


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_the_newest_finished_step_is_taken(written, tmp_path, kind, caplog):
    copy = tmp_path / "manager"
    subprocess.run(["cp", "-r", str(written / "manager"), str(copy)], check=True)
    (copy / "100" / "commit_success.txt").unlink()
    metadata = copy / "100" / "_CHECKPOINT_METADATA"
    content = json.loads(metadata.read_text())
    url = at(kind, copy)
    state = {"epoch": 0}
    assert warm_started(state, scaffold(url, "epoch"), ms.CheckpointOptions()) == {"epoch": 100}  # it has its time
    metadata.write_text(json.dumps({**content, "commit_timestamp_nsecs": None}))
    (copy / "200.orbax-checkpoint-tmp").mkdir()
    url = at(kind, copy)
    assert warm_started(state, scaffold(url, "epoch"), ms.CheckpointOptions()) == {"epoch": 10}
    assert "Orbax did not finish them: 100" in caplog.text
    with pytest.raises(ms.StateMismatchError, match="Not a finished checkpoint"):
        warm_started(state, scaffold(f"{url}/100", "epoch"), ms.CheckpointOptions())
    for step in ("9", "10"):
        (copy / step / "commit_success.txt").unlink()
        (copy / step / "_CHECKPOINT_METADATA").write_text("half a file")
    with pytest.raises(ms.StateMismatchError, match=r"Not a finished checkpoint.*: 100, 10, 9 in "):
        warm_started(state, scaffold(at(kind, copy), "epoch"), ms.CheckpointOptions())


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize(
    ("layout", "file"),
    [
        ("folders", "params.wide/2.0"),
        ("zarr3-folders", "params.wide/c/2/0"),
        ("folders", "params.wide/.zarray"),
        ("standard", "manifest.ocdbt"),
    ],
)
def test_what_is_missing_is_an_error_and_never_zeros(written, tmp_path, layout, file, kind):
    copy = tmp_path / layout
    subprocess.run(["cp", "-r", str(written / layout), str(copy)], check=True)
    (copy / file).unlink()
    with pytest.raises(ms.StorageError, match="could not be read"):
        warm_started({"params": live()["params"]}, scaffold(at(kind, copy), "params/wide"), ms.CheckpointOptions())


def test_items_of_another_kind_and_steps_of_two_names_are_refused(written, tmp_path):
    (tmp_path / "notes").symlink_to(written / "items" / "100" / "notes")
    (tmp_path / "_CHECKPOINT_METADATA").write_bytes((written / "items/100/_CHECKPOINT_METADATA").read_bytes())
    with pytest.raises(ms.StateMismatchError, match="holds no item that"):
        warm_started({"a": 0}, scaffold(tmp_path, "a"), ms.CheckpointOptions())
    (tmp_path / "two").mkdir()
    for name in ("step_000100", "100"):
        (tmp_path / "two" / name).symlink_to(written / "manager" / "100")
    with pytest.raises(ms.StateMismatchError, match="two folders of step 100"):
        warm_started({"a": 0}, scaffold(tmp_path / "two", "a"), ms.CheckpointOptions())


def test_reading_starts_no_device(written):
    code = (
        "import sys, jax\n"
        "from monsess.checkpoint import plain_orbax\n"
        "from monsess.storage import Storage\n"
        "with plain_orbax.opened(Storage(sys.argv[1]), '100', [('params', 'wide'), ('keys',)]) as leaves:\n"
        "    assert [value.shape for value in leaves.read(list(leaves.specs))] == [(8, 4), (2, 4)]\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "assert 'orbax' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(written / "manager")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_float8_that_plain_orbax_wrote_keeps_every_bit_pattern(written):
    with opened(str(written / "manager"), [("small", "f8")]) as leaves:
        (values,) = leaves.read([("small", "f8")])
    assert values.dtype == ml_dtypes.float8_e4m3fn
    assert values.tobytes() == bytes(range(256))
