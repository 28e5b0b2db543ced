"""`monsess check-store`: a store that lacks what monsess needs is found out, and nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
from typing import Any

import pytest
from checkpoints import fresh
from command_line import CommandLine, Files

from monsess.commands.check_store import PREFIX, examine, join, remove
from monsess.commands.console import Console
from monsess.commands.probes import ODD_NAMES, PROBES, Bench
from monsess.storage import Storage
from monsess.testing import Faults

SAVE = "save, verify, restore"
NEEDED = {probe.name for probe in PROBES if probe.needed}


@pytest.fixture
def call(capsys) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What is late here is late by more than this."""
    monkeypatch.setattr("monsess.commands.probes._SETTLES_SECS", 0.3)


def examined(faults: Faults, tmp_path, real_save: bool = True) -> dict[str, Any]:
    """What does not hold: texts by name."""
    probes = [probe for probe in PROBES if real_save or probe.name != SAVE]
    url = fresh("faulty")
    bench = Bench(f"{url}/scratch", {"faults": faults}, 1, str(tmp_path))
    findings = examine(bench, probes, Console())
    faults.heal()
    faults.stale_listing_secs = 0
    assert not remove(Storage(url, {"faults": faults}), "scratch")
    assert {finding["name"] for finding in findings if finding["ok"] is None} <= {"rename"}
    return {finding["name"]: finding["found"] for finding in findings if finding["ok"] is False}


@pytest.mark.parametrize("faults", [{"atomic": True}, {"directories": True, "rename": True}])
def test_a_sound_store(faults, tmp_path):
    assert examined(Faults(**faults), tmp_path) == {}


