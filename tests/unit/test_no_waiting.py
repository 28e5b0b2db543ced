"""A run waits for nothing that it need not wait for, and copies nothing behind the user's back."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import monsess as ms


def slow_step(seconds):
    """A step that takes ``seconds`` on the device."""

    def wait(x):
        time.sleep(seconds)
        return np.asarray(x)

    @ms.train_step
    def step(state, batch):
        held = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), batch["y"][0])
        return {**state, "w": state["w"] + 0 * held}, {"loss": held}

    return step


@pytest.fixture
def conversions(monkeypatch):
    """Every conversion of a jax array to a host value, with the array."""
    from jax._src.array import ArrayImpl

    seen = []
    original = ArrayImpl._value.fget  # float(), int(), device_get and, where there is no buffer protocol, numpy

    def value(self):
        seen.append(self)
        return original(self)

    def counting(function):
        def convert(x, *args, **kwargs):  # on a CPU numpy reads an array's buffer, which no property sees
            if isinstance(x, jax.Array):
                seen.append(x)
            return function(x, *args, **kwargs)

        return convert

    monkeypatch.setattr(ArrayImpl, "_value", property(value))
    for name in ("asarray", "array"):
        monkeypatch.setattr(np, name, counting(getattr(np, name)))
    return seen


def test_conversions_are_counted(conversions):
    np.asarray(jnp.arange(3) + 1)
    float(jnp.ones(()) + 1)
    jax.device_get(jnp.arange(3) + 2)
    assert len({id(x) for x in conversions}) == 3


@pytest.mark.parametrize("hooks", ["default", "nan"])
def test_default_hooks_copy_nothing_implicitly_and_read_at_most_one_older_value_per_run(tmp_path, conversions, hooks):
    more = [ms.NanTensorHook()] if hooks == "nan" else []
    with ms.MonitoredTrainingSession(
        toy.init_fn,
        data=toy.batches(40),
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=1000,
        log_step_count_steps=1000,
        hooks=[*more, ms.LoggingTensorHook(["loss"], every_n_iter=1000)],
    ) as sess:
        for _ in range(5):
            sess.run(toy.train)
        with jax.transfer_guard_host_to_device("disallow"), jax.transfer_guard_device_to_device("disallow"):
            recent = []
            for _ in range(30):
                assert not sess.should_stop()
                conversions.clear()
                outputs = sess.run(toy.train)
                recent = [*recent, *jax.tree.leaves(outputs)][-4:]  # two outputs of the two newest steps
                assert len({id(x) for x in conversions}) <= 1
                assert not any(read is newer for read in conversions for newer in recent)
        if hooks == "default":
            assert not conversions


def test_run_does_not_wait_for_the_step_that_it_dispatched():
    step = slow_step(0.2)
    with ms.MonitoredTrainingSession(toy.init_fn, data=toy.batches(12)) as sess:
        jax.block_until_ready(sess.run(step))
        calls = []
        for _ in range(3):
            fast = []
            for _ in range(2):  # the bound: two steps may be in flight
                assert not sess.should_stop()
                start = time.perf_counter()
                outputs = sess.run(step)
                fast.append(time.perf_counter() - start)
            assert max(fast) < 0.1, fast  # a wait for the step would take 0.2 s
            calls += fast
            start = time.perf_counter()
            outputs = sess.run(step)
            assert time.perf_counter() - start > 0.1  # the third waits for the first
            jax.block_until_ready(outputs)
        assert sorted(calls)[len(calls) // 2] < 0.02, calls


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_never_more_steps_in_flight_than_the_bound(bound):
    finished = []  # one entry per device and step, made on the device

    def wait(x):
        time.sleep(0.02)
        finished.append(1)
        return np.asarray(x)

    @ms.train_step
    def step(state, batch):
        held = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), batch["y"][0])
        return {**state, "w": state["w"] + 0 * held}, {"loss": held}

    most = 0
    with ms.MonitoredTrainingSession(toy.init_fn, data=toy.batches(12), max_in_flight=bound) as sess:
        while not sess.should_stop():
            sess.run(step)
            in_flight = sess.global_step - len(finished) // len(jax.devices())
            assert in_flight <= bound
            most = max(most, in_flight)
    assert most == bound


def test_save_does_not_hold_the_training_thread(tmp_path):
    step = slow_step(0.2)
    with ms.MonitoredTrainingSession(
        toy.init_fn, data=toy.batches(6), checkpoint_dir=tmp_path, save_checkpoint_steps=2
    ) as sess:
        jax.block_until_ready(sess.run(step))
        start = time.perf_counter()
        sess.run(step)  # saves step 2, which takes 0.2 s on the device
        assert time.perf_counter() - start < 0.15
    assert 2 in ms.CheckpointStore(tmp_path).steps()
