"""metrics.jsonl: what a line holds, what survives a kill, and a store that is slow, away or full."""

from __future__ import annotations

import json
import math
import os
import random
import threading
import time

import fsspec
import jax.numpy as jnp
import numpy as np
import pytest
import ticks
import toy

import monsess as ms
from monsess.records import Follower, Metrics
from monsess.records.events import Events
from monsess.records.lines import decode, encode
from monsess.records.streams import Stream
from monsess.records.values import Logged
from monsess.records.writer import Records
from monsess.storage import Storage


def start(step: int, restored: int | None = None, time: float = 0.0) -> dict[str, object]:
    return {"event": "start", "step": step, "time": time, "restored_from": restored}


def scalars(step: int, **values: float) -> dict[str, object]:
    return {"step": step, "time": 1.0, "scalars": values}


def points(metrics: Metrics, tag: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in metrics.curves[tag]]


# ---- lines


def test_numbers_that_json_does_not_have_survive():
    record = scalars(3, a=math.nan, b=math.inf, c=-math.inf, d=0.1)
    line = encode(record)
    assert json.loads(line.decode(), parse_constant=pytest.fail)["scalars"]["b"] == "Infinity"
    found = decode(line)
    assert math.isnan(found["scalars"].pop("a"))
    assert found["scalars"] == {"b": math.inf, "c": -math.inf, "d": 0.1}


def test_a_text_that_names_a_number_stays_a_text():
    assert decode(encode({"event": "end", "step": 1, "text": "NaN"}))["text"] == "NaN"


@pytest.mark.parametrize("line", [b"", b"{", b"[1]", b"7", b'{"step": "1"}', b'{"scalars": {}}', b"\xff\xfe"])
def test_what_is_no_record_is_skipped(line):
    assert decode(line) is None


# ---- reading


def test_a_start_voids_what_was_recorded_of_later_steps():
    records = [start(0), *(scalars(step, loss=step) for step in range(1, 9)), start(5, 5)]
    records += [scalars(step, loss=10 * step) for step in range(6, 13)]
    metrics = Metrics(records)
    assert points(metrics, "loss") == [*((s, s) for s in range(1, 6)), *((s, 10 * s) for s in range(6, 13))]
    assert [attempt.last_step for attempt in metrics.attempts] == [8, 12]
    assert len(metrics.events) == 2


def test_a_tag_that_only_a_rolled_back_step_had_is_gone():
    metrics = Metrics([start(0), scalars(3, odd=1.0), start(2, 2)])
    assert metrics.curves == {}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_logged_in_whatever_order_what_a_restart_undoes_is_gone(seed):
    choose = random.Random(seed)
    records, expected = [start(0)], {}
    for _ in range(60):
        step = choose.randrange(30)
        if choose.random() < 0.2:
            records.append(start(step, step))
            expected = {one: value for one, value in expected.items() if one <= step}
        else:
            records.append(scalars(step, a=len(records)))
            expected[step] = len(records) - 1
    assert dict(points(Metrics(records), "a") if expected else ()) == expected


def test_the_later_value_of_a_step_counts_and_steps_are_in_order():
    metrics = Metrics([start(0), scalars(2, a=1), scalars(1, a=2), scalars(2, a=3)])
    assert points(metrics, "a") == [(1, 2), (2, 3)]


def test_unknown_kinds_and_shapes_do_not_disturb():
    metrics = Metrics([start(0), {"event": "new", "step": 1}, {"step": 2, "scalars": 5}, {"step": 3, "what": 1}])
    assert [event["event"] for event in metrics.events] == ["start", "new"]
    assert metrics.curves == {}


def test_a_directory_that_is_not_there_has_no_records(tmp_path):
    assert ms.read_metrics(tmp_path / "nothing").events == []
    assert ms.read_metrics("memory://records-nothing").curves == {}


def test_a_follower_gives_each_record_once_and_waits_for_the_end_of_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode(scalars(1, a=1)))
    follower = Follower(tmp_path)
    assert [record["step"] for record in follower.new()] == [1]
    assert follower.new() == []
    line = encode(scalars(2, a=2))
    with path.open("ab") as file:
        file.write(line[:9])
        file.flush()
        assert follower.new() == []
        file.write(line[9:])
    assert [record["step"] for record in follower.new()] == [2]


