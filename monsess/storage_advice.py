"""What to do about an error of a store: the last sentence of a `StorageError`."""

from __future__ import annotations

import errno

#: Protocols that an extra of monsess installs, with its name.
_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("hdfs", "viewfs"), "hdfs"),
    **dict.fromkeys(("sftp", "ssh"), "sftp"),
}


def advice_for(error: BaseException, url: str, local: bool) -> str:
    """Say what a person can do.

    Args:
        error: What the store or its library raised.
        url: Of the directory.
        local: Whether that is on a local file system.
    """
    if isinstance(error, PermissionError):
        who = "this user" if local else "the user or the credentials in storage_options"
        return f"Check that {who} may list, read and write there."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Make room there, then start again: the last committed checkpoint is restored."
    if local and isinstance(error, NotADirectoryError):
        return "A file is in the way: use another directory, or move the file."
    if local:
        return "Use another directory, or mend what is wrong with this one, then start again."
    if isinstance(error, ImportError):
        extra = _EXTRAS.get(url.split("::")[-1].partition("://")[0])
        return f"Install {'the package that serves this protocol' if extra is None else _command(extra)}."
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TypeError) and "unexpected keyword argument" in text:
        return "Take that name out of storage_options, or correct it: the filesystem does not know it."
    if "NoCredentials" in text or "Unable to locate credentials" in text:
        return "Give credentials in storage_options, or where the package of the store looks for them."
    if isinstance(error, ValueError) and "Protocol not known" in str(error):
        return "Check the spelling; a protocol that fsspec does not know needs the package that brings it."
    return "Check the URL, storage_options and the connection, then start again."


def _command(extra: str) -> str:
    return f"it: pip install 'monsess[{extra}]'"
