"""Who trains in a checkpoint directory: at most one run at a time, and one that is dead holds up nobody.

`owner.json` names the process that trains there, and counts its heartbeats; `monsess.checkpoint.ownership` writes it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from datetime import datetime

from monsess.checkpoint.store import CheckpointStore
from monsess.errors import DirectoryInUseError
from monsess.log import logger
from monsess.process_name import ProcessName, is_alive, is_here, this_process
from monsess.storage import Storage

OWNER = "owner.json"
_PAUSES = (0.05, 0.1, 0.2, 0.3, 0.4)  # between looks at something that is not readable
#: set[str]: the attempts of this process that own a directory.
live_attempts: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Owner:
    """What owner.json says.

    Args:
        host: Name of the machine.
        boot_id: Of the machine's current start.
        pid_namespace: Where ``pid`` means this process.
        pid: Process id.
        start_time: Of the process, in clock ticks of the machine.
        run_id: Lineage, or None while it is not known.
        attempt: Which attempt of it.
        launch: What a launcher calls the job that the attempt belongs to, or None.
        beat: Counts heartbeats.
        interval: Seconds between two of them.
        restored_from: The step that the attempt began from, or None.
        since: Seconds since the epoch at which it took the directory, for people.
    """

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_time: str
    run_id: str | None
    attempt: str
    launch: str | None
    beat: int
    interval: float
    restored_from: int | None
    since: float

    @property
    def process(self) -> ProcessName:
        """The process that owns the directory."""
        return ProcessName(self.host, self.boot_id, self.pid_namespace, self.pid, self.start_time)

    @property
    def is_alive(self) -> bool | None:
        """Whether the owner is provably alive, or provably dead, as seen from this process; None if it cannot tell."""
        process = self.process
        if not is_here(process):
            return None
        if process == this_process():
            return self.attempt in live_attempts
        return is_alive(process)

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since).astimezone().isoformat(" ", "seconds")
        run = "" if self.run_id is None else f"run {self.run_id}, "
        return f"process {self.pid} on {self.host} ({run}attempt {self.attempt}, since {since})"


@dataclasses.dataclass(frozen=True)
class UnknownOwner:
    """An owner.json that cannot be decoded: somebody may be training there, and nobody can say who."""

    is_alive: None = None
    restored_from: None = None


def read_owner(store: CheckpointStore) -> Owner | None:
    """Who owns a checkpoint directory.

    Returns:
        None if nobody does, or, with a warning, if owner.json is not readable as such.

    Raises:
        StorageError: The store could not be read.
    """
    data = read(store._storage)
    owner = None if data is None else decode(data)
    if data is not None and owner is None:
        logger.warning("%s in %s is not valid; no checkpoint depends on it.", OWNER, store.url)
    return owner


def find_owner(store: CheckpointStore) -> Owner | UnknownOwner | None:
    """Who owns a checkpoint directory, as far as can be told; None if owner.json is proven absent.

    Raises:
        StorageError: The store could not be read.
    """
    owner, data = _look(store._storage)
    return UnknownOwner() if owner is None and data is not None else owner


def unlock(store: CheckpointStore, force: bool = False) -> Owner | UnknownOwner | None:
    """Take the ownership of a directory away from whoever has it.

    A run that is alive all the same goes on unless another one has begun meanwhile.

    Args:
        store: The directory.
        force: Even if the owner is provably alive.

    Returns:
        Who had it; None if nobody did.

    Raises:
        DirectoryInUseError: The owner is alive on this machine.
        StorageError: The store could not be read or written.
    """
    owner = find_owner(store)
    if isinstance(owner, Owner) and owner.is_alive and not force:
        raise DirectoryInUseError(
            f"{store.url} is not unlocked: {owner} is alive on this machine. End it (kill {owner.pid}), or, if you "
            "know better, unlock with force."
        )
    store._storage.delete(OWNER)
    return owner


def look(storage: Storage) -> Owner | None:
    """The owner; None if there is none, or nothing readable, and that for more than a moment.

    Where a kill may leave half an object, an object that is being written over is gone or incomplete for a moment.
    """
    return _look(storage)[0]


def _look(storage: Storage) -> tuple[Owner | None, bytes | None]:
    """The owner, and what the last look found."""
    data: bytes | None = None
    for pause in _PAUSES:
        data = read(storage)
        owner = None if data is None else decode(data)
        if owner is not None or (data is None and (pause is not _PAUSES[0] or not storage.keeps_halves)):
            return owner, data
        time.sleep(pause)
    return None, data


def read(storage: Storage) -> bytes | None:
    """The bytes of owner.json; None if it is proven absent."""
    try:
        return storage.read(OWNER)
    except FileNotFoundError:
        return None


def encode(owner: Owner) -> bytes:
    """The bytes of an owner.json."""
    return json.dumps({"format": 1, **dataclasses.asdict(owner)}, sort_keys=True).encode()


def decode(data: bytes) -> Owner | None:
    """The owner in ``data``; None if it is none, or half of one. What a later version adds is not looked at."""
    try:
        body = json.loads(data)
        owner = Owner(**{field.name: body[field.name] for field in dataclasses.fields(Owner)})
        texts = (owner.host, owner.boot_id, owner.pid_namespace, owner.start_time, owner.attempt, str(owner))
        sound = (
            all(isinstance(text, str) for text in texts)
            and isinstance(owner.pid, int)
            and isinstance(owner.beat, int)
            and owner.pid > 0
            and 0 < owner.interval < math.inf
        )
    except (ValueError, TypeError, KeyError, OverflowError, OSError, RecursionError):
        return None
    return owner if sound else None
