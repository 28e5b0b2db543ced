"""What a command says: aligned tables for people, one JSON document for programs, colour on a terminal only."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
import unicodedata
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, TextIO

_COLOURS = {"good": "32", "bad": "31", "warn": "33", "dim": "2", "head": "1"}
_TICK_SECS = 0.5
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


class Cell(str):
    """A text of a table with a style: ``good``, ``bad``, ``warn`` or ``dim``."""

    style: str

    def __new__(cls, text: str, style: str) -> Cell:
        """Attach ``style`` to ``text``."""
        cell = super().__new__(cls, text)
        cell.style = style
        return cell


class Console:
    """Where a command writes: results to standard output, everything else to standard error.

    Args:
        as_json: The result is one JSON document and nothing else.
        out: Standard output.
        err: Standard error.
    """

    def __init__(self, as_json: bool = False, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.as_json = as_json
        self._out = sys.stdout if out is None else out
        self._err = sys.stderr if err is None else err
        colour = os.environ.get("NO_COLOR", "") == "" and os.environ.get("TERM") != "dumb"
        self._out_colour = colour and _is_terminal(self._out)
        self._progress = _is_terminal(self._err)
        self._status = ""
        self._lock = threading.Lock()

    def say(self, text: str = "", style: str = "") -> None:
        """Write a line for people; nothing where JSON is wanted."""
        if not self.as_json:
            self._write(self._styled(_safe(text), style))

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> None:
        """Write an aligned table; a column without any text in it is left out.

        Args:
            headings: One per column.
            rows: Texts, or `Cell` where one has a style.
            right: Per column ``>`` to align it to the right, anything else to the left.
        """
        if self.as_json or not rows:
            return
        used = [i for i in range(len(headings)) if any(row[i] for row in rows)]
        widths = {i: max(_width(_safe(text)) for text in [headings[i], *(row[i] for row in rows)]) for i in used}

        def line(cells: Sequence[str], style: str = "") -> str:
            parts = []
            for i in used:
                text = _safe(cells[i])
                space = " " * (widths[i] - _width(text))
                text = self._styled(text, style or getattr(cells[i], "style", ""))
                parts.append(space + text if right[i : i + 1] == ">" else text + space)
            return "  ".join(parts).rstrip()

        self._write(line(headings, "head"))
        for row in rows:
            self._write(line(row))

    def document(self, content: dict[str, Any]) -> None:
        """Write the one JSON document; nothing where people read."""
        if self.as_json:
            self._write(json.dumps(_finite(content), indent=2, ensure_ascii=True, allow_nan=False))

    def raw(self, text: str) -> None:
        """Write a file that was asked for on standard output, in UTF-8 as on a disk."""
        with self._lock:
            self._clear()
            self._out.flush()
            buffer = getattr(self._out, "buffer", None)
            if buffer is None:
                self._out.write(text)
            else:
                buffer.write(text.encode())
                buffer.flush()

    def note(self, text: str) -> None:
        """Write a line to standard error."""
        with self._lock:
            self._clear()
            self._err.write(f"monsess: {_safe(text)}\n")
            self._err.flush()

    @contextlib.contextmanager
    def progress(self, text: str) -> Iterator[None]:
        """Show ``text`` and the seconds that the block takes, on a terminal only."""
        if not self._progress:
            yield
            return
        done = threading.Event()
        begun = time.monotonic()

        def tick() -> None:
            while not done.wait(_TICK_SECS):
                with self._lock:
                    if not done.is_set():
                        self._show(f"{text} … {time.monotonic() - begun:.0f} s")

        thread = threading.Thread(target=tick, name="monsess-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            with self._lock:
                self._clear()

    def confirm(self, question: str) -> bool | None:
        """Ask on the terminal; None where nobody can answer."""
        if not (_is_terminal(sys.stdin) and self._progress):
            return None
        self._err.write(f"{_safe(question)} [y/N] ")
        self._err.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def mark(self, ok: bool | None, needed: bool = True) -> Cell:
        """The sign of a check that held, failed, or was not made."""
        plain = not _can_encode(self._out, "✓✗–")
        if ok is None:
            return Cell("-" if plain else "–", "dim")
        if ok:
            return Cell("ok" if plain else "✓", "good")
        if not needed:
            return Cell("!", "warn")
        return Cell("FAIL" if plain else "✗", "bad")

    def _styled(self, text: str, style: str) -> str:
        return f"\x1b[{_COLOURS[style]}m{text}\x1b[0m" if style and text and self._out_colour else text

    def _write(self, line: str) -> None:
        with self._lock:
            self._clear()
            self._out.write(line + "\n")

    def _show(self, text: str) -> None:
        self._clear()
        self._status = _safe(text)[: _columns(self._err)]
        self._err.write(self._status)
        self._err.flush()

    def _clear(self) -> None:
        if self._status:
            self._err.write("\r" + " " * _width(self._status) + "\r")
            self._err.flush()
            self._status = ""


def size_text(size: int | None) -> str:
    """A number of bytes for people, in powers of 1000."""
    if size is None:
        return ""
    amount = float(size)
    for unit in _UNITS:
        if amount < 999.5 or unit == _UNITS[-1]:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 99.5 else f"{amount:.1f} {unit}"
        amount /= 1000
    raise AssertionError("unreachable")


def age_text(seconds: float) -> str:
    """How long ago something was, in one unit."""
    if seconds < 0:
        return "in the future"
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def count_text(number: int, noun: str) -> str:
    """``1 step``, ``3 steps``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def time_text(seconds: float) -> str:
    """A moment in local time, with its offset from UTC."""
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
    except (OverflowError, ValueError, OSError):
        return repr(seconds)


def _finite(content: Any) -> Any:
    """``content`` with the numbers that JSON does not have as texts: ``"nan"``, ``"inf"``, ``"-inf"``."""
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return str(content) if isinstance(content, float) and not math.isfinite(content) else content


def _safe(text: str) -> str:
    """``text`` without anything that a terminal would take for a command."""
    if text.isprintable():
        return str(text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def _can_encode(stream: TextIO, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _columns(stream: TextIO) -> int:
    try:
        return max(20, (os.get_terminal_size(stream.fileno()).columns or 80) - 1)
    except (OSError, ValueError):
        return 79
