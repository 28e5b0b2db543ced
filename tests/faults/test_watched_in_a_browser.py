"""A run with three kills, looked at: the page of `monsess report` and TensorBoard, in a headless Chromium.

``MONSESS_PICTURES=DIR`` keeps the pictures for somebody to look at.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import watched_run
from browser import Browser
from watched_run import KILLS, LAST_STEP

import monsess as ms
from monsess.commands import main

pytestmark = pytest.mark.slow
DRAWN = "return document.documentElement.dataset.drawn === 'yes'"
CURVES = """
return [...document.querySelectorAll('[data-chart]')].flatMap(box => box.data.map(
    trace => [trace.name, [...trace.x], [...trace.y], box.layout.xaxis.type, box.layout.yaxis.type]));
"""
BACK = "return getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("watched") / "three-kills")
    watched_run.train_with_kills(folder)
    return folder


@pytest.fixture(scope="module")
def page(url, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["report", url, "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module", autouse=True)  # before anything is trained for it in vain
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture
def pictures(tmp_path) -> Path:
    path = Path(os.environ.get("MONSESS_PICTURES") or tmp_path)
    path.mkdir(exist_ok=True)
    return path


def opened(browser: Browser, page: Path, **look: Any) -> None:
    browser.look(**{"width": 1280, "height": 900, **look})
    browser.open(page.as_uri())
    assert browser.wait(DRAWN)


def assert_is_a_picture(path: Path) -> None:
    """Not one colour all over, and not cut off."""
    image = pytest.importorskip("PIL.Image").open(path)
    assert image.height > 1000
    colours = image.convert("RGB").getcolors(1 << 24)
    assert len(colours) > 500
    assert max(count for count, _ in colours) < 0.97 * image.width * image.height


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_the_page(look, browser, page, pictures):
    size = {"width": 390, "height": 844, "phone": True} if look == "phone" else {}
    opened(browser, page, dark=look == "dark", **size)
    asked = [one for one in browser.requests() if not one.startswith("data:")]
    assert asked == [page.as_uri()], "nothing is loaded from anywhere"
    assert browser.complaints() == []
    back = [int(part) for part in re.findall(r"\d+", browser.run(BACK))]
    assert (sum(back) < 150) == (look == "dark")
    across = browser.run("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert across[0] <= across[1], "nothing sticks out"
    empty = "return [...document.querySelectorAll('.chart')].filter(box => !box.querySelector('.main-svg')).length"
    assert browser.run(empty) == 0
    assert_is_a_picture(browser.picture(pictures / f"report-{look}.png"))


def test_what_is_drawn_is_what_was_recorded(browser, page, url):
    opened(browser, page)
    curves = ms.read_metrics(url).curves
    drawn = {name: (steps, values) for name, steps, values, *_ in browser.run(CURVES)}
    assert drawn.keys() == curves.keys() >= {"loss", "learning_rate", "eval/loss", "global_step/sec", "goodput"}
    for tag, (steps, values) in drawn.items():
        assert steps == [point.step for point in curves[tag]], tag
        assert values == [point.value for point in curves[tag]], tag
    assert drawn["loss"][0] == list(range(1, LAST_STEP + 1))
    text = browser.run("return document.body.innerText")
    lost = sum(step % watched_run.EVERY for step in KILLS)
    assert f"3 restarts: {lost} steps" in text
    assert text.count("killed") == 3
    assert "LAST_STEP" in text
    lanes = browser.run("return document.querySelector('[data-drawing=timeline]').data[0].y")
    assert lanes == ["#1", "#2", "#3", "#4"]
    shares = browser.run("return document.querySelector('[data-drawing=share]').data.map(part => part.x[0])")
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_what_can_be_changed(browser, page, pictures):
    opened(browser, page)
    for name, value in (("x", "time"), ("y", "log")):
        browser.run(f"document.querySelector('button[data-name={name}][data-value={value}]').click()")
    changed = {name: rest for name, *rest in browser.run(CURVES)}
    assert {rest[2] for rest in changed.values()} == {"date"}
    assert changed["loss"][3] == "log"
    assert changed["loss"][0][0].startswith("20")
    browser.run("const one = document.getElementById('smooth'); one.value = 0.9; one.dispatchEvent(new Event('input'))")
    smooth = {name: values for name, _, values, *_ in browser.run(CURVES)}
    raw, mean = smooth["loss"], smooth["loss, smoothed"]
    assert mean[0] == pytest.approx(raw[0])
    assert mean[1] == pytest.approx((0.9 * raw[0] + raw[1]) / 1.9)
    assert (
        browser.run("document.querySelector('button.theme').click(); return document.documentElement.dataset.theme")
        == "dark"
    )
    assert sum(int(part) for part in re.findall(r"\d+", browser.run(BACK))) < 150
    browser.picture(pictures / "report-changed.png")
    assert browser.complaints() == []
    browser.run("localStorage.clear()")


def test_on_paper_and_back_again(browser, page, pictures):
    opened(browser, page, dark=True)
    before = browser.run(
        "return [...document.querySelectorAll('.chart')].map(box => box.getBoundingClientRect().width)"
    )
    paper = browser.paper(pictures / "report.pdf")
    data = paper.read_bytes()
    assert data.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b(?!s)", data)) <= 8
    assert browser.run("return document.documentElement.dataset.theme") == "dark", "only the paper is light"
    after = browser.run("return [...document.querySelectorAll('.chart')].map(box => box.getBoundingClientRect().width)")
    assert after == pytest.approx(before)
    drawn = "return [...document.querySelectorAll('.chart .main-svg')].map(one => one.getBoundingClientRect().width)"
    assert min(browser.run(drawn)) > 300


def test_a_page_that_was_tampered_with_still_asks_nobody(browser, page, tmp_path):
    """The policy inside the page, not only what it happens to do."""
    wicked = tmp_path / "wicked.html"
    beacon = '<img src="http://127.0.0.1:9/a"><script>fetch("http://127.0.0.1:9/b").catch(() => 0)</script>'
    wicked.write_text(page.read_text(encoding="utf-8").replace("</main>", beacon + "</main>"), encoding="utf-8")
    opened(browser, wicked)
    said = browser.complaints()
    assert len(said) >= 2
    assert all("Content Security Policy" in one for one in said), said


def test_tensorboard(browser, url, pictures):
    pytest.importorskip("tensorboard")
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", url, "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address = next(found[0] for line in process.stderr if (found := re.search(r"http://127.0.0.1:\d+/", line)))
        _wait_for_tags(f"{address}data/plugin/scalars/tags")
        browser.look(1280, 1500)
        browser.open(f"{address}#timeseries")
        asked = (
            "return document.body.innerText.includes('learning_rate') && document.querySelectorAll('svg').length > 5"
        )
        assert browser.wait(asked, 90)
        browser.run(
            "for (const one of document.querySelectorAll('card-group-toolbar [aria-expanded=false]')) one.click()"
        )
        time.sleep(3)
        assert all(one.startswith((address, "data:", "blob:")) for one in browser.requests())
        picture = browser.picture(pictures / "tensorboard.png")
        assert_is_a_picture(picture)
        for tag in ("loss", "learning_rate", "eval", "global_step"):
            assert tag in browser.run("return document.body.innerText")
    finally:
        process.terminate()
        process.wait(30)
        assert process.stderr is not None
        process.stderr.close()


def _wait_for_tags(address: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(address, timeout=30) as answer:
            if any("learning_rate" in tags for tags in json.load(answer).values()):
                return
        assert time.monotonic() < deadline, "TensorBoard has found no scalars"
        time.sleep(0.3)
