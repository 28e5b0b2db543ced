"""`monsess ls`, `show`, `verify` and `diff`: what they say, and their exit status."""

from __future__ import annotations

import json
import os
import re

import jax
import numpy as np
import pytest
from checkpoints import fresh, save, saver, snapshot, toy
from command_line import CommandLine, Files

import monsess as ms
from monsess.checkpoint import CheckpointStore


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path) -> str:
    return str(tmp_path / "run") if request.param == "local" else fresh("memory")


@pytest.fixture
def call(capsys) -> CommandLine:
    return CommandLine(capsys)


def test_ls(url, call):
    store = save(url, 9, 10, 100)
    # On a local path a step never appears without its commit record: there it was lost.
    unfinished = "unfinished" if url.startswith("memory:") else "damaged"
    store.pin(10)
    files = Files(url)
    files.write("100/commit.json", b"{}")
    files.write("11/_CHECKPOINT_METADATA", b"{}")
    files.write("12/session.json", json.dumps({"run_id": "run", "attempt": "a1"}).encode())
    files.write("aside-7-a1/session.json", b"{}")
    files.write("notes/today", b"")
    status, out, err = call("ls", url)
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines()[1:6]]
    assert [row[0] for row in rows] == ["9", "10", "11", "12", "100"]
    assert "committed  run  a1" in out.replace("        ", "")
    for text in (
        "committed, pinned",
        "foreign",
        unfinished,
        "damaged",
        "2 committed steps",
        "not steps: aside-7-a1, notes\n",
    ):
        assert text in out
    assert "owner: none" in out

    status, found = call.document("ls", url)
    assert status == 0
    assert [(row["step"], row["state"], row["pinned"]) for row in found["steps"]] == [
        (9, "committed", False),
        (10, "committed", True),
        (11, "foreign", False),
        (12, unfinished, False),
        (100, "damaged", False),
    ]
    assert found["steps"][0]["size"] == sum(len(files.read(f"9/{n}")) for n in files.names("9") if n != "commit.json")
    assert found["steps"][3]["run_id"] == "run"
    assert found["other_folders"] == ["aside-7-a1", "notes"]

    status, found = call.document("ls", url, "-n", 2)
    assert status == 1, "neither of the two is committed"
    assert [row["step"] for row in found["steps"]] == [12, 100]
    assert found["left_out"] == 3


def test_ls_shows_metrics(url, call):
    writer = saver(CheckpointStore(url))
    writer.submit(snapshot(5, metrics={"loss": 0.25, "eval/accuracy": 0.5}))
    writer.wait()
    writer.close()
    assert "eval/accuracy=0.5 loss=0.25" in call("ls", url)[1]
    assert call.document("ls", url)[1]["steps"][0]["metrics"] == {"loss": 0.25, "eval/accuracy": 0.5}


def test_nothing_there(url, call):
    for command in (["ls"], ["show"], ["verify"], ["verify", "--all"], ["diff", "newest", "newest"], ["pin", "newest"]):
        status, out, err = call(command[0], url, *command[1:])
        assert status == 1, command
        what = "no committed checkpoint" if url.startswith("memory:") else f"There is no directory {url}"
        assert what in out + err
    assert call.document("ls", url)[1]["steps"] == []
    status, out, err = call("unlock", url)
    if url.startswith("memory:"):  # where a folder without an object is as good as none
        assert (status, out) == (0, f"nobody owned {url}\n")
    else:
        assert (status, out, err) == (1, "", f"monsess: There is no directory {url}\n")
    assert not Files(url).names()


def test_a_step_in_the_place_of_its_directory(url, call):
    save(url, 5)
    for command in (["ls"], ["show"], ["verify"], ["diff", 1, 2], ["pin", 5], ["prune", "--keep-last", 1]):
        status, out, err = call(command[0], f"{url}/5", *command[1:])
        assert status == 1, command
        assert f"{url}/5 is a step itself: monsess show {url} 5" in out + err
    for look in (ms.latest_checkpoint, ms.load_checkpoint):
        with pytest.raises(ms.StorageError, match=f"is a step itself: expected {re.escape(url)}, and the step 5"):
            look(f"{url}/5")


