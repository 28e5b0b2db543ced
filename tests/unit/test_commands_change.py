"""`monsess pin`, `prune` and `unlock`: what they change, and what they refuse to."""

from __future__ import annotations

import io
import os
import time

import pytest
import ticks
from checkpoints import fresh, save, saver, snapshot
from command_line import CommandLine, Files
from owners import acquired

from monsess.checkpoint import CheckpointStore
from monsess.checkpoint.evaluations import Evaluations
from monsess.checkpoint.owner import OWNER, Owner, encode
from monsess.process_name import _stat, this_process


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path) -> str:
    return str(tmp_path / "run") if request.param == "local" else fresh("memory")


@pytest.fixture
def call(capsys) -> CommandLine:
    return CommandLine(capsys)


def own(url: str, *, pid: int | None = None, host: str | None = None, restored_from: int | None = None) -> None:
    """Have a process, by default the parent of this one, own the directory."""
    here = this_process()
    pid = os.getppid() if pid is None else pid
    start = (_stat(pid) or ("1", False))[0]
    owner = Owner(
        host=host or here.host,
        boot_id=here.boot_id,
        pid_namespace=here.pid_namespace,
        pid=pid,
        start_time=start,
        run_id="run",
        attempt="a9",
        launch=None,
        beat=3,
        interval=10.0,
        restored_from=restored_from,
        since=time.time(),
    )
    Files(url).write(OWNER, encode(owner))


def ranked(url: str, **losses: float) -> None:
    writer = saver(CheckpointStore(url))
    for step, loss in losses.items():
        writer.submit(snapshot(int(step[1:]), metrics={"loss": loss}))
        writer.wait()
    writer.close()


def test_pin(url, call):
    store = save(url, 5, 10)
    assert call("pin", url, 5, 10)[0] == 0
    assert store._pins() == {5, 10}
    assert "step 5 was pinned already" in call("pin", url, 5)[1]
    assert call.document("pin", url, 10, "--remove") == (0, {"url": store.url, "steps": [10], "pinned": [5]})
    assert "step 5 is not pinned any more\nstep 10 was not pinned\n" in call("pin", url, 5, 10, "--remove")[1]
    assert call("pin", url, 5)[0] == 0
    status, out, err = call("pin", url, "newest", 7)
    assert (status, out) == (1, "")
    assert "Step 7" in err
    assert store._pins() == {5}, "nothing is pinned where one of them cannot be"
    assert call("pin", url)[0] == 2


def test_prune_keeps_what_it_must(url, call):
    save(url, 1, run_id="other")
    store = save(url, *range(2, 12))
    store.pin(3)
    Files(url).write("4/commit.json", b"torn")
    Files(url).write("20/_CHECKPOINT_METADATA", b"{}")
    own(url, pid=2**22 + 1, restored_from=6)  # a run that died
    status, out, _ = call("prune", url, "--keep-last", 2, "--keep-every-steps", 5, "--dry-run")
    assert status == 0
    assert "4 steps of 10 in" in out
    assert "not committed, left alone: 4 (damaged), 20\n" in out
    assert sorted(store._survey().committed) == [1, 2, 3, *range(5, 12)]
    status, found = call.document("prune", url, "--keep-last", 2, "--keep-every-steps", 5, "--yes")
    assert status == 0
    assert found["deleted"] == [2, 7, 8, 9]
    assert {row["step"]: row["because"] for row in found["kept"]} == {
        1: "another run's",
        3: "pinned",
        5: "--keep-every-steps 5",
        6: "the run began from it",
        10: "--keep-last 2, --keep-every-steps 5",
        11: "newest",
    }
    assert sorted(store._survey().committed) == [1, 3, 5, 6, 10, 11]
    assert {"4/commit.json", "20/_CHECKPOINT_METADATA"} <= set(Files(url).names())
    assert store.verify(11) == []


def test_prune_takes_the_evaluations_of_what_goes(url, call):
    store = save(url, 1, 2, 3)
    news = Evaluations(store._storage)
    for step in (1, 2, 3, 1):
        news.add(store._survey().committed[step], {"eval/loss": 0.5})
    assert call("prune", url, "--keep-last", 2, "--yes")[0] == 0
    assert sorted(name.partition("-")[0] for name in store._storage.list("evals")) == ["2", "3"]


