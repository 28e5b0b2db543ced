"""A training run that kills itself, or is killed, and is started again.

``python kill_child.py '{"folder": ..., ...}'`` trains once. ``python kill_child.py --serve`` imports everything,
touches no device, and then forks one training run per line of JSON on its standard input: a start without the imports.

Below ``folder`` lie ``checkpoints/``, ``curve`` (one line per step, appended by every attempt), ``phases`` (how far
each attempt came, and when), ``output`` and, once an attempt has ended, ``result.json``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import signal
import sys
import time
from typing import Any

import kill_stores
from kill_stores import die

if __name__ == "__main__":
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a pool of threads does not survive a fork

STEPS = 25
BATCHES = STEPS + 5  # more than are used: what is prefetched beyond the last step must not count
FETCHED = ("loss", "grad_norm", "draw", "rate", "index", "checksum")


@dataclasses.dataclass(frozen=True)
class Options:
    """One attempt.

    Args:
        folder: Where everything lies.
        store: One of `kill_stores.STORES`.
        last_step: Where to stop.
        every: Save every so many steps.
        saver: Where the saver hook stands: "default", or in the user's list: "first", "middle", "last".
        keep: How many checkpoints to keep.
        kill: Where the attempt kills itself: one of `PLACES`; "begin", "after_create_session", "end" (of a hook) or
            "closed"; "recorded": as "loop", but once a checkpoint is committed and its records are in the store;
            or "operation": at an operation of the store.
        at: The step at which it does, or the number of the operation.
        kind: Of which kind of operations, in a faulty store.
        when: At which point of the operation, in a faulty store.
        late: So many seconds after it, elsewhere.
        pin: A step that is pinned before anything else.
        restore_step: The step to restore, and to move those after it aside.
        cache: Directory of compiled programs, which saves time and changes no bit.
        fill_cache: Whether to add to it; a killed process might leave half an entry.
    """

    folder: str = ""
    store: str = "local"
    last_step: int = STEPS
    every: int = 3
    saver: str = "default"
    keep: int = 5
    kill: str = ""
    at: int = 0
    kind: str = "any"
    when: str = "before"
    late: float = 0.0
    pin: int = 0
    restore_step: int | None = None
    cache: str | None = None
    fill_cache: bool = False


#: Where an attempt may kill itself at a step, in the order of one run.
PLACES = (
    "before_run",  # the last hook's, before the step
    "after_run of the first hook",  # some hooks have seen the step and others have not
    "after_run",  # the last hook's: nobody has saved the step yet
    "before_save",
    "state_dict",  # the last hook's, while a checkpoint is put together
    "loop",  # run has returned: the save of the step, if any, is on its way
    "after_save",  # its commit is known, cleaning up goes on
)


class Appender:
    """Lines that are in the file as soon as they are written, so that SIGKILL cannot take them back."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def __call__(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())


def batch(index: int) -> dict[str, Any]:
    """Batch number ``index``, which says so."""
    import numpy as np
    import toy

    return {**toy.batch(index), "index": np.full(toy.ROWS, index, np.int32)}


def checksum(index: int) -> int:
    """What the step computes of batch ``index`` on the devices: the sum of all its bits."""
    import numpy as np

    return int(np.sum([leaf.view(np.uint32).sum(dtype=np.uint32) for leaf in batch(index).values()], dtype=np.uint32))


