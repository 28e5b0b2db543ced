"""What the pages say is true: their examples run, their links lead somewhere, every public name has a place."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import monsess

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_examples_of_a_page_run(page, tmp_path):
    code = "\n".join(BLOCK.findall(page.read_text(encoding="utf-8")))
    if "emulate_devices" not in code:
        code = "import monsess\nmonsess.testing.emulate_devices(4)\n" + code
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_readme_example_is_short():
    code = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))[0]
    assert len([line for line in code.split("\n") if line.strip()]) <= 25


def test_every_public_name_has_a_place():
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    placed = set(re.findall(r"^::: monsess\.(\S+)$", reference, re.MULTILINE))
    wanted = set(monsess.__all__) - {"__version__", "testing", "summary"}
    wanted |= {f"testing.{name}" for name in monsess.testing.__all__}
    wanted |= {f"summary.{name}" for name in monsess.summary.__all__}
    assert placed == wanted


def test_every_error_is_explained():
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    errors = [name for name in monsess.__all__ if name.endswith("Error")]
    assert [name for name in errors if f"`{name}`" not in page] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_map_of_the_house_is_right():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"\b(?:monsess|hooks|tests|scripts)/[\w./]*", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
