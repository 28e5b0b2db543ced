"""What all built-in hooks together add to a step in which none of them is due, and what they bring to the host.

Two things are compared, in turns of a few runs, each of which ends when its last step is done: a session with the hooks
below, every one of them with a cadence of 100 steps, and a session with none at all. Measured are turns between two due
steps, begun when what the due one had begun, a checkpoint among it, has come to its end. What two sessions differ in
without any hook, by where their objects lie in memory, is more than what is to be measured, so that ten pairs of them
are made, and the mean over the pairs is shown with its standard error. Then the same session runs its step with its
hooks and without, by turns, which leaves that difference out, and all that hooks cost outside of their calls.

After that the same as at first without waiting for the end of what was due: a step takes less than half a millisecond
here, so that a checkpoint every hundred steps is being written most of the time, by threads that need the same cores
and the same interpreter. What they take from both sessions alike is not in the difference, but in "without".

At last every first transfer of a value from a device is counted, by the hook in whose code it happens and by step.

    python benchmarks/hooks.py [--devices N] [--steps N] [--each]
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
from monsess.dispatch import Count

EVERY = 100
#: Runs of one turn; one turn after a due run is left out, in which a batch is fetched that was not prefetched, say.
TURN = 8
#: Of new sessions.
PAIRS = 10
#: For what is written beside a checkpoint, such as records.
SETTLE_SECS = 0.05
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


#: A session, and that method of it that runs a step.
Runs = tuple[ms.MonitoredSession, Callable[..., Any]]


def turn(sess: ms.MonitoredSession, run: Callable[..., Any], runs: int) -> tuple[float, float]:
    """Microseconds of a run, of the clock and of CPU of this thread, when so many are made and done."""
    begun, worked = time.perf_counter(), time.thread_time()
    for _ in range(runs):
        run(train)
    jax.block_until_ready(sess.state)
    worked, spent = time.thread_time() - worked, time.perf_counter() - begun
    return 1e6 * spent / runs, 1e6 * worked / runs


def settle(sess: ms.MonitoredSession) -> None:
    """Wait until what the run that was due has begun is over."""
    if any(isinstance(hook, ms.CheckpointSaverHook) for hook in sess._hooks.hooks):
        assert sess.checkpoint_dir is not None
        store = ms.CheckpointStore(sess.checkpoint_dir)
        while sess.global_step not in store.steps():
            time.sleep(SETTLE_SECS / 5)
    time.sleep(SETTLE_SECS)


class Added(NamedTuple):
    """Microseconds of an untriggered run: without hooks, and more with them; the latter with its standard error."""

    without: float
    clock: float
    clock_error: float
    cpu: float
    cpu_error: float

    def __str__(self) -> str:
        return (
            f"without {self.without:6.1f}   added {self.clock:6.1f} ±{self.clock_error:5.1f}   "
            f"CPU {self.cpu:6.1f} ±{self.cpu_error:5.1f}"
        )


def added(made: Callable[[], list[Any]], devices: int, rounds: int, pairs: int = PAIRS, wait: bool = True) -> Added:
    """Let so many pairs of new sessions take turns, each between ``rounds`` due steps and the next."""
    found = []
    for number in range(pairs):
        with contextlib.ExitStack() as stack:  # whichever was made first, or compiled first, is a little faster
            lists = [[], made()] if number % 2 else [made(), []]
            sessions = [session(stack, one, devices) for one in lists]
            runs = [(sess, sess.run) for sess in sessions]
            found.append(_differences(runs, 1 if number % 2 else 0, rounds, wait))
    return _summary(found)


def added_in_one(made: Callable[[], list[Any]], devices: int, rounds: int, sessions: int = PAIRS) -> Added:
    """Let so many new sessions run with their hooks and without, by turns."""
    found = []
    for _ in range(sessions):
        with contextlib.ExitStack() as stack:
            sess = session(stack, made(), devices)
            found.append(_differences([(sess, sess.run_without_hooks), (sess, sess.run)], 1, rounds, wait=True))
    return _summary(found)


def _differences(runs: list[Runs], full: int, rounds: int, wait: bool) -> tuple[float, float, float]:
    """Medians of all pairs of turns: microseconds without hooks, and more with them, of the clock and of CPU.

    Args:
        runs: The two that take turns.
        full: Which of them calls hooks.
        rounds: From a due step to the next, how often.
        wait: Until what was due has ended.
    """
    sessions = {id(sess): sess for sess, _ in runs}.values()
    pairs = []
    for sess in sessions:
        turn(sess, sess.run, EVERY)
    gc.disable()
    try:
        for number in range(rounds):
            gc.collect()
            if wait:
                settle(runs[full][0])
            order = [0, 1] if number % 2 else [1, 0]
            for one in order:
                turn(*runs[one], TURN)
            while runs[full][0].global_step % EVERY < EVERY - 2 * TURN:
                order.reverse()
                spent = {one: turn(*runs[one], TURN) for one in order}
                pairs.append((spent[1 - full], spent[full]))
            for sess in sessions:
                turn(sess, sess.run, EVERY - sess.global_step % EVERY)
    finally:
        gc.enable()
    return (
        statistics.median(without[0] for without, _ in pairs),
        statistics.median(with_them[0] - without[0] for without, with_them in pairs),
        statistics.median(with_them[1] - without[1] for without, with_them in pairs),
    )


def _summary(found: list[tuple[float, float, float]]) -> Added:
    without, clock, cpu = zip(*found, strict=True)

    def mean_and_error(values: tuple[float, ...]) -> tuple[float, float]:
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return statistics.mean(values), spread / len(values) ** 0.5

    return Added(statistics.mean(without), *mean_and_error(clock), *mean_and_error(cpu))


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
        if frame.f_code is Count.__int__.__code__:
            return "nan"  # for which it is read
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
    rounds = max(1, options.steps // EVERY // PAIRS)

    def report(title: str, names: list[str], measure: Callable[..., Added], **more: Any) -> None:
        found = measure(lambda: [makers[one]() for one in names], options.devices, rounds, **more)
        print(f"{title:34} {found}", flush=True)

    print(
        f"{options.devices} device(s), {rounds * EVERY * PAIRS} steps in {PAIRS} pairs of sessions, all hooks every "
        f"{EVERY}; microseconds per untriggered step"
    )
    report("no hook", [], added)
    report(f"all {len(makers)} hooks", list(makers), added)
    report("  in one session", list(makers), added_in_one)
    report("  while checkpoints are written", list(makers), added, wait=False)
    if options.each:
        for name in makers:
            report(name, [name], added_in_one)
    found = count_transfers([make() for make in makers.values()], options.devices, options.steps)
    by_owner: dict[str, list[int]] = defaultdict(list)
    for (owner, _), count in found.items():
        by_owner[owner].append(count)
    print(f"transfers to the host in {options.steps} steps:")
    for owner, counts in sorted(by_owner.items()):
        print(f"  {owner:24} {sum(counts):5} in {len(counts):5} steps, at most {max(counts)} in one")


if __name__ == "__main__":
    main()
