"""S3: SeaweedFS, one program that is master, volume, filer and S3 gateway."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from servers.process import KEY, SECRET, Server, answers, free_ports, require

_PARTS = ("s3", "master", "volume", "filer")


class S3(Server):
    """SeaweedFS with the bucket ``smoke``."""

    name = "s3"
    url = "s3://smoke"

    def prepare(self) -> None:
        require("s3fs", server="SeaweedFS")
        weed = require(binary="weed", server="SeaweedFS")
        identity = {
            "name": "admin",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        ports = free_ports(2 * len(_PARTS))
        self._grpc = dict(zip(_PARTS, ports[len(_PARTS) :], strict=True))
        settings = {f"{part}.port": port for part, port in zip(_PARTS, ports[: len(_PARTS)], strict=True)}
        settings |= {f"{part}.port.grpc": port for part, port in self._grpc.items()}
        self._sockets = tempfile.TemporaryDirectory(prefix="weed-")  # short enough paths for sockets
        settings |= {"s3.localSocket": f"{self._sockets.name}/s3", "filer.localSocket": f"{self._sockets.name}/filer"}
        settings |= {
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "dir": self.folder,
            "s3.config": self.folder / "s3.json",
        }
        settings |= {"s3.port.iceberg": 0, "s3.port.lance": 0}  # 0: off
        settings |= {"s3.autoCreateBucket": "false", "master.telemetry": "false"}
        settings |= {"master.electionTimeout": "1s"}  # there is nobody else to elect, and a restart waits for it
        settings |= {"master.volumeSizeLimitMB": 64, "volume.max": 20}
        self._command = [weed, "server", "-s3", *(f"-{name}={value}" for name, value in settings.items())]
        self._port = settings["s3.port"]
        self.options = {
            "key": KEY,
            "secret": SECRET,
            "endpoint_url": f"http://127.0.0.1:{self._port}",
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def launch(self) -> None:
        self.run(self._command, self.folder / "log")

    def knock(self) -> None:
        import s3fs

        if not answers(self._port):  # cheaper than the client's own tries
            raise ConnectionError("nobody listens yet")
        filesystem = s3fs.S3FileSystem(**self.options, skip_instance_cache=True)
        filesystem.makedirs("smoke", exist_ok=True)
        filesystem.pipe_file("smoke/ready", b"yes")
        assert filesystem.cat_file("smoke/ready") == b"yes"

    def kill(self) -> None:
        super().kill()
        for part, port in self._grpc.items():  # made there whatever one tells it
            Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock").unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._sockets.cleanup()
