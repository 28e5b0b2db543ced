"""Threads that end together: one asks for a stop, all stop, and the first error is raised where they are joined."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeAlias, final

from monsess.errors import EndOfData
from monsess.log import logger

#: What `sys.exc_info` returns.
ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

# A thread that ends by itself wakes nobody, so `join` looks; a stop wakes it at once.
_FIRST_LOOK_SECS = 0.001
_LONGEST_LOOK_SECS = 0.05


@final
class Coordinator:
    """Makes a group of threads end together and carries their first error to where they are joined.

    Any thread may ask for a stop; all waits end at once then. Time limits are seconds of real time.

    Args:
        clean_stop_exception_types: Errors of these types and their subclasses stop the threads without being raised
            by `join`; None means ``(EndOfData,)``.

    Raises:
        TypeError: ``clean_stop_exception_types`` holds something that is no exception type.

    Example:
        >>> import threading
        >>> import monsess as ms
        >>> coord = ms.Coordinator()
        >>> def work():
        ...     with coord.stop_on_exception():
        ...         raise ValueError("the disk is full")
        >>> thread = threading.Thread(target=work)
        >>> coord.register_thread(thread)
        >>> thread.start()
        >>> coord.wait_for_stop(timeout=5)
        True
        >>> coord.join()
        Traceback (most recent call last):
        ValueError: the disk is full
    """

    def __init__(self, clean_stop_exception_types: Iterable[type[BaseException]] | None = None) -> None:
        clean = (EndOfData,) if clean_stop_exception_types is None else tuple(clean_stop_exception_types)
        for kind in clean:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise TypeError(f"clean_stop_exception_types must hold exception types, found {kind!r}.")
        self._clean_types = clean
        self._lock = threading.RLock()  # re-entrant: a signal handler may ask for a stop at any point
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._joined = False
        self._registered: dict[threading.Thread, None] = {}

    def request_stop(self, ex: BaseException | ExcInfo | None = None) -> None:
        """Ask all threads to stop, and report an error if there is one.

        The first error is kept, whether or not a stop was asked for before it; later ones are only logged. After
        `join` nobody would raise it any more, so it is raised here.

        Args:
            ex: None, an exception object, raised before or not, or the tuple of `sys.exc_info`.

        Raises:
            BaseException: ``ex``, if the threads have been joined already.
            TypeError: ``ex`` is something else. The threads are stopped all the same, and `join` raises it too.
        """
        wrong: TypeError | None = None
        error: BaseException | None
        try:
            error = _as_exception(ex)
        except TypeError as found:
            error = wrong = found
        with self._lock:
            if error is not None and isinstance(error, self._clean_types):
                error = None
            late = error is not None and self._joined
            if error is not None and not late:
                self._keep(error)
            self._stop.set()
        if wrong is not None:
            raise wrong
        if late and error is not None:
            raise error

    def should_stop(self) -> bool:
        """Whether a stop has been asked for."""
        return self._stop.is_set()

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Wait until a stop is asked for.

        Args:
            timeout: Seconds to wait at most; None waits without limit.

        Returns:
            Whether a stop has been asked for.
        """
        return self._stop.wait(None if timeout is None else _bounded(timeout))

    def clear_stop(self) -> None:
        """Forget stop, error and `join`, so that the coordinator serves another round of threads."""
        with self._lock:
            self._joined = False
            self._error = self._traceback = None
            self._stop.clear()

    @contextmanager
    def stop_on_exception(self) -> Generator[None, None, None]:
        """Report whatever the block raises, `KeyboardInterrupt` included, instead of letting it out.

        Example:
            >>> import monsess as ms
            >>> coord = ms.Coordinator()
            >>> with coord.stop_on_exception():
            ...     raise ms.EndOfData
            >>> coord.should_stop()
            True
        """
        try:
            yield
        except BaseException as error:
            self.request_stop(error)

    def register_thread(self, thread: threading.Thread) -> None:
        """Let `join` wait for ``thread``; registering it again changes nothing.

        Args:
            thread: Any thread, started or not; one that is never started does not hold `join` up.
        """
        with self._lock:
            self._registered[thread] = None

    def join(
        self,
        threads: Iterable[threading.Thread] | None = None,
        stop_grace_period_secs: float = 120,
        ignore_live_threads: bool = False,
    ) -> tuple[str, ...]:
        """Wait for the registered threads and ``threads``: without limit before a stop, for a grace period after it.

        Threads that outlive the grace period are named in a warning, whatever else happens.

        Args:
            threads: Further threads to wait for.
            stop_grace_period_secs: Seconds from the stop, or from this call if that is later; 0 or less: no wait.
            ignore_live_threads: Threads that outlive the grace period are not an error.

        Returns:
            The names of the threads that still run.

        Raises:
            BaseException: The first reported error, with its own traceback; again at each call.
            RuntimeError: Threads outlived the grace period and ``ignore_live_threads`` is False.
        """
        with self._lock:
            wanted = dict(self._registered)
        wanted.update(dict.fromkeys(threads or ()))
        wanted.pop(threading.current_thread(), None)

        look = _FIRST_LOOK_SECS
        while not self._stop.is_set() and any(thread.is_alive() for thread in wanted):
            self._stop.wait(look)
            look = min(2 * look, _LONGEST_LOOK_SECS)

        deadline = time.monotonic() + stop_grace_period_secs
        for thread in wanted:
            if thread.is_alive():
                thread.join(_bounded(deadline - time.monotonic()))
        stragglers = tuple(thread.name for thread in wanted if thread.is_alive())
        with self._lock:
            self._joined = True
            self._registered.clear()
        if stragglers:
            logger.warning(
                "%d thread(s) still running %g s after the stop: %s. They may hold files, locks or devices.",
                len(stragglers),
                max(stop_grace_period_secs, 0.0),
                ", ".join(stragglers),
            )
        self.raise_requested_exception()
        if stragglers and not ignore_live_threads:
            raise RuntimeError(f"Coordinator stopped with threads still running: {' '.join(stragglers)}")
        return stragglers

    @property
    def joined(self) -> bool:
        """Whether `join` has ended since the start or the last `clear_stop`."""
        return self._joined

    @property
    def requested_exception(self) -> BaseException | None:
        """The first reported error, not raised; None if there is none."""
        return self._error

    def raise_requested_exception(self) -> None:
        """Raise the first reported error; do nothing if there is none.

        Raises:
            BaseException: That error, with the traceback that it was reported with.
        """
        with self._lock:
            error, traceback = self._error, self._traceback
        if error is not None:
            raise error.with_traceback(traceback)

    def _keep(self, error: BaseException) -> None:
        if self._error is None:
            self._error, self._traceback = error, error.__traceback__
            logger.info("Error reported to Coordinator: %s: %s", type(error).__name__, error)
        elif error is not self._error:
            logger.warning(
                "A further error after the one that stopped the threads (%s): %s: %s",
                type(self._error).__name__,
                type(error).__name__,
                error,
            )


