"""Find out whether a store can be trusted with checkpoints, and how fast it is, before trusting it.

Everything happens in a folder .monsess-check-<id> in URL, which is removed at the end; nothing else is touched. Each
property that monsess needs is tried out with real objects, and at last two small checkpoints are saved, verified,
restored and deleted. Exit status 1 if a property that is needed does not hold, 3 if the store cannot be reached.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from monsess.commands.console import Console
from monsess.commands.options import Parser, UsageError, add_store, count, storage_options
from monsess.commands.probes import PROBES, Bench, Probe, PropertyFailed
from monsess.errors import MonsessError, StorageError
from monsess.log import mask
from monsess.storage import Storage

PREFIX = ".monsess-check-"
_CLEANING_SECS = 20.0


def configure(parser: Parser) -> None:
    """Add the arguments of ``monsess check-store``."""
    add_store(parser)
    parser.add_argument(
        "--size-mb", type=count, default=64, metavar="N", help="size of the big object in MB (default: 64)"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Check; 0 if everything that is needed holds."""
    options = storage_options(args.storage_options)
    try:
        root = Storage(args.url, options)
    except ValueError as error:
        raise UsageError(str(error)) from error
    with console.progress(f"reaching {root.shown}"):
        earlier = _earlier(root)
    name = f"{PREFIX}{uuid.uuid4().hex[:8]}"
    findings: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="monsess-check-") as local:
            bench = Bench(join(args.url, name), options, args.size_mb, local)
            findings = examine(bench, PROBES, console)
    finally:
        left = True
        try:
            with console.progress("removing what was written"):
                left = remove(root, name)
            if earlier is None:
                _remove_folder(root)
        finally:
            if left:
                console.note(f"{name} in {root.shown} could not be removed: delete it by hand")
    trusted = all(finding["ok"] is not False for finding in findings if finding["needed"])
    console.document(
        {
            "url": root.shown,
            "trusted": trusted,
            "checks": findings,
            "figures": bench.figures,
            "left_behind": [*(earlier or []), *([name] if left else [])],
        }
    )
    _say(console, root.shown, findings, trusted, earlier or [])
    return 0 if trusted else 1


def examine(bench: Bench, probes: Sequence[Probe], console: Console) -> list[dict[str, Any]]:
    """Try the properties out one after another.

    Args:
        bench: Where.
        probes: Which; if the first does not hold, the others are not tried.
        console: For progress.

    Returns:
        One dict per property: ``name``, ``needed``, ``ok`` (None if it was not tried), ``found`` and ``meaning``.

    Raises:
        StorageError: Nothing can be written or read at all: access, the bucket or the connection is missing.
    """
    findings: list[dict[str, Any]] = []
    for number, probe in enumerate(probes, start=1):
        finding = {"name": probe.name, "needed": probe.needed, "ok": None, "found": "", "meaning": probe.meaning}
        findings.append(finding)
        if findings[0]["ok"] is False:
            finding["found"] = "not tried"
            continue
        with console.progress(f"{probe.name} ({number} of {len(probes)})"):
            try:
                found = probe.run(bench)
                finding |= {
                    "ok": None if found is None else True,
                    "found": "does not apply" if found is None else found,
                }
            except PropertyFailed as error:
                finding |= {"ok": False, "found": str(error)}
            except Exception as error:  # whatever a store answers with: it is the finding
                if number == 1 and isinstance(error, StorageError):
                    raise
                text = str(error) if isinstance(error, MonsessError) else f"{type(error).__name__}: {error}"
                finding |= {"ok": False, "found": mask(text, bench.writer._secrets)}
    return findings


def join(url: str, name: str) -> str:
    """The URL of ``name`` in the directory ``url``; in a chain of URLs the first one that has a path tells it.

    Example:
        >>> join("s3://bucket/runs/", "x"), join("dir://inner::memory://a", "x"), join("memory://", "x")
        ('s3://bucket/runs/x', 'dir://inner/x::memory://a', 'memory://x')
    """
    if "://" not in url:
        return os.path.join(url, name)
    parts = url.split("::")
    for i, part in enumerate(parts):
        if "://" in part:
            scheme, _, path = part.partition("://")
            parts[i] = f"{scheme}://{path.rstrip('/')}/{name}" if path.strip("/") else f"{part}{name}"
            break
    return "::".join(parts)


def remove(root: Storage, name: str) -> bool:
    """Delete everything below ``name``; whether something is left.

    An upload that was interrupted may still end, and a listing may be late: it is looked at twice.
    """
    deadline = time.monotonic() + _CLEANING_SECS
    empty = 0
    while empty < 2 and time.monotonic() < deadline:
        try:
            root.delete_tree(name)
            empty = 0 if _is_there(root, name) else empty + 1
        except MonsessError:
            empty = 0
            time.sleep(0.5)
        if empty < 2:
            time.sleep(0.25)
    return empty < 2


def _is_there(root: Storage, name: str) -> bool:
    try:
        return bool(root.walk(name)) or (root.local_path is not None and name in root.list())
    except FileNotFoundError:
        return False


def _earlier(root: Storage) -> list[str] | None:
    """What earlier checks left behind; None if the directory does not exist yet."""
    try:
        return sorted(name for name in root.list() if name.startswith(PREFIX))
    except FileNotFoundError:
        return None


def _remove_folder(root: Storage) -> None:
    if root.local_path is not None:
        try:
            os.rmdir(root.local_path)
        except OSError:
            pass


def _say(
    console: Console, url: str, findings: Sequence[Mapping[str, Any]], trusted: bool, earlier: Sequence[str]
) -> None:
    rows = [
        (
            console.mark(finding["ok"], finding["needed"]),
            finding["name"],
            "does not hold" if finding["ok"] is False else finding["found"],
            finding["meaning"] if finding["needed"] else f"not needed: {finding['meaning']}",
        )
        for finding in findings
    ]
    console.table(("", "PROPERTY", "FOUND", "WHAT DEPENDS ON IT"), rows)
    for finding in findings:
        if finding["ok"] is False:
            console.say(f"{console.mark(False, finding['needed'])} {finding['name']}: {finding['found']}")
    for name in earlier:
        console.say(f"an earlier check was killed and left {name} behind: delete it by hand")
    if trusted:
        console.say(f"{url} can be trusted with checkpoints", "good")
        if url.startswith("memory://"):
            console.say("what is in memory:// ends with the process that put it there")
    else:
        failed = ", ".join(
            repr(finding["name"]) for finding in findings if finding["needed"] and finding["ok"] is False
        )
        console.say(f"{url} must not be trusted with checkpoints: {failed}", "bad")
