"""All tests see four emulated CPU devices; what they start as child processes inherits the thread pool."""

from __future__ import annotations

from monsess.testing import emulate_devices

emulate_devices(4)
