"""All tests see four emulated CPU devices; what they start as child processes inherits the thread pool."""

from __future__ import annotations

import logging
import signal

import pytest
from report import (  # noqa: F401 - hooks
    FIGURES,
    SEED,
    pytest_configure,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)

from monsess.testing import emulate_devices

emulate_devices(4)

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background; what tests start would not hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> list[str]:
    """Lines of the report: what was counted or measured."""
    return request.config.stash[FIGURES]


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """MONSESS_SEED, or a new one for each run of the tests; the report shows it."""
    return request.config.stash[SEED]


@pytest.fixture
def lines(caplog):
    """The lines that monsess logged so far; calling it returns those since the call before."""
    caplog.set_level(logging.INFO, logger="monsess")

    def take():
        new = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return new

    return take