def test_a_copied_directory_reads_in_the_order_of_the_attempts(tmp_path):
    def part(number: int, at: float, step: int) -> None:
        body = encode(start(step, time=at)) + encode(scalars(step + 1, a=at))
        (tmp_path / f"metrics-{number:04d}-x-000000.jsonl").write_bytes(body)

    part(1, 10.0, 0)
    part(2, 30.0, 1)
    (tmp_path / "metrics.jsonl").write_bytes(encode(start(1, time=20.0)) + encode(scalars(2, a=20)))
    metrics = ms.read_metrics(tmp_path)
    assert [event["time"] for event in metrics.events] == [10.0, 20.0, 30.0]
    assert points(metrics, "a") == [(1, 10.0), (2, 30.0)]


# ---- writing


def records(url: object, attempt: str = "a1", **more: object) -> Records:
    options = more.pop("options", None)
    made = Records(str(url), options, attempt, **more)
    made.start(0)
    made.open()
    return made


@pytest.mark.parametrize("tail", [b'{"step": 7, "scal', b'{"step":7,"time":1.0,"scalars":{"a":7}}'])
def test_a_writer_begins_a_new_line_after_a_torn_one(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode(start(0)) + tail)
    writer = Records(str(tmp_path), None, "a2")
    writer.start(9)
    writer.open()
    writer.log(10, Logged({"a": 10}))
    writer.close()
    lines = path.read_bytes().split(b"\n")
    assert lines[1] == tail
    assert points(ms.read_metrics(tmp_path), "a")[-1] == (10, 10)


def test_values_of_host_and_device_arrive_as_they_are(tmp_path):
    writer = records(tmp_path)
    values = {"f": jnp.float32(0.1), "b": jnp.bfloat16(1.5), "i": jnp.int32(2**24 + 1), "yes": jnp.bool_(True)}
    writer.log(1, Logged({**values, "py": 0.1, "np": np.float64(1 / 3), "n": np.int64(2**60), "no": False}))
    writer.close()
    found = {tag: curve[0].value for tag, curve in ms.read_metrics(tmp_path).curves.items()}
    assert found == {
        "f": float(np.float32(0.1)), "b": 1.5, "i": 2**24 + 1, "yes": 1,
        "py": 0.1, "np": 1 / 3, "n": 2**60, "no": 0,
    }  # fmt: skip
    assert list(found) == ["f", "b", "i", "yes", "py", "np", "n", "no"]


@pytest.mark.parametrize(
    ("values", "error"),
    [([1], TypeError), ({1: 2}, TypeError), ({"": 2}, TypeError), ({"a": "1"}, ValueError), ({"a": None}, ValueError),
     ({"a": np.zeros(2)}, ValueError), ({"a": jnp.zeros(2)}, ValueError), ({"a": 1j}, ValueError),
     ({"a": jnp.zeros((), jnp.complex64)}, ValueError)],
)  # fmt: skip
def test_what_is_no_number_is_refused(values, error):
    with pytest.raises(error):
        Logged(values)


def test_a_device_value_is_copied_before_it_is_donated(tmp_path):
    @ms.train_step
    def step(state):
        return state + 1, {}

    with ms.MonitoredTrainingSession(
        lambda: jnp.zeros(()), checkpoint_dir=tmp_path, hooks=[ms.StopAtStepHook(last_step=5)]
    ) as sess:
        while not sess.should_stop():
            sess.run(step)
            sess.log({"state": sess.state})
    assert points(ms.read_metrics(tmp_path), "state") == [(s, s) for s in range(1, 6)]


