"""Ceph: one monitor, one OSD and the S3 gateway radosgw, as in many a university's data centre."""

from __future__ import annotations

import os
import subprocess
import uuid
from pathlib import Path

from servers.process import KEY, SECRET, START_SECS, Server, answers, free_ports, require

_CONFIG = """\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]
public network = 127.0.0.0/8
cluster network = 127.0.0.0/8
ms bind ipv6 = false
ms bind port min = {osd_min}
ms bind port max = {osd_max}
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
mon warn on pool no redundancy = false
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
mon max pg per osd = 1000
# A stopped store goes on when it is let go: a lease to read that ran out meanwhile (0.8 of this; 16 s by default) was
# seen not to be renewed, and what asked for the objects under it waited for ever.
osd heartbeat grace = 600
osd crush chooseleaf type = 0
run dir = {folder}/run
admin socket = {sockets}/$name.asok
log file = {folder}/log/$name.log
pid file = {folder}/run/$name.pid
keyring = {folder}/keyring
mon data = {folder}/mon
mon cluster log file = {folder}/log/cluster.log
osd data = {folder}/osd
osd objectstore = bluestore
osd memory target = 1073741824
bluestore block size = 4294967296
bluestore fsck quick fix on mount = false
rgw frontends = beast endpoint=127.0.0.1:{rgw}
rgw enable usage log = false
rgw s3 auth use sts = false
"""
_TOOLS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph-authtool", "monmaptool", "ceph")


class Ceph(Server):
    """radosgw with the bucket ``smoke``; the OSD keeps its data in a file, so that it survives a SIGKILL."""

    name = "ceph"
    url = "s3://smoke"

    def prepare(self) -> None:
        require("s3fs", server="Ceph")
        self._tools = {tool: require(binary=tool, server="Ceph") for tool in _TOOLS}
        for part in ("mon", "osd", "run", "log"):
            (self.folder / part).mkdir(exist_ok=True)
        self._mon_v2, mon_v1, self._port, *osd = free_ports(4)
        fsid = str(uuid.uuid4())
        self._addresses = f"[v2:127.0.0.1:{self._mon_v2},v1:127.0.0.1:{mon_v1}]"
        self._conf = str(self.folder / "ceph.conf")
        Path(self._conf).write_text(
            _CONFIG.format(
                fsid=fsid,
                mon_v2=self._mon_v2,
                mon_v1=mon_v1,
                osd_min=osd[0],
                osd_max=osd[0] + 50,
                rgw=self._port,
                folder=self.folder,
                sockets=self.folder / "run",
            )
        )
        self.options = {
            "key": KEY,
            "secret": SECRET,
            "endpoint_url": f"http://127.0.0.1:{self._port}",
            "client_kwargs": {"region_name": "default"},  # any other is refused as a location constraint
        }
        keyring, monmap = str(self.folder / "keyring"), str(self.folder / "monmap")
        everything = ["--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mds", "allow *"]
        self._call("ceph-authtool", "-C", keyring, "-g", "-n", "mon.", "--cap", "mon", "allow *")
        self._call("ceph-authtool", keyring, "-g", "-n", "client.admin", *everything, "--cap", "mgr", "allow *")
        gateway = ["--cap", "mon", "allow rwx", "--cap", "osd", "allow rwx"]
        self._call("ceph-authtool", keyring, "-g", "-n", "client.rgw", *gateway)
        self._call("monmaptool", "--create", "--addv", "a", self._addresses, "--fsid", fsid, "--clobber", monmap)
        self._call("ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", keyring)
        self._has_osd = False

    def launch(self) -> None:
        self._daemon("ceph-mon", "-i", "a")
        if not self._has_osd:
            self._make_osd()
            self._has_osd = True
        self._daemon("ceph-osd", "-i", "0", "--keyring", str(self.folder / "osd" / "keyring"))
        self._daemon("radosgw", "-n", "client.rgw")

    def knock(self) -> None:
        if not answers(self._port):
            raise ConnectionError("nobody listens yet")
        import s3fs

        filesystem = s3fs.S3FileSystem(**self.options, skip_instance_cache=True)
        try:
            filesystem.makedirs("smoke", exist_ok=True)
        except PermissionError:  # the user is not known yet
            user = ["user", "create", "--uid=smoke", "--display-name=smoke"]
            self._call("radosgw-admin", "-n", "client.rgw", *user, f"--access-key={KEY}", f"--secret-key={SECRET}")
            raise
        filesystem.pipe_file("smoke/ready", b"yes")
        assert filesystem.cat_file("smoke/ready") == b"yes"

    def _make_osd(self) -> None:
        osd, keyring = str(uuid.uuid4()), str(self.folder / "osd" / "keyring")
        self._call("ceph", "--connect-timeout", str(START_SECS), "osd", "new", osd)
        self._call("ceph-authtool", "-C", keyring, "-g", "-n", "osd.0")
        caps = ["osd", "allow *", "mon", "allow profile osd", "mgr", "allow profile osd"]
        self._call("ceph", "auth", "add", "osd.0", *caps, "-i", keyring)
        self._call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd, "--keyring", keyring)

    def _daemon(self, program: str, *arguments: str) -> None:
        self.run([self._tools[program], "-c", self._conf, "-f", *arguments], self.folder / f"{program}.out")

    def _call(self, program: str, *arguments: str) -> None:
        environment = {**os.environ, "CEPH_CONF": self._conf}
        configuration = [] if program in ("ceph-authtool", "monmaptool") else ["-c", self._conf]
        command = [self._tools[program], *configuration, *arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=START_SECS
        )
        if done.returncode:
            raise RuntimeError(f"{program} {arguments[:3]} failed with {done.returncode}:\n{done.stderr[-2000:]}")
