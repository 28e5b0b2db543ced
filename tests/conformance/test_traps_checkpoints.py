"""W-19 to W-23: what is saved when, and what is restored when something is wrong."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import pytest
import refusing
import toy
from traps import Listener, Recorder, count, drive, endings, fresh, init_fn, look, session, steps_of, trap, until

import monsess as ms


def contents(directory):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


# ---- W-19: what was just made or restored is not saved


@trap("W-19")
def test_nothing_is_saved_at_creation_and_what_was_restored_is_not_saved_again(tmp_path):
    listener = Listener()

    def attempt(last_step):
        saver = ms.CheckpointSaverHook(save_steps=2, listeners=[listener])
        with session(tmp_path, saver, ms.StopAtStepHook(last_step=last_step)) as sess:
            found = steps_of(tmp_path)
            drive(sess)
        return found

    assert attempt(3) == []
    assert sorted(listener.calls) == sorted(["begin", "before@2", "after@2", "before@3", "after@3", "end@3"])
    listener.calls.clear()
    before = contents(tmp_path)
    assert attempt(3) == [2, 3]
    assert listener.calls == ["begin", "end@3"]
    assert contents(tmp_path) == before
    listener.calls.clear()
    assert attempt(4) == [2, 3]
    assert listener.calls == ["begin", "before@4", "after@4", "end@4"]


@trap("W-19")
def test_init_fn_runs_only_where_there_is_nothing(tmp_path):
    values = []

    def init():
        values.append(1)
        return {"n": jnp.zeros(())}

    for last_step in (2, 4):
        with ms.MonitoredTrainingSession(
            init, checkpoint_dir=tmp_path, hooks=[ms.StopAtStepHook(last_step=last_step)]
        ) as sess:
            drive(sess)
            assert float(sess.state["n"]) == last_step
    assert steps_of(tmp_path) == [2, 4]


# ---- W-20: one writer, one lineage, forwards


@trap("W-20")
def test_a_second_saver_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"second CheckpointSaverHook.*save_checkpoint_steps="):
        ms.MonitoredTrainingSession(
            init_fn, checkpoint_dir=tmp_path, hooks=[ms.CheckpointSaverHook(save_steps=5)], save_checkpoint_steps=7
        )
    assert list(tmp_path.iterdir()) == []


@trap("W-20")
def test_a_saver_for_another_directory_is_refused(tmp_path):
    other = ms.CheckpointSaverHook(tmp_path / "other", save_steps=5)
    with pytest.raises(ValueError, match="one that it restores from") as caught:
        session(tmp_path / "mine", other)
    assert str(tmp_path / "other") in str(caught.value)
    assert str(tmp_path / "mine") in str(caught.value)
    with pytest.raises(ValueError, match="session has no checkpoint_dir"):
        session(None, ms.CheckpointSaverHook(tmp_path / "other", save_steps=5))


@trap("W-20")
def test_two_savers_of_the_user_save_a_step_once(tmp_path):
    listener = Listener()
    savers = [ms.CheckpointSaverHook(save_steps=n, listeners=[listener]) for n in (2, 4)]
    with session(tmp_path, *savers, ms.StopAtStepHook(last_step=4)) as sess:
        drive(sess)
    assert [call for call in listener.calls if "@4" in call] == ["before@4", "after@4", "end@4", "end@4"]
    assert steps_of(tmp_path) == [2, 4]


@trap("W-20")
def test_another_model_does_not_start_afresh_in_an_old_directory(tmp_path):
    with session(tmp_path, ms.StopAtStepHook(last_step=3)) as sess:
        drive(sess)
    before = contents(tmp_path)
    with pytest.raises(ms.StateMismatchError):
        ms.MonitoredTrainingSession(lambda: {"other": 0.0}, checkpoint_dir=tmp_path)
    assert contents(tmp_path) == before


@trap("W-20")
def test_all_attempts_share_the_name_of_the_run(tmp_path):
    names = []
    for last_step in (2, 4, 6):
        with session(tmp_path, ms.StopAtStepHook(last_step=last_step)) as sess:
            drive(sess)
        names.append(sess.run_id)
    assert len(set(names)) == 1
    with session(tmp_path / "another") as sess:
        pass
    assert sess.run_id not in names


@trap("W-20")
def test_going_back_has_to_be_asked_for_twice(tmp_path):
    with session(tmp_path, ms.StopAtStepHook(last_step=6), save_checkpoint_steps=2) as sess:
        drive(sess)
    before = contents(tmp_path)
    with pytest.raises(ms.MonsessError, match=r"newer=.aside") as caught:
        session(tmp_path, checkpoint=ms.CheckpointOptions(restore_step=2))
    assert "4, 6" in str(caught.value)
    assert contents(tmp_path) == before
    with session(
        tmp_path,
        ms.StopAtStepHook(last_step=5),
        save_checkpoint_steps=2,
        checkpoint=ms.CheckpointOptions(restore_step=2, newer="aside"),
    ) as sess:
        assert sess.restored_from == sess.global_step == 2
        drive(sess)
    assert steps_of(tmp_path) == [2, 4, 5]
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("aside-")]) == 2


# ---- W-21: only a commit counts as a save


@trap("W-21", "W-25")
def test_a_failed_save_is_an_error_and_is_made_again_at_the_end():
    url = fresh()
    with session(url, save_checkpoint_steps=3) as sess:
        with refusing.refusing(refusing.refuse("write")):
            for _ in range(3):
                sess.run(count)
            with pytest.raises(ms.SaveError, match=r"\b3\b"):
                until(lambda: sess.run(look) is None)  # the next run after the writer has met it, of any kind
        assert sess.global_step == 3
        assert ms.CheckpointStore(url).steps() == []
    assert ms.CheckpointStore(url).steps() == [3]
    assert float(ms.load_checkpoint(url)["n"]) == 3


@trap("W-21")
def test_a_failed_last_save_is_no_clean_end():
    recorder = Recorder()
    url = fresh()
    with pytest.raises(ms.SaveError):
        with session(url, recorder) as sess:
            sess.run(count)
            rule = refusing.refusing(refusing.refuse("write"))
            rule.__enter__()
    rule.__exit__(None, None, None)
    assert endings(recorder.trace) == ["A.on_error"]
    assert isinstance(recorder.errors[0], ms.SaveError)
    assert sess.stop_reason == ms.StopReason.ERROR


@trap("W-21", "W-23")
def test_a_state_that_changed_without_a_step_is_never_taken_for_the_saved_one(tmp_path):
    @ms.train_step(steps_per_run=0)
    def auxiliary(state):
        return {"n": state["n"] + 0.5}, {}

    with session(tmp_path, save_checkpoint_steps=1) as sess:
        sess.run(auxiliary)
        sess.run(count)
    assert float(ms.load_checkpoint(tmp_path)["n"]) == 1.5
    with pytest.raises(ms.MonsessError, match="auxiliary update"):
        with session(tmp_path) as sess:
            sess.run(auxiliary)
            sess.request_save()
    assert steps_of(tmp_path) == [1]


# ---- W-22: damage


def damage(directory, step):
    path = max((directory / str(step)).rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else -1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@trap("W-22")
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_restored(tmp_path, caplog):
    with session(tmp_path, ms.StopAtStepHook(last_step=6), save_checkpoint_steps=2) as sess:
        drive(sess)
    damage(tmp_path, 6)
    (tmp_path / "9").mkdir()  # what a killed upload of somebody else would look like
    with pytest.raises(ms.DamagedCheckpointError, match="6"):
        session(tmp_path, checkpoint=ms.CheckpointOptions(strict=True))
    with session(tmp_path, ms.StopAtStepHook(last_step=5)) as sess:
        assert sess.restored_from == 4
        assert any(r.levelno == logging.WARNING and "6" in r.getMessage() for r in caplog.records)
        drive(sess)
    assert float(ms.load_checkpoint(tmp_path, 5)["n"]) == 5


@trap("W-22")
def test_no_intact_checkpoint_is_an_error_and_never_a_fresh_start(tmp_path):
    with session(tmp_path, ms.StopAtStepHook(last_step=4), save_checkpoint_steps=2) as sess:
        drive(sess)
    damage(tmp_path, 2)
    damage(tmp_path, 4)
    before = contents(tmp_path)
    with pytest.raises(ms.DamagedCheckpointError) as caught:
        session(tmp_path)
    assert "2" in str(caught.value)
    assert "4" in str(caught.value)
    assert contents(tmp_path) == before


@trap("W-15", "W-22")
def test_three_lives_end_in_the_state_of_one(tmp_path):
    for last_step in (2, 4, 6):
        with ms.MonitoredTrainingSession(
            toy.init_fn,
            data=toy.batches(6),
            checkpoint_dir=tmp_path,
            hooks=[ms.StopAtStepHook(last_step=last_step)],
        ) as sess:
            drive(sess, toy.train)
            state = sess.state_copy()
            assert jax.dtypes.issubdtype(state["key"].dtype, jax.dtypes.prng_key)
    toy.assert_same_bits(state, toy.straight(6))


# ---- W-23: the session counts


@trap("W-23")
def test_label_and_content_of_every_checkpoint_agree_whatever_else_is_run(tmp_path):
    with session(tmp_path, save_checkpoint_steps=3, keep=ms.KeepLast(10)) as sess:
        for _ in range(10):
            sess.run(look)
            sess.run(count)
            sess.run(look)
    assert steps_of(tmp_path) == [3, 6, 9, 10]
    assert [float(ms.load_checkpoint(tmp_path, step)["n"]) for step in (3, 6, 9, 10)] == [3, 6, 9, 10]


@trap("W-23")
def test_a_state_without_any_counter_is_counted_too(tmp_path):
    @ms.train_step
    def still(state):
        return state, {}

    with ms.MonitoredTrainingSession(
        lambda: jnp.zeros(3), checkpoint_dir=tmp_path, hooks=[ms.StopAtStepHook(last_step=3)], save_checkpoint_steps=1
    ) as sess:
        drive(sess, still)
    assert steps_of(tmp_path) == [1, 2, 3]
