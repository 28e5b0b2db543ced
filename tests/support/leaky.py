"""A store whose library repeats all its credentials in every error, as some do; protocol ``leaky``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
from urllib.parse import urlsplit

import fsspec

from monsess.testing import FaultyFileSystem


class LeakyFileSystem(FaultyFileSystem):
    """`faulty` under another name; ``fails[kind]`` makes the error of each operation of that kind."""

    protocol = "leaky"
    fails: ClassVar[dict[str, Callable[[str], Exception]]] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return super()._strip_protocol(str(path).replace("leaky://", "faulty://", 1))

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        parts = urlsplit(path)
        return {"login": parts.username, "open_sesame": parts.password, "address": path}

    def _ask(self, kind: str, path: str) -> None:
        if kind in type(self).fails:
            try:
                raise ValueError(f"the server said no to {self.storage_options!r}")
            except ValueError as cause:
                raise type(self).fails[kind](f"{kind} {path}: refused for {self.storage_options}") from cause

    def ls(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._ask("list", path)
        return super().ls(path, *args, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        self._ask("list", path)
        return super().info(path, **kwargs)

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        self._ask("read" if mode == "rb" else "write", path)
        return super()._open(path, mode, *args, **kwargs)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> Any:
        self._ask("copy", path1)
        return super().cp_file(path1, path2, **kwargs)

    def rm_file(self, path: str) -> None:
        self._ask("delete", path)
        super().rm_file(path)


fsspec.register_implementation("leaky", LeakyFileSystem, clobber=True)
