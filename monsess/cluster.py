"""What the surroundings of this process say about the job that it belongs to, read without joining it.

In this order: ``python -m monsess run`` (its ``MONSESS_…`` variables), ``TF_CONFIG``, Slurm, Open MPI, Kubernetes. For
the last three JAX itself finds where to meet; read here is only how many processes there are and which one this is.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from monsess.cluster_spec import ClusterSpec as ClusterSpec
from monsess.cluster_spec import split_address
from monsess.errors import ClusterError

_CHIEFS = ("chief", "master")  # jobs whose task is process 0, whatever the other jobs are called
_EVALUATOR = "evaluator"
_PS = "ps"
# What `srun` sets for every task. A batch script has some of them too, but no node list of a step.
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_NAMED = 8  # processes that a message names one by one


@dataclasses.dataclass(frozen=True)
class Expected:
    """The job that a process belongs to, as its surroundings tell.

    Args:
        count: How many processes there are; 1 leaves nothing to join, None is told by joining only (Kubernetes).
        index: Which one this is; process 0 is the chief.
        source: Who says so, for people.
        coordinator: ``host:port`` of process 0, or None where JAX finds it.
        method: JAX's ``cluster_detection_method`` where ``coordinator`` is None.
        launch: Names the launch of which this is an attempt; empty if nobody named it.
        attempt: How often the job had been started before in this launch.
        local_devices: How many devices the launcher gave each process, or None.
        names: A name for people for each process; empty where they have none.
    """

    count: int | None
    index: int
    source: str
    coordinator: str | None = None
    method: str | None = None
    launch: str = ""
    attempt: int = 0
    local_devices: int | None = None
    names: tuple[str, ...] = ()

    @property
    def who(self) -> str:
        """This process, for people: ``"process 1 of 4"``."""
        return f"process {self.index}" + ("" if self.count is None else f" of {self.count}")

    def processes(self, indices: Sequence[int]) -> str:
        """The given processes, for people: ``"processes 1 and 3 (worker 0 at 10.0.0.2:2222, …)"``."""
        shown = [str(index) for index in indices[:_NAMED]]
        more = len(indices) - len(shown)
        last = f"{more} more" if more else shown.pop()
        text = f"{', '.join(shown)} and {last}" if shown else last
        names = ", ".join(self.names[index] for index in indices[:_NAMED] if index < len(self.names))
        return f"process{'es' if len(indices) > 1 else ''} {text}" + (f" ({names})" if names else "")


def expected(environ: Mapping[str, str] | None = None) -> Expected | None:
    """What the environment says about the job of this process, without joining it; None if there is no cluster.

    Args:
        environ: The environment variables; None reads those of this process.

    Returns:
        The job, or None: nothing speaks of a cluster, or this process stands beside it (an ``evaluator``).

    Raises:
        ClusterError: The variables contradict themselves, are incomplete, or ask for parameter servers.

    Example:
        >>> expected({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'})
        Expected(count=2, index=1, source='TF_CONFIG', coordinator='a:1', ...)
    """
    environ = os.environ if environ is None else environ
    for look in (_monsess_run, _tf_config, _slurm, _open_mpi, _kubernetes):
        found = look(environ)
        if found is not None:
            return found
        if look is _tf_config and tf_config(environ) is not None:
            return None  # an evaluator stands beside the cluster, whatever started it
    return None


def from_spec(spec: ClusterSpec, job: str | None, index: int | None, source: str) -> Expected:
    """The job that a `ClusterSpec` describes, as one of its tasks sees it.

    The processes are counted through: ``chief`` or ``master`` first, then the other jobs by name, each by index.

    Args:
        spec: The tasks; one job at least.
        job: This task's job, or None for the only one.
        index: This task's index, or None for the only one of its job.
        source: Who says so, for people.

    Raises:
        ValueError: The task is not named and not the only one, or is not in the cluster.
        ClusterError: The cluster has parameter servers.
    """
    if job == _PS or (_PS in spec.jobs and spec.num_tasks(_PS)):
        raise ClusterError(
            "The cluster has a `ps` job. All processes of monsess train together, in step, and hold the state "
            "themselves: take the job `ps` out of the cluster and start no such task."
        )
    jobs = [name for name in spec.jobs if spec.num_tasks(name) and name != _EVALUATOR]
    if job is None:
        if len(jobs) != 1:
            raise ValueError(f"Must specify an explicit `job_name`: the cluster has the jobs {sorted(spec.jobs)}.")
        job = jobs[0]
    if index is None:
        if spec.num_tasks(job) != 1:
            raise ValueError(f"Must specify an explicit `task_index`: job {job!r} has {spec.num_tasks(job)} tasks.")
        (index,) = spec.task_indices(job)
    address = spec.task_address(job, index)
    order = sorted(jobs, key=lambda name: (name not in _CHIEFS, name))
    tasks = [(name, at, spec.task_address(name, at)) for name in order for at in spec.task_indices(name)]
    return Expected(
        count=len(tasks),
        index=tasks.index((job, index, address)),
        source=source,
        coordinator=tasks[0][2],
        names=tuple(f"{name} {at} at {where}" for name, at, where in tasks),
    )


def tf_config(environ: Mapping[str, str]) -> tuple[ClusterSpec, str | None, int | None] | None:
    """Cluster, job and index of ``TF_CONFIG``; None if it is not set or names no cluster.

    Raises:
        ClusterError: It cannot be read.
    """
    text = environ.get("TF_CONFIG", "").strip()
    if not text:
        return None
    try:
        config = json.loads(text)
        if not isinstance(config, dict):
            raise TypeError("it is no JSON object")
        spec = ClusterSpec(config.get("cluster") or {})
        task = config.get("task") or {}
        job, index = task.get("type"), task.get("index")
        if job is not None and not isinstance(job, str):
            raise TypeError(f"the type of the task must be a string, found {job!r}")
        index = None if index is None else int(index)
    except (ValueError, TypeError, AttributeError) as error:
        raise ClusterError(
            f"TF_CONFIG cannot be used: {error} Expected, for one, "
            '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}; '
            f"found {text[:200]}"
        ) from error
    return (spec, job, index) if spec else None


def _tf_config(environ: Mapping[str, str]) -> Expected | None:
    found = tf_config(environ)
    if found is None or found[1] == _EVALUATOR:
        return None
    try:
        return from_spec(*found, source="TF_CONFIG")
    except ValueError as error:
        raise ClusterError(f"TF_CONFIG does not say which task this process is: {error}") from error


def _monsess_run(environ: Mapping[str, str]) -> Expected | None:
    names = ("MONSESS_COORDINATOR", "MONSESS_PROCESS_ID", "MONSESS_PROCESS_COUNT")
    if not any(name in environ for name in names):
        return None
    missing = [name for name in names if name not in environ]
    if missing:
        raise ClusterError(f"`monsess run` sets {', '.join(names)} together; found no {', '.join(missing)}.")
    coordinator = environ["MONSESS_COORDINATOR"]
    try:
        split_address(coordinator)
    except ValueError as error:
        raise ClusterError(f"MONSESS_COORDINATOR: {error}") from None
    local = environ.get("MONSESS_LOCAL_DEVICES")
    return _checked(
        Expected(
            count=_number(environ, "MONSESS_PROCESS_COUNT"),
            index=_number(environ, "MONSESS_PROCESS_ID"),
            source="monsess run",
            coordinator=coordinator,
            launch=environ.get("MONSESS_LAUNCH_ID", ""),
            attempt=_number(environ, "MONSESS_ATTEMPT") if "MONSESS_ATTEMPT" in environ else 0,
            local_devices=_number(environ, "MONSESS_LOCAL_DEVICES") if local else None,
        )
    )


def _slurm(environ: Mapping[str, str]) -> Expected | None:
    if any(name not in environ for name in _SLURM):
        return None
    # In an interactive step SLURM_NTASKS is that of the allocation, and the shell is the step's only task.
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    found = Expected(_number(environ, count), _number(environ, "SLURM_PROCID"), "Slurm", method="slurm")
    return _checked(found)


def _open_mpi(environ: Mapping[str, str]) -> Expected | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ or "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    # Open MPI 5 no longer tells the address of its launcher; JAX then asks MPI itself.
    method = "ompi" if "OMPI_MCA_orte_hnp_uri" in environ else "mpi4py"
    count, rank = _number(environ, "OMPI_COMM_WORLD_SIZE"), _number(environ, "OMPI_COMM_WORLD_RANK")
    return _checked(Expected(count, rank, "Open MPI", method=method))


def _kubernetes(environ: Mapping[str, str]) -> Expected | None:
    # A pod outside an indexed job knows the service host as well: it is no part of a cluster.
    if "KUBERNETES_SERVICE_HOST" not in environ or "JOB_COMPLETION_INDEX" not in environ:
        return None
    return Expected(None, _number(environ, "JOB_COMPLETION_INDEX"), "Kubernetes")


def _number(environ: Mapping[str, Any], name: str) -> int:
    text = str(environ[name])
    if not text.isdecimal():
        raise ClusterError(f"{name} must be a whole number, found {text!r}.")
    return int(text)


def _checked(found: Expected) -> Expected:
    if found.count is not None and not found.index < found.count:
        raise ClusterError(
            f"{found.source} says that this is process {found.index}, but of {found.count} processes, which are "
            "counted from 0. Correct the environment variables, or start the job anew."
        )
    return found