@functools.cache
def problem() -> Any:
    """The train step, and the hooks, whose base class needs the import."""
    import jax
    import jax.numpy as jnp
    import mixed_leaves
    import toy

    import monsess as ms

    @ms.train_step(reduce={"index": "max", "checksum": "sum"})
    def train(state: Any, batch: Any) -> Any:
        inner, outputs = toy._update(state["toy"], {"x": batch["x"], "y": batch["y"]})
        rate = 1.0 / (1.0 + 0.1 * state["toy"]["updates"])  # a schedule that goes by the stored counter
        inner["w"] = inner["w"] * (1.0 - 0.01 * rate)
        bits = [jax.lax.bitcast_convert_type(leaf, jnp.uint32).sum(dtype=jnp.uint32) for leaf in batch.values()]
        index = batch["index"][0]
        draw = jax.random.normal(ms.per_device_key(inner["key"]), ())
        outputs |= {"index": index, "checksum": bits[0] + bits[1] + bits[2], "draw": draw, "rate": rate}
        used = state["used"].at[index].add(1)
        return {"toy": inner, "used": used, "mixed": mixed_leaves.advance(state["mixed"])}, outputs

    class Pending(ms.SessionRunHook):
        """Looks at values some steps late, or when a checkpoint needs them, so that steps overlap."""

        def __init__(self) -> None:
            self._pending: list[tuple[int, Any]] = []

        def before_run(self, run_context: Any) -> Any:
            return ms.SessionRunArgs(
                {name: name for name in ("loss", "grad_norm", "draw", "rate", "index", "checksum")}
            )

        def after_run(self, run_context: Any, run_values: Any) -> None:
            self._pending.append((run_context.global_step, run_values.results))
            while len(self._pending) > 2:
                self.take(*self._pending.pop(0))

        def state_dict(self) -> dict[str, Any]:
            while self._pending:
                self.take(*self._pending.pop(0))
            return self.stored()

        def end(self, session: Any) -> None:
            self.state_dict()

        def take(self, step: int, values: Any) -> None:
            raise NotImplementedError

        def stored(self) -> dict[str, Any]:
            return {}

    class Witness(Pending):
        """Remembers, in the checkpoint only, what it has seen."""

        def __init__(self, place: str) -> None:
            super().__init__()
            self._state: dict[str, Any] = {"place": place, "steps": 0, "loss_sum": 0.0, "consumed": []}

        def take(self, step: int, values: Any) -> None:
            self._state["steps"] += 1
            self._state["loss_sum"] += float(values["loss"])
            self._state["consumed"].append([int(values["index"]), int(values["checksum"])])

        def stored(self) -> dict[str, Any]:
            return {**self._state, "consumed": list(self._state["consumed"])}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state["place"] == self._state["place"], "the hook was given another hook's state"
            self._state = {**state, "consumed": list(state["consumed"])}

    class Curve(Pending):
        """Writes the logged curve: all bits of every value."""

        def __init__(self, write: Appender) -> None:
            super().__init__()
            self._write = write

        def take(self, step: int, values: Any) -> None:
            floats = [float(values[name]).hex() for name in FETCHED[:4]]
            self._write(" ".join([str(step), *floats, str(int(values["index"])), str(int(values["checksum"]))]))

    class Killer(ms.SessionRunHook, ms.CheckpointSaverListener):
        """Kills the process at one place and step."""

        def __init__(self, options: Options, position: str) -> None:
            self._place = options.kill.removesuffix(f" of the {position} hook") if options.kill else ""
            if position == "first" and self._place == options.kill:
                self._place = ""  # places without a position are the last hook's
            self._at = options.at
            self._step = -1

        def _maybe(self, place: str, step: int | None = None) -> None:
            if place == self._place and step in (None, self._at):
                die()

        def begin(self) -> None:
            self._maybe("begin")

        def after_create_session(self, session: Any, coord: Any) -> None:
            session.add_saver_listener(self)
            self._maybe("after_create_session")

        def before_run(self, run_context: Any) -> None:
            self._maybe("before_run", run_context.global_step + 1)

        def after_run(self, run_context: Any, run_values: Any) -> None:
            self._step = run_context.global_step
            self._maybe("after_run", self._step)

        def before_save(self, session: Any, step: int) -> None:
            self._maybe("before_save", step)

        def after_save(self, session: Any, step: int) -> None:
            self._maybe("after_save", step)

        def state_dict(self) -> dict[str, Any]:
            self._maybe("state_dict", self._step)
            return {}

        def end(self, session: Any, step: int | None = None) -> None:
            self._maybe("end")

    return train, Witness, Curve, Killer


def init_fn() -> dict[str, Any]:
    """Twelve leaves."""
    import jax.numpy as jnp
    import mixed_leaves
    import toy

    return {"toy": toy.init_fn(), "used": jnp.zeros(BATCHES, jnp.int32), "mixed": mixed_leaves.init_fn()}


def prepare() -> None:
    """Import all that training needs; no device is touched and no thread started."""
    from monsess.testing import emulate_devices

    emulate_devices(4)
    import orbax.checkpoint  # noqa: F401
    import tensorstore  # noqa: F401

    kill_stores.register()
    problem()


