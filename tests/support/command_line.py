"""Helpers for tests of the command line: call it, and reach the bytes below a store."""

from __future__ import annotations

import json
from typing import Any

import fsspec

from monsess.commands import main


class Files:
    """The bytes below a store, whatever it is."""

    def __init__(self, url: str) -> None:
        self.fs, self.root = fsspec.core.url_to_fs(url)

    def names(self, folder: str = "") -> list[str]:
        root = f"{self.root}/{folder}" if folder else self.root
        return sorted(name[len(root) + 1 :] for name in self.fs.find(root))

    def read(self, name: str) -> bytes:
        return self.fs.cat_file(f"{self.root}/{name}")

    def write(self, name: str, data: bytes) -> None:
        self.fs.makedirs(f"{self.root}/{name}".rsplit("/", 1)[0], exist_ok=True)
        self.fs.pipe_file(f"{self.root}/{name}", data)

    def damage(self, name: str) -> None:
        """Turn one bit in the middle."""
        data = self.read(name)
        middle = len(data) // 2
        self.write(name, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])

    def data_file(self, step: int) -> str:
        """A file of a step that holds values."""
        return next(f"{step}/{name}" for name in self.names(str(step)) if name.startswith("default/d/"))


class CommandLine:
    """Calls ``monsess`` in this process."""

    def __init__(self, capsys: Any) -> None:
        self._capsys = capsys

    def __call__(self, *argv: object) -> tuple[int, str, str]:
        """Exit status, output, and errors."""
        status = main([str(arg) for arg in argv])
        caught = self._capsys.readouterr()
        return status, caught.out, caught.err

    def document(self, *argv: object) -> tuple[int, Any]:
        """Exit status and JSON document."""
        status, out, _ = self(*argv, "--json")
        return status, json.loads(out)