DENIED = PermissionError(errno.EACCES, "Access Denied")
BROKEN = {
    "listings that never settle": (Faults(stale_listing_secs=1000), None, {"list", "visible after write"}),
    "no overwrite": (Faults(overwrite=False), None, {"overwrite"}),
    "empty objects vanish": (Faults(), lambda f: f.lose("write", path="empty/", times=None), {"empty object"}),
    "deletes are lost": (Faults(), lambda f: f.lose("delete", path="/gone/", times=None), {"gone after delete"}),
    "deletes are refused": (Faults(), lambda f: f.fail("delete", times=None, error=DENIED), {"gone after delete"}),
    "absent is forbidden": (
        Faults(),
        lambda f: f.fail("read", times=None, error=DENIED, path="never-written"),
        {"absence is told"},
    ),
    "truncated writes": (
        Faults(),
        lambda f: f.truncate("write", keep_bytes=10_000, times=None),
        {"big object", "concurrent upload", SAVE},
    ),
    "truncated reads": (
        Faults(),
        lambda f: f.truncate("read", keep_bytes=500_000, times=None),
        {"big object"},
    ),
    "short writes": (Faults(), lambda f: f.short_write(path="/big/", times=None), {"big object"}),
    "turned bits": (Faults(), lambda f: f.corrupt("write", path="/many/5"), {"concurrent upload"}),
    "old bytes": (Faults(), lambda f: f.lose("write", n=2, path="again/", times=None), {"overwrite"}),
    "no copy": (Faults(), lambda f: f.fail("copy", times=None, error=DENIED), {"copy"}),
    "lost commits": (
        Faults(),
        lambda f: f.lose("write", path="commit.json", times=None),
        {SAVE},
    ),
    "damaged sessions": (
        Faults(),
        lambda f: f.corrupt("write", path="session.json", times=None),
        {SAVE},
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_store(case, tmp_path):
    faults, break_it, expected = BROKEN[case]
    if break_it is not None:
        break_it(faults)
    failed = examined(faults, tmp_path, real_save=SAVE in expected).keys() & NEEDED
    assert expected <= failed
    if case not in ("listings that never settle", "no overwrite", "deletes are refused"):  # which reach further
        assert failed == expected


@pytest.mark.parametrize(
    ("faults", "name"),
    [(Faults(exclusive_create=False), "exclusive create"), (Faults(), "odd names")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_needed(faults, name, tmp_path):
    if name == "odd names":
        faults.fail("write", path="a*b", times=None, error=DENIED)
    failed = examined(faults, tmp_path, real_save=False)
    assert failed.keys() == {name}
    assert "'a*b'" in failed[name] or name != "odd names"
    assert name not in NEEDED


def test_without_the_foundation_nothing_else_is_tried(tmp_path):
    faults = Faults()
    faults.lose("write", times=None)
    bench = Bench(f"{fresh('faulty')}/x", {"faults": faults}, 1, str(tmp_path))
    findings = examine(bench, PROBES, Console())
    assert "'small' was written and is not found" in findings[0]["found"]
    assert all(finding["ok"] is None and finding["found"] == "not tried" for finding in findings[1:])


@pytest.mark.parametrize("error", [DENIED, FileNotFoundError("The specified bucket does not exist")])
def test_what_cannot_be_written_at_all_says_nothing_about_the_store(error, call, monkeypatch):
    """Missing rights, a missing bucket, no connection: one line, and the status for "could not look"."""
    faults = Faults()
    faults.fail("write", times=None, error=error)
    monkeypatch.setattr("monsess.commands.check_store.storage_options", lambda file: {"faults": faults})
    monkeypatch.setattr("monsess.storage.time.sleep", lambda secs: None)
    status, out, err = call("check-store", fresh("faulty"), "--size-mb", 1)
    assert (status, out) == (3, "")
    assert err.startswith("monsess: Could not write 'small'")
    assert str(error) in err
    assert err.count("\n") == 1


def test_listings_that_lag_behind_are_slow_and_no_reason_for_distrust(tmp_path, monkeypatch):
    """What a run commits it also remembers in run.json: see test_save_errors.py."""
    monkeypatch.setattr("monsess.commands.probes._SETTLES_SECS", 60)
    monkeypatch.setattr("monsess.commands.probes._POLL_SECS", 0.02)
    failed = examined(Faults(stale_listing_secs=0.15), tmp_path)
    assert failed.keys() == {"listed at once"}
    assert "listings lag behind by 0." in failed["listed at once"]


@pytest.mark.parametrize("kind", ["local", "there already", "memory", "dir"])
def test_the_command(kind, call, tmp_path):
    url = {"memory": fresh("memory"), "dir": f"dir://inner::{fresh('memory')}"}.get(kind, str(tmp_path / "run"))
    if kind == "there already":
        Files(url).write("300/commit.json", b"{}")
    before = Files(url).names()
    status, found = call.document("check-store", url, "--size-mb", 1)
    assert (status, found["trusted"], found["left_behind"]) == (0, True, [])
    assert {check["name"] for check in found["checks"] if check["ok"] is False} == set()
    assert found["figures"].keys() == {
        *("write_ms", "list_ms", "read_ms", "upload_mb_s", "download_mb_s"),
        *("parallel_upload_mb_s", "parallel_download_mb_s"),
    }
    assert Files(url).names() == before
    assert os.path.exists(tmp_path / "run") == (kind == "there already")


def test_what_it_says(call, tmp_path, monkeypatch):
    monkeypatch.setenv("MONSESS_STORAGE_OPTIONS", json.dumps({"root": str(tmp_path), "faults": {"overwrite": False}}))
    Files(f"{tmp_path}/x").write(f"{PREFIX}dead/small", b"")
    status, out, err = call("check-store", "faulty://x", "--size-mb", 1)
    assert (status, err) == (1, "")
    assert "✗ overwrite: Could not write 'again/object'" in out or "FAIL overwrite" in out
    assert f"an earlier check was killed and left {PREFIX}dead behind" in out
    assert out.endswith("faulty://x must not be trusted with checkpoints: 'overwrite', 'save, verify, restore'\n")
    assert [name for name in os.listdir(tmp_path / "x") if name != f"{PREFIX}dead"] == []


def test_a_store_that_cannot_be_reached(call):
    for url, status in (("nosuch://x", 3), ("s3:/x", 2), ("", 2)):
        found, out, err = call("check-store", url)
        assert (found, out) == (status, ""), url
        assert err.startswith("monsess: ")
        assert err.count("\n") == 1


def test_all_names_differ_as_files():
    assert len({name.casefold() for name in ODD_NAMES}) == len(ODD_NAMES)


def test_join():
    for url, expected in {
        "/a/b": "/a/b/x",
        "rel/": "rel/x",
        "s3://bucket/runs//": "s3://bucket/runs/x",
        "memory://": "memory://x",
        "file:///": "file:///x",
        "simplecache::s3://bucket/run": "simplecache::s3://bucket/run/x",
        "dir://inner::memory://a": "dir://inner/x::memory://a",
    }.items():
        assert join(url, "x") == expected
