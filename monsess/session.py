"""The monitored session: the loop that drives steps, hooks, input and checkpoints.

::

    with MonitoredTrainingSession(init_fn, data=data, checkpoint_dir=url, hooks=hooks) as sess:
        while not sess.should_stop():
            sess.run(train_step)

The loop is `MonitoredSession._run_once`; what surrounds it is how a session begins, ends and recovers.
"""

from __future__ import annotations

import atexit
import inspect
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, final

import jax
import jax.numpy as jnp

from monsess import clock, summary
from monsess.agreement import StopReason
from monsess.announce import announce_end, announce_start
from monsess.beginning import begin
from monsess.binding import bind, merge_feeds, wants_data
from monsess.checkpoint import CheckpointOptions, Retention
from monsess.coordinator import Coordinator
from monsess.data import Item
from monsess.dispatch import Dispatcher, Outcome
from monsess.errors import EndOfData, FetchError, MonsessError, SessionClosedError, StepDefinitionError
from monsess.feeding import Feeding
from monsess.fetches import Fetcher
from monsess.hook import SessionRunContext
from monsess.job import Job
from monsess.layout import Layout
from monsess.log import logger
from monsess.placement import ReplicaCheck, first_device_hash, on_first_device
from monsess.recording import Recording
from monsess.recovery import Recovery, Restarts
from monsess.runner import HookRunner
from monsess.saving import SavePoint, Saving, leaf_names, versions
from monsess.scaffold import Scaffold
from monsess.signals import EXIT_CODES, Signals
from monsess.step import Step
from monsess.step_context import StepContext
from monsess.stopping import Stopping
from monsess.storage import Storage
from monsess.watch import Watches


