"""No process outlives its launcher, not even one that is killed with SIGKILL.

This file is run as a program by an interpreter that imports nothing else, in two roles:

``guard.py watch FOLDER`` lives as long as the launcher. It is told the group of every process on its standard input,
which only the launcher holds open; when that ends, it kills the groups that are left and removes FOLDER.

``guard.py gate COMMAND ...`` becomes COMMAND, keeping its process id, as soon as a byte comes on its standard input.
The launcher sends it after it has told the watch, so that there is no moment at which a process would be left behind.
"""

from __future__ import annotations

import os
import signal
import sys

#: int: exit status of a process whose command could not be run; that of a shell.
NOT_RUN = 127


def watch(folder: str) -> None:
    """Wait for the launcher's end; then kill every group that it had not taken back, and remove ``folder``."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it has to come after all others
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:  # over
            pass
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def gate(command: list[str]) -> None:
    """Become ``command`` when the launcher says so, or end if it does not live long enough for that."""
    # Signals come from the launcher, which a shell may have started with some of them ignored; the others are those
    # that this interpreter ignores and a program that is no Python does not expect to find so.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if not os.read(0, 1):
        sys.exit(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"monsess: could not run {command[0]}: {error.strerror}\n")
        sys.exit(NOT_RUN)


if __name__ == "__main__":
    watch(sys.argv[2]) if sys.argv[1] == "watch" else gate(sys.argv[2:])
