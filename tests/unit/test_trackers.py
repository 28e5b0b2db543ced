"""MLflowHook and WandbHook: against a stand-in for each service, and against the packages themselves where they are."""

from __future__ import annotations

import sys
import threading
import time
import types

import jax.numpy as jnp
import pytest
import ticks

import monsess as ms
from monsess.hooks._outbox import Outbox


@ms.train_step
def step(state):
    return state + 1, {"loss": 1.0 / (state + 1)}


def train(last, *hooks, **more):
    with ms.MonitoredTrainingSession(
        lambda: jnp.zeros(()),
        hooks=[*hooks, ms.StopAtStepHook(last_step=last)],
        save_summaries_steps=1,
        log_step_count_steps=None,
        **more,
    ) as sess:
        while not sess.should_stop():
            sess.run(step)
    return sess


CURVE = [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 0.25)]


class FakeMLflow(types.ModuleType):
    """As much of MLflow as the hook uses, with a server in memory that may be away."""

    def __init__(self):
        super().__init__("mlflow")
        self.experiments, self.runs, self.away = {}, {}, threading.Event()
        self.entities = types.SimpleNamespace(Metric=lambda *fields: fields, Param=lambda *fields: fields)

    def MlflowClient(self, tracking_uri=None):
        return FakeMlflowClient(self)


class FakeMlflowClient:
    def __init__(self, server):
        self.server = server
        if server.away.is_set():
            raise ConnectionError("no server")

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id=name) if name in self.server.experiments else None

    def create_experiment(self, name):
        self.server.experiments[name] = []
        return name

    def search_runs(self, experiments, filter_string, max_results):
        wanted = filter_string.split("'")[1]
        found = [run for run in self.server.runs.values() if run.tags["monsess.run_id"] == wanted]
        return [types.SimpleNamespace(info=types.SimpleNamespace(run_id=run.id)) for run in found]

    def create_run(self, experiment, tags, run_name):
        run = types.SimpleNamespace(id=f"r{len(self.server.runs)}", tags=tags, name=run_name, status="RUNNING")
        run.metrics, run.params = [], []
        self.server.runs[run.id] = run
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run.id))

    def update_run(self, run, status):
        self.server.runs[run].status = status

    def log_batch(self, run, metrics=(), params=()):
        if self.server.away.is_set():
            raise ConnectionError("no server")
        for tag, value, _, at in metrics:
            if "@" in tag:
                raise ValueError(f"invalid name {tag}")
            self.server.runs[run].metrics.append((tag, at, value))
        self.server.runs[run].params += params

    def set_terminated(self, run, status):
        self.server.runs[run].status = status


@pytest.fixture
def mlflow(monkeypatch):
    server = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", server)
    return server


def test_all_attempts_of_a_run_are_one_run_of_mlflow(mlflow, tmp_path):
    for last in (2, 4):
        train(last, ms.MLflowHook("digits", params={"rate": 0.1}, run_name="first"), checkpoint_dir=tmp_path)
    (run,) = mlflow.runs.values()
    assert run.metrics == [("loss", *point) for point in CURVE]
    assert (run.name, run.status, run.params) == ("first", "FINISHED", [("rate", "0.1")])


