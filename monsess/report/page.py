"""The page itself: one HTML document that needs nothing but itself.

What it says stands in its text and tables, so that it can be read, searched and printed without any drawing; the
pictures are Plotly's. A content security policy inside the page forbids every request.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from monsess.checkpoint.commit import StepRecord
from monsess.commands.console import size_text
from monsess.report.curves import Point, groups, numbers, thinned
from monsess.report.standing import Standing, is_failure, reason_of
from monsess.report.story import PARTS, Attempt, Commit, Story
from monsess.report.words import counted, duration_text, moment_text, number_text, whole_text

#: So many pictures are shown at once; the others are folded.
_OPEN_CHARTS = 16
_OPEN_ROWS = 12
_MOST_ROWS = 500
_MOST_MARKS = 3000
_MOST_EVENTS = 200
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
_STATES = {
    "running": "Running",
    "stopped": "Finished",
    "failed": "Failed",
    "died": "Died",
    "silent": "Silent",
    "unknown": "Not known",
}


@dataclasses.dataclass(frozen=True)
class View:
    """What a page is about; no credentials are in it.

    Args:
        url: The directory, as it may be shown.
        run_id: The lineage, or None.
        standing: How the run stands.
        story: What its records tell.
        curves: By tag, all points in order of step.
        kept: The checkpoints that are there, by step.
        pinned: Those of them that are pinned.
        made: When the page was made, in seconds since the epoch.
        version: Of monsess.
    """

    url: str
    run_id: str | None
    standing: Standing
    story: Story
    curves: Mapping[str, Sequence[Point]]
    kept: Mapping[int, StepRecord]
    pinned: frozenset[int]
    made: float
    version: str

    @property
    def state(self) -> str:
        """How the run stands, in a few words."""
        return f"{self.standing.state}: {self.standing.why}" if self.standing.why else self.standing.state

    @property
    def name(self) -> str:
        """A short name for a title."""
        return self.url.rstrip("/").rpartition("/")[2] or self.url

    def outcome(self, attempt: Attempt) -> str:
        """``stopped``, ``failed``, ``killed``, ``recovered``, or how the run stands, for the last one."""
        if attempt.end is not None:
            return "failed" if is_failure(attempt) else "stopped"
        if attempt is self.story.last:
            return "died" if self.standing.state in ("stopped", "failed") else self.standing.state
        following = self.story.attempts[attempt.number]
        return "recovered" if following.name is not None and following.name == attempt.name else "killed"


def render(view: View, plotly: str) -> str:
    """The page.

    Args:
        view: What it is about.
        plotly: The source of plotly.js.
    """
    charts = [
        {"title": name, "series": [_series(tag, view.curves[tag]) for tag in tags]}
        for name, tags in groups([tag for tag, points in view.curves.items() if points]).items()
    ]
    facts = {
        "charts": charts,
        "restarts": [{"step": a.first_step, "time": a.begun} for a in view.story.attempts[1:]],
        "spent": _spent(view),
        "timeline": _timeline(view),
        "hooks": [{"name": name, "seconds": seconds} for name, seconds in view.story.hooks.items()],
    }
    sections = [
        ("curves", "Curves", _curves(view, charts)),
        ("time", "Where the time went", _time(view)),
        ("checkpoints", "Checkpoints and restarts", _checkpoints(view)),
        ("hooks", "Hooks", _hooks(view)),
        ("environment", "Environment", _environment(view)),
        ("numbers", "Numbers", _numbers(view)),
        ("events", "Other events", _events(view)),
    ]
    there = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title, _ in there)
    body = "".join(f'<section><h2 id="{anchor}">{title}</h2>{text}</section>' for anchor, title, text in there)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="monsess {_e(view.version)}">
<title>{_e(view.name)} · monsess report</title>
<link rel="icon" href="data:,">
<style>{_part("page.css")}</style>
<script>document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
</script>
</head>
<body>
<header>
<div class="top">{_head(view)}</div>
<nav aria-label="Sections"><div>{links}</div></nav>
</header>
<main>
<noscript><p>The pictures need JavaScript, which is part of this page. The tables say the same without it.</p></noscript>
{_tiles(view)}
{body}
<footer>Made by monsess {_e(view.version)} at {moment_text(view.made)} UTC, from the records in {_e(view.url)}.
All times are UTC. Nothing on this page is loaded from anywhere.</footer>
</main>
<script type="application/json" id="facts">{_json(facts)}</script>
<script>{plotly}</script>
<script>{_part("page.js")}</script>
</body>
</html>
"""


