"""What is deleted when, however fast saves follow one another, and however often a run recovers."""

from __future__ import annotations

import time

import ticks
from checkpoints import fresh, saver, snapshot
from refusing import RefusingFileSystem, refuse, refusing

import monsess as ms
from monsess.checkpoint import CheckpointStore
from monsess.errors import StorageError


def present(url: str) -> set[int]:
    """Steps with any object."""
    root = "/" + url.removeprefix("refusing://") + "/"
    first = {name.removeprefix(root).split("/")[0] for name in list(RefusingFileSystem.store) if name.startswith(root)}
    return {int(name) for name in first if name.isdigit()}


def test_a_remote_store_does_not_grow_while_saves_queue_up():
    url = fresh("refusing")
    writer = saver(CheckpointStore(url), keep=2)
    most = []

    def rule(operation: str, path: str) -> None:
        if operation == "write" and path.endswith("/commit.json"):
            most.append(len(present(url)))

    with refusing(rule):
        for step in range(1, 16):
            writer.submit(snapshot(step))
        writer.wait()
        writer.close()
    assert max(most) <= 4, most
    assert present(url) == {14, 15}


def test_what_could_not_be_deleted_for_a_while_is_deleted_under_pressure_too():
    url = fresh("refusing")
    writer = saver(CheckpointStore(url), keep=2)
    with refusing(refuse("delete")):
        for step in range(1, 7):
            writer.submit(snapshot(step))
        writer.wait()
        ticks.wait_until(lambda: not writer._cleaning)
    backlog = len(present(url))
    assert backlog == 6
    for step in range(7, 20):
        writer.submit(snapshot(step))
        assert len(present(url)) <= backlog + 2
    writer.wait()
    writer.close()
    assert present(url) == {18, 19}


def test_leftovers_do_not_hold_back_retention_under_pressure():
    url = fresh("refusing")
    store = CheckpointStore(url)
    for step in range(100, 120):
        store._storage.write(f"{step}/session.json", b'{"run_id": "run"}')
    writer = saver(store, keep=2)
    most = []

    def rule(operation: str, path: str) -> None:
        if operation == "write" and path.endswith("/commit.json"):
            most.append(len({step for step in present(url) if step < 100}))
        if operation == "delete":
            time.sleep(0.005)

    with refusing(rule):
        for step in range(1, 16):
            writer.submit(snapshot(step))
        writer.wait()
        writer.close()
    assert max(most) <= 4, most
    assert present(url) == {14, 15}


class Fails(ms.SessionRunHook):
    """Fails once each at some steps."""

    def __init__(self, *steps: int) -> None:
        self._steps = set(steps)

    def after_run(self, run_context, run_values):
        if run_context.global_step in self._steps:
            self._steps.remove(run_context.global_step)
            raise StorageError("a store that was away for a moment") from ConnectionError()


def test_only_the_step_restored_last_is_protected(tmp_path):
    recovery = ms.Recovery(backoff_secs=0, is_transient=lambda error: isinstance(error, StorageError), max_restarts=9)
    with ms.MonitoredTrainingSession(
        ticks.init_fn,
        checkpoint_dir=str(tmp_path),
        save_checkpoint_steps=1,
        keep=ms.KeepLast(1),
        hooks=[Fails(5, 9, 13), ms.StopAtStepHook(last_step=18)],
        recovery=recovery,
    ) as session:
        while not session.should_stop():
            session.run(ticks.one)
        assert session.recoveries == 3
        last = session.restored_from
    assert last is not None
    assert set(CheckpointStore(tmp_path).steps()) == {last, 18}


def test_protection_moves_without_a_moment_in_between(tmp_path):
    from monsess.saving import Saving

    class Watched(set):
        sizes: list[int] = []  # noqa: RUF012

        def discard(self, item):
            self.sizes.append(len(self))
            super().discard(item)

        def clear(self):
            raise AssertionError("for a moment nothing would be protected")

    saving = Saving(str(tmp_path), None, ms.CheckpointOptions(), ms.KeepLast(1), lambda step, facts: None)
    saving._protected = Watched({3})
    saving._protect(7)
    assert saving._protected == {7}
