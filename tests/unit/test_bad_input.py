"""Bad steps, bad batches and bad calls of ``run``: a clear error at the earliest moment, after which one can go on.

Each message says what was expected, what was found and what to do; the tests look for all three.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_input import ONES, count, init_fn, refused, run, train

import monsess as ms


def plain(state, batch):
    return state, {}


# ---- steps, when they are declared


@pytest.mark.parametrize("declare", [ms.train_step, ms.eval_step, ms.train_step(reduce="sum")])
@pytest.mark.parametrize("wrapped", [jax.pmap(plain), jax.pmap(plain, axis_name="data", donate_argnums=0)])
def test_a_function_wrapped_by_pmap_is_refused_at_declaration(declare, wrapped):
    refused(
        ms.StepDefinitionError,
        "'plain' is already wrapped by jax.pmap",
        "un-stacked state",
        "Replace @jax.pmap (or jax.pmap(plain, ...)) by @monsess.train_step",
        call=lambda: declare(wrapped),
    )


def test_a_function_wrapped_by_jit_is_fine():
    with ms.MonitoredTrainingSession(init_fn) as sess:
        sess.run(ms.train_step(jax.jit(plain)), ONES)
        assert sess.global_step == 1


@pytest.mark.parametrize("value", [-1, 1.5, True, "1", None])
def test_impossible_steps_per_run(value):
    refused(
        ms.StepDefinitionError,
        "steps_per_run must be an integer >= 0",
        f"found {value!r}",
        call=lambda: ms.train_step(steps_per_run=value)(plain),
    )


@pytest.mark.parametrize("value", ["jit", "PMAP", "", None])
@pytest.mark.parametrize("declare", [ms.train_step, ms.eval_step])
def test_impossible_engine(declare, value):
    refused(
        ms.StepDefinitionError,
        "engine must be one of 'pmap', 'shard_map'",
        f"found {value!r}",
        call=lambda: declare(engine=value)(plain),
    )


@pytest.mark.parametrize("value", ["avg", 3, ["mean"], {"loss": "avg"}, {"loss": 3}])
@pytest.mark.parametrize("declare", [ms.train_step, ms.eval_step])
def test_impossible_reduction(declare, value):
    found = next(iter(value.values())) if isinstance(value, dict) else value
    refused(
        ms.StepDefinitionError,
        'reduce must be "mean", "sum", "max", "min", None or a dict from output name',
        f"found {found!r}",
        call=lambda: declare(reduce=value)(plain),
    )


@pytest.mark.parametrize("value", ["cpu", (1, 2), 3, ()])
def test_impossible_devices(value):
    refused(ms.StepDefinitionError, "devices", call=lambda: ms.train_step(devices=value)(plain))


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (3, ["must be a function", "found 3"]),
        (dict, ["must be a function", "found <class 'dict'>"]),
        (train, ["is a step already", "decorate the plain function once"]),
        (lambda: None, ["takes no state", "(state, batch)"]),
        (lambda state, *, lr: None, ["keyword-only parameter 'lr' has no default", "Make it positional"]),
    ],
)
def test_functions_that_are_no_steps(function, parts):
    refused(ms.StepDefinitionError, *parts, call=lambda: ms.train_step(function))


# ---- steps, when they are first run


@pytest.mark.parametrize("engine", ["pmap", "shard_map"])
@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (lambda state, batch: state, ["found a dict"]),
        (lambda state, batch: None, ["found a NoneType"]),
        (lambda state, batch: [state, {}], ["found a list"]),
        (lambda state, batch: (state, {}, 1), ["found a tuple of 3"]),
        (lambda state, batch: batch.mean(), ["found an array float32[]"]),
    ],
)
def test_a_train_step_that_returns_no_pair(engine, function, parts):
    step = ms.train_step(engine=engine)(function)
    refused(
        ms.StepDefinitionError,
        "<lambda> must return (state, outputs)",
        "Without outputs return (state, {})",
        *parts,
        call=lambda: run(step, ONES),
    )


@pytest.mark.parametrize("engine", ["pmap", "shard_map"])
@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (lambda s, batch: {"w": s["w"]}, ["n: missing from the new state"]),
        (lambda s, batch: {**s, "more": {"x": 1.0}}, ["more/x: only in the new state"]),
        (lambda s, batch: {"n": s["n"], "w": batch}, ["w: was float32[3], is float32[2]"]),
        (lambda s, batch: {"n": 1, "w": s["w"]}, ["n: was float32[], is int32[]"]),
        (lambda s, batch: {"n": s["n"], "w": None}, ["w: missing from the new state"]),
        (lambda s, batch: {"n": s["n"], "w": "text"}, ["w: was float32[3], is a str"]),
        (lambda s, batch: {"w": batch, "x": 1.0}, ["n: missing", "w: was", "x: only"]),
    ],
)
def test_a_train_step_that_returns_another_state_than_it_got(engine, function, parts):
    def initial():
        return {"n": 0.0, "w": jnp.zeros(3)}

    step = ms.train_step(engine=engine)(lambda state, batch: (function(state, batch), {}))
    error = refused(
        ms.StepDefinitionError,
        "must return a state of the structure that it got",
        *parts,
        call=lambda: run(step, ONES, initial=initial),
    )
    differing = str(error).split("Differing: ")[1].split("; ")
    assert {line.split(":")[0] for line in differing} == {part.split(":")[0] for part in parts}  # exactly these


def test_a_train_step_that_returns_other_containers():
    step = ms.train_step(lambda state, batch: (list(state), {}))
    refused(
        ms.StepDefinitionError,
        "containers differ",
        call=lambda: run(step, ONES, initial=lambda: (0.0, 1.0)),
    )


def test_a_wrong_step_does_not_spoil_the_session():
    with ms.MonitoredTrainingSession(init_fn) as sess:
        sess.run(train, ONES)
        for wrong in (lambda state, batch: state, lambda state, batch: ({}, {})):
            with pytest.raises(ms.StepDefinitionError):
                sess.run(ms.train_step(wrong), ONES)
        assert sess.global_step == 1
        sess.run(train, ONES)
        assert float(sess.state["n"]) == sess.global_step == 2


@pytest.mark.parametrize(("value", "dtype"), [(lambda b: (b > 0).sum(), "int32"), (lambda b: b[0] > 0, "bool")])
@pytest.mark.parametrize("declare", [ms.train_step, ms.train_step(reduce={"loss": "sum"})])
def test_an_integer_output_needs_a_reduction(declare, value, dtype):
    step = declare(lambda state, batch: (state, {"loss": batch.mean(), "metrics": {"right": value(batch)}}))
    refused(
        ms.StepDefinitionError,
        f"Output 'metrics/right' is {dtype}",
        "reduce={'metrics/right': \"sum\"}",
        '"mean", which gives float32',
        call=lambda: run(step, ONES),
    )


@pytest.mark.parametrize(
    ("reduce", "output", "parts"),
    [
        ({"los": "sum"}, lambda b: b.mean(), ["reduce names ['los']", "outputs are ['loss']"]),
        ("max", lambda b: b[0] * 1j, ["Output 'loss' is complex64", "no max", "use mean or sum"]),
        ("sum", lambda b: jax.random.key(0), ["Output 'loss' has dtype key<fry>", "use None"]),
        ("mean", lambda b: "yes", ["Output 'loss' is a str", "arrays and numbers"]),
    ],
)
def test_outputs_that_cannot_be_reduced_as_asked(reduce, output, parts):
    step = ms.train_step(reduce=reduce)(lambda state, batch: (state, {"loss": output(batch)}))
    refused(ms.StepDefinitionError, *parts, call=lambda: run(step, ONES))


# ---- batches


@pytest.mark.parametrize("way", ["run", "data", "feed"])
@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        ({"x": np.ones((6, 3))}, ["Leaf 'x' of the batch", "[6, 3]", "4 local devices", "4 or 8 rows", "remainder="]),
        (np.ones(3), ["The batch", "[3]", "4 local devices", "4 rows"]),
        ({"x": np.ones((0, 3))}, ["Leaf 'x'", "[0, 3]", "no rows"]),
        ({"x": np.ones((8, 2)), "y": np.ones(4)}, ["Leaf 'x'", "[8, 2]", "eaf 'y'", "[4]", "same leading axis"]),
        ({"a": {"lr": 0.1}, "x": ONES}, ["Leaf 'a/lr'", "no leading axis", "4 local devices"]),
        ({"x": ONES, "name": "abc"}, ["Leaf 'name'", "dtype <U3", "leave it out"]),
        ({}, ["holds no arrays", "found {}", "[local_batch, ...]"]),
    ],
    ids=["rows", "few rows", "no rows", "disagree", "scalar", "text", "empty"],
)
def test_a_batch_that_does_not_fit(way, batch, parts):
    hook = ms.FeedFnHook(lambda: {"batch": batch})
    traced = []

    @ms.train_step
    def step(state, batch):
        traced.append(1)
        return state, {}

    with ms.MonitoredTrainingSession(
        init_fn, data=[batch] if way == "data" else None, hooks=[hook] if way == "feed" else []
    ) as sess:
        arguments = (batch,) if way == "run" else ()
        error = refused(ms.BatchError, *parts, call=lambda: sess.run(step, *arguments))
        assert (sess.global_step, traced) == (0, [])  # found before anything was compiled or dispatched
        if way == "data":
            assert "batch 0 of the training input" in str(error.__notes__)
        if way == "feed":
            assert "FeedFnHook" in str(error.__notes__)
        else:
            sess.request_stop()


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (np.ones(3), ["'rate'", "[3]", "4 local devices", "4 rows"]),
        ("fast", ["'rate'", "dtype <U4"]),
        (None, ["'rate'", "found None"]),
    ],
    ids=["rows", "text", "None"],
)
def test_a_further_argument_that_does_not_fit(value, parts):
    step = ms.train_step(lambda state, batch, rate: (state, {}))
    error = refused(ms.BatchError, *parts, call=lambda: run(step, ONES, value))
    assert not str(error).startswith("The batch")
    run(step, ONES, 0.5)
    run(step, ONES, np.ones(4))


def test_a_session_goes_on_after_a_bad_batch():
    with ms.MonitoredTrainingSession(init_fn) as sess:
        with pytest.raises(ms.BatchError):
            sess.run(train, np.ones(6))
        sess.run(train, ONES)
        assert sess.global_step == float(sess.state["n"]) == 1


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (3, ["iterable of batches", "found int"]),
        ("abc", ["must yield batches", "found one str", "[batch]"]),
        ({"x": ONES}, ["must yield batches", "found one dict", "[batch]"]),
    ],
)
def test_data_that_yields_no_batches_is_refused_at_construction(data, parts):
    refused(ms.BatchError, *parts, call=lambda: ms.MonitoredTrainingSession(init_fn, data=data))


# ---- calls of run


@pytest.mark.parametrize("function", [plain, 3, None, jax.jit(plain)])
def test_something_that_is_no_step(function):
    refused(
        ms.StepDefinitionError,
        "run needs a step made by monsess.train_step or monsess.eval_step",
        "Decorate it",
        call=lambda: run(function, ONES),
    )


def test_too_few_and_too_many_arguments():
    step = ms.train_step(lambda state, batch, rate: (state, {}))
    refused(
        ms.BatchError, "train(state, batch)", "not given ['batch']", "run(step, ...)", "data=", call=lambda: run(train)
    )
    refused(ms.BatchError, "(state, batch, rate)", "not given ['rate']", call=lambda: run(step, ONES))
    refused(ms.BatchError, "(state, batch, rate)", "not given ['rate']", call=lambda: run(step, data=[ONES]))
    refused(
        ms.BatchError, "train(state, batch)", "1 argument after the state", "got 2", call=lambda: run(train, ONES, 1.0)
    )
    refused(ms.BatchError, "count(state)", "no argument after the state", "got 1", call=lambda: run(count, ONES))
    with pytest.raises(TypeError, match="batch"):
        ms.MonitoredTrainingSession(init_fn).run(train, batch=ONES)


def test_an_eval_step_is_told_that_data_is_not_for_it():
    evaluate = ms.eval_step(lambda state, batch: {})
    error = refused(ms.BatchError, "not given ['batch']", "eval step", call=lambda: run(evaluate, data=[ONES]))
    assert "give the session data=" not in str(error)


def test_run_after_stop_after_the_end_of_data_and_after_close():
    with ms.MonitoredTrainingSession(init_fn, hooks=[ms.StopAtStepHook(last_step=1)]) as sess:
        sess.run(count)
        for again in (sess.run, sess.run_without_hooks):
            refused(
                ms.RunAfterStopError,
                "last step 1 reached",
                "while not sess.should_stop()",
                call=lambda again=again: again(count),
            )
    for closed in (lambda: sess.run(count), lambda: sess.run_without_hooks(count), sess.__enter__):
        refused(ms.SessionClosedError, "closed", "Make a new MonitoredTrainingSession", call=closed)
    with ms.MonitoredTrainingSession(init_fn, data=[ONES]) as sess:
        sess.run(train)
        refused(ms.EndOfData, "has ended after 1 batches", call=lambda: sess.run(train))


def test_a_step_function_of_another_shape():
    with ms.MonitoredTrainingSession(init_fn) as sess:
        for wrong in (lambda a, b: None, lambda x: None, lambda: None):
            refused(
                ValueError, "one `step_context` argument", "found", call=lambda wrong=wrong: sess.run_step_fn(wrong)
            )


@pytest.mark.parametrize("leave", ["normal", "EndOfData", "close", "limit"])
def test_an_auxiliary_update_at_the_end_is_an_error(tmp_path, leave):
    auxiliary = ms.train_step(steps_per_run=0)(lambda state: ({"n": state["n"] + 0.5}, {}))

    def train_and_leave():
        with ms.MonitoredTrainingSession(init_fn, checkpoint_dir=tmp_path) as sess:
            sess.run(count)
            sess.run(auxiliary)
            if leave == "EndOfData":
                raise ms.EndOfData
            if leave == "close":
                sess.close()
            if leave == "limit":
                sess.request_stop()

    refused(
        ms.MonsessError,
        "auxiliary update (steps_per_run=0)",
        "no counted step followed",
        "Run auxiliary updates before the counted step",
        call=train_and_leave,
    )
    assert ms.CheckpointStore(tmp_path).steps() == []
