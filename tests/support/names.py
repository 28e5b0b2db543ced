"""Names of test cases that are the same in every process, as pytest-xdist needs them."""

from __future__ import annotations

import re
from typing import Any


def shown(value: Any) -> str:
    """The ``repr`` of a value without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
