"""``python -m monsess``: the command line."""

from __future__ import annotations

import sys

from monsess.commands import main

sys.exit(main())
