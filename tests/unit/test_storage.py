from __future__ import annotations

import os
import threading
import time
import uuid

import fsspec
import pytest
import ticks
from refusing import RefusingFileSystem, refuse, refusing

from monsess.errors import StorageError
from monsess.storage import Storage
from monsess.testing import Faults

ODD_NAMES = ["run[1]", "a*b", "with space", "%20", "a#b", "a?b", "ünï☃", "a::b", "-x", "{a,b}", "run/", "..b"]


def fresh(protocol: str) -> str:
    return f"{protocol}://{uuid.uuid4().hex}"


@pytest.fixture(params=["plain", "file", "memory", "dir", "refusing"])
def storage(request, tmp_path) -> Storage:
    url = {
        "plain": str(tmp_path / "store"),
        "file": f"file://{tmp_path}/store",
        "memory": fresh("memory"),
        "dir": f"dir://inner::{fresh('memory')}",
        "refusing": fresh("refusing"),
    }[request.param]
    return Storage(url, backoff_secs=0.0)


def test_objects_round_trip(storage, tmp_path):
    with pytest.raises(FileNotFoundError):
        storage.list()
    storage.write("a.json", b"one")
    storage.write("a.json", b"two")
    source = tmp_path / "source"
    source.write_bytes(os.urandom(20_000_000))
    up = storage.upload("5/default/d/x", str(source))
    assert up.size == 20_000_000
    assert storage.download("5/default/d/x", str(tmp_path / "back")) == up
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    assert storage.download("5/default/d/x", None) == up
    storage.copy("5/default/d/x", "6/y")
    assert storage.read("a.json") == b"two"
    listing = storage.list()
    assert {(e.name, e.is_dir) for e in listing.values()} == {("a.json", False), ("5", True), ("6", True)}
    assert listing["a.json"].size == 3
    assert storage.walk("5") == {"default/d/x": 20_000_000}
    storage.delete_tree("5")
    storage.delete("6/y")
    storage.delete("6/y")
    assert "5" not in storage.list()
    with pytest.raises(FileNotFoundError):
        storage.read("6/y")


def test_delete_order(tmp_path):
    with refusing(lambda operation, path: None) as fs:
        storage = Storage(fresh("refusing"))
        for name in ("commit.json", "a", "b/c", "session.json"):
            storage.write(f"5/{name}", b"x")
        fs.log.clear()
        storage.delete_tree("5", first=("commit.json",), last=("session.json",))
        deleted = [path.split("/5/")[1] for operation, path in fs.log if operation == "delete"]
    assert deleted[0] == "commit.json"
    assert deleted[-1] == "session.json"
    assert sorted(deleted[1:-1]) == ["a", "b/c"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in ("plain", "file", "memory")
        for name in ODD_NAMES
        if kind != "memory" or "::" not in name  # in a URL, :: chains filesystems
    ],
)
def test_names_are_literal(kind, name, tmp_path):
    folder = f"{tmp_path}/{name}"
    base = uuid.uuid4().hex
    storage = Storage({"plain": folder, "file": f"file://{folder}", "memory": f"memory://{base}/{name}"}[kind])
    decoy = Storage(str(tmp_path / "run1") if kind != "memory" else f"memory://{base}/run1")
    decoy.write("keep", b"x")
    storage.write("5/x", b"1")
    assert storage.read("5/x") == b"1"
    assert list(storage.list()) == ["5"]
    if kind == "memory":
        assert fsspec.filesystem("memory").cat_file(f"/{base}/{name.rstrip('/')}/5/x") == b"1"
    else:
        with open(os.path.join(tmp_path, name, "5", "x"), "rb") as file:
            assert file.read() == b"1"
    storage.delete_tree("5")
    assert decoy.read("keep") == b"x"


def test_a_relative_path_and_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Storage("run").local_path == str(tmp_path / "run")
    assert Storage("~/run").local_path == str(tmp_path / "home" / "run")
    assert Storage(tmp_path / "p").local_path == str(tmp_path / "p")


@pytest.mark.parametrize("bad", ["", 3, b"x"])
def test_not_a_url(bad):
    with pytest.raises((ValueError, TypeError)):
        Storage(bad)


def test_unknown_protocol_says_what_to_do():
    with pytest.raises(StorageError, match=r"nosuch.*package"):
        Storage("nosuch://x").list()


def test_credentials_are_never_shown():
    with refusing(refuse("list", error=lambda: OSError("GET refusing://me:hush@host/x?token=hush failed"))):
        storage = Storage("refusing://me:hush@host/x", {"secret": "hush"}, tries=1)
        with pytest.raises(StorageError) as caught:
            storage.list()
    assert "hush" not in str(caught.value)
    assert "hush" not in storage.shown


