"""The command line is frozen: what scripts of users call and read stays what it is."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import written
from checkpoints import fresh, save

from monsess.commands import COMMANDS, main, parser

ROOT = Path(__file__).resolve().parents[2]

#: Per command its arguments, in order: name or flags, how many (None: one, 0: a switch), default.
COMMON = [("url", None, None), ("--storage-options", None, None), ("--json", 0, False)]
FROZEN = {
    "run": [
        ("-n --processes", None, None),
        ("--max-restarts", None, 0),
        ("--devices-per-process", None, None),
        ("--log-dir", None, None),
        ("-m --module", 0, False),
        ("script", None, None),
        ("args", "...", None),
    ],
    "ls": [*COMMON, ("-n --last", None, None)],
    "report": [*COMMON, ("-o --output", None, "report.html")],
    "tail": [*COMMON, ("-n --last", None, 10), ("--wait", None, 60), ("--interval", None, 1.0)],
    "show": [*COMMON, ("step", "?", "newest")],
    "verify": [*COMMON, ("steps", "*", None), ("--all", 0, False)],
    "diff": [*COMMON, ("step", None, None), ("other", "+", None), ("--other-storage-options", None, None)],
    "pin": [*COMMON, ("steps", "+", None), ("--remove", 0, False)],
    "prune": [
        *COMMON,
        ("--keep-last", None, None),
        ("--keep-best", None, []),
        ("--keep-every-steps", None, None),
        ("--keep-every-hours", None, None),
        ("--dry-run", 0, False),
        ("--yes", 0, False),
        ("--force", 0, False),
        ("--no-verify", 0, False),
    ],
    "unlock": [*COMMON, ("--force", 0, False)],
    "check-store": [*COMMON, ("--size-mb", None, 64)],
    "evaluate": [
        *COMMON,
        ("target", None, None),
        ("--once", 0, False),
        ("--step", None, None),
        ("--all", 0, False),
        ("--timeout", None, None),
        ("--interval", None, 0.0),
        ("--max", None, None),
        ("--until-step", None, None),
        ("--log-dir", None, None),
        ("--no-note", 0, False),
    ],
}
#: Per command the keys of its JSON document.
KEYS = {
    "ls": {"url", "steps", "left_out", "other_folders", "owner", "run", "runs"},
    "report": {
        *("url", "output", "bytes", "run_id", "state", "why", "step", "attempts", "lost_steps", "lost_seconds"),
        *("checkpoints", "values"),
    },
    "show": {
        *("url", "step", "run_id", "attempt", "time", "started", "size", "files", "metrics", "pinned"),
        *("leaves", "session"),
    },
    "verify": {"url", "sound", "steps"},
    "diff": {"one", "other", "same", "leaves", "differences"},
    "pin": {"url", "steps", "pinned"},
    "prune": {"url", "dry_run", "deleted", "kept", "freed"},
    "unlock": {"url", "removed"},
    "check-store": {"url", "trusted", "checks", "figures", "left_behind"},
    "evaluate": {"url", "evaluations"},
}
ROWS = {
    ("ls", "steps"): {"step", "state", "pinned", "time", "size", "run_id", "attempt", "metrics"},
    ("ls", "runs"): {
        *("folder", "checkpoints", "newest", "unreadable", "state", "why", "step", "heard", "run_id"),
    },
    ("show", "leaves"): {"path", "kind", "shape", "dtype", "key_impl", "bytes"},
    ("verify", "steps"): {"step", "result", "problems", "files", "size", "seconds"},
    ("prune", "kept"): {"step", "because"},
    ("check-store", "checks"): {"name", "needed", "ok", "found", "meaning"},
    ("evaluate", "evaluations"): {"step", "metrics", "batches", "seconds"},
}


#: `monsess tail` writes a line of JSON per record, as the run wrote it: metrics.jsonl is its format.
ABOUT_A_DIRECTORY = [command for command in COMMANDS if command.takes_url and command.name != "tail"]


def subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def test_the_arguments():
    found = {
        name: [
            (" ".join(a.option_strings) or a.dest, a.nargs, a.default)
            for a in below._actions
            if not isinstance(a, argparse._HelpAction)
        ]
        for name, below in subparsers().items()
    }
    assert found == FROZEN
    assert [command.name for command in COMMANDS] == list(FROZEN)


@pytest.mark.parametrize("command", ABOUT_A_DIRECTORY, ids=lambda command: command.name)
def test_the_documents(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a page goes
    url = fresh("memory")
    save(url, 5, 10)
    assert main([command.name, url, *command.example, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.keys() == KEYS[command.name]
    for (name, key), keys in ROWS.items():
        if name == command.name and (name, key) != ("ls", "runs"):
            assert document[key]
            assert all(row.keys() == keys for row in document[key])


def test_the_document_about_runs(capsys):
    url = fresh("memory")
    written.write(f"{url}/one", written.three_kills())
    assert main(["ls", url, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.keys() == KEYS["ls"]
    assert [row.keys() for row in document["runs"]] == [ROWS["ls", "runs"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_says_what_it_does(command, capsys):
    assert main([command.name, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Exit status" in text or command.name in ("show", "pin")
    assert all(action.help for action in subparsers()[command.name]._actions)
