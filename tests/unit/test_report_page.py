"""`monsess report`: what stands on the page, and what the command does and refuses."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import sys
from html.parser import HTMLParser
from typing import Any

import pytest
import written
from checkpoints import fresh, save
from command_line import CommandLine
from written import end, start, three_kills, values, write

import monsess as ms
from monsess.commands.report import _plotly
from monsess.report import view_of
from monsess.report.page import render

pytest.importorskip("plotly")


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path) -> str:
    return str(tmp_path / "run") if request.param == "local" else fresh("memory")


@pytest.fixture
def call(capsys, tmp_path, monkeypatch) -> CommandLine:
    monkeypatch.chdir(tmp_path)
    return CommandLine(capsys)


class Page(HTMLParser):
    """The texts, tables and addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.addresses: list[str] = []
        self.elements: list[str] = []
        self.facts: dict[str, Any] = {}
        self._inside: list[str] = []
        self._is_facts = self._in_cell = False
        self.feed(text)
        self.close()

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.addresses += [found[name] for name in ("src", "href", "action", "data", "poster") if found.get(name)]
        self.elements.append(tag)
        self._is_facts = found.get("id") == "facts"
        if tag in ("script", "style"):
            self._inside.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._inside.remove(tag)
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data):
        if self._is_facts and self._inside:
            self.facts = json.loads(data)
        elif not self._inside:
            self.words.append(data)
            if self._in_cell:
                self.rows[-1][-1] += data


def page_of(url: str) -> Page:
    return Page(render(view_of(ms.CheckpointStore(url)), "/* plotly */"))


def test_the_story_of_a_run_with_three_kills(url, call):
    save(url, 15, run_id=written.RUN_ID, attempt="a3")
    save(url, 20, run_id=written.RUN_ID, attempt="a4")
    ms.CheckpointStore(url).pin(15)
    write(url, three_kills())
    status, out, err = call("report", url, "-o", "page.html")
    assert (status, err) == (0, "")
    assert out.startswith("page.html: ")
    assert "stopped: LAST_STEP: step 20 is reached" in out
    with open("page.html", encoding="utf-8") as file:
        page = Page(file.read())
    assert "Step 20 was reached in 4 attempts" in page.text
    assert "3 restarts: 6 steps (6.00 s) had to be done again" in page.text
    assert "LAST_STEP: step 20 is reached" in page.text
    assert written.RUN_ID in page.text
    attempts = [row for row in page.rows if row[0].startswith("#") and "→" in row[2]]
    assert [row[2] for row in attempts] == ["0 → 8", "5 → 11", "10 → 17", "15 → 20"]
    assert [row[4] for row in attempts] == ["killed", "killed", "killed", "LAST_STEP: step 20 is reached"]
    assert [row[5] for row in attempts] == ["3 steps, 3.00 s", "1 step, 1.00 s", "2 steps, 2.00 s", ""]
    commits = [row for row in page.rows if len(row) == 7 and row[5] in ("kept", "gone", "pinned")]
    assert [(row[0], row[5]) for row in commits] == [("5", "gone"), ("10", "gone"), ("15", "pinned"), ("20", "kept")]
    assert ["Slow", "1.00 s", "80.0%"] in page.rows
    assert ["step", "2.50 s", "41.7%", "dispatching steps, and waiting for the devices"] in page.rows
    for text in ("0.10.2", "3.11.7", "Environment", "Where the time went", "Hooks"):
        assert text in page.text


def test_the_numbers_are_those_of_the_records(url):
    write(url, three_kills())
    page, curves = page_of(url), ms.read_metrics(url).curves
    drawn = {one["tag"]: one for chart in page.facts["charts"] for one in chart["series"]}
    assert drawn.keys() == curves.keys() == {"loss", "eval/loss"}
    for tag, points in curves.items():
        steps, times, numbers = zip(*points, strict=True)
        assert list(steps) == list(range(1, 21))
        assert (drawn[tag]["steps"], drawn[tag]["times"]) == (list(steps), list(times))
        assert drawn[tag]["values"] == list(numbers)
        (row,) = (row for row in page.rows if row[0] == tag)
        assert row[1:4] == ["20", f"{numbers[0]:.6g}", f"{numbers[-1]:.6g}"]
    assert drawn["loss"]["values"][5] == 1.0 / 6 + 0.002, "of the second attempt from step 6 on"
    assert [one["step"] for one in page.facts["restarts"]] == [5, 10, 15]
    assert page.facts["hooks"] == [{"name": "Slow", "seconds": 1.0}, {"name": "StopAtStepHook", "seconds": 0.25}]


