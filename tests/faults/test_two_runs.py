"""Two runs in one directory, as processes: one trains, the other is refused, waits, or takes over from a dead one."""

from __future__ import annotations

import re
import signal
import time
from typing import Any

import pytest
import ticks
from checkpoints import fresh
from owner_child import Runs

import monsess as ms
from monsess.checkpoint.owner import read_owner
from monsess.testing import Faults

INTERVAL = 0.4


@pytest.fixture(scope="module")
def runs():
    runs = Runs()
    yield runs
    runs.close()


class Place:
    """A directory of a store, and who trains there."""

    def __init__(self, runs: Runs, kind: str, tmp_path: Any) -> None:
        self._runs = runs
        self._folder = tmp_path
        self._count = 0
        self.url = str(tmp_path / "run") if kind == "local" else "faulty://run"
        self.options: dict[str, Any] | None = None if kind == "local" else {"root": str(tmp_path)}

    def train(self, last: int, **more: Any) -> Any:
        self._count += 1
        log = str(self._folder / f"log-{self._count}")
        return self._runs.train(log, self.url, storage_options=self.options, last=last, **more)

    def store(self) -> ms.CheckpointStore:
        return ms.CheckpointStore(self.url, None if self.options is None else {**self.options, "faults": Faults()})

    def committed(self) -> dict[int, str]:
        """The attempt that committed each step, and that all of them are sound."""
        store = self.store()
        assert [step for step in store.steps() if store.verify(step)] == []
        return {step: record.attempt for step, record in sorted(store._survey().committed.items())}

    def owner(self) -> Any:
        return read_owner(self.store())


def newest(run: Any) -> int:
    """The newest step that a run said it saved."""
    found = [re.search(r"saved step (\d+)", line) for line in run.lines]
    return max((int(one[1]) for one in found if one), default=0)


@pytest.fixture(params=["local", "faulty"])
def place(request, runs, tmp_path):
    return Place(runs, request.param, tmp_path)


def test_a_second_run_is_refused_at_once_and_the_first_goes_on(place):
    first = place.train(10**6)
    first.until("step 3")
    owner = place.owner()
    begun = time.monotonic()
    second = place.train(10**6)
    assert second.wait() == 1
    assert time.monotonic() - begun < 30  # it does not watch a process of this machine for heartbeats
    (refusal,) = [line for line in second.lines if line.startswith("DirectoryInUseError")]
    assert f"process {first.pid} on {owner.host} " in refusal
    assert not any("Waiting" in line or line.startswith("step") for line in second.lines)
    assert place.owner().attempt == owner.attempt
    first.stop()
    assert first.wait() == 0, first.lines
    committed = place.committed()
    assert set(committed.values()) == {owner.attempt}
    assert list(committed)[:-1] == list(range(2, max(committed), 2))
    assert place.owner() is None


def test_a_run_that_was_killed_and_is_started_at_once_does_not_wait(place):
    first = place.train(10**6)
    first.until("saved step 4")
    first.send(signal.SIGKILL)
    second = place.train(newest(first) + 20)  # before the first one was waited for
    assert second.wait() == 0, second.lines
    assert first.wait() == -signal.SIGKILL
    assert not any("Waiting" in line for line in second.lines)
    assert any("took" in line and f"process {first.pid}" in line for line in second.lines)
    assert not any(line == "from None" for line in second.lines)
    assert place.owner() is None


def test_a_run_that_was_killed_while_it_wrote_its_token_holds_up_nobody(runs, tmp_path):
    place = Place(runs, "faulty", tmp_path)
    kill = {"kind": "write", "n": 2, "path": "owner.json", "when": "middle"}
    first = place.train(10**6, interval=0.3, kill=kill)
    assert first.wait() == -signal.SIGKILL
    assert len((tmp_path / "run" / "owner.json").read_bytes()) > 10  # half of it
    assert place.owner() is None
    second = place.train(newest(first) + 4)
    assert second.wait() == 0, second.lines
    assert not any("Waiting" in line for line in second.lines)


