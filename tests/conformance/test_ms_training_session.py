"""The behaviours of TensorFlow's MonitoredTrainingSession tests, MS-015 to MS-030; summaries come later."""

from __future__ import annotations

import logging

import counting
import jax
import pytest
from cluster import Cluster, all_ended_well
from conforms import conforms
from jax.experimental import multihost_utils

import monsess as ms


def train(url, steps, **arguments):
    """Train so many steps; return where the session started."""
    with counting.session(checkpoint_dir=url, **arguments) as sess:
        start = sess.global_step
        assert sess.restored_from == (start or None)
        for _ in range(steps):
            sess.run(counting.count)
    return start


@conforms("MS-015", "MS-016")
def test_second_session_goes_on_where_the_first_left_although_no_save_was_due(tmp_path):
    with counting.session(checkpoint_dir=tmp_path) as sess:
        assert sess.global_step == 0
        assert float(sess.run(counting.read)) == 0
        assert counting.counted(sess.run(counting.count)) == 1
        assert counting.counted(sess.run(counting.count)) == 2
    assert ms.CheckpointStore(tmp_path).steps() == [2]  # 600 seconds have not passed: the clean end saved
    with counting.session(checkpoint_dir=tmp_path) as sess:
        assert sess.global_step == sess.restored_from == 2
        assert float(sess.run(counting.read)) == 2


@conforms("MS-017")
def test_save_checkpoint_steps(tmp_path):
    assert train(tmp_path, 100, save_checkpoint_steps=100) == 0
    assert ms.CheckpointStore(tmp_path).steps() == [100]
    assert train(tmp_path, 0) == 100


@conforms("MS-018")
def test_save_checkpoint_secs(tmp_path):
    with ms.testing.FakeClock() as clock:
        with pytest.raises(KeyError, match="crash"):
            with counting.session(checkpoint_dir=tmp_path, save_checkpoint_secs=0.1) as sess:
                for _ in range(10):
                    sess.run(counting.count)
                clock.advance(0.2)
                sess.run(counting.count)
                assert sess.global_step == 11
                raise KeyError("crash")  # no final commit: what is there was saved for the time
    assert ms.CheckpointStore(tmp_path).steps() == [11]
    assert train(tmp_path, 0) == 11


@conforms("MS-023")
def test_chief_only_hook_begins_once_on_the_chief(tmp_path):
    trace = []
    chief_hook, hook = counting.Recorder("chief", trace), counting.Recorder("all", trace)
    train(tmp_path, 2, chief_only_hooks=[chief_hook], hooks=[hook])
    assert chief_hook.called("begin") == hook.called("begin") == 1
    assert chief_hook.called("before") == 2
    assert trace[:2] == ["chief.begin", "all.begin"]


@conforms(
    "MS-024",
    instead=(
        "A cadence of 0 is refused: it reads as well as 'always' (W-35). None for both cadences switches the periodic "
        "saves off; the commit of a clean end stays, so that a restart goes on there. Without checkpoint_dir nothing "
        "is saved."
    ),
)
@pytest.mark.parametrize("argument", ["save_checkpoint_secs", "save_checkpoint_steps"])
def test_default_saver_is_switched_off_by_none_and_not_by_zero(tmp_path, argument):
    with pytest.raises(ValueError, match=argument):
        counting.session(checkpoint_dir=tmp_path, **{argument: 0})
    assert list(tmp_path.iterdir()) == []
    off = {"save_checkpoint_secs": None, "save_checkpoint_steps": None}
    with ms.testing.FakeClock() as clock:
        with pytest.raises(KeyError):
            with counting.session(checkpoint_dir=tmp_path, **off) as sess:
                for _ in range(3):
                    sess.run(counting.count)
                    clock.advance(10_000)
                raise KeyError("crash")
    assert ms.CheckpointStore(tmp_path).steps() == []
    assert train(tmp_path, 3, **off) == 0
    assert ms.CheckpointStore(tmp_path).steps() == [3]
    assert train(tmp_path, 0) == 3


