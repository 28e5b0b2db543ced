"""Real servers on loopback: runs killed at random moments, and stores that go away in the middle of a save.

S3 (SeaweedFS) and HDFS run wherever they are installed; SFTP (OpenSSH), GCS (fake-gcs-server) and Ceph are marked
``stores``. How many random moments there are, and which outages, goes by MONSESS_RANDOM_KILLS.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import store_runs
import toy
from kills import output
from leftovers import beside_bookkeeping
from servers import STORES
from servers.process import is_running
from store_runs import LAST_STEP, OUTAGES, SAVED

import monsess as ms
from monsess.storage import Storage

KILLS = int(os.environ.get("MONSESS_RANDOM_KILLS") or 4)
#: The sample of `make test` leaves out what takes twenty seconds by itself.
ENDURED = list(OUTAGES) if KILLS > 4 else ["restarted"]
_ALWAYS = ("s3", "hdfs")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(
    scope="module",
    params=[name if name in _ALWAYS else pytest.param(name, marks=pytest.mark.stores) for name in STORES],
)
def store(request, tmp_path_factory):
    with STORES[request.param](tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.mark.soak
def test_killed_at_random_moments_and_resumed(store, workers, cache, straight, seed, killed, moments):
    expected = straight(LAST_STEP)
    reached = []
    first = store_runs.options_at(workers, store, "straight", cache)
    try:
        seconds = store_runs.finish(workers.servers[0], store, f"{store.url}/straight", first, expected)
    except AssertionError as error:
        error.add_note(output(first.folder))
        raise

    def one(attempt, number):
        seeded = f"{seed}/{store.name}/{number}"
        met = store_runs.killed_and_resumed(
            attempt, workers, store, f"killed-{number}", seeded, cache, seconds, expected
        )
        for phase, count in met.items():
            moments[f"{store.name}, {phase}:"] += count
        killed[f"at {store.name}:"] += 1
        reached.append(met.total() > 0)

    workers.map(one, range(KILLS))
    assert sum(reached) >= KILLS / 2, f"{sum(reached)} of {KILLS} runs were killed before they had ended"


@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")  # gcsfs to aiohttp
@pytest.mark.parametrize("outage", ENDURED)
def test_a_store_that_goes_away_in_the_middle_of_a_save(store, outage, monkeypatch, caplog):
    caplog.set_level("INFO", logger="monsess")
    sess = store_runs.train_through(OUTAGES[outage], store, outage.replace(" ", "-"), 24, monkeypatch)
    assert sess.stop_reason == ms.StopReason.LAST_STEP
    assert sess.summary()["saves"] == len(SAVED)

    store.until(store.knock)
    url = f"{store.url}/{outage.replace(' ', '-')}"
    assert store_runs.sound_steps(store, url) == list(SAVED)
    loaded = ms.load_checkpoint(url, storage_options=store.options)
    toy.assert_same_bits(loaded["toy"]["w"], toy._host(sess.state_copy()["toy"]["w"]))
    below = {name.split("/")[0] for name in store_runs.objects(store, url)}
    assert beside_bookkeeping(below) == {str(step) for step in SAVED}, "leftovers"


def test_names_are_taken_literally(store):
    names = ["run[1]", "a*b", "lr=1e-3?", "x{y}", "with space", "%20", "#1", "#2", "ünï", ".dot", "a;b", "q?x=1#y"]
    for name in names:
        Storage(f"{store.url}/names/{name}/", store.options).write("1/commit.json", name.encode())
    parent = Storage(f"{store.url}/names", store.options)
    for name in names:
        assert parent.walk(f"{name}/1").keys() == {"commit.json"}, name
        assert parent.read(f"{name}/1/commit.json").decode() == name
    assert parent.list().keys() == set(names)


def test_a_server_ends_with_a_test_run_that_is_killed(tmp_path):
    script = (
        "import os, signal, sys; from pathlib import Path; from servers.process import Process\n"
        "server = Process(['sleep', '1000'], Path('log'), env={}, cwd=Path('.'))\n"
        "print(server.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    support = {**os.environ, "PYTHONPATH": os.path.dirname(store_runs.__file__)}
    child = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=support, capture_output=True, text=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    deadline = time.monotonic() + 60
    while is_running(int(child.stdout)):
        assert time.monotonic() < deadline, "the server outlives the test run"
        time.sleep(0.05)
