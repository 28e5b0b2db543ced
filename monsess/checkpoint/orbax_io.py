"""Orbax's part: a step directory that a plain ``orbax.checkpoint.CheckpointManager`` restores.

Orbax writes. What monsess restores it reads with TensorStore, the library that Orbax itself reads with, because Orbax
starts JAX's devices in order to read.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from monsess.checkpoint.commit import ITEM, ORBAX_MARKERS

_FILES = 16
_SMALLEST_FILE, _BIGGEST_FILE, _ORBAX_LIMIT = 4 << 20, 128 << 20, 2 << 30
#: Leaf of a state that has no other that Orbax can hold: it refuses to write nothing.
_PLACEHOLDER = "monsess_has_all_leaves_in_session_json"

_writing = threading.Lock()
_LONGEST_WRITE_SECS = 300.0  # as long as Orbax itself waits for a part of a save


def warm_up() -> None:
    """Import what writing needs, which takes a while."""
    with _logging_left_alone():
        import orbax.checkpoint  # noqa: F401


def write(directory: str, step: int, tree: Any) -> None:
    """Write ``tree`` as the Orbax step directory ``directory``, which must not exist.

    Only this process takes part, whatever ``jax.process_count()`` says.

    Args:
        directory: Absolute local path.
        step: For the texts that Orbax's marker files hold.
        tree: Nested dicts and lists of numpy arrays, Python scalars and None; nobody may change it meanwhile.
    """
    if all(leaf is None for leaf in _leaves(tree)):
        tree = {_PLACEHOLDER: np.zeros((), np.uint8)}
    with _alone(), _logging_left_alone():
        _write(directory, tree)
    for folder in (directory, os.path.join(directory, ITEM)):
        marker = os.path.join(folder, ORBAX_MARKERS[1])
        with open(marker, "w", encoding="ascii") as file:  # Orbax puts the path of the staging directory here
            file.write(f"Checkpoint commit was successful to {step}\n")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Inside the block no other thread of this process writes, be it for another session.

    Orbax has one number for the save that is going on, for the whole process: of two saves at once, each may wait for
    what the other one has done, or write before its own folders are there.
    """
    entered = _writing.acquire(timeout=_LONGEST_WRITE_SECS)  # one that hangs for good does not keep others for good
    try:
        yield
    finally:
        if entered:
            _writing.release()


def _write(directory: str, tree: Any) -> None:
    import jax
    import orbax.checkpoint as ocp
    from orbax.checkpoint import type_handlers

    alone = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix=f"monsess_{os.getpid()}"
    )
    scalar = type_handlers.ScalarHandler()  # a bool is an int; registered beside it, it would take its place
    handlers = type_handlers.create_type_handler_registry(
        *((kind, scalar) for kind in (int, float, np.number)),
        (jax.Array, type_handlers.get_type_handler(jax.Array)),  # there are none, and Orbax warns where it has none
        (np.ndarray, type_handlers.NumpyHandler(deepcopy_host_arrays=False)),  # the values are the saver's own
    )
    items: dict[str, Any] = {
        ITEM: ocp.PyTreeCheckpointHandler(
            multiprocessing_options=alone,
            type_handler_registry=handlers,
            use_ocdbt=True,
            use_zarr3=False,
            use_compression=False,  # it takes longer than a disk, and a second copy of the state
        )
    }
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone), **items
    )
    with (
        _literal(os.path.dirname(directory)) as folder,
        ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer,
    ):
        path = os.path.join(folder, os.path.basename(directory))
        arrays = ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=_file_bytes(tree))
        checkpointer.save(path, ocp.args.Composite(**{ITEM: arrays}))


def read(directory: str, names: Sequence[str]) -> list[np.ndarray[Any, Any]]:
    """Read arrays of an Orbax step directory into host memory, without starting any device.

    Args:
        directory: Absolute local path of the step.
        names: Orbax's names of the arrays: the parts of their paths joined with dots.
    """
    if not names:
        return []
    import tensorstore

    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": {"limit": 16}})
    with _literal(directory) as folder:
        base = {"driver": "file", "path": os.path.join(folder, ITEM) + "/"}

        def spec(name: str) -> dict[str, Any]:
            return {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}

        opening = [tensorstore.open(spec(name), open=True, read=True, context=context) for name in names]
        reading = [future.result().read() for future in opening]
        return [np.asarray(future.result()) for future in reading]


@contextlib.contextmanager
def _logging_left_alone() -> Iterator[None]:
    """Keeps absl, through which Orbax logs, from configuring the program's logging and from filling it.

    absl calls ``logging.basicConfig()`` with every line as long as the root logger has no handler, after which the
    program's own set-up is ignored without a word. A handler that does nothing prevents that while Orbax works; what
    Orbax says of each save below a warning is dropped, and only in this thread.
    """
    root, orbax = logging.getLogger(), logging.getLogger("absl")
    placeholder = None if root.handlers else logging.NullHandler()
    thread = threading.get_ident()

    def worth_it(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or record.thread != thread

    if placeholder is not None:
        root.addHandler(placeholder)
    orbax.addFilter(worth_it)
    try:
        yield
    finally:
        orbax.removeFilter(worth_it)
        if placeholder is not None:
            root.removeHandler(placeholder)


@contextlib.contextmanager
def _literal(folder: str) -> Iterator[str]:
    """A name of ``folder`` that Orbax and TensorStore take literally.

    Orbax looks for its own files by globbing, and TensorStore takes a backslash for a slash.
    """
    if folder == glob.escape(folder) and "\\" not in folder:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="monsess-link-") as temporary:
        link = os.path.join(temporary, "to")
        os.symlink(folder, link)
        yield link


def _file_bytes(tree: Any) -> int:
    """About how big each data file is to be: several of them are hashed, read and uploaded at the same time.

    None is smaller than the biggest array. Orbax would cut that into chunks to make it fit, which has to go into whole
    numbers: an array with a prime number of rows becomes as many chunks as it has rows.
    """
    sizes = [leaf.nbytes for leaf in _leaves(tree) if isinstance(leaf, np.ndarray)]
    wanted = min(sum(sizes) // _FILES, _BIGGEST_FILE)
    return min(max(wanted, _SMALLEST_FILE, *sizes), _ORBAX_LIMIT)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (dict, list)):
        for node in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(node)
    else:
        yield tree
