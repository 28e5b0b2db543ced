"""The page itself: one HTML document that needs nothing but itself.

What it says stands in its text and tables, so that it can be read, searched and printed without any drawing; the
pictures are Plotly's. A content security policy inside the page forbids every request.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from importlib.resources import files

from monsess.report import checkpoint_section, sections
from monsess.report.curves import groups, is_rate, numbers
from monsess.report.markup import e, script_json
from monsess.report.standing import reason_of
from monsess.report.view import View
from monsess.report.words import counted, duration_text, moment_text, number_text, whole_text

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)
_STATES = {
    "running": "Running",
    "stopped": "Finished",
    "failed": "Failed",
    "died": "Died",
    "silent": "Silent",
    "unknown": "Not known",
}
_Tile = tuple[str, str, str]


def render(view: View, plotly: str) -> str:
    """The page.

    Args:
        view: What it is about.
        plotly: The source of plotly.js.
    """
    charts = sections.charts_of(view)
    facts = {
        "charts": charts,
        "restarts": [{"step": a.first_step, "time": a.begun} for a in view.story.attempts[1:]],
        "spent": sections.spent_of(view),
        "timeline": checkpoint_section.timeline_of(view),
        "hooks": [{"name": name, "seconds": seconds} for name, seconds in view.story.hooks.items()],
    }
    all_sections = [
        ("curves", "Curves", sections.curves(view, charts)),
        ("time", "Where the time went", sections.time_spent(view)),
        ("checkpoints", "Checkpoints and restarts", checkpoint_section.checkpoints(view)),
        ("hooks", "Hooks", sections.hooks(view)),
        ("environment", "Environment", sections.environment(view)),
        ("numbers", "Numbers", sections.numbers_of_curves(view)),
        ("events", "Other events", sections.events(view)),
    ]
    there = [section for section in all_sections if section[2]]
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title, _ in there)
    body = "".join(f'<section><h2 id="{anchor}">{title}</h2>{text}</section>' for anchor, title, text in there)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="monsess {e(view.version)}">
<title>{e(view.name)} · monsess report</title>
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
<noscript><p>The pictures need JavaScript, which this page brings along. The tables need none.</p></noscript>
<div class="tiles">{"".join(map(_tile, _tiles(view)))}</div>
{body}
<footer>Made by monsess {e(view.version)} at {moment_text(view.made)} UTC, from the records in {e(view.url)}.
All times are UTC. Nothing on this page is loaded from anywhere.</footer>
</main>
<script type="application/json" id="facts">{script_json(facts)}</script>
<script>{plotly}</script>
<script>{_part("page.js")}</script>
</body>
</html>
"""


def _part(name: str) -> str:
    return (files("monsess.report") / name).read_text(encoding="utf-8")


def _head(view: View) -> str:
    state = view.standing.state
    run = f' · run <span class="mono">{e(view.run_id)}</span>' if view.run_id else ""
    return (
        '<div class="kicker"><span>monsess report</span><button class="theme" type="button">Theme</button></div>'
        f'<div class="title"><h1>{e(view.name)}</h1><span class="pill {state}">{_STATES[state]}</span></div>'
        f'<div class="where small"><span class="mono">{e(view.url)}</span>{run}</div>'
        f'<p class="lead" id="story">{" ".join(_story(view))}</p>{_error(view)}'
    )


def _story(view: View) -> Iterator[str]:
    """The whole story in a few sentences."""
    story, last = view.story, view.story.last
    if last is None:
        yield f"Nothing is recorded here; {counted(len(view.kept), 'checkpoint')} can be found."
        return
    span = duration_text(max(0.0, last.last_time - story.attempts[0].begun))
    tries = "" if len(story.attempts) == 1 else f" in {counted(len(story.attempts), 'attempt')}"
    yield f"Step <b>{whole_text(last.last_step)}</b> was reached{tries} within <b>{span}</b>."
    ago = duration_text(max(0.0, view.made - last.last_time))
    if last.end is not None:
        yield f"It ended {moment_text(last.last_time)} UTC: <b>{e(reason_of(last) or 'no reason given')}</b>."
    elif view.standing.state == "running":
        yield f"It is running; its last record is {ago} old."
    else:
        yield f"It has no end: {e(view.standing.why)}; its last record is {ago} old."
    if len(story.attempts) > 1:
        again = f"{counted(story.lost_steps, 'step')} ({duration_text(story.lost_seconds)}) had to be done again"
        cost = again if story.lost_steps else "no step was lost"
        yield f"{counted(len(story.attempts) - 1, 'restart')}: {cost}."


def _error(view: View) -> str:
    last = view.story.last
    error = str("" if last is None or last.end is None else last.end.get("error") or "").strip()
    return f"<pre>{e(error)}</pre>" if "\n" in error else ""


def _tile(tile: _Tile) -> str:
    name, value, more = map(e, tile)
    return (
        f'<div class="tile"><div class="name">{name}</div><div class="value">{value}</div>'
        f'<div class="more">{more}</div></div>'
    )


def _tiles(view: View) -> Iterator[_Tile]:
    """What somebody wants to know first."""
    story, last = view.story, view.story.last
    if last is not None:
        yield "Step", whole_text(last.last_step), counted(len(story.attempts), "attempt")
        running = sum(attempt.seconds for attempt in story.attempts)
        yield "Time running", duration_text(running), f"since {moment_text(story.attempts[0].begun)}"
    yield from _main_value(view)
    rates = [point[2] for tag in view.curves if is_rate(tag) for point in view.curves[tag] if math.isfinite(point[2])]
    if rates:
        yield "Speed", f"{rates[-1]:.4g} /s", f"steps; {statistics.median(rates):.4g} in the middle"
    spent = story.time
    if spent is not None and spent.wall > 0:
        share = (spent.parts.get("step", 0.0) + spent.parts.get("loop", 0.0)) / spent.wall
        name = "Goodput" if spent.source == "goodput" else "Spent in steps"
        yield name, f"{share:.1%}", f"of {duration_text(spent.wall)}"
    if story.commits:
        newest = max(commit.step for commit in story.commits)
        yield (
            "Checkpoints",
            whole_text(len(story.commits)),
            f"{len(view.kept):,} kept, newest is step {whole_text(newest)}",
        )
    if len(story.attempts) > 1:
        lost = f"{counted(story.lost_steps, 'step')} lost" if story.lost_steps else "nothing lost"
        yield "Restarts", whole_text(len(story.attempts) - 1), lost


def _main_value(view: View) -> Iterator[_Tile]:
    """The loss, or whatever comes first."""
    for tags in groups([tag for tag, points in view.curves.items() if points and not is_rate(tag)]).values():
        (one,) = numbers({tags[0]: view.curves[tags[0]]})
        more = f"at step {whole_text(one.last[0])}"
        if tags[0] == "loss" and one.low is not None:
            more = f"lowest {number_text(one.low[2])} at {whole_text(one.low[0])}"
        yield tags[0], number_text(one.last[2]), more
        return
