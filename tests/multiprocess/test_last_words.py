"""What a process of a job leaves when it ends outside a session, and in what time the others end with it."""

from __future__ import annotations

import time

import pytest
from members import Members, monsess_run

from monsess.launch.environment import free_address
from monsess.launch.records import read_records

REPLACED = "sys.excepthook = lambda *error: print('another hook', flush=True)"
THREAD = "import threading; threading.Thread(target=time.sleep, args=(300,)).start()"
EXECUTOR = "from concurrent.futures import ThreadPoolExecutor as Pool; Pool(1).submit(time.sleep, 300)"
LATE = 3  # seconds that a busy machine may add; the figures show what it was
ERROR = "raise ValueError('no data')"


@pytest.fixture
def members(tmp_path):
    with Members(tmp_path) as members:
        yield members


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_error_outside_a_session_ends_all_in_time(members, tmp_path, culprit, figures):
    address = free_address()
    script = f"""
server = ms.Server(start_timeout_secs=60, failure_timeout_secs=6)
if server.process_index == {culprit}:
    raise ValueError("the data is not there")
time.sleep(80)
"""
    pair = members.job(script, *(monsess_run(address, index, FAILURE_DIR=tmp_path) for index in (0, 1)))
    assert pair[culprit].ended(1).splitlines()[-1] == "ValueError: the data is not there"
    failed = time.monotonic()
    pair[1 - culprit].ended(None)
    seconds = time.monotonic() - failed
    figures.append(f"outside a session, process {culprit} failed; the other one ended {seconds:.1f} s later, limit 6 s")
    assert seconds < 6 + LATE
    assert read_records(str(tmp_path))[culprit].error == "ValueError: the data is not there"


@pytest.mark.slow
def test_an_executor_at_work_holds_nobody_for_ever(members):
    """The other one is not in a session, so that JAX has to find out: twice the limit at most."""
    address = free_address()
    script = f"""
server = ms.Server(start_timeout_secs=60, failure_timeout_secs=6)
if server.process_index == 1:
    {REPLACED}; {EXECUTOR}
    print("ends now", flush=True)
    {ERROR}
time.sleep(80)
"""
    pair = members.job(script, *(monsess_run(address, index) for index in (0, 1)))
    pair[1].wrote("ends now")
    failed = time.monotonic()
    pair[1].ended(1)
    assert time.monotonic() - failed < 6 + LATE
    pair[0].ended(None)
    assert time.monotonic() - failed < 12 + LATE


@pytest.mark.parametrize(
    ("ending", "other", "why"),
    [
        pytest.param([REPLACED, ERROR], "session", "ValueError: no data", id="another hook"),
        pytest.param([REPLACED, ERROR], "time.sleep(80)", "ValueError: no data", id="another hook, no session"),
        pytest.param([THREAD, ERROR], "session", "ValueError: no data", id="thread"),
        pytest.param([REPLACED, EXECUTOR, ERROR], "session", "ValueError: no data", id="another hook, executor"),
        pytest.param(["sys.exit(3)"], "session", None, id="exit"),
    ],
)
def test_whatever_ends_a_process_before_its_session_ends_all_in_time(members, tmp_path, ending, other, why, figures):
    address = free_address()
    script = f"""
server = ms.Server(start_timeout_secs=60, failure_timeout_secs=6)
if server.process_index == 1:
    {"; ".join(ending[:-1]) or "pass"}
    print("ends now", flush=True)
    {ending[-1]}
if {other!r} == "session":
    ms.MonitoredTrainingSession(lambda: 0.0, failure_timeout_secs=6)
{other if other != "session" else "pass"}
"""
    pair = members.job(script, *(monsess_run(address, index, FAILURE_DIR=tmp_path) for index in (0, 1)))
    pair[1].wrote("ends now")
    failed = time.monotonic()
    left, text = pair[1].ended(None), pair[0].ended(None)
    seconds = time.monotonic() - failed
    figures.append(f"process 1 ended before its session ({ending}); all had ended {seconds:.1f} s later, limit 6 s")
    assert seconds < 6 + LATE
    if why is not None:
        assert read_records(str(tmp_path))[1].error == why
    if REPLACED in ending:
        assert "another hook" in left
    if other == "session":
        how = f"ended outside the session: {why}. " if why else "reached the end of its script without a session, "
        assert f"PeerFailedError: Process 1 has {how}" in text


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_error_that_was_printed_and_dealt_with_is_none(members, culprit):
    address = free_address()
    script = f"""
server = ms.Server(start_timeout_secs=60)
if server.process_index == {culprit}:
    def fails():
        raise ValueError("harmless")

    try:
        fails()
    except ValueError as error:
        sys.last_exc = sys.last_value = error.with_traceback(error.__traceback__.tb_next)
"""
    for member in members.job(script, *(monsess_run(address, index) for index in (0, 1))):
        member.ended()


def test_a_sigterm_as_python_ends_changes_nothing(members):
    address = free_address()
    script = """
import signal

class Last:  # comes when Python's handlers are gone already
    def __del__(self, kill=os.kill, pid=os.getpid(), number=int(signal.SIGTERM), write=os.write):
        kill(pid, number)
        write(1, b"the very end")

last = Last()
ms.Server(start_timeout_secs=60)
"""
    for member in members.job(script, *(monsess_run(address, index) for index in (0, 1))):
        assert "the very end" in member.ended()


def test_a_forked_worker_is_none_of_the_job(members, tmp_path):
    address = free_address()
    script = """
import signal, warnings
warnings.simplefilter("ignore")
server = ms.Server(start_timeout_secs=60)

def child(work):
    pid = os.fork()
    if not pid:
        work()
        os._exit(0)
    return pid

def waits():
    print("forked", flush=True)
    time.sleep(60)

def fails():
    sys.excepthook(ValueError, ValueError("of a child"), None)

pid = child(waits)
time.sleep(0.5)
os.kill(pid, signal.SIGTERM)
print("terminated", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print("failed", os.waitstatus_to_exitcode(os.waitpid(child(fails), 0)[1]))
"""
    for member in members.job(script, *(monsess_run(address, index, FAILURE_DIR=tmp_path) for index in (0, 1))):
        text = member.ended()
        assert "terminated -15" in text
        assert "failed 0" in text
    assert read_records(str(tmp_path)) == {}
