"""Run, be unplugged, resume, prune: on a real S3 server, and the same at ``memory://``, ``file://`` and a plain path.

Credentials are given as storage options and inside the URL; they are nowhere to be found afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
import uuid
from typing import Any

import fsspec
import pytest
import servers
import smoke_run
import toy
from leftovers import beside_bookkeeping
from smoke_run import DIE_AT, LAST_STEP

import monsess as ms


class PowerCut(Exception):
    """What ends an attempt that is not worth a process of its own."""


def unplug() -> None:
    raise PowerCut


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with servers.s3_server(tmp_path_factory.mktemp("s3")) as options:
        yield options


@pytest.fixture(scope="module")
def straight():
    return toy.straight(LAST_STEP)


def objects(url: str, options: dict[str, Any] | None = None) -> dict[str, bytes]:
    """All objects below a URL by their names relative to it."""
    filesystem, root = fsspec.core.url_to_fs(url, **{"skip_instance_cache": True, **(options or {})})
    filesystem.invalidate_cache()
    return {name[len(root) :].strip("/"): filesystem.cat_file(name) for name in filesystem.find(root)}


def assert_resumed_and_pruned(sess: Any, straight: Any, url: str, options: dict[str, Any] | None, lines: str) -> None:
    """The second attempt went on where the first was cut off, ended in the same bits, and left what was to be kept."""
    assert sess.restored_from in (4, 8, 12)
    assert f"restored step {sess.restored_from};" in lines
    assert sess.stop_reason == ms.StopReason.LAST_STEP
    toy.assert_same_bits(sess.state_copy(), straight)

    store = ms.CheckpointStore(url, options)
    assert {24, 25} <= set(store.steps()) <= {24, 25, sess.restored_from}  # what was restored from is kept, too
    assert store.verify(24) == store.verify(25) == []
    assert ms.latest_checkpoint(url, storage_options=options) == LAST_STEP
    loaded = ms.load_checkpoint(url, storage_options=options)
    assert loaded["w"].tobytes() == toy._host(straight["w"]).tobytes()
    below = {name.split("/")[0] for name in objects(url, options)}
    assert beside_bookkeeping(below) == {str(step) for step in store.steps()}, "leftovers"


def assert_not_shown(secrets: tuple[str, ...], texts: dict[str, str | bytes]) -> None:
    shown = {
        (what, secret)
        for what, text in texts.items()
        for secret in secrets
        if secret.encode() in (text if isinstance(text, bytes) else text.encode())
    }
    assert shown == set()


def test_killed_run_resumes_at_s3(s3, straight, caplog):
    caplog.set_level("INFO", logger="monsess")
    url = "s3://smoke/runs/killed"
    child = subprocess.run(
        [sys.executable, "-W", "error", smoke_run.__file__],
        input=json.dumps({"url": url, "options": s3}),
        env={**os.environ, "PYTHONPATH": os.path.dirname(smoke_run.__file__)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert set(ms.CheckpointStore(url, s3).steps()) & {4, 8, 12}

    sess = smoke_run.train(url, s3)
    assert_resumed_and_pruned(sess, straight, url, s3, caplog.text)

    again = smoke_run.train(url, s3)
    assert (again.restored_from, again.summary()["steps"], again.summary()["saves"]) == (LAST_STEP, 0, 0)

    texts = {"first": child.stdout + child.stderr, "later": caplog.text, **objects(url, s3)}
    assert {"run.json", "25/session.json", "25/commit.json"} <= texts.keys()
    assert_not_shown((servers.KEY, servers.SECRET), texts)


@pytest.mark.parametrize("wrong", [{"secret": "wr0ng/s3cret"}, {"key": "AKIAWRONGKEYWRONGKEY"}], ids=["secret", "key"])
def test_refused_credentials_are_not_shown(s3, wrong, caplog):
    caplog.set_level("DEBUG", logger="monsess")
    options = {**s3, **wrong}
    with pytest.raises(ms.StorageError, match="s3://smoke/runs/refused") as refused:
        smoke_run.train("s3://smoke/runs/refused", options)
    text = "".join(traceback.format_exception(refused.value))
    assert "storage_options" in text
    assert_not_shown((options["key"], options["secret"]), {"error": text, "log": caplog.text})


def test_no_bucket_says_so(s3):
    with pytest.raises(ms.StorageError, match="s3://no-such-bucket/run"):
        smoke_run.train("s3://no-such-bucket/run", s3)


URLS = {
    "memory": lambda tmp_path: f"memory://smoke-{uuid.uuid4().hex}/run",
    "file": lambda tmp_path: f"file://{tmp_path}/run",
    "path": lambda tmp_path: str(tmp_path / "run"),
    "password": lambda tmp_path: f"memory://anna:{servers.SECRET.split('/')[0]}@smoke-{uuid.uuid4().hex}/run",
}


@pytest.mark.parametrize("kind", URLS)
def test_unplugged_run_resumes(kind, tmp_path, straight, caplog):
    caplog.set_level("INFO", logger="monsess")
    url = URLS[kind](tmp_path)
    with pytest.raises(PowerCut) as cut:
        smoke_run.train(url, None, unplug)
    first = caplog.text
    assert f"now at step {DIE_AT}; stopped: " in first
    caplog.clear()

    sess = smoke_run.train(url, None)
    assert_resumed_and_pruned(sess, straight, url, None, caplog.text)

    texts = {"first": first, "second": caplog.text, **objects(url)}
    texts["error"] = "".join(traceback.format_exception(cut.value))
    assert_not_shown(("anna:", servers.SECRET.split("/")[0]), texts)
