"""What all built-in hooks together add to a step in which none of them is due, and what they bring to the host.

Two sessions take turns, one with the hooks below, every one of them with a cadence of 100 steps, and one with none at
all. The time of each single run is taken; those in which a hook is due, and the few after them in which what it began
comes to its end, are left out. Medians are compared, round by round.

Then every first transfer of a value from a device is counted, by the hook in whose code it happens and by step.

    python benchmarks/hooks.py [--devices N] [--steps N] [--rounds N] [--each]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import monsess as ms

EVERY = 100
#: Runs after a due one that are left out, too: what is looked at late, a batch that was prefetched meanwhile.
AFTER = 10
ROWS = 8


@ms.train_step
def train(state: Any, batch: Any) -> Any:
    """A step of next to no work, so that what is measured is everything around it."""
    loss = batch["x"].mean() + 1.0 / (1.0 + state["w"])
    return {"w": state["w"] + 1.0}, {"loss": loss, "rate": state["w"]}


@ms.eval_step
def evaluate(state: Any, batch: Any) -> Any:
    """The loss of another batch."""
    return {"loss": batch["x"].mean() + 1.0 / (1.0 + state["w"])}


def hooks(rows: int) -> dict[str, Callable[[], Any]]:
    """What makes each hook; those that have to feed the step or to wait in each run have no untriggered one."""
    batch = {"x": np.ones((rows, 4), np.float32)}
    return {
        "StopAtStepHook": lambda: ms.StopAtStepHook(last_step=10**9),
        "StopAtTimeHook": lambda: ms.StopAtTimeHook(36_000),
        "CheckpointSaverHook": lambda: ms.CheckpointSaverHook(save_steps=EVERY),
        "SummarySaverHook": lambda: ms.SummarySaverHook(save_steps=EVERY),
        "StepCounterHook": lambda: ms.StepCounterHook(every_n_steps=EVERY),
        "LoggingTensorHook": lambda: ms.LoggingTensorHook(["loss"], every_n_iter=EVERY),
        "NanTensorHook": lambda: ms.NanTensorHook(),
        "EvaluationHook": lambda: ms.EvaluationHook(evaluate, [batch], every_n_steps=EVERY),
        "EarlyStoppingHook": lambda: ms.EarlyStoppingHook("eval/loss", patience=10**6),
        "ProfilerHook": lambda: ms.ProfilerHook(save_steps=10 * EVERY),
        "ProgressBarHook": lambda: ms.ProgressBarHook(["loss", "rate"], line_secs=0.5),
        "WatchdogHook": lambda: ms.WatchdogHook(600),
        "GoodputHook": lambda: ms.GoodputHook(every_n_steps=EVERY),
        "ReplicaCheckHook": lambda: ms.ReplicaCheckHook(every_n_steps=EVERY),
        "FinalOpsHook": lambda: ms.FinalOpsHook("loss"),
        "GlobalStepWaiterHook": lambda: ms.GlobalStepWaiterHook(0),
        "BroadcastGlobalVariablesHook": lambda: ms.BroadcastGlobalVariablesHook(0),
    }


def session(stack: contextlib.ExitStack, made: list[Any], devices: int) -> ms.MonitoredSession:
    """A session with these hooks and no default ones."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
    batch = {"x": np.ones((ROWS * devices, 4), np.float32)}
    sess = ms.MonitoredTrainingSession(
        lambda: {"w": jnp.zeros(())},
        data=ms.repeat([batch]),
        checkpoint_dir=folder,
        save_checkpoint_secs=None,
        save_checkpoint_steps=None,
        save_summaries_steps=None,
        save_summaries_secs=None,
        log_step_count_steps=None,
        hooks=made,
    )
    return stack.enter_context(sess)


def round_of(sess: ms.MonitoredSession, runs: int) -> tuple[float, float]:
    """Of the runs in which no hook was due or had been shortly before: median microseconds, of the clock and of CPU."""
    clock, cpu = [], []
    for _ in range(runs):
        begun, worked = time.perf_counter(), time.thread_time()
        sess.run(train)
        worked, spent = time.thread_time() - worked, time.perf_counter() - begun
        if AFTER < sess.global_step % EVERY < EVERY - 1:
            clock.append(1e6 * spent)
            cpu.append(1e6 * worked)
    jax.block_until_ready(sess.state)
    return statistics.median(clock), statistics.median(cpu)


class Added(NamedTuple):
    """Microseconds of an untriggered run: without hooks, with them, and more by the clock and of CPU time."""

    without: float
    with_them: float
    clock: float
    cpu: float


