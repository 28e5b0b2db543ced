"""The command line: ``monsess ls URL`` and its sisters. Every command is one file; this one picks and calls it.

Exit status: 0 yes, sound, done; 1 the answer is no (damaged, differs, refused, nothing there); 2 the command was called
wrongly; 3 it could not be found out, because the store did not answer. 130 and 141 are those of a shell for Ctrl-C and
a closed pipe. ``monsess run`` passes on the status of what it runs.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NamedTuple, NoReturn, Protocol, cast

import jax

from monsess.commands.console import Console
from monsess.commands.options import OPTIONS_VARIABLE, Parser, UsageError, storage_options
from monsess.errors import MonsessError, StorageError
from monsess.log import logger, mask, secrets_of

__all__ = ["COMMANDS", "Command", "main", "parser"]

YES, NO, USAGE, UNKNOWN = 0, 1, 2, 3
_INTERRUPTED, _BROKEN_PIPE, _TERMINATED = 130, 141, 143


class _Module(Protocol):
    def configure(self, parser: Parser) -> None: ...
    def run(self, args: object, console: Console) -> int: ...


class Command(NamedTuple):
    """One subcommand.

    Args:
        name: As it is typed.
        module: Its module in this package, which has ``configure(parser)`` and ``run(args, console) -> status``.
        summary: One line for ``monsess --help``.
        example: What stands behind ``monsess NAME URL`` in a call that does something; tests go through all of them.
        takes_url: Whether it looks after a checkpoint directory.
        computes: Whether it uses the devices.
    """

    name: str
    module: str
    summary: str
    example: tuple[str, ...] = ()
    takes_url: bool = True
    computes: bool = False


#: tuple[Command, ...]: all subcommands, in the order of ``monsess --help``.
COMMANDS = (
    Command("run", "run", "run a script as several processes on this machine, with restarts", takes_url=False),
    Command("ls", "ls", "list the steps of a checkpoint directory, or the runs in a directory, with their state"),
    Command("report", "report", "write a page about a run: curves, time, checkpoints and restarts, hooks"),
    Command("tail", "tail", "look on while a run records values and events, wherever it runs", ("--wait", "0")),
    Command("show", "show", "what one step holds: leaves, hooks, input position, versions", ("newest",)),
    Command("verify", "verify", "read every byte of steps and compare it with what was committed", ("--all",)),
    Command("diff", "diff", "compare the leaves of two steps bit for bit", ("newest", "newest")),
    Command("pin", "pin", "protect steps from deletion, or take the protection away", ("newest",)),
    Command("prune", "prune", "delete the steps that a policy does not keep", ("--keep-last", "1", "--yes")),
    Command("unlock", "unlock", "take a directory away from a run that is over and did not say so"),
    Command(
        "check-store",
        "check_store",
        "find out whether a store can be trusted with checkpoints, and its speed",
        ("--size-mb", "1"),
    ),
    Command(
        "evaluate",
        "evaluate",
        "evaluate the checkpoints of a run as they come",
        ("monsess.state_norm:evaluator", "--once"),
        computes=True,
    ),
)


def parser() -> Parser:
    """The whole command line."""
    from monsess import __version__

    top = Parser(
        prog="monsess",
        description="Run training on several processes; look after checkpoint directories, without a device.",
        epilog="Exit status: 0 yes or done, 1 the answer is no, 2 called wrongly, 3 the store could not be looked at; "
        "of run, that of the script. "
        f"Credentials: --storage-options FILE, or JSON in {OPTIONS_VARIABLE}; never on a command line.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"monsess {__version__}")
    chosen = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        module = _module(command)
        below = chosen.add_parser(command.name, help=command.summary, description=module.__doc__, allow_abbrev=False)
        module.configure(below)
        below.set_defaults(module=module)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Its arguments; None for those of this process.

    Returns:
        The exit status.
    """
    if argv is None:
        _as_a_program()
    secrets: tuple[str, ...] = ()
    console = Console()
    try:
        try:
            args = parser().parse_args(argv)
            if args.command is None:
                raise UsageError("a command is missing (try: monsess --help)")
            secrets = _secrets(args)
            console = Console(as_json=getattr(args, "json", False))
            with _warnings_as_notes(console, secrets):
                status = args.module.run(args, console)
        except SystemExit as leaving:  # --help and --version
            status = leaving.code if isinstance(leaving.code, int) else YES
        except UsageError as error:
            console.note(mask(str(error), secrets))
            status = USAGE
        except MonsessError as error:
            console.note(mask(_for_a_shell(error), secrets))
            status = UNKNOWN if isinstance(error, StorageError) else NO
        except KeyboardInterrupt:
            console.note("interrupted")
            status = _INTERRUPTED
        except BrokenPipeError:
            raise
        except Exception as error:
            console.note(mask(f"this should not happen: {type(error).__name__}: {error}", secrets))
            if os.environ.get("MONSESS_DEBUG"):
                console.note(mask(traceback.format_exc(), secrets))
            status = UNKNOWN
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
        return _BROKEN_PIPE
    except OSError as error:
        console.note(f"could not write the output ({error})")
        return UNKNOWN
    return status


def _secrets(args: object) -> tuple[str, ...]:
    """What must not be shown, should an error of any library repeat it."""
    found: list[str] = []
    urls = [getattr(args, "url", ""), *getattr(args, "other", ())]
    for file in {getattr(args, "storage_options", None), getattr(args, "other_storage_options", None)}:
        options = storage_options(file)
        for url in urls:
            found += secrets_of(url, options)
    return tuple(found)


def _for_a_shell(error: MonsessError) -> str:
    """What an error says; the argument of a function has another name on the command line."""
    text = str(error)
    if isinstance(error, StorageError):
        what, end, advice = text.rpartition("). ")
        shell = f"the storage options (--storage-options FILE, or {OPTIONS_VARIABLE})"
        text = what + end + advice.replace("storage_options", shell)
    return text


class _Notes(logging.Handler):
    """Writes each warning once, as a line of the command."""

    def __init__(self, console: Console, secrets: tuple[str, ...]) -> None:
        super().__init__(logging.WARNING)
        self._console, self._secrets, self._seen = console, secrets, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        text = mask(record.getMessage(), self._secrets)
        if text not in self._seen:
            self._seen.add(text)
            self._console.note(text)


@contextlib.contextmanager
def _warnings_as_notes(console: Console, secrets: tuple[str, ...]) -> Iterator[None]:
    handlers = logger.handlers
    logger.handlers = [_Notes(console, secrets)]
    try:
        yield
    finally:
        logger.handlers = handlers


def _module(command: Command) -> _Module:
    return cast("_Module", importlib.import_module(f"{__name__}.{command.module}"))


def _as_a_program() -> None:
    # Most commands compute nothing on a device, and a GPU may well be in use by the run that is looked at. The
    # environment stays as it is: `monsess run` hands it on.
    if not any(command.computes and command.name in sys.argv[1:2] for command in COMMANDS):
        jax.config.update("jax_platforms", "cpu")
    if sys.stdout is None:  # closed: whoever started it is not interested
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logger.setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, _end)  # so that what a command has put in place is taken away again


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(_TERMINATED)


def _silence_stdout() -> None:
    """Whoever read the output is gone; the interpreter's last flush must not complain about it."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass
