"""`Server`: joins the job that this process belongs to, through `jax.distributed`, in bounded time."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, final

import jax

from monsess import roll_call
from monsess.cluster import ClusterSpec, Expected, expected, from_spec, tf_config
from monsess.errors import ClusterError
from monsess.last_words import last_words
from monsess.log import logger
from monsess.waiting import Waiting

_LOOK_SECS = 0.05
# Once all are here JAX needs a moment; the limit is not for people to wait, but for a process that dies right then.
_LEAST_JOIN_SECS = 30.0
# Our own limit has to come first: JAX ends the process from native code.
_AFTER_OURS_SECS = 600
# JAX notices about a second after its own limit, and then takes a moment, longer under load, to end the process.
_NOTICE_SECS = 3.0
# A process that is through waits that long in JAX's exit for one that still works, before JAX ends both.
_EXIT_WAIT_SECS = 2 * 60 * 60


class _Membership:
    """What this process has joined; a process can do so once."""

    def __init__(self) -> None:
        self.job: Expected | None = None
        self.alone = False
        self.failed = False


_membership = _Membership()


@final
class Server:
    """Joins this process to its job, with all others; does nothing where there is no job of several processes.

    Call it once, at the top of the script, before JAX is used. Without arguments it looks, in this order, for
    ``python -m monsess run``, ``TF_CONFIG``, Slurm, Open MPI and an indexed Kubernetes job. It returns once all
    processes are here and know each other's devices; every ten seconds a line says for whom it waits. Process 0 is the
    chief: the task of job ``chief``, or else the first one by name of job and index.

    Afterwards an error, or a SIGTERM that nobody else handles, outside a session ends this process at once, rather than
    in JAX's exit, which waits for the other processes; they notice within ``failure_timeout_secs``, and at once where
    they make a session. After a session that has ended well SIGTERM no longer takes the others along.

    Args:
        cluster: A `ClusterSpec` or what makes one; None looks at the environment. An empty one says that this process
            works alone, whatever the environment says.
        job_name: This task's job; None takes the only one, or that of ``TF_CONFIG``.
        task_index: This task's index in its job; None takes the only one, or that of ``TF_CONFIG``.
        start_timeout_secs: How many seconds to wait for the others.
        failure_timeout_secs: After how many seconds of silence a process counts as dead, at least 1; JAX then ends the
            others.

    Raises:
        ClusterError: Not all came in time (the message names who is missing, where that can be known), JAX has been
            used before, the processes found are not those expected, the address is taken, this process is left over
            from an earlier attempt, or the cluster has parameter servers. The process cannot join again.
        TypeError: ``cluster`` is something else.
        ValueError: The task is not in the cluster or cannot be told, or a limit is not positive.

    Example:
        >>> import monsess as ms
        >>> server = ms.Server()  # no cluster here
        >>> server.process_index, server.process_count, server.target
        (0, 1, '')
    """

    def __init__(
        self,
        cluster: ClusterSpec | Mapping[str, Any] | None = None,
        job_name: str | None = None,
        task_index: int | None = None,
        *,
        start_timeout_secs: float = 300,
        failure_timeout_secs: float = 15,
    ) -> None:
        _check_secs("start_timeout_secs", start_timeout_secs, 0)
        _check_secs("failure_timeout_secs", failure_timeout_secs, 1)
        job = _wanted(cluster, job_name, task_index)
        if job is not None and job.count != 1:
            _join_once(job, start_timeout_secs, failure_timeout_secs)
        elif cluster is not None or job_name is not None:
            _membership.alone = True
        self._job = _membership.job

    @property
    def target(self) -> str:
        """What `MonitoredTrainingSession` takes as ``master``: names the job and this process, empty if it is alone."""
        return target()

    @property
    def process_index(self) -> int:
        """Which process this is; 0 is the chief."""
        return 0 if self._job is None else self._job.index

    @property
    def process_count(self) -> int:
        """How many processes the job has."""
        return 1 if self._job is None else jax.process_count()

    def join(self) -> None:
        """Wait until the job has been left: for `jax.distributed.shutdown`, or the end of this process.

        As in TensorFlow this is for a process that has nothing else to do. Without a job it returns at once.
        """
        while self._job is not None and jax.distributed.is_initialized():
            time.sleep(_LOOK_SECS)


def target() -> str:
    """The name of the job that was joined and of this process in it, empty if none was; see `Server.target`."""
    job = _membership.job
    if job is None:
        return ""
    return f"monsess://{job.coordinator or job.source.replace(' ', '-').lower()}/{job.index}"


def check_joined(master: str = "") -> None:
    """Refuse a process that belongs to a job and has not joined it: it would train alone, as one of several chiefs.

    Args:
        master: What the user gave as the ``master`` of a session, `Server.target` or nothing.

    Raises:
        ClusterError: The surroundings speak of a job of several processes, and JAX knows another number of them.
        ValueError: ``master`` is something else.
    """
    if master and master != target():
        raise ValueError(
            f"master={master!r}: expected Server.target, which is {target()!r} here. There is no remote master; leave "
            "it out."
        )
    if _membership.alone:
        return
    job = _membership.job or expected()
    if job is None or job.count == 1:
        return
    if not jax.distributed.is_initialized():
        raise ClusterError(
            f"{job.source} says that this is {job.who}, but it has not joined the others. Call monsess.Server() at the "
            "top of the script, before JAX is used. If it is meant to work alone: monsess.Server({})."
        )
    _check_count(job)


def _wanted(cluster: Any, job_name: str | None, task_index: int | None) -> Expected | None:
    if cluster is None and job_name is None and task_index is None:
        return expected()
    source = "the cluster"
    if cluster is None:
        found = tf_config(os.environ)
        if found is None:
            raise ValueError("job_name and task_index name a task of a cluster: give `cluster` too, or set TF_CONFIG.")
        spec, job, index = found
        source = "TF_CONFIG"
        if job_name is None:
            job_name = job
        if task_index is None and job_name == job:
            task_index = index
    else:
        spec = ClusterSpec(cluster)
    if not spec or job_name == "evaluator":
        return None
    return from_spec(spec, job_name, task_index, source)


def _join_once(job: Expected, start_secs: float, failure_secs: float) -> None:
    if _membership.failed:
        raise ClusterError("This process failed to join its job before and cannot try again. Start it anew.")
    if _membership.job is not None:
        if job != _membership.job:
            raise ClusterError(
                f"This process has joined as {_membership.job.who} already; it cannot join as {job.who}."
            )
        return
    sigterm = signal.getsignal(signal.SIGTERM)
    if jax.distributed.is_initialized():
        logger.info("%s: joined by jax.distributed.initialize already, with its limits", job.who)
        _check_count(job)
        last_words.listen(failure_secs)
        last_words.keep_sigterm(sigterm)
        last_words.joined()
        _membership.job = job
        return
    _refuse_late()
    last_words.listen(failure_secs)
    begun = time.monotonic()
    try:
        waiting = Waiting(job.who, start_secs)
        if job.coordinator is not None:
            roll_call.hold_or_attend(job, waiting)
            waiting.limit_secs = max(start_secs, waiting.passed_secs + _LEAST_JOIN_SECS)
        _join(job, waiting, failure_secs, sigterm)
        last_words.joined()
        _check_count(job)
        _check_devices(job)
    except BaseException:
        _membership.failed = True
        raise
    _membership.job = job
    attempt = f", attempt {job.attempt}" if job.attempt else ""
    logger.info(
        "joined as process %d of %d (%s%s) in %.1f s",
        job.index,
        jax.process_count(),
        job.source,
        attempt,
        time.monotonic() - begun,
    )


def _join(job: Expected, waiting: Waiting, failure_secs: float, sigterm: Any) -> None:
    """Let JAX join, in a thread of its own: it blocks in native code, where neither a limit nor Ctrl-C reaches it.

    ``sigterm`` is the handler from before: JAX replaces it long before it is through with looking for its devices.
    """
    arguments = {
        "num_processes": job.count,
        "process_id": job.index,
        "initialization_timeout": math.ceil(waiting.left_secs) + _AFTER_OURS_SECS,
        "heartbeat_timeout_seconds": max(1, int(failure_secs - _NOTICE_SECS)),
        "shutdown_timeout_seconds": _EXIT_WAIT_SECS,
    }
    if job.coordinator is None:
        arguments["cluster_detection_method"] = job.method
    else:
        arguments |= {"coordinator_address": job.coordinator, "cluster_detection_method": "deactivate"}
        if job.index == 0:
            host, port = roll_call.bind_address(job.coordinator)
            host = f"[{host or '::'}]" if ":" in host or not host else host
            arguments["coordinator_bind_address"] = f"{host}:{port}"
    if job.source == "Kubernetes" and find_spec("kubernetes") is None:
        raise ClusterError("JAX joins the pods of a Kubernetes job through the package `kubernetes`: install jax[k8s].")
    with contextlib.suppress(AttributeError):  # where there is no such option there is no such service
        # It would take SIGTERM a moment before it can be given back. What it is for, a session does by itself.
        jax.config.update("jax_enable_preemption_service", False)
    errors: list[BaseException] = []
    initialized, ended = threading.Event(), threading.Event()

    def join() -> None:
        try:
            jax.distributed.initialize(**arguments)
            initialized.set()
            jax.process_count()  # makes the devices known to all, which waits for all as well
        except BaseException as error:
            errors.append(error)
        ended.set()

    try:
        last_words.keep_sigterm(sigterm)
        threading.Thread(target=join, name="monsess-join", daemon=True).start()
        whom = _the_others(job)
        while not ended.wait(min(_LOOK_SECS, waiting.left_secs)):
            if initialized.is_set():
                last_words.keep_sigterm(sigterm)  # which JAX has taken if it has that service without an option
            if not waiting.left_secs:
                raise ClusterError(
                    f"{job.who[0].upper()}{job.who[1:]} waited {waiting.passed_secs:.0f} s (start_timeout_secs) for "
                    f"{whom} in vain. Look at the logs of the others for one that did not start or has died."
                )
            waiting.say(whom)
        last_words.keep_sigterm(sigterm)
        if errors:
            raise ClusterError(
                f"{job.who[0].upper()}{job.who[1:]} ({job.source}) cannot join: {errors[0]}"
            ) from errors[0]
    except BaseException as error:
        last_words.doom(error)
        raise


def _the_others(job: Expected) -> str:
    if job.coordinator is not None:
        return "all processes, which were here, to join"
    others = "the others" if job.count is None else f"the other {job.count - 1}" if job.count > 2 else "the other one"
    return f"{others} to join; JAX does not say who is missing"


def _refuse_late() -> None:
    """Refuse if JAX has been used, which only its own join tells: asked for the impossible, it looks at that first."""
    try:
        jax.distributed.initialize("127.0.0.1:1", 1, 1, cluster_detection_method="deactivate")
    except RuntimeError as error:
        raise ClusterError(
            "JAX has been used before this process joined its job, so that it would work alone with its own devices. "
            "Call monsess.Server() at the top of the script, before the first array is made or jax.devices() is called."
        ) from error
    except ValueError:
        pass


def _check_count(job: Expected) -> None:
    found = jax.process_count()
    if job.count is not None and found != job.count:
        raise ClusterError(
            f"{job.source} speaks of {job.count} processes, but JAX knows {found}. Either jax.distributed.initialize "
            "was called with another job, or JAX's platform here knows a single process only."
        )


def _check_devices(job: Expected) -> None:
    found = jax.local_device_count()
    if job.local_devices is not None and found != job.local_devices:
        raise ClusterError(
            f"{job.source} gave this process {job.local_devices} devices, but JAX found {found}. The script must not "
            "set XLA_FLAGS or jax_num_cpu_devices itself, or be started without --devices-per-process."
        )


def _check_secs(name: str, value: float, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number of seconds, found {value!r}.")
    if value <= 0 or value < least:
        raise ValueError(f"{name} must be {f'at least {least}' if least else 'positive'}, found {value!r}.")