def added(made: Callable[[], list[Any]], devices: int, rounds: int) -> Added:
    """Let two sessions take turns; medians over the rounds, the last two of the differences in each round."""
    with contextlib.ExitStack() as stack:
        bare, full = session(stack, [], devices), session(stack, made(), devices)
        for sess in (bare, full):
            round_of(sess, EVERY)
        pairs = []
        gc.disable()
        try:
            for number in range(rounds):
                order = (bare, full) if number % 2 else (full, bare)
                spent = {id(sess): round_of(sess, EVERY) for sess in order}
                pairs.append((spent[id(bare)], spent[id(full)]))
                gc.collect()
        finally:
            gc.enable()
    median = statistics.median
    return Added(
        median(b[0] for b, _ in pairs),
        median(f[0] for _, f in pairs),
        median(f[0] - b[0] for b, f in pairs),
        median(f[1] - b[1] for b, f in pairs),
    )


@contextlib.contextmanager
def transfers() -> Iterator[Callable[[Callable[[], int]], dict[tuple[str, int], int]]]:
    """Count, by the module in whose code it happens and by step, the values that a device hands over."""
    array = type(jnp.zeros(()))
    value: Any = array.__dict__["_value"]
    counts: Counter[tuple[str, int]] = Counter()
    seen: dict[int, Any] = {}  # keeps them, so that no two have one id
    step: list[Callable[[], int]] = [lambda: 0]

    def note(x: Any) -> None:
        if id(x) not in seen:
            seen[id(x)] = x
            counts[_owner(), step[0]()] += 1

    def read(self: Any) -> Any:  # by float(), int(), device_get
        note(self)
        return value.fget(self)

    def noted(function: Any) -> Any:
        def convert(x: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(x, jax.Array):  # on a CPU numpy reads the buffer, which no property sees
                note(x)
            return function(x, *args, **kwargs)

        return convert

    def of(step_now: Callable[[], int]) -> dict[tuple[str, int], int]:
        step[0] = step_now
        return counts

    plain = {name: getattr(np, name) for name in ("asarray", "array")}
    array._value = property(read)  # pyright: ignore[reportAttributeAccessIssue]
    for name, function in plain.items():
        setattr(np, name, noted(function))
    try:
        yield of
    finally:
        array._value = value  # pyright: ignore[reportAttributeAccessIssue]
        for name, function in plain.items():
            setattr(np, name, function)


def _owner() -> str:
    """The hook in whose code this happens, or the part of the package, or "the loop"."""
    frame: Any = sys._getframe(3)
    owner = "the loop"
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("monsess.hooks.") and not name.startswith("monsess.hooks._"):
            return name.removeprefix("monsess.hooks.")
        if name.startswith("monsess.") and owner == "the loop":
            owner = name.removeprefix("monsess.")
        frame = frame.f_back
    return owner


def count_transfers(made: list[Any], devices: int, steps: int) -> dict[tuple[str, int], int]:
    """The transfers of a run of so many steps, by owner and step."""
    with contextlib.ExitStack() as stack, transfers() as of:
        sess = session(stack, made, devices)
        found = of(lambda: sess.global_step)
        found.clear()
        for _ in range(steps):
            sess.run(train)
        return dict(found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What all built-in hooks together add to an untriggered step.")
    parser.add_argument("--devices", type=int, default=1, help="emulated CPU devices; 0: the devices of the machine")
    parser.add_argument("--steps", type=int, default=2000, help="of each session")
    parser.add_argument("--each", action="store_true", help="each hook alone, too")
    options = parser.parse_args()
    if options.devices:
        ms.testing.emulate_devices(options.devices)
    else:
        options.devices = jax.local_device_count()
    logging.getLogger("monsess").setLevel(logging.WARNING)
    makers = hooks(ROWS * options.devices)
    rounds = max(1, options.steps // EVERY)

    def report(name: str, names: list[str]) -> None:
        found = added(lambda: [makers[one]() for one in names], options.devices, rounds)
        print(
            f"{name:32} without {found.without:7.1f}   with {found.with_them:7.1f}   added {found.clock:6.1f}   "
            f"CPU {found.cpu:6.1f}",
            flush=True,
        )

    print(f"{options.devices} device(s), {rounds * EVERY} steps, all hooks every {EVERY}; us per untriggered step")
    report(f"all {len(makers)} hooks", list(makers))
    if options.each:
        for name in makers:
            report(name, [name])
    found = count_transfers([make() for make in makers.values()], options.devices, options.steps)
    by_owner: dict[str, list[int]] = defaultdict(list)
    for (owner, _), count in found.items():
        by_owner[owner].append(count)
    print(f"transfers to the host in {options.steps} steps:")
    for owner, counts in sorted(by_owner.items()):
        print(f"  {owner:24} {sum(counts):5} in {len(counts):5} steps, at most {max(counts)} in one")


if __name__ == "__main__":
    main()
