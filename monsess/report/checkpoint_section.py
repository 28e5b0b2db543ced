"""The section of a page about attempts, checkpoints, and what each restart cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from monsess.commands.console import size_text
from monsess.report.markup import card, cell, e, picture, row, swatch, table, took, whole
from monsess.report.story import Attempt, Commit
from monsess.report.view import View
from monsess.report.words import counted, duration_text, moment_text, number_text, whole_text

_OPEN_ROWS = 12
_OPEN_ATTEMPTS = 24
_MOST_ROWS = 500
_MOST_MARKS = 3000
_BAD = ("failed", "killed", "died")


def timeline_of(view: View) -> dict[str, Any]:
    """What the script draws of attempts and checkpoints over time."""
    commits = [
        {
            "lane": f"#{commit.attempt}",
            "time": commit.time,
            "step": commit.step,
            "kept": view.is_kept(commit),
            "text": e(", ".join(_about(commit))),
        }
        for commit in view.story.commits[-_MOST_MARKS:]
        if commit.attempt
    ]
    attempts = [_bar(view, attempt) for attempt in view.story.attempts]
    moments = [moment for bar in attempts for moment in (bar["begun"], bar["last_time"])]
    low, high = min(moments, default=0.0), max(moments, default=1.0)
    edge = max(high - low, 1e-3) * 0.03
    return {"attempts": attempts, "commits": commits, "range": [low - edge, high + edge]}


def checkpoints(view: View) -> str:
    """Attempts, what each restart cost, and the checkpoints."""
    attempts = view.story.attempts
    if not attempts:
        return _commits(view)
    lane = max(18, min(40, 640 // len(attempts)))
    keys = (
        f'<div class="keys"><span>{swatch("c0")}training</span><span>{swatch("lost")}steps that were done again</span>'
        f"<span>{swatch('c1')}checkpoint, hollow where it is gone</span></div>"
    )
    drawn = picture('data-drawing="timeline"', "Attempts and checkpoints over time", height=58 + lane * len(attempts))
    return card(drawn, keys, _attempts(view)) + _commits(view)


def _bar(view: View, attempt: Attempt) -> dict[str, Any]:
    text = (
        f"attempt {attempt.number}: step {attempt.first_step} to {attempt.last_step}, {duration_text(attempt.seconds)}"
    )
    if attempt.lost_steps:
        text += f", of which {counted(attempt.lost_steps, 'step')} had to be done again"
    return {
        "lane": f"#{attempt.number}",
        "begun": attempt.begun,
        "last_time": attempt.last_time,
        "kept_until": attempt.last_time - attempt.lost_seconds,
        "outcome": view.outcome(attempt),
        "text": e(text),
        "ending": e(f"attempt {attempt.number}: {view.how_it_ended(attempt)}"),
    }


def _about(commit: Commit) -> Iterable[str]:
    yield f"step {commit.step}"
    if commit.size is not None:
        yield size_text(commit.size)
    if commit.seconds is not None:
        yield f"saved in {duration_text(commit.seconds)}"


def _attempts(view: View) -> str:
    rows = []
    for a in view.story.attempts:
        cost = f"{counted(a.lost_steps, 'step')}, {duration_text(a.lost_seconds)}" if a.lost_steps else ""
        ending = "text bad" if view.outcome(a) in _BAD else "text"
        rows.append(
            row(
                *(cell(f"#{a.number}", "fixed"), cell(moment_text(a.begun), "fixed")),
                *(cell(f"{whole_text(a.first_step)} → {whole_text(a.last_step)}", "n"), took(a.seconds)),
                *(cell(view.how_it_ended(a), ending), cell(cost, "n"), took(a.pause)),
            )
        )
    listed = table(("attempt", "began", "steps>", "ran>", "how it ended", "lost>", "until the next>"), rows)
    if len(rows) <= _OPEN_ATTEMPTS:
        return listed
    return f"<details><summary>{counted(len(rows), 'attempt')}</summary>{listed}</details>"


def _commits(view: View) -> str:
    commits = view.story.commits
    rows = []
    for commit in commits[-_MOST_ROWS:]:
        record = view.kept.get(commit.step) if view.is_kept(commit) else None
        state = "gone" if record is None else "pinned" if commit.step in view.pinned else "kept"
        size = record.size if record is not None else commit.size
        metrics = {} if record is None else record.metrics
        ranked = " ".join(f"{name} {number_text(value)}" for name, value in sorted(metrics.items()))
        attempt = f"#{commit.attempt}" if commit.attempt else ""
        rows.append(
            row(
                *(whole(commit.step), cell(moment_text(commit.time), "fixed"), took(commit.seconds)),
                *(cell(size_text(size), "n"), cell(attempt, "n"), cell(state), cell(ranked, "text")),
            )
        )
    if not rows:
        return ""
    listed = table(("step>", "committed", "took>", "size>", "attempt>", "now", "metrics"), rows)
    if len(rows) <= _OPEN_ROWS:
        return card(f"<h3>Checkpoints</h3>{listed}")
    left_out = f", the newest {_MOST_ROWS} of them" if len(commits) > _MOST_ROWS else ""
    return card(f"<details><summary>{counted(len(commits), 'checkpoint')}{left_out}</summary>{listed}</details>")
