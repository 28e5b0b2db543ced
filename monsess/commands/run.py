"""Run a script as several processes of one job on this machine, and start all of them again when one fails.

Every process runs SCRIPT with the same ARGS; ms.Server() joins them. The first one that fails ends the others: SIGTERM,
then SIGKILL within 15 s. SIGTERM and Ctrl-C are passed on, a second Ctrl-C kills. Exit status 0 if all processes end
with 0, otherwise that of the process that failed first, 128 + n if signal n killed it. Nothing is started again after
2 (called wrongly), 130 and 143 (told to end).
"""

from __future__ import annotations

import argparse
import os
import sys

from monsess.commands.console import Console
from monsess.commands.options import Parser, UsageError, count, whole
from monsess.launch import local


def configure(parser: Parser) -> None:
    """Add the arguments of ``monsess run``."""
    parser.add_argument("-n", "--processes", metavar="N", type=count, required=True, help="how many processes")
    parser.add_argument(
        "--max-restarts",
        metavar="K",
        type=whole,
        default=0,
        help="how often all are started again, in total (default: 0)",
    )
    parser.add_argument(
        "--devices-per-process", metavar="D", type=count, help="CPU devices that each process emulates, for tests"
    )
    parser.add_argument("--log-dir", metavar="DIR", help="folder for one file per process, process-<k>.log")
    parser.add_argument(
        "-m", "--module", action="store_true", dest="as_module", help="SCRIPT is the name of a module, as in python -m"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the Python script to run")
    parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")


def run(args: argparse.Namespace, console: Console) -> int:
    """Launch; the exit status of the job."""
    if not args.as_module and not os.path.exists(args.script):
        raise UsageError(f"there is no script {args.script} in {os.getcwd()}")
    what = ["-m", args.script] if args.as_module else [args.script]
    return local.run(
        [sys.executable, *what, *args.args],
        args.processes,
        max_restarts=args.max_restarts,
        devices_per_process=args.devices_per_process,
        log_dir=args.log_dir,
    )
