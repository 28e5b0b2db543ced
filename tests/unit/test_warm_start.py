"""`Scaffold(warm_start_from=...)` on checkpoints of monsess; those of plain Orbax are in test_orbax_both_ways.py."""

from __future__ import annotations

import pathlib
import uuid
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import save

import monsess as ms
from monsess.warm_start import warm_started


def warm(state: Any, url: Any, *patterns: str, options: Any = None, **more: Any) -> Any:
    scaffold = ms.Scaffold(warm_start_from=url, warm_start_paths=patterns, warm_start_options=options)
    return warm_started(state, scaffold.finalize(), ms.CheckpointOptions(**more))


def stored() -> dict[str, Any]:
    return {
        "params": {"w": jnp.full((2, 3), 7.0), "b": jnp.array([-0.0, 1e-40, 3.0], jnp.bfloat16)},
        "head": jnp.ones(5),
        "key": jax.random.key(3),
        "count": 41,
        "rate": 0.1,
    }


def fresh() -> dict[str, Any]:
    return {
        "params": {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3, jnp.bfloat16)},
        "head": jnp.zeros(9),
        "key": jax.random.key(0),
        "count": 0,
        "rate": 0.0,
    }


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path):
    place = str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    save(place, 3, state=jax.tree.map(lambda x: x, stored() | {"count": 1}))
    save(place, 8, state=stored())
    return place


def test_only_the_leaves_of_the_patterns_are_taken(url):
    begin = fresh()
    state = warm(begin, url, "params/*", "key", "count")
    assert np.asarray(state["params"]["w"]).tolist() == np.full((2, 3), 7.0).tolist()
    assert np.asarray(state["params"]["b"]).tobytes() == np.asarray(stored()["params"]["b"]).tobytes()
    assert jax.random.key_data(state["key"]).tolist() == jax.random.key_data(jax.random.key(3)).tolist()
    assert state["count"] == 41
    assert state["head"] is begin["head"]
    assert state["rate"] == 0.0


def test_a_step_can_be_named(url):
    assert warm(fresh(), f"{url}/3", "count")["count"] == 1
    assert warm(fresh(), f"{url}/8/", "count")["count"] == 41


def test_a_path_object_names_a_directory(tmp_path):
    save(str(tmp_path), 3, state=stored())
    assert warm(fresh(), pathlib.Path(tmp_path), "count")["count"] == 41


def test_a_damaged_step_is_passed_over_and_never_taken_when_it_is_named(tmp_path, caplog):
    save(str(tmp_path), 3, state=stored() | {"count": 1})
    save(str(tmp_path), 8, state=stored())
    session = tmp_path / "8" / "session.json"
    session.write_bytes(session.read_bytes().replace(b"41", b"42").replace(b"0x29", b"0x2a"))
    assert warm(fresh(), str(tmp_path), "count")["count"] == 1
    assert "Damaged checkpoint" in caplog.text
    with pytest.raises(ms.DamagedCheckpointError):
        warm(fresh(), str(tmp_path / "8"), "count")


def test_a_step_without_its_commit_is_not_read_as_plain_orbax(tmp_path):
    save(str(tmp_path), 3, state=stored())
    (tmp_path / "3" / "commit.json").unlink()
    for place in (tmp_path, tmp_path / "3"):
        with pytest.raises(ms.MonsessError, match=r"\b3\b.*commit|no committed"):
            warm(fresh(), str(place), "count")


def test_a_step_that_was_moved_aside_is_refused(tmp_path):
    save(str(tmp_path), 3, state=stored()).set_aside(3, "a")
    with pytest.raises(ms.StateMismatchError, match="under its number"):
        warm(fresh(), str(tmp_path / "aside-3-a"), "count")


def test_the_error_lists_exactly_what_differs(url):
    live = fresh() | {
        "new": jnp.zeros(2),
        "key": jax.random.key(0, impl="rbg"),
        "params": {"w": jnp.zeros((2, 3), jnp.float16), "b": jnp.zeros(3, jnp.bfloat16)},
        "rate": 1,
    }
    with pytest.raises(ms.StateMismatchError) as caught:
        warm(live, url, "*")
    listed = str(caught.value).split("memory://")[-1].split(": ", 1)[1].split(". Leave")[0]
    assert listed.split("; ") == [
        "head is float32[9], stored float32[5]",
        "key is PRNG key rbg[], stored PRNG key threefry2x32[]",
        "new is not stored there",
        "params/w is float16[2, 3], stored float32[2, 3]",
        "rate is int32[], stored Python float",
    ]


def test_convert_casts_what_keeps_its_value(url):
    live = {"params": {"w": jnp.zeros((2, 3), jnp.float16)}, "count": jnp.zeros((), jnp.int8)}
    state = warm(live, url, "*", convert=True)
    assert state["params"]["w"].dtype == np.float16
    assert (state["count"].dtype, state["count"].item()) == (np.int8, 41)
    with pytest.raises(ms.StateMismatchError, match=r"rate is int32\[\], and 0.1 does not fit into int32"):
        warm({"rate": 0}, url, "*", convert=True)


def test_every_pattern_has_to_match(url):
    with pytest.raises(ms.StateMismatchError, match=r"matches 'prams/\*' of .*Its leaves: count, head, key, params/b"):
        warm(fresh(), url, "prams/*", "count")
    with pytest.raises(ms.StateMismatchError, match="No leaf of the state matches anything"):
        warm(fresh(), url)


def test_nothing_there_and_no_look_are_two_things(tmp_path):
    with pytest.raises(ms.StateMismatchError, match="holds no checkpoint"):
        warm(fresh(), str(tmp_path / "nowhere"), "count")
    with pytest.raises(ms.StorageError, match="Could not list"):
        warm(fresh(), "nosuchprotocol://bucket/run", "count")


def test_options_reach_the_filesystem_and_no_message():
    faults = ms.testing.Faults()
    faults.fail("list", times=100, error=PermissionError("403 for hunter22"))
    with pytest.raises(ms.StorageError, match="Could not list") as caught:
        warm(fresh(), "faulty://somewhere", "count", options={"faults": faults, "secret": "hunter22"})
    assert "hunter22" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_options_are_copied_along_with_their_url():
    source = ms.Scaffold(warm_start_from="memory://a", warm_start_options={"key": "one"})
    assert ms.Scaffold(copy_from_scaffold=source).warm_start_options == {"key": "one"}
    assert ms.Scaffold(warm_start_from="memory://b", copy_from_scaffold=source).warm_start_options is None
    other = ms.Scaffold(warm_start_from="memory://b", warm_start_options={}, copy_from_scaffold=source)
    assert other.warm_start_options == {}


def test_a_session_starts_warm_once_and_then_restores(tmp_path):
    save(str(tmp_path / "old"), 8, state=stored())

    @ms.train_step
    def up(state):
        return state | {"count": state["count"] + 1}, {}

    for _ in range(2):
        scaffold = ms.Scaffold(fresh, warm_start_from=str(tmp_path / "old"), warm_start_paths=["params/*", "count"])
        with ms.MonitoredTrainingSession(scaffold=scaffold, checkpoint_dir=tmp_path / "new") as sess:
            begun = sess.global_step
            sess.run(up)
            found = jax.device_get(sess.state)
            assert found["count"] == 42 + begun
            assert found["params"]["w"].tolist() == np.full((2, 3), 7.0).tolist()
