"""A thousand committed steps in one directory: what it costs to list them, to start, to commit, and to let most go.

Acceptance: listing and start cost a bounded number of requests, the same for 1,000 steps as for 10 (printed); retention
of 1,000 down to 5 does not stall training, even where a delete never ends.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections import Counter
from typing import Any

import pytest
import toy
from failing_run import until

import monsess as ms
from monsess.checkpoint.commit import COMMIT, SESSION, CommitRecord, decode
from monsess.localfiles import Digest
from monsess.testing import Faults, FaultyFileSystem, Operation

MANY, FEW = 1000, 12
EVERY = 4  # steps between saves; divides both
#: It takes one attempt; a busy machine may not get done with all deletes before it ends.
MOST_ATTEMPTS = 3

pytestmark = pytest.mark.slow


class Directory:
    """A directory of ``count`` committed steps, which one run wrote; only the newest holds a whole state."""

    def __init__(self, count: int, indexed: bool = True) -> None:
        self.faults = Faults()
        self.options = {"faults": self.faults}
        self.url = f"faulty://{uuid.uuid4().hex}/run"
        self.count = count
        self.train(1, ms.KeepLast(1))
        files = FaultyFileSystem(**self.options)
        path = self.url.removeprefix("faulty://")
        first = decode(files.cat_file(f"{path}/1/{COMMIT}"), 1)
        content = {name: files.cat_file(f"{path}/1/{name}") for name in first.files}
        records = []
        for step in range(2, count + 1):
            session = json.dumps({**json.loads(content[SESSION]), "step": step}).encode()
            held = {**(content if step == count else {}), SESSION: session, "default/d/x": b"x"}
            record = CommitRecord(
                step=step,
                run_id=first.run_id,
                attempt=first.attempt,
                time=first.time + step,
                started=first.started,
                files={name: digest(data) for name, data in held.items()},
            )
            for name, data in (*held.items(), (COMMIT, record.encode())):
                files.pipe_file(f"{path}/{step}/{name}", data)
            records.append(record)
        store = ms.CheckpointStore(self.url, self.options)
        if indexed:
            store._remember(first.run_id, [first, *records])
        else:
            store._storage.delete("run.json")
        assert store.verify(count) == []

    def train(self, last_step: int, keep: Any, after_run: Any = lambda session, step: None, every: int = EVERY) -> Any:
        """One attempt, which ends with a checkpoint of ``last_step``."""

        class After(ms.SessionRunHook):
            def after_run(self, run_context: Any, run_values: Any) -> None:
                after_run(run_context.session, run_context.global_step)

        with ms.MonitoredTrainingSession(
            toy.init_fn,
            data=toy.batches(100),
            checkpoint_dir=self.url,
            storage_options=self.options,
            save_checkpoint_steps=every,
            keep=keep,
            hooks=[ms.StopAtStepHook(last_step=last_step), After()],
        ) as sess:
            while not sess.should_stop():
                sess.run(toy.train)
        return sess

    def steps(self) -> list[int]:
        return ms.CheckpointStore(self.url, self.options).steps()


def digest(data: bytes) -> Digest:
    return Digest(len(data), hashlib.sha256(data).hexdigest())


def requests(operations: list[Operation]) -> str:
    counts = Counter(one.kind for one in operations)
    return f"{len(operations)} ({', '.join(f'{kind} {count}' for kind, count in sorted(counts.items()))})"


def costs(directory: Directory) -> dict[str, list[Operation]]:
    """The operations of listing, of a start up to its first step, and of its first commit with its clean-up."""
    log: dict[str, list[Operation]] = {}
    begun = len(directory.faults.log)
    assert directory.steps() == list(range(1, directory.count + 1))
    log["listing"] = directory.faults.log[begun:]

    begun = len(directory.faults.log)
    started = []

    def after_run(session: Any, step: int) -> None:
        started.append(len(directory.faults.log))

    directory.train(directory.count + 1, ms.KeepLast(10**6), after_run)
    log["start"] = directory.faults.log[begun : started[0]]
    log["first commit and end"] = directory.faults.log[started[0] :]
    assert directory.steps() == list(range(1, directory.count + 2))
    return log


@pytest.fixture(scope="module")
def few():
    return costs(Directory(FEW))


def test_listing_and_start_cost_the_same_however_many_steps_there_are(few, figures):
    many = costs(Directory(MANY))
    for what, operations in many.items():
        figures.append(f"requests for {what}: {requests(operations)} with {MANY} steps, {len(few[what])} with {FEW}")
    assert len(many["listing"]) <= 2
    for what in ("listing", "start", "first commit and end"):
        # Heartbeats of the owner may come in between, one each ten seconds.
        assert abs(len(many[what]) - len(few[what])) <= 6, (what, requests(many[what]), requests(few[what]))


def test_without_the_index_a_start_still_reads_one_commit_record_of_many(few, figures):
    """run.json is gone: the newest step is found all the same, and the first commit notes all of them down again."""
    directory = Directory(MANY, indexed=False)
    begun = len(directory.faults.log)
    started = []

    def after_run(session: Any, step: int) -> None:
        started.append(len(directory.faults.log))

    sess = directory.train(MANY + 1, ms.KeepLast(10**6), after_run)
    assert sess.restored_from == MANY
    start = directory.faults.log[begun : started[0]]
    figures.append(f"requests for start without run.json: {requests(start)} with {MANY} steps")
    assert len(start) <= len(few["start"]) + 6
    begun = len(directory.faults.log)
    assert directory.steps() == list(range(1, MANY + 2))
    assert len(directory.faults.log) - begun <= 2


def test_retention_of_many_down_to_five_does_not_hold_training_where_no_delete_ends(figures):
    directory = Directory(MANY)
    committed = []

    class Listener(ms.CheckpointSaverListener):
        def after_save(self, session: Any, step: int) -> None:
            committed.append(step)

    def after_run(session: Any, step: int) -> None:
        if step == MANY + 1:
            session.add_saver_listener(Listener())
            directory.faults.block("delete", times=None, path="/run/")
        if step > MANY + EVERY and step % EVERY == EVERY - 1:  # a step that takes as long as a save
            until(lambda: was_written(directory.faults, f"/{step - EVERY + 1}/{COMMIT}"))
        if step == MANY + 24:
            directory.faults.release()

    begun = len(directory.faults.log)
    sess = directory.train(MANY + 24, ms.KeepLast(5), after_run)
    assert committed[:5] == [MANY + step for step in (4, 8, 12, 16, 20)], "commits went on"
    assert sess._saving.stalled_seconds == 0, "and held nobody"
    deletes = [one for one in directory.faults.log[begun:] if one.kind == "delete"]
    attempts, saved = 1, list(committed)
    while len(directory.steps()) > 6 and attempts < MOST_ATTEMPTS:  # what one does not get done, the next one does
        saved.append(directory.steps()[-1] + 1)
        directory.train(saved[-1], ms.KeepLast(5))
        attempts += 1
    left = directory.steps()
    figures.append(
        f"{MANY} steps down to {len(left)}: {len(committed)} commits and 0 s of stall while a delete was blocked, "
        f"{len(deletes)} deletes by the end of that attempt, {attempts} in all"
    )
    # A later attempt restores one of the five.
    assert left == ([MANY] if attempts == 1 else []) + saved[-5:], "five, and the one that was restored"


def was_written(faults: Faults, end: str) -> bool:
    return any(one.kind == "write" and one.outcome == "done" and one.path.endswith(end) for one in faults.log[-500:])