def train(options: Options) -> None:
    """One attempt; leaves behind by what straight and killed runs are compared."""
    write = Appender(os.path.join(options.folder, "phases"))

    def mark(phase: str) -> None:
        write(f"{time.monotonic():.3f} {phase}")

    mark("importing")
    prepare()
    import jax
    import toy

    import monsess as ms

    if options.cache is not None:
        jax.config.update("jax_compilation_cache_dir", options.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0 if options.fill_cache else 1e9)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    mark("imported")

    step, Witness, Curve, Killer = problem()
    at_operation = options.at if options.kill == "operation" else 0
    store = kill_stores.opened(options.store, options.folder, options.kind, at_operation, options.when, options.late)
    if options.pin:
        ms.CheckpointStore(store.url, store.options).pin(options.pin)
    curve = Curve(Appender(os.path.join(options.folder, "curve")))
    witnesses = [Witness(place) for place in ("first", "middle", "last")]
    hooks: list[Any] = [witnesses[0], Killer(options, "first"), curve, ms.NanTensorHook(), witnesses[1]]
    hooks += [ms.SummarySaverHook(save_steps=1), ms.StopAtStepHook(last_step=options.last_step)]
    hooks += [witnesses[2], Killer(options, "last")]
    cadence: dict[str, Any] = {"save_checkpoint_steps": options.every}
    if options.saver != "default":
        cadence = {"save_checkpoint_steps": None, "save_checkpoint_secs": None}
        place = {"first": 0, "middle": 4, "last": len(hooks)}[options.saver]
        hooks.insert(place, ms.CheckpointSaverHook(save_steps=options.every))

    with ms.MonitoredTrainingSession(
        init_fn,
        data=[batch(index) for index in range(BATCHES)],
        checkpoint_dir=store.url,
        storage_options=store.options,
        checkpoint=ms.CheckpointOptions(
            staging_dir=None if options.store == "local" else os.path.join(options.folder, "staging"),
            restore_step=options.restore_step,
            newer="aside",
        ),
        hooks=hooks,
        keep=ms.KeepLast(options.keep),
        save_summaries_steps=None,
        prefetch=2,
        **cadence,
    ) as sess:
        mark("created")
        while not sess.should_stop():
            sess.run(step)
            mark(f"step {sess.global_step}")
            if options.kill in ("loop", "recorded") and sess.global_step == options.at:
                if options.kill == "recorded":
                    while not sess.summary()["saves"]:
                        time.sleep(0.01)
                    sess._recording.flush()
                die()
        mark("ending")
    mark("closed")
    if options.kill == "closed":
        die()
    leaves = jax.tree_util.tree_leaves_with_path(sess.state_copy())
    result = {
        "leaves": {jax.tree_util.keystr(path): _bits(toy._host(leaf)) for path, leaf in leaves},
        "step": sess.global_step,
        "used": toy._host(sess.state["used"]).tolist(),
        "hooks": [witness.state_dict() for witness in witnesses],
        "stop": None if sess.stop_reason is None else sess.stop_reason.name,
        "restored_from": sess.restored_from,
        "saves": sess.summary()["saves"],
        "run_id": sess.run_id,
        "operations": store.operations(),
    }
    path = os.path.join(options.folder, "result.json")
    with open(f"{path}.new", "w") as file:
        json.dump(result, file)
    os.replace(f"{path}.new", path)
    mark("written")


def _bits(array: Any) -> list[Any]:
    return [str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]


def serve() -> Options | None:
    """Fork a child per request and report its exit status; returns the options in each child, None at the end."""
    prepare()
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    assert threads == 1, f"the process that forks has {threads} threads"
    for line in sys.stdin:
        request = json.loads(line)
        options = Options(**request["options"])
        pid = os.fork()
        if pid == 0:
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            log = os.open(os.path.join(options.folder, "output"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            return options

        def end_it(number: int, frame: Any, pid: int = pid) -> None:
            os.kill(pid, signal.SIGKILL)

        late = signal.signal(signal.SIGALRM, end_it)
        signal.setitimer(signal.ITIMER_REAL, request["kill_after"] or request["timeout"])
        begun = time.monotonic()
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        finally:
            left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, late)
        timed_out = left == 0 and request["kill_after"] is None
        reply = {"status": status, "seconds": time.monotonic() - begun, "timed_out": timed_out}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
    return None


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    wanted = serve() if sys.argv[1] == "--serve" else Options(**json.loads(sys.argv[1]))
    if wanted is not None:
        train(wanted)
