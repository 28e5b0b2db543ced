"""A value that is not finite, anywhere, is caught; no committed checkpoint holds one, and no run loops for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import monsess as ms

BAD_AT = 4  # the step whose batch is bad
SAVED = 3


def batches(device, value, count=12, devices=4):
    """Batches of ones; in that of step 4 the rows of one device are ``value``."""
    found = [np.ones((2 * devices, 2), np.float32) for _ in range(count)]
    found[BAD_AT - 1][2 * device : 2 * device + 2] = value
    return found


def body(state, batch):
    """The other output shows one device's own value; the state takes what the loss is the mean of."""
    mean = jax.lax.pmean(batch.mean(), "data")
    return {"w": state["w"] + mean, "n": state["n"] + 1}, {"loss": batch.mean(), "other": batch[0], "n": state["n"]}


def harmless(state, batch):
    """The state stays finite, whatever the outputs are."""
    return {"w": state["w"] + 1, "n": state["n"] + 1}, {"loss": state["w"], "other": batch[0], "n": state["n"]}


def session(data, url, *hooks, **more):
    more.setdefault("save_checkpoint_steps", SAVED)
    return ms.MonitoredTrainingSession(
        lambda: {"w": jnp.zeros(()), "n": jnp.zeros((), jnp.int32)},
        data=data,
        checkpoint_dir=url,
        hooks=hooks,
        log_step_count_steps=None,
        **more,
    )


def train(sess, step):
    while not sess.should_stop():
        sess.run(step)


def assert_finite(url):
    """All committed checkpoints are sound and hold finite values only; returns their steps."""
    store = ms.CheckpointStore(url)
    for step in store.steps():
        assert store.verify(step) == []
        assert all(np.isfinite(leaf).all() for leaf in ms.load_checkpoint(url, step).values())
    return store.steps()


#: The least of several values is not infinite because one of them is; every other reduction shows it.
VALUES = {"mean": (np.nan, np.inf), "sum": (np.nan,), "max": (np.nan, np.inf), "min": (np.nan, -np.inf)}
CASES = [
    (engine, reduce, device, value)
    for device, reduce in enumerate(["mean", "sum", "max", "min", None])
    for value in VALUES.get(reduce, (np.nan, -np.inf))
    for engine in (("pmap", "shard_map") if reduce in ("mean", None) else ("pmap",))
]


@pytest.mark.parametrize(("engine", "reduce", "device", "value"), CASES)
def test_on_one_device_only(tmp_path, engine, reduce, device, value):
    device %= 4
    step = ms.train_step(harmless, reduce={"loss": "mean", "n": "max", "other": reduce}, engine=engine)
    with pytest.raises(ms.NanLossDuringTrainingError, match="At step 4: "):
        with session(batches(device, value), tmp_path, ms.NanTensorHook()) as sess:
            train(sess, step)
    assert sess.global_step <= BAD_AT + sess.max_in_flight
    assert assert_finite(tmp_path) == [SAVED]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_loss_alone_or_another_output_by_name(tmp_path, value):
    step = ms.train_step(harmless, reduce={"n": "max"})
    with session(batches(1, value), tmp_path / "loss", ms.NanTensorHook("loss")) as sess:
        train(sess, step)  # the loss is finite
    assert sess.global_step == 12
    with pytest.raises(ms.NanLossDuringTrainingError, match="At step 4: other holds NaN or infinity"):
        with session(batches(1, value), tmp_path / "other", ms.NanTensorHook("other")) as sess:
            train(sess, step)
    assert assert_finite(tmp_path / "other") == [SAVED]
    assert assert_finite(tmp_path / "loss")[-1] == 12


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_without_a_hook_the_state_is_not_committed(tmp_path, value, lines):
    step = ms.train_step(body, reduce={"n": "max"})
    with pytest.raises(ms.NonFiniteStateError, match="'w'"):
        with session(batches(2, value), tmp_path) as sess:
            train(sess, step)
    assert sess.global_step == 12
    assert assert_finite(tmp_path) == [SAVED]
    assert len([line for line in lines() if line.startswith("Not saved: leaf 'w' of step ")]) >= 1


def test_a_loop_of_restarts_stops_with_a_message(tmp_path):
    """It crashed for something else first, without a hook that looks: all others say that it will not help."""
    step = ms.train_step(body, reduce={"n": "max"})
    told = []
    for attempt in range(3):

        class Crashes(ms.SessionRunHook):
            def after_run(self, run_context, run_values):
                if run_context.global_step == 10 and run_context.session.restored_from is None:
                    raise ConnectionError("the machine is gone")

        try:
            with session(batches(2, np.nan), tmp_path, Crashes()) as sess:
                assert sess.restored_from == (SAVED if attempt else None)
                train(sess, step)
        except (ConnectionError, ms.NonFiniteStateError) as error:
            told.append(error)
        assert assert_finite(tmp_path) == [SAVED]
    assert isinstance(told[0], ConnectionError)
    assert len(told) == 3
    assert all("starting again would not help" in str(error) for error in told[1:])


def test_recovery_inside_the_process_gives_up(tmp_path):
    recovery = ms.Recovery(
        max_restarts=2, backoff_secs=0, is_transient=lambda error: isinstance(error, ms.NanLossDuringTrainingError)
    )
    step = ms.train_step(harmless, reduce={"n": "max"})
    with pytest.raises(ms.NanLossDuringTrainingError) as caught:
        with session(batches(0, np.nan), tmp_path, ms.NanTensorHook(), recovery=recovery) as sess:
            train(sess, step)
    assert sess.recoveries == 2
    assert "Gave up after 2 restarts without a newer checkpoint." in caught.value.__notes__
    assert assert_finite(tmp_path) == [SAVED]
