"""What the records of a run tell: attempts, what restarts cost, where the time went, how it stands."""

from __future__ import annotations

import dataclasses
import json

import pytest
import written
from written import BEGAN, checkpoint, end, start, values

import monsess as ms
from monsess.checkpoint.commit import StepRecord
from monsess.checkpoint.owner import Owner, UnknownOwner
from monsess.report import records_of, view_of
from monsess.report.glance import glance
from monsess.report.page import render
from monsess.report.progress import lines_of
from monsess.report.standing import reason_of, standing
from monsess.report.story import Story, tell


def test_attempts_and_what_each_restart_cost():
    story = tell(written.three_kills())
    assert [(a.first_step, a.last_step) for a in story.attempts] == [(0, 8), (5, 11), (10, 17), (15, 20)]
    assert [a.lost_steps for a in story.attempts] == [3, 1, 2, 0]
    assert [a.lost_seconds for a in story.attempts] == pytest.approx([3.0, 1.0, 2.0, 0.0])
    assert [a.pause for a in story.attempts] == [3.0, 3.0, 3.0, None]
    assert [a.restored_from for a in story.attempts] == [None, 5, 10, 15]
    assert (story.lost_steps, story.lost_seconds) == (6, pytest.approx(6.0))
    assert [a.end is None for a in story.attempts] == [True, True, True, False]
    assert [(c.step, c.attempt) for c in story.commits] == [(5, 1), (10, 2), (15, 3), (20, 4)]


def test_the_time_of_a_restored_step_lies_between_those_that_are_known():
    records = [start(0, 0), values(10, 10, loss=1), values(20, 20, loss=1), start(15, 30, "a2"), values(20, 40, loss=1)]
    assert tell(records).attempts[0].lost_seconds == pytest.approx(5.0)
    records[1:3] = [checkpoint(15, 19), values(20, 20, loss=1)]  # seen late: it says little of when step 15 was run
    assert tell(records).attempts[0].lost_seconds == pytest.approx(5.0)
    assert tell([start(0, 0), start(0, 5, "a2")]).attempts[0].lost_steps == 0


def test_checkpoints_that_a_killed_attempt_had_no_time_to_record():
    records = [start(0, 0, "a1"), values(8, 8, loss=1.0), checkpoint(5, 6), start(8, 20, "a2"), values(9, 21, loss=1.0)]
    made = [
        StepRecord(step=5, run_id="r", attempt="a1", time=BEGAN + 6, started=BEGAN),
        StepRecord(step=8, run_id="r", attempt="a1", time=BEGAN + 12, started=BEGAN, size=70),
        StepRecord(step=3, run_id="q", attempt="before", time=BEGAN - 5, started=BEGAN, size=60),
    ]
    story = tell(records, made)
    assert [(c.step, c.attempt, c.size) for c in story.commits] == [(3, 0, 60), (5, 1, 3000), (8, 1, 70)]
    assert (story.attempts[0].last_time, story.attempts[0].pause) == (BEGAN + 12, 8.0)
    assert story.attempts[0].lost_seconds == 0.0
    assert tell([], made[:1]).commits[0].attempt == 0


def test_a_start_from_the_beginning_loses_everything():
    story = tell([start(0, 0), values(8, 8, loss=1), start(0, 9, "a2"), values(3, 12, loss=1)])
    assert (story.attempts[0].lost_steps, story.attempts[0].lost_seconds) == (8, pytest.approx(8.0))


def test_where_the_time_went_by_a_goodput_hook():
    counted = {
        "event": "goodput",
        "step": 5,
        "time": BEGAN,
        "totals": {"step": 6.0, "lost": 1.0, "odd": 1.0, "wall": 10},
    }
    before = {**counted, "totals": {"step": 1.0, "wall": 2.0}}
    spent = tell([start(0, 0), before, start(2, 3), counted, end(5, 9, seconds={"step": 99.0})]).time
    assert spent is not None
    assert spent.source == "goodput"
    assert spent.parts == {"step": 6.0, "lost": 1.0, "other": 2.0, "odd": 1.0}
    assert spent.wall == 10.0 == sum(spent.parts.values())


def test_where_the_time_went_by_the_ends():
    records = [start(0, 0), end(5, 10, seconds={"step": 6.0}), start(5, 20, "a2"), end(9, 25, seconds={"step": 4.0})]
    spent = tell(records).time
    assert spent is not None
    assert (spent.source, spent.wall, spent.parts) == ("ends", 15.0, {"step": 10.0, "other": 5.0})
    assert tell(records[:1]).time is None


def test_hooks_by_their_time():
    records = [start(0, 0), end(5, 1, hooks={"A": 1.0, "B": 2.0}), start(5, 2, "a2"), end(6, 3, hooks={"A": 2.0})]
    assert list(tell(records).hooks.items()) == [("A", 3.0), ("B", 2.0)]


