"""An end for a run that makes no progress."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import jax

from monsess import clock
from monsess.errors import MonsessError
from monsess.hook import SessionRunHook
from monsess.hooks._phases import phase_of, stacks
from monsess.launch.records import write_record
from monsess.log import logger, mask
from monsess.timer import check_secs
from monsess.without_barrier import end_without_barrier

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession

#: From the error to the end of the process, for a training thread that does not answer; a hook may need it.
_ANSWER_SECS = 5.0
#: With several processes: whoever only waits leaves it to the others to speak first, since they know more.
_OTHERS_SECS = 5.0
_PATIENCE_SECS = 5.0  # for what may itself be stuck: the log, the other processes


@final
class WatchdogHook(SessionRunHook):
    """Ends a run that gets nowhere: says what it was doing, shows the stacks of all threads, and exits with 1.

    Progress is a step, an eval step, a batch that arrives, a hook or a save that comes to its end. Where the training
    thread can be reached, as in a wait for the input, `MonsessError` is raised there and the hooks are told; otherwise
    the process ends itself five seconds later. With several processes each guards itself, all of them end, and the
    one that hangs is named. Nothing is done per step. A debugger or a stopped process is no stall.

    Args:
        timeout_secs: Seconds without progress, above 0. Choose more than the longest step, evaluation outside of
            steps, and save take.
        startup_timeout_secs: The same until the first step is done, while a program is compiled, and while a run is
            started again after an error, above 0.

    Raises:
        ValueError: A value that is no length of time.

    Example:
        >>> import monsess as ms
        >>> hook = ms.WatchdogHook(timeout_secs=600)
    """

    def __init__(self, timeout_secs: float, startup_timeout_secs: float = 1800.0) -> None:
        self._timeout = check_secs("timeout_secs", timeout_secs)
        self._startup = max(self._timeout, check_secs("startup_timeout_secs", startup_timeout_secs))
        self._poll = min(1.0, self._timeout / 20)
        self._thread: threading.Thread | None = None
        self.begin()

    def begin(self) -> None:
        """Forget another session."""
        self._over = threading.Event()
        self._coord: Coordinator | None = None

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Watch from now on."""
        self._coord = coord
        self._start_step = session.global_step
        self._training = threading.get_ident()
        self._mark: Any = None
        self._since = self._looked = clock.monotonic()
        if self._thread is None or not self._thread.is_alive():
            # Neither the thread nor the hook keeps a session alive that nobody closes.
            work = (weakref.ref(session), self._over)
            self._thread = threading.Thread(target=self._watch, args=work, name="monsess-watchdog", daemon=True)
            self._thread.start()

    def end(self, session: MonitoredSession) -> None:
        """The session has come to its end."""
        self._stop()

    def on_error(self, session: MonitoredSession, error: BaseException) -> None:
        """The session is being left, within limits of its own."""
        self._stop()

    def _stop(self) -> None:
        self._over.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _watch(self, ref: weakref.ref[MonitoredSession], over: threading.Event) -> None:
        while not over.wait(self._poll):  # not the clock of the schedules: a wait of that one may take no time
            session = ref()
            if session is None:
                return
            try:
                stall = self._look(session)
            except Exception as error:  # between two attributes of a session that is being closed, say
                logger.debug("WatchdogHook could not look: %r", error)
                continue
            if stall is not None:
                self._fire(session, stall, over)
                return

    def _look(self, session: MonitoredSession) -> str | None:
        """Whether there has been no progress for too long; what is going on, in words."""
        now = clock.monotonic()
        late = now - self._looked - self._poll
        self._looked = now
        if late > self._poll + 1.0:
            self._since += late  # the process was stopped, or its machine asleep
        mark = (session.global_step, *session.seconds.values())
        if mark != self._mark:
            self._mark, self._since = mark, now
            return None
        stalled = now - self._since
        if stalled < self._timeout:
            return None
        phase = phase_of(sys._current_frames().get(self._training))
        if phase.kind == "debugger":
            self._since = now
            return None
        starting = phase.kind == "compile" or phase.starting or session.global_step == self._start_step
        limit, name = (self._startup, "startup_timeout_secs") if starting else (self._timeout, "timeout_secs")
        waits = session.process_count > 1 and phase.kind in ("device", "processes")
        if stalled < limit + (min(_OTHERS_SECS, limit / 2) if waits else 0.0):
            return None
        if waits and session._ends_for_another():
            return None  # who is behind it is known, and told
        who = "" if session.process_count == 1 else f" of process {jax.process_index()}"
        others = ", perhaps for another process" if waits and phase.kind == "device" else ""
        return (
            f"WatchdogHook: no progress{who} for {stalled:.0f} s ({name}={limit:g}) at step {session.global_step}: "
            f"{phase.text}{others}."
        )

    def _fire(self, session: MonitoredSession, text: str, over: threading.Event) -> None:
        error = MonsessError(text)
        shown = mask(f"{text} The stacks of all threads:\n{stacks()}")
        _within(_PATIENCE_SECS, lambda: logger.error("%s", shown))
        _within(_PATIENCE_SECS, lambda: (session._gives_up(error), write_record(error)))
        if self._coord is not None:
            self._coord.request_stop(error)  # where the training thread waits, it looks at this
        if over.wait(min(_ANSWER_SECS, self._timeout)):
            return
        _within(_PATIENCE_SECS, lambda: logger.error("The training thread does not answer: the process ends itself."))
        _end(session.process_count > 1)


def _within(seconds: float, work: Callable[[], Any]) -> None:
    """Do something that may itself hang, such as writing to a log whose lock the stuck thread holds."""
    thread = threading.Thread(target=work, name="monsess-watchdog-tells", daemon=True)
    thread.start()
    thread.join(seconds)


def _end(several: bool) -> None:
    """End the process now; in a job of several, those that are left get the time to read why."""
    if several:
        _within(_PATIENCE_SECS, end_without_barrier)
    for stream in (sys.stdout, sys.stderr):
        _within(1.0, stream.flush)
    os._exit(1)
