"""Stopped at a step and started again: every kind of input, with every kind of step, ends in a straight run's bits."""

from __future__ import annotations

import functools

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.experimental.compilation_cache import compilation_cache

import monsess as ms

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]

EVEN = [8] * 12
#: Rows per batch for remainder="drop": of 6 rows 2 are dropped, and of 3 rows or fewer, with four devices, all.
DROPPED = [8, 3, 8, 6, 2, 8, 6, 1, 8, 8, 3]
#: For remainder="pad": always two rows per device.
PADDED = [8, 7, 8, 5, 6, 8, 7, 8, 5]


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Each session compiles its step anew, which would take most of the time here."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("cache")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def rows(index, count):
    """Batch number ``index``, cut to ``count`` rows, which says which one it is."""
    return {**{name: leaf[:count] for name, leaf in toy.batch(index).items()}, "index": np.full(count, index, np.int32)}


def init_fn():
    return {"w": jnp.linspace(-1.0, 1.0, 3), "key": jax.random.key(3), "updates": 0, "used": jnp.zeros(16, jnp.int32)}


def update(state, batch, mask=None):
    key, noise = jax.random.split(state["key"])
    keep = jax.random.bernoulli(ms.per_device_key(noise), 0.8, batch["x"].shape)

    def loss_fn(w):
        errors = (jnp.where(keep, batch["x"], 0.0) @ w - batch["y"]) ** 2
        if mask is None:
            return jnp.mean(errors)
        # Its gradient is summed by pmean below: a device that holds only padding adds nothing.
        return jnp.sum(jnp.where(mask, errors, 0.0)) / jnp.maximum(jax.lax.psum(jnp.sum(mask), "data"), 1)

    loss, grad = jax.value_and_grad(loss_fn)(state["w"])
    w = state["w"] - 0.05 * jax.lax.pmean(grad, "data")
    used = state["used"].at[batch["index"][0]].add(1)
    return {"w": w, "key": key, "updates": state["updates"] + 1, "used": used}, {"loss": loss}


def three_updates(state, batch):
    def body(state, _):
        return update(state, batch)

    state, outputs = jax.lax.scan(body, state, None, length=3)
    return state, {"loss": outputs["loss"][-1]}


def auxiliary(state, batch):
    """The other half of an iteration: it changes the state and counts no step."""
    state, outputs = update(state, batch)
    return {**state, "w": state["w"] * 0.99}, outputs


plain = ms.train_step(lambda state, batch: update(state, batch))
masked = ms.train_step(lambda state, batch, mask: update(state, batch, mask))
scanned = ms.train_step(steps_per_run=3)(three_updates)
half = ms.train_step(steps_per_run=0)(auxiliary)
mapped = ms.train_step(engine="shard_map")(lambda state, batch: update(state, batch))

#: By mode: rows per batch, remainder, the steps of an iteration, and the batches that are used, each so many times.
MODES = {
    "plain": (EVEN, "error", (plain,), dict.fromkeys(range(12), 1)),
    "drop": (DROPPED, "drop", (plain,), dict.fromkeys((0, 2, 3, 5, 6, 8, 9), 1)),
    "pad": (PADDED, "pad", (masked,), dict.fromkeys(range(9), 1)),
    "steps_per_run=3": (EVEN[:5], "error", (scanned,), dict.fromkeys(range(5), 3)),
    "auxiliary step": (EVEN, "error", (half, plain), dict.fromkeys(range(12), 1)),
    "shard_map": (EVEN, "error", (mapped,), dict.fromkeys(range(12), 1)),
}


class Reiterable:
    """A data set that can be read any number of times; writes down what was read."""

    def __init__(self, sizes, read):
        self.sizes = sizes
        self.read = read

    def __iter__(self):
        for index, size in enumerate(self.sizes):
            self.read.append(index)
            yield rows(index, size)


class Stateful:
    """An iterator with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, sizes, read):
        self.sizes = sizes
        self.read = read
        self.next = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == len(self.sizes):
            raise StopIteration
        self.next += 1
        self.read.append(self.next - 1)
        return rows(self.next - 1, self.sizes[self.next - 1])

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def from_grain(sizes, read):
    def make(index):
        read.append(int(index))
        return rows(int(index), sizes[int(index)])

    return iter(grain.MapDataset.range(len(sizes)).map(make).to_iter_dataset(grain.ReadOptions(num_threads=0)))


SOURCES = {
    "list": lambda sizes, read: list(Reiterable(sizes, [])),
    "re-iterable": Reiterable,
    "Grain": from_grain,
    "state_dict": Stateful,
    "generator": lambda sizes, read: iter(Reiterable(sizes, read)),
}


def train(source, mode, directory=None, last_step=None):
    """Train until ``last_step`` or the end of the data; returns the closed session, the losses and what was read."""
    sizes, remainder, steps, _ = MODES[mode]
    read, losses = [], []
    hooks = [] if last_step is None else [ms.StopAtStepHook(last_step=last_step)]
    with ms.MonitoredTrainingSession(
        init_fn,
        data=SOURCES[source](sizes, read),
        checkpoint_dir=directory,
        hooks=hooks,
        remainder=remainder,
        log_step_count_steps=None,
    ) as sess:
        while not sess.should_stop():
            losses += [sess.run(step)["loss"] for step in steps]
    return sess, [float(loss).hex() for loss in losses], read


@functools.cache
def straight(mode):
    sess, losses, _ = train("list", mode)
    return sess.state_copy(), losses, sess.global_step


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", SOURCES)
def test_stopped_and_started_again_equals_the_straight_run(source, mode, tmp_path):
    expected, expected_losses, last_step = straight(mode)
    uses = MODES[mode][3]
    per_run = MODES[mode][2][-1].steps_per_run
    stop_at = per_run * (1 + list(SOURCES).index(source) % 4)

    first, losses, _ = train(source, mode, tmp_path, stop_at)
    assert (first.global_step, first.stop_reason) == (stop_at, ms.StopReason.LAST_STEP)
    second, further_losses, read = train(source, mode, tmp_path)

    assert (second.restored_from, second.global_step) == (stop_at, last_step)
    assert second.stop_reason == ms.StopReason.END_OF_DATA
    toy.assert_same_bits(second.state_copy(), expected)
    assert losses + further_losses == expected_losses
    assert np.asarray(second.state["used"]).tolist() == [uses.get(index, 0) for index in range(16)]
    assert ms.latest_checkpoint(tmp_path) == last_step
    if source in ("Grain", "state_dict"):
        used = sorted(uses)[len(losses) - 1]
        assert read[0] == used + 1, "an iterator with a state goes on where it was, and reads nothing again"


@pytest.mark.parametrize("source", SOURCES)
def test_stopped_at_every_step_in_turn_equals_the_straight_run(source, tmp_path):
    """With what was prefetched thrown away at each stop."""
    expected, expected_losses, last_step = straight("drop")
    losses = []
    for step in range(1, last_step + 1):
        sess, more, _ = train(source, "drop", tmp_path, step)
        assert sess.restored_from == (step - 1 or None)
        losses += more
    toy.assert_same_bits(sess.state_copy(), expected)
    assert losses == expected_losses