def test_each_byte_is_uploaded_once_and_no_local_folder_appears(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes: list[int] = []

    def uploaded(steps: int) -> int:
        faults = ms.testing.Faults(directories=False, rename=False, atomic=True)
        name = f"faulty://records-{steps}"
        writer = records(name, options={"faults": faults}, extra=Events("a1"))
        for step in range(1, steps + 1):
            writer.log(step, Logged({"loss": 0.5}))
            if step % 10 == 0:
                assert writer.flush(10)
        writer.close()
        files = fsspec.filesystem("faulty", faults=faults).ls(name.removeprefix("faulty://"))
        assert sum("events.out.tfevents." in entry["name"] for entry in files) == len(files) / 2
        written = sum(1 for operation in faults.log if operation.kind == "write")
        assert written == len(files)  # no object is written twice
        assert len(points(ms.read_metrics(name, {"faults": faults}), "loss")) == steps
        return sum(entry["size"] for entry in files)

    sizes = [uploaded(steps) for steps in (100, 200, 400)]
    assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), rel=0.05)
    assert os.listdir(tmp_path) == []


def test_a_store_that_fails_for_a_while_loses_nothing(caplog):
    faults = ms.testing.Faults()
    writer = records("faulty://records-away", options={"faults": faults}, part_secs=(0.01, 0.01))
    writer.log(1, Logged({"a": 1}))
    assert writer.flush(10)
    faults.fail("write", times=2)
    writer.log(2, Logged({"a": 2}))
    begun = time.monotonic()
    writer.flush(30)
    writer.log(3, Logged({"a": 3}))
    assert writer.flush(30)
    assert time.monotonic() - begun < 20
    writer.close()
    assert points(ms.read_metrics("faulty://records-away", {"faults": faults}), "a") == [(1, 1), (2, 2), (3, 3)]


def test_a_store_that_always_fails_is_said_once_and_holds_nobody(caplog):
    faults = ms.testing.Faults()
    writer = records("faulty://records-full", options={"faults": faults}, part_secs=(0.01, 0.01))
    writer.log(1, Logged({"a": 1}))
    assert writer.flush(10)
    faults.fail("write", times=None, error=PermissionError("no"))
    for step in range(2, 5):
        writer.log(step, Logged({"a": step}))
        assert not writer.flush(10)
    begun = time.monotonic()
    writer.close(5)
    assert time.monotonic() - begun < 5
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("Records could not be written" in text for text in said) == 1
    assert sum("Not all records" in text for text in said) == 1


def test_a_store_that_never_answers_holds_the_end_for_a_bounded_time(caplog):
    faults = ms.testing.Faults()
    writer = records("faulty://records-stuck", options={"faults": faults})
    assert writer.flush(10)
    faults.block("write")
    writer.log(1, Logged({"a": 1}))
    begun = time.monotonic()
    assert not writer.flush(0.2)
    writer.close(0.3)
    assert time.monotonic() - begun < 5
    faults.heal()
    assert "Not all records" in caplog.text


def test_a_directory_that_was_taken_away_is_written_to_no_more(tmp_path):
    lost = threading.Event()

    def check() -> None:
        if lost.is_set():
            raise ms.MonsessError("taken away")

    writer = records(tmp_path, check=check)
    assert writer.flush(10)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    lost.set()
    writer.log(1, Logged({"a": 1}))
    writer.close(5)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_nothing_is_written_before_the_session_may_write(tmp_path):
    writer = Records(str(tmp_path / "run"), None, "a1")
    writer.start(0)
    writer.log(1, Logged({"a": 1}))
    assert writer.flush(0.1)
    assert not (tmp_path / "run").exists()
    writer.close()
    assert not (tmp_path / "run").exists()


def test_an_event_that_is_no_json_is_left_out_alone(tmp_path, caplog):
    writer = records(tmp_path)
    writer.record("odd", 1, what=object())
    writer.record("fine", 2, value=np.float32(0.5), nested={"n": jnp.int32(3)}, nan=[float("nan")])
    writer.close()
    events = ms.read_metrics(tmp_path).events
    assert [event["event"] for event in events] == ["start", "fine"]
    assert (events[1]["value"], events[1]["nested"], events[1]["nan"]) == (0.5, {"n": 3}, ["NaN"])
    assert "A record was left out: TypeError" in caplog.text


