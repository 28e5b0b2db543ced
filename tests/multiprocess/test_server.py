"""`Server` with real processes: they join, or end in bounded time and say why."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from members import Members, monsess_run

from monsess.launch.environment import free_address
from monsess.launch.records import read_records

JOIN = """
server = ms.Server(start_timeout_secs=60)
total = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
print("sum", int(total(jax.numpy.array([server.process_index + 1]))[0]))
print("target", server.target, server.process_index, server.process_count, jax.process_index())
"""
IN_VAIN = "ms.Server(start_timeout_secs={})"


@pytest.fixture
def members(tmp_path):
    with Members(tmp_path) as members:
        yield members


def tf_config(cluster, kind, index):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def slurm(address, index, count=2):
    host, _, port = address.rpartition(":")
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": f"{host},other",
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
        "JAX_COORDINATOR_PORT": port,
    }


def open_mpi(address, index, count=2):
    host, _, port = address.rpartition(":")
    return {
        "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_RANK": str(index),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(index),
        "OMPI_MCA_orte_hnp_uri": f"1531576320.0;tcp://{host}:1",
        "JAX_COORDINATOR_PORT": port,
    }


def listening(port: int) -> set[str]:
    """The IPv4 addresses at which somebody listens on a port; that of IPv6 for "any" is ``0.0.0.0`` here."""
    rows = []
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}", encoding="ascii") as file:
            rows += [line.split() for line in file.readlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == "0A"]
    # The last four bytes, back to front, are the IPv4 address, also where it is mapped into IPv6.
    return {socket.inet_ntoa(bytes.fromhex(address)[:-5:-1]) for address, at in found if int(at, 16) == port}


@pytest.mark.parametrize("source", ["monsess run", "TF_CONFIG", "Slurm", "Open MPI"])
def test_two_processes_join(members, source):
    address, other = free_address(), free_address()
    environs = {
        "monsess run": [monsess_run(address, index) for index in (0, 1)],
        "TF_CONFIG": [tf_config({"worker": [other], "chief": [address]}, kind, 0) for kind in ("chief", "worker")],
        "Slurm": [slurm(address, index) for index in (0, 1)],
        "Open MPI": [open_mpi(address, index) for index in (0, 1)],
    }[source]
    where = {"Slurm": "slurm", "Open MPI": "open-mpi"}.get(source, address)
    for index, member in enumerate(members.job(JOIN, *environs)):
        text = member.ended()
        assert f"joined as process {index} of 2 ({source}) in " in text
        assert "sum 3" in text
        assert f"target monsess://{where}/{index} {index} 2 {index}" in text


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_on_loopback_nothing_listens_elsewhere(members):
    address = free_address()
    explicit = f"""
