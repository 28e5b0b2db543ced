"""Bad states, stores, checkpoints and options: refused when the session is made, and never read as a fresh start."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusing
from bad_input import ONES, count, init_fn, refused, run, train
from names import shown

import monsess as ms


class Opaque:
    pass


@ms.train_step
def still(state):
    return state, {}


def session(directory, initial=init_fn, **more):
    return ms.MonitoredTrainingSession(initial, checkpoint_dir=directory, **more)


def contents(directory):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


# ---- states


@pytest.mark.parametrize("with_directory", [True, False])
@pytest.mark.parametrize(
    ("state", "parts"),
    [
        ({"params": {"w": 0.0, "name": "resnet"}}, ["params/name: a str"]),
        ({"a": {"b": Opaque()}}, ["a/b: a ", "Opaque"]),
        ({"rng": np.random.default_rng(0)}, ["rng: a numpy.random", "Generator"]),
        ({"f": len}, ["f: a builtin_function_or_method"]),
        ({"opt": [0.0, {1, 2}]}, ["opt/1: a set"]),
        ({"t": np.array(["a"])}, ["t: an array of dtype <U1"]),
        ({"t": np.array([None, 1], object)}, ["t: an array of dtype object"]),
        ({"a": "x", "b": {"c": b"y"}}, ["a: a str", "b/c: a bytes"]),
        ({"n": {"big": 2**70}}, ["n/big"]),
        ({"n": {"big": np.int64(2**40)}}, ["'n/big'", "int32 cannot hold", "jax_enable_x64"]),
    ],
    ids=["str", "object", "rng", "function", "set", "text", "objects", "two", "huge int", "int64"],
)
def test_a_state_that_cannot_be_stored_is_refused_with_its_path_at_construction(tmp_path, state, parts, with_directory):
    error = refused(
        ms.UnstorableLeafError, *parts, call=lambda: session(tmp_path if with_directory else None, lambda: state)
    )
    assert "params/w" not in str(error)
    assert ms.CheckpointStore(tmp_path).steps() == []


def test_what_a_state_may_hold_is_said():
    refused(
        ms.UnstorableLeafError,
        "A state may hold jax and numpy arrays of numbers, typed PRNG keys, Python",
        "Keep anything else outside the state",
        call=lambda: session(None, lambda: {"name": "x"}),
    )


@pytest.mark.parametrize("bad", [3, {"n": 0.0}, "init"])
def test_an_init_fn_that_is_no_function(bad):
    refused(TypeError, "init_fn must be callable", f"found {bad!r}", call=lambda: session(None, bad))


def test_an_init_fn_with_arguments():
    refused(TypeError, "'a'", "init_fn", call=lambda: session(None, lambda a: a))


# ---- a restored tree that differs


def stored():
    return {
        "shape": jnp.zeros((2, 3)),
        "dtype": jnp.zeros(3),
        "deep": {"int": jnp.zeros((), jnp.int32), "same": jnp.ones(2)},
        "key": jax.random.key(0),
        "impl": jax.random.key(0, impl="rbg"),
        "dropped": 1.0,
    }


def live():
    return {
        "shape": jnp.zeros((2, 4)),
        "dtype": jnp.zeros(3, jnp.bfloat16),
        "deep": {"int": jnp.zeros(()), "same": jnp.ones(2)},
        "key": jax.random.PRNGKey(0),
        "impl": jax.random.key(0),
        "added": jnp.ones(5),
    }


def test_a_restored_tree_that_differs_lists_exactly_what_differs(tmp_path):
    run(still, initial=stored, checkpoint_dir=tmp_path)
    before = contents(tmp_path)
    error = refused(
        ms.StateMismatchError,
        "checkpoint of step 1",
        "Restore with the code that saved it, or start in another directory",
        "convert=True",
        call=lambda: session(tmp_path, live),
    )
    lines = [line.strip() for line in str(error).splitlines() if line.startswith("  ")]
    assert sorted(lines) == [
        "added: missing in the checkpoint, the state has float32[5]",
        "deep/int: int32[] in the checkpoint, the state has float32[]",
        "dropped: float32[] in the checkpoint, the state has no such leaf",
        "dtype: float32[3] in the checkpoint, the state has bfloat16[3]",
        "impl: PRNG key rbg[] in the checkpoint, the state has PRNG key threefry2x32[]",
        "key: PRNG key threefry2x32[] in the checkpoint, the state has uint32[2]",
        "shape: float32[2, 3] in the checkpoint, the state has float32[2, 4]",
    ]
    assert contents(tmp_path) == before
    with session(tmp_path, stored) as sess:
        assert sess.restored_from == 1


def test_a_warm_start_that_does_not_fit_or_finds_nothing(tmp_path):
    run(still, initial=lambda: {"a": jnp.zeros((2, 3))}, checkpoint_dir=tmp_path)

    def warm(state, *patterns):
        scaffold = ms.Scaffold(lambda: state, warm_start_from=str(tmp_path), warm_start_paths=patterns)
        return ms.MonitoredTrainingSession(scaffold=scaffold)

    refused(
        ms.StateMismatchError, "a is float32[9]", "stored float32[2, 3]", call=lambda: warm({"a": jnp.zeros(9)}, "a")
    )
    refused(ms.StateMismatchError, "zzz*", call=lambda: warm({"a": jnp.zeros((2, 3))}, "zzz*"))


# ---- stores


@pytest.fixture
def full():
    """A URL that holds a committed step 1."""
    url = f"refusing://{time.monotonic_ns()}"
    run(count, checkpoint_dir=url)
    return url


@pytest.fixture
def empty():
    return f"refusing://{time.monotonic_ns()}"


@pytest.mark.parametrize("where", ["empty", "full"])
@pytest.mark.parametrize(
    ("operation", "text"), [("write", "Could not write"), ("read", "Could not read"), ("list", "Could not list")]
)
def test_a_store_that_refuses_is_an_error_at_construction_and_no_fresh_start(where, operation, text, request):
    url = request.getfixturevalue(where)
    made, endings = [], []

    def initial():
        made.append(1)
        return {"n": jnp.zeros(())}

    class Hook(ms.SessionRunHook):
        def end(self, session):
            endings.append("end")

        def on_error(self, session, error):
            endings.append(type(error))

    with refusing.refusing(refusing.refuse(operation)) as filesystem:
        refused(
            ms.StorageError,
            text,
            url,
            "PermissionError: 403 no",
            "credentials in storage_options",
            call=lambda: session(url, initial, hooks=[Hook()]),
        )
        written = [path for what, path in filesystem.log if what == "write"]
    assert endings == [ms.StorageError]
    if where == "full":
        assert made == [] or operation == "write"  # what could not be looked at is not "nothing there"
    if operation != "write":
        assert [path for path in written if not path.endswith("/owner.json")] == []
    assert not [path for path in filesystem.store if path.endswith("/owner.json")]  # nor is the directory kept
    with session(url) as sess:
        assert sess.restored_from == (1 if where == "full" else None)


@pytest.mark.parametrize("error", [TimeoutError("no answer"), ConnectionError("reset"), OSError(5, "I/O error")])
def test_a_listing_that_fails_in_any_way_is_no_empty_listing(full, error, monkeypatch):
    monkeypatch.setattr("monsess.storage.time.sleep", lambda seconds: None)  # it is tried again with pauses
    with refusing.refusing(refusing.refuse("list", error=lambda: error)):
        refused(ms.StorageError, "Could not list", full, type(error).__name__, call=lambda: session(full))


def test_a_store_may_refuse_to_delete_and_training_goes_on(empty, caplog):
    with refusing.refusing(refusing.refuse("delete")):
        with session(empty, save_checkpoint_steps=1, keep=ms.KeepLast(1)) as sess:
            for _ in range(3):
                sess.run(count)
    assert 3 in ms.CheckpointStore(empty).steps()
    assert "403 no" in caplog.text


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("nosuch://bucket/run", ["Could not list nosuch://bucket/run", "Protocol not known", "package"]),
        ("nosuch://user:secret@bucket/run", ["nosuch://***@bucket/run"]),
    ],
)
def test_a_protocol_that_nobody_serves(url, parts):
    error = refused(ms.StorageError, *parts, call=lambda: session(url))
    assert "secret" not in str(error)


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    refused(ms.StorageError, str(tmp_path / "file"), "NotADirectoryError", call=lambda: session(tmp_path / "file"))
    refused(ms.StorageError, "NotADirectoryError", call=lambda: session(tmp_path / "file" / "below"))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_step_to_restore_that_is_not_there(tmp_path):
    run(count, checkpoint_dir=tmp_path)
    options = ms.CheckpointOptions(restore_step=77)
    refused(
        ms.StorageError,
        "Step 77 is not a committed checkpoint",
        "committed steps: 1",
        call=lambda: session(tmp_path, checkpoint=options),
    )


# ---- an input that is not the one of the checkpoint


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda data: data[::-1], ["Batch 1", "changed its order or its data", "fixed order"]),
        (lambda data: data[:1], ["ended after 1 batches", "written after 2", "monsess.repeat"]),
        (lambda data: [np.concatenate([x, x]) for x in data], ["Batch 1", "is not the one that was trained on"]),
    ],
    ids=["order", "shorter", "batch size"],
)
def test_an_input_that_changed_between_two_lives(tmp_path, change, parts):
    data = [np.full(8, float(i), np.float32) for i in range(4)]
    with session(tmp_path, data=data) as sess:
        sess.run(train)
        sess.run(train)
    refused(ms.InputPositionError, *parts, call=lambda: session(tmp_path, data=change(data)))


# ---- options of the session


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    [
        ({"keep": 5}, TypeError, ["keep must be a retention such as monsess.KeepLast(5)", "found 5"]),
        ({"keep": ms.KeepLast}, TypeError, ["keep must be a retention", "found <class"]),
        ({"recovery": 3}, TypeError, ["recovery must be monsess.Recovery(...)", "found 3"]),
        ({"checkpoint": {}}, TypeError, ["checkpoint must be monsess.CheckpointOptions(...)", "found {}"]),
        ({"storage_options": "key=secret"}, TypeError, ["storage_options must be a dict", "str"]),
        ({"checkpoint_dir": 5}, TypeError, ["checkpoint_dir must be a URL or a path", "found 5"]),
        ({"checkpoint_dir": ""}, ValueError, ["found ''"]),
        ({"checkpoint_dir": None, "storage_options": {"a": 1}}, ValueError, ["without a checkpoint_dir"]),
        ({"scaffold": 3, "init_fn": None}, TypeError, ["scaffold must be a Scaffold", "found 3"]),
        ({"scaffold": ms.Scaffold(init_fn)}, ValueError, ["init_fn or scaffold, not both"]),
        ({"remainder": "cut"}, ValueError, ['"error", "drop" or "pad"', "found 'cut'"]),
        ({"on_preemption": "die"}, ValueError, ['"exit" or "return"', "found 'die'"]),
        ({"master": "grpc://a:1"}, ValueError, ["master='grpc://a:1'", "leave it out"]),
        ({"is_chief": False}, ms.ClusterError, ["is_chief=False", "Leave it out"]),
        ({"summary_dir": ""}, ValueError, ["must be a path or a URL", "found ''"]),
    ],
    ids=shown,
)
def test_impossible_options_of_the_session(tmp_path, arguments, error, parts):
    arguments = {"init_fn": init_fn, "checkpoint_dir": tmp_path / "run", **arguments}
    raised = refused(error, *parts, call=lambda: ms.MonitoredTrainingSession(**arguments))
    assert "secret" not in str(raised)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"snapshot": "disk"}, ["snapshot must be 'device' or 'host'", "found 'disk'"]),
        ({"newer": "overwrite"}, ["newer must be 'refuse' or 'aside'", "found 'overwrite'"]),
        ({"check_finite": "yes"}, ["check_finite must be True, False or a callable", "found 'yes'"]),
    ],
    ids=shown,
)
def test_impossible_checkpoint_options(arguments, parts):
    refused(ValueError, *parts, call=lambda: ms.CheckpointOptions(**arguments))


def test_a_resumed_run_without_its_input_is_warned_about(tmp_path, caplog):
    with session(tmp_path, data=[ONES] * 4) as sess:
        sess.run(train)
    with session(tmp_path) as sess:
        sess.run(train, ONES)
    assert "input" in " ".join(r.getMessage() for r in caplog.records if r.levelname == "WARNING")
