"""What goes wrong in a store, and when: the script that a faulty filesystem plays."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

from monsess.faulty.operations import Operation, Rule, Running

Kind: TypeAlias = Literal["list", "info", "read", "write", "delete", "rename", "copy", "mkdir", "any"]
When: TypeAlias = Literal["before", "middle", "after"]
#: What can be raised: an exception, its class, or something that makes one.
Raisable: TypeAlias = "BaseException | Callable[[], BaseException]"

KINDS: tuple[str, ...] = get_args(Kind)
_WHEN: tuple[str, ...] = get_args(When)


class Faults:
    """What a `FaultyFileSystem` cannot do, and what goes wrong in it at which operation.

    Given as ``storage_options={"faults": faults}``; all filesystem objects that get the same one share it. A fault
    is told by the kind of an operation (``"list"``, ``"info"``, ``"read"``, ``"write"``, ``"delete"``, ``"rename"``,
    ``"copy"``, ``"mkdir"``, or ``"any"`` of them) and its number: ``n=1`` is the next one of that kind from now on,
    counted over all threads and filesystem objects, of those whose path contains the text ``path``, if that is given.
    It hits ``times`` operations in a row, for ever with ``times=None``. Several faults may wait at once and meet the
    same operation; the one that was added first comes first. May be used from several threads.

    ``when`` says at which point of the operation it happens: ``"before"`` anything was done; in the ``"middle"``, when
    half of the bytes of a write, copy or read are over (other kinds: as ``"before"``); or ``"after"`` it was done,
    so that only the answer is missing.

    Args:
        rename: The store can rename objects.
        directories: The store has real directories: they have to be made before anything is written into them, and
            stay when they are empty. Otherwise it knows objects only, as S3 does, and a prefix is listed as long as
            an object lies below it.
        append: The store can append to an object.
        overwrite: The store lets an object be replaced; otherwise that is a FileExistsError.
        exclusive_create: The store holds "only if it does not exist" (``mode="xb"``); otherwise it ignores it.
        atomic: An object appears when it is whole, as with S3; otherwise it is seen to grow, as over SFTP, and what
            was cut off in the middle leaves half of it.
        stale_listing_secs: How long a listing does not show what was written or deleted.
        slow_delete_secs: How long every delete takes.

    Example:
        >>> import monsess as ms
        >>> faults = ms.testing.Faults()
        >>> faults.fail("write", n=2, error=PermissionError("no"))
        >>> store = ms.testing.FaultyFileSystem(faults=faults)
        >>> store.pipe_file("docs/a", b"1")
        >>> store.pipe_file("docs/b", b"2")
        Traceback (most recent call last):
            ...
        PermissionError: no
        >>> [(operation.path, operation.outcome) for operation in faults.log]
        [('docs/a', 'done'), ('docs/b', 'PermissionError')]
    """

    def __init__(
        self,
        *,
        rename: bool = False,
        directories: bool = False,
        append: bool = False,
        overwrite: bool = True,
        exclusive_create: bool = True,
        atomic: bool = False,
        stale_listing_secs: float = 0.0,
        slow_delete_secs: float = 0.0,
    ) -> None:
        self.rename = rename
        self.directories = directories
        self.append = append
        self.overwrite = overwrite
        self.exclusive_create = exclusive_create
        self.atomic = atomic
        self.stale_listing_secs = stale_listing_secs
        self.slow_delete_secs = slow_delete_secs
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._rules: list[Rule] = []
        self._log: list[Operation] = []
        self._instances = 0
        self._expired = 0  # the newest instance whose credentials have expired
        self._expire_error: Raisable | None = None
        self._released = threading.Event()
        self._blocked = 0
        self._changes: dict[str, list[tuple[float, int | None]]] = {}  # by path: when, and its size before that

    def fail(
        self,
        kind: Kind,
        n: int = 1,
        *,
        times: int | None = 1,
        error: Raisable | None = None,
        path: str | None = None,
        when: When = "before",
    ) -> None:
        """Have operations raise an error.

        Args:
            kind: Which kind.
            n: The first one that is hit, 1 for the next.
            times: How many in a row; None for all from there on.
            error: What is raised: an exception, or a class or function that gives one; an OSError if left out.
            path: Only operations whose path contains this text, literally.
            when: ``"after"`` raises although the operation was carried out; ``"middle"`` when half was.

        Raises:
            ValueError: There is no such kind, or a number is out of range.
        """

        def effect() -> None:
            raise _made(error or OSError(errno.EIO, "the store failed, as it was told to"))

        self._add(Rule(kind, path, n, times, when, effect))

    def kill(self, kind: Kind, n: int = 1, *, path: str | None = None, when: When = "before") -> None:
        """Have this process end by SIGKILL at an operation.

        Args:
            kind: Which kind.
            n: Which one, 1 for the next.
            path: Only operations whose path contains this text, literally.
            when: Before, in the middle of, or after it.

        Raises:
            ValueError: There is no such kind, or a number is out of range.
        """
        self._add(Rule(kind, path, n, 1, when, lambda: os.kill(os.getpid(), signal.SIGKILL)))

    def delay(
        self, kind: Kind, n: int = 1, seconds: float = 1.0, *, times: int | None = 1, path: str | None = None
    ) -> None:
        """Have operations take longer.

        Args:
            kind: Which kind.
            n: The first one that is hit, 1 for the next.
            seconds: How long it waits before it does anything.
            times: How many in a row; None for all from there on.
            path: Only operations whose path contains this text, literally.

        Raises:
            ValueError: There is no such kind, or a number is out of range.
        """
        self._add(Rule(kind, path, n, times, "before", lambda: time.sleep(seconds)))

    def block(
        self, kind: Kind, n: int = 1, *, times: int | None = 1, path: str | None = None, when: When = "before"
    ) -> None:
        """Have operations wait until `release` or `heal` is called, if need be for ever.

        Args:
            kind: Which kind.
            n: The first one that is hit, 1 for the next.
            times: How many in a row; None for all from there on.
            path: Only operations whose path contains this text, literally.
            when: Before, in the middle of, or after it.

        Raises:
            ValueError: There is no such kind, or a number is out of range.
        """
        with self._lock:
            if self._released.is_set():
                self._released = threading.Event()
            released = self._released
        self._add(Rule(kind, path, n, times, when, lambda: self._wait(released)))

    def truncate(
        self, kind: Kind, n: int = 1, keep_bytes: int = 0, *, times: int | None = 1, path: str | None = None
    ) -> None:
        """Have writes store, or reads hand out, only the first bytes of an object, without an error.

        Args:
            kind: ``"write"`` or ``"read"``.
            n: The first one that is hit, 1 for the next.
            keep_bytes: How many bytes arrive.
            times: How many in a row; None for all from there on.
            path: Only operations whose path contains this text, literally.

        Raises:
            ValueError: There is no such kind, or a number is out of range.
        """
        self._add(Rule(_of_bytes(kind), path, n, times, "", keep=lambda data: data[:keep_bytes]))

    def corrupt(self, kind: Kind, n: int = 1, *, times: int | None = 1, path: str | None = None) -> None:
        """Have writes store, or reads hand out, an object with one bit of its last byte turned, without an error.

        Args:
            kind: ``"write"`` or ``"read"``.
            n: The first one that is hit, 1 for the next.
            times: How many in a row; None for all from there on.
            path: Only operations whose path contains this text, literally.

        Raises:
            ValueError: There is no such kind, or a number is out of range.
        """
        self._add(Rule(_of_bytes(kind), path, n, times, "", keep=_one_bit_turned))

    def short_write(self, n: int = 1, *, times: int | None = 1, path: str | None = None) -> None:
        """Have ``file.write(data)`` take half of the data and return how much that was, as a raw file may.

        Args:
            n: The first write that is hit, 1 for the next; only its first piece is cut.
            times: How many in a row; None for all from there on.
            path: Only operations whose path contains this text, literally.

        Raises:
            ValueError: A number is out of range.
        """
        self._add(Rule("write", path, n, times, "", short=True))

    def lose(self, kind: Kind, n: int = 1, *, times: int | None = 1, path: str | None = None) -> None:
        """Have writes, copies or deletes answer as if all were well, and do nothing.

        Args:
            kind: Which kind.
            n: The first one that is hit, 1 for the next.
            times: How many in a row; None for all from there on.
            path: Only operations whose path contains this text, literally.

        Raises:
            ValueError: There is no such kind, or a number is out of range.
        """
        if kind not in ("write", "copy", "delete"):
            raise ValueError(f"Only a write, a copy or a delete can be lost, found {kind!r}.")
        self._add(Rule(kind, path, n, times, "", lose=True))

    def expire_credentials(self, after: int = 0, *, error: Raisable | None = None) -> None:
        """Have every operation of the filesystem objects that exist then fail; one made later works.

        Args:
            after: How many operations still succeed.
            error: What is raised: an exception, or a class or function that gives one; a PermissionError, as with
                S3, if left out.

        Raises:
            ValueError: ``after`` is negative.
        """
        if after < 0:
            raise ValueError(f"expire_credentials needs a number of operations from 0 on, found after={after}.")

        def effect() -> None:
            with self._lock:
                self._expired = self._instances
                self._expire_error = error
            raise self._expired_error()

        self._add(Rule("any", None, after + 1, 1, "before", effect))

    def heal(self) -> None:
        """Take all faults away and let go what is blocked; what the store cannot do stays as it is."""
        with self._lock:
            self._rules.clear()
            self._expired = 0
        self.release()

    def release(self) -> None:
        """Let blocked operations go on; faults by `block` no longer count."""
        with self._lock:
            self._released.set()

    def wait_until_blocked(self, count: int = 1, timeout_secs: float = 60.0) -> bool:
        """Wait until ``count`` operations are blocked at the same time.

        Args:
            count: How many.
            timeout_secs: Seconds to wait at most.

        Returns:
            Whether that many were.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._blocked >= count, timeout_secs)

    @property
    def log(self) -> list[Operation]:
        """All operations so far, a copy, in the order in which they began."""
        with self._lock:
            return list(self._log)

    def __repr__(self) -> str:
        return f"<monsess.testing.Faults at {id(self):#x}>"  # fsspec tells filesystem objects apart by it

    def _join(self) -> int:
        """Number a new filesystem object."""
        with self._lock:
            self._instances += 1
            return self._instances

    def _begin(self, kind: str, path: str, instance: int) -> Running:
        """Note an operation down and apply what comes before it."""
        with self._lock:
            operation = Operation(len(self._log) + 1, kind, path, "running", instance)
            self._log.append(operation)
            running = Running(operation, [rule for rule in self._rules if rule.meets(kind, path)], self._ended)
            expired = instance <= self._expired
        if expired:
            error = self._expired_error()
            running.failed(error)
            raise error
        running.meet("before")
        if kind not in ("write", "copy", "read"):
            running.meet("middle")
        return running

    def _ended(self, number: int, outcome: str) -> None:
        with self._lock:
            self._log[number - 1] = dataclasses.replace(self._log[number - 1], outcome=outcome)

    def _add(self, rule: Rule) -> None:
        if rule.kind not in KINDS:
            raise ValueError(f"There is no kind of operation {rule.kind!r}; there are {', '.join(KINDS)}.")
        if rule.n < 1 or (rule.times is not None and rule.times < 1):
            raise ValueError(f"Operations are counted from 1 on, found n={rule.n}, times={rule.times}.")
        if rule.when and rule.when not in _WHEN:
            raise ValueError(f"A fault happens before, in the middle of or after an operation, found {rule.when!r}.")
        with self._lock:
            self._rules.append(rule)

    def _wait(self, released: threading.Event) -> None:
        with self._changed:
            self._blocked += 1
            self._changed.notify_all()
        released.wait()
        with self._changed:
            self._blocked -= 1

    def _expired_error(self) -> BaseException:
        return _made(self._expire_error or PermissionError(errno.EACCES, "The provided token has expired."))

    def _note_change(self, path: str, size_before: int | None) -> None:
        """Remember what a path was before it was written or deleted: an object of this size, or not there."""
        if self.stale_listing_secs > 0:
            with self._lock:
                self._changes.setdefault(path, []).append((time.monotonic(), size_before))

    def _as_listed(self, folder: str) -> dict[str, int | None]:
        """What a listing of ``folder`` shows otherwise than it is: a size, or None for "not there", by path."""
        limit = time.monotonic() - self.stale_listing_secs
        shown: dict[str, int | None] = {}
        with self._lock:
            for path, changes in list(self._changes.items()):
                self._changes[path] = recent = [change for change in changes if change[0] > limit]
                if not recent:
                    del self._changes[path]
                elif path.startswith(f"{folder}/"):
                    shown[path] = recent[0][1]
        return shown


def _made(error: Raisable) -> BaseException:
    return error if isinstance(error, BaseException) else error()


def _one_bit_turned(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1]) if data else data


def _of_bytes(kind: str) -> str:
    if kind not in ("write", "read"):
        raise ValueError(f"Only what is written or read can be changed, found {kind!r}.")
    return kind