@conforms(
    "MS-025",
    instead=(
        "No context decides for a process: every process builds the same session, and the chief writes: the rate of "
        "steps into the log and the records, curves into the records."
    ),
)
def test_rate_and_curves_are_written_by_the_chief(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="monsess")
    train(tmp_path, 20, log_step_count_steps=10, save_summaries_steps=10)
    assert [record.message for record in caplog.records if "global_step/sec" in record.message]
    curves = ms.read_metrics(tmp_path).curves
    assert [point.step for point in curves["count"]] == [1, 10, 20]
    assert [point.step for point in curves["global_step/sec"]] == [10, 20]


@conforms(
    "MS-026",
    instead=(
        "Whether there are summaries is said by save_summaries_steps and save_summaries_secs, None for off, and not by "
        "a context. Then no event file is written, unless somebody logs something, as the rate of steps is. The "
        "records say when the run began and ended all the same."
    ),
)
def test_summaries_that_are_off_write_nothing(tmp_path):
    train(tmp_path, 2, save_summaries_steps=None, save_summaries_secs=None, log_step_count_steps=None)
    assert [path.name for path in tmp_path.rglob("*") if "events" in path.name] == []
    assert ms.read_metrics(tmp_path).curves == {}
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["2"]


@conforms(
    "MS-027",
    instead=(
        "Whether a process writes checkpoints is not set: process 0 is the chief and the only one that writes. Its "
        "checkpoint is restored by any later session."
    ),
)
def test_chief_is_process_0_and_writes(tmp_path):
    with counting.session(checkpoint_dir=tmp_path, is_chief=True, save_checkpoint_steps=100) as sess:
        assert sess.is_chief
        for _ in range(100):
            sess.run(counting.count)
    assert train(tmp_path, 0) == 100


@conforms(
    "MS-028",
    instead="Whether anything is saved is said by checkpoint_dir. Without one not a single file is written anywhere.",
)
def test_without_checkpoint_dir_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train(None, 3, save_checkpoint_steps=1) == 0
    assert list(tmp_path.iterdir()) == []
    assert train(None, 0) == 0


@conforms("MS-029")
@pytest.mark.slow
def test_who_is_not_the_chief_writes_nothing(tmp_path):
    with Cluster(tmp_path) as cluster:
        # A directory for each process shows who writes; it would be one for all.
        ended = cluster.run(2, url=str(tmp_path / "of-{index}"), steps=7)
    all_ended_well(ended)
    assert ms.CheckpointStore(tmp_path / "of-0").steps() == [3, 6, 7]
    assert not (tmp_path / "of-1").exists()
    with pytest.raises(ms.ClusterError, match="is_chief"):
        train(tmp_path / "alone", 1, is_chief=False)  # the cluster says who is the chief
    assert not (tmp_path / "alone").exists()


@conforms(
    "MS-030",
    instead=(
        "A save holds no collective: it copies the state from the chief's first device, so no other process has to "
        "take part, and there is no directory for the workers' copies."
    ),
)
def test_a_save_is_the_affair_of_one_device_and_needs_no_other_process(tmp_path, monkeypatch):
    def collective(*args, **kwargs):
        raise AssertionError("a collective of the processes was called")

    for name in ("sync_global_devices", "broadcast_one_to_all", "process_allgather", "assert_equal"):
        monkeypatch.setattr(multihost_utils, name, collective)
    with counting.session(checkpoint_dir=tmp_path) as sess:
        sess.run(counting.count)
        assert len(jax.local_devices()) == 4
        assert {device for leaf in jax.tree.leaves(sess.state) for device in leaf.devices()} == {jax.local_devices()[0]}
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["1"]
    assert ms.load_checkpoint(tmp_path, 1) == {"count": 1.0}
    assert train(tmp_path, 0) == 1