@final
class MonitoredSession:
    """Drives steps, hooks, input and checkpoints; made by `MonitoredTrainingSession`.

    One session is used from one thread, as a context manager. Leaving its with-block by its end, ``break``,
    ``return`` or `EndOfData` commits the final step and ends the hooks; any other exception gives the hooks their
    ``on_error`` and saves nothing.

    Example:
        >>> import monsess as ms
        >>> @ms.train_step
        ... def step(state):
        ...     return state + 1, {}
        >>> with ms.MonitoredTrainingSession(lambda: 0, hooks=[ms.StopAtStepHook(last_step=3)]) as sess:
        ...     while not sess.should_stop():
        ...         outputs = sess.run(step)
        >>> sess.global_step, int(sess.state)
        (3, 3)
    """

    def _run_once(self, step: Step, args: tuple[Any, ...], with_hooks: bool) -> Any:
        """One run: batch, before_run, the step on all devices, after_run, and what was agreed on."""
        self._saving.poll(self)
        counted = step.kind == "train" and step.steps_per_run > 0
        hooks = self._hooks if with_hooks and counted else self._no_hooks

        context = SessionRunContext(self, args, self._global_step)
        requests = hooks.before_run(context, step.steps_per_run)
        feeds = merge_feeds(requests) if requests else {}
        takes_batch = self._feeding.has_data and step.kind == "train" and wants_data(step, len(args), feeds)
        layout = self._dispatcher.layout_for(step, self._layout)
        item = self._next_batch(layout) if takes_batch else None
        call = bind(step, args, feeds, layout, item, self._remainder)

        step_after = self._global_step + step.steps_per_run
        ballot = self._job.ballot(step, call, self._feeding.ahead(), step_after, hooks is self._hooks)
        watched = hooks is self._hooks and self._watches.each_run
        outcome = self._dispatcher.run(step, call, layout, step_after, ballot, reads=watched)
        if item is not None:
            self._feeding.consumed()
        if step.kind == "train":
            self._advance(step, outcome, handed_over=bool(args))
        self._job.sent(item is not None, outcome.told)
        self._watches.run_through(self._dispatcher.finished_step)

        context.global_step = self._global_step
        results = {who: self._fetch(request.fetches, who) for who, request in requests.items()}
        if watched:
            self._watches.ran(self._global_step, outcome.counted)
        hooks.after_run(context, results, outcome.nonfinite, outcome.summaries)
        if counted and with_hooks:
            self._agreement.log_taken()
            self._save_if_agreed()
        return outcome.outputs

    def __init__(
        self,
        *,
        scaffold: Scaffold,
        hooks: tuple[Any, ...],
        chief_only_hooks: tuple[Any, ...],
        data: Any,
        checkpoint_dir: str | None,
        storage_options: dict[str, Any] | None,
        summary_dir: str | None,
        keep: Retention,
        checkpoint: CheckpointOptions,
        prefetch: int,
        remainder: str,
        max_in_flight: int,
        check_replicas: bool,
        stop_grace_period_secs: float,
        recovery: Recovery,
        on_preemption: str,
        job: Job,
    ) -> None:
        self._job = job
        self._on_preemption = on_preemption
        self._signals = Signals(self._preempt)
        self.checkpoint_dir = checkpoint_dir
        self.max_in_flight = max_in_flight
        self._agreement = job.agreement
        self._stopping = Stopping(self._agreement)
        self._scaffold = scaffold
        self._no_hooks = HookRunner(())
        self._checkpoint_options = checkpoint
        self._remainder = remainder
        self._check_replicas = check_replicas
        self._grace = stop_grace_period_secs
        self._allow_reinit = recovery.allow_reinit
        self._layout = Layout(jax.local_devices())
        self._replicas = ReplicaCheck(job.process_count, job.wait_for)
        self._dispatcher = Dispatcher(self._layout, max_in_flight, job)
        self._fetcher = Fetcher()
        self._watches = Watches()
        self._coord = Coordinator(clean_stop_exception_types=())

        self._global_step = 0
        self._steps_run = 0
        self._restored_from: int | None = None
        self._restarts = Restarts(
            recovery,
            self._create,
            reported=lambda: self._coord.requested_exception,
            settle=lambda: self._saving.settle(self),
            forget_threads=self._forget_threads,
            obstacle=self._obstacle_to_recovery,
            step=lambda: self._global_step,
        )
        self._unsaved_auxiliary = False
        self._checked_first_step = False
        self._handed_over = False  # whether the caller hands batches to run()
        self._in_call = False
        self._whole_iteration = False  # whether the call under way is one of run_step_fn
        self._in_run = False
        self._torn: str | None = None  # the run that was interrupted half-way
        self._raised: BaseException | None = None  # what the newest failed call raised
        self._phase = "starting"
        self._failure: BaseException | None = None  # what the session was left for
        self._thread = threading.get_ident()  # the training thread: another one's wish waits for its next run
        self._outputs: Any = None
        self._leaf_names: list[str] = []
        self._started = clock.monotonic()
        self._save_seconds = 0.0
        self._seconds_inside_hooks = dict.fromkeys(self._dispatcher.seconds, 0.0)

        job.start()  # what goes wrong from here on, in this process only perhaps, the others hear of
        try:
            self._hooks = HookRunner(hooks, chief_only_hooks, job.is_chief, job.process_count)
            self._saving = Saving(checkpoint_dir, storage_options, checkpoint, keep, self._committed, job.is_chief)
            self._recording = Recording(summary_dir, checkpoint_dir, storage_options, self._saving, job.is_chief)
            self._feeding = Feeding(data, self._layout, prefetch, remainder, lambda: self._coord, job)
        except BaseException as error:
            job.report(error)
            job.close()
            raise
        try:
            self._signals.install()
            _open_sessions.add(self)
            self._stopping.at_end_of_data(self._hooks.begin())
            self._hook_states_at_begin = self._hooks.state_dicts()
            self._restarts.create()
            if self._stopping.reason is None:
                self._saving.open_for_writing()
                self._recording.open()
        except BaseException as error:
            explained = self._leave_with_error(error)
            if explained is not error:
                raise explained from error
            raise
        self._phase = "open"
        summary.session_opened(self)

    # ---- running

    def run(self, step: Step, *args: Any) -> Any:
        """Run a step once on all local devices and return its outputs without waiting for them.

        A train step advances ``global_step``, triggers the hooks and takes its batch from the session's ``data``
        unless one is handed over. It waits for the step ``max_in_flight`` runs ago at most. An eval step never
        changes the state, triggers no hook and never takes a batch from ``data``.

        Args:
            step: Made by `train_step` or `eval_step`.
            *args: The step's arguments after the state, leaves ``[local_batch, ...]``; the leading axis must be a
                multiple of the local device count. After the batch, a value without axes goes to every device.

        Returns:
            The step's outputs, reduced as the step says; converting one waits for the step.

        Raises:
            EndOfData: ``data`` has ended, or a signal or another process has stopped the session since `should_stop`
                said no; a clean end inside the with-block.
            RunAfterStopError: A stop was agreed on.
            SessionClosedError: The session is closed.
            BatchError: The batch does not fit the devices.
            SaveError: A save that was accepted earlier was lost.
        """
        self._require_open(step)
        return self._call(lambda: self._run_guarded(step, args, with_hooks=True))

    def run_without_hooks(self, step: Step, *args: Any) -> Any:
        """Run a step as `run` does, but trigger no hook and no save.

        A train step still takes its batch from ``data`` and advances ``global_step``, and a `StopAtStepHook`'s limit
        still makes `should_stop` true.

        Args:
            step: As in `run`.
            *args: As in `run`.

        Returns:
            As in `run`.

        Raises:
            EndOfData: As in `run`, like the other errors there.
        """
        self._require_open(step)
        return self._call(lambda: self._run_guarded(step, args, with_hooks=False))

    def run_step_fn(self, step_fn: Callable[[StepContext], Any]) -> Any:
        """Call ``step_fn(step_context)``, which runs steps with or without hooks and may ask for a stop.

        After a transient error the whole function is called again.

        Args:
            step_fn: A function or bound method whose only argument is ``step_context``.

        Returns:
            What ``step_fn`` returns.

        Raises:
            ValueError: ``step_fn`` has other arguments.
            EndOfData: ``step_context.request_stop`` was called; a clean end inside the with-block.
        """
        parameters = inspect.signature(step_fn).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        keyword = inspect.Parameter.KEYWORD_ONLY
        names = [p.name for p in parameters if p.kind in positional or (p.kind is keyword and p.default is p.empty)]
        if names != ["step_context"]:
            raise ValueError(
                "`step_fn` may either have one `step_context` argument, or be a method with `self` and it; "
                f"found {names}."
            )
        self._require_not_closed()
        return self._call(lambda: step_fn(StepContext(self)), whole_iteration=True)

    def evaluate(self, fetches: Any, feed_dict: dict[str, Any] | None = None) -> Any:
        """Evaluate fetches, as hooks write them, on the newest state and outputs.

        Args:
            fetches: A pytree of output names and functions ``f(state, outputs)``.
            feed_dict: Keyword arguments for the functions.

        Returns:
            The values in the structure of ``fetches``, on the device.

        Raises:
            FetchError: An unknown name, or a name before any step has run.
        """
        return self._fetcher(fetches, self._dispatcher.state, self._outputs, "evaluate", feed_dict)

    # ---- stopping and saving

    def should_stop(self) -> bool:
        """Whether the loop is to end: a stop was agreed on, or ``data`` is known to have ended.

        It may wait for the next batch, so that `run` is never called in vain.
        """
        if self._phase == "closed":
            return True
        reported = None if self._in_call else self._restarts.look_at_threads()
        if not self._in_call:
            self._stopping.take_up()
        if reported is not None:
            self._stopping.request(StopReason("ERROR", _shown(reported), "a thread"), everywhere=True)
        if not self.stop_requested and self._data_ended():
            self._stopping.at_end_of_data(EndOfData())
        if self._stopping.reason is None and self._coord.requested_exception is not None and not self._in_call:
            return self.should_stop()  # a thread has failed just now
        if self.stop_requested and not self._in_call:
            self._stopping.told()
        return self.stop_requested

    def request_stop(self, reason: Any = None, everywhere: bool = False) -> None:
        """Ask for a clean stop; with one process it is agreed on at once.

        Args:
            reason: A sentence for people, or a `StopReason`.
            everywhere: The decision is the same on all processes by construction.

        Raises:
            HookError: ``everywhere=True`` from a chief-only hook of a job with several processes.
        """
        self._require_not_closed()
        if everywhere:
            self._require_on_all("calls request_stop(everywhere=True)")
        self._stopping.request(reason, everywhere)

    def request_save(self, everywhere: bool = False) -> None:
        """Ask for a checkpoint: after the current run and all its hooks, or now between two runs.

        With several processes, unless it is asked for ``everywhere``, it is made some runs later, on all at the same
        step. A step that is saved already is not saved again. Without a ``checkpoint_dir`` this does nothing.

        Args:
            everywhere: The decision is the same on all processes by construction.

        Raises:
            HookError: ``everywhere=True`` from a chief-only hook of a job with several processes.
        """
        self._require_not_closed()
        if everywhere:
            self._require_on_all("calls request_save(everywhere=True)")
        self._agreement.want_save(everywhere)
        at_once = everywhere or self.process_count == 1  # what others have wished for is due on all at the same point
        if at_once and self._phase == "open" and not self._in_run and threading.get_ident() == self._thread:
            self._save_if_agreed()

    def compare_replicas(self) -> None:
        """Compare the bits of the state over all devices of all processes; waits for the newest step.

        All processes call it at the same point. No collective is involved.

        Raises:
            ReplicasDifferError: They differ; names the leaves.
            HookError: A chief-only hook of a job with several processes calls it.
        """
        state, layout = self._dispatcher.state, self._dispatcher.state_layout
        with self._joint("compare_replicas"):
            told = self._replicas.told(self._replicas.dispatch(state, layout))
            self._replicas.check([told], self._leaf_names, self._global_step)
            what = f"the state of step {self._global_step}"
            self._job.compare(what, self._leaf_names, lambda: first_device_hash(state))

    def stop_at_step(self, last_step: int, by: str = "") -> None:
        """Stop as soon as ``global_step`` is ``last_step`` or more, at once if it is already.

        Args:
            last_step: Completed updates after which to stop. Of several limits the smallest counts.
            by: Who asks, for the log.

        Raises:
            HookError: A chief-only hook of a job with several processes calls it.
        """
        self._require_on_all("calls stop_at_step")
        self._stopping.set_limit(last_step, by)
        self._stopping.look_at_limit(self._global_step)

    def add_saver_listener(self, listener: Any) -> None:
        """Have a `CheckpointSaverListener` told of every save of this session.

        Args:
            listener: Its ``before_save`` runs before each snapshot, its ``after_save`` after each commit, both in the
                training thread.
        """
        self._saving.add_listener(listener)

    def log(self, scalars: Mapping[str, Any], step: int | None = None) -> None:
        """Log values of a step: into ``metrics.jsonl``, TensorBoard's files, and to every hook that overrides ``log``.

        Called from the training thread: by hooks, or in the loop. It does not wait for the device, unless a hook wants
        to hear of it. Of two values of one tag and step the later one counts. With several processes the chief writes,
        and each process tells its own hooks.

        Args:
            scalars: From tag to one real number: of Python, of numpy, or of the device.
            step: The step that they are of; None: `global_step`.

        Raises:
            TypeError: No dict, or a tag that is no text.
            ValueError: A value that is no real scalar.
            SessionClosedError: The session is closed.
            MonsessError: It was called from another thread.
        """
        self._require_not_closed()
        if threading.get_ident() != self._thread:
            raise MonsessError(
                "log() was called from another thread than the one that trains. Hand the values over, for example "
                "through a queue, and log them in the loop or in a hook."
            )
        if self._phase != "starting":
            self._recording.open()
        at = self._global_step if step is None else step
        self._recording.log(at, scalars, self._hooks.log if self._hooks.listen else None)
        if ranked := self._saving.ranked_by_evaluation.intersection(scalars):
            self._saving.rank(at, {tag: float(scalars[tag]) for tag in ranked})

    def close(self) -> None:
        """End the session cleanly: commit the final step, end the hooks. Calling it again does nothing."""
        if self._in_run:
            raise MonsessError(
                "close() was called inside a run, by a hook. Ask for a stop with request_stop(); the session closes "
                "when the with-block is left."
            )
        if self._phase != "open":
            return
        if self._raised is not None and sys.exception() is self._raised:
            # try: run ... finally: close() - an error never saves
            logger.warning(
                "closed while %s is being handled: step %d is not saved", _shown(self._raised), self._global_step
            )
            self._leave_with_error(self._raised)
        else:
            self._leave_cleanly()

    # ---- what can be read

    @property
    def global_step(self) -> int:
        """Completed updates, exact, known without reading a device."""
        return self._global_step

    @property
    def state(self) -> Any:
        """This process's copy of the state on its first device; valid until the next train step, which donates it."""
        return on_first_device(self._dispatcher.state)

    def state_copy(self) -> Any:
        """A copy of `state` that stays valid."""
        return jax.tree.map(_copy, self.state)

    @property
    def summary_dir(self) -> str | None:
        """Where the records of the run go: ``summary_dir``, or ``checkpoint_dir`` without one; None: nowhere."""
        return self._recording.url

    @property
    def is_logging(self) -> bool:
        """Whether anybody hears what is logged: on this process there are records, or a hook that overrides ``log``."""
        return self._recording.is_on or self._hooks.listen

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints."""
        return self._agreement.is_chief

    @property
    def process_count(self) -> int:
        """Processes of this job."""
        return self._agreement.process_count

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was agreed on or asked for by a thread; unlike `should_stop` it never waits."""
        if self._stopping.reason is not None:
            return True
        if self.process_count > 1 and self._coord.requested_exception is None:
            if self._coord.should_stop():  # one process's wish: all have to hear of it
                self._agreement.want_stop(StopReason("REQUESTED", by="a thread"))
            return False
        return self._coord.should_stop()

    @property
    def preempted(self) -> bool:
        """Whether a signal has asked for the end, on whichever process, at the same point of the program on all."""
        return self._agreement.signal is not None

    @property
    def save_requested(self) -> bool:
        """Whether a checkpoint of this step was asked for or agreed on and is still to be made."""
        return self._saving.saves and self._agreement.save_agreed()

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the session stops or stopped, or None."""
        return self._stopping.reason

    @property
    def last_step(self) -> int | None:
        """The step to stop at, of several limits the smallest (`stop_at_step`); None: there is no limit."""
        return self._stopping.limit

    @property
    def restored_from(self) -> int | None:
        """The step of the checkpoint that was restored last, or None."""
        return self._restored_from

    @property
    def recoveries(self) -> int:
        """How often this session has recovered from a transient error."""
        return self._restarts.recoveries

    @property
    def run_id(self) -> str:
        """The name of the run, shared by all attempts that resumed from one another."""
        return self._saving.run_id

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time went so far: "input", "compile", "step", "hooks", "save", in seconds.

        None is counted twice: what a hook's own eval steps take, their compilation included, is its time.
        """
        spent, inside = self._dispatcher.seconds, self._seconds_inside_hooks
        return {
            "input": self._feeding.seconds_waited,
            **{name: spent[name] - inside[name] for name in spent},
            "hooks": self._hooks.total_seconds,
            "save": self._save_seconds,
        }

    def summary(self) -> dict[str, Any]:
        """What this session did, for people and programs.

        Returns:
            A dict: run_id, steps, global_step, seconds, steps_per_second, saves, last_committed, recoveries,
            stop_reason, where the time went, and the time of each hook.
        """
        elapsed = clock.monotonic() - self._started
        stop = self._stopping.reason
        return {
            "run_id": self.run_id,
            "steps": self._steps_run,
            "global_step": self._global_step,
            "restored_from": self._restored_from,
            "seconds": elapsed,
            "steps_per_second": self._steps_run / elapsed if elapsed > 0 else 0.0,
            "saves": self._saving.commits,
            "last_committed": self._saving.last_committed,
            "recoveries": self.recoveries,
            "stop_reason": None if stop is None else stop.name,
            "time": self.seconds,
            "hooks": dict(self._hooks.seconds),
        }

    # ---- beginning

    def _create(self) -> None:
        """Restore or initialise the state, and tell the hooks that it exists; also after a recovery."""
        in_call, self._in_call = self._in_call, True  # what a hook calls here fails with the whole creation
        try:
            self._create_once()
        finally:
            self._in_call = in_call

    def _create_once(self) -> None:
        if self.recoveries:
            self._stopping.roll_back()
            self._agreement.save_taken()  # what was to be saved is rolled back; what is restored is saved
            self._dispatcher.abandon()
        self._job.doing("restoring or initialising the state")
        beginning = begin(
            self._job,
            self._saving,
            self._scaffold,
            self._checkpoint_options,
            self._layout,
            again=self.recoveries > 0,
            fresh=self._allow_reinit,
        )
        restored, state, step = beginning.restored, beginning.state, beginning.step
        self._warn_of_lost_batches(step)
        self._global_step = step
        self._restored_from = None if restored is None else step
        devices, place = self._layout.device_count, self._saving.place
        announce_start(self.run_id, self._restored_from, devices, self.process_count, place)
        self._recording.start(step, self.run_id, self._restored_from, self.process_count, versions())
        self._dispatcher.put_state(state, self._layout, step)
        self._leaf_names = leaf_names(self.state)
        self._job.compare("the state at the start", self._leaf_names, lambda: first_device_hash(state))
        self._watches.clear()
        self._checked_first_step = False
        self._unsaved_auxiliary = False
        self._torn = None
        self._outputs = None
        self._saving.start(state, restored)
        self._feeding.go_to(beginning.input_position, restored is not None)
        stored = beginning.hook_states(self._job)
        if self.recoveries:
            stored = {**self._hook_states_at_begin, **stored}  # a hook that the checkpoint does not know begins again
        if restored is not None or self.recoveries:
            self._hooks.load_state_dicts(stored)
        self._stopping.at_end_of_data(self._hooks.after_create_session(self, self._coord))
        self._job.begin(self._feeding.ahead(), self._hooks.schedules())
        self._stopping.look_at_limit(step)

    # ---- during the loop

    def _record(self, event: str, **fields: Any) -> None:
        """Write an event of the current step into the records; on the chief only."""
        self._recording.record(event, self._global_step, **fields)

    def _committed(self, step: int, facts: Mapping[str, Any]) -> None:
        self._restarts.progress()
        self._recording.committed(step, facts)

    def _call(self, call: Callable[[], Any], whole_iteration: bool = False) -> Any:
        """Make a call, again after a transient error, and note if it meets the end of the data."""
        if self._in_call:
            return call()  # inside run_step_fn: what fails there fails, and is repeated, as a whole
        self._in_call, self._whole_iteration = True, whole_iteration
        try:
            result = self._restarts.call(call)
            self._stopping.take_up()
            return result
        except EndOfData as end:
            self._stopping.at_end_of_data(end)
            raise
        except BaseException as error:
            self._raised = error
            raise
        finally:
            self._in_call = False

    def _run_guarded(self, step: Step, args: tuple[Any, ...], with_hooks: bool) -> Any:
        """A run that knows whether it is made inside another one, by a hook."""
        outer = self._in_run
        if outer and with_hooks and step.kind == "train":
            raise MonsessError(
                "run() of a train step inside a run, from a hook, would call the hooks without end. Use "
                "run_without_hooks(step)."
            )
        self._require_whole(step)
        self._hooks.require_on_all(f"runs {step.name}")
        self._in_run = True
        state, counted = self._dispatcher.state, self._global_step
        before = dict(self._dispatcher.seconds) if outer or self._phase != "open" else None
        try:
            return self._run_once(step, args, with_hooks)
        except BaseException as error:
            if step.kind == "train" and self._is_torn(state, counted + step.steps_per_run, error):
                self._torn = f"{type(error).__name__} in the run to step {counted + step.steps_per_run}"
            raise
        finally:
            self._in_run = outer
            if before is not None:  # a hook runs it, whose time is measured as a whole
                for name, seconds in self._dispatcher.seconds.items():
                    self._seconds_inside_hooks[name] += seconds - before[name]

    def _is_torn(self, state_before: Any, step_after: int, error: BaseException) -> bool:
        """Whether a run was left after the state had changed and before everything else had followed."""
        if self._dispatcher.state is state_before:
            return any(leaf.is_deleted() for leaf in jax.tree.leaves(state_before)[:1])
        return not isinstance(error, Exception) or self._global_step != step_after

    def _require_whole(self, step: Step | None = None) -> None:
        if self._torn is not None and (step is None or step.kind == "train"):
            raise MonsessError(
                f"{self._torn} interrupted it half-way: state, step and hooks no longer belong together and cannot be "
                "saved or trained on. Start again; the newest checkpoint is sound."
            )

    def _advance(self, step: Step, outcome: Outcome, handed_over: bool) -> None:
        """Count a dispatched train step and stop at the limit."""
        self._handed_over = self._handed_over or handed_over
        self._global_step += step.steps_per_run
        if step.steps_per_run == 0:
            self._unsaved_auxiliary = True
            return
        self._outputs = outcome.outputs
        self._unsaved_auxiliary = False
        self._steps_run += step.steps_per_run
        if not self._checked_first_step:
            self._checked_first_step = True
            self._record("step", name=step.name, engine=step.engine, steps_per_run=step.steps_per_run)
            self._ranked_values()
            told = self._job.gathered("the state after the first step", self._replicas.told(self._hashes()))
            self._replicas.check(told, self._leaf_names, self._global_step)
        self._stopping.look_at_limit(self._global_step)

    def _fetch(self, fetches: Any, who: str) -> Any:
        return self._fetcher(fetches, self._dispatcher.state, self._outputs, who)

    def _watch(self, step: int, value: Any, check: Callable[[Any], None]) -> None:
        self._watches.add(step, value, check)

    def _watch_each_run(self, check: Callable[[int, Any], None]) -> bool:
        """Have ``check(step, count)`` called as `SessionRunContext.watch` says, for each run from the next one on.

        That ends with a recovery. Returns whether it was not so already.
        """
        return self._watches.add_standing(check)

    def _left_behind(self) -> tuple[int, float]:
        """The step that the last recovery went back from, and when that was, by the clock."""
        return self._restarts.left_behind

    def _storage(self) -> Storage | None:
        """The directory of the run, for hooks that keep something there; None where this process has none."""
        return None if self._saving.store is None else self._saving.store._storage

    def _ends_for_another(self) -> bool:
        """Whether another process is known to have failed, so that this one is ended; from any thread."""
        try:
            self._job.check()
        except MonsessError:
            return True
        return False

    def _gives_up(self, error: BaseException) -> None:
        """Tell the other processes, from any thread, that this one ends for ``error`` whatever its main thread does."""
        self._job.report(error)

    def _save_if_agreed(self) -> None:
        if self._agreement.save_agreed() and not self._unsaved_auxiliary:
            self._require_whole()
            self._agreement.save_taken()
            start, hooks = clock.monotonic(), self._hooks.total_seconds
            self._saving.save(self, self._save_point)
            self._save_seconds += clock.monotonic() - start - (self._hooks.total_seconds - hooks)

    def _preempt(self, number: int) -> None:
        """A signal asks for a clean stop; called from any thread, in the middle of anything."""
        self._agreement.want_preemption(number)
        self._job.preempted(number)

    def _next_batch(self, layout: Layout) -> Item:
        if self._job.data_ended:
            raise EndOfData("The training input of some process has ended; no process takes a further batch.")
        return self._feeding.next_batch(layout)

    def _data_ended(self) -> bool:
        """Whether there is no further batch, for this process or for another one."""
        return self._feeding.has_data and (self._job.data_ended if self.process_count > 1 else self._feeding.ended())

    def _save_point(self) -> SavePoint:
        """Everything that a resumed run needs, as of this step."""
        step, state, names = self._global_step, self._dispatcher.state, self._leaf_names
        hashes = self._hashes()
        of_all, of_this = self._hooks.split(self._hooks.state_dicts())
        content: dict[str, Any] = {"hooks": of_all, "input": self._feeding.position()}
        content["hooks_of_each_process"] = [of_this] if of_this else []
        own = [content["input"], of_this]
        self._job.hand_in(step, own, lambda: self._replicas.told(hashes))
        vouch = self._job.vouch()

        def gate() -> None:
            self._watches.run_through(step)
            vouch()
            handed_in = self._job.handed_in(step, own, lambda: self._replicas.told(hashes))
            self._replicas.check([told for _, told in handed_in], names, step)
            if self.process_count > 1:
                positions = [position for (position, _), _ in handed_in]
                content["input"] = None if None in positions else positions
                content["hooks_of_each_process"] = [states for (_, states), _ in handed_in] if of_this else []
            self._recording.flush()

        return SavePoint(state, content, self._ranked_values(), gate)

    def _hashes(self) -> Any:
        """The bits of the newest state on each local device, on their way; None where they are not compared."""
        if not self._check_replicas:
            return None
        return self._replicas.dispatch(self._dispatcher.state, self._dispatcher.state_layout)

    def _ranked_values(self) -> dict[str, Any]:
        """The newest values of the outputs that the retention ranks by; none before the first step."""
        if self._outputs is None:
            return {}
        values = {name: self._fetch(name, "keep=") for name in self._saving.ranked_by}
        for name, value in values.items():
            if getattr(value, "shape", None) != ():
                raise FetchError(f"keep= ranks checkpoints by {name!r}, which is not a single number.")
        return values

    def _obstacle_to_recovery(self) -> str | None:
        """Why going back to a checkpoint now would silently lose something."""
        if self._unsaved_auxiliary and not self._whole_iteration:
            return (
                "Not recovered from: the auxiliary update before it would be lost. Put the whole iteration into "
                "run_step_fn, which is repeated as a whole."
            )
        return None

    def _warn_of_lost_batches(self, step: int) -> None:
        if self._handed_over and step < self._global_step:
            logger.warning(
                "went back from step %d to %d: batches handed to run() since are not taken back; those of data= are",
                self._global_step,
                step,
            )

    def _forget_threads(self) -> None:
        """At a recovery: end the coordinator's threads, shortly; their successors get a new one."""
        self._stop_threads(grace=min(self._grace, 10.0))
        self._coord = Coordinator(clean_stop_exception_types=())  # a thread that outlives the grace cannot meddle

    # ---- ending

    def __enter__(self) -> MonitoredSession:
        self._require_not_closed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, EndOfData):
            self.close()
            return error is not None
        if isinstance(error, SystemExit) and error.code in (None, 0):
            self.close()  # exit code 0 promises that the final step is committed
            return False
        if self._phase == "open":
            explained = self._leave_with_error(error)
            if explained is not error:
                raise explained from error
        return False

    def _leave_cleanly(self) -> None:
        """The clean end: final commit, listeners, hooks; an error on the way turns it into the other one."""
        try:
            if self._coord.requested_exception is not None:
                raise self._coord.requested_exception
            self._require_whole()
            self._dispatcher.wait()
            self._job.settle()
            self._watches.run_through(float("inf"))
            self._job.leave(self._global_step)
            if self._unsaved_auxiliary:
                raise MonsessError(
                    "The session ends after an auxiliary update (steps_per_run=0) that no counted step followed, so "
                    "the state lies between two steps and cannot be saved. Run auxiliary updates before the counted "
                    "step."
                )
            if self._stopping.reason is None:
                by_thread = self._coord.should_stop()
                reason = StopReason("REQUESTED", by="a thread") if by_thread else StopReason.BODY_LEFT
                self._stopping.request(reason, everywhere=True)
            start, hooks = clock.monotonic(), self._hooks.total_seconds
            self._phase = "closing"
            self._job.doing("saving the final step")
            self._saving.finish(self, self._save_point)
            if self._saving.saves:
                self._saving.follow(self._job.decided("the final commit", lambda: self._saving.last_committed))
            self._save_seconds += clock.monotonic() - start - (self._hooks.total_seconds - hooks)
        except BaseException as error:
            explained = self._leave_with_error(error)
            if explained is not error:
                raise explained from error
            raise
        try:
            try:
                self._hooks.end(self)
            finally:
                self._stop_threads(self._grace)
            if self._coord.requested_exception is not None:
                raise self._coord.requested_exception
            self._job.part()
        except BaseException as error:
            self._failure = explained = self._explained(error)
            self._job.report(explained)
            if explained is not error:
                raise explained from error
            raise
        finally:
            self._release()
        if self._on_preemption == "exit" and self._stopping.reason == StopReason.PREEMPTED:
            raise SystemExit(EXIT_CODES[signal.Signals(self._agreement.signal or signal.SIGTERM)])

    def _stop_threads(self, grace: float) -> None:
        reported = self._coord.requested_exception
        self._coord.request_stop()
        try:
            self._coord.join(stop_grace_period_secs=grace, ignore_live_threads=True)
        except Exception as error:
            if error is not reported:
                raise

    def _explained(self, error: BaseException) -> BaseException:
        """What is behind an error, where it is that another process has failed."""
        return self._job.explained(error) if isinstance(error, Exception) else error

    def _leave_with_error(self, error: BaseException) -> BaseException:
        """The other end: hooks get on_error, saves in flight may finish, nothing new is saved.

        Returns:
            What is behind the error, which the caller raises.
        """
        self._phase = "closing"
        self._failure = error = self._explained(error)
        self._job.report(error)
        self._stopping.request(StopReason("ERROR", self._saving.masked(_shown(error))), everywhere=True)
        self._note_thread_error(error)
        self._coord.request_stop()
        try:
            try:
                self._hooks.on_error(self, error)
                self._saving.drain(error)
            finally:
                self._stop_threads(self._grace)
        except Exception as second:
            logger.error("while the session was left for %s: %r", type(error).__name__, second)
        finally:
            self._release()
        return error

    def _note_thread_error(self, error: BaseException) -> None:
        reported = self._coord.requested_exception
        if reported is not None and reported is not error:
            error.add_note(f"A thread of the session had reported {reported!r}.")

    def _release(self) -> None:
        if self._phase == "closed":
            return
        self._phase = "closed"
        self._signals.restore()
        _open_sessions.discard(self)
        summary.session_closed(self)
        self._feeding.close()
        hooks, reason = self._hooks.seconds, self._stopping.reason
        try:  # it may be waited for, and whoever waits may lose patience
            self._recording.end(self._global_step, reason, self._failure, self.seconds, hooks)
        finally:
            self._saving.close()
            self._job.close()
        seconds, last = clock.monotonic() - self._started, self._saving.last_committed
        announce_end(self.run_id, self._steps_run, seconds, self._global_step, self._stopping.reason, last)

    def _require_not_closed(self) -> None:
        if self._phase == "closed":
            raise SessionClosedError("The session is closed. Make a new MonitoredTrainingSession to go on.")

    def _require_on_all(self, what: str) -> None:
        """Refuse what all processes have to do to a chief-only hook."""
        if threading.get_ident() == self._thread:  # another thread's wish is not the hook's
            self._hooks.require_on_all(what)

    def _joint(self, what: str) -> AbstractContextManager[float]:
        """Around a call that all processes make at the same point; gives how long to wait for them."""
        self._require_on_all(f"calls {what}")
        return self._job.joint(what, counted=threading.get_ident() == self._thread)

    def _require_open(self, step: Any) -> None:
        self._require_not_closed()
        if not isinstance(step, Step):
            raise StepDefinitionError(
                f"run needs a step made by monsess.train_step or monsess.eval_step, found {step!r}. Decorate it."
            )
        if step.kind != "train":
            return
        if self._phase == "closing":
            raise SessionClosedError("The session is ending: hooks may still run eval steps, but no train step.")
        self._stopping.require_none()


_open_sessions: weakref.WeakSet[MonitoredSession] = weakref.WeakSet()


@contextmanager
def joint_call(what: str) -> Iterator[float | None]:
    """Around a call that all processes make at the same point, session or not.

    Args:
        what: Its name.

    Yields:
        How long to wait for the others, as the open sessions say, or None.

    Raises:
        HookError: A chief-only hook of a job with several processes makes it.
    """
    with ExitStack() as stack:
        yield max((stack.enter_context(session._joint(what)) for session in list(_open_sessions)), default=None)


@atexit.register
def _at_exit() -> None:
    """Let saves of sessions that nobody closed end, and say what is lost."""
    for session in list(_open_sessions):
        session._saving.drain(None)
        session._recording.close()
        newest = session._saving.last_committed
        logger.error(
            "run %s: the session was never closed: step %d is not saved, %s; use `with`",
            session.run_id,
            session.global_step,
            "there is no checkpoint" if newest is None else f"the newest checkpoint is {newest}",
        )


def _shown(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _copy(leaf: jax.Array) -> jax.Array:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.copy(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
    return jnp.copy(leaf)
