"""The conformance page tells the truth, and its script sees what it should see."""

from __future__ import annotations

import conformance
from conformance import Case, Found

CASES = [
    Case("MS-001", True, "One.", "t"),
    Case("MS-002", True, "Two <a|b>.", "t"),
    Case("MS-003", False, "Three.", "t", note="graphs"),
    Case("BH-001", True, "Four.", "t", deferred=True),
]


def scanned(source: str) -> Found:
    found = Found()
    conformance.scan(source, "unit/test_x.py", found)
    return found


def test_every_behaviour_has_a_test_and_the_page_is_fresh(capsys):
    code = conformance.main(["--check"])
    assert code == 0, capsys.readouterr().err


def test_inventory_is_whole():
    cases = conformance.load_cases(conformance.ROOT / "tests" / "conformance" / "cases.json")
    for prefix, count, applying, deferred in (
        ("MS", 131, 115, 0),
        ("BH", 88, 84, 0),
        ("CO", 21, 21, 0),
        ("SL", 50, 26, 0),
        ("SR", 19, 8, 0),
        ("ES", 15, 14, 0),
        ("EH", 13, 9, 0),
        ("IP", 4, 4, 0),
        ("EV", 14, 13, 0),
    ):
        mine = [case for case in cases if case.id.startswith(prefix)]
        assert [case.id for case in mine] == [f"{prefix}-{n:03d}" for n in range(1, count + 1)]
        assert sum(case.applies for case in mine) == applying
        assert sum(case.deferred for case in mine) == deferred


def test_marks_are_read_from_functions_classes_and_parameters():
    found = scanned(
        "@conforms('MS-001')\ndef test_a(): ...\n"
        "class TestB:\n"
        "    @conforms('MS-002', instead='Other.')\n    def test_c(self): ...\n"
        "    @pytest.mark.parametrize('x', [pytest.param(1, marks=conforms('BH-001'))])\n"
        "    def test_d(self, x): ...\n"
    )
    assert found.problems == []
    assert {id_: [mark.test for mark in marks] for id_, marks in found.marks.items()} == {
        "MS-001": ["unit/test_x.py::test_a"],
        "MS-002": ["unit/test_x.py::TestB::test_c"],
        "BH-001": ["unit/test_x.py::TestB::test_d"],
    }
    assert found.marks["MS-002"][0].instead == "Other."


def test_a_mark_that_shows_nothing_is_a_problem():
    sources = (
        "@conforms('MS-001')\n@pytest.mark.skip\ndef test_a(): ...\n",
        "@pytest.mark.xfail(reason='x')\n@conforms('MS-001')\ndef test_a(): ...\n",
        "@conforms('MS-001')\ndef helper(): ...\n",
        "pytestmark = conforms('MS-001')\n",
        "@conforms(*IDS)\ndef test_a(): ...\n",
        "@conforms()\ndef test_a(): ...\n",
    )
    for source in sources:
        found = scanned(source)
        assert len(found.problems) == 1, source
        assert not found.marks, source


def test_gaps_names_what_is_missing_and_what_is_unknown():
    found = scanned("@conforms('MS-001', 'MS-999')\ndef test_a(): ...\n")
    unknown, missing = conformance.gaps(CASES, found)
    assert "MS-999" in unknown
    assert missing.startswith("MS-002 has no test")


def test_page_counts_and_rows():
    found = scanned(
        "@conforms('MS-001')\ndef test_a(): ...\n@conforms('MS-002', instead='Less is more.')\ndef test_b(): ...\n"
    )
    page = conformance.render(CASES, found)
    assert "| MS | 3 | 1 | 1 | 0 | 1 |" in page
    assert "| BH | 1 | 0 | 0 | 1 | 0 |" in page
    assert "| MS-002 | Two &lt;a\\|b>. | *Instead:* Less is more.<br>`unit/test_x.py::test_b` |" in page
    assert "*No counterpart:* graphs." in page
    assert "missing" not in page