print("begins")
server = ms.Server({{"worker": ["{address}", "{free_address()}"]}}, task_index=int(os.environ["INDEX"]))
time.sleep(60)
"""
    port = int(address.rpartition(":")[2])
    chief = members.start(explicit, {"INDEX": "0"}).wrote("begins")
    deadline = time.monotonic() + 20
    while not listening(port):
        assert time.monotonic() < deadline, chief.text
        time.sleep(0.02)
    assert listening(port) == {"127.0.0.1"}  # the roll call
    peer = members.start(explicit, {"INDEX": "1"})
    for index, member in enumerate((chief, peer)):
        member.wrote(f"joined as process {index} of 2 (the cluster) in ")
    assert listening(port) == {"127.0.0.1"}  # JAX


def test_a_late_process_is_waited_for(members):
    address = free_address()
    chief = members.start(JOIN, monsess_run(address, 0))
    chief.wrote("process 0 of 2 waits for process 1: ")
    peer = members.start(JOIN, monsess_run(address, 1))
    assert "sum 3" in chief.ended()
    assert "sum 3" in peer.ended()


@pytest.mark.slow
def test_twenty_seconds_late_is_not_too_late(members):
    address = free_address()
    peer = members.start(JOIN, monsess_run(address, 1))
    peer.wrote("process 1 of 2 waits for process 0: nothing listens at ")
    time.sleep(20)
    chief = members.start(JOIN, monsess_run(address, 0))
    assert "sum 3" in chief.ended()
    assert "sum 3" in peer.ended()


def test_one_that_never_comes_is_named_by_all(members, tmp_path):
    address = free_address()
    (tmp_path / "failures").mkdir()
    present = {
        index: members.start(
            IN_VAIN.format(6), monsess_run(address, index, 3, FAILURE_DIR=tmp_path / "failures", ATTEMPT=1)
        )
        for index in (0, 2)
    }
    for index, member in present.items():
        text = member.ended(1)
        assert f"process {index} of 3 waits for process 1: " in text
        assert f"ClusterError: Process {index} of 3 waited " in text.splitlines()[-1]
        assert "for process 1 in vain" in text.splitlines()[-1]
        assert member.seconds < 40
    records = read_records(str(tmp_path / "failures"))
    assert sorted(records) == [0, 2]
    assert "for process 1 in vain" in records[0].error


@pytest.mark.parametrize("index", [0, 1])
def test_where_jax_finds_the_others_the_wait_has_a_limit_too(members, index):
    member = members.start(IN_VAIN.format(3), slurm(free_address(), index, 3))
    text = member.ended(1)
    assert f"process {index} of 3 waits for the other 2 to join; JAX does not say who is missing: " in text
    assert f"Process {index} of 3 waited 3 s (start_timeout_secs)" in text.splitlines()[-1]
    assert member.seconds < 40


def test_whoever_catches_the_error_of_a_join_still_fails(members):
    script = f"""
try:
    {IN_VAIN.format(1)}
except ms.ClusterError:
    print("caught")
try:
    {IN_VAIN.format(1)}
except ms.ClusterError as error:
    print(error)
"""
    text = members.start(script, slurm(free_address(), 0)).ended(1)
    assert "caught" in text
    assert "failed to join its job before and cannot try again" in text


@pytest.mark.parametrize("environ", [monsess_run, slurm])
def test_ctrl_c_ends_the_wait_at_once(members, environ):
    member = members.start(IN_VAIN.format(60), environ(free_address(), 0)).wrote(" waits for ")
    before = member.seconds
    assert "KeyboardInterrupt" in member.send(signal.SIGINT).ended(None)
    assert member.seconds - before < 15


def test_a_straggler_of_an_older_attempt_cannot_join(members):
    address = free_address()
    chief = members.start(JOIN, monsess_run(address, 0, ATTEMPT=1))
    straggler = members.start(JOIN, monsess_run(address, 1, ATTEMPT=0))
    text = straggler.ended(1)
    assert f"Process 0 at {address} refuses this process 1 of 2: it is left over from attempt 0" in text
    peer = members.start(JOIN, monsess_run(address, 1, ATTEMPT=1))
    assert "joined as process 0 of 2 (monsess run, attempt 1)" in chief.ended()
    assert "sum 3" in peer.ended()


def test_one_that_dies_before_the_job_begins_may_come_again(members):
    address = free_address()
    chief = members.start(JOIN, monsess_run(address, 0, 3))
    first = members.start(JOIN, monsess_run(address, 1, 3)).wrote("waits for process 2")
    first.send(signal.SIGKILL).ended(-signal.SIGKILL)
    chief.wrote("waits for processes 1 and 2")
    others = [members.start(JOIN, monsess_run(address, index, 3)) for index in (1, 2)]
    assert all("sum 6" in member.ended() for member in (chief, *others))


def test_jax_was_used_before(members):
    text = members.start(f"jax.devices()\n{IN_VAIN.format(60)}", monsess_run(free_address(), 1)).ended(1)
    assert "ClusterError: JAX has been used before this process joined its job" in text.splitlines()[-1]
    assert "waits for" not in text


def test_other_devices_than_the_launcher_gave_are_refused(members):
    """By all; process 0 ends last, since JAX aborts those that it leaves behind."""
    address = free_address()
    script = f"""
