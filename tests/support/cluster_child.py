"""One process of a training of several, told by `Options` what goes wrong in it and where; see `cluster`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

ROWS = 8  # of a global batch


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that a process does at a place of its program, once.

    Args:
        process: Which one; None: every one.
        at: "joining", "joined", "begin", "init" (called on the chief alone), "restore" (on another process: receiving
            the state), "created", "input", "body", "step" (while it is compiled), "before_run", "after_run",
            "before_save", "commit" (in the thread that writes) and "after_save" (these three on the chief alone),
            "left" (the loop), "end", "ending" (after it), "on_error" or "closed". All but "commit" and "input", which
            has a thread of its own, in the training thread.
        do: Anywhere: "sleep", "hang", "raise", "raise_beside_thread" (one that never ends), "kill", "freeze"
            (SIGSTOP), "term", "int", "preempt" (by `ms.request_preemption` from a thread).
            In "body" too: "break", "without_hooks", "other_shape" and "save"; in "created", "body" and "after_run"
            "request_stop"; in "body" and "ending" "eval".
        step: The global step at that moment, or the number of the batch; None: the first time.
        seconds: To sleep.
    """

    process: int | None
    at: str
    do: str
    step: int | None = None
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Options:
    """What all processes of a job are told.

    Args:
        folder: For outputs and reports.
        index: Which process this is.
        count: How many there are.
        address: Of process 0, or None if there is no job to join.
        devices: Of this process.
        url: The checkpoint directory; ``{index}`` in it is filled in.
        steps: The limit of the `StopAtStepHook`; None: there is none.
        batches: How many batches each process has; None: enough.
        stored: Whether the input has a state of its own.
        redistributable: Whether that state can be split anew.
        engine: Of the steps.
        events: What is to happen.
        clock_ahead: Seconds by which the clock of each process is ahead.
        failure_secs: ``failure_timeout_secs`` of server and session.
        session: More arguments of the session.
        sleeps: Seed of short sleeps at random places of all processes; None: there are none.
        call: ``module:function`` called with the options instead of the training; returns the report.
        arguments: For ``call``.
        environ: Variables that are set before JAX is used; ``{index}`` and ``{folder}`` in them are filled in.
    """

    folder: str
    index: int = 0
    count: int = 1
    address: str | None = None
    devices: int = 1
    url: str | None = None
    steps: int | None = 6
    batches: tuple[int, ...] | None = None
    stored: bool = False
    redistributable: bool = True
    engine: str = "pmap"
    events: tuple[Event, ...] = ()
    clock_ahead: tuple[float, ...] | None = None
    failure_secs: float = 15.0
    session: dict[str, Any] = dataclasses.field(default_factory=dict)
    sleeps: int | None = None
    call: str | None = None
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    environ: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, found: dict[str, Any]) -> Options:
        """What `dataclasses.asdict` and JSON have made of it, back."""
        lists = {"events": tuple(Event(**event) for event in found["events"])}
        return cls(**{**found, **lists})


class Script:
    """Lets the events of one process happen, and writes down when they did.

    Args:
        options: Which, and where.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._left = [e for e in options.events if e.process in (None, options.index)]
        self._lock = threading.Lock()
        self._log = os.path.join(options.folder, f"{options.index}.events")
        if options.sleeps is not None:
            import random

            self._random = random.Random(f"{options.sleeps} {options.index}")

    def at(self, place: str, step: int | None = None) -> str | None:
        """Do what is due here; returns what only the training's body can do."""
        if self._options.sleeps is not None and self._random.random() < 0.25:
            time.sleep(self._random.choice((0.001, 0.01, 0.05, 0.2)))
        with self._lock:
            due = [e for e in self._left if e.at == place and e.step in (None, step)]
            if not due:
                return None
            event = due[0]
            self._left.remove(event)
        with open(self._log, "a") as file:
            print(time.monotonic(), event.do, place, step, file=file)
        return self._do(event)

    def _do(self, event: Event) -> str | None:
        numbers = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "term": signal.SIGTERM, "int": signal.SIGINT}
        if event.do == "sleep":
            time.sleep(event.seconds)
        elif event.do == "hang":
            while True:
                time.sleep(1)
        elif event.do.startswith("raise"):
            if event.do == "raise_beside_thread":
                threading.Thread(target=time.sleep, args=(3600,), name="user's").start()  # Python's exit joins it
            raise ValueError(f"planned in process {self._options.index}, {event.at}")
        elif event.do in numbers:
            os.kill(os.getpid(), numbers[event.do])
        elif event.do == "preempt":
            import monsess as ms

            thread = threading.Thread(target=ms.request_preemption)
            thread.start()
            thread.join()
        else:
            return event.do
        return None


