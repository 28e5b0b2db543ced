"""The stores in which a run of `kill_child` is killed, and the kill at one operation of theirs."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

#: By name: what they are.
STORES = {
    "local": "a path: the operating system's files",
    "plain": "a filesystem of fsspec that writes in place and cannot rename",
    "faulty": "objects without directories or rename, of which half may be kept",
    "bucket": "the same, known to take objects whole or not at all, as S3 does",
    "real": "whatever `store.json` in the run's folder says: ``url`` and ``options``",
    "none": "no checkpoints",
}


class Store(NamedTuple):
    """Where a session stores.

    Args:
        url: Its checkpoint_dir.
        options: Its storage_options.
        operations: What was done there so far, a word each; empty for a path before `die_at_access`.
    """

    url: str | None
    options: dict[str, Any] | None
    operations: Callable[[], list[str]]


def die() -> NoReturn:
    """SIGKILL: no handler, no finally, no exit function."""
    os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(1)


def die_at_access(directories: tuple[str, ...], number: int, late: float) -> Callable[[], list[str]]:
    """Kill this process ``late`` seconds after its ``number``-th access to something in ``directories`` begins.

    What libraries in C++ write is not seen; ``late`` reaches into it.
    """
    counter = itertools.count(1)
    accesses: list[str] = []
    events = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in events or not args:
            return
        inside = isinstance(args[0], str) and args[0].startswith(directories)
        removed_by_descriptor = event in ("os.remove", "os.rmdir") and len(args) > 1 and args[1] != -1
        if inside or removed_by_descriptor:
            accesses.append(event.removeprefix("os."))
            if next(counter) == number:  # it is atomic, and several threads come here
                if late:
                    threading.Timer(late, die).start()
                else:
                    die()

    sys.addaudithook(hook)
    return lambda: list(accesses)


def register() -> None:
    """Make the protocols known to fsspec."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    import monsess as ms

    class Plain(LocalFileSystem):
        protocol = "plain"

        @classmethod
        def _strip_protocol(cls, path: Any) -> str:
            return super()._strip_protocol(str(path).removeprefix("plain://"))

    class Bucket(ms.testing.FaultyFileSystem):
        protocol = ("bucket", "s3")

        @classmethod
        def _strip_protocol(cls, path: Any) -> Any:
            return super()._strip_protocol(str(path).removeprefix("bucket://").removeprefix("s3://"))

    fsspec.register_implementation("plain", Plain, clobber=True)
    fsspec.register_implementation("bucket", Bucket, clobber=True)


def opened(name: str, folder: str, kind: str, number: int, when: str, late: float) -> Store:
    """The store ``name``, whose content lies in ``checkpoints`` below ``folder``.

    Args:
        name: One of `STORES`.
        folder: Where.
        kind: Of which operations the ``number``-th kills this process.
        number: 0: none does.
        when: At which point of it, in a faulty store.
        late: So many seconds after it, elsewhere.
    """
    directory = os.path.join(folder, "checkpoints")
    if name == "real":
        with open(os.path.join(folder, "store.json"), encoding="utf-8") as file:
            return Store(**json.load(file), operations=list)
    if name in ("faulty", "bucket"):
        import monsess as ms

        faults = ms.testing.Faults(rename=False, directories=False, atomic=name == "bucket")
        if number:
            faults.kill(kind, number, when=when)  # type: ignore[arg-type]
        options = {"root": folder, "faults": faults}
        return Store(f"{name}://checkpoints", options, lambda: [operation.kind for operation in faults.log])
    accesses = die_at_access((directory, os.path.join(folder, "staging")), number, late)
    return Store({"local": directory, "plain": f"plain://{directory}", "none": None}[name], None, accesses)
