"""A small fsspec filesystem in memory that refuses, fails, blocks or changes what a test tells it to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem


class RefusingFileSystem(MemoryFileSystem):
    """`memory://` under the protocol ``refusing``; ``rule(operation, path)`` is called before every operation."""

    protocol = "refusing"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    rule: ClassVar[Callable[[str, str], None]] = staticmethod(lambda operation, path: None)
    log: ClassVar[list[tuple[str, str]]] = []
    made: ClassVar[list[int]] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._thread = threading.get_ident()
        type(self).made.append(self._thread)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(str(path).removeprefix("refusing:/"))

    def _ask(self, operation: str, path: str) -> None:
        assert self._thread == threading.get_ident(), "used in another thread than the one that made it"
        type(self).log.append((operation, path))
        type(self).rule(operation, path)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self._ask("list", path)
        return super().ls(path, detail=detail, **kwargs)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._ask("read", path)
        return super().cat_file(path, *args, **kwargs)

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        self._ask("write" if "w" in mode else "read", path)
        return super()._open(path, mode, *args, **kwargs)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> Any:
        self._ask("copy", path1)
        return super().cp_file(path1, path2, **kwargs)

    def rm_file(self, path: str) -> None:
        self._ask("delete", path)
        return super()._rm(path)

    @classmethod
    @contextmanager
    def store_open(cls, path: str) -> Iterator[Any]:
        """Replace an object behind the back of everybody, without asking the rule."""
        file = MemoryFile(None, None)
        yield file
        file.seek(0)
        cls.store[path] = file

    def rm(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("rm expands patterns")

    def glob(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("glob expands patterns")

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("mv is recursive")

    def start_transaction(self) -> Any:
        raise AssertionError("transactions are not used")


fsspec.register_implementation("refusing", RefusingFileSystem, clobber=True)


@contextmanager
def refusing(rule: Callable[[str, str], None]) -> Iterator[type[RefusingFileSystem]]:
    """Apply ``rule`` inside the block."""
    before = RefusingFileSystem.rule
    RefusingFileSystem.rule = staticmethod(rule)
    RefusingFileSystem.log.clear()
    try:
        yield RefusingFileSystem
    finally:
        RefusingFileSystem.rule = staticmethod(before)


def refuse(*operations: str, error: Callable[[], Exception] = lambda: PermissionError("403 no")) -> Any:
    """A rule that raises ``error()`` for ``operations``."""

    def rule(operation: str, path: str) -> None:
        if operation in operations:
            raise error()

    return rule