@pytest.mark.parametrize(("kind", "ended"), [("local", True), ("faulty", False)])
def test_a_frozen_run_that_comes_back_commits_nothing(runs, tmp_path, kind, ended):
    """Its successor has ended and given the directory back, or it is still training there."""
    place = Place(runs, kind, tmp_path)
    first = place.train(10**6, host="one", interval=INTERVAL)
    first.until("saved step 4")
    first.send(signal.SIGSTOP)
    before = place.committed()
    second = place.train(max(before) + 10 if ended else 10**6, host="two", interval=INTERVAL)
    second.until(f"Waiting {3 * INTERVAL:g} s")
    second.until(f"saved step {max(before) + 4}")
    assert any("took" in line and "on one" in line for line in second.lines)
    if ended:
        assert second.wait() == 0, second.lines
        assert place.owner() is None
    first.send(signal.SIGCONT)
    assert first.wait() == 1, first.lines
    (error,) = [line for line in first.lines if line.startswith("DirectoryInUseError")]
    assert "taken away from this run" in error
    if not ended:
        assert place.owner().host == "two"
        second.until(f"saved step {max(place.committed()) + 2}")  # nothing disturbs it
        second.send(signal.SIGKILL)
        second.wait()
    after = place.committed()
    (one,) = set(before.values())
    assert {step: attempt for step, attempt in after.items() if step in before} == before
    assert one not in {attempt for step, attempt in after.items() if step not in before}


def test_the_next_attempt_of_a_launch_takes_over_at_once(runs, tmp_path):
    place = Place(runs, "faulty", tmp_path)
    first = place.train(10**6, host="one", launch="job")  # heartbeats every 10 s
    first.until("saved step 4")
    second = place.train(10**6, host="two", launch="job")
    second.until("from ")
    assert not any("Waiting" in line for line in second.lines)
    assert first.wait() == 1, first.lines  # at its next commit
    assert any(line.startswith("DirectoryInUseError") for line in first.lines)
    second.until("saved")
    assert place.owner().host == "two"
    second.send(signal.SIGKILL)
    second.wait()


@pytest.mark.parametrize(("count", "rounds"), [(2, 8), (6, 4)])
def test_of_several_that_begin_at_once_exactly_one_owns_the_directory(place, count, rounds):
    outcomes = place._runs.race(place.url, count, rounds, place.options)
    print(f"{rounds} rounds of {count}: {outcomes}")
    assert outcomes == [["owns", *["refused"] * (count - 1)]] * rounds
    assert place.owner() is None


def test_of_two_trainings_that_begin_at_once_one_trains(runs, tmp_path):
    place = Place(runs, "faulty", tmp_path)
    both = [place.train(10**6), place.train(10**6)]
    ticks.wait_until(lambda: any("DirectoryInUseError" in line for run in both for line in run.lines))
    refused, training = sorted(both, key=lambda run: "DirectoryInUseError" not in "".join(run.lines))
    assert refused.wait() == 1
    training.until("saved step 4")
    training.stop()
    assert training.wait() == 0
    assert len(set(place.committed().values())) == 1


# ---- sessions of one process


def session(url: str, last: int = 3, init_fn: Any = ticks.init_fn, **more: Any) -> Any:
    return ms.MonitoredTrainingSession(
        init_fn,
        checkpoint_dir=url,
        save_checkpoint_steps=2,
        hooks=[ms.StopAtStepHook(last_step=last)],
        **more,
    )


def train(sess: Any) -> None:
    while not sess.should_stop():
        sess.run(ticks.one)


def test_a_session_inside_another_one_is_refused_and_does_not_disturb(tmp_path):
    url = str(tmp_path / "run")
    with session(url) as outer:
        outer.run(ticks.one)
        with pytest.raises(ms.DirectoryInUseError, match="a session of this process"):
            session(url)
        train(outer)
    assert ms.CheckpointStore(url).steps() == [2, 3]
    with session(url, last=5) as later:
        assert later.restored_from == 3
        train(later)


