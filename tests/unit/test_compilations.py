"""The train step is compiled once, whatever the initial state is made of."""

from __future__ import annotations

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import monsess as ms


@pytest.fixture
def compiled(caplog):
    """Names of everything that JAX compiles."""
    with jax.log_compiles(True), caplog.at_level(logging.WARNING, logger="jax"):
        yield lambda: [
            found[1]
            for record in caplog.records
            if (found := re.match(r"Compiling (?:jit\()?([\w<>.]+)\)? ", record.getMessage()))
        ]


def of_the_step(names):
    """The compilations of the step; what `jax.pmap` compiles is called _fun, and nothing else here is a pmap."""
    return [name for name in names if "train_step" in name or name == "_fun"]


INITIAL = {
    "numpy": lambda: {
        "w": np.linspace(-1, 1, 3),
        "momentum": np.zeros(3),
        "updates": np.int64(0),
        "key": jax.random.key(7),
    },
    "uncommitted": lambda: {**toy.init_fn(), "updates": jnp.asarray(0)},
    "weak": lambda: {**toy.init_fn(), "momentum": jnp.full(3, 0.0)},
    "python": toy.init_fn,
    "committed": lambda: jax.device_put({**toy.init_fn(), "updates": jnp.asarray(0)}, jax.devices()[1]),
}


def runs_of_20(folder, init, engine, data):
    step = ms.train_step(engine=engine)(toy.train.function)
    with ms.MonitoredTrainingSession(
        init, data=data, checkpoint_dir=folder, save_checkpoint_steps=4, hooks=[ms.NanTensorHook("loss")]
    ) as sess:
        count = 0
        while count < 20:
            sess.run(step, *(() if data is not None else (toy.batch(sess.global_step),)))
            count += 1
    return sess


@pytest.mark.parametrize("engine", ["pmap", "shard_map"])
@pytest.mark.parametrize("initial", list(INITIAL))
def test_compiled_once_in_20_steps_fresh_and_resumed(tmp_path, compiled, initial, engine):
    for attempt in (1, 2):
        before = len(compiled())
        sess = runs_of_20(tmp_path, INITIAL[initial], engine, toy.batches(50))
        assert sess.global_step == 20 * attempt
        names = compiled()[before:]
        assert len(of_the_step(names)) == 1, names


def test_compiled_once_with_batches_handed_over(tmp_path, compiled):
    runs_of_20(tmp_path, toy.init_fn, "pmap", None)
    assert len(of_the_step(compiled())) == 1