def test_prune_by_rank(call):
    url = fresh("memory")
    ranked(url, s1=0.3, s2=0.1, s3=0.2, s4=0.9, s5=0.5)
    status, found = call.document("prune", url, "--keep-best", "1:loss", "--keep-best", "1:loss:max", "--yes")
    assert (status, found["deleted"]) == (0, [1, 3])
    status, out, err = call("prune", url, "--keep-best", "3:lss", "--yes")
    assert (status, out) == (2, "")
    assert "no step has the metric 'lss'; metrics there: loss" in err
    status, out, err = call("prune", url, "--keep-best", "3:loss:maximum", "--yes")
    assert (status, out) == (2, "")
    assert "the mode of the metric 'loss' is min or max, found 'maximum'" in err
    assert CheckpointStore(url).steps() == [2, 4, 5]


def test_prune_by_hours(call, monkeypatch):
    url = fresh("memory")
    begun = time.time() - 36_000
    writer = saver(CheckpointStore(url))
    for step in range(1, 6):
        monkeypatch.setattr("monsess.clock.wall", lambda s=step: begun + 1800 * s)
        writer.submit(snapshot(step))
        writer.wait()
    writer.close()
    status, found = call.document("prune", url, "--keep-every-hours", "1", "--dry-run")
    assert status == 0
    started = CheckpointStore(url)._survey().committed[1].started
    kept = {row["step"] for row in found["kept"]}
    first = {int((begun + 1800 * s - started) // 3600): s for s in range(5, 0, -1)}
    assert kept == {5} | {step for stretch, step in first.items() if stretch > 0}


def test_a_damaged_newest_step_does_not_count(url, call):
    store = save(url, 1, 2, 3, 4)
    for step in (3, 4):
        Files(url).damage(Files(url).data_file(step))
    status, found = call.document("prune", url, "--keep-last", 1, "--yes")
    assert (status, found["deleted"]) == (0, [1])
    assert {row["step"]: row["because"] for row in found["kept"]} == {2: "newest", 3: "damaged", 4: "damaged"}
    Files(url).damage(Files(url).data_file(2))
    status, out, err = call("prune", url, "--keep-last", 1, "--yes")
    assert (status, out) == (1, "")
    assert "Nothing is deleted: no step in" in err
    assert store.steps() == [2, 3, 4]
    assert call("prune", url, "--keep-last", 1, "--yes", "--no-verify")[0] == 0
    assert store.steps() == [4]


def test_prune_leaves_a_run_alone(url, call):
    store = save(url, 1, 2, 3)
    own(url)
    status, out, err = call("prune", url, "--keep-last", 1, "--yes")
    assert (status, out) == (1, "")
    assert f"A run is training in {store.url}" in err
    assert f"process {os.getppid()} on" in err
    assert f"(kill {os.getppid()})" in err
    assert "--force" in err
    assert call("prune", url, "--keep-last", 1, "--dry-run")[0] == 0
    own(url, host="elsewhere")
    status, _, err = call("prune", url, "--keep-last", 1, "--yes")
    assert status == 1
    assert f"A run may be training in {store.url}" in err
    assert f"monsess unlock {store.url}. --force" in err
    assert store.steps() == [1, 2, 3]
    assert call("prune", url, "--keep-last", 1, "--yes", "--force")[0] == 0
    assert store.steps() == [3]


def test_prune_asks(url, call, monkeypatch):
    store = save(url, 1, 2)
    status, _, err = call("prune", url, "--keep-last", 1)
    assert status == 2
    assert "--yes" in err
    monkeypatch.setattr("monsess.commands.console._is_terminal", lambda stream: True)
    for answer, status in (("\n", 1), ("n\n", 1), ("", 1), ("yes\n", 0)):
        assert store.steps() == [1, 2]
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        found, out, err = call("prune", url, "--keep-last", 1)
        assert found == status
        assert f"Delete 1 step, 3.{err.partition('3.')[2][0]} kB, in {store.url} for good? [y/N]" in err
        assert ("nothing was deleted" in out) == (status == 1)
    assert store.steps() == [2]


def test_pinned_while_it_asked(call, monkeypatch):
    url = fresh("memory")
    store = save(url, 1, 2, 3)

    def answer(*_: object) -> bool:
        store.pin(1)
        return True

    monkeypatch.setattr("monsess.commands.console.Console.confirm", answer)
    status, _, err = call("prune", url, "--keep-last", 1)
    assert status == 0
    assert "step 1 was pinned meanwhile" in err
    assert store.steps() == [1, 3]


def test_a_run_that_began_while_it_asked(url, call, monkeypatch):
    store = save(url, 1, 2, 3)

    def answer(*_: object) -> bool:
        own(url, restored_from=2)
        return True

    monkeypatch.setattr("monsess.commands.console.Console.confirm", answer)
    status, _, err = call("prune", url, "--keep-last", 1)
    assert status == 1
    assert "--force deletes all the same" in err
    assert store.steps() == [1, 2, 3]


def test_prune_remembers_damage(url, call):
    """Found by an attempt before, older than the newest sound step, and so not read again."""
    store = save(url, 1, 2, 3, 4)
    store._damaged.add(3)
    store._remember("run", list(store._survey().committed.values()))
    status, found = call.document("prune", url, "--keep-last", 2, "--yes")
    assert (status, found["deleted"]) == (0, [1])
    assert {row["step"]: row["because"] for row in found["kept"]}[3] == "damaged"
    run = store.read_run() or {}
    assert (run["steps"].keys(), run["damaged"].keys()) == ({"2", "3", "4"}, {"3"})


def test_prune_wants_a_policy(call, tmp_path):
    for wrong in (
        [],
        ["--keep-last", "0"],
        ["--keep-last", "-1"],
        ["--keep-best", "loss"],
        ["--keep-best", "2:"],
        ["--keep-every-hours", "nan"],
        ["--keep-every-steps", "1.5"],
    ):
        status, out, err = call("prune", tmp_path, *wrong, "--yes")
        assert (status, out) == (2, ""), wrong
        assert err.startswith("monsess: ")
        assert err.count("\n") == 1


def test_unlock(url, call):
    save(url, 1)
    own(url)
    status, out, err = call("unlock", url)
    assert (status, out) == (1, "")
    assert f"process {os.getppid()} on" in err
    assert f"monsess unlock --force {url}" in err
    assert f"(kill {os.getppid()})" in err
    assert "alive" in call("ls", url)[1]
    assert call.document("ls", url)[1]["owner"]["alive"] is True
    status, found = call.document("unlock", url, "--force")
    assert status == 0
    assert found["removed"]["pid"] == os.getppid()
    assert call.document("unlock", url) == (0, {"url": found["url"], "removed": None})
    own(url)
    status, out, _ = call("unlock", url, "--force")
    assert status == 0
    assert f"that process is alive and goes on: end it (kill {os.getppid()}), or it takes the directory back" in out
    own(url, host="elsewhere")
    assert "cannot be told" in call("ls", url)[1]
    assert call.document("ls", url)[1]["owner"]["alive"] is None
    assert call("unlock", url)[0] == 0
    own(url, pid=2**22 + 1)
    assert "dead" in call("ls", url)[1]
    status, out, _ = call("unlock", url)
    assert status == 0
    assert out.endswith("that process is dead\n")
    assert "owner: none" in call("ls", url)[1]


def test_an_owner_that_cannot_be_read(url, call):
    """Whoever it is may be training there: nothing is deleted."""
    store = save(url, 1, 2, 3)
    Files(url).write(OWNER, b'{"host": "no')
    status, out, err = call("ls", url)
    assert (status, err) == (0, "")
    assert "owner: unknown, owner.json cannot be read (a run may be training here)" in out
    owner = call.document("ls", url)[1]["owner"]
    assert set(owner.values()) == {None}
    assert {"pid", "host", "run_id", "alive"} <= owner.keys()
    status, out, err = call("prune", url, "--keep-last", 1, "--yes")
    assert (status, out) == (1, "")
    assert "owner.json cannot be read" in err
    assert store.steps() == [1, 2, 3]
    status, out, err = call("unlock", url)
    assert (status, err) == (0, "")
    assert f"removed owner.json in {store.url}, which could not be read" in out
    assert OWNER not in Files(url).names()
    assert call("prune", url, "--keep-last", 1, "--yes")[0] == 0
    assert store.steps() == [3]


def test_the_step_that_a_live_run_began_from_stays_whatever_is_forced(tmp_path, call):
    store = save(str(tmp_path / "run"), 1, 2, 3, 4)
    with acquired(store, "a9", run_id=None, interval_secs=3600) as owned:
        owned.note(run_id="run", restored_from=2)
        ticks.wait_until(lambda: (call.document("ls", tmp_path / "run")[1]["owner"] or {}).get("restored_from") == 2)
        assert call("prune", tmp_path / "run", "--keep-last", 1, "--yes")[0] == 1
        assert call("prune", tmp_path / "run", "--keep-last", 1, "--yes", "--force")[0] == 0
        assert store.steps() == [2, 4]