class LooperThread(threading.Thread):
    """A daemon thread that repeats a call until its coordinator stops.

    The first call comes at once. The others are due at fixed multiples of the interval after it, so that delays do
    not add up: a call that took too long is followed by the next one without a pause. An error goes to the
    coordinator. A subclass may override `start_loop`, `run_loop` and `stop_loop`.

    Args:
        coord: The coordinator; the thread registers itself with it.
        timer_interval_secs: Seconds between two calls; None or 0: no pause.
        target: What to call; None if `run_loop` is overridden.
        args: Positional arguments of ``target``.
        kwargs: Keyword arguments of ``target``.

    Raises:
        ValueError: ``coord`` is no `Coordinator`, the interval is negative or no number, or there are arguments
            without a ``target``.

    Example:
        >>> import monsess as ms
        >>> coord, calls = ms.Coordinator(), []
        >>> def work():
        ...     calls.append(len(calls))
        ...     if len(calls) == 3:
        ...         coord.request_stop()
        >>> looper = ms.LooperThread.loop(coord, 0.001, work)
        >>> coord.join()
        ()
        >>> calls
        [0, 1, 2]
    """

    def __init__(
        self,
        coord: Coordinator,
        timer_interval_secs: float | None,
        target: Callable[..., Any] | None = None,
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(coord, Coordinator):
            raise ValueError(f"'coord' argument must be a Coordinator: {coord!r}")
        if timer_interval_secs is not None:
            number = isinstance(timer_interval_secs, (int, float)) and not isinstance(timer_interval_secs, bool)
            if not number or not timer_interval_secs >= 0:
                raise ValueError(f"invalid timer_interval_secs={timer_interval_secs!r}: expected None, 0 or seconds.")
        if target is None and (args or kwargs):
            raise ValueError("'args' and 'kwargs' arguments require that you also pass 'target'")
        called = type(self).__qualname__ if target is None else getattr(target, "__qualname__", repr(target))
        super().__init__(name=f"looper-{called}", daemon=True)
        self._coord = coord
        self._interval = timer_interval_secs
        self._call = target
        self._call_args = tuple(args or ())
        self._call_kwargs = dict(kwargs or {})
        coord.register_thread(self)

    @staticmethod
    def loop(
        coord: Coordinator,
        timer_interval_secs: float | None,
        target: Callable[..., Any],
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> LooperThread:
        """Start a thread that repeats ``target(*args, **kwargs)``.

        Args:
            coord: As in the constructor, like the rest.
            timer_interval_secs: Seconds between two calls.
            target: What to call.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            The started thread.
        """
        looper = LooperThread(coord, timer_interval_secs, target=target, args=args, kwargs=kwargs)
        looper.start()
        return looper

    def run(self) -> None:
        """The thread's body: `start_loop`, then `run_loop` until the stop, then `stop_loop`."""
        with self._coord.stop_on_exception():
            self.start_loop()
            if not self._interval:
                while not self._coord.should_stop():
                    self.run_loop()
            else:
                due = time.monotonic()
                while not self._coord.wait_for_stop(due - time.monotonic()):
                    due += self._interval
                    self.run_loop()
            self.stop_loop()

    def start_loop(self) -> None:
        """Called once in the thread before the first `run_loop`."""

    def stop_loop(self) -> None:
        """Called once in the thread after the stop, unless `start_loop` or `run_loop` raised."""

    def run_loop(self) -> None:
        """One round; calls ``target``."""
        if self._call is not None:
            self._call(*self._call_args, **self._call_kwargs)


def _bounded(seconds: float) -> float:
    """``seconds`` within what the threading module takes."""
    return min(max(seconds, 0.0), threading.TIMEOUT_MAX)


def _as_exception(ex: Any) -> BaseException | None:
    """The exception object in whatever `Coordinator.request_stop` was given.

    Raises:
        TypeError: It is neither None, nor an exception object, nor the tuple of `sys.exc_info`.
    """
    if ex is None or isinstance(ex, BaseException):
        return ex
    if isinstance(ex, tuple) and len(ex) == 3:
        _, error, traceback = ex
        if error is None:
            return None
        if isinstance(error, BaseException):
            return error if error.__traceback__ is not None else error.with_traceback(traceback)
    raise TypeError(f"request_stop takes an exception object or the tuple of sys.exc_info(), found {ex!r}.")
