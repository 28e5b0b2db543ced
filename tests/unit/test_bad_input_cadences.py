"""Cadences and counts that cannot be: every argument of every hook, timer and option, and of the session."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_input import init_fn, refused

import monsess as ms


def session(**arguments):
    return ms.MonitoredTrainingSession(init_fn, checkpoint_dir="memory://bad-cadences", **arguments)


def log(**arguments):
    return ms.LoggingTensorHook(["n"], **arguments)


def wait(**arguments):
    return ms.GlobalStepWaiterHook(**{"wait_until_step": 5, **arguments})


def repeat(**arguments):
    return ms.repeat([1], **arguments)


def looper(**arguments):
    return ms.LooperThread(ms.Coordinator(), **arguments)


STEPS = [
    (ms.StopAtStepHook, "num_steps"),
    (ms.CheckpointSaverHook, "save_steps"),
    (ms.StepCounterHook, "every_n_steps"),
    (log, "every_n_iter"),
    (ms.SecondOrStepTimer, "every_steps"),
    (session, "save_checkpoint_steps"),
    (session, "log_step_count_steps"),
    (session, "max_in_flight"),
    (ms.KeepLast, "n"),
    (repeat, "epochs"),
]
SECONDS = [
    (ms.CheckpointSaverHook, "save_secs"),
    (ms.StepCounterHook, "every_n_secs"),
    (log, "every_n_secs"),
    (ms.SecondOrStepTimer, "every_secs"),
    (wait, "timeout_secs"),
    (session, "save_checkpoint_secs"),
    (session, "stop_grace_period_secs"),
    (session, "max_wait_secs"),
    (session, "failure_timeout_secs"),
    (session, "stall_timeout_secs"),
    (ms.CheckpointOptions, "save_timeout_secs"),
]
FROM_ZERO = [
    (ms.StopAtStepHook, "last_step"),
    (wait, "wait_until_step"),
    (session, "prefetch"),
    (ms.Recovery, "max_restarts"),
    (ms.CheckpointOptions, "restore_step"),
]


def name(value):
    return getattr(value, "__name__", repr(value))


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "5", float("nan"), float("inf")])
@pytest.mark.parametrize(("make", "argument"), STEPS, ids=name)
def test_a_number_of_steps_is_a_positive_integer(make, argument, value):
    shown = "KeepLast" if make is ms.KeepLast else argument
    refused(ValueError, shown, repr(value), "1", call=lambda: make(**{argument: value}))


@pytest.mark.parametrize("value", [0, -1, -0.5, True, "5", float("nan"), float("inf")])
@pytest.mark.parametrize(("make", "argument"), SECONDS, ids=name)
def test_a_number_of_seconds_is_positive_and_finite(make, argument, value):
    refused(ValueError, argument, repr(value), "seconds", call=lambda: make(**{argument: value}))


@pytest.mark.parametrize("value", [-1, 1.5, True, "5", float("nan"), float("inf")])
@pytest.mark.parametrize(("make", "argument"), FROM_ZERO, ids=name)
def test_some_numbers_may_be_zero_but_not_less(make, argument, value):
    refused(ValueError, argument, repr(value), "0", call=lambda: make(**{argument: value}))


@pytest.mark.parametrize("value", [-1, -0.5, True, "5", float("nan"), float("inf")])
def test_a_pause_may_be_zero_but_not_less(value):
    refused(ValueError, "backoff_secs", repr(value), call=lambda: ms.Recovery(backoff_secs=value))
    if value != float("inf"):
        refused(ValueError, "timer_interval_secs", repr(value), call=lambda: looper(timer_interval_secs=value))


@pytest.mark.parametrize("argument", ["save_summaries_steps", "save_summaries_secs"])
@pytest.mark.parametrize("value", [0, -1, True, "5", float("nan")])
def test_cadences_of_summaries(argument, value):
    refused(ValueError, f"invalid {argument}={value!r}", call=lambda: session(**{argument: value}))


@pytest.mark.parametrize("argument", ["save_summaries_steps", "save_summaries_secs"])
def test_summaries_need_a_place(argument):
    refused(
        ValueError,
        f"{argument}=100",
        "nowhere to write",
        "Pass summary_dir= or checkpoint_dir=",
        call=lambda: ms.MonitoredTrainingSession(init_fn, **{argument: 100}),
    )


@pytest.mark.parametrize("argument", ["save_summaries_steps", "save_summaries_secs"])
def test_summaries_that_are_asked_for_need_tensorboard(argument, monkeypatch):
    monkeypatch.setattr("monsess.training_session.is_available", lambda: False)
    wanted = f"{argument}=100", 'pip install "monsess[tensorboard]"'
    refused(ValueError, *wanted, call=lambda: session(**{argument: 100}))


@pytest.mark.parametrize("number", [np.int64(5), np.int32(5), jnp.int32(5)], ids=lambda n: type(n).__name__)
def test_numbers_of_numpy_and_jax_count_as_numbers(number):
    session(save_checkpoint_steps=number, log_step_count_steps=number, max_in_flight=number).close()
    ms.StopAtStepHook(last_step=number)
    ms.CheckpointSaverHook(save_steps=number)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (ms.StopAtStepHook, ["One of num_steps or last_step must be specified"]),
        (lambda: ms.StopAtStepHook(1, 2), ["Only one of num_steps or last_step"]),
        (ms.CheckpointSaverHook, ["Either save_secs or save_steps"]),
        (lambda: ms.StepCounterHook(5, 5), ["exactly one of every_n_steps and every_n_secs"]),
        (lambda: ms.StepCounterHook(None), ["exactly one of every_n_steps and every_n_secs"]),
        (log, ["exactly one of every_n_iter and every_n_secs"]),
        (lambda: log(every_n_iter=1, every_n_secs=1), ["exactly one of every_n_iter and every_n_secs"]),
        (ms.SecondOrStepTimer, ["Either every_secs or every_steps"]),
    ],
)
def test_pairs_of_cadences(make, parts):
    refused(ValueError, *parts, call=make)


def test_nothing_of_a_refused_session_was_started():
    before = jax.live_arrays()
    for argument in ("save_checkpoint_steps", "max_in_flight"):
        with pytest.raises(ValueError, match=argument):
            ms.MonitoredTrainingSession(lambda: pytest.fail("init_fn was called"), **{argument: 0})
    assert len(jax.live_arrays()) <= len(before)