def test_parts_become_rarer_with_the_age_of_the_attempt():
    writer = Records("memory://records-age", None, "a1")
    ages = {0: 5, 400: 5, 1000: 10, 3600: 36, 10**6: 300}
    for age, expected in ages.items():
        writer._began = time.monotonic() - age
        assert writer._wait_secs() == pytest.approx(expected, abs=0.1)
    writer.close()


def test_a_disk_that_is_full_in_the_middle_of_a_line_keeps_no_half_of_it(tmp_path, monkeypatch):
    writer = records(tmp_path)
    writer.log(1, Logged({"a": 1}))
    assert writer.flush(10)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))
    writer.log(2, Logged({"a": 2}))
    assert not writer.flush(10)
    monkeypatch.setattr(os, "write", write)
    assert writer.flush(10)
    writer.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


def test_a_part_that_is_tried_again_holds_the_same_bytes(tmp_path):
    """One that was given up may reach the store after all, and after a later one."""
    storage = Storage(f"memory://records-late-{os.getpid()}", tries=1)
    write, tries = storage.write, []

    def late(name, data):
        tries.append((name, data))
        if len(tries) == 1:
            raise ms.StorageError("no answer")
        write(name, data)

    storage.write = late
    stream = Stream(storage, lambda n: f"part-{n}", b"head ")
    stream.add(b"one ")
    with pytest.raises(ms.StorageError):
        stream.flush()
    stream.add(b"two ")
    stream.flush()
    assert stream.size == 0
    assert tries == [("part-0", b"head one "), ("part-0", b"head one "), ("part-1", b"head two ")]


def test_what_is_given_up_while_a_store_is_away_is_no_event(monkeypatch, caplog):
    """Without the start of its attempt, values of a step would be there twice."""
    monkeypatch.setattr("monsess.records.streams._MOST_BYTES", 2000)
    faults = ms.testing.Faults()
    writer = records("faulty://records-bound", options={"faults": faults})
    faults.fail("write", times=None)
    for step in range(1, 200):
        writer.log(step, Logged({"a": step}))
    writer.record("checkpoint", 199)
    assert not writer.flush(30)
    assert writer._lines.size < 2500
    faults.heal()
    assert not writer.flush(30)  # some are lost for good
    writer.close()
    metrics = ms.read_metrics("faulty://records-bound", {"faults": faults})
    assert [event["event"] for event in metrics.events] == ["start", "checkpoint"]
    kept = [step for step, _ in points(metrics, "a")]
    assert kept == list(range(1, len(kept) + 1))
    assert 10 < len(kept) < 199
    assert "Not all records" in caplog.text


def test_what_waits_for_a_store_that_never_answers_is_bounded_in_bytes(monkeypatch, caplog):
    monkeypatch.setattr("monsess.records.writer._MOST_BYTES", 10_000)
    faults = ms.testing.Faults()
    faults.block("list")
    writer = records("faulty://records-images", options={"faults": faults})
    for step in range(100):
        writer.log(step, Logged({"image": ms.summary.Image(jnp.zeros((1, 32, 32, 1), jnp.uint8))}))
    assert len(writer._waiting) < 15
    assert "some are lost" in caplog.text
    writer.close(0.1)
    faults.heal()


def test_a_store_that_did_not_answer_is_not_waited_for_at_every_commit():
    faults = ms.testing.Faults()
    writer = records("faulty://records-behind", options={"faults": faults})
    assert writer.flush(10)
    faults.block("write")
    writer.log(1, Logged({"a": 1}))
    assert not writer.flush(0.2)
    begun = time.monotonic()
    assert not writer.flush(30)
    assert time.monotonic() - begun < 5
    faults.heal()
    ticks.wait_until(lambda: writer.flush(10))
    assert points(ms.read_metrics("faulty://records-behind", {"faults": faults}), "a") == [(1, 1)]
    writer.close()


