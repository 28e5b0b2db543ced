"""Curves for trackers of experiments: whatever is logged goes to MLflow, or to Weights & Biases, as well."""

from __future__ import annotations

import importlib
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from monsess import clock
from monsess.hook import SessionRunHook
from monsess.hooks._outbox import Outbox

if TYPE_CHECKING:
    from monsess.coordinator import Coordinator
    from monsess.session import MonitoredSession

_END_SECS = 30.0
_END_AFTER_ERROR_SECS = 5.0
_MOST_METRICS = 1000  # of one call to MLflow
_MOST_PARAMS = 100
_RUN_ID = "monsess.run_id"


class _Tracker(SessionRunHook):
    """What the adapters have in common: the chief alone calls the service, in a thread beside training."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._outbox: Outbox | None = None

    def begin(self) -> None:
        """Forget another session's run."""
        self._outbox = None

    def after_create_session(self, session: MonitoredSession, coord: Coordinator) -> None:
        """Open the run: the one that an earlier attempt has opened, or a new one."""
        if self._outbox is None and session.is_chief:
            self._outbox = Outbox(self._service)
            run_id = session.run_id
            self._outbox.put(lambda: self._open(run_id))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send what was logged."""
        if self._outbox is not None:
            when = clock.wall()
            self._outbox.put(lambda: self._write(step, when, scalars))

    def end(self, session: MonitoredSession) -> None:
        """Close the run."""
        preempted = session.stop_reason is not None and session.stop_reason.name == "PREEMPTED"
        self._close("KILLED" if preempted else "FINISHED", _END_SECS)

    def on_error(self, session: MonitoredSession, error: BaseException) -> None:
        """Close the run as a failed one."""
        self._close("FAILED", _END_AFTER_ERROR_SECS)

    def _close(self, status: str, seconds: float) -> None:
        if self._outbox is not None:
            self._outbox.put(lambda: self._finish(status), closes=True)
            self._outbox.close(seconds)

    @abstractmethod
    def _open(self, run_id: str) -> None: ...

    @abstractmethod
    def _write(self, step: int, when: float, scalars: Mapping[str, float]) -> None: ...

    @abstractmethod
    def _finish(self, status: str) -> None: ...


@final
class MLflowHook(_Tracker):
    """Sends everything that is logged to MLflow; needs ``pip install "monsess[mlflow]"``.

    All attempts of a run write into one MLflow run, which is found by its tag ``monsess.run_id``. Steps that a kill
    has undone are there twice, since MLflow takes nothing back. A server that is slow or away never stops training:
    it is tried again, and what it has not taken at the end is lost, with a warning.

    Args:
        experiment: Name of the experiment, made if it is not there.
        run_name: What the run is called; None: MLflow invents a name.
        tracking_uri: Where; None: what MLflow is set to.
        params: Logged once, such as the learning rate.
        tags: Of the run.

    Raises:
        ImportError: MLflow is not installed.

    Example:
        >>> import monsess as ms
        >>> def hooks():
        ...     return [ms.MLflowHook("digits", tracking_uri="http://127.0.0.1:5000", params={"rate": 0.1})]
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__("MLflow")
        self._mlflow = _required("mlflow")
        self._experiment = experiment
        self._run_name = run_name
        self._tracking_uri = tracking_uri
        self._params = {str(name): str(value) for name, value in (params or {}).items()}
        self._tags = {str(name): str(value) for name, value in (tags or {}).items()}
        self._client: Any = None
        self._run: str | None = None

    def _open(self, run_id: str) -> None:
        client = self._mlflow.MlflowClient(tracking_uri=self._tracking_uri)
        found = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
        runs = client.search_runs([experiment], filter_string=f"tags.`{_RUN_ID}` = '{run_id}'", max_results=1)
        if runs:
            self._run = runs[0].info.run_id
            client.update_run(self._run, status="RUNNING")
            self._client = client
            return
        tags = {**self._tags, _RUN_ID: run_id}
        self._run = client.create_run(experiment, tags=tags, run_name=self._run_name).info.run_id
        self._client = client
        params = [self._mlflow.entities.Param(name, value) for name, value in self._params.items()]
        for at in range(0, len(params), _MOST_PARAMS):
            client.log_batch(self._run, params=params[at : at + _MOST_PARAMS])

    def _write(self, step: int, when: float, scalars: Mapping[str, float]) -> None:
        metric, at = self._mlflow.entities.Metric, int(when * 1000)
        metrics = [metric(_mlflow_name(tag), value, at, step) for tag, value in scalars.items()]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + _MOST_METRICS])

    def _finish(self, status: str) -> None:
        self._client.set_terminated(self._run, status=status)


@final
class WandbHook(_Tracker):
    """Sends everything that is logged to Weights & Biases; needs ``pip install "monsess[wandb]"``.

    All attempts of a run write into one run there, whose id is the session's ``run_id``. The curves are over
    ``global_step``, so that steps which a kill has undone can be logged again.

    Args:
        project: Name of the project; None: what wandb is set to.
        name: What the run is called; None: wandb invents a name.
        config: Logged once, such as the learning rate.
        **init: Further arguments of ``wandb.init``, such as ``entity``, ``dir`` or ``mode="offline"``.

    Raises:
        ImportError: wandb is not installed.

    Example:
        >>> import monsess as ms
        >>> def hooks(folder):
        ...     return [ms.WandbHook("digits", config={"rate": 0.1}, mode="offline", dir=folder)]
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        **init: Any,
    ) -> None:
        super().__init__("Weights & Biases")
        self._wandb = _required("wandb")
        self._init = {"project": project, "name": name, "config": dict(config or {}), **init}
        self._run: Any = None

    def _open(self, run_id: str) -> None:
        self._run = self._wandb.init(**{"id": run_id, "resume": "allow", **self._init})
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")

    def _write(self, step: int, when: float, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, "global_step": step})

    def _finish(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)


def _mlflow_name(tag: str) -> str:
    """The tag as MLflow takes it, which refuses a whole batch for one name that it does not like."""
    parts = [part for part in re.sub(r"[^\w.\- /]", "_", tag).split("/") if part.strip(".")]
    return "/".join(parts)[:250].rstrip("/") or "_"


def _required(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"The hook needs the package {module}, which is not installed or cannot be imported ({error}). Install "
            f'it: pip install "monsess[{module}]".'
        ) from error
