"""Training runs at a real store: killed at random moments, or with the store taken away in the middle of a save."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import fsspec
import jax.numpy as jnp
import toy
from kill_child import Options
from kills import SIGKILLED, Ending, ForkServer, Workers, assert_same, output, phases, result
from leftovers import beside_bookkeeping
from servers import Server

import monsess as ms
from monsess.storage import Storage

#: Steps of a killed run, and how often it saves: enough that old checkpoints are deleted.
LAST_STEP, EVERY, KEEP = 8, 3, 2
#: Steps of a run whose store goes away during the save of the second of these.
SAVED = (4, 8, 12)
OUTAGE_SECS = 20.0


def objects(store: Server, url: str) -> set[str]:
    """All objects below a URL, by their names relative to it."""
    filesystem, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **store.options)
    return {str(name)[len(root) :].strip("/") for name in filesystem.find(root)}


def sound_steps(store: Server, url: str) -> list[int]:
    """The committed steps, each of which verifies."""
    found = ms.CheckpointStore(url, store.options)
    steps = found.steps()
    problems = {step: found.verify(step) for step in steps}
    assert not any(problems.values()), problems
    return steps


def killed_and_resumed(
    attempt: ForkServer,
    workers: Workers,
    store: Server,
    name: str,
    seed: str,
    cache: str,
    seconds: float,
    straight: Ending,
) -> Counter[str]:
    """Kill one or two attempts at random moments, let the next one end, and compare what it ends in.

    Args:
        attempt: Makes them.
        workers: Gives a folder.
        store: The running server.
        name: Of the run; also of its directory in the store.
        seed: Decides the moments.
        cache: Compiled programs.
        seconds: How long an attempt takes that is not killed.
        straight: What the run has to end in.

    Returns:
        How many kills met which phase.
    """
    chance = random.Random(seed)
    options = options_at(workers, store, name, cache)
    url = f"{store.url}/{name}"
    met: Counter[str] = Counter()
    said = [f"seed {seed!r}: {url}"]
    try:
        for _ in range(chance.choice([1, 1, 2])):
            moment = chance.uniform(0.05, seconds)
            before = len(phases(options.folder))
            status = attempt(options, kill_after=moment)
            assert status in (0, SIGKILLED), f"ended with {status}"
            if status == 0:
                said.append(f"had ended before {moment:.2f} s")
                break
            phase = ["starting", *(phase for _, phase in phases(options.folder)[before:])][-1]
            met[phase.split()[0]] += 1
            said.append(f"killed after {moment:.2f} s of {seconds:.2f} s, {phase!r}; sound: {sound_steps(store, url)}")
        finish(attempt, store, url, options, straight)
    except AssertionError as error:
        error.add_note("\n".join([*said, output(options.folder)]))
        raise
    print("\n".join(said))
    return met


def options_at(workers: Workers, store: Server, name: str, cache: str) -> Options:
    """An attempt at a directory of its own."""
    folder = workers.folder(name)
    with open(os.path.join(folder, "store.json"), "w", encoding="utf-8") as file:
        json.dump({"url": f"{store.url}/{name}", "options": store.options}, file)
    return Options(folder=folder, store="real", last_step=LAST_STEP, every=EVERY, keep=KEEP, cache=cache)


def finish(attempt: ForkServer, store: Server, url: str, options: Options, straight: Ending) -> float:
    """Let an attempt end, compare, look that only what is to be kept is left; returns its seconds."""
    begun = time.monotonic()
    status = attempt(options)
    seconds = time.monotonic() - begun
    assert status == 0, f"the last attempt ended with {status}\n{output(options.folder)}"
    assert_same(options.folder, straight)
    found = result(options.folder)
    steps = sound_steps(store, url)
    assert steps[-1] == found["step"] == LAST_STEP
    if found["saves"]:
        kept = {*range(EVERY, LAST_STEP, EVERY), LAST_STEP}
        kept = {*sorted(kept)[-KEEP:], found["restored_from"]} - {None}
        assert set(steps) == kept, "pruned"
        below = {one.split("/")[0] for one in objects(store, url)}
        assert beside_bookkeeping(below) == {str(step) for step in steps}, "leftovers"
    else:
        assert found["restored_from"] == LAST_STEP
    shutil.rmtree(options.folder)
    return seconds


@dataclasses.dataclass(frozen=True)
class Outage:
    """What happens to a store in the middle of a save, how long it takes, and how long a request may take."""

    begin: Callable[[Server], None]
    seconds: float
    end: Callable[[Server], None]
    stall_secs: float = 60.0


OUTAGES = {
    "restarted": Outage(lambda store: store.kill(), 0.0, lambda store: store.start(wait=False)),
    "refuses": Outage(lambda store: store.kill(), OUTAGE_SECS, lambda store: store.start(wait=False)),
    "silent": Outage(lambda store: store.pause(), OUTAGE_SECS, lambda store: store.go_on()),
    "silent and given up": Outage(
        lambda store: store.pause(), OUTAGE_SECS, lambda store: store.go_on(), OUTAGE_SECS / 3
    ),
}


def train_through(outage: Outage, store: Server, name: str, megabytes: int, monkeypatch: Any) -> Any:
    """Train while the store goes away during the upload of the second save's data; returns the session."""
    upload = Storage.upload
    moments: list[threading.Thread] = []
    errors: list[BaseException] = []
    lock = threading.Lock()

    def away() -> None:
        try:
            time.sleep(0.05)  # some of the data is on its way
            outage.begin(store)
            time.sleep(outage.seconds)
            outage.end(store)
        except BaseException as error:
            errors.append(error)

    def uploading(self: Storage, rel: str, path: str) -> Any:
        with lock:
            if not moments and rel.startswith(f"{SAVED[1]}/") and os.path.getsize(path) > megabytes << 19:
                moments.append(threading.Thread(target=away))
                moments[0].start()
        return upload(self, rel, path)

    monkeypatch.setitem(Storage.__init__.__kwdefaults__, "stall_secs", outage.stall_secs)
    monkeypatch.setattr(Storage, "upload", uploading)
    try:
        with ms.MonitoredTrainingSession(
            lambda: {"toy": toy.init_fn(), "ballast": ballast(megabytes)},
            data=toy.batches(SAVED[-1] + 2),
            checkpoint_dir=f"{store.url}/{name}",
            storage_options=store.options,
            save_checkpoint_steps=SAVED[0],
            hooks=[ms.StopAtStepHook(last_step=SAVED[-1])],
        ) as sess:
            while not sess.should_stop():
                sess.run(step)
    finally:
        for thread in moments:
            thread.join()
    assert moments, "no upload of that size"
    assert not errors, errors
    return sess


def ballast(megabytes: int) -> Any:
    """What does not compress, so that its upload takes some time."""
    import jax

    return jax.random.bits(jax.random.key(1), (megabytes << 18,), jnp.uint32)


@ms.train_step
def step(state: Any, batch: Any) -> Any:
    """`toy.train` with some ballast."""
    inner, outputs = toy._update(state["toy"], batch)
    return {"toy": inner, "ballast": state["ballast"] + jnp.uint32(1)}, outputs