def test_values_of_all_types_come_to_the_host_in_one_piece():
    types = [
        "bfloat16",
        "float16",
        "float32",
        "float8_e5m2",
        "int4",
        "uint4",
        "int8",
        "uint8",
        "int16",
        "int32",
        "uint32",
    ]
    logged = Logged({name: jnp.asarray(3, name) for name in types} | {"yes": jnp.asarray(True)})
    assert len(logged._packages) == 1
    assert logged.on_host()[0] == {**dict.fromkeys(types, 3), "yes": 1}
    high = {"u": jnp.uint32(2**32 - 1), "i": jnp.int32(-(2**31)), "f": jnp.float32(0.1), "n": jnp.bfloat16(jnp.nan)}
    found = Logged(high).on_host()[0]
    assert math.isnan(found.pop("n"))
    assert found == {"u": 2**32 - 1, "i": -(2**31), "f": float(np.float32(0.1))}


def test_a_tag_that_is_no_utf8_costs_nothing_else(tmp_path, caplog):
    writer = records(tmp_path, extra=Events("a1"))
    writer.log(1, Logged({"\ud800 bad": 1.0, "good": 2.0, "note": ms.summary.Text("\ud800")}))
    writer.log(2, Logged({"good": 3.0}))
    writer.close()
    assert points(ms.read_metrics(tmp_path), "good") == [(1, 2.0), (2, 3.0)]
    assert tensorboards_steps(tmp_path) == {"? bad": [1], "good": [1, 2], "note": [1]}
    assert "left out" not in caplog.text


def tensorboards_steps(folder) -> dict[str, list[int]]:
    """By tag the steps that TensorBoard's own reader finds."""
    module = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")
    found = module.EventAccumulator(str(folder), tensor_size_guidance=dict.fromkeys(("scalars", "text"), 0))
    found.Reload()
    steps = {tag: [event.step for event in found.Tensors(tag)] for tag in found.Tags()["tensors"]}
    return {tag: of_tag for tag, of_tag in steps.items() if of_tag}


# ---- of a session


def train(url: object, last: int, **more: object) -> ms.MonitoredSession:
    hooks = [*more.pop("hooks", ()), ms.StopAtStepHook(last_step=last)]
    with ms.MonitoredTrainingSession(
        toy.init_fn, data=toy.batches(40), checkpoint_dir=url, hooks=hooks, **more
    ) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
    return sess


@pytest.mark.parametrize("url", ["local", "memory"])
def test_a_run_tells_its_story(tmp_path, url):
    url = tmp_path if url == "local" else f"memory://story-{os.getpid()}"
    train(url, 4, save_checkpoint_steps=2)
    train(url, 6, save_checkpoint_steps=2, save_summaries_steps=1)
    metrics = ms.read_metrics(url)
    first, second = metrics.attempts
    assert [event["event"] for event in first.events] == ["start", "step", "checkpoint", "checkpoint", "end"]
    assert (first.events[1]["name"], first.events[1]["engine"]) == (toy.train.name, "pmap")
    assert (first.start["restored_from"], first.start["step"]) == (None, 0)
    assert (second.start["restored_from"], second.start["step"]) == (4, 4)
    assert first.start["run_id"] == second.start["run_id"]
    assert first.start["devices"] == second.start["devices"] > 0
    assert [event["step"] for event in first.checkpoints] == [2, 4]
    assert all(event["bytes"] > 0 and event["seconds"] >= 0 for event in first.checkpoints)
    assert (first.end["reason"], first.end["error"]) == ("LAST_STEP", None)
    assert {"input", "compile", "step", "hooks", "save"} <= set(first.end["seconds"])
    assert "StopAtStepHook" in first.end["hooks"]
    assert [step for step, _ in points(metrics, "loss")] == [1, 5, 6]