@pytest.mark.parametrize(
    ("operation", "act"),
    [
        ("list", lambda s: s.list()),
        ("read", lambda s: s.read("x")),
        ("read", lambda s: s.download("x", None)),
        ("write", lambda s: s.write("x", b"")),
        ("delete", lambda s: s.delete("x")),
        ("copy", lambda s: s.copy("x", "y")),
    ],
)
def test_permission_errors_are_not_retried(operation, act):
    url = fresh("refusing")
    Storage(url).write("x", b"1")
    storage = Storage(url, backoff_secs=0.0)
    with refusing(refuse(operation)) as fs:
        with pytest.raises(StorageError, match="credentials") as caught:
            act(storage)
        assert [o for o, _ in fs.log].count(operation) == 1
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value.__cause__, PermissionError)


def test_a_filesystem_object_whose_credentials_have_run_out_is_replaced():
    faults = Faults()
    storage = Storage(fresh("faulty"), {"faults": faults}, backoff_secs=1000.0, workers=1)
    storage.write("x", b"1")
    faults.expire_credentials()
    assert storage.read("x") == b"1"
    assert [(o.kind, o.outcome, o.instance) for o in faults.log] == [
        ("write", "done", 1),
        ("read", "PermissionError", 1),
        ("read", "done", 2),
    ]
    faults.fail("write", times=None, error=PermissionError("really not"))
    with pytest.raises(StorageError, match="really not"):
        storage.write("y", b"1")
    assert [(o.kind, o.instance) for o in faults.log[3:]] == [("write", 2), ("write", 3)]
    storage = Storage(storage.url, {"faults": faults}, backoff_secs=1000.0, workers=1)
    with pytest.raises(StorageError, match="really not"):
        storage.write("y", b"1")
    assert len(faults.log) == 6, "credentials that never were good are believed to be bad"


def test_credentials_may_run_out_between_two_tries():
    faults = Faults()
    storage = Storage(fresh("faulty"), {"faults": faults}, backoff_secs=0.0)
    storage.write("a", b"1")
    faults.fail("write", 1, error=ConnectionError("reset"))
    faults.expire_credentials(after=1)
    storage.write("b", b"2")
    assert [o.outcome for o in faults.log] == ["done", "ConnectionError", "PermissionError", "done"]


def test_a_write_that_is_told_that_something_is_missing_is_tried_again():
    faults = Faults()
    storage = Storage(fresh("faulty"), {"faults": faults}, backoff_secs=0.0)
    faults.fail(
        "write", error=FileNotFoundError("404, no such upload")
    )  # what a restarted store does not know any more
    storage.write("x", b"1")
    assert storage.read("x") == b"1"
    faults.fail("write", times=None, error=FileNotFoundError("404, no such bucket"))
    with pytest.raises(StorageError, match="no such bucket"):
        storage.write("y", b"1")


@pytest.mark.parametrize("act", [lambda s: s.write("x", b"1"), lambda s: s.map([lambda: s.write("x", b"1")])])
def test_with_patience_a_store_that_is_away_is_waited_for(act, lines):
    faults = Faults()
    storage = Storage(fresh("faulty"), {"faults": faults}, tries=2, backoff_secs=0.01, stall_secs=0.2)
    faults.fail("write", times=7, error=ConnectionError("refused"))
    faults.delay("write", 3, 1.0)  # longer than a sign of life may take
    with storage.patience(60):
        act(storage)
    assert storage.read("x") == b"1"
    (line,) = lines()
    assert "refused" in line
    assert "trying again, for 60 s at most" in line
    faults.fail("write", times=7, error=ConnectionError("refused"))
    with pytest.raises(StorageError, match="refused"):
        act(storage)


def test_patience_ends_and_is_not_for_what_is_permanent():
    faults = Faults()
    storage = Storage(fresh("faulty"), {"faults": faults}, tries=1, backoff_secs=0.01)
    faults.fail("write", times=None, error=ConnectionError("refused"))
    with storage.patience(0.1), pytest.raises(StorageError, match="refused"):
        storage.write("x", b"1")
    faults.heal()
    faults.fail("write", times=None, error=PermissionError("403"))
    with storage.patience(1000), pytest.raises(StorageError, match="403"):
        storage.write("x", b"1")


def test_transient_errors_are_retried_with_fresh_filesystems():
    storage = Storage(fresh("refusing"), backoff_secs=0.0)
    failures = iter([ConnectionError("1"), TimeoutError("2"), OSError("3")])

    def rule(operation, path):
        if operation == "write":
            error = next(failures, None)
            if error is not None:
                raise error

    with refusing(rule) as fs:
        fs.made.clear()
        storage.write("x", b"1")
        assert len(fs.made) >= 4
    assert storage.read("x") == b"1"


def test_transient_errors_end():
    storage = Storage(fresh("refusing"), backoff_secs=0.0, tries=3)
    with refusing(refuse("write", error=lambda: ConnectionError("down"))) as fs:
        with pytest.raises(StorageError, match="down"):
            storage.write("x", b"1")
        assert len(fs.log) == 3


