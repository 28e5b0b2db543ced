"""``monsess run`` whose output nobody reads: the launcher ends the processes all the same, when it has to."""

from __future__ import annotations

import signal
import time

import pytest
from launches import LIMIT, NOTES, STUBBORN, Launches

pytestmark = pytest.mark.timeout(180)

HEAD = """
import os, signal, sys, time
rank, here = int(os.environ['MONSESS_PROCESS_ID']), os.environ['HERE'] + '/'
"""
FAILS = """
if rank == 1:
    while not os.path.exists(here + 'held-back-0'): time.sleep(0.01)
    note('fails')
    sys.exit(7)
"""
# Writes more than is read, says when it has to wait for that, and ends 143 when told to.
NOISY = """
import threading
written = 0
def write():
    global written
    while True:
        print('x' * 1000, file=stream)
        written += 1
threading.Thread(target=write, daemon=True).start()
before = -1
while written != before:
    before = written
    time.sleep(1)
note(f'held-back-{rank}')
while not os.path.exists(here + f'heard-{rank}-15'): time.sleep(0.01)
os._exit(143)
"""


@pytest.fixture
def launches(tmp_path):
    with Launches(tmp_path) as launches:
        yield launches


def test_a_reader_that_goes_away_ends_nothing(launches, tmp_path):
    (tmp_path / "script.py").write_text(
        "import time\nfor i in range(200):\n    print('x' * 1000)\nopen('done', 'w').close()\nraise SystemExit(3)"
    )
    process = launches.program("-n", 1, "script.py")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("[0] xxx")
    process.stdout.close()
    assert process.wait(LIMIT) == 3
    assert (tmp_path / "done").exists()
    assert process.stderr is not None
    process.stderr.close()


@pytest.mark.parametrize(
    ("what", "stream", "code"),
    [("one fails", "stdout", 7), ("SIGTERM", "stderr", 143), ("Ctrl-C twice", "stdout", 130)],
)
def test_a_reader_that_does_not_read_does_not_make_the_launcher_deaf(what, stream, code, launches, tmp_path):
    first = FAILS if what == "one fails" else STUBBORN
    (tmp_path / "script.py").write_text(f"{HEAD}stream = sys.{stream}\n{NOTES}{first}{NOISY}")
    process = launches.program("-n", 2, "script.py")
    launches.wait_for("held-back-0")
    if what == "one fails":
        launches.wait_for("fails")
        begun = launches.noted("fails")
    else:
        launches.wait_for("held-back-1")
        process.send_signal(signal.SIGTERM if what == "SIGTERM" else signal.SIGINT)
        if what == "Ctrl-C twice":
            launches.wait_for("heard-0-2")
            launches.wait_for("heard-1-2")
            process.send_signal(signal.SIGINT)
        begun = time.monotonic()
    assert process.wait(LIMIT) == code
    assert time.monotonic() - begun < 10
    assert launches.left() == {}
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()
