"""What plain Orbax wrote, read with TensorStore: Orbax itself starts JAX's devices in order to read.

A directory may be that of a ``CheckpointManager`` (a folder for each step), one such folder (with a folder for each
item), or an item by itself, as ``StandardCheckpointer`` and ``PyTreeCheckpointer`` write it. Arrays lie in OCDBT files
or in a folder each, in the zarr format 2 or 3. Orbax keeps no checksums, so that nothing here can be verified as a
checkpoint of monsess is; what is missing is an error all the same, and never zeros.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from monsess.checkpoint.commit import COMMIT, ORBAX_MARKERS, SESSION
from monsess.checkpoint.leaves import LeafSpec, dtype_name
from monsess.checkpoint.staging import StagingDirectory
from monsess.checkpoint.store import RUN
from monsess.errors import StateMismatchError, StorageError
from monsess.log import logger
from monsess.storage import Storage

Keys = tuple[str, ...]

#: Items that are the state itself. Any other is the part of the state that has its name.
_STATE_ITEMS = ("default", "state", "train_state", "pytree")
_TREE = "_METADATA"
_MANIFEST = "manifest.ocdbt"
_ARRAYS = "array_metadatas"
_STEP_FOLDER = re.compile(r"(?:.+_)?([0-9]+)")  # Orbax and Flax may write `step_000300`


@dataclasses.dataclass(frozen=True)
class Found:
    """What lies at a URL.

    Args:
        is_ours: Whether monsess wrote it, so that it is read as a store of verified steps.
        folder: The step's folder relative to the URL, ``""`` for the URL itself; None if the step is not chosen yet.
    """

    is_ours: bool
    folder: str | None


@dataclasses.dataclass(frozen=True)
class _Item:
    folder: str
    is_ocdbt: bool
    is_zarr3: bool
    holds_all_chunks: bool
    arrays: Mapping[Keys, str]
    key_impls: Mapping[str, str]


class PlainLeaves:
    """Arrays of a checkpoint, opened and not yet read.

    Args:
        opened: Per wanted path an open TensorStore and the implementation of a typed key.
        where: For messages.
    """

    def __init__(self, opened: Mapping[Keys, tuple[Any, str | None]], where: str) -> None:
        self._opened = opened
        self._where = where
        #: dict[Keys, LeafSpec]: what is stored, for each of the wanted paths that is.
        self.specs = {keys: _spec(keys, store, impl) for keys, (store, impl) in opened.items()}

    def read(self, wanted: Sequence[Keys]) -> list[np.ndarray[Any, Any]]:
        """The values of some of the arrays in host memory, for typed keys their uint32 key data.

        Raises:
            StorageError: They could not be read, or a part of them is missing.
        """
        try:
            reading = [self._opened[keys][0].read() for keys in wanted]
            return [np.asarray(future.result()) for future in reading]
        except Exception as error:
            raise _unreadable(self._where, error) from error


def look_for(storage: Storage) -> Found | None:
    """Find the checkpoint at a URL: it, or the newest finished one of those in it.

    Returns:
        None only after a listing that proved that there is none.

    Raises:
        StateMismatchError: There are folders that might be checkpoints, and none is finished.
        StorageError: It could not be looked at.
    """
    listing = _list(storage, "")
    if SESSION in listing or COMMIT in listing:
        return Found(True, "")
    if RUN in listing:
        return Found(True, None)
    if _TREE in listing or not set(ORBAX_MARKERS).isdisjoint(listing):
        if not _is_finished(storage, "", listing):
            raise StateMismatchError(_unfinished(storage.shown))
        return Found(False, "")
    unfinished: list[str] = []
    for name in _newest_first(listing, storage.shown):
        inside = _list(storage, name)
        if SESSION in inside or COMMIT in inside:
            return Found(True, None)
        if _is_finished(storage, name, inside):
            if unfinished:
                logger.warning(
                    "Ignored in %s, because Orbax did not finish them: %s.", storage.shown, ", ".join(unfinished)
                )
            return Found(False, name)
        unfinished.append(name)
    if unfinished:
        raise StateMismatchError(_unfinished(f"{', '.join(unfinished)} in {storage.shown}"))
    return None


@contextlib.contextmanager
def opened(
    storage: Storage, folder: str, wanted: Sequence[Keys], staging_dir: str | None = None
) -> Iterator[PlainLeaves]:
    """Open arrays of a checkpoint; those of a remote one are downloaded first.

    Args:
        storage: The directory.
        folder: The step's folder in it, or ``""``.
        wanted: Paths in the state. Those that are not stored are left out.
        staging_dir: Local directory for what is downloaded.

    Raises:
        StateMismatchError: There is no item of arrays.
        StorageError: It could not be read.
    """
    where = f"{storage.shown}/{folder}" if folder else storage.shown
    items = _items(storage, folder)
    if not items:
        raise StateMismatchError(
            f"{where} holds no item that Orbax's StandardSave or PyTreeSave wrote (no {_TREE}). Items of other kinds, "
            "and checkpoints of releases of Orbax and Flax before 2024, have to be loaded and saved again with Orbax."
        )
    places: dict[Keys, tuple[_Item, Keys]] = {}
    for keys in wanted:
        place = _place(items, keys)
        if place is not None:
            places[keys] = place
    with contextlib.ExitStack() as stack:
        folders: dict[str, str] = {}
        for item in items.values():
            names = [item.arrays[inside] for one, inside in places.values() if one is item]
            if not names:
                continue
            if storage.local_path is not None:
                folders[item.folder] = os.path.join(storage.local_path, item.folder).rstrip("/")
            else:
                target = stack.enter_context(StagingDirectory(staging_dir)).path
                _download(storage, item, names, target)
                folders[item.folder] = target
        try:
            context = _context()
            opening = {
                keys: _open(item, folders[item.folder], item.arrays[inside], context)
                for keys, (item, inside) in places.items()
            }
            stores = {
                keys: (future.result(), places[keys][0].key_impls.get(places[keys][0].arrays[places[keys][1]]))
                for keys, future in opening.items()
            }
        except Exception as error:
            raise _unreadable(where, error) from error
        yield PlainLeaves(stores, where)


def _list(storage: Storage, folder: str) -> Mapping[str, Any]:
    try:
        return storage.list(folder)
    except FileNotFoundError:
        return {}


def _newest_first(listing: Mapping[str, Any], where: str) -> list[str]:
    steps: dict[int, str] = {}
    for name, entry in listing.items():
        match = _STEP_FOLDER.fullmatch(name)
        if match is None or not entry.is_dir:
            continue
        other = steps.setdefault(int(match[1]), name)
        if other != name:
            raise StateMismatchError(
                f"{where} holds two folders of step {int(match[1])}, {other!r} and {name!r}. Name one: "
                f"warm_start_from={where + '/' + name!r}."
            )
    return [steps[step] for step in sorted(steps, reverse=True)]


def _is_finished(storage: Storage, folder: str, listing: Mapping[str, Any]) -> bool:
    metadata, marker = ORBAX_MARKERS
    if marker in listing:
        return True
    if metadata not in listing:
        return False
    try:  # releases that rename the folder when it is complete leave only this time behind
        content = json.loads(storage.read(_join(folder, metadata)))
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(content, dict) and bool(content.get("commit_timestamp_nsecs"))


def _unfinished(what: str) -> str:
    return (
        f"Not a finished checkpoint, for Orbax's mark is missing: {what}. Wait until it is written, or take another. "
        f"If it is known to be complete, put an empty file {ORBAX_MARKERS[1]} into it."
    )


def _items(storage: Storage, folder: str) -> dict[str, _Item]:
    listing = _list(storage, folder)
    if _TREE in listing:
        return {"": _item(storage, folder, listing)}
    names = sorted(name for name, entry in listing.items() if entry.is_dir)
    inside = storage.map([lambda n=n: _list(storage, _join(folder, n)) for n in names])
    return {
        name: _item(storage, _join(folder, name), files)
        for name, files in zip(names, inside, strict=True)
        if _TREE in files
    }


def _item(storage: Storage, folder: str, listing: Mapping[str, Any]) -> _Item:
    tree = _json(storage, _join(folder, _TREE))
    try:
        rows = tree["tree_metadata"].values()
        arrays = {
            tuple(str(part["key"]) for part in row["key_metadata"]): row["value_metadata"]
            for row in rows
            if not row["value_metadata"].get("skip_deserialize")  # None and empty containers
        }
        names = {keys: ".".join(keys) for keys, value in arrays.items() if value["value_type"] != "string"}
        impls: dict[str, str] = {}
        if _ARRAYS in listing:
            for name in storage.list(_join(folder, _ARRAYS)):
                for one in _json(storage, _join(folder, f"{_ARRAYS}/{name}"))["array_metadatas"]:
                    about = one["array_metadata"]
                    impl = (about.get("ext_metadata") or {}).get("random_key_impl")
                    if impl:
                        impls[about["param_name"]] = str(impl)
        return _Item(
            folder,
            _MANIFEST in listing,
            bool(tree.get("use_zarr3")),
            bool(tree.get("store_array_data_equal_to_fill_value")),
            names,
            impls,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise _unreadable(f"{storage.shown}/{_join(folder, _TREE)}", error) from error


def _place(items: Mapping[str, _Item], keys: Keys) -> tuple[_Item, Keys] | None:
    """The item that holds a leaf of the state, and the leaf's path in it."""
    for name in ("", *_STATE_ITEMS):
        if name in items and keys in items[name].arrays:
            return items[name], keys
    if keys and keys[0] in items and keys[1:] in items[keys[0]].arrays:
        return items[keys[0]], keys[1:]
    if len(items) == 1:
        (item,) = items.values()
        if keys in item.arrays:
            return item, keys
    return None


