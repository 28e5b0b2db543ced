"""What a process of a launched job writes down when it fails, and the launcher reads when all is over."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from typing import NamedTuple

from monsess.errors import PeerFailedError
from monsess.launch.environment import FAILURE_DIR, PROCESS_ID
from monsess.log import mask

_EXTENSION = ".json"


class Record(NamedTuple):
    """A failure: the error, its type first; the traceback; when it was written, in seconds since the epoch."""

    error: str
    traceback: str
    time: float

    @property
    def blames_a_peer(self) -> bool:
        """Whether the error only says that another process failed."""
        return PeerFailedError.__name__ in self.error.partition(":")[0]

    @property
    def is_interrupt(self) -> bool:
        """Whether it is Ctrl-C that ended the process."""
        return self.error.partition(":")[0] == KeyboardInterrupt.__name__


def write_record(error: BaseException) -> bool:
    """Write down, for the launcher, why this process fails; the first record of a process stays.

    Never raises: it is called where an error is on its way already.

    Args:
        error: What the process ends with.

    Returns:
        Whether there is a launcher that reads it, and it was written.

    Example:
        >>> write_record(ValueError("no launcher here"))
        False
    """
    folder, rank = os.environ.get(FAILURE_DIR), os.environ.get(PROCESS_ID, "")
    if not folder or not rank.isdecimal():
        return False
    content = {
        "process": int(rank),
        "error": mask("".join(traceback.format_exception_only(error)).strip()),
        "traceback": mask("".join(traceback.format_exception(error))),
        "time": time.time(),
    }
    path = os.path.join(folder, rank + _EXTENSION)
    temporary = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError, ValueError):
        with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(content, file)
        try:
            os.link(temporary, path)  # unlike a rename, not over what is there
        finally:
            os.unlink(temporary)
        return True
    return False


def read_records(folder: str) -> dict[int, Record]:
    """The failures in a folder by the numbers of their processes; what is no record is left out."""
    found: dict[int, Record] = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return found
    for name in names:
        stem, extension = os.path.splitext(name)
        if extension != _EXTENSION or not stem.isdecimal():
            continue
        try:
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                content = json.load(file)
            error, trace, when = str(content["error"]), content.get("traceback"), float(content["time"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue  # torn, or somebody else's
        found[int(stem)] = Record(error.strip() or "an error without a message", str(trace or ""), when)
    return found
