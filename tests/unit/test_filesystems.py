"""Names reach a filesystem as they are, whatever its library would make of them."""

from __future__ import annotations

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from monsess import filesystems
from monsess.filesystems import can_copy, open_filesystem, remove_directory
from monsess.localfiles import CHUNK_BYTES
from monsess.storage import Storage


class Parsing(MemoryFileSystem):
    """Takes a bare path for a URL, as hdfs-native and sshfs do."""

    protocol = "parsing"
    made: list[dict[str, str]] = []  # noqa: RUF012

    def __init__(self, **options):
        super().__init__(**options)
        self.made.append(options)

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol("/" + fsspec.utils.infer_storage_options(path)["path"].strip("/"))

    @staticmethod
    def _get_kwargs_from_urls(url):
        return {"host": fsspec.utils.infer_storage_options(url)["host"]}

    def cp_file(self, path1, path2, **kwargs):
        raise AssertionError("copies in its own way")


@pytest.fixture
def parsing(monkeypatch):
    fsspec.register_implementation("parsing", Parsing, clobber=True)
    monkeypatch.setattr(filesystems, "_PARSING", filesystems._PARSING | {"parsing"})
    Parsing.made.clear()
    return Parsing


@pytest.mark.parametrize("name", ["run#1", "lr=1e-3?", "q?x=1#y", "a;b", "run[1]", "%20", " "])
def test_names_that_look_like_parts_of_a_url(parsing, name):
    store = Storage(f"parsing://host/sweep/{name}")
    store.write("3/commit.json", name.encode())
    Storage("parsing://host/sweep").write("other", b"")
    assert Storage("parsing://host/sweep").list().keys() == {name, "other"}
    assert Storage(f"parsing://host/sweep/{name}/").read("3/commit.json").decode() == name
    assert {options["host"] for options in parsing.made} == {"host"}
    store.delete_tree("3")
    assert Storage("parsing://host/sweep").list().keys() == {"other"}


def test_doubled_slashes_of_a_server_with_directories(parsing):
    Storage("parsing://host//a///b//").write("1/x", b"1")
    assert Storage("parsing://host/a/b").read("1/x") == b"1"


def test_a_file_server_copies_through_this_process(parsing):
    store = Storage("parsing://host/copies")
    store.write("1/x", b"1")
    store.copy("1/x", "2/x")
    assert store.read("2/x") == b"1"
    assert not can_copy(open_filesystem("parsing://host/", {})[0])
    assert can_copy(open_filesystem("memory://host/", {})[0])


def test_a_directory_is_removed_though_only_the_private_name_does_it():
    class Private(AsyncFileSystem):
        removed: list[str] = []  # noqa: RUF012

        async def _rmdir(self, path):
            self.removed.append(path)

    remove_directory(Private(), "/empty")
    assert Private.removed == ["/empty"]


def test_a_small_file_goes_to_a_bucket_in_one_request_and_a_big_one_in_parts(tmp_path):
    asked = []

    class Bucket(MemoryFileSystem):
        protocol = ("counting", "s3")
        store: dict[str, object] = {}  # noqa: RUF012

        @classmethod
        def _strip_protocol(cls, path):
            return MemoryFileSystem._strip_protocol(path.removeprefix("counting://"))

        def pipe_file(self, path, value, mode="overwrite", **kwargs):
            asked.append("pipe_file")
            super().pipe_file(path, value, mode, **kwargs)

        def open(self, path, mode="rb", **kwargs):
            asked.append(f"open {mode}")
            return super().open(path, mode, **kwargs)

    fsspec.register_implementation("counting", Bucket, clobber=True)
    store = Storage("counting://bucket/run")
    for size, how in ((0, "pipe_file"), (CHUNK_BYTES, "pipe_file"), (CHUNK_BYTES + 1, "open wb")):
        (tmp_path / "file").write_bytes(bytes(size))
        asked.clear()
        digest = store.upload("file", str(tmp_path / "file"))
        assert asked[0] == how  # which may open the object in its turn
        assert digest == store.download("file", None)
        assert digest.size == size