def test_a_damaged_step_is_not_named_among_the_committed_ones(url, call):
    """Also where run.json remembers it as committed."""
    store = save(url, 5, 10, 15)
    store._remember("run", list(store._survey().committed.values()))
    Files(url).write("10/commit.json", b"torn")
    for command in (["show", 10], ["pin", 10], ["diff", 10, 15]):
        status, out, err = call(command[0], url, *command[1:])
        assert (status, out) == (1, ""), command
        assert f"Step 10 in {url} is damaged: commit.json is not valid" in err
    Files(url).fs.rm(f"{Files(url).root}/10/commit.json")
    for command in (["show", 10], ["pin", 10], ["diff", 10, 15]):
        status, out, err = call(command[0], url, *command[1:])
        assert (status, out) == (1, ""), command
        assert err == f"monsess: Step 10 in {url} is damaged: commit.json is missing.\n"
    assert "committed: 5, 15." in call("show", url, 7)[2]


def test_a_commit_record_that_cannot_be_read_hides_nothing(call, tmp_path):
    url = str(tmp_path / "run")
    save(url, 5, 10, 15)
    os.unlink(f"{url}/10/commit.json")
    os.mkdir(f"{url}/10/commit.json")  # as unreadable to root as to anybody
    status, out, err = call("ls", url)
    assert status == 3
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["5", "10", "15"]
    assert "unreadable" in out
    assert "2 committed steps" in out
    assert err.startswith("monsess: Could not read '10/commit.json'")
    assert err.count("\n") == 1
    status, found = call.document("ls", url)
    assert status == 3
    assert [row["state"] for row in found["steps"]] == ["committed", "unreadable", "committed"]
    assert found["steps"][1]["size"] is None


def test_where_every_step_is_damaged_the_newest_are_named(url):
    save(url, 1, 2, 3, 4, 5)
    for step in (1, 2, 3, 4, 5):
        Files(url).write(f"{step}/commit.json", b"torn")
    with pytest.raises(ms.DamagedCheckpointError) as caught:
        ms.load_checkpoint(url)
    text = str(caught.value)
    assert re.findall(r"step (\d)", text) == ["5", "4", "3"]
    assert f", and 2 more: monsess verify --all {url}. Bring" in text
    assert "restore_step" not in text, "there is no sound step to choose"
    with pytest.raises(ms.DamagedCheckpointError, match="restore_step"):
        ms.load_checkpoint(url, step=4)


def test_keys_have_no_distance(call):
    url = fresh("memory")
    for step in (1, 2):
        writer = saver(CheckpointStore(url))
        writer.submit(snapshot(step, {"key": jax.random.key(step)}))
        writer.wait()
        writer.close()
    (row,) = call.document("diff", url, 1, 2)[1]["differences"]
    assert (row["differing"], row["max_abs"], row["max_ulp"]) == (1, None, None)


def test_show(url, call):
    state = {**toy(5), "key": jax.random.key(0), "rate": 0.5, "none": None}
    writer = saver(CheckpointStore(url))
    session = {"hooks": {"StopAtStepHook": {"goal": 9}}, "input": {"consumed": 5}, "odd": float("nan")}
    writer.submit(snapshot(5, state, session=session))
    writer.wait()
    writer.close()
    status, out, err = call("show", url)
    assert (status, err) == (0, "")
    for text in ("step 5 in", "run, attempt a1", 'StopAtStepHook: {"goal": 9}', "consumed: 5", "threefry2x32"):
        assert text in out
    status, found = call.document("show", url, 5)
    assert status == 0
    leaves = {leaf["path"]: leaf for leaf in found["leaves"]}
    assert leaves["params/w"] == {
        "path": "params/w",
        "kind": "array",
        "shape": [4, 3],
        "dtype": "float32",
        "key_impl": None,
        "bytes": 48,
    }
    assert (leaves["key"]["kind"], leaves["key"]["key_impl"]) == ("key", "threefry2x32")
    assert (leaves["rate"]["kind"], leaves["rate"]["bytes"]) == ("python", None)
    assert found["session"]["hooks"] == {"StopAtStepHook": {"goal": 9}}
    assert found["session"]["odd"] == "nan", "a program gets JSON and no extension of it"
    assert call("show", url, 4)[::2] == (1, f"monsess: Step 4 in {url} is not a committed checkpoint; committed: 5.\n")
    files = Files(url)
    files.damage("5/session.json")
    status, out, err = call("show", url, 5)
    assert (status, out) == (1, "")
    assert "session.json does not hold the bytes" in err