def _part(name: str) -> str:
    return (files("monsess.report") / name).read_text(encoding="utf-8")


def _json(facts: Any) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(facts, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _e(text: Any) -> str:
    return html.escape(str(text), quote=True)


# ---- the head


def _head(view: View) -> str:
    state = view.standing.state
    run = f' · run <span class="mono">{_e(view.run_id)}</span>' if view.run_id else ""
    return (
        '<div class="kicker"><span>monsess report</span><button class="theme" type="button">Theme</button></div>'
        f'<div class="title"><h1>{_e(view.name)}</h1><span class="pill {state}">{_STATES[state]}</span></div>'
        f'<div class="where small"><span class="mono">{_e(view.url)}</span>{run}</div>'
        f'<p class="lead" id="story">{_lead(view)}</p>{_error(view)}'
    )


def _lead(view: View) -> str:
    """The whole story in a few sentences."""
    story, last = view.story, view.story.last
    if last is None:
        return f"Nothing is recorded here. {_e(counted(len(view.kept), 'checkpoint'))} can be found."
    span = duration_text(max(0.0, last.last_time - story.attempts[0].begun))
    tries = "" if len(story.attempts) == 1 else f" in {counted(len(story.attempts), 'attempt')}"
    text = f"Step <b>{whole_text(last.last_step)}</b> was reached{tries} within <b>{span}</b>."
    state = view.standing.state
    if last.end is not None:
        text += f" It ended {moment_text(last.last_time)} UTC: <b>{_e(reason_of(last) or 'no reason given')}</b>."
    elif state == "running":
        text += f" It is running; its last record is {_ago(view, last.last_time)} old."
    elif state in ("died", "silent", "unknown"):
        text += f" It has no end: {_e(view.standing.why)}; its last record is {_ago(view, last.last_time)} old."
    if len(story.attempts) > 1:
        cost = f"{counted(story.lost_steps, 'step')} ({duration_text(story.lost_seconds)}) had to be done again"
        text += f" {counted(len(story.attempts) - 1, 'restart').capitalize()}: {cost if story.lost_steps else 'no step was lost'}."
    return text


def _ago(view: View, moment: float) -> str:
    return duration_text(max(0.0, view.made - moment))


def _error(view: View) -> str:
    last = view.story.last
    error = None if last is None or last.end is None else last.end.get("error")
    return f"<pre>{_e(error)}</pre>" if error and "\n" in str(error).strip() else ""


def _tiles(view: View) -> str:
    story, last = view.story, view.story.last
    tiles: list[tuple[str, str, str]] = []
    if last is not None:
        tiles.append(("Step", whole_text(last.last_step), counted(len(story.attempts), "attempt")))
        running = sum(attempt.seconds for attempt in story.attempts)
        tiles.append(("Time running", duration_text(running), f"since {moment_text(story.attempts[0].begun)}"))
    tiles += _main_value(view)
    rates = [value for _, _, value in view.curves.get("global_step/sec", ()) if math.isfinite(value)]
    if rates:
        middle = sorted(rates)[len(rates) // 2]
        tiles.append(("Speed", f"{number_text(float(f'{rates[-1]:.4g}'))} /s", f"steps; {middle:.4g} in the middle"))
    spent = story.time
    if spent is not None and spent.wall > 0 and "step" in spent.parts:
        share = spent.parts["step"] / spent.wall
        tiles.append(("Spent in steps", f"{share:.1%}", f"of {duration_text(spent.wall)}"))
    if view.kept or story.commits:
        newest = max([*view.kept, *(commit.step for commit in story.commits)])
        written = f"{counted(len(view.kept), 'one', 'ones')} kept, newest is step {whole_text(newest)}"
        tiles.append(("Checkpoints", whole_text(len(story.commits) or len(view.kept)), written.replace("1 one ", "1 ").replace(" ones", "")))
    if len(story.attempts) > 1:
        lost = f"{counted(story.lost_steps, 'step')} lost" if story.lost_steps else "nothing lost"
        tiles.append(("Restarts", whole_text(len(story.attempts) - 1), lost))
    cells = (
        f'<div class="tile"><div class="name">{_e(name)}</div><div class="value">{_e(value)}</div>'
        f'<div class="more">{_e(more)}</div></div>'
        for name, value, more in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>' if tiles else ""


def _main_value(view: View) -> list[tuple[str, str, str]]:
    for name, tags in groups([tag for tag, points in view.curves.items() if points]).items():
        if name in ("global_step/sec", "steps_per_second"):
            continue
        (row,) = numbers({tags[0]: view.curves[tags[0]]})
        more = f"at step {whole_text(row.last[0])}"
        if name == "loss" and row.low is not None:
            more = f"lowest {number_text(row.low[2])} at {whole_text(row.low[0])}"
        return [(tags[0], number_text(row.last[2]), more)]
    return []


# ---- curves


def _series(tag: str, points: Sequence[Point]) -> dict[str, Any]:
    curve = thinned(tag, points)

    def columns(rows: Sequence[Point]) -> dict[str, Any]:
        values = [p[2] if math.isfinite(p[2]) else number_text(p[2]) for p in rows]
        return {"steps": [p[0] for p in rows], "times": [p[1] for p in rows], "values": values}

    return {"tag": tag, "count": curve.count, **columns(curve.points), "odd": columns(curve.odd)}


def _curves(view: View, charts: Sequence[Mapping[str, Any]]) -> str:
    if not charts:
        return ""
    cards = [_chart(view, i, chart) for i, chart in enumerate(charts)]
    controls = (
        '<div class="controls"><span class="choice" role="group" aria-label="Horizontal axis">'
        '<button type="button" data-name="x" data-value="step" aria-pressed="true">Step</button>'
        '<button type="button" data-name="x" data-value="time" aria-pressed="false">Time</button></span>'
        '<span class="choice" role="group" aria-label="Vertical axis">'
        '<button type="button" data-name="y" data-value="linear" aria-pressed="true">Linear</button>'
        '<button type="button" data-name="y" data-value="log" aria-pressed="false">Log</button></span>'
        '<label>Smoothing <input type="range" id="smooth" min="0" max="0.99" step="0.01" value="0"></label></div>'
    )
    text = f'{controls}<div class="charts">{"".join(cards[:_OPEN_CHARTS])}</div>'
    if len(cards) > _OPEN_CHARTS:
        more = f"{counted(len(cards) - _OPEN_CHARTS, 'more picture')}"
        text += f'<details><summary>{more}</summary><div class="charts">{"".join(cards[_OPEN_CHARTS:])}</div></details>'
    notes = []
    if len(view.story.attempts) > 1:
        notes.append("Dotted lines: the steps that a restart went on from.")
    if any(one["count"] > len(one["steps"]) + len(one["odd"]["steps"]) for chart in charts for one in chart["series"]):
        notes.append("Of long curves the picture has the lowest and highest point of each short stretch.")
    if any(one["odd"]["steps"] for chart in charts for one in chart["series"]):
        notes.append("✕: a value that is not finite.")
    return text + (f'<p class="hint">{" ".join(notes)}</p>' if notes else "")


def _chart(view: View, i: int, chart: Mapping[str, Any]) -> str:
    keys = "".join(
        f'<span><span class="swatch" style="background:var(--c{k % 7})"></span>{_e(one["tag"])} '
        f"<b>{_e(number_text(view.curves[one['tag']][-1][2]))}</b></span>"
        for k, one in enumerate(chart["series"])
    )
    return (
        f'<div class="card"><h3>{_e(chart["title"])}</h3><div class="keys">{keys}</div>'
        f'<div class="chart" data-chart="{i}" role="img" aria-label="Curve of {_e(chart["title"])}"></div></div>'
    )


# ---- where the time went


def _spent(view: View) -> dict[str, Any]:
    spent = view.story.time
    if spent is None:
        return {"wall": 0.0, "parts": []}
    order = [*PARTS, *(name for name in spent.parts if name not in PARTS)]
    return {
        "wall": spent.wall,
        "parts": [{"name": n, "seconds": s, "colour": order.index(n) % 7} for n, s in spent.parts.items()],
    }


def _time(view: View) -> str:
    spent = view.story.time
    if spent is None or spent.wall <= 0:
        return ""
    rows = []
    for part in _spent(view)["parts"]:
        name, seconds = part["name"], part["seconds"]
        colour = {"lost": "lost", "other": "faint", "down": "faint"}.get(name, f"c{part['colour']}")
        rows.append(
            f'<tr><td class="fixed"><span class="swatch" style="background:var(--{colour})"></span>{_e(name)}</td>'
            f'<td class="n">{_e(duration_text(seconds))}</td><td class="n">{seconds / spent.wall:.1%}</td>'
            f'<td class="soft">{_e(PARTS.get(name, ""))}</td></tr>'
        )
    rows.append(f'<tr><td><b>together</b></td><td class="n"><b>{_e(duration_text(spent.wall))}</b></td><td></td><td></td></tr>')
    table = _table(("part", "time>", "share>", "what it is"), rows)
    killed = [a for a in view.story.attempts if a.end is None]
    note = ""
    if spent.source == "ends" and killed:
        note = (
            f'<p class="hint">Of the {counted(len(view.story.attempts) - len(killed), "attempt")} that came to an end; '
            "one that is killed cannot say. A GoodputHook counts on through restarts.</p>"
        )
    return (
        '<div class="card"><div class="chart share" data-drawing="share" role="img" '
        f'aria-label="Shares of the time"></div>{table}{note}</div>'
    )


# ---- checkpoints and restarts


def _lane(attempt: int) -> str:
    return f"#{attempt}"


def _timeline(view: View) -> dict[str, Any]:
    attempts = [
        {
            "lane": _lane(a.number),
            "begun": a.begun,
            "last_time": a.last_time,
            "kept_until": a.last_time - a.lost_seconds,
            "outcome": view.outcome(a),
            "text": _e(
                f"attempt {a.number}: step {a.first_step} to {a.last_step}, {duration_text(a.seconds)}"
                + (f", of which {counted(a.lost_steps, 'step')} had to be done again" if a.lost_steps else "")
            ),
            "ending": _e(f"attempt {a.number}: {_how_it_ended(view, a)}"),
        }
        for a in view.story.attempts
    ]
    last = set(_last_of_each(view.story.commits))
    commits = [
        {
            "lane": _lane(c.attempt),
            "time": c.time,
            "step": c.step,
            "kept": c in last and c.step in view.kept,
            "text": _e(f"step {c.step}" + (f", {size_text(c.size)}" if c.size else "") + _took(c)),
        }
        for c in view.story.commits[-_MOST_MARKS:]
    ]
    moments = [a.begun for a in view.story.attempts] + [a.last_time for a in view.story.attempts]
    low, high = (min(moments), max(moments)) if moments else (0.0, 1.0)
    edge = max(high - low, 1e-3) * 0.03
    return {"attempts": attempts, "commits": commits, "range": [low - edge, high + edge]}


def _took(commit: Commit) -> str:
    return "" if commit.seconds is None else f", saved in {duration_text(commit.seconds)}"


def _last_of_each(commits: Iterable[Commit]) -> Iterable[Commit]:
    return {commit.step: commit for commit in commits}.values()


def _how_it_ended(view: View, attempt: Attempt) -> str:
    outcome = view.outcome(attempt)
    if attempt.end is not None:
        return reason_of(attempt) or outcome
    words = {"killed": "killed", "recovered": "went back to a checkpoint by itself", "died": "died", "running": "still running"}
    return words.get(outcome, view.standing.why or outcome)


def _checkpoints(view: View) -> str:
    if not (view.story.attempts or view.kept):
        return ""
    text = ""
    if view.story.attempts:
        height = min(900, 58 + max(18, min(40, 640 // len(view.story.attempts))) * len(view.story.attempts))
        text += (
            f'<div class="card"><div class="chart" style="height:{height}px" data-drawing="timeline" role="img" '
            'aria-label="Attempts and checkpoints over time"></div>'
            '<div class="keys"><span><span class="swatch" style="background:var(--c0)"></span>training</span>'
            '<span><span class="swatch" style="background:var(--lost)"></span>steps that were done again</span>'
            '<span><span class="swatch" style="background:var(--c1)"></span>checkpoint, hollow where it is gone</span>'
            f"</div>{_attempts(view)}</div>"
        )
    return text + _commits(view)


def _attempts(view: View) -> str:
    rows = []
    for a in view.story.attempts:
        bad = " bad" if view.outcome(a) in ("failed", "killed", "died") else ""
        cost = f"{counted(a.lost_steps, 'step')}, {duration_text(a.lost_seconds)}" if a.lost_steps else ""
        pause = "" if a.pause is None else duration_text(a.pause)
        rows.append(
            f'<tr><td class="fixed">#{a.number}</td><td class="fixed">{_e(moment_text(a.begun))}</td>'
            f'<td class="n">{whole_text(a.first_step)} → {whole_text(a.last_step)}</td>'
            f'<td class="n">{_e(duration_text(a.seconds))}</td><td class="text{bad}">{_e(_how_it_ended(view, a))}</td>'
            f'<td class="n">{_e(cost)}</td><td class="n">{_e(pause)}</td></tr>'
        )
    return _table(("attempt", "began", "steps>", "ran>", "how it ended", "lost>", "until the next>"), rows, few=True)


def _commits(view: View) -> str:
    last = set(_last_of_each(view.story.commits))
    told = {commit.step for commit in view.story.commits}
    unknown = [Commit(r.step, r.time, None, r.size, 0) for s, r in sorted(view.kept.items()) if s not in told]
    commits = sorted([*view.story.commits, *unknown], key=lambda commit: commit.time)
    rows = []
    for commit in commits[-_MOST_ROWS:]:
        record = view.kept.get(commit.step) if commit in last or commit in unknown else None
        state = "gone" if record is None else "pinned" if commit.step in view.pinned else "kept"
        size = commit.size if commit.size is not None else None if record is None else record.size
        metrics = {} if record is None else record.metrics
        ranked = " ".join(f"{name} {number_text(value)}" for name, value in sorted(metrics.items()))
        rows.append(
            f'<tr><td class="n">{whole_text(commit.step)}</td><td class="fixed">{_e(moment_text(commit.time))}</td>'
            f'<td class="n">{"" if commit.seconds is None else _e(duration_text(commit.seconds))}</td>'
            f'<td class="n">{_e(size_text(size))}</td><td class="n">{f"#{commit.attempt}" if commit.attempt else ""}</td>'
            f"<td>{state}</td><td>{_e(ranked)}</td></tr>"
        )
    if not rows:
        return ""
    table = _table(("step>", "committed", "took>", "size>", "attempt>", "now", "metrics"), rows, few=True)
    left_out = f", the newest {_MOST_ROWS} of them" if len(commits) > _MOST_ROWS else ""
    if len(rows) <= _OPEN_ROWS:
        return f'<div class="card"><h3>Checkpoints</h3>{table}</div>'
    summary = f"{counted(len(commits), 'checkpoint')}{left_out}"
    return f'<div class="card"><details><summary>{summary}</summary>{table}</details></div>'


# ---- the rest


def _hooks(view: View) -> str:
    hooks = view.story.hooks
    if not hooks:
        return ""
    total = sum(hooks.values())
    rows = [
        f'<tr><td class="mono">{_e(name)}</td><td class="n">{_e(duration_text(seconds))}</td>'
        f'<td class="n">{seconds / total if total else 0:.1%}</td></tr>'
        for name, seconds in hooks.items()
    ]
    height = 46 + 26 * len(hooks)
    return (
        f'<div class="card"><div class="chart" style="height:{height}px" data-drawing="hooks" role="img" '
        f'aria-label="Time of each hook"></div>{_table(("hook", "time>", "share of all hooks>"), rows)}</div>'
    )


def _environment(view: View) -> str:
    starts = [attempt.start for attempt in view.story.attempts if attempt.start]
    if not starts:
        return ""
    now = _facts_of(starts[-1])
    cells = "".join(f"<div><dt>{_e(name)}</dt><dd>{_e(value)}</dd></div>" for name, value in now.items())
    changes = []
    for attempt in view.story.attempts:
        other = _facts_of(attempt.start) if attempt.start else now
        differs = [f"{name} {other.get(name, 'unknown')}" for name in now if other.get(name) != now[name]]
        if differs:
            changes.append(f"<tr><td>#{attempt.number}</td><td>{_e(', '.join(differs))}</td></tr>")
    earlier = _table(("attempt", "what was different"), changes) if changes else ""
    return f'<div class="card"><dl>{cells}</dl>{earlier}</div>'


_NO_FACTS = ("event", "step", "time", "run_id", "attempt", "restored_from")


def _facts_of(start: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in start.items():
        if name in _NO_FACTS or value is None:
            continue
        if isinstance(value, Mapping):
            found |= {str(inner): str(text) for inner, text in value.items()}
        else:
            found[name] = str(value)
    return found


def _numbers(view: View) -> str:
    def at(point: Point | None) -> str:
        if point is None:
            return '<td class="n"></td>'
        return f'<td class="n" title="{point[2]!r} at step {point[0]}">{_e(number_text(point[2]))}</td>'

    rows = [
        f'<tr><td class="mono">{_e(row.tag)}</td><td class="n">{whole_text(row.count)}</td>{at(row.first)}{at(row.last)}'
        f'<td class="n">{whole_text(row.last[0])}</td>{at(row.low)}<td class="n">{"" if row.low is None else whole_text(row.low[0])}</td>'
        f'{at(row.high)}<td class="n">{"" if row.high is None else whole_text(row.high[0])}</td></tr>'
        for row in numbers(view.curves)
    ]
    headings = ("value", "points>", "first>", "last>", "at step>", "lowest>", "at step>", "highest>", "at step>")
    return f'<div class="card">{_table(headings, rows)}</div>' if rows else ""


def _events(view: View) -> str:
    events = view.story.events
    if not events:
        return ""
    rows = []
    for event in events[-_MOST_EVENTS:]:
        rest = {name: value for name, value in event.items() if name not in ("event", "step", "time")}
        text = " ".join(f"{n}: {v if isinstance(v, str) else json.dumps(v)}" for n, v in rest.items())
        rows.append(
            f'<tr><td class="n">{whole_text(event["step"])}</td><td class="fixed">{_e(moment_text(event["time"]))}</td>'
            f'<td class="fixed">{_e(event["event"])}</td><td class="text">{_e(text[:1000])}</td></tr>'
        )
    left_out = f'<p class="hint">The newest {_MOST_EVENTS} of {len(events)}.</p>' if len(events) > _MOST_EVENTS else ""
    return f'<div class="card">{_table(("step>", "when", "event", "what"), rows)}{left_out}</div>'


def _table(headings: Sequence[str], rows: Sequence[str], few: bool = False) -> str:
    """A table; a heading that ends in ``>`` is that of a column of numbers."""
    cells = "".join(
        f'<th class="n">{_e(heading[:-1])}</th>' if heading.endswith(">") else f"<th>{_e(heading)}</th>"
        for heading in headings
    )
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
