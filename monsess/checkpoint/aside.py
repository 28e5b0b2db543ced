"""Moving a step aside on a store that cannot rename: copied as a whole before the first byte of it is deleted.

A mark ``.moving-<target>`` says what is going on there, from before the first copy until after the last deletion.
Deletion begins with the commit.json, so as long as that is what it was when the move began, or not everything was
copied yet, the step is still whole where it was: then the copy is what is superfluous. In the end each byte is there
once, wherever the move was cut off.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monsess.checkpoint.store import CheckpointStore

MOVING_PREFIX = ".moving-"
_MARK = re.compile(rf"{re.escape(MOVING_PREFIX)}((?:aside|damaged)-(0|[1-9][0-9]*)-(.+))")


def move(store: CheckpointStore, step: int, target: str) -> None:
    """Move the objects of ``step`` to ``target``.

    Raises:
        StorageError: Something could not be copied or deleted; `settle` finds out what that means.
    """
    storage = store._storage
    commit = store._read_commit(step)
    about = {"commit": None if commit is None else hashlib.sha256(commit).hexdigest()}
    mark = f"{MOVING_PREFIX}{target}"
    storage.write(mark, json.dumps({**about, "copied": False}).encode())
    names = list(storage.walk(str(step)))
    storage.map([lambda n=n: storage.copy(f"{step}/{n}", f"{target}/{n}") for n in names])
    storage.write(mark, json.dumps({**about, "copied": True}).encode())
    store._forget(step)  # not before: a step without a commit.json is only known to be one as long as run.json says so
    store._delete_step(step)
    storage.delete(mark)


def marks(names: Iterable[str], but_of: str | None = None) -> list[str]:
    """The marks among ``names``, without those of the attempt ``but_of``, whose moves may be going on."""
    found = {name: match[3] for name in names if (match := _MARK.fullmatch(name))}
    return [name for name, attempt in found.items() if but_of is None or not f"{attempt}-".startswith(f"{but_of}-")]


def settle(store: CheckpointStore, mark: str) -> None:
    """Leave each byte of a move that was cut off in one place, and take its mark away.

    Raises:
        StorageError: It could not be looked at or cleared.
    """
    match = _MARK.fullmatch(mark)
    assert match is not None, mark
    storage = store._storage
    try:
        noted = json.loads(storage.read(mark))
    except FileNotFoundError:
        return
    except ValueError:
        noted = {}  # cut off itself: no deletion had begun
    commit = store._read_commit(int(match[2]))
    is_whole = commit is not None and hashlib.sha256(commit).hexdigest() == noted.get("commit")
    if is_whole or noted.get("copied") is not True:
        storage.delete_tree(match[1])
    storage.delete(mark)