def _download(storage: Storage, item: _Item, names: Sequence[str], target: str) -> None:
    sizes = storage.walk(item.folder)
    if not item.is_ocdbt:  # a folder for each array: no more than those that are wanted
        sizes = {name: size for name, size in sizes.items() if any(name.startswith(f"{n}/") for n in names)}

    def fetch(name: str, size: int | None) -> None:
        parts = name.split("/")
        if not {"", ".", ".."}.isdisjoint(parts):
            raise StorageError(
                f"{_join(item.folder, name)!r} in {storage.shown} has a name that no local file can have."
            )
        path = os.path.join(target, *parts)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            found = storage.download(_join(item.folder, name), path)
        except FileNotFoundError as error:
            raise _unreadable(storage.shown, error) from error
        if size is not None and found.size != size:
            raise StorageError(
                f"{_join(item.folder, name)!r} in {storage.shown} is listed with {size} bytes and gave {found.size}. "
                "Try again; if it stays so, the object is damaged."
            )

    storage.map([lambda n=n, s=s: fetch(n, s) for n, s in sizes.items()])


def _context() -> Any:
    import tensorstore

    return tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": {"limit": 16}})


def _open(item: _Item, folder: str, name: str, context: Any) -> Any:
    import tensorstore

    files = {"driver": "file", "path": folder + "/"}
    store: dict[str, Any] = {"driver": "ocdbt", "base": files, "path": f"{name}/"}
    if not item.is_ocdbt:
        store = {"driver": "file", "path": f"{folder}/{name}/"}
    spec: dict[str, Any] = {"driver": "zarr3" if item.is_zarr3 else "zarr", "kvstore": store}
    if item.holds_all_chunks:
        spec["fill_missing_data_reads"] = False
    return tensorstore.open(spec, open=True, read=True, context=context)


def _spec(keys: Keys, store: Any, impl: str | None) -> LeafSpec:
    dtype = np.dtype(store.dtype.numpy_dtype)
    return LeafSpec("/".join(keys), keys, "key" if impl else "array", tuple(store.shape), dtype_name(dtype), impl)


def _json(storage: Storage, name: str) -> Any:
    data = storage.read(name)
    try:
        return json.loads(data)
    except ValueError as error:
        raise _unreadable(f"{storage.shown}/{name}", error) from error


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _unreadable(where: str, error: BaseException) -> StorageError:
    text = str(error).splitlines()[0][:300] if str(error) else ""
    return StorageError(
        f"The Orbax checkpoint in {where} could not be read ({type(error).__name__}: {text}). It is damaged, was "
        "deleted meanwhile, or comes from a release of Orbax that this version of monsess does not know."
    )
