"""The commit record: the one object whose presence makes a directory a checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from monsess.localfiles import Digest

COMMIT = "commit.json"
SESSION = "session.json"
#: Written by Orbax last; where they lie without a session.json, somebody else's checkpoint lies.
ORBAX_MARKERS = ("_CHECKPOINT_METADATA", "commit_success.txt")
#: Name of the Orbax item that holds the state.
ITEM = "default"
_FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What is known of a committed step, by which a retention chooses.

    Args:
        step: Global step.
        run_id: Lineage of runs that resumed from one another.
        attempt: The one of them that wrote it.
        time: When it was committed, in seconds since the epoch.
        started: When the lineage began, likewise: a time base that survives restarts.
        metrics: Values by which it may be ranked; finite.
        size: Bytes of its files together.

    Example:
        >>> import monsess as ms
        >>> record = ms.StepRecord(step=5, run_id="r", attempt="a", time=60.0, started=0.0, metrics={"loss": 0.5})
        >>> record.metrics["loss"]
        0.5
    """

    step: int
    run_id: str
    attempt: str
    time: float
    started: float
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    size: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitRecord(StepRecord):
    """What a commit.json says.

    Args:
        step: Global step, equal to the directory's name.
        run_id: Lineage of runs that resumed from one another.
        attempt: The one of them that wrote it.
        time: When it was committed, in seconds since the epoch.
        started: When the lineage began, likewise.
        metrics: Values by which it may be ranked; finite.
        size: Bytes of its files together.
        files: Size and sha256 of every other file, by name relative to the step's directory.
    """

    files: Mapping[str, Digest]

    def encode(self) -> bytes:
        """The bytes of the commit.json."""
        body: dict[str, Any] = {
            "format": _FORMAT,
            "algorithm": "sha256",
            "step": self.step,
            "run_id": self.run_id,
            "attempt": self.attempt,
            "time": self.time,
            "started": self.started,
            "metrics": dict(self.metrics),
            "files": {name: {"size": d.size, "sha256": d.sha256} for name, d in self.files.items()},
        }
        return _canonical({**body, "checksum": _checksum(body)})


def decode(data: bytes, step: int) -> CommitRecord:
    """Read the commit.json of ``step``.

    Raises:
        ValueError: It is not one, not of this step, or not byte for byte what was written.
    """
    try:
        body = json.loads(data)
        if _canonical(body) != data:
            raise ValueError("its bytes are not what was written")
        checksum = body.pop("checksum")
        if checksum != _checksum(body):
            raise ValueError("its checksum does not fit its content")
        if (body["format"], body["algorithm"]) != (_FORMAT, "sha256"):
            raise ValueError(f"format {body['format']} with {body['algorithm']} is of another version of monsess")
        if body["step"] != step:
            raise ValueError(f"it belongs to step {body['step']}")
        files = {str(name): Digest(int(d["size"]), str(d["sha256"])) for name, d in body["files"].items()}
        if SESSION not in files or not all(map(_is_plain, files)):
            raise ValueError("its list of files is not one of a checkpoint")
        return CommitRecord(
            step=step,
            run_id=str(body["run_id"]),
            attempt=str(body["attempt"]),
            time=float(body["time"]),
            started=float(body["started"]),
            metrics=dict(body["metrics"]),
            size=sum(digest.size for digest in files.values()),
            files=files,
        )
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is not a commit record ({type(error).__name__})") from error


def _is_plain(name: str) -> bool:
    """Whether ``name`` stays inside the step's directory, whatever a forged record says."""
    return not name.startswith("/") and "\\" not in name and all(p not in ("", ".", "..") for p in name.split("/"))


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")