@pytest.mark.parametrize(
    ("error", "status"), [(KeyError("mine"), "FAILED"), (ms.EndOfData(), "FINISHED")], ids=["error", "end"]
)
def test_how_a_run_ended_is_told(mlflow, error, status):
    class Raising(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            raise error

    try:
        train(4, ms.MLflowHook(), Raising())
    except KeyError:
        pass
    assert [run.status for run in mlflow.runs.values()] == [status]


def test_a_service_that_is_away_holds_nobody_and_gets_everything_later(mlflow, monkeypatch, caplog):
    monkeypatch.setattr(Outbox.__init__, "__defaults__", ((0.01, 0.02),))
    mlflow.away.set()

    class BackAt3(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.global_step == 3:
                mlflow.away.clear()

    train(4, ms.MLflowHook(), BackAt3())
    (run,) = mlflow.runs.values()
    assert run.metrics == [("loss", *point) for point in CURVE]
    assert sum("does not take what is logged" in record.getMessage() for record in caplog.records) == 1


def test_a_service_that_stays_away_ends_no_run_and_is_said(mlflow, caplog):
    mlflow.away.set()
    begun = time.monotonic()
    train(4, ms.MLflowHook())
    assert time.monotonic() - begun < 20
    assert "MLflow did not take" in caplog.text


def test_names_that_mlflow_refuses_are_changed(mlflow):
    """It would refuse the whole batch."""

    class Odd(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            run_context.session.log({"odd@": 1.0, "/../a//b\nc": 2.0, "..": 3.0, "x" * 300: 4.0, "fine/a b-c.d": 5.0})

    train(1, ms.MLflowHook(), Odd())
    (run,) = mlflow.runs.values()
    assert [name for name, *_ in run.metrics if name != "loss"] == ["odd_", "a/b_c", "_", "x" * 250, "fine/a b-c.d"]


def test_calls_that_a_service_refuses_do_not_hold_up_the_others():
    made = []

    def call(number):
        if number in (2, 3, 4, 9):
            raise SystemExit("no") if number == 3 else ValueError("no")
        made.append(number)

    outbox = Outbox("service", (0.001, 0.002))
    for number in range(8):
        outbox.put(lambda number=number: call(number))
    ticks.wait_until(lambda: made == [0, 1, 5, 6, 7])
    for number in (8, 9, 10):
        outbox.put(lambda number=number: call(number))
    outbox.close(10)
    assert made == [0, 1, 5, 6, 7, 8, 10]


def test_where_too_many_calls_wait_the_last_one_has_its_place(monkeypatch):
    monkeypatch.setattr("monsess.hooks._outbox._MOST", 5)
    going, made = threading.Event(), []
    outbox = Outbox("service")
    outbox.put(going.wait)
    for number in range(20):
        outbox.put(lambda number=number: made.append(number))
    outbox.put(lambda: made.append("end"), closes=True)
    going.set()
    outbox.close(10)
    assert made == [0, 1, 2, 3, "end"]


class FakeWandb(types.ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.runs = []

    def init(self, **arguments):
        run = types.SimpleNamespace(arguments=arguments, logged=[], axes=[], code=None)
        run.define_metric = lambda name, step_metric=None: run.axes.append((name, step_metric))
        run.log = run.logged.append
        run.finish = lambda exit_code: setattr(run, "code", exit_code)
        self.runs.append(run)
        return run


def test_wandb_gets_the_id_of_the_run_and_its_own_step(monkeypatch, tmp_path):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for last in (2, 4):
        sess = train(last, ms.WandbHook("digits", config={"rate": 0.1}, mode="offline"), checkpoint_dir=tmp_path)
    assert [run.arguments["id"] for run in wandb.runs] == [sess.run_id] * 2
    assert wandb.runs[0].arguments | {"id": 0} == {
        "id": 0, "resume": "allow", "project": "digits", "name": None, "config": {"rate": 0.1}, "mode": "offline"
    }  # fmt: skip
    assert [(row["global_step"], row["loss"]) for run in wandb.runs for row in run.logged] == CURVE
    assert wandb.runs[0].axes == [("global_step", None), ("*", "global_step")]
    assert [run.code for run in wandb.runs] == [0, 0]


@pytest.mark.parametrize(("hook", "package"), [(ms.MLflowHook, "mlflow"), (ms.WandbHook, "wandb")])
def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch, hook, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'pip install "monsess\[{package}\]"'):
        hook()


def test_another_process_than_the_chief_calls_nobody(mlflow):
    hook = ms.MLflowHook()
    hook.begin()
    hook.after_create_session(types.SimpleNamespace(is_chief=False), None)
    hook.log(1, {"a": 1.0})
    hook.end(types.SimpleNamespace(stop_reason=None))
    assert mlflow.runs == {}


@pytest.mark.filterwarnings("default")
def test_with_mlflow_itself(monkeypatch, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the client alone has no database
    uri = (tmp_path / "mlruns").as_uri()
    for last in (2, 4):
        train(last, ms.MLflowHook("digits", tracking_uri=uri, params={"a": 1}), checkpoint_dir=tmp_path / "run")
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"a": "1"}
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")] == CURVE


@pytest.mark.filterwarnings("default")
def test_with_wandb_itself(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sess = train(4, ms.WandbHook("digits", mode="offline", dir=str(tmp_path)), checkpoint_dir=tmp_path / "run")
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert folder.name.endswith(sess.run_id)
    assert b"global_step" in next(folder.glob("*.wandb")).read_bytes()
