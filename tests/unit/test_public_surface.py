"""The public names are frozen, and each is documented by the house template."""

from __future__ import annotations

import doctest
import inspect
import re
import typing

import pytest

import monsess
import monsess.session

#: What users can rely on. A name leaves this list with a major version only.
NAMES = [
    "Attempt",
    "BatchError",
    "BroadcastGlobalVariablesHook",
    "CheckpointOptions",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "CheckpointStore",
    "ClusterError",
    "ClusterSpec",
    "Coordinator",
    "DamagedCheckpointError",
    "DirectoryInUseError",
    "DistributedOptimizer",
    "EarlyStoppingHook",
    "EndOfData",
    "EvaluationHook",
    "EvaluationResult",
    "Evaluator",
    "FeedConflictError",
    "FeedFnHook",
    "FetchError",
    "FinalOpsHook",
    "GlobalStepWaiterHook",
    "GoodputHook",
    "HookError",
    "InputPositionError",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "LeftAloneError",
    "LoggingTensorHook",
    "LooperThread",
    "MLflowHook",
    "Metrics",
    "MonitoredSession",
    "MonitoredTrainingSession",
    "MonsessError",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "NonFiniteStateError",
    "PeerFailedError",
    "Point",
    "ProcessesDivergedError",
    "ProfilerHook",
    "ProgressBarHook",
    "Recovery",
    "ReplicaCheckHook",
    "ReplicasDifferError",
    "Retention",
    "RunAfterStopError",
    "SaveError",
    "Scaffold",
    "SecondOrStepTimer",
    "Server",
    "SessionClosedError",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StateMismatchError",
    "StateNotReadyError",
    "StepContext",
    "StepCounterHook",
    "StepDefinitionError",
    "StepRecord",
    "StopAfterNEvalsHook",
    "StopAtStepHook",
    "StopAtTimeHook",
    "StopReason",
    "StorageError",
    "SummarySaverHook",
    "UnstorableLeafError",
    "WandbHook",
    "WatchdogHook",
    "__version__",
    "allgather",
    "allreduce",
    "broadcast",
    "checkpoints_iterator",
    "eval_step",
    "latest_checkpoint",
    "linear_scaled_lr",
    "load_checkpoint",
    "make_early_stopping_hook",
    "masked_mean",
    "per_device_key",
    "read_metrics",
    "repeat",
    "request_preemption",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
    "summary",
    "testing",
    "train_step",
    "wait_for_new_checkpoint",
]

OBJECTS = {name: getattr(monsess, name) for name in NAMES if hasattr(monsess, name)}
DOCUMENTED = {name: thing for name, thing in OBJECTS.items() if callable(thing)}
#: Made by the session and never by a user, so that what their constructors take is nobody's business.
MADE_BY_THE_SESSION = {"MonitoredSession", "StepContext"}
METHODS = {
    f"{name}.{attribute}": member
    for name, thing in DOCUMENTED.items()
    if inspect.isclass(thing)
    for attribute, member in vars(thing).items()
    if not attribute.startswith("_") and (inspect.isfunction(member) or isinstance(member, (property, classmethod)))
}


def is_error(thing: object) -> bool:
    return inspect.isclass(thing) and issubclass(thing, BaseException)


def parameters(thing: typing.Any) -> list[str]:
    """What a caller passes, ``self`` left out; none for what has no signature of its own."""
    if is_error(thing) or getattr(thing, "_is_protocol", False):
        return []
    names = list(inspect.signature(thing).parameters)
    return [name for name in names if name not in ("self", "cls")]


def section(doc: str, title: str) -> str:
    """The indented text below ``title:``, empty if there is none."""
    found = re.search(rf"^{title}:\n((?:[ ]+.*\n|\n)+)", doc + "\n", re.MULTILINE)
    return found.group(1) if found else ""


def argument_names(described: str) -> list[str]:
    """The names in an ``Args`` section; "a, b: ..." describes two."""
    heads = re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", described, re.MULTILINE)
    return [name.strip("* ") for head in heads for name in head.split(",")]


def test_names_are_frozen():
    assert list(monsess.__all__) == NAMES
    assert sorted(monsess.__all__) == list(monsess.__all__)


def test_names_exist():
    assert [name for name in NAMES if not hasattr(monsess, name)] == []


def test_all_hooks_are_public():
    import monsess.hooks

    assert sorted(monsess.hooks.__all__) == list(monsess.hooks.__all__)
    assert set(monsess.hooks.__all__) <= set(NAMES)


def test_version():
    from importlib.metadata import version

    assert monsess.__version__ == version("monsess")


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstring_has_one_sentence_first(name):
    doc = inspect.getdoc(DOCUMENTED[name]) or ""
    first, *rest = doc.split("\n")
    assert first.rstrip().endswith((".", "?")), f"{name}: the first line is one sentence, found {first!r}"
    assert not rest or rest[0] == "", f"{name}: an empty line after the first sentence"


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstring_says_what_goes_in_and_what_comes_out(name):
    thing = DOCUMENTED[name]
    doc = inspect.getdoc(thing) or ""
    if name in MADE_BY_THE_SESSION:
        return
    described = argument_names(section(doc, "Args"))
    wanted = parameters(thing)
    assert set(described) >= set(wanted), f"{name}: Args: says nothing of {set(wanted) - set(described)}"
    assert is_error(thing) or set(described) <= set(wanted), f"{name}: takes no {set(described) - set(wanted)}"
    if inspect.isfunction(thing) and inspect.signature(thing).return_annotation not in (None, "None"):
        assert section(doc, "Returns") or section(doc, "Yields"), f"{name}: no Returns:"
    if inspect.isfunction(thing) and re.search(r"^    (    )?raise ", inspect.getsource(thing), re.MULTILINE):
        assert section(doc, "Raises"), f"{name}: no Raises:"


@pytest.mark.parametrize("name", [name for name, thing in DOCUMENTED.items() if not is_error(thing)])
def test_docstring_has_an_example_that_runs(name):
    doc = inspect.getdoc(DOCUMENTED[name]) or ""
    assert section(doc, "Example"), f"{name}: no Example:"
    assert doctest.DocTestParser().get_examples(section(doc, "Example")), f"{name}: the example has no >>>"


@pytest.mark.parametrize("name", METHODS)
def test_methods_have_a_first_sentence(name):
    doc = inspect.getdoc(METHODS[name]) or ""
    assert doc.split("\n\n")[0].rstrip().endswith((".", ":", "?")), f"{name}: {doc!r}"


def test_errors_form_one_tree():
    errors = {name: thing for name, thing in OBJECTS.items() if is_error(thing) and name != "EndOfData"}
    assert [name for name, error in errors.items() if not issubclass(error, monsess.MonsessError)] == []
    tree = inspect.getdoc(inspect.getmodule(monsess.MonsessError)) or ""
    assert [name for name in errors if name not in tree] == []
    assert not issubclass(monsess.EndOfData, monsess.MonsessError)


def test_first_screen_of_session_shows_the_loop():
    screen = "\n".join(inspect.getsource(monsess.session).split("\n")[:80])
    assert re.search(r"def _?run", screen)
    for word in ("before_run", "after_run", "should_stop"):
        assert word in screen, f"the first lines of session.py do not show {word}"
