"""A small training run at a faulty store; as a program, one attempt whose writes go wrong from step 10 on.

The program reads ``{"root", "how", "limit"}`` from standard input and tells on standard output, one line each: that the
fault was set, every step that was made after that, and when the session raised (`time.monotonic`).
"""

from __future__ import annotations

import builtins
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

SAVE_STEPS, FAULT_AT, LAST_STEP = 5, 9, 25
URL = "faulty://errors/run"


def train(
    options: dict[str, Any], after_run: Callable[[Any, int], None] = lambda session, step: None, **more: Any
) -> Any:
    """Train to `LAST_STEP`, calling ``after_run(session, step)`` after each step, and return the session."""
    import toy

    import monsess as ms

    class After(ms.SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            after_run(run_context.session, run_context.global_step)

    with ms.MonitoredTrainingSession(
        toy.init_fn,
        data=toy.batches(LAST_STEP + 5),
        checkpoint_dir=more.pop("url", URL),
        storage_options=options,
        save_checkpoint_steps=SAVE_STEPS,
        hooks=[ms.StopAtStepHook(last_step=LAST_STEP), After()],
        **more,
    ) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
    return sess


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something holds, and fail if it never does."""
    for _ in _ticks(seconds):
        if condition():
            return
    raise AssertionError("waited in vain")


def _ticks(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.02)


def main() -> None:
    """Make one attempt."""
    from monsess.testing import Faults, emulate_devices

    emulate_devices(4)
    import monsess as ms

    asked = json.load(sys.stdin)
    faults = Faults()
    options = {"root": asked["root"], "faults": faults}
    set_at = 0.0

    def after_run(session: Any, step: int) -> None:
        nonlocal set_at
        if step == FAULT_AT:
            until(lambda: ms.CheckpointStore(URL, options).steps() == [SAVE_STEPS])
            set_at = time.monotonic()
            if asked["how"] == "blocked":
                faults.block("write", times=None)
            else:
                faults.fail("write", times=None, error=getattr(builtins, asked["how"])("503 or 403"))
            print("set", flush=True)
        elif step > FAULT_AT:
            print("step", step, flush=True)
            if step == FAULT_AT + 2:  # the save of step 10 has met the fault; from here on the steps take their time
                until(lambda: any(one.kind == "write" and one.outcome != "done" for one in faults.log[-50:]))
            time.sleep(0.2)

    try:
        train(options, after_run, checkpoint=ms.CheckpointOptions(save_timeout_secs=asked["limit"]))
    finally:
        now = time.monotonic()  # the same clock in all processes
        print(f"raised after {now - set_at:.1f} s at {now:.3f}", flush=True)


if __name__ == "__main__":
    main()
