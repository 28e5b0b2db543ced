"""The sections of a page but one: curves, where the time went, hooks, environment, numbers, other events."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from monsess.report.curves import Point, groups, numbers, thinned
from monsess.report.markup import card, cell, e, picture, row, swatch, table, took, value_of, whole
from monsess.report.story import PARTS
from monsess.report.view import View
from monsess.report.words import counted, duration_text, moment_text, number_text

#: So many pictures are shown at once; the others are folded.
_OPEN_CHARTS = 16
_COLOURS = 7
_MOST_EVENTS = 200
_MOST_TEXT = 1000
_NO_FACTS = ("event", "step", "time", "run_id", "attempt", "restored_from")
_CONTROLS = (
    '<div class="controls"><span class="choice" role="group" aria-label="Horizontal axis">'
    '<button type="button" data-name="x" data-value="step" aria-pressed="true">Step</button>'
    '<button type="button" data-name="x" data-value="time" aria-pressed="false">Time</button></span>'
    '<span class="choice" role="group" aria-label="Vertical axis">'
    '<button type="button" data-name="y" data-value="linear" aria-pressed="true">Linear</button>'
    '<button type="button" data-name="y" data-value="log" aria-pressed="false">Log</button></span>'
    '<label>Smoothing <input type="range" id="smooth" min="0" max="0.99" step="0.01" value="0"></label></div>'
)


def charts_of(view: View) -> list[dict[str, Any]]:
    """What the script draws as curves."""
    tags = groups([tag for tag, points in view.curves.items() if points])
    return [
        {"title": name, "series": [_series(tag, view.curves[tag]) for tag in group]} for name, group in tags.items()
    ]


def curves(view: View, charts: Sequence[Mapping[str, Any]]) -> str:
    """The pictures of the curves, and what can be changed about them."""
    if not charts:
        return ""
    cards = [_chart(view, i, chart) for i, chart in enumerate(charts)]
    text = f'{_CONTROLS}<div class="charts">{"".join(cards[:_OPEN_CHARTS])}</div>'
    if len(cards) > _OPEN_CHARTS:
        more = counted(len(cards) - _OPEN_CHARTS, "more picture")
        text += f'<details><summary>{more}</summary><div class="charts">{"".join(cards[_OPEN_CHARTS:])}</div></details>'
    series = [one for chart in charts for one in chart["series"]]
    notes = ['<span class="only-mouse">Drag over a picture to zoom, double-click to go back.</span>']
    if len(view.story.attempts) > 1:
        notes.append("Dotted lines: the steps that a restart went on from.")
    if any(one["count"] > len(one["steps"]) + len(one["odd"]["steps"]) for one in series):
        notes.append("Of long curves the picture has the lowest and the highest point of each short stretch.")
    if any(one["odd"]["steps"] for one in series):
        notes.append("✕: a value that is not finite.")
    return f'{text}<p class="hint">{" ".join(notes)}</p>'


def _series(tag: str, points: Sequence[Point]) -> dict[str, Any]:
    curve = thinned(tag, points)

    def columns(some: Sequence[Point]) -> dict[str, Any]:
        values = [p[2] if math.isfinite(p[2]) else number_text(p[2]) for p in some]
        return {"steps": [p[0] for p in some], "times": [p[1] for p in some], "values": values}

    return {"tag": tag, "count": curve.count, **columns(curve.points), "odd": columns(curve.odd)}


def _chart(view: View, i: int, chart: Mapping[str, Any]) -> str:
    keys = (
        f"<span>{swatch(f'c{k % _COLOURS}')}{e(one['tag'])} <b>{number_text(view.curves[one['tag']][-1][2])}</b></span>"
        for k, one in enumerate(chart["series"])
    )
    title = chart["title"]
    return card(
        f'<h3>{e(title)}</h3><div class="keys">{"".join(keys)}</div>', picture(f'data-chart="{i}"', f"Curve of {title}")
    )


def spent_of(view: View) -> dict[str, Any]:
    """What the script draws of the time."""
    spent = view.story.time
    if spent is None:
        return {"wall": 0.0, "parts": []}
    order = [*PARTS, *(name for name in spent.parts if name not in PARTS)]
    grey = {"lost": "lost", "other": "faint", "down": "faint"}
    parts = [
        {"name": name, "seconds": seconds, "colour": grey.get(name, f"c{order.index(name) % _COLOURS}")}
        for name, seconds in spent.parts.items()
    ]
    return {"wall": spent.wall, "parts": parts}


def time_spent(view: View) -> str:
    """Where the time went."""
    spent = view.story.time
    if spent is None or spent.wall <= 0:
        return ""
    rows = [
        row(
            f'<td class="fixed">{swatch(part["colour"])}{e(part["name"])}</td>',
            took(part["seconds"]),
            cell(f"{part['seconds'] / spent.wall:.1%}", "n"),
            cell(PARTS.get(part["name"], ""), "soft what"),
        )
        for part in spent_of(view)["parts"]
    ]
    together = f'<td class="n"><b>{e(duration_text(spent.wall))}</b></td>'
    rows.append(row("<td><b>together</b></td>", together, cell(""), cell("", "what")))
    ended = [attempt for attempt in view.story.attempts if attempt.end is not None]
    note = ""
    if spent.source == "ends" and len(ended) < len(view.story.attempts):
        note = (
            f'<p class="hint">Of the {counted(len(ended), "attempt")} that came to an end; one that is killed cannot '
            "say. A GoodputHook counts on through restarts.</p>"
        )
    bar = picture('data-drawing="share"', "Shares of the time", kind="share")
    return card(bar, table(("part", "time>", "share>", "what it is?"), rows), note)


def hooks(view: View) -> str:
    """The time of each hook."""
    found = view.story.hooks
    if not found:
        return ""
    total = sum(found.values()) or 1.0
    rows = [
        row(cell(name, "mono"), took(seconds), cell(f"{seconds / total:.1%}", "n")) for name, seconds in found.items()
    ]
    bars = picture('data-drawing="hooks"', "Time of each hook", height=46 + 26 * len(found))
    return card(bars, table(("hook", "time>", "share>"), rows))


def environment(view: View) -> str:
    """What the last attempt ran on, and in which attempts that was different."""
    attempts = [attempt for attempt in view.story.attempts if attempt.start]
    if not attempts:
        return ""
    now = _facts_of(attempts[-1].start)
    cells = "".join(f"<div><dt>{e(name)}</dt><dd>{e(value)}</dd></div>" for name, value in now.items())
    changes = []
    for attempt in attempts:
        other = _facts_of(attempt.start)
        differs = [f"{name} {other.get(name, 'unknown')}" for name in now if other.get(name) != now[name]]
        if differs:
            changes.append(row(cell(f"#{attempt.number}", "fixed"), cell(", ".join(differs), "text")))
    return card(f"<dl>{cells}</dl>", table(("attempt", "what was different"), changes) if changes else "")


def _facts_of(start: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in start.items():
        if isinstance(value, Mapping):
            found |= {str(inner): str(text) for inner, text in value.items()}
        elif name not in (*_NO_FACTS, "pid") and value is not None:
            found[name] = str(value)
    return found


def numbers_of_curves(view: View) -> str:
    """First, last, lowest and highest value of each curve."""
    rows = [
        row(
            *(cell(one.tag, "mono"), whole(one.count), value_of(one.first), value_of(one.last), whole(one.last[0])),
            *(value_of(one.low), whole(None if one.low is None else one.low[0])),
            *(value_of(one.high), whole(None if one.high is None else one.high[0])),
        )
        for one in numbers(view.curves)
    ]
    headings = ("value", "points>", "first>", "last>", "at step>", "lowest>", "at step>", "highest>", "at step>")
    return card(table(headings, rows)) if rows else ""


def events(view: View) -> str:
    """Events of kinds that no other section is about."""
    found = view.story.events
    if not found:
        return ""
    rows = []
    for event in found[-_MOST_EVENTS:]:
        rest = ((name, value) for name, value in event.items() if name not in ("event", "step", "time"))
        text = "  ".join(f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in rest)
        when = cell(moment_text(event["time"]), "fixed")
        rows.append(row(whole(event["step"]), when, cell(event["event"], "fixed"), cell(text[:_MOST_TEXT], "text")))
    left_out = f'<p class="hint">The newest {_MOST_EVENTS} of {len(found)}.</p>' if len(found) > _MOST_EVENTS else ""
    return card(table(("step>", "when", "event", "what"), rows), left_out)
