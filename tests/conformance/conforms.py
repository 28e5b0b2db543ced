"""The mark that ties a test to the behaviours of TensorFlow 1 in ``cases.json``.

``scripts/conformance.py`` reads the marks from the source, so the ids and ``instead`` must be plain strings there::

    @conforms("MS-015", "MS-016")
    def test_a_second_session_resumes(): ...

    @conforms("MS-092", instead="A bare StopIteration is an error: it hid exhausted iterators of the user's own.")
    def test_a_bare_stop_iteration_is_an_error(): ...
"""

from __future__ import annotations

import pytest


def conforms(*ids: str, instead: str | None = None) -> pytest.MarkDecorator:
    """Mark a test with the ids of the behaviours that it covers.

    Args:
        ids: Ids of ``cases.json``, such as ``"MS-015"``.
        instead: Where monsess differs on purpose: what it does instead and why, in a sentence that the page
            ``docs/conformance.md`` shows. The test then tests the new behaviour.
    """
    return pytest.mark.conforms(*ids, instead=instead)
