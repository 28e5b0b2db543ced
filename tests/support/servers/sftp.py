"""SFTP: OpenSSH's server."""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path

from servers.process import Server, answers, free_ports, require

_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PasswordAuthentication no
PermitRootLogin yes
StrictModes no
UsePAM no
Subsystem sftp internal-sftp
PidFile none
"""


class Sftp(Server):
    """sshd with a key of its own; the store is a folder beside its configuration."""

    name = "sftp"

    def prepare(self) -> None:
        require("sshfs", server="SFTP")
        self._sshd = require(binary="sshd", server="SFTP")
        keygen = require(binary="ssh-keygen", server="SFTP")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd, as root, puts those without privileges
        for key in ("host", "user"):
            if not (self.folder / key).exists():
                made = [keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key)]
                subprocess.run(made, check=True, stdin=subprocess.DEVNULL)
        (self._port,) = free_ports(1)
        (self.folder / "config").write_text(_CONFIG.format(port=self._port, folder=self.folder))
        (self.folder / "store").mkdir(exist_ok=True)
        self.url = f"sftp://127.0.0.1:{self._port}{self.folder}/store"
        user = pwd.getpwuid(os.geteuid()).pw_name
        self.options = {"username": user, "client_keys": [str(self.folder / "user")], "known_hosts": None}

    def launch(self) -> None:
        self.run([self._sshd, "-D", "-e", "-f", str(self.folder / "config")], self.folder / "log")

    def knock(self) -> None:
        if not answers(self._port):
            raise ConnectionError("nobody listens yet")
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True, **self.options)
        filesystem.pipe_file(f"{root}/ready", b"yes")
