"""The behaviours of TensorFlow's scaffold tests, MS-001 to MS-014."""

from __future__ import annotations

import counting
import pytest
from conforms import conforms

import monsess as ms

PIECES = ("init_fn", "ready_fn", "warm_start_from", "warm_start_paths", "warm_start_options")


def ready(state):
    return True


@conforms("MS-001")
def test_nothing_is_there_before_finalize():
    scaffold = ms.Scaffold()
    assert [getattr(scaffold, piece) for piece in PIECES] == [None] * len(PIECES)


@conforms(
    "MS-002",
    instead=(
        "finalize fills init_fn, ready_fn and warm_start_paths. There is one kind of state, so there is no local "
        "initialisation with its own check, and saving is the session's: a scaffold holds no saver."
    ),
)
def test_finalize_fills_every_piece_with_one_that_works():
    scaffold = ms.Scaffold()
    assert scaffold.finalize() is scaffold
    assert scaffold.init_fn() == {}
    assert scaffold.missing({"w": 1.0}) == []
    assert scaffold.warm_start_paths == ("params/*",)
    assert not hasattr(scaffold, "saver")
    pieces = [getattr(scaffold, piece) for piece in PIECES]
    scaffold.finalize()
    assert [getattr(scaffold, piece) for piece in PIECES] == pieces


@conforms(
    "MS-003",
    instead=(
        "init_fn is the one way to make a state, so finalize fills it; warm_start_from, the one piece that may add to "
        "what is made, stays None when it is not given."
    ),
)
def test_what_may_add_to_the_first_state_is_off_unless_given():
    scaffold = ms.Scaffold(counting.init_fn).finalize()
    assert scaffold.init_fn is counting.init_fn
    assert scaffold.warm_start_from is None


@conforms(
    "MS-006",
    instead=(
        "Two phases too, but init_fn (with the warm start) and then ready_fn, which sees the state that they made; "
        "what it finds missing is named in a StateNotReadyError. Nothing is local to a process."
    ),
)
def test_ready_fn_sees_what_init_fn_and_warm_start_made(tmp_path):
    calls = []

    def init():
        calls.append("init")
        return {"params": 0.0, "count": 0.0}

    def missing(state):
        calls.append(("ready", float(state["params"])))
        return [] if state["params"] == 2.0 else ["params"]

    with pytest.raises(ms.StateNotReadyError, match=r"Init operations did not make model ready.*params"):
        ms.MonitoredTrainingSession(scaffold=ms.Scaffold(init, ready_fn=missing))
    assert calls == ["init", ("ready", 0.0)]

    with ms.MonitoredTrainingSession(lambda: {"params": 2.0, "count": 9.0}, checkpoint_dir=tmp_path):
        pass
    calls.clear()
    warm = ms.Scaffold(init, warm_start_from=str(tmp_path), warm_start_paths=["params"], ready_fn=missing)
    with ms.MonitoredTrainingSession(scaffold=warm) as sess:
        assert calls == ["init", ("ready", 2.0)]
        assert (float(sess.state["params"]), float(sess.state["count"]), sess.global_step) == (2.0, 0.0, 0)


@conforms("MS-007")
def test_model_without_state_trains_saves_and_resumes(tmp_path):
    @ms.train_step
    def nothing(state):
        return state, {}

    scaffold = ms.Scaffold().finalize()
    assert scaffold.init_fn() == {}
    assert scaffold.missing({}) == []
    for start in (0, 2):
        with ms.MonitoredTrainingSession(checkpoint_dir=tmp_path) as sess:
            assert sess.global_step == start
            assert sess.state == {}
            sess.run(nothing)
            sess.run(nothing)
    assert ms.latest_checkpoint(tmp_path) == 4


@conforms("MS-010")
def test_pieces_that_were_passed_stay_as_they_are():
    given = {"init_fn": counting.init_fn, "ready_fn": ready, "warm_start_from": "memory://x"}
    scaffold = ms.Scaffold(**given, warm_start_paths=["a", "b/*"]).finalize()
    for piece, value in given.items():
        assert getattr(scaffold, piece) is value
    assert scaffold.warm_start_paths == ("a", "b/*")
    assert callable(scaffold.init_fn)


@conforms("MS-012")
def test_arguments_are_used_where_the_copied_scaffold_is_empty():
    copy = ms.Scaffold(
        counting.init_fn,
        ready_fn=ready,
        warm_start_from="memory://x",
        warm_start_paths=["a"],
        warm_start_options={"k": 1},
        copy_from_scaffold=ms.Scaffold(),
    )
    assert [getattr(copy, piece) for piece in PIECES] == [counting.init_fn, ready, "memory://x", ("a",), {"k": 1}]


@conforms("MS-013")
def test_arguments_override_every_copied_piece():
    source = ms.Scaffold(
        dict, ready_fn=bool, warm_start_from="memory://y", warm_start_paths=["b"], warm_start_options={"k": 2}
    ).finalize()
    copy = ms.Scaffold(
        counting.init_fn,
        ready_fn=ready,
        warm_start_from="memory://x",
        warm_start_paths=["a"],
        warm_start_options={"k": 1},
        copy_from_scaffold=source,
    )
    assert [getattr(copy, piece) for piece in PIECES] == [counting.init_fn, ready, "memory://x", ("a",), {"k": 1}]
    inherited = ms.Scaffold(copy_from_scaffold=source)
    assert [getattr(inherited, piece) for piece in PIECES] == [dict, bool, "memory://y", ("b",), {"k": 2}]


@conforms("MS-014")
def test_copy_from_something_else_is_refused():
    with pytest.raises(TypeError, match="copy_from_scaffold is not a Scaffold instance"):
        ms.Scaffold(copy_from_scaffold=counting.init_fn)  # type: ignore[arg-type]
