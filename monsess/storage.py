"""One directory of a store: every object by its literal name, one at a time, never from a cache.

Beside `monsess.filesystems` this is the only module that touches fsspec. Plain paths and ``file://`` go straight to
the operating system, which alone can replace a file atomically and force it to disk. Nothing here uses globbing,
recursive put, get or mv, fsspec transactions, or asks whether a directory exists.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Protocol, TypeVar, cast

from monsess.errors import StorageError
from monsess.filesystems import FsspecFiles, import_protocol, whole_or_nothing
from monsess.localfiles import Digest, Entry, LocalFiles, fsync_dir, pump
from monsess.log import logger, mask, secrets_of
from monsess.storage_advice import advice_for
from monsess.underway import is_underway, underway
from monsess.workers import StalledError, Workers, sign_of_life

T = TypeVar("T")

_LOCAL_SCHEMES = ("file://", "local://")
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
_PERMANENT: tuple[type[BaseException], ...] = (
    PermissionError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    ValueError,
    TypeError,
    AttributeError,
    NotImplementedError,
)
#: The store works and says no; a fresh filesystem object, which takes a second of CPU at S3, would say the same.
_ANSWERS = (FileExistsError, IsADirectoryError, NotADirectoryError, NotImplementedError)
#: Operations that change what lies under a name, whenever they come to their end.
_CHANGES = ("write", "delete", "rename")
#: The longest pause between two tries: a store that answers again is used soon, and one that does not is left in peace.
_MOST_BACKOFF_SECS = 5.0
_PERMANENT_ERRNO = {errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM}


class _Backend(Protocol):
    """Single-object operations below one root; ``rel`` uses ``/`` and is ``""`` for the root itself."""

    def ls(self, rel: str) -> list[Entry]: ...
    def size(self, rel: str) -> int | None: ...
    def read(self, rel: str) -> bytes: ...
    def write(self, rel: str, data: bytes) -> None: ...
    def open_read(self, rel: str) -> BinaryIO: ...
    def open_write(self, rel: str) -> BinaryIO: ...
    def copy(self, source: str, target: str) -> None: ...
    def rm(self, rel: str) -> None: ...
    def rmdir(self, rel: str) -> None: ...
    @property
    def keeps_halves(self) -> bool: ...
    @property
    def one_request_bytes(self) -> int: ...


class Storage:
    """The objects below ``url``, with retries, and with a limit on every wait.

    Every call runs in a daemon thread with a filesystem object of its own, so that a store which never answers holds
    nobody. Transient errors are tried again with a fresh filesystem object; permission errors and the like are not.

    Args:
        url: A local path or any fsspec URL; taken literally.
        options: Handed to the fsspec filesystem; never shown.
        tries: How often an operation is tried.
        backoff_secs: Wait before the second try, doubled for each further one.
        stall_secs: How long an operation may give no sign of life.
        workers: How many operations run at once.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        options: Mapping[str, Any] | None = None,
        *,
        tries: int = 4,
        backoff_secs: float = 0.5,
        stall_secs: float = 60.0,
        workers: int = 8,
    ) -> None:
        self.url = os.fspath(url)
        if not isinstance(self.url, str) or not self.url:
            raise ValueError(f"A checkpoint directory must be a path or a URL, found {self.url!r}.")
        if slip := _ONE_SLASH.match(self.url):
            raise ValueError(
                f"{mask(self.url)!r} looks like a URL with a slash missing: expected {slip[1]}://... "
                f"For a local folder of that name write './{slip[1]}:/...'."
            )
        self._options = dict(options or {})
        self._secrets = secrets_of(self.url, self._options)
        self._tries = tries
        self._backoff_secs = backoff_secs
        self._stall_secs = stall_secs
        self._workers = Workers(workers, "monsess-storage")
        weakref.finalize(self, self._workers.close).atexit = False
        self._own = threading.local()
        self._shared: Any = None  # a filesystem object for all threads, and what it is good for
        self._generation = 0
        self._has_worked = False
        self._patient_until = 0.0
        self._said_patient = True
        #: str | None: what failed last and was tried again, since `patience` began.
        self.trouble: str | None = None
        #: str | None: the absolute path, if the directory is on a local file system.
        self.local_path = _local_path(self.url)
        #: str: the URL as it may be shown to people.
        self.shown = mask(self.local_path or self.url)

    def require_protocol(self) -> None:
        """Make sure that there is a filesystem for the URL; the store is not asked.

        Raises:
            StorageError: There is none.
        """
        try:
            if self.local_path is None:
                import_protocol(self.url)
        except (ImportError, ValueError) as error:
            raise self._error("use", "", error) from self._cause(error)

    @contextlib.contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Inside the block, try again for so long what fails or hangs without saying that it always will.

        A store that is restarted, or that cannot be reached for minutes, is no reason to end a training run. It holds
        for all threads, and not for a local file system: what fails there does not come back.

        Args:
            seconds: From now on; at least as many tries as without it are made in any case.
        """
        if self.local_path is None:
            self._patient_until, self._said_patient = time.monotonic() + seconds, False
        self.trouble = None
        try:
            yield
        finally:
            self._patient_until = 0.0

    def list(self, rel: str = "") -> dict[str, Entry]:
        """List one directory, uncached.

        Returns:
            Entries by name.

        Raises:
            FileNotFoundError: Proven absent.
            StorageError: It could not be listed.
        """
        return self._do("list", rel, lambda backend: {entry.name: entry for entry in backend.ls(rel)})

    def read(self, rel: str) -> bytes:
        """Return a small object's bytes.

        Raises:
            FileNotFoundError: Proven absent.
            StorageError: It could not be read.
        """
        return self._do("read", rel, lambda backend: backend.read(rel))

    def size(self, rel: str) -> int | None:
        """The size of one object in bytes, asked for by its name; None if the store does not tell.

        A store whose listings lag behind what was written answers this at once.

        Raises:
            FileNotFoundError: Proven absent.
            StorageError: It could not be looked at.
        """
        return self._do("look at", rel, lambda backend: backend.size(rel))

    def write(self, rel: str, data: bytes) -> None:
        """Write a small object, on a local file system atomically and durably.

        Raises:
            StorageError: It could not be written.
        """
        self._do("write", rel, lambda backend: backend.write(rel, data), absent=False)

    def upload(self, rel: str, path: str) -> Digest:
        """Write the local file ``path`` to ``rel``, hashed on the way.

        Raises:
            StorageError: It could not be written.
        """

        def put(backend: _Backend) -> Digest:
            if os.path.getsize(path) <= backend.one_request_bytes:
                with open(path, "rb") as reader:
                    data = reader.read()
                backend.write(rel, data)
                return Digest(len(data), hashlib.sha256(data).hexdigest())
            with open(path, "rb") as reader, whole_or_nothing(backend.open_write(rel)) as writer:
                # One that was given up and goes on after all may hit what a later try has stored by then: it has to end
                # in the same bytes.
                return pump(reader, writer, may_end=False)

        return self._do("write", rel, put, absent=False)

    def download(self, rel: str, path: str | None) -> Digest:
        """Write ``rel`` to the local file ``path``, or nowhere, hashed on the way.

        Raises:
            FileNotFoundError: Proven absent.
            StorageError: It could not be read.
        """

        def get(backend: _Backend) -> Digest:
            with backend.open_read(rel) as reader:
                if path is None:
                    return pump(reader, None)
                sign_of_life()  # before it empties what a later try has written
                with open(path, "wb") as writer:
                    return pump(reader, writer)

        return self._do("read", rel, get)

    def copy(self, source: str, target: str) -> None:
        """Copy one object.

        Raises:
            StorageError: It could not be copied.
        """
        self._do("copy", source, lambda backend: backend.copy(source, target), absent=False)

    def delete(self, rel: str) -> None:
        """Delete one object; one that is already gone is no error.

        Raises:
            StorageError: It could not be deleted.
        """
        try:
            self._do("delete", rel, lambda backend: backend.rm(rel))
        except FileNotFoundError:
            pass

    def rename(self, source: str, target: str) -> None:
        """Rename a directory of a local file system, atomically and durably.

        Raises:
            StorageError: It could not be renamed.
        """
        path = self.local_path
        assert path is not None, "only a local file system can rename"

        def move(_: _Backend) -> None:
            os.rename(os.path.join(path, source), os.path.join(path, target))
            fsync_dir(path)

        self._do("rename", source, move, absent=False)

    def walk(self, rel: str) -> dict[str, int | None]:
        """All objects below ``rel``: names relative to it, with their sizes where the store tells them.

        Raises:
            FileNotFoundError: Proven absent.
            StorageError: It could not be listed.
        """
        found: dict[str, int | None] = {}
        pending = [""]
        while pending:
            listings = self.map([lambda d=d: self.list(f"{rel}/{d}" if rel and d else rel or d) for d in pending])
            below: list[str] = []
            for directory, listing in zip(pending, listings, strict=True):
                for entry in listing.values():
                    name = f"{directory}/{entry.name}" if directory else entry.name
                    if entry.is_dir:
                        below.append(name)
                    else:
                        found[name] = entry.size
            pending = below
        return found

    def delete_tree(self, rel: str, first: Sequence[str] = (), last: Sequence[str] = ()) -> None:
        """Delete all objects below ``rel``, those named ``first`` before and those named ``last`` after the others.

        Raises:
            StorageError: Something could not be deleted.
        """
        if self.local_path is not None and os.path.islink(os.path.join(self.local_path, rel)):
            self.delete(rel)
            return
        try:
            names = list(self.walk(rel))
        except FileNotFoundError:
            return
        for name in first:
            if name in names:
                self.delete(f"{rel}/{name}")
        self.map([lambda n=n: self.delete(f"{rel}/{n}") for n in names if n not in first and n not in last])
        for name in last:
            if name in names:
                self.delete(f"{rel}/{name}")
        self._remove_directories(rel)

    def map(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run operations in parallel; results in order, the first error raised.

        Raises:
            StorageError: One of them failed or never ended.
        """
        return self._unstalled("use", "", lambda: self._workers.map(functions, self._stall_secs))

    def is_changing(self, rel: str) -> bool:
        """Whether a write, a deletion or a renaming of ``rel`` or below, begun by this process, has not ended yet.

        Those that were given up and wait for the store for ever belong to them.
        """
        return is_underway(self._full(rel))

    @property
    def keeps_halves(self) -> bool:
        """Whether a kill may leave half of a small object, or an empty directory.

        Raises:
            StorageError: The filesystem could not be made.
        """
        return self._do("use", "", lambda backend: backend.keeps_halves)

    def _full(self, rel: str) -> str:
        return f"{self.shown.rstrip('/')}/{rel}".rstrip("/")

    def _remove_directories(self, rel: str) -> None:
        try:
            for entry in self.list(rel).values():
                if entry.is_dir:
                    self._remove_directories(f"{rel}/{entry.name}")
            self._do("delete", rel, lambda backend: backend.rmdir(rel))
        except (StorageError, FileNotFoundError):
            pass  # object stores have no directories; where there are some, an empty one disturbs nobody

    def _do(self, verb: str, rel: str, operation: Callable[[_Backend], T], absent: bool = True) -> T:
        def call() -> T:
            return self._workers.call(lambda: self._try(verb, rel, operation, absent), self._stall_secs)

        return self._unstalled(verb, rel, call)

    def _unstalled(self, verb: str, rel: str, call: Callable[[], T]) -> T:
        while True:
            try:
                return call()
            except StalledError as stalled:
                self._generation += 1
                if not self._is_patient(verb, rel, stalled):
                    raise self._error(verb, rel, stalled) from stalled

    def _try(self, verb: str, rel: str, operation: Callable[[_Backend], T], absent: bool) -> T:
        missing, renewed = 0, False
        for tried in itertools.count(1):
            sign_of_life()
            try:
                with underway(self._full(rel)) if verb in _CHANGES else contextlib.nullcontext():
                    result = operation(self._backend())
                self._has_worked = True
                return result
            except FileNotFoundError as error:
                if absent:
                    raise
                missing += 1  # a store that was restarted may not know the upload that had begun, but takes a new one
                if missing >= self._tries:
                    raise self._error(verb, rel, error) from self._cause(error)
                self._generation += 1
            except Exception as error:
                if not isinstance(error, _ANSWERS):
                    self._generation += 1  # the next try, in whatever thread, gets a fresh filesystem object
                if isinstance(error, StorageError):
                    raise
                refused = isinstance(error, PermissionError) and self._has_worked and self.local_path is None
                if refused and not renewed:
                    renewed = True
                    continue  # fresh credentials tell a real refusal from old ones that have run out
                if _is_permanent(error) or (tried >= self._tries and not self._is_patient(verb, rel, error)):
                    raise self._error(verb, rel, error) from self._cause(error)
                self.trouble = self._what(verb, rel, error)
            pause = min(self._backoff_secs * 2 ** min(tried - 1, 10), _MOST_BACKOFF_SECS)
            patience = self._patient_until - time.monotonic()
            time.sleep(min(pause, patience) if patience > 0 else pause)  # the last try is made before it ends
        raise AssertionError("unreachable")

    def _is_patient(self, verb: str, rel: str, error: BaseException) -> bool:
        left = self._patient_until - time.monotonic()
        if left > 0 and not self._said_patient:
            self._said_patient = True
            logger.warning("Could not %s; trying again, for %.0f s at most.", self._what(verb, rel, error), left)
        return left > 0

    def _backend(self) -> _Backend:
        made = getattr(self._own, "made", None)
        key = (self._generation, os.getpid())
        if made is None or made[0] != key:
            made = self._shared
        if made is None or made[0] != key:
            backend = (
                LocalFiles(self.local_path) if self.local_path is not None else FsspecFiles(self.url, self._options)
            )
            made = (key, backend)
            if isinstance(backend, FsspecFiles) and backend.for_all_threads:
                self._shared = made
            else:
                self._own.made = made
        return cast("_Backend", made[1])

    def _error(self, verb: str, rel: str, error: BaseException) -> StorageError:
        advice = advice_for(error, self.url, self.local_path is not None)
        return StorageError(f"Could not {self._what(verb, rel, error)}. {advice}")

    def _what(self, verb: str, rel: str, error: BaseException) -> str:
        """What could not be done, and why not."""
        if isinstance(error, ImportError) and isinstance(error.__cause__, ImportError):
            error = error.__cause__  # which module is missing; fsspec names the package, and the advice how to get it
        reason = mask(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, self._secrets)
        return f"{verb} {f'{rel!r} in ' if rel else ''}{self.shown} ({reason})"

    def _cause(self, error: BaseException) -> BaseException | None:
        """``error``, unless it or what led to it would show credentials in a traceback."""
        one: BaseException | None = error
        while one is not None:
            if str(one) != mask(str(one), self._secrets):
                return None
            one = one.__cause__ or one.__context__
        return error


def _local_path(url: str) -> str | None:
    for scheme in _LOCAL_SCHEMES:
        if url.startswith(scheme):
            return os.path.abspath(url[len(scheme) :] or "/")
    if "://" in url:
        return None
    return os.path.abspath(os.path.expanduser(url) if url.startswith("~") else url)


def _is_permanent(error: BaseException) -> bool:
    return isinstance(error, _PERMANENT) or (isinstance(error, OSError) and error.errno in _PERMANENT_ERRNO)