def test_it_asks_nobody_for_anything(url):
    write(url, three_kills())
    text = render(view_of(ms.CheckpointStore(url)), _plotly())
    page = Page(text)
    assert [address for address in page.addresses if not address.startswith("#")] == ["data:,"]
    assert page.elements.count("script") == 4
    assert not {"img", "iframe", "object", "embed", "base", "form"} & set(page.elements)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_nothing_from_a_run_becomes_part_of_the_page(tmp_path):
    """Names and texts come from users' code, which may be anything."""
    nasty = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
    url = str(tmp_path / "a<b>")
    error = {"reason": "ERROR", "error": f"ValueError: {nasty}\n{nasty}", "hooks": {nasty: 1.0}, "seconds": {nasty: 1}}
    about = {"host": nasty, "run_id": nasty, "versions": {nasty: nasty}}
    event = {"event": nasty, "step": 1, "time": written.BEGAN, "text": nasty, nasty: [nasty]}
    write(url, [start(0, 0, nasty, **about), {**values(1, 1), "scalars": {nasty: 1.0}}, event, end(2, 2, **error)])
    text = render(view_of(ms.CheckpointStore(url)), "")
    page = Page(text)
    assert "<img" not in text
    assert "alert(1)</script>" not in text
    assert page.elements.count("script") == 4
    assert page.text.count("<script>alert(1)</script>") >= 8, "and everything is there"
    assert page.facts["charts"][0]["series"][0]["tag"] == nasty
    assert page.facts["timeline"]["attempts"][0]["ending"].count("<") == 0, "Plotly takes texts for HTML"
    assert "<title>a&lt;b&gt;" in text


def test_values_that_are_not_finite(url):
    scalars = [values(1, 1, loss=1.0), values(2, 2, loss=math.nan), values(3, 3, loss=math.inf)]
    write(url, [start(0, 0), *scalars])
    page = page_of(url)
    (one,) = page.facts["charts"][0]["series"]
    assert (one["steps"], one["values"]) == ([1], [1.0])
    assert (one["odd"]["steps"], one["odd"]["values"]) == ([2, 3], ["NaN", "∞"])
    assert "not finite" in page.text
    assert ["loss", "3", "1", "∞", "3", "1", "1", "1", "1"] in page.rows


def test_a_run_without_records(url, call):
    save(url, 5, 10)
    status, document = call.document("report", url)
    assert status == 0
    assert (document["state"], document["checkpoints"], document["output"]) == ("unknown", 2, "report.html")
    page = page_of(url)
    assert "Nothing is recorded here; 2 checkpoints can be found." in page.text
    assert [row[0] for row in page.rows if "kept" in row] == ["5", "10"]


def test_the_document(url, call):
    write(url, three_kills())
    status, document = call.document("report", url, "-o", "page.html")
    assert status == 0
    assert document["bytes"] == os.path.getsize("page.html")
    assert document["values"] == {"loss": 1 / 20 + 0.004, "eval/loss": 0.1}
    assert [document[name] for name in ("step", "attempts", "lost_steps", "run_id")] == [20, 4, 6, written.RUN_ID]
    assert document["why"] == "LAST_STEP: step 20 is reached"


@pytest.mark.parametrize("count", [1, 400])
def test_many_attempts_checkpoints_and_curves(count, tmp_path):
    records = []
    for number in range(count):
        records += [start(number, 10.0 * number, f"a{number}"), values(number + 1, 10.0 * number + 1, loss=1.0)]
        records += [written.checkpoint(number + 1, 10.0 * number + 2)]
    records.append(values(count, 10.0 * count, **{f"value{i}": float(i) for i in range(40)}))
    write(str(tmp_path / "run"), records)
    page = page_of(str(tmp_path / "run"))
    assert len(page.facts["timeline"]["attempts"]) == count
    assert len(page.facts["charts"]) == 41
    assert "25 more pictures" in page.text
    assert len([row for row in page.rows if row[-1:] == [""] and "gone" in row]) == count


def test_nothing_there(url, call):
    status, out, err = call("report", url)
    assert (status, out) == (1, "")
    assert err.startswith("monsess: There is no ")
    assert "nothing is recorded there" in err
    assert not os.path.exists("report.html")


def test_where_the_page_goes(url, call, tmp_path):
    write(url, three_kills())
    (tmp_path / "report.html").write_text("an older one")
    before = os.umask(0o027)
    try:
        assert call("report", url)[0] == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat("report.html").st_mode) == 0o640
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert call("report", url, "-o", os.devnull)[0] == 0
    for path in (str(tmp_path), str(tmp_path / "no" / "folder.html")):
        status, out, err = call("report", url, "-o", path)
        assert (status, out) == (2, ""), path
        assert f"could not write the page to {path}" in err
    assert {path.name for path in tmp_path.iterdir()} <= {"report.html", "run"}, "no pieces are left"


def test_the_page_on_standard_output(url, call, tmp_path):
    write(url, three_kills())
    status, out, _ = call("report", url, "-o", "-")
    assert status == 0
    assert out.startswith("<!doctype html>")
    assert out.rstrip().endswith("</html>")
    assert not (tmp_path / "-").exists()
    status, out, err = call("report", url, "-o", "-", "--json")
    assert (status, out) == (2, "")
    assert "both want standard output" in err


def test_without_plotly(url, call, monkeypatch):
    write(url, three_kills())
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    status, out, err = call("report", url)
    assert (status, out) == (1, "")
    assert 'pip install "monsess[report]"' in err
