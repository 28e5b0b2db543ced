"""Bad hooks, fetches and feeds: a clear error at the earliest moment, most of them at construction."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from bad_input import ONES, count, init_fn, refused, run, train

import monsess as ms

# ---- fetches


class Fetches(ms.SessionRunHook):
    def __init__(self, fetches):
        self.fetches = fetches

    def before_run(self, run_context):
        return ms.SessionRunArgs(self.fetches)


@ms.train_step
def rich(state, batch):
    return {"n": state["n"] + 1.0}, {"loss": batch.mean(), "metrics": {"acc": batch.max()}}


@pytest.mark.parametrize(
    ("hook", "who", "name"),
    [
        (Fetches("los"), "Fetches", "los"),
        (Fetches({"a": ["loss", "metrics/accuracy"]}), "Fetches", "metrics/accuracy"),
        (ms.LoggingTensorHook(["los"], every_n_iter=100), "LoggingTensorHook", "los"),
        (ms.LoggingTensorHook({"a": "loss", "b": "metrics/x"}, every_n_secs=600), "LoggingTensorHook", "metrics/x"),
        (ms.NanTensorHook("los"), "NanTensorHook", "los"),
    ],
)
def test_an_unknown_name_fails_in_the_first_run_and_lists_what_there_is(hook, who, name):
    refused(
        ms.FetchError,
        f"{who} fetches '{name}', which the step does not return",
        "Its outputs: 'loss', 'metrics/acc'",
        call=lambda: run(rich, ONES, hooks=[hook]),
    )


def test_names_without_any_output():
    refused(ms.FetchError, "'loss'", "Its outputs: none", call=lambda: run(count, hooks=[Fetches("loss")]))
    with ms.MonitoredTrainingSession(init_fn) as sess:
        refused(ms.FetchError, "'loss'", "no step has run yet", call=lambda: sess.evaluate("loss"))


@pytest.mark.parametrize("fetch", [3, 1.5, np.float32(1), ["loss", 3]])
def test_a_fetch_that_is_neither_name_nor_function(fetch):
    refused(
        ms.FetchError,
        "Fetches fetches",
        "an output's name or a function f(state, outputs)",
        call=lambda: run(rich, ONES, hooks=[Fetches(fetch)]),
    )


@pytest.mark.parametrize(
    ("function", "error"), [(lambda state, outputs: outputs["los"], KeyError), (lambda state: 1, TypeError)]
)
def test_an_error_inside_a_fetched_function_names_the_hook(function, error):
    refused(error, "Fetches", "f(state, outputs)", call=lambda: run(rich, ONES, hooks=[Fetches(function)]))


# ---- feeds


class Feeds(ms.SessionRunHook):
    def __init__(self, feed):
        self.feed = feed

    def before_run(self, run_context):
        return ms.SessionRunArgs(feed_dict=self.feed)


def test_two_feeders_of_one_argument_are_named():
    feeds, other = Feeds({"batch": ONES}), ms.FeedFnHook(lambda: {"batch": ONES})
    common = (ms.FeedConflictError, "Same tensor is fed by", "'batch'", "Remove one of them")
    refused(*common, "two hooks", "from Feeds and from FeedFnHook", call=lambda: run(train, hooks=[feeds, other]))
    refused(
        *common,
        "a SessionRunHook and user",
        "from Feeds",
        "the caller of run",
        call=lambda: run(train, ONES, hooks=[feeds]),
    )
    refused(
        *common, "the session's data", "from Feeds and from data=", call=lambda: run(train, hooks=[feeds], data=[ONES])
    )


@pytest.mark.parametrize("name", ["rate", "state", "Batch", 0])
def test_an_argument_that_the_step_does_not_have(name):
    refused(
        ms.BatchError,
        f"Feeds feeds {name!r}",
        "train(state, batch) has no such argument",
        "['batch']",
        call=lambda: run(train, ONES, hooks=[Feeds({name: 1.0})]),
    )


def test_feeds_that_are_no_dict():
    refused(
        ms.HookError,
        "Feeds.before_run",
        "feed_dict must be a dict",
        "found list",
        call=lambda: run(train, hooks=[Feeds(["batch"])]),
    )
    refused(
        TypeError,
        "feed_fn must return a dict",
        "found list",
        "FeedFnHook",
        call=lambda: run(train, hooks=[ms.FeedFnHook(list)]),
    )


# ---- hooks


class Lacks:
    """Everything of the protocol but ``end``."""

    begin = state_dict = after_create_session = before_run = after_run = on_error = lambda self, *_: None
    load_state_dict = begin


class NoneEnd(ms.SessionRunHook):
    end = None


class Attribute(ms.SessionRunHook):
    before_run = "loss"


class TooFew(ms.SessionRunHook):
    def after_run(self, run_context):
        pass


class TooMany(ms.SessionRunHook):
    def begin(self, session):
        pass


class KeywordOnly(ms.SessionRunHook):
    def end(self, *, session):
        pass


class Static(ms.SessionRunHook):
    @staticmethod
    def end(self, session):
        pass


class Coroutine(ms.SessionRunHook):
    async def after_run(self, run_context, run_values):
        pass


class Generator(ms.SessionRunHook):
    def after_run(self, run_context, run_values):
        yield


@pytest.mark.parametrize(
    ("hook", "parts"),
    [
        (Lacks(), ["(Lacks) has no method 'end'", "Derive it from monsess.SessionRunHook"]),
        (NoneEnd(), ["(NoneEnd) has no method 'end'"]),
        (Attribute(), ["(Attribute): 'before_run' is a str, not a method"]),
        (TooFew(), ["(TooFew): after_run(run_context) cannot be called as after_run(run_context, run_values)"]),
        (TooMany(), ["(TooMany): begin(session) cannot be called as begin()"]),
        (KeywordOnly(), ["(KeywordOnly): end(*, session) cannot be called as end(session)"]),
        (Static(), ["(Static): end(self, session) cannot be called as end(session)"]),
        (Coroutine(), ["(Coroutine): after_run is an async or generator function", "plain method"]),
        (Generator(), ["(Generator): after_run is an async or generator function", "plain method"]),
        (ms.NanTensorHook, ["is the class NanTensorHook, not an object", "Write NanTensorHook(...)"]),
        (3, ["(int) has no method 'begin'"]),
        (None, ["(NoneType) has no method 'begin'"]),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("argument", ["hooks", "chief_only_hooks"])
def test_what_is_no_usable_hook_is_refused_at_construction(argument, hook, parts):
    began = []

    class First(ms.SessionRunHook):
        def begin(self):
            began.append(1)

    refused(
        ms.HookError,
        f"{argument}[1]",
        *parts,
        call=lambda: ms.MonitoredTrainingSession(init_fn, **{argument: [First(), hook]}),
    )
    assert began == []


@pytest.mark.parametrize(
    ("hooks", "parts"),
    [(3, ["found int"]), ("abc", ["found str"]), (TooFew(), ["found TooFew", "hooks=[hook]"])],
    ids=["int", "str", "hook"],
)
def test_hooks_that_are_no_list(hooks, parts):
    refused(ms.HookError, "must be an iterable", *parts, call=lambda: ms.MonitoredTrainingSession(init_fn, hooks=hooks))


def test_the_same_hook_twice():
    hook = ms.NanTensorHook()
    for arguments in ({"hooks": [hook, hook]}, {"hooks": [hook], "chief_only_hooks": [hook]}):
        refused(
            ms.HookError,
            "same NanTensorHook object is listed twice",
            "Pass it once, or make a second object",
            call=lambda arguments=arguments: ms.MonitoredTrainingSession(init_fn, **arguments),
        )
    with ms.MonitoredTrainingSession(init_fn, hooks=[ms.NanTensorHook(), ms.NanTensorHook()]):
        pass


@pytest.mark.parametrize(
    ("state", "parts"),
    [
        (None, ["must return a dict", "found NoneType"]),
        ([1], ["must return a dict", "found list"]),
        ({"a": np.float32(1)}, ["JSON-able values", "float32"]),
        ({"a": jnp.ones(2)}, ["JSON-able values", "Array"]),
        ({"a": {1, 2}}, ["JSON-able values", "set"]),
        ({"a": (1, 2)}, ["changes when it is stored as JSON", "tuples become lists", "Return lists"]),
        ({1: 2}, ["changes when it is stored as JSON", "string keys"]),
    ],
    ids=str,
)
def test_a_state_of_a_hook_that_cannot_be_stored_is_refused_at_construction(state, parts):
    class Stateful(ms.SessionRunHook):
        def state_dict(self):
            return state

    refused(
        ms.HookError,
        "Stateful.state_dict()",
        *parts,
        call=lambda: ms.MonitoredTrainingSession(init_fn, hooks=[Stateful()]),
    )


@pytest.mark.parametrize(
    ("listeners", "parts"),
    [
        ([ms.CheckpointSaverListener], ["listeners[0] is the class CheckpointSaverListener", "Write"]),
        ([object()], ["listeners[0] (object) has no method 'begin'", "Derive it from monsess.CheckpointSaverListener"]),
        (
            [type("Wrong", (ms.CheckpointSaverListener,), {"after_save": lambda self, step: None})()],
            ["listeners[0] (Wrong): after_save(step) cannot be called as after_save(session, step)"],
        ),
        (ms.CheckpointSaverListener(), ["must be an iterable", "found CheckpointSaverListener"]),
        ([ms.CheckpointSaverListener()] * 2, ["listeners[1]", "listed twice", "Pass it once"]),
    ],
)
def test_listeners_that_are_none(listeners, parts):
    refused(ms.HookError, *parts, call=lambda: ms.CheckpointSaverHook(save_steps=1, listeners=listeners))


# ---- what a hook must not do inside a run


@pytest.mark.parametrize("method", ["before_run", "after_run"])
def test_a_hook_cannot_close_the_session_inside_a_run(tmp_path, method):
    """The others have not seen the step yet, so an ending now would be too early, and so would the commit."""
    trace = []

    class Closes(ms.SessionRunHook):
        pass

    class Sees(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            trace.append("after_run")

        def end(self, session):
            trace.append("end")

        def on_error(self, session, error):
            trace.append("on_error")

    setattr(Closes, method, lambda self, run_context, *_: run_context.session.close())
    hooks = [Closes(), Sees()]
    refused(ms.MonsessError, "close()", "request_stop", call=lambda: run(count, hooks=hooks, checkpoint_dir=tmp_path))
    assert trace == ["on_error"]
    assert ms.CheckpointStore(tmp_path).steps() == []


@pytest.mark.parametrize("method", ["before_run", "after_run"])
def test_a_hook_that_runs_a_train_step_is_told_how(method):
    class Trains(ms.SessionRunHook):
        pass

    setattr(Trains, method, lambda self, run_context, *_: run_context.session.run(count))
    error = refused(ms.MonsessError, "run_without_hooks", call=lambda: run(count, hooks=[Trains()]))
    assert len(error.__notes__) < 5
