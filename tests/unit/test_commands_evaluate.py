"""``monsess evaluate``: a job of its own that evaluates what a training writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import ticks
from checkpoints import fresh, save
from command_line import CommandLine

import monsess as ms

NORM = "monsess.state_norm:evaluator"


@pytest.fixture
def call(capsys) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def url():
    url = fresh("memory")
    save(url, 5, 10)
    return url


def test_the_newest_a_chosen_one_or_all(call, url):
    status, out, err = call("evaluate", url, NORM, "--once")
    assert (status, err) == (0, "")
    assert "step 10: nonfinite = 0, norm = " in out
    status, document = call.document("evaluate", url, NORM, "--step", 5)
    assert (status, [one["step"] for one in document["evaluations"]]) == (0, [5])
    status, document = call.document("evaluate", url, NORM, "--all", "--timeout", 0)
    assert (status, [one["step"] for one in document["evaluations"]]) == (0, [5, 10])
    status, document = call.document("evaluate", url, NORM, "--all", "--max", 1)
    assert [one["step"] for one in document["evaluations"]] == [5]
    status, document = call.document("evaluate", url, NORM, "--all", "--until-step", 7)
    assert [one["step"] for one in document["evaluations"]] == [5, 10]


def test_results_are_noted_unless_told_otherwise(call, url, tmp_path):
    store = ms.CheckpointStore(url)
    before = store.metrics(10)
    assert call("evaluate", url, NORM, "--once", "--no-note", "--log-dir", tmp_path)[0] == 0
    assert store.metrics(10) == before
    assert [point.step for point in ms.read_metrics(tmp_path).curves["eval/norm"]] == [10]
    assert call("evaluate", url, NORM, "--once")[0] == 0
    assert set(store.metrics(10)) - set(before) == {"eval/norm", "eval/nonfinite"}


def test_a_file_and_its_neighbours(call, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "its_neighbour.py").write_text("FACTOR = 2.0\n")
    (tmp_path / "how_to_judge.py").write_text(
        textwrap.dedent("""
            import monsess as ms
            import ticks
            from its_neighbour import FACTOR

            @ms.eval_step
            def count(state):
                return {"count": state["count"] * FACTOR}

            def make():
                return ms.Evaluator(count, init_fn=ticks.init_fn)

            number = 5
        """)
    )
    run = tmp_path / "run"
    with ms.MonitoredTrainingSession(ticks.init_fn, checkpoint_dir=run) as sess:
        sess.run(ticks.one)
    status, document = call.document("evaluate", run, f"{tmp_path}/how_to_judge.py:make", "--once")
    assert (status, document["evaluations"][0]["metrics"]) == (0, {"count": 2.0})
    status, _, err = call("evaluate", run, f"{tmp_path}/how_to_judge.py:number", "--once")
    assert (status, "is no monsess.Evaluator and returns none, found a int" in err) == (2, True)
    status, _, err = call("evaluate", run, f"{tmp_path}/how_to_judge.py:missing", "--once")
    assert (status, "has no missing" in err) == (2, True)
    (tmp_path / "broken.py").write_text("import no_such_module_at_all\n")
    status, _, err = call("evaluate", run, f"{tmp_path}/broken.py:make", "--once")
    assert (status, "could not be imported: No module named 'no_such_module_at_all'" in err) == (1, True)


@pytest.mark.parametrize("target", ["nothing", "a:", ":b", "no_such_module:x", "no_such_file.py:x", "a.py:b c"])
def test_targets_that_are_none(call, url, target):
    status, out, err = call("evaluate", url, target)
    assert (status, out) == (2, "")
    assert err.startswith("monsess: ")


@pytest.mark.parametrize("how", [["--once"], ["--timeout", "0"]], ids=str)
def test_nothing_there(call, how):
    url = fresh("memory")
    status, out, _ = call("evaluate", url, NORM, *how)
    assert (status, "There is no committed checkpoint in" in out) == (1, True)
    assert call.document("evaluate", url, NORM, *how) == (1, {"url": url, "evaluations": []})


def test_steps_that_are_not_there(call, url):
    status, _, err = call("evaluate", url, NORM, "--step", 7)
    assert (status, "is not a committed checkpoint; committed: 5, 10." in err) == (1, True)


@pytest.mark.parametrize("option", [["--timeout", "-1"], ["--interval", "soon"], ["--max", "0"], ["--once", "--all"]])
def test_options_that_cannot_be(call, url, option):
    assert call("evaluate", url, NORM, *option)[0] == 2


def test_errors_of_the_evaluators_own_code_have_a_traceback(call, url, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "its_faults.py").write_text(
        "import monsess as ms\n\ndef evaluator():\n    return ms.Evaluator(5 / 0)\n"
    )
    status, _, err = call("evaluate", url, f"{tmp_path}/its_faults.py:evaluator", "--once")
    assert status == 1
    assert f'File "{tmp_path}/its_faults.py", line 4, in evaluator' in err
    assert err.endswith("its_faults.py:evaluator failed: ZeroDivisionError: division by zero\n")


def test_the_directory_of_the_training_takes_no_records_of_an_evaluator(call, url):
    status, _, err = call("evaluate", url, NORM, "--once", "--log-dir", f"{url}/")
    assert (status, "is the directory of the training, which writes its own metrics.jsonl there" in err) == (2, True)


def test_a_signal_ends_it_wherever_it_is(tmp_path):
    save(str(tmp_path), 5)
    program = [sys.executable, "-W", "error", "-m", "monsess", "evaluate", str(tmp_path), NORM]
    child = subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    try:
        assert child.stdout is not None
        first = child.stdout.readline()
        assert "step 5: nonfinite = 0" in first
        time.sleep(0.2)
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 143
    finally:
        child.kill()
        child.communicate()
    assert ms.CheckpointStore(tmp_path).metrics(5)["eval/nonfinite"] == 0.0
