"""`ClusterSpec`: the tasks of a job and their addresses, checked when it is made and never changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s\[\]:/@]+):(?P<port>\d+)")
_LAST_PORT = 65535


@final
class ClusterSpec:
    """The tasks of a cluster by job name and index, each with its ``host:port``.

    It is checked when it is made, cannot be changed, and is equal to every other one that names the same tasks at the
    same addresses, in whatever order and form they were given. An empty one is false.

    Args:
        cluster: Another `ClusterSpec`, or a mapping from job names to lists of ``"host:port"``, or, where not every
            index is known, to mappings from index to ``"host:port"``. Indices may be strings of digits, as JSON makes
            them.

    Raises:
        TypeError: Something is of another type; a single string in place of a list, for one.
        ValueError: An address without a port, with an impossible one or with a scheme, a negative index, a task that
            is named twice, or two tasks at one address.

    Example:
        >>> import monsess as ms
        >>> cluster = ms.ClusterSpec({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]})
        >>> cluster.num_tasks("worker")
        2
        >>> cluster == ms.ClusterSpec({"worker": {1: "10.0.0.2:2222", 0: "10.0.0.1:2222"}})
        True
        >>> ms.ClusterSpec({"worker": ["10.0.0.1"]})
        Traceback (most recent call last):
            ...
        ValueError: Task 0 of job 'worker': expected 'host:port', found '10.0.0.1', which has no port.
    """

    __slots__ = ("_jobs",)

    def __init__(self, cluster: ClusterSpec | Mapping[str, Sequence[str] | Mapping[Any, str]]) -> None:
        if isinstance(cluster, ClusterSpec):
            jobs = cluster._jobs
        elif isinstance(cluster, Mapping):
            jobs = {_name(job): dict(sorted(_tasks(job, tasks))) for job, tasks in cluster.items()}
            _refuse_shared_addresses(jobs)
        else:
            raise TypeError(f"expected a ClusterSpec or a mapping from job names to addresses, found {cluster!r}.")
        self._jobs: dict[str, dict[int, str]]
        object.__setattr__(self, "_jobs", jobs)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("A ClusterSpec cannot be changed; make another one.")

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order in which they were given."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """How many tasks of a job are defined; gaps between indices do not count.

        Raises:
            ValueError: There is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """The indices of a job's tasks, sorted.

        Raises:
            ValueError: There is no such job.
        """
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """The ``host:port`` of a task.

        Raises:
            ValueError: There is no such job, or no task with that index in it.
        """
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(f"No task with index {task_index!r} in job {job_name!r}; there are {list(tasks)}.")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """The addresses of a job by index, with None where an index is not defined.

        Raises:
            ValueError: There is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Plain data that makes an equal spec, sorted by job and index; it survives JSON.

        A job whose indices have gaps is a mapping from index to address, every other one a list.
        """
        return {
            job: list(tasks.values()) if _is_dense(tasks) else dict(tasks) for job, tasks in sorted(self._jobs.items())
        }

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return self._jobs == other._jobs if isinstance(other, ClusterSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset((job, tuple(tasks.items())) for job, tasks in self._jobs.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"

    def __reduce__(self) -> tuple[type[ClusterSpec], tuple[dict[str, Any]]]:
        return ClusterSpec, (self.as_dict(),)

    def _job(self, name: str) -> dict[int, str]:
        if name not in self._jobs:
            raise ValueError(f"No such job in cluster: {name!r}; there are {sorted(self._jobs)}.")
        return self._jobs[name]


def split_address(address: str) -> tuple[str, int]:
    """Host, without the brackets of IPv6, and port of a ``host:port``.

    Raises:
        ValueError: It is something else.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        why = "" if re.search(r":\d+$", address) else ", which has no port"
        raise ValueError(f"expected 'host:port', found {address!r}{why}.")
    port = int(match["port"])
    if not 0 < port <= _LAST_PORT:
        raise ValueError(f"expected 'host:port' with a port from 1 to {_LAST_PORT}, found {address!r}.")
    return match["host"].strip("[]"), port


def _name(job: Any) -> str:
    if not isinstance(job, str):
        raise TypeError(f"The name of a job must be a string, found {job!r}.")
    if not job.strip():
        raise ValueError(f"The name of a job must not be empty, found {job!r}.")
    return job


def _tasks(job: str, tasks: Any) -> Iterator[tuple[int, str]]:
    if isinstance(tasks, Mapping):
        pairs = list(tasks.items())
    elif isinstance(tasks, (list, tuple)):
        pairs = list(enumerate(tasks))
    else:
        raise TypeError(
            f"Job {job!r}: expected a list of addresses or a mapping from index to address, found {tasks!r}."
        )
    seen: set[int] = set()
    for key, address in pairs:
        index = _index(job, key)
        if index in seen:
            raise ValueError(f"Task {index} of job {job!r} is named twice.")
        seen.add(index)
        if not isinstance(address, str):
            raise TypeError(f"Task {index} of job {job!r}: expected 'host:port', found {address!r}.")
        try:
            split_address(address)
        except ValueError as error:
            raise ValueError(f"Task {index} of job {job!r}: {error}") from None
        yield index, address


def _index(job: str, key: Any) -> int:
    if isinstance(key, str) and re.fullmatch(r"-?[0-9]+", key):
        key = int(key)
    if isinstance(key, bool) or not isinstance(key, int):
        raise TypeError(f"Job {job!r}: the index of a task must be an integer, found {key!r}.")
    if key < 0:
        raise ValueError(f"Job {job!r}: the index of a task must not be negative, found {key}.")
    return key


def _refuse_shared_addresses(jobs: Mapping[str, Mapping[int, str]]) -> None:
    owners: dict[tuple[str, int], str] = {}
    for job, tasks in jobs.items():
        for index, address in tasks.items():
            host, port = split_address(address)
            task = f"task {index} of job {job!r}"
            other = owners.setdefault((host.lower(), port), task)
            if other != task:
                raise ValueError(f"Each task needs an address of its own: {other} and {task} share {address!r}.")


def _is_dense(tasks: Mapping[int, str]) -> bool:
    return list(tasks) == list(range(len(tasks)))
