"""Programs of processes that do not all say the same about saving, or whose states go apart."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cluster_child import Options

import monsess as ms


def numbers(options: Options, count: int = 100) -> list[Any]:
    """Batches of one row for each device: 0, 1, ... on process 0, 10, 11, ... on process 1."""
    return [{"x": np.full(options.devices, 10 * options.index + number, np.float32)} for number in range(count)]


@ms.train_step
def add(state: Any, batch: Any) -> Any:
    """Sum up what all devices see."""
    mean = jax.lax.pmean(batch["x"].mean(), "data")
    return {"sum": state["sum"] + mean}, {"loss": mean}


@ms.eval_step
def look(state: Any, batch: Any) -> Any:
    """What all devices see."""
    return {"mean": jax.lax.pmean(batch["x"].mean(), "data")}


def init_fn() -> Any:
    """The state at the start."""
    return {"sum": jnp.zeros(())}


def report(session: Any) -> dict[str, Any]:
    """What a session came to."""
    summary = session.summary()
    told = {name: summary[name] for name in ("global_step", "restored_from", "last_committed", "saves")}
    return {**told, "sum": float(session.state_copy()["sum"])}


def directory_on_some(options: Options) -> dict[str, Any]:
    """Two sessions, one after the other; only the processes in ``arguments["on"]`` are given the directory.

    In the first one the session's own hook asks for checkpoints, in the second one the script's.
    """
    url = options.url if options.index in options.arguments["on"] else None
    reports = []
    for last_step, more in (
        (7, {"save_checkpoint_steps": 3}),
        (10, {"save_checkpoint_secs": None, "hooks": [ms.CheckpointSaverHook(options.url, save_steps=4)]}),
    ):
        hooks = [ms.StopAtStepHook(last_step=last_step), *more.pop("hooks", [])]
        with ms.MonitoredTrainingSession(
            init_fn,
            data=numbers(options),
            checkpoint_dir=url,
            storage_options={"auto_mkdir": True},
            hooks=hooks,
            checkpoint=ms.CheckpointOptions(save_timeout_secs=8),
            **more,
        ) as session:
            while not session.should_stop():
                session.run(add)
        reports.append(report(session))
    return {"sessions": reports}


def directory_on_the_others(options: Options) -> dict[str, Any]:
    """The chief is given no directory."""
    with ms.MonitoredTrainingSession(
        init_fn, data=numbers(options, 6), checkpoint_dir=options.url if options.index else None
    ) as session:
        while not session.should_stop():
            session.run(add)
    return report(session)


def save_of_the_chief(options: Options) -> dict[str, Any]:
    """The chief alone asks for a save, and says that all do."""
    with ms.MonitoredTrainingSession(
        init_fn,
        data=numbers(options, 6),
        checkpoint_dir=options.url,
        save_checkpoint_steps=None,
        save_checkpoint_secs=None,
        checkpoint=ms.CheckpointOptions(save_timeout_secs=5),
    ) as session:
        while not session.should_stop():
            session.run(add)
            if session.is_chief and session.global_step == 3:
                session.request_save(everywhere=True)
    return report(session)


def forgotten(options: Options) -> dict[str, Any]:
    """No gradient is averaged."""

    @ms.train_step
    def step(state: Any, batch: Any) -> Any:
        return {"sum": state["sum"] + batch["x"].mean()}, {}

    return _until_they_differ(options, step, numbers(options))


def from_step_three_on(options: Options) -> dict[str, Any]:
    """The devices of process 1 go their own ways, each for itself, in the third step."""

    @ms.train_step
    def step(state: Any, batch: Any) -> Any:
        own = jnp.where(batch["bad"].sum() > 0, 2.0 + jax.lax.axis_index("data"), 1.0)
        return {"sum": state["sum"] + own}, {}

    bad = [np.full(options.devices, options.index == 1 and number >= 2, np.float32) for number in range(100)]
    return _until_they_differ(options, step, [{"bad": one} for one in bad])


def _until_they_differ(options: Options, step: Any, data: list[Any]) -> dict[str, Any]:
    session = None
    try:
        with ms.MonitoredTrainingSession(
            init_fn,
            data=data,
            checkpoint_dir=options.url,
            save_checkpoint_steps=2,
            hooks=[ms.StopAtStepHook(last_step=8)],
            check_replicas=options.arguments.get("check", True),
        ) as session:
            while not session.should_stop():
                session.run(step)
    except ms.MonsessError as error:
        return {"error": f"{type(error).__name__}: {error}", "step": session and session.global_step}
    return report(session)


def wishes_that_overlap(options: Options) -> dict[str, Any]:
    """Process 1 wishes for a checkpoint where that of process 0 is agreed on and due after the next train step."""
    saved: list[int] = []

    class Notes(ms.SessionRunHook):
        session: Any = None

        def after_create_session(self, session: Any, coord: Any) -> None:
            self.session = session

        def state_dict(self) -> dict[str, Any]:
            if self.session is not None:
                saved.append(self.session.global_step)  # asked for with every save, on all processes
            return {}

    batch = numbers(options, 1)[0]
    with ms.MonitoredTrainingSession(
        init_fn,
        data=numbers(options),
        checkpoint_dir=options.url,
        save_checkpoint_secs=None,
        hooks=[ms.StopAtStepHook(last_step=12), Notes()],
        checkpoint=ms.CheckpointOptions(save_timeout_secs=8),
    ) as session:
        while not session.should_stop():
            session.run(add)
            if options.index == 0 and session.global_step == 4:
                session.request_save()  # goes with the evaluation, and is agreed on after the next one
            session.run(look, batch)
            if options.index == 1 and session.global_step == 5:
                session.request_save()
    return {**report(session), "saved_at": saved}


def other_schedule(options: Options) -> None:
    """Process 1 was started with another number of steps between two checkpoints."""
    ms.MonitoredTrainingSession(
        init_fn,
        data=numbers(options),
        checkpoint_dir=options.url,
        save_checkpoint_steps=options.arguments["steps"][options.index],
        hooks=[ms.StopAtStepHook(last_step=20)],
    )
