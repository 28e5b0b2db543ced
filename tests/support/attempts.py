"""Attempts of a run without a session: saves, one after the other, with what retention ranks them by."""

from __future__ import annotations

import threading

import ticks
from checkpoints import snapshot

import monsess as ms
from monsess.checkpoint.options import CheckpointOptions
from monsess.checkpoint.saver import Saver
from monsess.checkpoint.store import CheckpointStore


class Run:
    """One attempt: saves steps in the background, one after the other, with what retention ranks them by."""

    def __init__(
        self,
        url: str,
        keep: ms.Retention,
        *,
        storage_options: dict[str, object] | None = None,
        run_id: str = "run",
        attempt: str = "a1",
        **more: object,
    ):
        self.store = CheckpointStore(url, storage_options)
        self.protect: set[int] = set()
        self.saver = Saver(
            self.store,
            CheckpointOptions(**more),  # type: ignore[arg-type]
            keep,
            attempt=attempt,
            run_id=run_id,
            protect=self.protect,
            started=0.0,
        )

    def save(self, step: int, loss: float | None = None, state: object = None) -> None:
        metrics = {} if loss is None else {"loss": loss}
        self.saver.submit(snapshot(step, state, metrics=metrics))
        self.saver.wait()
        ticks.wait_until(lambda: not self.saver._cleaning)

    def threads(self) -> list[threading.Thread]:
        """Those of this attempt that are alive."""
        threads = (self.saver._thread, self.saver._upkeep._thread)
        return [thread for thread in threads if thread is not None and thread.is_alive()]

    def steps(self) -> list[int]:
        """What another process would see."""
        return CheckpointStore(self.store._storage.url, self.store._storage._options).steps()


def spoil(store: CheckpointStore, step: int) -> None:
    """Change a byte of the data of ``step``."""
    name = next(n for n in store._storage.walk(str(step)) if n.startswith("default/d/"))
    store._storage.write(f"{step}/{name}", b"damage")