if os.environ["MONSESS_PROCESS_ID"] == "1":
    sys.excepthook = lambda *error, show=sys.excepthook: (time.sleep(1), show(*error))
{IN_VAIN.format(20)}
"""
    for member in members.job(script, *(monsess_run(address, k, LOCAL_DEVICES=3) for k in (0, 1))):
        assert "monsess run gave this process 3 devices, but JAX found 1" in member.ended(1)


def test_a_job_that_jax_has_joined_already_is_taken_as_it_is(members):
    address = free_address()
    script = f"""
index = int(os.environ["INDEX"])
jax.distributed.initialize("{address}", 2, index, coordinator_bind_address="{address}")
def refused(*tasks, task_index):
    try:
        ms.Server({{"worker": tasks}}, task_index=task_index)
    except ms.ClusterError as error:
        print(error)

refused("{address}", "127.0.0.1:1", "127.0.0.1:2", task_index=index)
server = ms.Server({{"worker": ["{address}", "127.0.0.1:1"]}}, task_index=index)
print("count", server.process_count)
refused("{address}", "127.0.0.1:1", task_index=1 - index)
"""
    for index, member in enumerate(members.job(script, {"INDEX": "0"}, {"INDEX": "1"})):
        text = member.ended()
        assert "joined by jax.distributed.initialize already" in text
        assert "the cluster speaks of 3 processes, but JAX knows 2" in text
        assert "count 2" in text
        assert f"This process has joined as process {index} of 2 already" in text


@pytest.mark.parametrize("wait", ["server.join()", "time.sleep(80)"])
def test_sigterm_ends_a_process_that_has_joined(members, wait):
    address = free_address()
    script = f"server = ms.Server()\nprint('has joined')\ntry:\n    {wait}\nfinally:\n    print('finally')"
    pair = members.job(script, *(monsess_run(address, index) for index in (0, 1)))
    for member in reversed(pair):
        member.wrote("has joined")
        before = member.seconds
        assert member.send(signal.SIGTERM).ended(143).splitlines()[-1] == "finally"
        assert member.seconds - before < 15


def test_sigterm_while_jax_looks_for_its_devices_is_not_lost(members):
    address = free_address()
    script = """
looks = jax.process_count

def slow():
    print("looks", flush=True)
    time.sleep(60)
    return looks()

jax.process_count = slow
ms.Server(start_timeout_secs=80)
"""
    pair = members.job(script, *(monsess_run(address, index) for index in (0, 1)))
    for member in pair:
        member.wrote("looks")
    for member in reversed(pair):
        before = member.seconds
        member.send(signal.SIGTERM).ended(143)
        assert member.seconds - before < 15


def test_a_handler_of_ones_own_stays(members):
    address = free_address()
    script = """
import signal
signal.signal(signal.SIGTERM, lambda number, frame: print("mine"))
ms.Server()
print("has joined")
time.sleep(80)
"""
    pair = members.job(script, *(monsess_run(address, index) for index in (0, 1)))
    pair[1].wrote("has joined").send(signal.SIGTERM).wrote("mine")


def test_join_returns_when_the_job_is_left(members):
    address = free_address()
    script = """
import threading
server = ms.Server()
threading.Timer(0.5, jax.distributed.shutdown).start()
server.join()
print("left", jax.distributed.is_initialized())
"""
    for member in members.job(script, *(monsess_run(address, index) for index in (0, 1))):
        assert "left False" in member.ended()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_open_mpi_itself(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import jax\nimport monsess as ms\n{JOIN}")
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, str(script)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("sum 3") == 2
    assert found.stderr.count("of 2 (Open MPI) in ") == 2
