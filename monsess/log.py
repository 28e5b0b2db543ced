"""The `monsess` logger: its INFO lines are seen without any set-up, and credentials never are."""

from __future__ import annotations

import logging
import re
import sys

logger = logging.getLogger("monsess")

_USERINFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/@\s]+@")
_QUERY = re.compile(r"(?i)([?&](?:[^=&#\s]*(?:key|secret|token|password|signature|sig|credential)[^=&#\s]*)=)[^&#\s]+")


def mask(text: str) -> str:
    """Return ``text`` with the credentials of every URL in it replaced by ``***``.

    Example:
        >>> mask("sftp://user:secret@host/run?token=abc")
        'sftp://***@host/run?token=***'
    """
    return _QUERY.sub(r"\1***", _USERINFO.sub(r"\g<scheme>***@", text))


class _PlainHandler(logging.StreamHandler):
    """Writes to the current stderr, and only while nobody has configured logging."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("%(asctime)s monsess %(levelname)s %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logging.getLogger().handlers):
            return  # the program configured logging: the record reaches its handlers by propagation
        self.stream = sys.stderr
        super().emit(record)


def _install() -> None:
    if not any(isinstance(handler, _PlainHandler) for handler in logger.handlers):
        logger.addHandler(_PlainHandler())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


_install()
