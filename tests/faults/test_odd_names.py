"""Names of directories that patterns, URLs or shells would make something else of: each is taken literally everywhere.

A run is saved, listed, restored and pruned under each of them. Beside it lie directories that a pattern of that name
would match, or that it would become if somebody decoded or encoded it; of those not a byte may change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import fsspec
import pytest
import servers
import ticks
from attempts import Run
from checkpoints import assert_same_bits, toy
from leftovers import beside_bookkeeping

import monsess as ms
from monsess.checkpoint.restore import find_restorable
from monsess.checkpoint.table import nest
from monsess.commands import main

#: Whether all names are used on all stores, and whole sessions run under them where that is quick; otherwise only what
#: such a session does with the store.
DEEP = int(os.environ.get("MONSESS_RANDOM_KILLS") or 4) >= 12
#: A name, and what it must not be taken for.
NAMES: dict[str, tuple[str, ...]] = {
    "run[1]": ("run1", "run"),
    "a*b": ("ab", "a1b", "a"),
    "lr=1e-3?": ("lr=1e-3", "lr=1e-3x"),
    "x{y}": ("xy", "x"),
    "a b": ("a%20b", "a+b"),
    "a%20b": ("a b", "a%2520b"),
    "run#1": ("run",),
    "häß-日本-\N{SNOWMAN}": ("h\u0308", "ha"),
    ".hidden": ("hidden",),
    "~": ("tilde",),
    "[!a]**100%": ("b", "[!a]100%25", "bcd100%"),
    "a&b=c;d,e'f\"g$HOME!h`i": ("a", "a&b=c"),
    "v1..2@b:c": ("b:c", "v1"),
    "back\\slash": ("back/slash", "backslash"),
}
#: Unless `DEEP`, only those on stores that are slow, or much like another one.
FEW = ("lr=1e-3?", "a%20b", "[!a]**100%")
FULL = ("file", "faulty")
#: How slashes may be written, and the name that is meant.
SLASHES = {"trailing/": "trailing", "trailing///": "trailing", "deep/er/": "deep/er", "doub//led": "doub/led"}
DECOY = b"not yours"


class Store(NamedTuple):
    """Where directories lie.

    Args:
        base: URL or path of the one that they lie in.
        options: Storage options.
        objects: All objects below ``base`` by their real names, by other means than monsess's own.
        put: Writes an object there, likewise.
    """

    base: str
    options: dict[str, Any]
    objects: Callable[[], dict[str, bytes]]
    put: Callable[[str, bytes], None]


def in_folder(base: str, options: dict[str, Any], folder: Any) -> Store:
    """A store whose content lies in a local folder under the same names."""

    def objects() -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def put(name: str, data: bytes) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return Store(base, options, objects, put)


def faulty(tmp_path: Any, **faults: Any) -> Store:
    options = {"root": str(tmp_path), "faults": {"rename": False, **faults}}
    return in_folder("faulty://names", options, tmp_path / "names")


STORES: dict[str, Callable[[Any], Store]] = {
    "path": lambda tmp_path: in_folder(str(tmp_path), {}, tmp_path),
    "file": lambda tmp_path: in_folder(f"file://{tmp_path}", {}, tmp_path),
    "faulty": lambda tmp_path: faulty(tmp_path, directories=False),
    "faulty-folders": lambda tmp_path: faulty(tmp_path, directories=True),
}


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with servers.s3_server(tmp_path_factory.mktemp("s3")) as options:
        yield options


@pytest.fixture
def store(request, tmp_path):
    if request.param != "s3":
        return STORES[request.param](tmp_path)
    options = request.getfixturevalue("s3")
    filesystem = fsspec.filesystem("s3", **options, skip_instance_cache=True)
    base = f"names/{tmp_path.name}/"

    def objects() -> dict[str, bytes]:
        found = filesystem.call_s3("list_objects_v2", Bucket="smoke", Prefix=base, MaxKeys=1000)
        assert not found["IsTruncated"]
        keys = [entry["Key"] for entry in found.get("Contents", ()) if not entry["Key"].endswith("/")]
        bodies = {key: filesystem.call_s3("get_object", Bucket="smoke", Key=key)["Body"] for key in keys}
        return {key.removeprefix(base): fsspec.asyn.sync(filesystem.loop, body.read) for key, body in bodies.items()}

    def put(name: str, data: bytes) -> None:
        filesystem.call_s3("put_object", Bucket="smoke", Key=base + name, Body=data)

    return Store(f"s3://smoke/{base[:-1]}", options, objects, put)


def attempt(url: str, options: dict[str, Any], last_step: int) -> ms.MonitoredSession:
    with ms.MonitoredTrainingSession(
        ticks.init_fn,
        checkpoint_dir=url,
        storage_options=options or None,
        save_checkpoint_steps=2,
        keep=ms.KeepLast(1),
        hooks=[ms.StopAtStepHook(last_step=last_step)],
    ) as session:
        while not session.should_stop():
            session.run(ticks.one)
        assert session.state_copy()["count"] == last_step
    return session


def use(url: str, options: dict[str, Any], monkeypatch: Any, capsys: Any) -> None:
    """Save, list, restore, verify, pin and prune, by program and by command; ends with steps 6 and 8."""
    monkeypatch.setenv("MONSESS_STORAGE_OPTIONS", json.dumps(options))
    whole_sessions = DEEP and not url.startswith("s3://")
    if whole_sessions:
        assert attempt(url, options, 4).restored_from is None
        assert attempt(url, options, 6).restored_from == 4
    else:
        run = Run(url, ms.KeepLast(1), storage_options=options)
        for step in (4, 6):
            run.protect.add(4)
            run.save(step)
    checkpoints = ms.CheckpointStore(url, options)
    assert checkpoints.steps() == [4, 6]
    checkpoints.pin(4)
    with pytest.raises(ms.MonsessError, match="pinned"):
        checkpoints.delete(4)
    checkpoints.unpin(4)
    assert main(["prune", url, "--keep-last", "1", "--yes"]) == 0
    capsys.readouterr()
    assert main(["ls", url, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["steps"]
    assert [row["step"] for row in rows if row["state"] == "committed"] == [6]
    if whole_sessions:
        assert checkpoints.verify(6) == []
        assert ms.latest_checkpoint(url, storage_options=options) == 6
        assert ms.load_checkpoint(url, storage_options=options)["count"] == 6
        assert attempt(url, options, 8).restored_from == 6
    else:
        restored = find_restorable(ms.CheckpointStore(url, options))
        assert restored is not None
        assert_same_bits(nest(restored.specs, restored.leaves, restored.specs.empties), toy(6))
        run = Run(url, ms.KeepLast(1), storage_options=options, attempt="a2")
        run.protect.add(6)
        run.save(8)
        run.saver.close()


def is_below(name: str, directory: str) -> bool:
    return name.startswith(directory + "/")


def cases(names: Iterable[str], few: Iterable[str]) -> pytest.MarkDecorator:
    pairs = [(store, name) for store in (*STORES, "s3") for name in (names if DEEP or store in FULL else few)]
    pairs = [pair for pair in pairs if pair != ("s3", "back\\slash")]  # SeaweedFS takes that for back/slash
    return pytest.mark.parametrize(("store", "name"), pairs, indirect=["store"])


@cases(NAMES, FEW)
def test_a_name_is_taken_literally(name, store, monkeypatch, capsys):
    decoys = {f"{other}/{path}": DECOY for other in NAMES[name] for path in ("4/commit.json", "8/data", "run.json")}
    for path, data in decoys.items():
        store.put(path, data)
    monkeypatch.setenv("HOME", "/nowhere/at/all")
    use(f"{store.base}/{name}", store.options, monkeypatch, capsys)
    found = store.objects()
    own = {path.removeprefix(f"{name}/") for path in found if is_below(path, name)}
    assert {"run.json", "6/commit.json", "8/commit.json"} <= own
    assert beside_bookkeeping(path.split("/")[0] for path in own) == {"6", "8"}
    assert {path: data for path, data in found.items() if not is_below(path, name)} == decoys


@cases(SLASHES, ("trailing///", "doub//led"))
def test_slashes_too_many_are_no_other_directory(name, store, monkeypatch, capsys):
    use(f"{store.base}/{name}", store.options, monkeypatch, capsys)
    meant = SLASHES[name]
    for again in (meant, meant + "/", meant.replace("/", "//") + "//"):
        assert ms.CheckpointStore(f"{store.base}/{again}", store.options).steps() == [6, 8]
    found = store.objects()
    assert f"{meant}/8/commit.json" in found
    assert [path for path in found if not is_below(path, meant)] == []
