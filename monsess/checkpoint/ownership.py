"""One attempt's hold on a checkpoint directory: taken before anything there is looked at, checked before every commit.

Nothing is asked of the store than to show what was written last, so that it works on every store: who begins writes the
token, waits a little, and reads it back; of several the last one to write goes on. How long "a little" is, is measured
by how long the store took to be written just before. Processes of one machine keep apart by a lock on the
local directory besides.

No store can stop a process that was frozen and comes back. Its token does: it is read back before every commit and at
every heartbeat, and whoever finds another one there commits nothing any more.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

from monsess import clock
from monsess.checkpoint.locking import DirectoryLock
from monsess.checkpoint.owner import OWNER, Owner, encode, live_attempts, look, read
from monsess.checkpoint.store import CheckpointStore
from monsess.errors import DirectoryInUseError, StorageError
from monsess.log import logger
from monsess.process_name import this_process

#: Environment variable by which a launcher names the job whose attempts follow one another.
LAUNCH_ID = "MONSESS_LAUNCH_ID"
#: Seconds between two heartbeats.
INTERVAL_SECS = 10.0
_BEATS = 3  # so many heartbeats missed, and an owner on another machine is taken for dead
_LONGEST_INTERVAL_SECS = 60.0  # whatever a token says
_DYING_SECS = 1.0  # what a process that was killed may need until it is gone
_SETTLE_SECS = (0.1, 5.0)
_RELEASE_SECS = 10.0
_LOOKS = 5
_STUCK_SECS = 5.0  # how long a heartbeat is waited for


class Ownership:
    """One attempt's hold on a checkpoint directory.

    Args:
        store: The directory.
        attempt: Name of this attempt.
        run_id: Lineage, if known already.
        launch: What a launcher calls the job; None to take it from ``MONSESS_LAUNCH_ID``.
        interval_secs: Seconds between two heartbeats; None for 10.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        attempt: str,
        run_id: str | None = None,
        launch: str | None = None,
        interval_secs: float | None = None,
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._launch = launch if launch is not None else os.environ.get(LAUNCH_ID) or None
        self._interval = INTERVAL_SECS if interval_secs is None else interval_secs
        self._about: dict[str, Any] = {"run_id": run_id, "restored_from": None}
        self._token: Owner | None = None
        self._lost: str | None = None
        self._settled = 0.0  # monotonic: from when on what is read back decides
        self._confirmed = False
        self._made_directory = False
        self._warned = False
        self._lock = threading.Lock()  # held while this process writes the token: what is read then is whole
        self._stop = threading.Event()
        self._wake = threading.Event()  # a heartbeat is due before its time

    def acquire(self) -> None:
        """Own the directory, at once if nobody does or its owner is dead; call it before anything there is looked at.

        An owner on another machine is watched for three heartbeats. If two begin at the same moment, `check` tells
        which of them goes on.

        Raises:
            DirectoryInUseError: A run that is alive owns it.
            StorageError: The store could not be read or written; the directory is not owned then.
        """
        if self._token is not None:
            return
        dead: Owner | None = None  # one that was watched in vain
        while True:
            with DirectoryLock(self._store._storage) as lock:
                self._made_directory |= lock.made
                owner = look(self._store._storage)
                if owner is None or owner == dead or self._may_replace(owner):
                    self._take(owner, alone=lock.held)
                    return
            dead = self._await_end(owner) if owner.is_alive else self._watch(owner)

    def note(self, *, run_id: str, restored_from: int | None) -> None:
        """Say more about this attempt; it is written at once, by the thread of the heartbeats."""
        about = {"run_id": run_id, "restored_from": restored_from}
        if about != self._about:
            self._about = about
            self._wake.set()

    def check(self) -> None:
        """Make sure that the directory is still owned, by reading the token back; call it before every commit.

        Raises:
            DirectoryInUseError: Another run has taken it over, or it was released.
            StorageError: The store could not be read.
        """
        for _ in range(_LOOKS):
            self.raise_if_lost()
            if self._token is None:
                raise DirectoryInUseError(f"{self._store.url} is not owned by this session any more.")
            time.sleep(max(0.0, self._settled - time.monotonic()))
            with self._quiet():
                if self._is_ours(self._store):
                    self._confirmed = True
                    return
        raise StorageError(f"{self._store.url} does not show the {OWNER} that was written. Check the store.")

    def raise_if_lost(self) -> None:
        """Raise what a heartbeat found out; nothing is read or waited for.

        Raises:
            DirectoryInUseError: Another run has taken the directory over.
        """
        if self._lost is not None:
            raise DirectoryInUseError(self._lost)

    def release(self) -> None:
        """Give the directory back; takes a few seconds at most and never raises."""
        token, self._token = self._token, None
        self._stop.set()
        self._wake.set()
        if token is None or token.pid != os.getpid():  # after a fork the parent owns it
            return
        if self._lost is None:
            self._try_to_delete()
        live_attempts.discard(self._attempt)

    def _may_replace(self, owner: Owner) -> bool:
        alive = owner.is_alive
        return alive is False or (alive is None and owner.launch is not None and owner.launch == self._launch)

    def _await_end(self, owner: Owner) -> None:
        """Give a process of this machine that is just being killed, or ends, a moment to be gone."""
        if owner.process == this_process():
            gc.collect()  # a session that nobody closed and nobody holds any more
            if owner.is_alive:
                raise _in_use(self._store.url, owner, "a session of this process. Close it first, best by using `with`")
        deadline = time.monotonic() + _DYING_SECS
        while owner.is_alive:
            if time.monotonic() > deadline:
                raise _in_use(
                    self._store.url,
                    owner,
                    "alive on this machine. Wait for its end, end it, or use another checkpoint_dir. If the directory "
                    f"is a copy of the one that this process trains in: `monsess unlock --force {self._store.url}`",
                )
            time.sleep(_DYING_SECS / 20)

    def _watch(self, owner: Owner) -> Owner | None:
        """Watch an owner that is somewhere else; returns it if it is dead, None if it has let go."""
        interval = min(owner.interval, _LONGEST_INTERVAL_SECS)
        deadline = time.monotonic() + _BEATS * interval
        logger.info(
            "%s belongs to %s. Waiting %g s for a heartbeat of it; if it is dead, `monsess unlock %s` saves the wait.",
            self._store.url,
            owner,
            _BEATS * interval,
            self._store.url,
        )
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, interval / 2))
            found = look(self._store._storage)
            if found is None:
                return None
            if found != owner:
                raise _in_use(
                    self._store.url,
                    found,
                    "alive: its heartbeat was seen. Wait for its end, end it, or use another checkpoint_dir",
                )
        return owner

    def _take(self, before: Owner | None, alone: bool) -> None:
        token = Owner(
            **dataclasses.asdict(this_process()),
            **self._about,
            attempt=self._attempt,
            launch=self._launch,
            beat=0,
            interval=self._interval,
            since=round(clock.wall(), 3),
        )
        live_attempts.add(self._attempt)
        begun = time.monotonic()
        try:
            self._store._storage.write(OWNER, encode(token))
        except BaseException:
            live_attempts.discard(self._attempt)
            raise
        written = time.monotonic()
        self._settled = written if alone else written + _settle_secs(written - begun)
        self._token = token
        self._stop, self._wake = threading.Event(), threading.Event()
        weakref.finalize(self, _forget, self._attempt, self._stop, self._wake).atexit = False
        _held.add(self)
        beats = threading.Thread(
            target=_beat,
            args=(weakref.ref(self), self._stop, self._wake, self._interval),
            name="monsess-heartbeat",
            daemon=True,
        )
        beats.start()
        if before is not None:
            logger.info("took %s over from %s, which is gone", self._store.url, before)

    def _is_ours(self, store: CheckpointStore) -> bool:
        """Whether the token in the store is this attempt's; False if that has to be looked at again.

        Raises:
            DirectoryInUseError: Another run has taken the directory over.
        """
        owner = look(store._storage)
        if owner is not None and owner.attempt == self._attempt:
            return True
        if owner is None and self._is_nobodys(store):
            time.sleep(random.uniform(0, _SETTLE_SECS[0]))
            owner, token = look(store._storage), self._token
            if owner is None and token is not None:
                logger.warning("%s in %s was gone or not valid and is written anew.", OWNER, store.url)
                store._storage.write(OWNER, encode(token))
                self._settled = time.monotonic() + _SETTLE_SECS[0]
            return False
        self._lost = self._why_lost(owner)
        raise DirectoryInUseError(self._lost)

    def _is_nobodys(self, store: CheckpointStore) -> bool:
        """Whether the token is gone for another reason than that another run has taken the directory over.

        Somebody may have unlocked the directory, or a heartbeat failed half-way. run.json, which an attempt writes
        before its first save, tells whether another one has begun since. Before that, two that began at the same moment
        may have written into one another's token.
        """
        if not self._confirmed and read(store._storage) is not None:
            return True
        return (store.read_run() or {}).get("last_attempt") == self._attempt

    def _why_lost(self, owner: Owner | None) -> str:
        if owner is not None and not self._confirmed:
            return f"{self._store.url} belongs to another run: {owner} began at the same moment and went first."
        who = "It was unlocked, and another run may have come and gone" if owner is None else f"It belongs to {owner}"
        return (
            f"{self._store.url} was taken away from this run (attempt {self._attempt}), which commits nothing "
            f"any more. {who}. Start again when no other run is going on there."
        )

    def _beat(self, store: CheckpointStore) -> bool:
        """One heartbeat; False if there are to be no further ones."""
        try:
            with self._lock:
                token = self._token
                if token is None or self._stop.is_set():
                    return False
                if self._is_ours(store):
                    token = dataclasses.replace(token, beat=token.beat + 1, **self._about)
                    store._storage.write(OWNER, encode(token))
                    self._token = token
        except DirectoryInUseError as error:
            logger.error("%s", error)
            return False
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning("A heartbeat failed; training goes on and later ones are tried: %s", error)
        return True

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """While no heartbeat is on its way; one that is stuck is not waited for for ever."""
        got = self._lock.acquire(timeout=_STUCK_SECS)
        try:
            yield
        finally:
            if got:
                self._lock.release()

    def _try_to_delete(self) -> None:
        deleted: list[bool] = []
        try:
            thread = threading.Thread(target=self._delete, args=(deleted,), name="monsess-release", daemon=True)
            thread.start()
            thread.join(_RELEASE_SECS)
        except RuntimeError:
            pass  # the interpreter is ending and starts no thread any more
        if not deleted:
            logger.warning(
                "%s in %s could not be removed. The next run on this machine takes the directory over at once, one on "
                "another machine after %g s, or after `monsess unlock`.",
                OWNER,
                self._store.url,
                _BEATS * self._interval,
            )

    def _delete(self, deleted: list[bool]) -> None:
        storage = self._store._storage
        if not self._lock.acquire(timeout=_STUCK_SECS):
            return  # a heartbeat is stuck: it might write the token anew
        try:
            owner = look(storage)
            if owner is not None and owner.attempt == self._attempt:
                storage.delete(OWNER)
            if self._made_directory and storage.local_path is not None:
                with contextlib.suppress(OSError):
                    os.rmdir(storage.local_path)  # only if nothing came of it
            deleted.append(True)
        except Exception as error:
            logger.debug("%s in %s: %s", OWNER, self._store.url, error)
        finally:
            self._lock.release()