def train(options: Options, script: Script) -> None:
    """Train on this process's part of the batches, and leave a report, whatever happens."""
    import toy

    import monsess as ms

    def update(state: Any, batch: Any) -> Any:
        script.at("step")
        return toy._update(state, batch)

    step = ms.train_step(update, engine=options.engine)
    evaluate = ms.eval_step(toy.evaluate.function, engine=options.engine)
    rows = slice(options.index * ROWS // options.count, (options.index + 1) * ROWS // options.count)
    number = 1000 if options.batches is None else options.batches[options.index]

    def init_fn() -> Any:
        script.at("init")
        return toy.init_fn()

    rest = toy.batch(10**6)
    rest = {name: leaf[rows] for name, leaf in rest.items()}
    saves: list[int] = []
    hooks: list[Any] = [_hook(script, lambda session: session.run(evaluate, rest), saves)]
    if options.steps is not None:
        hooks.insert(0, ms.StopAtStepHook(last_step=options.steps))
    more = dict(options.session)
    url = None if options.url is None else options.url.replace("{index}", str(options.index))
    if url is not None:
        if not {"save_checkpoint_steps", "save_checkpoint_secs"} & more.keys():
            more["save_checkpoint_steps"] = 3
        hooks.append(_listening(script))
    more.setdefault("failure_timeout_secs", options.failure_secs)
    report: dict[str, Any] = {}
    sess, patience = None, 3.0
    try:
        with _planted(script):
            sess = ms.MonitoredTrainingSession(
                init_fn, data=_Batches(number, rows, script, options), checkpoint_dir=url, hooks=hooks, **more
            )
        with _planted(script), sess:
            report["began"] = sess.global_step
            while not sess.should_stop():
                do = script.at("body", sess.global_step)
                own = toy.batch(sess.global_step)
                own = {name: leaf[rows] for name, leaf in own.items()}
                if do == "break":
                    break
                if do == "eval":
                    sess.run(evaluate, own)
                elif do == "without_hooks":
                    sess.run_without_hooks(step)
                elif do == "other_shape":
                    sess.run(step, {name: leaf[: -options.devices] for name, leaf in own.items()})
                elif do == "request_stop":
                    sess.request_stop("planned")
                elif do == "save":
                    sess.request_save()
                sess.run(step)
            script.at("left")
        script.at("closed")
        leaves = {name: toy._host(leaf) for name, leaf in sess.state_copy().items()}
        report["state"] = {name: [str(leaf.dtype), leaf.tolist()] for name, leaf in leaves.items()}
        report["bits"] = {name: leaf.tobytes().hex() for name, leaf in leaves.items()}
    except BaseException as error:
        report["error"] = f"{type(error).__name__}: {error}"
        if isinstance(error, Exception):
            patience = 0.0  # the watch goes on until the exit, which is not to be later than without this report
        raise
    finally:
        if sess is not None:
            report |= sess.summary()
            report["saved_at"] = saves
            report["reason"] = None if sess.stop_reason is None else str(sess.stop_reason)
        with _undisturbed():
            report["threads"] = _threads(patience)
            write_report(options, report)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A SIGTERM that comes while the report is written, which is no part of a training, has its effect afterwards."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        for number in came[:1]:
            signal.raise_signal(number)


def write_report(options: Options, report: Any) -> None:
    """Leave ``<index>.json``, whole."""
    path = os.path.join(options.folder, f"{options.index}.json")
    with open(f"{path}.new", "w") as file:
        json.dump(report, file)
    os.replace(f"{path}.new", path)


def _threads(seconds: float) -> list[str]:
    """The threads beside this one that do not end within some seconds; those of the store go once they are idle."""
    deadline = time.monotonic() + seconds
    while True:
        names = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
        found = [name for name in names if name != "monsess-storage"]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def _hook(script: Script, run_eval: Any, saves: list[int]) -> Any:
    import monsess as ms

    class Events(ms.SessionRunHook):
        def begin(self) -> None:
            self.session: Any = None
            script.at("begin")

        def after_create_session(self, session: Any, coord: Any) -> None:
            self.session = session
            if script.at("created", session.global_step) == "request_stop":
                session.request_stop("planned")

        def state_dict(self) -> dict[str, Any]:
            if self.session is not None:
                saves.append(self.session.global_step)  # asked for with every save, on all processes
            return {}

        def before_run(self, run_context: Any) -> None:
            script.at("before_run", run_context.global_step)

        def after_run(self, run_context: Any, run_values: Any) -> None:
            do = script.at("after_run", run_context.global_step)
            if do == "request_stop":
                run_context.request_stop("planned")

        def end(self, session: Any) -> None:
            script.at("end", session.global_step)
            if script.at("ending", session.global_step) == "eval":
                run_eval(session)

        def on_error(self, session: Any, error: BaseException) -> None:
            script.at("on_error")

    return Events()


def _listening(script: Script) -> Any:
    import monsess as ms

    class Listens(ms.CheckpointSaverListener):
        def before_save(self, session: Any, step: int) -> None:
            script.at("before_save", step)

        def after_save(self, session: Any, step: int) -> None:
            script.at("after_save", step)

    class Registers(ms.SessionRunHook):
        def after_create_session(self, session: Any, coord: Any) -> None:
            session.add_saver_listener(Listens())

    return Registers()


class _Batches:
    """This process's rows of batches that are the same whenever they are asked for."""

    def __init__(self, number: int, rows: slice, script: Script, options: Options) -> None:
        self._number = number
        self._rows = rows
        self._script = script
        self._next = 0
        if options.stored:
            self.get_state = lambda: {"next": self._next}
            self.set_state = self._set_state
            if options.redistributable:
                self.redistribute = lambda states, index, count: states[0]

    def _set_state(self, state: Any) -> None:
        self._next = state["next"]

    def __iter__(self) -> Iterator[Any]:
        if not hasattr(self, "get_state"):
            self._next = 0
        import toy

        while self._next < self._number:
            self._script.at("input", self._next)
            whole = toy.batch(self._next)
            self._next += 1
            yield {name: leaf[self._rows] for name, leaf in whole.items()}


@contextlib.contextmanager
def _planted(script: Script) -> Iterator[None]:
    """Events at places that no hook reaches."""
    import monsess.beginning as beginning
    import monsess.checkpoint.publish as publish
    import monsess.saving as saving

    def before(function: Any, place: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if function is not make_room:
                script.at(place, args[1] if place == "commit" else None)
            elif args[0]._storage.local_path is not None:  # there a rename commits, and this comes just before it
                script.at(place, args[2])
            return function(*args, **kwargs)

        return call

    make_room = publish.make_room
    places = [(publish, "_commit", "commit"), (publish, "make_room", "commit"), (saving, "find_restorable", "restore")]
    places.append((beginning, "receive_state", "restore"))
    kept = [(module, name, getattr(module, name)) for module, name, _ in places]
    for module, name, place in places:
        setattr(module, name, before(getattr(module, name), place))
    try:
        yield
    finally:
        for module, name, function in kept:
            setattr(module, name, function)


def main(options: Options) -> None:
    """What one process does from its start to its end."""
    from monsess.testing import emulate_devices

    for name, value in options.environ.items():
        os.environ[name] = value.format(index=options.index, folder=options.folder)
    emulate_devices(options.devices)
    import monsess as ms
    from monsess import clock

    script = Script(options)
    script.at("joining")
    if options.address is not None:
        found = {"COORDINATOR": options.address, "PROCESS_ID": options.index, "PROCESS_COUNT": options.count}
        found |= {"LAUNCH_ID": "c0", "ATTEMPT": 0}
        os.environ |= {f"MONSESS_{name}": str(value) for name, value in found.items()}
        ms.Server(start_timeout_secs=60, failure_timeout_secs=options.failure_secs)
    script.at("joined")
    if options.clock_ahead is not None:
        ahead = options.clock_ahead[options.index]

        class Skewed(clock.SystemClock):
            def monotonic(self) -> float:  # type: ignore[override]
                return time.monotonic() + ahead

            def time(self) -> float:  # type: ignore[override]
                return time.time() + ahead

        clock.install(Skewed())
    if options.call is not None:
        module, _, name = options.call.partition(":")
        write_report(options, getattr(importlib.import_module(module), name)(options))
    else:
        train(options, script)


def prepare() -> None:
    """Import all that training needs; no device is touched and no thread started."""
    from monsess.testing import emulate_devices

    emulate_devices(1)
    import orbax.checkpoint  # noqa: F401
    import tensorstore  # noqa: F401
    import toy  # noqa: F401

    import monsess.hooks  # noqa: F401
