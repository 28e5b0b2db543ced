"""`MonitoredTrainingSession`: checks its arguments, adds the default hooks, and makes the session."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, final

import jax

from monsess.checkpoint import CheckpointOptions, KeepLast, Retention
from monsess.errors import ClusterError
from monsess.hook import check_hooks
from monsess.job import the_job
from monsess.log import logger
from monsess.records.events import is_available
from monsess.recovery import Recovery
from monsess.runner import overrides
from monsess.scaffold import Scaffold
from monsess.server import check_joined
from monsess.session import MonitoredSession
from monsess.timer import check_secs, check_steps


@final
class _Default:
    """The value of an argument that was not given."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final = _Default()
_SAVE_SECS = 600
_SUMMARY_STEPS = 100


def MonitoredTrainingSession(
    init_fn: Callable[[], Any] | None = None,
    *,
    scaffold: Scaffold | None = None,
    data: Iterable[Any] | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    storage_options: dict[str, Any] | None = None,
    hooks: Iterable[Any] = (),
    chief_only_hooks: Iterable[Any] = (),
    save_checkpoint_secs: float | _Default | None = DEFAULT,
    save_checkpoint_steps: int | _Default | None = DEFAULT,
    save_summaries_steps: int | _Default | None = DEFAULT,
    save_summaries_secs: float | _Default | None = DEFAULT,
    log_step_count_steps: int | None = 100,
    summary_dir: str | os.PathLike[str] | None = None,
    keep: Retention | None = None,
    checkpoint: CheckpointOptions | None = None,
    prefetch: int | None = None,
    remainder: str = "error",
    max_in_flight: int = 2,
    check_replicas: bool = True,
    stop_grace_period_secs: float = 120,
    max_wait_secs: float = 7200,
    failure_timeout_secs: float = 15,
    stall_timeout_secs: float = 1800,
    recovery: Recovery | None = None,
    on_preemption: str = "exit",
    master: str = "",
    is_chief: bool | None = None,
) -> MonitoredSession:
    """Make a session that restores the newest checkpoint or calls ``init_fn``, and is ready to run steps.

    Killed at any moment and started again, it continues as if nothing had happened: state, step, random stream, input
    position and hook states come from one verified commit.

    Args:
        init_fn: ``() -> state``, any pytree of arrays and numbers; called only when nothing is restored.
        scaffold: A `Scaffold` instead of ``init_fn``.
        data: Iterable of batches for this process, leaves ``[local_batch, ...]``; consumed once, see `repeat`.
        checkpoint_dir: Any fsspec URL or local path; None: nothing is saved. With several processes that of process 0
            counts, and the others may leave it out.
        storage_options: For fsspec: credentials and the like; never logged or stored.
        hooks: `SessionRunHook` objects, in the order in which they run after the default ones.
        chief_only_hooks: Hooks that run on the chief alone, before ``hooks``; they may not issue collectives.
        save_checkpoint_secs: Seconds between saves, 600 by default. A number in one of the two cadences disables the
            other's default; with both, whichever comes first; None switches off that one only.
        save_checkpoint_steps: Save when a multiple of this many steps was crossed.
        save_summaries_steps: Log curves when a multiple of this many steps was crossed, 100 by default; None: never.
            See `SummarySaverHook`; without a directory, and a hook that overrides ``log``, a number is refused.
        save_summaries_secs: Seconds between two of them; a number in one of the two cadences disables the other's
            default, and with both each goes its own way.
        log_step_count_steps: Log the rate of steps when a multiple of this was crossed; None: never.
        summary_dir: Where the records of the run go, any fsspec URL or local path; ``checkpoint_dir`` by default.
        keep: Which checkpoints to keep; `KeepLast` (5) by default.
        checkpoint: How to save and restore.
        prefetch: Batches laid out ahead in the background; 2 by default, 0 for none.
        remainder: For a batch that the local devices do not divide: "error", "drop" or "pad".
        max_in_flight: Steps that may be dispatched and unfinished at once, >= 1.
        check_replicas: Compare the copies of the state on all devices of all processes after the first step and with
            every save.
        stop_grace_period_secs: How long to wait for the coordinator's threads at the end.
        max_wait_secs: How long other processes wait for the chief's initialised or restored state.
        failure_timeout_secs: From any failure to the last exit, with several processes.
        stall_timeout_secs: How long a peer may be silent.
        recovery: What to do about transient errors; see `Recovery`.
        on_preemption: "exit" or "return".
        master: Accepted so that TensorFlow 1 code reads the same; must be empty.
        is_chief: Accepted likewise; checked against the cluster, never trusted.

    Returns:
        A `MonitoredSession`, to be used in a ``with`` statement.

    Raises:
        ValueError: A cadence, size or limit that is not positive, two of ``init_fn`` and ``scaffold``, or a second
            saver while the default one is on.
        HookError: An object in a list of hooks that is not a usable hook.
        UnstorableLeafError: The state has a leaf that no checkpoint can hold.
        StateMismatchError: The stored state differs from the one that ``init_fn`` describes.
        StorageError: The store refuses to be listed, read or written.
        DamagedCheckpointError: There are committed checkpoints, but none is intact.
        ClusterError: ``is_chief`` contradicts the cluster, or there are several processes.

    Example:
        >>> import jax, numpy as np, monsess as ms
        >>> @ms.train_step
        ... def step(w, batch):
        ...     loss, grad = jax.value_and_grad(lambda w: ((batch["x"] * w - batch["y"]) ** 2).mean())(w)
        ...     return w - 0.1 * jax.lax.pmean(grad, "data"), {"loss": loss}
        >>> x = np.linspace(0, 1, 8, dtype=np.float32)
        >>> batches = [{"x": x, "y": 3 * x}] * 5
        >>> with ms.MonitoredTrainingSession(lambda: 0.0, data=batches) as sess:
        ...     while not sess.should_stop():
        ...         outputs = sess.run(step)
        >>> sess.global_step, sess.stop_reason == ms.StopReason.END_OF_DATA
        (5, True)
    """
    if init_fn is not None and scaffold is not None:
        raise ValueError("Pass init_fn or scaffold, not both: Scaffold(init_fn=...) holds the function too.")
    if scaffold is not None and not isinstance(scaffold, Scaffold):
        raise TypeError(f"scaffold must be a Scaffold, found {scaffold!r}.")
    save_secs, save_steps = _save_cadence(save_checkpoint_secs, save_checkpoint_steps)
    log_steps = None if log_step_count_steps is None else check_steps("log_step_count_steps", log_step_count_steps)
    for name, value in (
        ("max_wait_secs", max_wait_secs),
        ("failure_timeout_secs", failure_timeout_secs),
        ("stall_timeout_secs", stall_timeout_secs),
    ):
        check_secs(name, value)
    _check_kind("keep", keep, lambda policy: callable(getattr(policy, "keep", None)))
    _check_kind("checkpoint", checkpoint, lambda options: isinstance(options, CheckpointOptions))
    _check_kind("recovery", recovery, lambda policy: isinstance(policy, Recovery))
    _check_kind("storage_options", storage_options, lambda options: isinstance(options, Mapping))
    _check_kind("checkpoint_dir", checkpoint_dir, lambda url: isinstance(url, (str, os.PathLike)))
    check_remainder(remainder)
    if on_preemption not in ("exit", "return"):
        raise ValueError(f'on_preemption must be "exit" or "return", found {on_preemption!r}.')
    _check_kind("summary_dir", summary_dir, lambda url: isinstance(url, (str, os.PathLike)))
    _check_cluster(master, is_chief)
    directory = None if checkpoint_dir is None else os.fspath(checkpoint_dir)
    if directory is None and summary_dir is None and storage_options and jax.process_index() == 0:
        raise ValueError("storage_options were given without a checkpoint_dir.")

    user_hooks = check_hooks(hooks)
    chief_hooks = check_hooks(chief_only_hooks, "chief_only_hooks")
    counters, savers = _default_hooks(directory, save_secs, save_steps, log_steps, chief_hooks + user_hooks)
    records = os.fspath(summary_dir) if summary_dir is not None else directory
    summaries = _summary_hook(records, save_summaries_steps, save_summaries_secs, chief_hooks + user_hooks)
    options = CheckpointOptions() if checkpoint is None else checkpoint
    return MonitoredSession(
        scaffold=(scaffold or Scaffold(init_fn)).finalize(),
        hooks=counters + summaries + savers + chief_hooks + user_hooks,
        chief_only_hooks=counters + chief_hooks,
        data=data,
        checkpoint_dir=directory,
        storage_options=storage_options,
        summary_dir=None if summary_dir is None else os.fspath(summary_dir),
        keep=KeepLast(5) if keep is None else keep,
        checkpoint=options,
        prefetch=2 if prefetch is None else check_steps("prefetch", prefetch, at_least=0),
        remainder=remainder,
        max_in_flight=check_steps("max_in_flight", max_in_flight),
        check_replicas=check_replicas,
        stop_grace_period_secs=check_secs("stop_grace_period_secs", stop_grace_period_secs),
        recovery=_recovery(recovery),
        on_preemption=on_preemption,
        job=the_job(max_wait_secs, failure_timeout_secs, stall_timeout_secs, options.save_timeout_secs),
    )


