"""A value that is not finite on process 1 only: all processes end for it, and no checkpoint holds one."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from cluster import outputs
from launches import Launches

import monsess as ms
from monsess.launch import local

pytestmark = pytest.mark.timeout(180)
slow = pytest.mark.slow

CASES = [
    pytest.param("nan", "mean", True, id="nan-loss"),
    pytest.param("inf", "mean", True, id="inf-loss", marks=slow),
    pytest.param("nan", None, False, id="nan-other-local", marks=slow),
    pytest.param("nan", "max", False, id="nan-other-max", marks=slow),
    pytest.param("-inf", "sum", False, id="inf-other-sum", marks=slow),
]


@pytest.mark.parametrize(("value", "reduce", "in_the_loss"), CASES)
def test_on_process_1_only(cluster, value, reduce, in_the_loss):
    url = cluster.folder("checkpoints")
    arguments = {"value": value, "reduce": reduce, "in_the_loss": in_the_loss}
    ended = cluster.run(2, call="watching:not_finite", url=str(url), arguments=arguments)
    assert [one.code for one in ended] == [1, 1], outputs(ended)
    assert any("NanLossDuringTrainingError: NaN loss during training. At step 5: " in one.output for one in ended)
    store = ms.CheckpointStore(str(url))
    assert store.steps() == [2, 4]
    for step in store.steps():
        assert store.verify(step) == []
        assert all(np.isfinite(leaf).all() for leaf in ms.load_checkpoint(str(url), step).values())


# What a process with a session leaves for the launcher, without one.
FAILS = """
import json
error = 'monsess.errors.%s'
record = {'process': rank, 'error': error, 'traceback': '', 'time': time.time()}
with open(os.path.join(os.environ['MONSESS_FAILURE_DIR'], str(rank) + '.json'), 'w') as file:
    json.dump(record, file)
sys.exit(1)
"""


# It has one error, which its end may be, or not.
SAYS = """
class NanLossDuringTrainingError(Exception):
    pass

error = NanLossDuringTrainingError('NaN loss during training. At step 4: loss = nan.')
error.add_note('Raised by hook NanTensorHook in after_run.')
print(f'NanLossDuringTrainingError: {error}', file=sys.stderr, flush=True)
"""


class TestLauncher:
    """``monsess run --max-restarts`` does not repeat what comes back."""

    @pytest.fixture
    def run(self, tmp_path, monkeypatch, capfd):
        monkeypatch.setattr("monsess.launch.attempt._HEAD_START_SECS", 0.1)
        monkeypatch.setattr("monsess.launch.local._FIRST_BACKOFF_SECS", 0.1)

        def run(error):
            with Launches(tmp_path) as launches:
                assert launches.run(FAILS % error, 2, max_restarts=3) == 1
            return capfd.readouterr().err

        return run

    @pytest.mark.parametrize(
        "error",
        [
            "NanLossDuringTrainingError: NaN loss during training. At step 4: loss = nan.",
            "NonFiniteStateError: Training ends: leaf w of step 6 is not finite.",
        ],
    )
    def test_the_same_value_twice(self, run, error):
        said = run(error)
        assert said.count("starting 2 processes, attempt") == 2
        assert "failed so twice in a row, and starting again would not help: nothing is restarted" in said
        assert error.rstrip(".") in said

    def test_another_step_each_time(self, run):
        said = run("NanLossDuringTrainingError: NaN loss during training. At step ' + str(attempt) + ': loss = nan.")
        assert said.count("starting 2 processes, attempt") == 4

    @pytest.mark.parametrize(
        ("then", "code", "attempts"),
        [
            pytest.param("raise error", 1, 2, id="the end"),
            pytest.param("raise OSError('no space')", 1, 4, id="another error"),
            pytest.param("os.kill(os.getpid(), 9)", 137, 4, id="killed"),
        ],
    )
    def test_without_a_record_the_last_error_counts(self, tmp_path, run, capfd, then, code, attempts):
        """Of a process that writes none, the launcher has the last lines: an error in them need not be its end."""
        with Launches(tmp_path) as launches:
            assert launches.run(SAYS + then, 1, max_restarts=3) == code
        assert capfd.readouterr().err.count("starting 1 process, attempt") == attempts

    def test_another_error(self, run):
        said = run("SaveError: the store does not answer.")
        assert said.count("starting 2 processes, attempt") == 4


SCRIPT = """
import sys
import monsess as ms
ms.testing.emulate_devices(2)
import jax.numpy as jnp, numpy as np

@ms.train_step
def step(state, batch):
    return state + 1, {"loss": batch.mean()}

data = [np.full(2, np.nan if index == 4 else 1.0, np.float32) for index in range(9)]
with ms.MonitoredTrainingSession(
    lambda: jnp.zeros(()), data=data, checkpoint_dir=sys.argv[1], save_checkpoint_steps=2, hooks=[ms.NanTensorHook()]
) as sess:
    while not sess.should_stop():
        sess.run(step)
"""


@slow
def test_a_real_run_that_fails_in_the_same_way_is_started_twice(tmp_path, capfd):
    assert local.run([sys.executable, "-c", SCRIPT, str(tmp_path)], 1, max_restarts=3) == 1
    said = capfd.readouterr().err
    assert said.count("starting 1 process, attempt") == 2
    assert "NanLossDuringTrainingError: NaN loss during training. At step 5: 1 of the values" in said
    assert "starting again would not help" in said
    assert ms.CheckpointStore(tmp_path).steps() == [2, 4]