_held: weakref.WeakSet[Ownership] = weakref.WeakSet()


@atexit.register
def _release_all() -> None:
    """For sessions that nobody closed; after what the session module does for them, which registers later."""
    for ownership in list(_held):
        ownership.release()


def _forget(attempt: str, stop: threading.Event, wake: threading.Event) -> None:
    """What is left to do for an ownership that nobody holds any more; no store is asked."""
    stop.set()
    wake.set()
    live_attempts.discard(attempt)


def _beat(reference: weakref.ref[Ownership], stop: threading.Event, wake: threading.Event, interval: float) -> None:
    """The heartbeats, through a storage object of their own: an upload that is stuck does not stop them."""
    store: CheckpointStore | None = None
    while True:
        wake.wait(interval)
        wake.clear()
        ownership = None if stop.is_set() else reference()
        if ownership is None:
            return
        if store is None:
            storage = ownership._store._storage
            store = CheckpointStore(storage.url, storage._options)
        if not ownership._beat(store):
            return
        del ownership


def _settle_secs(spent: float) -> float:
    """How long to wait until another one that began at the same moment has written its token, too.

    Writing took ``spent``, and looking about as long. One that needs four times that from its look to its token goes
    unnoticed until the next heartbeat or commit.
    """
    least, most = _SETTLE_SECS
    return min(max(least, 8 * spent), most)


def _in_use(url: str, owner: Owner, how: str) -> DirectoryInUseError:
    return DirectoryInUseError(f"{url} belongs to another run: {owner} is {how}.")
