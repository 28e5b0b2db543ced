"""One profiler trace: begun in the training thread, ended and stored in a thread of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import uuid
from typing import Any

import jax

from monsess.log import logger
from monsess.storage import Storage

#: Where the viewers look for traces, below the directory that they are given.
_BELOW = "plugins/profile"


class Trace:
    """A trace of some steps, from its construction to `finish`.

    Args:
        options: `jax.profiler.ProfileOptions`, or None.

    Raises:
        Exception: Whatever JAX says why there can be none now, such as that another one goes on.
    """

    def __init__(self, options: Any) -> None:
        # Only named here, and made by JAX at the end: a process that is killed meanwhile leaves nothing behind.
        self._folder = os.path.join(tempfile.gettempdir(), f"monsess-profile-{uuid.uuid4().hex}")
        self._annotation: Any = None
        self._thread: threading.Thread | None = None
        jax.profiler.start_trace(self._folder, profiler_options=options)

    def step_begins(self, number: int) -> None:
        """Mark what follows, up to `step_ends`, as a step: viewers show times by step."""
        self.step_ends()
        self._annotation = jax.profiler.StepTraceAnnotation("train", step_num=number)
        self._annotation.__enter__()

    def step_ends(self) -> None:
        """The step has been dispatched, or has failed."""
        annotation, self._annotation = self._annotation, None
        if annotation is not None:
            annotation.__exit__(None, None, None)

    def finish(self, name: str, storage: Storage, place: str, value: Any, kept: list[str]) -> None:
        """End the trace once ``value`` is there, and store it; in the background.

        Args:
            name: Of the trace, as viewers show it.
            storage: Where to.
            place: The directory in it for this process.
            value: Of the last step on the device; None: end at once.
            kept: Gets the place of what was stored.
        """
        self.step_ends()
        work = (name, storage, place, value, kept)
        self._thread = threading.Thread(target=self._finish, args=work, name="monsess-profiler", daemon=True)
        self._thread.start()

    def drop(self) -> None:
        """End the trace and keep nothing of it."""
        self.step_ends()
        try:
            jax.profiler.stop_trace()
        except Exception as error:
            logger.warning("The profiler could not be stopped: %s", error)
        shutil.rmtree(self._folder, ignore_errors=True)

    def wait(self, seconds: float) -> bool:
        """Wait until the trace is stored, or was given up; whether it was."""
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _finish(self, name: str, storage: Storage, place: str, value: Any, kept: list[str]) -> None:
        try:
            if value is not None:
                value.block_until_ready()
        except Exception:
            pass  # a step that fails on the devices is the session's affair
        try:
            jax.profiler.stop_trace()
            kept.append(self._store(storage, f"{place}/{_BELOW}/{name}"))
            logger.info("Saved the trace of %s in %s", name.replace("_", " "), kept[-1])
        except Exception as error:  # a trace is worth a warning, and never a training
            logger.warning("The trace of %s is lost: %s: %s", name.replace("_", " "), type(error).__name__, error)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _store(self, storage: Storage, target: str) -> str:
        storage.delete_tree(target)  # of an attempt that was rolled back, perhaps on another machine
        for folder, _, names in os.walk(self._folder):
            for name in names:
                storage.upload(f"{target}/{name}", os.path.join(folder, name))
        return f"{storage.shown.rstrip('/')}/{target}"
