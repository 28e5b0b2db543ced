"""One attempt of a small training run at a URL; as a program, one that ends by SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

LAST_STEP, DIE_AT, KEEP = 25, 14, 2


def train(url: str, options: dict[str, Any] | None, unplug: Any = None) -> Any:
    """Train to `LAST_STEP`, and return the session.

    Args:
        url: The checkpoint directory.
        options: Its storage options.
        unplug: Called in the run of step `DIE_AT`, when at least one checkpoint has been committed.
    """
    import toy

    import monsess as ms

    class Unplug(ms.SessionRunHook, ms.CheckpointSaverListener):
        committed = 0

        def after_create_session(self, session: Any, coord: Any) -> None:
            session.add_saver_listener(self)

        def after_save(self, session: Any, step: int) -> None:
            self.committed = step

        def after_run(self, run_context: Any, run_values: Any) -> None:
            if unplug is not None and run_context.global_step == DIE_AT:
                # A third save waits for the first, so that the first of three is committed by now.
                assert self.committed, "no checkpoint yet"
                unplug()

        def end(self, session: Any, step: int | None = None) -> None:
            pass

    with ms.MonitoredTrainingSession(
        toy.init_fn,
        data=toy.batches(LAST_STEP + 5),
        checkpoint_dir=url,
        storage_options=options,
        save_checkpoint_steps=4,
        keep=ms.KeepLast(KEEP),
        hooks=[ms.StopAtStepHook(last_step=LAST_STEP), Unplug()],
    ) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
    return sess


def main() -> None:
    """Read ``{"url", "options"}`` from standard input, train, and be killed."""
    from monsess.testing import emulate_devices

    emulate_devices(4)
    train(**json.load(sys.stdin), unplug=lambda: os.kill(os.getpid(), signal.SIGKILL))


if __name__ == "__main__":
    main()