@pytest.mark.parametrize("odd", [10**400, float("inf"), -1e308, "\ud800", [[]], {"a": {}}, True, None], ids=repr)
def test_what_nobody_can_show_does_no_harm(odd, tmp_path):
    """Records may be damaged, or come from another version; each value of each record is replaced in turn."""
    records = [
        {"event": "start", "step": 0, "time": 1e9, "attempt": "a", "restored_from": 0, "devices": 1, "processes": 1},
        {"step": 1, "time": 1e9, "scalars": {"loss": 1.0}},
        {"event": "checkpoint", "step": 1, "time": 1e9, "seconds": 0.1, "bytes": 1},
        {"event": "goodput", "step": 1, "time": 1e9, "totals": {"step": 1.0, "wall": 1.0}, "hooks": {"A": 1.0}},
        {"event": "end", "step": 1, "time": 1e9, "reason": "LAST_STEP", "text": "x", "seconds": {"step": 1.0}},
    ]
    store = ms.CheckpointStore(tmp_path)
    for i, record in enumerate(records):
        for name in record:
            lines = [json.dumps({**one, name: odd} if one is record else one) for one in records]
            if odd == 10**400 and name == "scalars":
                lines[i] = lines[i].replace(str(odd), "{}")
            (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
            assert render(view_of(store), "").encode()
            assert glance(store, {"metrics.jsonl"}).standing.state
            assert [text.encode() for one in records_of(store) for text, _ in lines_of(one)]


def test_records_of_any_kind_do_no_harm():
    odd = [
        {"step": "8", "time": 1.0, "scalars": {}},
        {"step": 8, "scalars": {"loss": 1.0}},
        {"event": "end", "step": 3, "time": BEGAN, "seconds": "none", "hooks": ["A"]},
        {"event": "goodput", "step": 3, "time": BEGAN, "totals": None},
        {"event": "checkpoint", "step": 3, "time": BEGAN, "seconds": "soon", "bytes": True},
        {"event": "start", "step": 0, "time": BEGAN, "restored_from": "none", "run_id": 5},
        {"event": 7, "step": 1, "time": BEGAN},
        {"event": "goodput", "step": 3, "time": BEGAN, "totals": {"step": float("nan"), "wall": float("inf")}},
    ]
    story = tell(odd)
    assert len(story.attempts) == 2
    assert [(c.seconds, c.size) for c in story.commits] == [(None, None)]
    assert story.hooks == {}
    assert tell([]).last is None
    assert tell([]) == Story((), (), None, {}, ())


# ---- how it stands

OWNER = Owner(
    host="elsewhere",
    boot_id="b",
    pid_namespace="p",
    pid=7,
    start_time="1",
    run_id="run",
    attempt="a1",
    launch=None,
    beat=3,
    interval=10.0,
    restored_from=None,
    since=BEGAN,
)
UNENDED = tell([start(0, 0), values(3, 20, loss=1.0)])


@pytest.mark.parametrize(
    ("owner", "story", "now", "state"),
    [
        (OWNER, UNENDED, 40.0, "running"),
        (OWNER, UNENDED, 30.0 + 90.0, "running"),
        (OWNER, UNENDED, 30.0 + 91.0, "silent"),
        (OWNER, tell([start(0, 0), values(3, 100, loss=1.0)]), 150.0, "running"),
        (None, UNENDED, 40.0, "died"),
        (None, tell([]), 40.0, "unknown"),
        (UnknownOwner(), UNENDED, 40.0, "unknown"),
        (None, tell([start(0, 0), end(3, 20)]), 40.0, "stopped"),
        (None, tell([start(0, 0), end(3, 20, "PREEMPTED")]), 40.0, "stopped"),
        (None, tell([start(0, 0), end(3, 20, "ERROR", error="ValueError: no")]), 40.0, "failed"),
        (OWNER, tell([start(0, 0), end(3, 20)]), 40.0, "running"),
    ],
)
def test_how_a_run_stands(owner, story, now, state):
    found = standing(owner, story, BEGAN + now)
    assert found.state == state
    assert found.style is not None


def test_the_process_of_an_owner_on_this_machine(monkeypatch):
    class Here(Owner):
        is_alive = True

    class Gone(Owner):
        is_alive = False

    fields = dataclasses.asdict(OWNER)
    assert standing(Here(**fields), UNENDED, BEGAN + 1e6).state == "running"
    assert standing(Gone(**fields), UNENDED, BEGAN + 1).state == "died"


def test_nobody_says_who_is_alive_where_only_records_lie():
    assert standing(None, UNENDED, BEGAN, at_home=False).state == "unknown"
    assert standing(None, tell([start(0, 0), end(3, 20)]), BEGAN, at_home=False).state == "stopped"


def test_why_it_ended():
    def why(**fields):
        last = tell([start(0, 0), end(3, 20, **fields)]).last
        assert last is not None
        return reason_of(last)

    assert why() == "LAST_STEP: step 3 is reached"
    assert why(reason="ERROR", error="ValueError: no\nmore of it") == "ERROR: ValueError: no"
    assert why(reason="END_OF_DATA", text="") == "END_OF_DATA"
    assert why(reason="", text="enough") == "enough"
    assert why(reason=None, text=None) == ""