@pytest.mark.parametrize("where", ["init_fn", "hook", "body"])
def test_every_way_out_gives_the_directory_back(tmp_path, where):
    url = str(tmp_path / "run")

    def fail(*_: Any) -> Any:
        raise ValueError("on purpose")

    class Failing(ms.SessionRunHook):
        after_create_session = fail

    more: dict[str, Any] = {"init_fn": fail} if where == "init_fn" else {}
    if where == "hook":
        more["chief_only_hooks"] = [Failing()]
    with pytest.raises(ValueError, match="on purpose"):
        with session(url, **more) as sess:
            assert read_owner(ms.CheckpointStore(url)) is not None
            sess.run(ticks.one)
            fail()
    assert read_owner(ms.CheckpointStore(url)) is None
    with session(url) as sess:
        train(sess)


def test_a_directory_that_cannot_be_written_is_restored_from_and_refused_where_something_is_to_be_saved():
    faults = Faults()
    options = {"faults": faults}
    url = fresh("faulty")
    with session(url, storage_options=options) as sess:
        train(sess)
    faults.fail("write", error=PermissionError("read-only"), times=None)
    with session(url, storage_options=options) as sess:  # it is at its last step: there is nothing to do
        assert sess.restored_from == 3
        assert sess.should_stop()
    with pytest.raises(ms.StorageError, match="read-only"):
        session(url, last=5, storage_options=options)


def test_training_ends_at_the_next_run_once_the_directory_is_lost(monkeypatch):
    monkeypatch.setattr("monsess.checkpoint.ownership.INTERVAL_SECS", 0.05)
    url = fresh("memory")
    with pytest.raises(ms.DirectoryInUseError, match="taken away"):
        with session(url, last=10**9) as sess:
            sess.run(ticks.one)
            store = ms.CheckpointStore(url)
            owner = read_owner(store)
            assert owner is not None
            store._storage.write("owner.json", b"{}")
            store.write_run({"run_id": "another", "last_attempt": "another"})
            train(sess)  # it never comes to the next save
    assert ms.CheckpointStore(url).steps() == []


def test_a_recovery_keeps_the_directory(tmp_path):
    url = str(tmp_path / "run")
    failing = [True]
    again = ms.Recovery(backoff_secs=0, is_transient=lambda error: isinstance(error, ConnectionError))

    def maybe(*_: Any) -> None:
        if failing and failing.pop():
            raise ConnectionError("once")

    class Failing(ms.SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            if run_context.global_step == 3:
                maybe()

    with session(url, last=5, chief_only_hooks=[Failing()], recovery=again) as sess:
        owner = read_owner(ms.CheckpointStore(url))
        assert owner is not None
        train(sess)
        assert sess.recoveries == 1
        now = read_owner(ms.CheckpointStore(url))
        assert now is not None
        assert now.attempt == owner.attempt
    assert ms.CheckpointStore(url).steps()[-1] == 5


def test_what_a_start_a_commit_and_an_end_ask_of_the_store_for_it():
    faults = Faults(atomic=True)
    with session(fresh("faulty"), last=4, storage_options={"faults": faults}) as sess:
        train(sess)
    tokens = [operation for operation in faults.log if operation.path.endswith("/owner.json")]
    first, *later = [operation.instance for operation in tokens if operation.kind == "write"]
    # The one heartbeat, through a filesystem object of its own: it says which run this is and what it began from.
    assert later not in ([], [first])
    assert [operation.kind for operation in tokens if operation.instance == later[0]] == ["read", "write"]
    asked = [operation.kind for operation in tokens if operation.instance != later[0]]
    print(asked)
    # Looked for twice where an object may be gone for a moment; written; read back before run.json, each of two commits
    # and each piece of work of the clean-up after them; read once more and removed.
    assert asked[:4] == ["read", "read", "write", "read"]
    assert asked[-2:] == ["read", "delete"]
    assert set(asked[4:-2]) == {"read"}
    assert 2 <= len(asked[4:-2]) <= 2 + 2 * 3
