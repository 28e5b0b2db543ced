"""What monsess needs of a store, one property at a time: each is tried out and never taken on trust.

Everything is written by one filesystem object and looked at by another one, as a run and its restart would.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from monsess.localfiles import Digest
from monsess.storage import Storage

ODD_NAMES = (
    *("run[1]", "a*b", "lr=1e-3?", "x{y}", "two words", "%20", "a%2Fb", "a#b", "a+b", "ünï☃", ".hidden", "-dash"),
)
_SMALL = 5
_PARALLEL = 8
_SETTLES_SECS = 15.0
_POLL_SECS = 0.25


class PropertyFailed(Exception):
    """The store does not do what it should; the text says what was expected and what was found."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """One property.

    Args:
        name: For people.
        needed: Whether monsess needs it.
        meaning: What depends on it.
        run: Tries it out; returns what is worth telling, None if it does not apply, or raises.
    """

    name: str
    needed: bool
    meaning: str
    run: Callable[[Bench], str | None]


class Bench:
    """A scratch folder in a store, seen through two filesystem objects.

    Args:
        url: The scratch folder.
        options: Storage options.
        size_mb: Size of the big object in MB (10**6 bytes).
        local: A local folder for what is uploaded.
    """

    def __init__(self, url: str, options: Mapping[str, Any], size_mb: int, local: str) -> None:
        self.url = url
        self.options = options
        self.size = size_mb * 1_000_000
        self.local = local
        self.writer = Storage(url, options)
        self.reader = Storage(url, options)
        #: dict[str, float]: MB/s and milliseconds, by name.
        self.figures: dict[str, float] = {}
        #: float: how many seconds listings lag behind, at most.
        self.lag = 0.0

    def expect(self, name: str, data: bytes) -> None:
        """Read an object through the other filesystem object, and fail unless it holds ``data``."""
        try:
            found = self.reader.read(name)
        except FileNotFoundError:
            raise PropertyFailed(f"{name!r} was written and is not found") from None
        if found != data:
            raise PropertyFailed(f"{name!r} should hold {_shown(data)}, found {_shown(found)}")

    def names(self, folder: str) -> dict[str, int | None]:
        """Name and size of what the other filesystem object lists; directories have the size −1."""
        try:
            return {e.name: -1 if e.is_dir else e.size for e in self.reader.list(folder).values()}
        except FileNotFoundError:
            return {}

    def listed(self, what: str, holds: Callable[[], bool]) -> None:
        """Fail unless ``holds`` becomes true; listings may lag behind, for a while, and how long is noted down."""
        begun = time.monotonic()
        while not holds():
            if time.monotonic() - begun > _SETTLES_SECS:
                raise PropertyFailed(f"{what} not even after {_SETTLES_SECS:g} s")
            time.sleep(_POLL_SECS)
            self.lag = max(self.lag, time.monotonic() - begun)

    def source(self, size: int) -> tuple[str, Digest]:
        """A local file of random bytes."""
        path = os.path.join(self.local, f"random-{size}")
        with open(path, "wb") as file:
            left = size
            while left > 0:
                left -= file.write(os.urandom(min(left, 8 << 20)))
        return path, Storage(self.local).download(os.path.basename(path), None)


def write_and_read(bench: Bench) -> str:
    """A small object arrives as it was sent."""
    data = bytes(range(256)) * 4
    bench.writer.write("small", data)
    bench.expect("small", data)
    return f"{len(data)} bytes"


def nothing_there(bench: Bench) -> str:
    """What was never written is told from what cannot be reached."""
    try:
        found = bench.reader.read("never-written")
    except FileNotFoundError:
        pass
    else:
        raise PropertyFailed(f"an object that was never written was read: {_shown(found)}")
    if names := bench.names("never-made"):
        raise PropertyFailed(f"a folder that was never made lists {sorted(names)}")
    return "not found, as it should be"


def empty_object(bench: Bench) -> str:
    """An object of no bytes is an object."""
    bench.writer.write("empty/mark", b"")
    bench.expect("empty/mark", b"")
    bench.listed("an empty object is listed", lambda: bench.names("empty").get("mark", -1) in (0, None))
    return "kept"


def listing(bench: Bench) -> str:
    """Objects and folders are listed as what they are, with their sizes."""
    objects = {"one": b"1", "two": b"22", "deep/er/three": b"333"}
    for name, data in objects.items():
        bench.writer.write(f"list/{name}", data)
    expected = {"one": 1, "two": 2, "deep": -1}

    def right() -> bool:
        found = bench.names("list")
        return found.keys() == expected.keys() and all(found[name] in (size, None) for name, size in expected.items())

    bench.listed(f"a listing shows {sorted(expected)}", right)
    bench.listed("the folder 'deep' lists the folder 'er' alone", lambda: bench.names("list/deep") == {"er": -1})
    bench.listed(f"below 'list' lie {sorted(objects)}", lambda: sorted(_objects(bench, "list")) == sorted(objects))
    return f"{len(objects)} objects in 3 folders"


def visible_at_once(bench: Bench) -> str:
    """What was written is read from that moment on, and listed, be it later."""
    times: dict[str, list[float]] = {"write_ms": [], "list_ms": [], "read_ms": []}

    def timed(kind: str, act: Callable[[], Any]) -> Any:
        begun = time.monotonic()
        result = act()
        times[kind].append((time.monotonic() - begun) * 1000)
        return result

    for number in range(_SMALL):
        name, data = f"{number}.json", os.urandom(100)
        timed("write_ms", lambda n=name, d=data: bench.writer.write(f"new/{n}", d))
        if name not in timed("list_ms", lambda: bench.names("new")):
            bench.listed("an object is listed", lambda n=name: n in bench.names("new"))
        timed("read_ms", lambda n=name, d=data: bench.expect(f"new/{n}", d))
    medians = {kind: round(statistics.median(values), 1) for kind, values in times.items()}
    bench.figures |= medians
    return ", ".join(f"{kind.removesuffix('_ms')} {value:.1f} ms" for kind, value in medians.items())


def overwrite(bench: Bench) -> str:
    """An object that is written again holds the new bytes, at once."""
    for number, size in enumerate((100, 5000, 10, 0, 100)):
        data = bytes([number]) * size
        bench.writer.write("again/object", data)
        bench.expect("again/object", data)
        bench.listed(
            "the new size of an object is listed",
            lambda n=size: bench.names("again").get("object", -1) in (n, None),
        )
    return "longer and shorter"


def delete(bench: Bench) -> str:
    """What was deleted is gone for readers at once, and from listings; deleting it again is no error."""
    for name in ("stays", "goes", "sub/goes"):
        bench.writer.write(f"gone/{name}", b"x")
    for name in ("goes", "sub/goes", "goes"):
        bench.writer.delete(f"gone/{name}")
        try:
            bench.reader.read(f"gone/{name}")
        except FileNotFoundError:
            continue
        raise PropertyFailed(f"{name!r} was deleted and can still be read")
    bench.listed("what is left is listed", lambda: "stays" in bench.names("gone"))
    bench.listed("a deleted object is gone from listings", lambda: "goes" not in bench.names("gone"))
    bench.expect("gone/stays", b"x")
    bench.writer.delete_tree("gone")
    bench.listed("a deleted folder lists nothing", lambda: not _objects(bench, "gone"))
    return "gone"


def odd_names(bench: Bench) -> str:
    """Names are taken literally, whatever is in them."""
    wrong = []
    for name in ODD_NAMES:
        data = name.encode()
        try:
            bench.writer.write(f"odd/{name}/object", data)
            bench.expect(f"odd/{name}/object", data)
            bench.listed("it is listed", lambda n=name: bench.names(f"odd/{n}").keys() == {"object"})
        except (OSError, PropertyFailed):
            wrong.append(name)
    listed = bench.names("odd").keys()  # all of which were listed themselves
    wrong += [name for name in ODD_NAMES if name not in listed and name not in wrong]
    if wrong:
        raise PropertyFailed(f"not taken literally: {', '.join(map(repr, wrong))}")
    return f"{len(ODD_NAMES)} names"


def big_object(bench: Bench) -> str:
    """A big object arrives whole."""
    path, expected = bench.source(bench.size)
    begun = time.monotonic()
    bench.writer.upload("big/object", path)
    up = time.monotonic() - begun
    os.unlink(path)
    begun = time.monotonic()
    found = bench.reader.download("big/object", None)
    down = time.monotonic() - begun
    if found != expected:
        raise PropertyFailed(f"{expected.size} bytes were sent, {found.size} came back{_if_same_size(expected, found)}")
    bench.figures |= {"upload_mb_s": _speed(bench.size, up), "download_mb_s": _speed(bench.size, down)}
    return f"{bench.size / 1e6:.0f} MB: {bench.size / 1e6 / up:.1f} MB/s up, {bench.size / 1e6 / down:.1f} MB/s down"


def concurrent_upload(bench: Bench) -> str:
    """Objects that are written at the same time all arrive whole."""
    each = max(1, bench.size // _PARALLEL)
    path, expected = bench.source(each)
    begun = time.monotonic()
    bench.writer.map([lambda n=i: bench.writer.upload(f"many/{n}", path) for i in range(_PARALLEL)])
    up = time.monotonic() - begun
    os.unlink(path)
    begun = time.monotonic()
    found = bench.reader.map([lambda n=i: bench.reader.download(f"many/{n}", None) for i in range(_PARALLEL)])
    down = time.monotonic() - begun
    if wrong := [digest for digest in found if digest != expected]:
        raise PropertyFailed(
            f"{len(wrong)} of {_PARALLEL} objects did not come back as they were sent: {expected.size} bytes were "
            f"sent, {wrong[0].size} came back{_if_same_size(expected, wrong[0])}"
        )
    total = each * _PARALLEL
    bench.figures |= {"parallel_upload_mb_s": _speed(total, up), "parallel_download_mb_s": _speed(total, down)}
    return f"{_PARALLEL} at once: {total / 1e6 / up:.1f} MB/s up, {total / 1e6 / down:.1f} MB/s down"


def copy(bench: Bench) -> str:
    """One object is copied to another name."""
    data = os.urandom(1000)
    bench.writer.write("copy/from", data)
    bench.writer.copy("copy/from", "copy/into/to")
    bench.expect("copy/into/to", data)
    bench.expect("copy/from", data)
    return "by the store or by hand"


def rename(bench: Bench) -> str | None:
    """On a local file system a folder is renamed as a whole."""
    if bench.writer.local_path is None:
        return None
    bench.writer.write("rename/from/object", b"x")
    bench.writer.rename("rename/from", "rename/to")
    bench.expect("rename/to/object", b"x")
    if bench.names("rename").keys() != {"to"}:
        raise PropertyFailed(f"the old name should be gone, found {sorted(bench.names('rename'))}")
    return "a folder, as a whole"


def exclusive_create(bench: Bench) -> str:
    """Of two who create the same object one is refused."""
    if (error := _create(bench.writer, "only/once", b"first")) is not None:
        raise PropertyFailed(f"not offered ({type(error).__name__})")
    if _create(bench.writer, "only/once", b"second") is None:
        raise PropertyFailed("the second one overwrote the first")
    bench.expect("only/once", b"first")
    return "the second one is refused"


def a_real_save(bench: Bench) -> str:
    """Two steps are saved, verified, restored bit for bit, and one is deleted, all by what a session uses."""
    from monsess.commands.trial_save import try_out

    return try_out(f"{bench.url}/save", bench.options, bench.lag)


def listed_at_once(bench: Bench) -> str:
    """No listing lagged behind so far."""
    if bench.lag:
        raise PropertyFailed(
            f"listings lag behind by {bench.lag:.1f} s. A run and its restarts go by what run.json remembers; a run "
            "that is killed right after a commit may go back one save further. Give `monsess ls` and `prune` that time"
        )
    return "at once"


#: tuple[Probe, ...]: all of them; the first is the foundation of the others.
PROBES = (
    Probe("write, read back", True, "everything", write_and_read),
    Probe("absence is told", True, "a first start is told from a store that fails", nothing_there),
    Probe("empty object", True, "pins, marks of steps that are being written", empty_object),
    Probe("list", True, "finding checkpoints", listing),
    Probe("visible after write", True, "a restart finds the newest commit", visible_at_once),
    Probe("overwrite", True, "run.json, owner.json", overwrite),
    Probe("gone after delete", True, "retention, taking over from dead runs", delete),
    Probe("big object", True, "the state", big_object),
    Probe("concurrent upload", True, "the state", concurrent_upload),
    Probe("copy", True, "moving damaged steps out of the way", copy),
    Probe("rename", True, "commits on a local path; not used elsewhere", rename),
    Probe("save, verify, restore", True, "all of it together", a_real_save),
    Probe("odd names", False, "only directories with such characters in their names", odd_names),
    Probe("listed at once", False, "without it a restart after a kill may go back one save further", listed_at_once),
    Probe("exclusive create", False, "two runs are told apart without it", exclusive_create),
)


def _create(storage: Storage, name: str, data: bytes) -> Exception | None:
    """Write an object that must not exist, which sessions never do; the error if there was one."""

    def create(backend: Any) -> Exception | None:
        try:
            if storage.local_path is not None:
                path = os.path.join(storage.local_path, *name.split("/"))
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "xb") as file:
                    file.write(data)
            else:
                backend._with_parent(name, lambda path: backend._fs.pipe_file(path, data, mode="create"))
        except Exception as error:  # each filesystem has another one for it
            return error
        return None

    return storage._do("create", name, create)


def _objects(bench: Bench, folder: str) -> list[str]:
    try:
        return list(bench.reader.walk(folder))
    except FileNotFoundError:
        return []


def _shown(data: bytes) -> str:
    return f"{len(data)} bytes" + (f" ({data[:12].hex()}{'…' if len(data) > 12 else ''})" if data else "")


def _if_same_size(expected: Digest, found: Digest) -> str:
    return ", and not the same ones" if expected.size == found.size else ""


def _speed(size: int, seconds: float) -> float:
    return round(size / 1e6 / max(seconds, 1e-9), 1)