def test_a_store_that_never_answers():
    release = threading.Event()
    storage = Storage(fresh("refusing"), stall_secs=0.3, workers=2)

    def rule(operation, path):
        if operation == "list":
            release.wait(30)

    with refusing(rule):
        for _ in range(4):  # more often than there are workers: the lost ones are replaced
            begun = time.monotonic()
            with pytest.raises(StorageError, match=r"no answer within 0\.3 s"):
                storage.list()
            assert time.monotonic() - begun < 5
        storage.write("x", b"1")
        assert storage.read("x") == b"1"
        release.set()


def storage_threads() -> int:
    return sum(thread.name == "monsess-storage" for thread in threading.enumerate())


def test_short_lived_stores_leave_no_threads_behind(tmp_path):
    (tmp_path / "x").write_bytes(b"1")
    ticks.wait_until(lambda: storage_threads() == 0)
    for _ in range(20):
        storage = Storage(tmp_path)
        storage.map([lambda s=storage: s.read("x")] * 8)
        with pytest.raises(FileNotFoundError):
            storage.read("y")
        del storage
    ticks.wait_until(lambda: storage_threads() == 0, seconds=5)


def test_a_store_in_use_keeps_its_threads(tmp_path):
    storage = Storage(tmp_path)
    storage.write("x", b"1")
    other = Storage(tmp_path)
    other.write("y", b"1")
    del other
    for _ in range(20):
        assert storage.read("x") == b"1"


def test_the_first_error_of_many_is_raised_after_the_running_ones_ended():
    storage = Storage(fresh("refusing"), workers=2)
    ended = []

    def slow() -> None:
        time.sleep(0.2)
        ended.append(1)

    def fail() -> None:
        raise StorageError("first")

    with pytest.raises(StorageError, match="first"):
        storage.map([fail, slow, slow, slow, slow, slow])
    count = len(ended)
    assert count <= 2
    time.sleep(0.5)
    assert len(ended) == count


def test_the_root_may_be_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StorageError):
        Storage(tmp_path / "file").list()
    url = fresh("memory")
    Storage(url).write("x", b"1")
    with pytest.raises(StorageError, match="not a directory"):
        Storage(f"{url}/x").list()


def test_caches_are_bypassed(tmp_path):
    url = fresh("memory")
    cached = Storage(f"simplecache::{url}", {"cache_storage": str(tmp_path / "cache")})
    direct = Storage(url)
    direct.write("x", b"1")
    assert cached.read("x") == b"1"
    direct.write("x", b"22")
    direct.write("y", b"")
    assert cached.read("x") == b"22"
    assert sorted(cached.list()) == ["x", "y"]


def test_listings_are_uncached():
    class Caching(RefusingFileSystem):
        protocol = "stale"
        cache: dict = {}  # noqa: RUF012

        @classmethod
        def _strip_protocol(cls, path):
            return RefusingFileSystem._strip_protocol(str(path).removeprefix("stale:/"))

        def ls(self, path, detail=True, **kwargs):
            if path not in self.cache:
                self.cache[path] = super().ls(path, detail=detail, **kwargs)
            return self.cache[path]

        def invalidate_cache(self, path=None):
            self.cache.clear()

    fsspec.register_implementation("stale", Caching, clobber=True)
    storage = Storage(f"dir://x::{fresh('stale')}")
    storage.write("1", b"")
    assert list(storage.list()) == ["1"]
    storage.write("2", b"")
    assert sorted(storage.list()) == ["1", "2"]


def test_a_write_on_a_local_path_is_atomic(tmp_path, monkeypatch):
    storage = Storage(tmp_path, tries=1)
    storage.write("run.json", b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O")))
    with pytest.raises(StorageError):
        storage.write("run.json", b"new")
    monkeypatch.undo()
    assert storage.read("run.json") == b"old"
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_full_disk_is_not_retried():
    storage = Storage(fresh("refusing"), backoff_secs=0.0)
    with refusing(refuse("write", error=lambda: OSError(28, "No space left"))) as fs:
        with pytest.raises(StorageError, match="Make room"):
            storage.write("x", b"")
        assert len(fs.log) == 1


def test_links_are_removed_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    storage = Storage(tmp_path / "run")
    storage.write("5/x", b"")
    os.symlink(outside, tmp_path / "run" / "5" / "link")
    storage.delete_tree("5")
    assert (outside / "precious").read_bytes() == b"x"
    assert not (tmp_path / "run" / "5").exists()
    os.symlink(outside, tmp_path / "run" / "6")
    assert storage.list()["6"].is_dir
    storage.delete_tree("6")
    assert (outside / "precious").read_bytes() == b"x"
    assert not (tmp_path / "run" / "6").exists()
