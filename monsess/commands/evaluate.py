"""Evaluate the checkpoints of a run as they come, in a job of its own.

TARGET names an ms.Evaluator, or a function without arguments that returns one: FILE.py:NAME or MODULE:NAME. It says
what to evaluate on which data; the directory is only read, but for the results, which are noted beside the checkpoints
so that the training's KeepBest can rank by them. Exit status 0 if something was evaluated, 1 if there was nothing to
evaluate or the evaluator's own code failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from monsess.commands.console import Console, time_text
from monsess.commands.options import Parser, UsageError, add_store, count, nothing_there, open_store, storage_options
from monsess.commands.options import step as step_number
from monsess.commands.reading import commit_of
from monsess.errors import MonsessError
from monsess.log import mask

if TYPE_CHECKING:
    from monsess.checkpoint.store import CheckpointStore
    from monsess.evaluation import EvaluationResult, Evaluator


def configure(parser: Parser) -> None:
    """Add the arguments of ``monsess evaluate``."""
    add_store(parser)
    parser.add_argument("target", metavar="TARGET", help="the evaluator: FILE.py:NAME or MODULE:NAME")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--once", action="store_true", help="evaluate the newest checkpoint and end")
    which.add_argument("--step", type=step_number, metavar="N", help="evaluate this checkpoint and end")
    which.add_argument("--all", action="store_true", help="every checkpoint in order, and not only the newest")
    parser.add_argument("--timeout", type=_secs, metavar="SECS", help="end after so long without a new checkpoint")
    parser.add_argument("--interval", type=_secs, metavar="SECS", default=0.0, help="so long between two at least")
    parser.add_argument("--max", type=count, metavar="N", help="end after so many evaluations")
    parser.add_argument("--until-step", type=step_number, metavar="N", help="end after this step or a later one")
    parser.add_argument("--log-dir", metavar="DIR", help="write the results into the metrics.jsonl of this directory")
    parser.add_argument("--no-note", action="store_true", help="write nothing into the checkpoint directory")


def run(args: argparse.Namespace, console: Console) -> int:
    """Evaluate; 0 if something was."""
    options = storage_options(args.storage_options)
    store = open_store(args)
    _check_log_dir(args.log_dir, store)
    results: list[EvaluationResult] = []
    try:
        with _own_errors(args.target, store):
            _evaluate(args, options, results, console)
    except BaseException:
        if results:
            console.document(_document(store, results))
        raise
    console.document(_document(store, results))
    if not results:
        console.say(nothing_there(store))
    return 0 if results else 1


def _evaluate(
    args: argparse.Namespace, options: dict[str, Any], results: list[EvaluationResult], console: Console
) -> None:
    def take(result: EvaluationResult) -> None:
        results.append(result)
        shown = ", ".join(f"{name} = {value:g}" for name, value in result.metrics.items())
        console.say(f"{time_text(time.time())}  step {result.step}: {shown} ({result.seconds:.1f} s)")
        sys.stdout.flush()  # whoever reads it through a pipe wants it now

    evaluator = _load(args.target)
    if args.once or args.step is not None:
        _once(evaluator, args, options, take)
        return
    evaluator.evaluate_repeatedly(
        args.url,
        timeout=args.timeout,
        min_interval_secs=args.interval,
        max_number_of_evaluations=args.max,
        until_step=args.until_step,
        newest_only=not args.all,
        log_dir=args.log_dir,
        note=not args.no_note,
        on_result=take,
        storage_options=options,
    )


@contextlib.contextmanager
def _own_errors(target: str, store: CheckpointStore) -> Iterator[None]:
    """An error of the code that ``target`` names is shown as Python shows it: whoever wrote that has to find it."""
    try:
        yield
    except (MonsessError, UsageError, BrokenPipeError):
        raise
    except Exception as error:
        secrets = store._storage._secrets
        sys.stderr.write(mask("".join(traceback.format_exception(error)), secrets))
        raise MonsessError(f"{target} failed: {type(error).__name__}: {error}") from error


def _check_log_dir(log_dir: str | None, store: CheckpointStore) -> None:
    from monsess.evaluation import check_log_dir

    try:
        check_log_dir(log_dir, store)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _document(store: CheckpointStore, results: list[EvaluationResult]) -> dict[str, Any]:
    return {"url": store.url, "evaluations": [result._asdict() for result in results]}


def _once(
    evaluator: Evaluator, args: argparse.Namespace, options: dict[str, Any], take: Callable[[EvaluationResult], None]
) -> None:
    store = open_store(args)
    if args.step is not None:
        commit_of(store, args.step)
    elif not store.steps():
        return
    result = evaluator.evaluate_once(args.url, args.step, storage_options=options)
    evaluator.publish(result, None if args.no_note else args.url, log_dir=args.log_dir, storage_options=options)
    take(result)


def _load(target: str) -> Evaluator:
    """The evaluator that ``target`` names.

    Raises:
        UsageError: There is none.
    """
    from monsess.evaluation import Evaluator

    where, colon, name = target.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise UsageError(f"the target must be FILE.py:NAME or MODULE:NAME, found {mask(target)!r}")
    module = _module(where)
    try:
        found = getattr(module, name)
    except AttributeError:
        raise UsageError(f"{where} has no {name}") from None
    if not isinstance(found, Evaluator) and callable(found):
        found = found()
    if not isinstance(found, Evaluator):
        raise UsageError(f"{target} is no monsess.Evaluator and returns none, found a {type(found).__name__}")
    return found


def _module(where: str) -> Any:
    if where.endswith(".py"):
        if not os.path.exists(where):
            raise UsageError(f"there is no file {where} in {os.getcwd()}")
        folder, name = os.path.dirname(os.path.abspath(where)), os.path.basename(where)[:-3]
    else:
        folder, name = os.getcwd(), where
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as Python does for a script: its neighbours can be imported
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {name}") from None
        raise MonsessError(f"{where} could not be imported: {error}") from error


def _secs(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, found {mask(text)!r}")
    return value
