"""Real servers on loopback for the tests that need one; each ends with the process that started it, however it ends."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

#: Where this is set, a server that is not installed is a failure instead of a skip.
REQUIRED = "MONSESS_REQUIRE_SERVERS"
KEY, SECRET = "AKIAMONSESSSMOKETEST", "s3cr3t/of+the-smoke.test"

# The server must not outlive a test run that is killed: the shell's standard input ends with the one who started it.
_LEASH = '"$@" & server=$!; read -r _; kill -9 $server'


def require(module: str | None = None, binary: str | None = None) -> str:
    """Skip the test that needs what is not installed, or fail it where servers are required.

    Returns:
        The path of ``binary``, if asked for.
    """
    missing = [] if module is None or importlib.util.find_spec(module) else [module]
    found = binary and shutil.which(binary, path=os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"])))
    if binary is not None and not found:
        missing.append(binary)
    if missing:
        reason = (
            f"needs a server, and this Python lacks {' and '.join(missing)}: `make servers` installs what is needed"
        )
        (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(reason)
    return found or ""


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on right now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, Any]]:
    """SeaweedFS, an S3 server, with its data in ``folder``; yields the storage options for s3fs."""
    weed = require("s3fs", "weed")
    folder.mkdir(parents=True, exist_ok=True)
    identity = {
        "name": "admin",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    names = ("s3", "master", "volume", "filer")
    ports = free_ports(2 * len(names))
    settings = {f"{name}.port": port for name, port in zip(names, ports[: len(names)], strict=True)}
    settings |= {f"{name}.port.grpc": port for name, port in zip(names, ports[len(names) :], strict=True)}
    with tempfile.TemporaryDirectory(prefix="weed-") as sockets, open(folder / "log", "wb") as log:
        settings |= {"ip": "127.0.0.1", "ip.bind": "127.0.0.1", "dir": folder, "s3.config": folder / "s3.json"}
        settings |= {"s3.localSocket": f"{sockets}/s3", "filer.localSocket": f"{sockets}/filer"}  # short enough paths
        settings |= {"s3.port.iceberg": 0, "s3.port.lance": 0}  # 0: off
        settings |= {"s3.autoCreateBucket": "false", "master.telemetry": "false"}
        settings |= {"master.volumeSizeLimitMB": 64, "volume.max": 20}
        command = [weed, "server", "-s3", *(f"-{name}={value}" for name, value in settings.items())]
        process = subprocess.Popen(
            ["sh", "-c", _LEASH, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"PATH": os.environ["PATH"], "HOME": str(folder)},
            cwd=folder,
        )
        try:
            yield _ready(process, settings["s3.port"], folder / "log")
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=30)
            for name, port in zip(names, ports[len(names) :], strict=True):  # made there whatever one tells it
                Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock").unlink(missing_ok=True)


def _ready(process: subprocess.Popen[bytes], port: int, log: Path) -> dict[str, Any]:
    """Wait until the server takes objects."""
    import s3fs

    options = {
        "key": KEY,
        "secret": SECRET,
        "endpoint_url": f"http://127.0.0.1:{port}",
        "client_kwargs": {"region_name": "us-east-1"},
    }
    deadline = time.monotonic() + 90
    while True:
        try:
            with contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=5)):
                filesystem = s3fs.S3FileSystem(**options, skip_instance_cache=True)
                filesystem.mkdir("smoke")
                filesystem.pipe_file("smoke/ready", b"yes")
                return options
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"the S3 server is not ready ({error!r}):\n{tail}") from error
            time.sleep(0.2)