def test_verify(url, call):
    save(url, 5, 10, 15)
    assert call("verify", url)[0] == 0
    assert [row["step"] for row in call.document("verify", url)[1]["steps"]] == [15]
    status, out, _ = call("verify", url, "--all")
    assert status == 0
    assert f"3 steps in {url} sound: every byte is what was committed\n" in out
    assert out.endswith("a restart takes step 15\n")
    files = Files(url)
    name = files.data_file(10)
    files.damage(name)
    files.write("5/commit.json", b"torn")
    status, found = call.document("verify", url, "--all")
    assert status == 1
    assert not found["sound"]
    assert [row["result"] for row in found["steps"]] == ["damaged", "damaged", "sound"]
    assert found["steps"][1]["problems"] == [f"{name[3:]} does not hold the bytes that were committed"]
    assert call("verify", url, "--all")[1].endswith("a restart takes step 15\n")
    files.damage(files.data_file(15))
    assert call("verify", url, "--all")[1].endswith("no step is sound: a restart would end with an error\n")
    assert call("verify", url)[1].endswith(f"if one is sound: monsess verify --all {url}\n")
    files.damage(files.data_file(15))  # which turns the same bit back
    assert call("verify", url, 15)[0] == 0
    assert call("verify", url, 10)[0] == 1
    status, out, _ = call("verify", url, 15, 7)
    assert status == 1
    assert "not committed" in out
    assert "step 7: commit.json is missing" in out
    assert call("verify", url, "--all", 5)[0] == 2


def test_diff(url, call):
    state = toy(1)
    save(url, 5, 10, state=state)
    assert call("diff", url, 5, 10)[0] == 0
    other = fresh("memory")
    changed = {**toy(1), "new": np.zeros(2)}
    changed["params"] = {"w": toy(1)["params"]["w"].copy(), "b": np.arange(4, dtype=np.float32)}
    changed["params"]["w"][0, 0] = np.nextafter(np.float32(1), np.float32(2))
    changed["opt"] = [toy(1)["opt"][0], None]
    save(other, 7, state=changed)
    status, found = call.document("diff", url, "newest", other, 7)
    assert status == 1
    assert not found["same"]
    assert (found["one"]["step"], found["other"]["step"]) == (10, 7)
    rows = {row["leaf"]: row for row in found["differences"] if row["kind"] != "only in other" or row["leaf"] == "new"}
    assert rows["new"]["kind"] == "only in other"
    assert rows["opt/1"]["kind"] == "only in one"
    assert (rows["params/b"]["kind"], rows["params/b"]["other"]) == ("type", "float32[4]")
    assert (rows["params/w"]["differing"], rows["params/w"]["elements"], rows["params/w"]["max_ulp"]) == (1, 12, 1)
    assert {row["leaf"] for row in found["differences"]} == {"new", "opt/1", "params/b", "params/w"}
    status, out, _ = call("diff", url, 5, other, 7)
    assert status == 1
    assert "params/w" in out
    assert "1 of 12" in out
    assert call("diff", url, 5, other, 8)[0] == 1
    assert call("diff", url, 5, other)[0] == 2
    assert call("diff", url, 5, other, 7, 8)[0] == 2
    files = Files(url)
    files.write(files.data_file(5), b"")
    status, out, err = call("diff", url, 5, 10)
    assert (status, out) == (1, "")
    assert "is damaged" in err


def test_python_values_are_shown(call):
    url = fresh("memory")
    save(url, 5, state={"rate": 0.5, "count": 3, "same": 1})
    save(url, 6, state={"rate": 0.25, "count": 10**80, "same": 1})
    _, out, _ = call("diff", url, 5, 6)
    assert "0.5, other: 0.25" in out
    assert "same" not in out
    assert "2 of 3 leaves differ" in out
