"""The `monsess` logger: its INFO lines are seen without any set-up, and credentials never are."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

logger = logging.getLogger("monsess")

#: One slash or three are typed by mistake, and so is a slash in a password, which then is no less secret: what follows
#: ``name:`` counts as one up to an @, unless it is a port.
_USERINFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*:/{1,3})(?P<userinfo>[^/\s]+|[^/\s:@\[]+:(?!\d{2,5}/)\S*)@")
_SECRET_NAME = re.compile(r"(?i)key|secret|token|passw|passphrase|signature|credential|sas|auth|connection_string")
_QUERY = re.compile(r"(?i)([?&](?:[^=&#\s]*(?:key|secret|token|password|signature|sig|credential)[^=&#\s]*)=)[^&#\s]+")


def mask(text: str, secrets: Iterable[str] = ()) -> str:
    """Return ``text`` with the credentials of every URL in it, and all ``secrets``, replaced by ``***``.

    Example:
        >>> mask("sftp://user:secret@host/run?token=abc")
        'sftp://***@host/run?token=***'
    """
    text = _QUERY.sub(r"\1***", _USERINFO.sub(r"\g<scheme>***@", text))
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def secrets_of(url: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """The credentials in a URL and in storage options, which a library's error may repeat; the longest first."""
    found, written = set(_secret_values(options)), set[str]()
    for match in _USERINFO.finditer(url):
        userinfo = match["userinfo"]
        password = userinfo.partition(":")[2]
        written |= {userinfo, password}
        if "/" in userinfo:  # a library takes the parts of such a password for names
            written.update(password.split("/"), [userinfo.partition("/")[0]])
    found |= {unquote(part) for part in written}
    found |= {line for secret in found for line in secret.splitlines()}
    found |= written | {quoted for secret in found for quoted in (quote(secret), quote(secret, ""))}
    found |= {text for secret in found for once in _escaped(secret) for text in _escaped(once)}
    return tuple(sorted((text for text in found if len(text) > 3), key=len, reverse=True))


def _escaped(secret: str) -> set[str]:
    """How a text looks inside a repr, where quotes are escaped or not, and inside JSON; and itself."""
    texts = json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]
    return {secret, *texts, repr(secret)[1:-1], repr('"' + secret)[2:-1], repr(secret.encode(errors="replace"))[2:-1]}


def _secret_values(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secret_values(value)
        elif isinstance(name, str) and _SECRET_NAME.search(name):
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, (str, bytes)):
                    yield one.decode(errors="replace") if isinstance(one, bytes) else one


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