def check_remainder(remainder: str) -> str:
    """Return what is to become of a batch that the devices do not divide, after checking it."""
    if remainder not in ("error", "drop", "pad"):
        raise ValueError(f'remainder must be "error", "drop" or "pad", found {remainder!r}.')
    return remainder


def _recovery(policy: Recovery | None) -> Recovery:
    """The policy; with several processes only all of them together can go back, which is the launcher's affair."""
    if jax.process_count() == 1:
        return Recovery() if policy is None else policy
    if policy is not None and policy.max_restarts:
        logger.info("recovery= is left to the launcher, which starts all processes again: monsess run --max-restarts")
    return Recovery(max_restarts=0)


def _default_hooks(
    directory: str | None,
    save_secs: float | None,
    save_steps: int | None,
    log_steps: int | None,
    others: tuple[Any, ...],
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The hooks that every session has, the chief's and all processes'; the core knows built-in hooks here only."""
    from monsess.hooks import CheckpointSaverHook, StepCounterHook

    counters = () if log_steps is None else (StepCounterHook(every_n_steps=log_steps),)
    savers: tuple[Any, ...] = ()
    may_save = directory is not None or jax.process_index() > 0  # the chief's directory counts for all processes
    if may_save and (save_secs is not None or save_steps is not None):
        if any(isinstance(hook, CheckpointSaverHook) for hook in others):
            raise ValueError(
                "A second CheckpointSaverHook: the session saves to its checkpoint_dir already. Set the cadence with "
                "save_checkpoint_steps= and save_checkpoint_secs=, or switch the default saver off by passing None for "
                "both."
            )
        savers = (CheckpointSaverHook(save_secs=save_secs, save_steps=save_steps),)
    return counters, savers


def _save_cadence(secs: float | _Default | None, steps: int | _Default | None) -> tuple[float | None, int | None]:
    by_steps = None if isinstance(steps, _Default) or steps is None else check_steps("save_checkpoint_steps", steps)
    if isinstance(secs, _Default):
        return (_SAVE_SECS if by_steps is None else None), by_steps
    return (None if secs is None else check_secs("save_checkpoint_secs", secs)), by_steps


_KINDS = {
    "keep": "a retention such as monsess.KeepLast(5)",
    "checkpoint": "monsess.CheckpointOptions(...)",
    "recovery": "monsess.Recovery(...)",
    "storage_options": "a dict for fsspec",
    "checkpoint_dir": "a URL or a path",
    "summary_dir": "a URL or a path",
}


def _check_kind(name: str, value: Any, fits: Callable[[Any], bool]) -> None:
    if value is not None and (inspect.isclass(value) or not fits(value)):
        found = f"a {type(value).__name__}" if name == "storage_options" else repr(value)  # it may hold a secret
        raise TypeError(f"{name} must be {_KINDS[name]} or None, found {found}.")


def _summary_hook(records: str | None, steps: Any, secs: Any, others: tuple[Any, ...]) -> tuple[Any, ...]:
    """The default hook that logs curves, where somebody sees them."""
    from monsess.hooks import SummarySaverHook

    steps = check_steps("save_summaries_steps", steps) if not isinstance(steps, _Default | None) else steps
    secs = check_secs("save_summaries_secs", secs) if not isinstance(secs, _Default | None) else secs
    given = [
        f"{name}={value!r}"
        for name, value in (("save_summaries_steps", steps), ("save_summaries_secs", secs))
        if not isinstance(value, _Default | None)
    ]
    listened = any(overrides(hook, "log") for hook in others)
    if given and records is None and not listened and jax.process_index() == 0:
        raise ValueError(
            f"{', '.join(given)}: there is nowhere to write summaries. Pass summary_dir= or checkpoint_dir=, or a hook "
            "that overrides log."
        )
    if given and not is_available() and not listened:
        raise ValueError(
            f"{', '.join(given)}: TensorBoard's files are written by its own library, which is not installed: "
            'pip install "monsess[tensorboard]". Without the argument, curves go to metrics.jsonl alone.'
        )
    if isinstance(steps, _Default):
        steps = _SUMMARY_STEPS if isinstance(secs, _Default) else None
    secs = None if isinstance(secs, _Default) else secs
    may_write = records is not None or listened or jax.process_index() > 0  # the chief's directory counts for all
    if not may_write or (steps is None and secs is None):
        return ()
    if records is not None and not is_available():
        logger.info("curves go to metrics.jsonl only; with monsess[tensorboard] to TensorBoard's files, too")
    hooks = [SummarySaverHook(save_steps=steps)] if steps is not None else []
    return (*hooks, *([SummarySaverHook(save_secs=secs)] if secs is not None else []))


def _check_cluster(master: str, is_chief: bool | None) -> None:
    check_joined(master)
    if is_chief is not None and bool(is_chief) != (jax.process_index() == 0):
        raise ClusterError(
            f"is_chief={is_chief}, but this is process {jax.process_index()} of {jax.process_count()}, and process 0 "
            "is the chief. Leave it out."
        )
