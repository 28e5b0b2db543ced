"""Evaluation of checkpoints that a training job writes, in a job of its own."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, final

import jax
import numpy as np

from monsess import clock
from monsess.checkpoint import CheckpointOptions, CheckpointStore
from monsess.checkpoint.restore import Restored, find_restorable
from monsess.checkpoint.table import nest
from monsess.collectives import broadcast
from monsess.errors import DamagedCheckpointError, MonsessError, StorageError
from monsess.hook import check_hooks
from monsess.hooks.evaluation import batches_of, check_data, check_function, finished, line, prefix_of
from monsess.hooks.stop_at_step import StopAtStepHook
from monsess.initial_state import initial_state
from monsess.log import logger
from monsess.new_checkpoints import Watch, iterate, secs_from_zero
from monsess.over_batches import OverBatches, counted_train_step
from monsess.records.values import Logged
from monsess.records.writer import Records
from monsess.scaffold import Scaffold
from monsess.step import EvalStep
from monsess.storage import Storage
from monsess.timer import check_secs, check_steps
from monsess.training_session import MonitoredTrainingSession, check_remainder

#: How long other processes of an evaluating job wait for a word of the first one, at most.
_WORD_SECS = 60.0
_NOTHING_YET, _OVER = -1, -2
#: How long a store may be away while a checkpoint is read.
_PATIENCE_SECS = 300.0


class EvaluationResult(NamedTuple):
    """What an evaluation of one checkpoint came to.

    Args:
        step: The global step of the checkpoint.
        metrics: The results by name.
        batches: How many batches were evaluated.
        seconds: How long it took, restoring included.

    Example:
        >>> import monsess as ms
        >>> ms.EvaluationResult(step=100, metrics={"accuracy": 0.9}, batches=10, seconds=1.5).metrics["accuracy"]
        0.9
    """

    step: int
    metrics: dict[str, float]
    batches: int
    seconds: float


@final
class Evaluator:
    """Evaluates checkpoints of a training job beside it: reads them, and never takes its directory or changes a step.

    Outputs are put together over the batches as in `EvaluationHook`. Its hooks are those of a session: they see each
    run of the step with its outputs, count the runs of this evaluation as steps, and begin and end with it, so that
    `LoggingTensorHook`, `StopAfterNEvalsHook`, `FeedFnHook` or `FinalOpsHook` work here too. The step is compiled once
    for all checkpoints. With several processes each passes its own share of the data; the first one reads.

    Args:
        step: Made by `eval_step`; its outputs are single numbers.
        data: Batches for this process that can be gone through for each checkpoint anew, or a function that returns
            them; None: the step takes no batch.
        init_fn: As in `MonitoredTrainingSession`: it says what the state looks like. None: the state is given as nested
            dicts and lists of numpy arrays, as `load_checkpoint` does.
        num_batches: Batches of one evaluation at most, at least 1; None: all.
        finish: Called with the dict of results; what it returns, a dict of numbers, takes their place.
        name: Of this evaluation where there are several: results are noted as ``eval/<this name>/<name>``.
        remainder: As in `MonitoredTrainingSession`.
        hooks: `SessionRunHook` objects.

    Raises:
        ValueError: ``data`` can be gone through only once, or another argument is impossible.
        TypeError: ``step`` is no eval step.
        StepDefinitionError: An output of ``step`` stays one value per device.
        HookError: An object in ``hooks`` is not a usable hook.

    Example:
        >>> import jax.numpy as jnp, numpy as np, tempfile, monsess as ms
        >>> @ms.train_step
        ... def train(w):
        ...     return w + 1, {}
        >>> @ms.eval_step
        ... def evaluate(w, batch):
        ...     return {"error": jnp.mean((batch - w) ** 2)}
        >>> url = tempfile.mkdtemp()
        >>> with ms.MonitoredTrainingSession(lambda: np.float32(0), checkpoint_dir=url) as sess:
        ...     outputs = [sess.run(train) for _ in range(3)]
        >>> evaluator = ms.Evaluator(evaluate, [np.full(8, 5, np.float32)], lambda: np.float32(0))
        >>> result = evaluator.evaluate_once(url)
        >>> result.step, result.metrics
        (3, {'error': 4.0})
    """

    def __init__(
        self,
        step: EvalStep,
        data: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
        init_fn: Callable[[], Any] | None = None,
        *,
        num_batches: int | None = None,
        finish: Callable[[dict[str, float]], Mapping[str, Any]] | None = None,
        name: str | None = None,
        remainder: str = "error",
        hooks: Iterable[Any] = (),
    ) -> None:
        if not isinstance(step, EvalStep):
            raise TypeError(f"Evaluator needs a step made by monsess.eval_step, found {step!r}.")
        self._eval_step = step
        self._step = counted_train_step(step)
        self._hooks = check_hooks(hooks)
        self._data = check_data(step, data, fed=bool(self._hooks))
        self._init_fn = check_function("init_fn", init_fn)
        self._num_batches = None if num_batches is None else check_steps("num_batches", num_batches)
        self._finish = check_function("finish", finish)
        self._prefix = prefix_of(name)
        self._remainder = check_remainder(remainder)
        self._compiled: dict[Any, Any] = {}

    def evaluate_once(
        self,
        url: str | os.PathLike[str],
        checkpoint_step: int | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> EvaluationResult:
        """Evaluate one checkpoint.

        Args:
            url: The checkpoint directory: a local path or any fsspec URL.
            checkpoint_step: Its global step; None: the newest that is sound.
            storage_options: For fsspec; never shown.

        Returns:
            The results.

        Raises:
            StorageError: There is no such checkpoint, or it could not be read.
            DamagedCheckpointError: It, or every one, is damaged.
            StateMismatchError: It is not what ``init_fn`` describes.
        """
        store = CheckpointStore(url, storage_options)
        begun = clock.monotonic()
        restored = self._restored(store, checkpoint_step) if jax.process_index() == 0 else None
        step = int(broadcast(np.int64(-1 if restored is None else restored.step)))
        return self._evaluated(restored, step, begun)

    def evaluate_repeatedly(
        self,
        url: str | os.PathLike[str],
        *,
        timeout: float | None = None,
        timeout_fn: Callable[[], Any] | None = None,
        min_interval_secs: float = 0,
        max_number_of_evaluations: int | None = None,
        until_step: int | None = None,
        newest_only: bool = True,
        log_dir: str | os.PathLike[str] | None = None,
        note: bool = True,
        poll_secs: float = 1.0,
        on_result: Callable[[EvaluationResult], Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> EvaluationResult | None:
        """Evaluate the checkpoints of a directory as they come.

        A checkpoint that is damaged, or was deleted before it could be read, is left out with a warning.

        Args:
            url: The checkpoint directory: a local path or any fsspec URL.
            timeout: Seconds without a new checkpoint after which it ends; None: never.
            timeout_fn: As in `checkpoints_iterator`.
            min_interval_secs: Seconds between the beginnings of two evaluations at least.
            max_number_of_evaluations: End after so many, at least 1.
            until_step: End after the evaluation of this step or a later one.
            newest_only: Evaluate the newest checkpoint and leave out those that came meanwhile; False: every one.
            log_dir: A directory, any fsspec URL, into whose ``metrics.jsonl`` the results are written as
                ``eval/<name>``; not the training's own.
            note: Note the results beside the checkpoint, so that a training with ``KeepBest(n, "eval/<name>")`` ranks
                by them (`CheckpointStore.note_metrics`).
            poll_secs: Seconds between two looks for a new checkpoint.
            on_result: Called with each `EvaluationResult`; a true answer ends.
            storage_options: For fsspec, of ``url`` and ``log_dir``; never shown.

        Returns:
            The last result, or None if there was none.

        Raises:
            ValueError: A number is impossible, or ``log_dir`` is the directory of the training.
            StorageError: The directory could not be looked at, or did not answer for minutes.
            StateMismatchError: A checkpoint is not what ``init_fn`` describes.
        """
        most = None
        if max_number_of_evaluations is not None:
            most = check_steps("max_number_of_evaluations", max_number_of_evaluations)
        last = None if until_step is None else check_steps("until_step", until_step, at_least=0)
        limit = None if timeout is None else secs_from_zero("timeout", timeout)
        interval = secs_from_zero("min_interval_secs", min_interval_secs)
        check_secs("poll_secs", poll_secs)
        check_function("timeout_fn", timeout_fn)
        check_function("on_result", on_result)
        store = CheckpointStore(url, storage_options)
        watch = Watch(store, newest_only, poll_secs, _Word().keep)
        result: EvaluationResult | None = None
        with _Outlet(self._prefix, store, log_dir, storage_options, note) as outlet:
            for count, (restored, step, begun) in enumerate(
                self._checkpoints(store, iterate(watch, limit, interval, timeout_fn)), start=1
            ):
                result = self._evaluated(restored, step, begun)
                outlet.write(result)
                enough = count == most or (last is not None and step >= last)
                asked = on_result is not None and bool(on_result(result))
                if broadcast(np.int64(enough or asked)):
                    break
        return result

    def publish(
        self,
        result: EvaluationResult,
        url: str | os.PathLike[str] | None = None,
        *,
        log_dir: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Note a result beside its checkpoint, write it down, or both, as `evaluate_repeatedly` does.

        Args:
            result: Of `evaluate_once`.
            url: The checkpoint directory; None: it is not noted there.
            log_dir: A directory with a ``metrics.jsonl`` of its own; None: it is not written down.
            storage_options: For fsspec; never shown.
        """
        store = None if url is None else CheckpointStore(url, storage_options)
        with _Outlet(self._prefix, store, log_dir, storage_options) as outlet:
            outlet.write(result)

    def _checkpoints(self, store: CheckpointStore, new: Iterator[int]) -> Iterator[tuple[Restored | None, int, float]]:
        """The new checkpoints that can be read, with their steps and when that began; on other processes no content."""
        if jax.process_index() > 0:
            while (step := int(broadcast(np.int64(0)))) != _OVER:
                if step != _NOTHING_YET:
                    yield None, step, clock.monotonic()
            return
        for step in new:
            begun = clock.monotonic()
            restored = self._restored_if_there(store, step)
            if restored is not None:
                broadcast(np.int64(step))
                yield restored, step, begun
        broadcast(np.int64(_OVER))

    def _restored_if_there(self, store: CheckpointStore, step: int) -> Restored | None:
        try:
            return self._restored(store, step)
        except DamagedCheckpointError as error:
            logger.warning("Not evaluated: %s", error)
        except StorageError:
            if step in store.steps():
                raise
            logger.warning("Step %d in %s was deleted before it could be evaluated; keep more.", step, store.url)
        return None

    def _restored(self, store: CheckpointStore, step: int | None) -> Restored:
        with store._storage.patience(_PATIENCE_SECS):  # the training, too, waits for a store that is away for a while
            restored = find_restorable(store, restore_step=step)
        if restored is None:
            raise StorageError(f"There is no committed checkpoint in {store.url}.")
        return restored

    def _evaluated(self, restored: Restored | None, step: int, begun: float) -> EvaluationResult:
        sums = OverBatches(self._step)
        with (
            _quiet(),
            MonitoredTrainingSession(
                self._init(restored),
                data=None if self._data is None else _Batches(self._data, self._num_batches),
                hooks=[*self._hooks, *self._limit()],
                save_summaries_steps=None,
                save_summaries_secs=None,
                log_step_count_steps=None,
                remainder=self._remainder,
                check_replicas=False,
            ) as session,
        ):
            session._dispatcher._compiled = self._compiled  # not once more for each checkpoint
            while not session.should_stop():
                sums.add(session.run(self._step))
        results = sums.results()
        if self._finish is not None:
            results = finished(self._finish, results)
        result = EvaluationResult(step, results, sums.batches, clock.monotonic() - begun)
        if jax.process_index() == 0:
            logger.info("%s", line(step, self._prefix, results, result.batches, result.seconds))
        return result

    def _init(self, restored: Restored | None) -> Callable[[], Any]:
        """What makes the state; only the first process has it, and the session gives it to all."""
        if restored is None:
            if self._init_fn is None:
                raise ValueError(
                    "With several processes Evaluator needs init_fn=, which says what the state looks like."
                )
            return self._init_fn
        if self._init_fn is None:
            state = nest(restored.specs, restored.leaves, restored.specs.empties)
        else:
            state = initial_state(Scaffold(self._init_fn).finalize(), restored, CheckpointOptions())
        return lambda: state

    def _limit(self) -> list[Any]:
        """What ends an evaluation that no data ends."""
        if self._data is not None:
            return []
        fed = self._eval_step.takes_batch
        if fed and self._num_batches is None:
            return []  # a hook feeds the step, and a hook has to end it
        return [StopAtStepHook(last_step=self._num_batches or 1)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines about a session's start and end: "fresh start, nothing is saved" would be beside the point."""

    def hide(record: logging.LogRecord) -> bool:
        return record.module != "announce"

    logger.addFilter(hide)
    try:
        yield
    finally:
        logger.removeFilter(hide)


class _Batches:
    """Evaluation data for one checkpoint, the first batches of it."""

    def __init__(self, data: Any, count: int | None) -> None:
        self._data, self._count = data, count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(batches_of(self._data), self._count)


class _Word:
    """Tells the other processes of the job now and then that there is nothing yet, or they would wait in vain."""

    def __init__(self) -> None:
        self._said = clock.monotonic()

    def keep(self) -> None:
        """Say it if it is time."""
        if jax.process_count() > 1 and clock.monotonic() - self._said > _WORD_SECS:
            broadcast(np.int64(_NOTHING_YET))
            self._said = clock.monotonic()


def check_log_dir(log_dir: str | os.PathLike[str] | None, store: CheckpointStore | None) -> None:
    """Refuse to write records where the training writes its own.

    Raises:
        ValueError: It is the same directory.
    """
    if log_dir is None or store is None:
        return
    one, other = Storage(log_dir), store._storage
    if (one.local_path or one.url.rstrip("/")) == (other.local_path or other.url.rstrip("/")):
        raise ValueError(
            f"log_dir={store.url!r} is the directory of the training, which writes its own metrics.jsonl there: two "
            "writers would spoil it. Give another one, such as a folder beside it."
        )


class _Outlet:
    """Where results go beside whoever asked for them; on other processes than the first one nowhere.

    Args:
        prefix: Of the names.
        store: The checkpoints, or None.
        log_dir: A directory with a ``metrics.jsonl`` of its own, or None.
        storage_options: For fsspec.
        note: Whether they are noted beside the checkpoints.

    Raises:
        ValueError: ``log_dir`` is the directory of the checkpoints.
    """

    def __init__(
        self,
        prefix: str,
        store: CheckpointStore | None,
        log_dir: str | os.PathLike[str] | None,
        storage_options: Mapping[str, Any] | None,
        note: bool = True,
    ) -> None:
        self._prefix = prefix
        chief = jax.process_index() == 0
        self._store = store if chief and note else None
        check_log_dir(log_dir, store)
        self._records = None
        if log_dir is not None and chief:
            self._records = Records(os.fspath(log_dir), storage_options, uuid.uuid4().hex[:8])

    def write(self, result: EvaluationResult) -> None:
        """Put a result out."""
        values = {f"{self._prefix}{name}": value for name, value in result.metrics.items()}
        if self._records is not None:
            self._records.log(result.step, Logged(values))
        if self._store is None:
            return
        try:
            self._store.note_metrics(result.step, values)
        except MonsessError as error:  # deleted meanwhile, or the directory cannot be written
            logger.warning("The results of step %d were not noted: %s", result.step, error)

    def __enter__(self) -> _Outlet:
        if self._records is not None:
            self._records.open()
        return self

    def __exit__(self, *_: object) -> None:
        if self._records is not None:
            self._records.close()
