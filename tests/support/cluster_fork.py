"""A program that forks the processes of a job on request, so that only the first one pays for the imports."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from cluster_child import Options, main, prepare


def serve() -> Options | None:
    """Fork the processes of one job per request and report each end; returns the options in each child."""
    prepare()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"the process that forks has {threads} threads"
    for line in sys.stdin:
        request = json.loads(line)
        pids: dict[int, int] = {}
        for found in request["processes"]:
            options = Options.of(found)
            pid = os.fork()
            if pid == 0:
                _become_child(options)
                return options
            pids[pid] = options.index
        _tell({"pids": {index: pid for pid, index in pids.items()}})
        deadline = time.monotonic() + request["limit"]
        while pids:
            for pid in list(pids):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    _tell({"ended": pids.pop(pid), "code": os.waitstatus_to_exitcode(status), **_end(pid)})
            if time.monotonic() > deadline:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
    return None


def _become_child(options: Options) -> None:
    os.setsid()  # whatever it leaves behind is found by this
    _die_with_parent()
    for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, f"{options.index}.txt", os.O_WRONLY | os.O_CREAT)):
        os.dup2(os.open(os.path.join(options.folder, name), flags | os.O_APPEND, 0o644), number)
    os.dup2(1, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _die_with_parent() -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _end(pid: int) -> dict[str, Any]:
    """When a process ended, and whether it left processes behind, which are ended."""
    at = time.monotonic()
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return {"at": at, "left_processes": False}
    return {"at": at, "left_processes": True}


def _tell(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    wanted = serve()
    if wanted is not None:
        main(wanted)
