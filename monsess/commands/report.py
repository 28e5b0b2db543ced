"""Write a page about a run: curves, where the time went, checkpoints and restarts, hooks, environment.

The page is one HTML file that loads nothing from anywhere. It is made of what the run recorded (metrics.jsonl), of
owner.json and of the commit records; no other file of a step is read, and a run that goes on is not disturbed. Exit
status 1 if there is nothing to tell.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

from monsess.commands.console import Console, size_text
from monsess.commands.options import Parser, UsageError, add_store, nothing_there, open_store
from monsess.errors import MonsessError

_PACKAGE = 'pip install "monsess[report]"'


def configure(parser: Parser) -> None:
    """Add the arguments of ``monsess report``."""
    add_store(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="report.html",
        help="the page, written over (default: report.html); - is standard output",
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Write the page; 0 if there was something to tell."""
    from monsess.report import view_of
    from monsess.report.page import render

    to_stdout = args.output == "-"
    if to_stdout and console.as_json:
        raise UsageError("--json and -o - both want standard output. Write the page to a file.")
    plotly = _plotly()
    store = open_store(args)
    with console.progress(f"reading {store.url}"):
        view = view_of(store)
        if not view.story.attempts and not view.kept:
            raise MonsessError(f"{nothing_there(store)}, and nothing is recorded there")
        text = render(view, plotly)
    if to_stdout:
        console.raw(text)
        return 0
    page = text.encode()
    _write(args.output, page)
    last = view.story.last
    document: dict[str, Any] = {
        "url": store.url,
        "output": args.output,
        "bytes": len(page),
        "run_id": view.run_id,
        "state": view.standing.state,
        "why": view.standing.why,
        "step": None if last is None else last.last_step,
        "attempts": len(view.story.attempts),
        "lost_steps": view.story.lost_steps,
        "lost_seconds": view.story.lost_seconds,
        "checkpoints": len(view.kept),
        "values": {tag: points[-1][2] for tag, points in sorted(view.curves.items()) if points},
    }
    console.document(document)
    console.say(f"{args.output}: {size_text(len(page))}, run {view.run_id or 'unknown'} in {store.url}, {view.state}")
    return 0


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MonsessError(f"The page is drawn by Plotly, which is not installed. Install it: {_PACKAGE}") from error
    return get_plotlyjs()


def _write(path: str, page: bytes) -> None:
    """Put the page in its place in one go, so that nobody ever opens half of it."""
    folder = os.path.dirname(path) or "."
    if os.path.exists(path) and not os.path.isfile(path):  # a device, a pipe: it cannot be replaced, and need not be
        try:
            with open(path, "wb") as file:
                file.write(page)
        except OSError as error:
            raise UsageError(f"could not write the page to {path} ({error})") from error
        return
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".report-", delete=False) as file:
            temporary = file.name
            file.write(page)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise UsageError(f"could not write the page to {path} ({error})") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
