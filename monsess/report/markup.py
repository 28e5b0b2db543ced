"""The few pieces of HTML of which a page is made; what comes from a run is always escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from monsess.report.curves import Point
from monsess.report.words import duration_text, number_text, whole_text


def e(text: Any) -> str:
    """A text that is nothing but text."""
    return html.escape(str(text), quote=True)


def script_json(facts: Any) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(facts, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def table(headings: Sequence[str], rows: Sequence[str]) -> str:
    """A table; a heading ends in ``>`` over a column of numbers, and in ``?`` over one that a phone has no room for."""
    kinds = {">": ' class="n"', "?": ' class="what"'}
    cells = "".join(f"<th{kinds.get(text[-1:], '')}>{e(text.rstrip('>?'))}</th>" for text in headings)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def row(*cells: str) -> str:
    """A row of a table, of whole cells."""
    return f"<tr>{''.join(cells)}</tr>"


def cell(text: Any, kind: str = "") -> str:
    """A cell; ``kind`` is its class: ``n`` for a number, ``fixed`` for one line, ``text``, ``mono``, ``soft``."""
    return f'<td class="{kind}">{e(text)}</td>' if kind else f"<td>{e(text)}</td>"


def whole(value: int | None) -> str:
    """A cell with a whole number."""
    return cell("" if value is None else whole_text(value), "n")


def took(seconds: float | None) -> str:
    """A cell with a duration."""
    return cell("" if seconds is None else duration_text(seconds), "n")


def value_of(point: Point | None) -> str:
    """A cell with the value of a point; all its figures show up under the mouse."""
    if point is None:
        return cell("", "n")
    return f'<td class="n" title="{point[2]!r} at step {point[0]}">{e(number_text(point[2]))}</td>'


def swatch(colour: str) -> str:
    """A dot in one of the page's colours."""
    return f'<span class="swatch" style="background:var(--{colour})"></span>'


def picture(drawing: str, label: str, height: int | None = None, kind: str = "") -> str:
    """Where the script of the page draws ``drawing``, an attribute."""
    style = "" if height is None else f' style="height:{height}px"'
    return f'<div class="{f"chart {kind}".strip()}"{style} {drawing} role="img" aria-label="{e(label)}"></div>'


def card(*content: str) -> str:
    """A frame."""
    return f'<div class="card">{"".join(content)}</div>'