def test_an_error_is_recorded_without_credentials(tmp_path):
    class Failing(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            raise ValueError("no way to s3://user:password@host/x")

    with pytest.raises(ValueError, match="no way"):
        train(tmp_path, 4, hooks=[Failing()])
    end = ms.read_metrics(tmp_path).attempts[0].end
    assert end["reason"] == "ERROR"
    assert end["error"] == "ValueError: no way to s3://***@host/x"
    assert b"password" not in (tmp_path / "metrics.jsonl").read_bytes()


def test_a_finished_run_that_is_started_again_writes_nothing(tmp_path):
    train(tmp_path, 3)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    sess = train(tmp_path, 3)
    assert sess.summary()["steps"] == 0
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_records_go_to_the_summary_dir_and_need_no_checkpoints(tmp_path):
    train(None, 3, summary_dir=tmp_path / "curves", save_summaries_steps=1)
    assert [step for step, _ in points(ms.read_metrics(tmp_path / "curves"), "loss")] == [1, 2, 3]
    train(tmp_path / "run", 2, summary_dir=tmp_path / "other")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert ms.read_metrics(tmp_path / "other").attempts[0].end is not None


def test_a_commit_waits_for_the_records_that_led_to_it():
    """Whoever resumes from a checkpoint in a store without append finds the whole curve."""
    url = f"memory://gate-{os.getpid()}"
    seen: list[list[int]] = []

    class Look(ms.CheckpointSaverListener):
        def after_save(self, session, step):
            seen.append([s for s, _ in points(ms.read_metrics(url), "loss") if s <= step])

    hooks = [ms.CheckpointSaverHook(save_steps=3, listeners=[Look()])]
    train(url, 9, hooks=hooks, save_checkpoint_secs=None, save_summaries_steps=1)
    assert seen == [list(range(1, 4)), list(range(1, 7)), list(range(1, 10))]


@pytest.mark.parametrize(
    ("summary_dir", "error", "text"),
    [("", ValueError, "must be a path or a URL"), ("nosuch://x", ms.StorageError, "Check the spelling"),
     ("s3:/x", ValueError, "slash missing"), (5, TypeError, "summary_dir")],
)  # fmt: skip
def test_a_directory_that_can_never_be_written_is_refused_at_once(summary_dir, error, text):
    with pytest.raises(error, match=text):
        ms.MonitoredTrainingSession(toy.init_fn, summary_dir=summary_dir)


def test_another_run_in_the_directory_leaves_nothing_of_the_one_before(tmp_path):
    for last in (5, 2):
        with ms.MonitoredTrainingSession(
            toy.init_fn,
            data=toy.batches(40),
            summary_dir=tmp_path,
            save_summaries_steps=1,
            hooks=[ms.StopAtStepHook(last_step=last)],
        ) as sess:
            if last == 5:
                sess.log({"initial": 1.0}, step=0)
            while not sess.should_stop():
                sess.run(toy.train)
    metrics = ms.read_metrics(tmp_path)
    assert "initial" not in metrics.curves
    assert [step for step, _ in points(metrics, "loss")] == [1, 2]
    assert len({attempt.start["run_id"] for attempt in metrics.attempts}) == 2
    shown = tensorboards_steps(tmp_path)
    assert shown["loss"] == [1, 2]
    assert "initial" not in shown


def test_whoever_loses_patience_while_the_end_waits_leaves_the_directory_free(tmp_path, monkeypatch):
    def interrupted(*args, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("monsess.recording.Recording.end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, 2)
    assert not (tmp_path / "owner.json").exists()
    assert ms.CheckpointStore(tmp_path).steps() == [2]


def test_recovery_inside_the_process_starts_anew_from_the_checkpoint(tmp_path):
    failed = []

    class FailOnce(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.global_step == 5 and not failed:
                failed.append(1)
                raise TimeoutError("passes")

    recovery = ms.Recovery(is_transient=lambda error: isinstance(error, TimeoutError), backoff_secs=0)
    train(tmp_path, 6, hooks=[FailOnce()], save_checkpoint_steps=2, save_summaries_steps=1, recovery=recovery)
    metrics = ms.read_metrics(tmp_path)
    assert [attempt.start["step"] for attempt in metrics.attempts] == [0, 4]
    assert [step for step, _ in points(metrics, "loss")] == list(range(1, 7))


# ---- session.log


class Listener(ms.SessionRunHook):
    def __init__(self):
        self.heard = []

    def log(self, step, scalars):
        assert threading.get_ident() == threading.main_thread().ident
        self.heard.append((step, dict(scalars)))


class Talker(Listener):
    """Logs, and answers what it hears."""

    def after_run(self, run_context, run_values):
        run_context.session.log({"said": run_context.global_step})

    def log(self, step, scalars):
        super().log(step, scalars)


class Echo(Listener):
    def log(self, step, scalars):
        super().log(step, scalars)
        self.session.log({f"echo/{tag}": value for tag, value in scalars.items()}, step)

    def after_create_session(self, session, coord):
        self.session = session


def run_with(*hooks, last=2, body=lambda sess: None, **more):
    @ms.train_step
    def step(state):
        return state + 1, {"loss": state}

    with ms.MonitoredTrainingSession(
        lambda: jnp.zeros(()), hooks=[*hooks, ms.StopAtStepHook(last_step=last)], **more
    ) as sess:
        while not sess.should_stop():
            sess.run(step)
            body(sess)
    return sess


def test_hooks_hear_what_others_log_and_never_themselves():
    talker, listener = Talker(), Listener()
    run_with(talker, listener, save_summaries_steps=None, body=lambda sess: sess.log({"own": jnp.float32(2)}, step=7))
    assert listener.heard == [(1, {"said": 1}), (7, {"own": 2.0}), (2, {"said": 2}), (7, {"own": 2.0})]
    assert talker.heard == [(7, {"own": 2.0})] * 2


def test_a_hook_that_logs_what_it_hears_is_not_called_for_it():
    echo, listener = Echo(), Listener()
    run_with(echo, listener, last=1, save_summaries_steps=None, body=lambda sess: sess.log({"a": 1}))
    assert echo.heard == [(1, {"a": 1})]
    assert listener.heard == [(1, {"echo/a": 1}), (1, {"a": 1})]


def test_the_default_curves_reach_a_hook_without_any_directory():
    listener = Listener()
    run_with(listener, last=3, save_summaries_steps=2)
    assert listener.heard == [(1, {"loss": 0.0}), (2, {"loss": 1.0})]


class Slow(ms.SessionRunHook):
    def log(self, step, scalars):
        time.sleep(0.1)


def test_time_in_a_hook_that_another_one_calls_counts_once():
    sess = run_with(Talker(), Slow(), last=2, save_summaries_steps=None)
    assert sess.summary()["hooks"]["Slow"] >= 0.2
    assert sess.summary()["hooks"]["Talker"] < 0.1


def test_log_is_refused_where_it_does_not_belong(tmp_path):
    with ms.MonitoredTrainingSession(lambda: 0.0, checkpoint_dir=tmp_path) as sess:
        errors = []

        def elsewhere():
            try:
                sess.log({"a": 1})
            except ms.MonsessError as error:
                errors.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "another thread" in errors[0]
        with pytest.raises(ValueError, match="step"):
            sess.log({"a": 1}, step=-1)
    with pytest.raises(ms.SessionClosedError):
        sess.log({"a": 1})


def test_logging_does_not_wait_for_the_device(tmp_path):
    import jax

    def wait(x):
        time.sleep(0.3)
        return np.asarray(x)

    @ms.train_step
    def step(state):
        held = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), state)
        return state + 1, {"loss": held}

    with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), checkpoint_dir=tmp_path) as sess:
        jax.block_until_ready(sess.run(step))
        sess.log({"loss": jnp.zeros(())})  # what is compiled for it
        outputs = sess.run(step)
        begun = time.perf_counter()
        sess.log(outputs)
        assert time.perf_counter() - begun < 0.15
    assert points(ms.read_metrics(tmp_path), "loss")[-1] == (2, 1.0)


def test_hooks_that_are_no_hooks_are_refused_with_log_too():
    class Wrong(ms.SessionRunHook):
        def log(self, scalars):
            pass

    with pytest.raises(ms.HookError, match="log"):
        ms.MonitoredTrainingSession(lambda: 0.0, hooks=[Wrong()])


def test_files_of_records_are_no_checkpoints(tmp_path):
    train(tmp_path, 2, save_summaries_steps=1)
    ticks.wait_until(lambda: (tmp_path / "metrics.jsonl").exists())
    store = ms.CheckpointStore(tmp_path)
    assert store.steps() == [2]
    assert store.verify(2) == []
