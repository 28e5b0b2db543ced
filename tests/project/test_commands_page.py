"""The command line is documented: its page and its files name every command."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from monsess.commands import COMMANDS, parser

ROOT = Path(__file__).resolve().parents[2]


def subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def test_the_page_names_everything():
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    for name, below in subparsers().items():
        section = re.search(rf"^## `monsess {name} .*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        assert section, name
        flags = [flag for action in below._actions for flag in action.option_strings if flag.startswith("--")]
        missing = [flag for flag in flags if flag not in section[0] and flag not in page.partition("## ")[0]]
        assert missing == [], name


def test_every_command_is_one_file():
    files = {path.stem for path in (ROOT / "monsess" / "commands").glob("*.py")}
    assert {command.module for command in COMMANDS} <= files
