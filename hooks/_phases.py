"""What a thread is in the middle of, as its stack tells; it costs nothing until somebody asks."""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType
from typing import NamedTuple


class Phase(NamedTuple):
    """What a thread is doing.

    Args:
        kind: "input", "device", "processes", "save", "store", "compile", "hook", "loop" or "debugger".
        text: In words, for people.
        starting: Whether a run is started again after an error, and that is part of it.
    """

    kind: str
    text: str
    starting: bool = False


_RECOVERS = ("monsess.recovery", "Restarts._recover")
#: The innermost frame whose module (or package) and function match says what a thread does; "" stands for any function.
_KINDS = (
    ("bdb", "", "debugger", "in a debugger"),
    ("pdb", "", "debugger", "in a debugger"),  # after an error: pdb.post_mortem
    ("pydevd", "do_wait_suspend", "debugger", "in a debugger"),  # that of VS Code and PyCharm
    ("monsess.prefetch", "", "input", "waiting for the next batch of the input"),
    ("monsess.source", "", "input", "reading the next batch of the input"),
    ("monsess.feeding", "", "input", "waiting for the next batch of the input"),
    ("monsess.data", "", "input", "waiting for the next batch of the input"),
    ("jax._src.compiler", "", "compile", "compiling a step or another program"),
    ("jax._src.interpreters.mlir", "", "compile", "compiling a step or another program"),
    ("monsess.engine", "_body", "compile", "tracing a step"),
    ("monsess.channel", "", "processes", "waiting for the other processes"),
    ("monsess.checkpoint.saver", "", "save", "waiting for a checkpoint to be saved"),
    ("monsess.checkpoint", "", "save", "saving or looking at a checkpoint"),
    ("monsess.records", "", "store", "writing the records"),
    ("monsess.storage", "", "store", "waiting for the store"),
    ("monsess.dispatch", "_start", "device", "running a step"),
    ("monsess.dispatch", "", "device", "waiting for the devices"),
    ("monsess.peers", "", "device", "waiting for the devices"),
    ("monsess.watch", "", "device", "waiting for values of the devices"),
    (*_RECOVERS, "loop", "starting again after an error"),
    ("monsess.coordinator", "Coordinator.join", "loop", "waiting for the coordinator's threads to end"),
)
#: Where hooks are called, and how the method is called there.
_CALLS = {("monsess.runner", "HookRunner._call"): "method", ("monsess.runner", "HookRunner._each"): "name"}


def phase_of(frame: FrameType | None) -> Phase:
    """What the thread whose newest frame this is does.

    Args:
        frame: From `sys._current_frames`; None if there is no such thread any more.
    """
    if frame is None:
        return Phase("loop", "the thread that trains has ended")
    found: Phase | None = None
    hook, starting = None, False
    where = place_of(frame)
    one: FrameType | None = frame
    while one is not None:
        module, function = one.f_globals.get("__name__", ""), one.f_code.co_qualname
        if found is None:
            found = _found(module, function, one)
        if (module, function) in _CALLS:
            called = one.f_locals
            hook = f"{type(called.get('hook')).__qualname__}.{called.get(_CALLS[module, function])}"
            break
        starting = starting or (module, function) == _RECOVERS
        one = one.f_back
    if hook is not None:
        return (
            Phase("hook", f"in hook {hook} ({where})")
            if found is None
            else found._replace(text=f"{found.text}, for hook {hook}")
        )
    return (found or Phase("loop", f"in the program's own code ({where})"))._replace(starting=starting)


def _found(module: str, function: str, frame: FrameType) -> Phase | None:
    for name, wanted, kind, text in _KINDS:
        if (module == name or module.startswith(f"{name}.")) and (not wanted or function.endswith(wanted)):
            if function == "Dispatcher._wait_for_oldest" and isinstance(step := frame.f_locals.get("step"), int):
                text = f"{text} to finish step {step}"
            return Phase(kind, text)
    return None


def place_of(frame: FrameType) -> str:
    """File, line and function of a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def stacks() -> str:
    """The stacks of all threads but this one, with their names."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = "".join(traceback.format_stack(frame)).rstrip()
            parts.append(f"Thread {names.get(ident, '(unknown to Python)')} (most recent call last):\n{stack}")
    return "\n".join(parts)
