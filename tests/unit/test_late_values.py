"""Values of checkpoints that come after the commit: who writes them, who finds them, and what they are worth."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import ticks

import monsess as ms
from monsess.checkpoint.evaluations import EVALS, Evaluations
from monsess.checkpoint.upkeep import Upkeep
from monsess.commands import main
from monsess.filesystems import FsspecFiles


def train(url, steps, *, keep=None, hooks=(), body=lambda sess: None, **more):
    with ms.MonitoredTrainingSession(
        ticks.init_fn,
        checkpoint_dir=url,
        save_checkpoint_steps=1,
        keep=ms.KeepLast(100) if keep is None else keep,
        hooks=[ms.StopAtStepHook(last_step=steps), *hooks],
        **more,
    ) as sess:
        while not sess.should_stop():
            sess.run(ticks.one)
            body(sess)
    return sess


def metrics(url):
    store = ms.CheckpointStore(url)
    return {step: store.metrics(step) for step in store.steps()}


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path):
    return str(tmp_path / "run") if request.param == "local" else f"memory://late/{tmp_path.name}"


def test_a_value_of_the_step_itself_is_in_its_commit(tmp_path):
    class Evaluates(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            run_context.session.log({"eval/loss": abs(run_context.global_step - 3.0), "eval/other": 1.0})

    keep = ms.KeepBest(2, "eval/loss")
    train(tmp_path, 6, keep=keep, hooks=[Evaluates()])
    assert metrics(tmp_path) == {2: {"eval/loss": 1.0}, 3: {"eval/loss": 0.0}, 6: {"eval/loss": 3.0}}
    assert not (tmp_path / EVALS).exists()


def test_a_value_that_comes_later_ranks_too(url):
    def later(sess):
        step = sess.global_step
        ticks.wait_for_saves(sess, step)
        if step > 1:
            sess.log({"eval/loss": abs(step - 1 - 3.0)}, step - 1)

    train(url, 8, keep=ms.KeepBest(1, "eval/loss") | ms.KeepLast(3), body=later)
    found = metrics(url)
    assert sorted(found) == [3, 6, 7, 8]  # 3 is the best, and 8 has no rank
    assert {step: values.get("eval/loss") for step, values in found.items()} == {3: 0.0, 6: 3.0, 7: 4.0, 8: None}


def test_a_value_that_comes_while_the_step_is_on_its_way_waits_for_the_commit(tmp_path, monkeypatch):
    keep = ms.KeepBest(1, "eval/loss") | ms.KeepLast(2)
    train(tmp_path, 3, keep=keep, body=lambda sess: sess.log({"eval/loss": 5.0 - sess.global_step}))
    assert {step: values["eval/loss"] for step, values in metrics(tmp_path).items()} == {2: 3.0, 3: 2.0}


def test_values_at_the_end_are_there_for_the_next_attempt(tmp_path):
    class AtEnd(ms.SessionRunHook):
        def end(self, session):
            session.log({"eval/loss": float(session.global_step)})

    keep = ms.KeepBest(1, "eval/loss") | ms.KeepLast(1)
    train(tmp_path, 2, keep=keep, hooks=[AtEnd()])
    assert metrics(tmp_path)[2] == {"eval/loss": 2.0}
    train(tmp_path, 5, keep=keep, hooks=[AtEnd()])
    assert metrics(tmp_path) == {2: {"eval/loss": 2.0}, 5: {"eval/loss": 5.0}}
    train(tmp_path, 6, keep=ms.KeepLast(1))
    assert list(metrics(tmp_path)) == [5, 6]  # the one restored from stays
    train(tmp_path, 7, keep=ms.KeepBest(1, "eval/loss"))
    assert {name.partition("-")[0] for name in os.listdir(tmp_path / EVALS)} == {"5"}  # those of 2 went with it


def test_another_job_notes_values_and_the_training_ranks_by_them(tmp_path):
    other = ms.CheckpointStore(tmp_path)

    def noted(sess):
        ticks.wait_for_saves(sess, sess.global_step)
        if sess.global_step == 4:
            for step in other.steps():
                other.note_metrics(step, {"eval/loss": abs(step - 2.0)})

    train(tmp_path, 7, keep=ms.KeepBest(1, "eval/loss") | ms.KeepLast(4), body=noted)
    assert sorted(metrics(tmp_path)) == [2, 4, 5, 6, 7]


def test_of_one_name_the_newest_counts_and_what_is_not_finite_is_left_out(url):
    train(url, 2)
    store = ms.CheckpointStore(url)
    store.note_metrics(1, {"eval/loss": 5.0, "eval/nan": float("nan")})
    store.note_metrics(1, {"eval/loss": 4, "eval/accuracy": 0.5})
    store.note_metrics(1, {"eval/inf": float("inf")})
    assert store.metrics(1) == {"eval/loss": 4.0, "eval/accuracy": 0.5}
    assert store.metrics(2) == {}
    assert store.steps() == [1, 2]
    assert store.verify(1) == []


def test_values_of_another_step_of_that_number_do_not_count(tmp_path):
    train(tmp_path, 2)
    store = ms.CheckpointStore(tmp_path)
    store.note_metrics(2, {"eval/loss": 1.0})
    shutil.rmtree(tmp_path / "2")
    train(tmp_path, 2)
    assert metrics(tmp_path) == {1: {}, 2: {}}


def test_what_cannot_be_read_is_no_value(tmp_path):
    train(tmp_path, 1)
    store = ms.CheckpointStore(tmp_path)
    store.note_metrics(1, {"eval/loss": 1.0})
    (name,) = os.listdir(tmp_path / EVALS)
    whole = json.loads((tmp_path / EVALS / name).read_text())
    for number, body in enumerate(
        ["", "[]", "{", json.dumps({**whole, "step": 7}), json.dumps({**whole, "metrics": {"eval/loss": "low"}})]
    ):
        (tmp_path / EVALS / f"1-{number:012x}").write_text(body)
    (tmp_path / EVALS / "notes.txt").write_text("mine")
    assert store.metrics(1) == {"eval/loss": 1.0}
    evaluations = Evaluations(store._storage)
    evaluations.refresh()
    assert len(evaluations.orphans([2])) == 6
    assert [path for path in evaluations.orphans([2]) if path.endswith("notes.txt")] == []


def test_half_an_object_is_read_again_once_it_is_whole(tmp_path):
    train(tmp_path, 1)
    store = ms.CheckpointStore(tmp_path)
    store.note_metrics(1, {"eval/loss": 1.0})
    (name,) = os.listdir(tmp_path / EVALS)
    whole = (tmp_path / EVALS / name).read_text()
    (tmp_path / EVALS / name).write_text(whole[:20])
    evaluations, record = Evaluations(store._storage), store._demand(1)
    evaluations.refresh()
    assert evaluations.applied(record).metrics == {}
    (tmp_path / EVALS / name).write_text(whole)
    evaluations.refresh()
    assert evaluations.applied(record).metrics == {"eval/loss": 1.0}


def test_a_value_that_comes_while_steps_are_being_deleted_saves_its_step(tmp_path, monkeypatch):
    other = ms.CheckpointStore(tmp_path)
    surplus = Upkeep._surplus

    def chosen(self, known, newest):
        found = surplus(self, known, newest)
        if [record.step for record in found] == [3]:
            other.note_metrics(3, {"eval/loss": 0.0})
        return found

    monkeypatch.setattr(Upkeep, "_surplus", chosen)
    train(
        tmp_path,
        7,
        keep=ms.KeepBest(1, "eval/loss") | ms.KeepLast(2),
        body=lambda sess: ticks.wait_for_saves(sess, sess.global_step),
    )
    assert sorted(metrics(tmp_path)) == [3, 6, 7]


def test_a_store_that_refuses_values_keeps_the_best_all_the_same_and_deletes_the_others(tmp_path, monkeypatch, lines):
    url = f"memory://late/{tmp_path.name}"
    write, tries = FsspecFiles.write, []

    def refuses(self, rel, data):
        if rel.startswith(f"{EVALS}/"):
            tries.append(rel)
            raise PermissionError("no values here")
        return write(self, rel, data)

    monkeypatch.setattr(FsspecFiles, "write", refuses)

    def later(sess):
        ticks.wait_for_saves(sess, sess.global_step)
        sess.log({"eval/loss": abs(sess.global_step - 2.0)})

    train(url, 8, keep=ms.KeepBest(1, "eval/loss") | ms.KeepLast(2), body=later)
    assert ms.CheckpointStore(url).steps() == [2, 7, 8]
    assert len([line for line in lines() if "Could not note values beside checkpoints" in line]) == 1
    monkeypatch.setattr(FsspecFiles, "write", write)
    train(url, 9, keep=ms.KeepBest(1, "eval/loss") | ms.KeepLast(2))
    assert ms.CheckpointStore(url).steps() == [2, 8, 9]  # run.json remembers


def test_values_of_deleted_steps_go_with_them_whatever_the_policy(tmp_path):
    other = ms.CheckpointStore(tmp_path)

    def noted(sess):
        ticks.wait_for_saves(sess, sess.global_step)
        other.note_metrics(sess.global_step, {"eval/loss": 1.0})

    train(tmp_path, 5, keep=ms.KeepLast(2), body=noted)
    assert {name.partition("-")[0] for name in os.listdir(tmp_path / EVALS)} <= {"3", "4", "5"}


def test_what_is_refused(tmp_path):
    train(tmp_path, 1)
    store = ms.CheckpointStore(tmp_path)
    with pytest.raises(ms.MonsessError, match=r"Step 5 in .* is not a committed checkpoint; there are \[1\]"):
        store.note_metrics(5, {"eval/loss": 1.0})
    with pytest.raises(ms.MonsessError, match="is not a committed checkpoint"):
        store.metrics(5)
    for bad in ({"": 1.0}, {"eval/loss": "low"}, {5: 1.0}, {"eval/loss": True}):
        with pytest.raises(ValueError, match="Expected a text and a number"):
            store.note_metrics(1, bad)


def test_commands_know_them(tmp_path, capsys):
    train(tmp_path, 4)
    store = ms.CheckpointStore(tmp_path)
    store.note_metrics(2, {"eval/loss": 0.5})
    store.note_metrics(3, {"eval/loss": 0.75})
    assert main(["ls", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "eval/loss=0.5" in said
    assert EVALS not in said
    assert main(["prune", str(tmp_path), "--keep-best", "1:eval/loss", "--yes"]) == 0
    assert store.steps() == [2, 4]


def test_a_store_that_refuses_a_value_stops_nothing(tmp_path, monkeypatch, lines):
    def refuse(self, record, values):
        raise OSError("full")

    monkeypatch.setattr(Evaluations, "add", refuse)

    def later(sess):
        ticks.wait_for_saves(sess, sess.global_step)
        sess.log({"eval/loss": 1.0}, 1)

    sess = train(tmp_path, 3, keep=ms.KeepBest(1, "eval/loss") | ms.KeepLast(3), body=later)
    assert sess.summary()["last_committed"] == 3
    assert any("Could not clean up" in line or "full" in line for line in lines())
