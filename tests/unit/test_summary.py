"""monsess.summary inside a step and around it: values, reductions, both engines, and where it must not be called."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import monsess as ms
from monsess.summary import Collected, Histogram, collecting

ENGINES = ("pmap", "shard_map")
BATCH = np.arange(8, dtype=np.float32)


class Logs(ms.SessionRunHook):
    """What was logged, histograms, images and texts too."""

    def __init__(self):
        self.values = []

    def after_run(self, run_context, run_values):
        collected = run_values.summaries
        self.values.append(collected.values() if collected else {})


def values_of(body, runs=1, **options):
    """What a step with ``body(state, batch)`` collects in each of some runs."""

    @ms.train_step(**options)
    def step(state, batch):
        outputs = body(state, batch)
        return state, {} if outputs is None else outputs

    hook = Logs()
    with ms.MonitoredTrainingSession(lambda: jnp.float32(2.0), data=[BATCH] * runs, hooks=[hook]) as sess:
        while not sess.should_stop():
            sess.run(step)
    return hook.values[0] if runs == 1 else hook.values


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reduce", ["mean", "sum", None, {"loss": "max"}])
def test_a_scalar_is_one_value_over_all_devices_whatever_becomes_of_the_outputs(engine, reduce):
    devices = jax.local_device_count()

    def body(state, batch):
        local = batch.mean()
        for how in ("mean", "sum", "max", "min"):
            ms.summary.scalar(how, local, reduce=how)
        ms.summary.scalar("each", local, reduce=None)
        ms.summary.scalar("count", (batch > 2).sum())
        return {"loss": local}

    found = {tag: float(value) for tag, value in values_of(body, engine=engine, reduce=reduce).items()}
    means = BATCH.reshape(devices, -1).mean(axis=1)
    expected = {"mean": means.mean(), "sum": means.sum(), "max": means.max(), "min": means.min()}
    expected |= {f"each/{i}": mean for i, mean in enumerate(means)} | {"count": 5 / devices}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_histogram_is_that_of_the_values_of_all_devices(engine):
    found = values_of(lambda state, batch: ms.summary.histogram("batch", batch, buckets=7), engine=engine)["batch"]
    counts, _ = np.histogram(BATCH, 7)
    assert np.asarray(found.table).tolist() == [0.0, 7.0, *counts]


@pytest.mark.parametrize(
    ("values", "table"),
    [
        ([5.0, 5.0], [5, 5, 0, 0, 2]),
        ([np.nan, 1.0, np.inf, -np.inf, 4.0], [1, 4, 1, 0, 1]),
        ([np.nan], [0, 0, 0, 0, 0]),
        ([], [0, 0, 0, 0, 0]),
        ([-1e38, 1e38], [-1e38, 1e38, 1, 0, 1]),
        ([True, False, True], [0, 1, 1, 0, 2]),
    ],
)
def test_histograms_of_odd_values(values, table):
    with collecting() as found:
        ms.summary.histogram("h", jnp.asarray(values), buckets=3)
    table_found = np.asarray(found.reduced(None).values()["h"].table)
    np.testing.assert_array_equal(table_found, np.float32(table))


@pytest.mark.parametrize("engine", ENGINES)
def test_images_are_those_of_the_first_device(engine):
    def body(state, batch):
        ms.summary.image("grey", jnp.broadcast_to(batch[0] / 10, (2, 3)))
        ms.summary.image("colour", jnp.full((5, 2, 3, 4), 7, jnp.uint8), max_outputs=2)

    found = values_of(body, engine=engine)
    assert np.asarray(found["grey"].pixels).tolist() == np.zeros((1, 2, 3, 1)).tolist()
    assert np.asarray(found["colour"].pixels).shape == (2, 2, 3, 4)
    assert np.asarray(found["colour"].pixels).dtype == np.uint8


def test_floats_of_an_image_are_cut_to_what_can_be_shown():
    with collecting() as found:
        ms.summary.image("i", jnp.array([[-1.0, 0.5, 2.0, jnp.nan]]))
    assert np.asarray(found.values()["i"].pixels).ravel().tolist() == [0, 128, 255, 0]


def test_a_text_is_part_of_the_program():
    assert values_of(lambda state, batch: ms.summary.text("note", "as *it* is"))["note"].text == "as *it* is"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("gradient", [jax.grad, jax.value_and_grad, jax.jacrev])
def test_inside_a_function_that_is_differentiated(engine, gradient):
    def body(state, batch):
        def loss_fn(w):
            loss = ((w * batch - 1.0) ** 2).mean()
            ms.summary.scalar("inside", loss)
            ms.summary.histogram("residuals", w * batch)
            return loss

        gradient(loss_fn)(state)

    found = values_of(body, engine=engine)
    assert float(found["inside"]) == pytest.approx(((2 * BATCH - 1) ** 2).mean())
    assert np.asarray(found["residuals"].table)[:2].tolist() == [0.0, 14.0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("inner", ["jit", "scan", "cond", "vmap", "checkpoint"])
def test_inside_what_hands_out_nothing_is_refused_by_name(engine, inner):
    def body(state, batch):
        def look(x):
            ms.summary.scalar("lost", jnp.sum(x) * 2)
            return x

        if inner == "scan":
            jax.lax.scan(lambda carry, x: (look(carry), x), state, batch)
        elif inner == "cond":
            jax.lax.cond(state > 0, look, lambda x: x, state)
        elif inner == "vmap":
            jax.vmap(look)(batch)
        else:
            getattr(jax, inner)(look)(state)

    with pytest.raises(ms.StepDefinitionError, match="lost"):
        values_of(body, engine=engine)


def test_after_a_refusal_nothing_is_left_behind():
    def twice(state, batch):
        ms.summary.scalar("a", state)
        ms.summary.scalar("a", state)

    with pytest.raises(ms.StepDefinitionError, match="Two summaries"):
        values_of(twice)
    assert float(values_of(lambda state, batch: ms.summary.scalar("a", state))["a"]) == 2.0


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda x: ms.summary.scalar("a", x), r"takes one number, found float32\[2\]"),
        (lambda x: ms.summary.scalar("a", "text"), "expected real numbers"),
        (lambda x: ms.summary.scalar("a", 1j * x[0]), "complex"),
        (lambda x: ms.summary.scalar("a", x[0], reduce="median"), "reduce must be"),
        (lambda x: ms.summary.scalar("", x[0]), "tag"),
        (lambda x: ms.summary.histogram("a", x, buckets=0), "buckets"),
        (lambda x: ms.summary.image("a", x), r"takes \[height, width\]"),
        (lambda x: ms.summary.image("a", jnp.zeros((2, 2), jnp.int32)), "floats in 0"),
        (lambda x: ms.summary.image("a", jnp.zeros((0, 2))), "height"),
        (lambda x: ms.summary.text("a", 5), "takes a str"),
    ],
)
def test_what_cannot_be_shown_is_refused(call, part):
    with collecting(), pytest.raises(ms.StepDefinitionError, match=part):
        call(jnp.zeros(2))


def test_the_plain_function_and_an_eval_step_may_hold_summaries(tmp_path):
    def look(state, batch):
        ms.summary.scalar("seen", batch.mean())
        return {"mean": batch.mean()}

    step, evaluate = ms.train_step(lambda state, batch: (state, look(state, batch))), ms.eval_step(look)
    jax.vmap(step, in_axes=(None, 0), axis_name="data")(0.0, BATCH.reshape(2, 4))
    step(0.0, BATCH)  # no session: nobody to tell
    with ms.MonitoredTrainingSession(lambda: 0.0, checkpoint_dir=tmp_path) as sess:
        sess.run(evaluate, BATCH)
        sess.run(evaluate, BATCH)
    assert ms.read_metrics(tmp_path).curves == {}


def test_outside_of_a_step_the_session_of_the_thread_logs(tmp_path):
    with ms.MonitoredTrainingSession(lambda: 0.0, checkpoint_dir=tmp_path) as sess:
        sess.run(ms.train_step(lambda state: (state, {})))
        ms.summary.scalar("loop", np.float32(3))
        ms.summary.scalar("device", jnp.float32(4))
        ms.summary.histogram("h", np.arange(4.0))
        ms.summary.text("note", "hello")
        jax.jit(lambda x: ms.summary.scalar("traced", x))(1.0)
    ms.summary.scalar("after", 1.0)
    metrics = ms.read_metrics(tmp_path)
    curves = {tag: [(point.step, point.value) for point in curve] for tag, curve in metrics.curves.items()}
    assert curves == {"loop": [(1, 3.0)], "device": [(1, 4.0)]}
    assert [(e["tag"], e["text"], e["step"]) for e in metrics.events if e["event"] == "text"] == [("note", "hello", 1)]


def test_a_step_that_collects_gives_the_bits_of_one_that_does_not():
    import toy

    @ms.train_step
    def watched(state, batch):
        new, outputs = toy._update(state, batch)
        ms.summary.scalar("norm", jnp.linalg.norm(new["w"]))
        ms.summary.histogram("w", new["w"])
        return new, outputs

    states = []
    for step in (toy.train, watched):
        with ms.MonitoredTrainingSession(toy.init_fn, data=toy.batches(5)) as sess:
            while not sess.should_stop():
                sess.run(step)
        states.append(sess.state_copy())
    toy.assert_same_bits(*states)


def test_a_collection_is_a_pytree_with_its_kinds_in_the_structure():
    with collecting() as found:
        ms.summary.scalar("a", 1.0)
        ms.summary.histogram("b", jnp.arange(3.0))
        ms.summary.text("c", "x")
    leaves, structure = jax.tree.flatten(found.reduced(None))
    again = jax.tree.unflatten(structure, leaves)
    assert isinstance(again, Collected)
    assert isinstance(again.values()["b"], Histogram)
    assert again.values(texts=False).keys() == {"a", "b"}
