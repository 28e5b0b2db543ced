"""The leaves of a state: what each one is, whether it can be stored, and what a table of them says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import ml_dtypes
import numpy as np

from monsess.errors import UnstorableLeafError

_PYTHON_KINDS: dict[type, str] = {bool: "bool", int: "int", float: "float", complex: "complex"}
_PYTHON_TYPES = {name: kind for kind, name in _PYTHON_KINDS.items()}
_ML_DTYPES = {
    np.dtype(value)
    for value in vars(ml_dtypes).values()
    if isinstance(value, type) and issubclass(value, np.generic) and value is not np.generic
}
_SCAN_ITEMS = 1 << 22


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """What one leaf of a state is.

    Args:
        path: For people: ``"params/w"``; ``""`` if the state is a single leaf.
        keys: The path's parts as text: dict keys, list positions, attribute names.
        kind: ``"array"`` (jax or numpy, numpy scalars too), ``"key"`` (typed PRNG keys) or ``"python"``.
        shape: Shape of the stored values; for keys that of their uint32 key data.
        dtype: Name of the stored values' dtype; ``"bool"``, ``"int"``, ``"float"``, ``"complex"`` for Python scalars.
        key_impl: Name of the PRNG implementation of a typed key.
        finite: Whether a floating leaf held no infinity when it was described; None if that is not known or it
            cannot hold any.
        nodes: What each of ``keys`` is: ``d`` a dict key, ``s`` a position in a sequence, ``a`` an attribute.
    """

    path: str
    keys: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None = None
    finite: bool | None = None
    nodes: str = ""

    def __str__(self) -> str:
        if self.kind == "python":
            return f"Python {self.dtype}"
        if self.kind == "key":
            return f"PRNG key {self.key_impl}{list(self.shape[:-1])}"
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class EmptySpec:
    """A node of a state without any leaf below it: None (``"none"``), an empty sequence or any other container."""

    keys: tuple[str, ...]
    nodes: str
    kind: str


class LeafTable(list[LeafSpec]):
    """The specs of all leaves of a tree in ``jax.tree_util`` order, and its nodes without leaves."""

    def __init__(self, specs: Iterable[LeafSpec] = (), empties: Iterable[EmptySpec] = ()) -> None:
        super().__init__(specs)
        self.empties: tuple[EmptySpec, ...] = tuple(empties)

    def with_finite_of(self, earlier: Iterable[LeafSpec]) -> LeafTable:
        """The same table with the ``finite`` flags that leaves of the same path had at the start of the run."""
        flags = {spec.keys: spec.finite for spec in earlier}
        specs = (dataclasses.replace(spec, finite=flags.get(spec.keys, spec.finite)) for spec in self)
        return LeafTable(specs, self.empties)


def describe(tree: Any) -> LeafTable:
    """Describe every leaf of ``tree``, without keeping a reference to any.

    Args:
        tree: A pytree of jax and numpy arrays, `jax.ShapeDtypeStruct`, typed PRNG keys and Python scalars.

    Returns:
        One `LeafSpec` per leaf in ``jax.tree_util`` flatten order.

    Raises:
        UnstorableLeafError: Naming the path of every leaf that no checkpoint can hold.
    """
    specs: list[LeafSpec] = []
    empties: list[EmptySpec] = []
    problems: list[str] = []
    seen: set[tuple[str, ...]] = set()
    for entries, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_empty)[0]:
        keys, nodes = _split(entries)
        path = "/".join(keys)
        if _is_empty(leaf):
            kind = "none" if leaf is None else "sequence" if type(leaf) in (list, tuple) else "container"
            empties.append(EmptySpec(keys, nodes, kind))
            continue
        if keys in seen:
            problems.append(f"{path or 'the state'}: a second leaf with the same path as text")
        seen.add(keys)
        try:
            specs.append(_describe_leaf(leaf, path, keys, nodes))
        except TypeError as error:
            problems.append(f"{path or 'the state'}: {error}")
    if problems:
        raise UnstorableLeafError(
            "The state holds leaves that a checkpoint cannot store:\n  "
            + "\n  ".join(problems)
            + "\nA state may hold jax and numpy arrays of numbers, typed PRNG keys, Python bool, int, float and "
            "complex, and None. Keep anything else outside the state."
        )
    return LeafTable(specs, empties)


def to_host(leaf: Any) -> Any:
    """The value of a leaf in host memory: a numpy array (for typed keys their key data) or a Python scalar."""
    if type(leaf) in _PYTHON_KINDS:
        return leaf
    if isinstance(leaf, jax.Array):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(_one_copy(leaf))
    return np.asarray(leaf)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name under which `named_dtype` finds ``dtype`` again."""
    return dtype.name if dtype.isnative else dtype.str


def named_dtype(name: str) -> np.dtype[Any]:
    """The dtype called ``name``, those of ml_dtypes included."""
    extended = getattr(ml_dtypes, name, None)
    return np.dtype(name if extended is None else extended)


def is_convertible(found: LeafSpec, wanted: LeafSpec) -> bool:
    """Whether `converted` can make a leaf like ``wanted`` of one like ``found``: shapes and keys have to agree."""
    if "key" in (found.kind, wanted.kind) or found.shape != wanted.shape:
        return False
    return not ("complex" in found.dtype and "complex" not in wanted.dtype)


def converted(value: Any, wanted: LeafSpec) -> Any:
    """A host value cast to the dtype or the kind of Python scalar that ``wanted`` is.

    Raises:
        ValueError: Values would be lost and not only rounded: it says which.
    """
    array = np.asarray(value)
    if wanted.kind == "python":
        kind = _PYTHON_TYPES[wanted.dtype]
        scalar = value.item() if isinstance(value, np.ndarray) else value
        try:
            if kind in (bool, int) and kind(scalar) != scalar:
                raise ValueError
            return kind(scalar)
        except (ValueError, OverflowError):  # NaN and infinity
            raise ValueError(f"{scalar!r} does not fit into a Python {wanted.dtype}") from None
    if dtype_name(array.dtype) == wanted.dtype:
        return array
    with np.errstate(invalid="ignore", over="ignore"):
        cast = array.astype(named_dtype(wanted.dtype))
        lost = _lost(array, cast)
    if lost.any():
        raise ValueError(f"{array[lost].flat[0]} does not fit into {wanted.dtype}")
    return cast


def _lost(array: np.ndarray[Any, Any], cast: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Where a cast did more than round: whole numbers have to stay the same, finite numbers have to stay finite."""
    if is_inexact(cast.dtype):
        return np.asarray(~np.isfinite(cast) & np.isfinite(array))
    return np.asarray((cast.astype(array.dtype) != array) | ((cast < 0) != (array < 0)))


def is_inexact(dtype: np.dtype[Any]) -> bool:
    """Whether values of ``dtype`` may be NaN or infinite."""
    return dtype.kind in "fc" or (dtype in _ML_DTYPES and "int" not in dtype.name)


def holds_inf(array: np.ndarray[Any, Any]) -> bool:
    """Whether any value is infinite."""
    return any(bool(np.isinf(part).any()) for part in _parts(array))


def holds_nan(array: np.ndarray[Any, Any]) -> bool:
    """Whether any value is NaN."""
    return any(bool(np.isnan(part).any()) for part in _parts(array))


def _parts(array: np.ndarray[Any, Any]) -> Iterable[np.ndarray[Any, Any]]:
    flat = array.reshape(-1)
    for start in range(0, flat.size, _SCAN_ITEMS):  # the masks of a whole state would double its memory
        yield flat[start : start + _SCAN_ITEMS]


def _describe_leaf(leaf: Any, path: str, keys: tuple[str, ...], nodes: str) -> LeafSpec:
    if type(leaf) in _PYTHON_KINDS:
        finite = None if type(leaf) in (bool, int) else not holds_inf(np.asarray(leaf))
        return LeafSpec(path, keys, "python", (), _PYTHON_KINDS[type(leaf)], None, finite, nodes)
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data, implementation = _key_facts(leaf)
            return LeafSpec(path, keys, "key", data.shape, data.dtype.name, implementation, None, nodes)
        dtype, shape = np.dtype(leaf.dtype), tuple(leaf.shape)
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            raise TypeError("an array that is sharded over several processes; the state has to be replicated")
    elif isinstance(leaf, (np.ndarray, np.generic)) and not isinstance(leaf, np.ma.MaskedArray):
        dtype, shape = leaf.dtype, leaf.shape
    else:
        raise TypeError(f"a {type(leaf).__module__}.{type(leaf).__qualname__}".replace("a builtins.", "a "))
    if dtype.kind not in "biufc" and dtype not in _ML_DTYPES:
        raise TypeError(f"an array of dtype {dtype}")
    finite = None
    if is_inexact(dtype) and not isinstance(leaf, jax.ShapeDtypeStruct):
        finite = not holds_inf(to_host(leaf))
    return LeafSpec(path, keys, "array", shape, dtype_name(dtype), None, finite, nodes)


def _key_facts(leaf: Any) -> tuple[jax.ShapeDtypeStruct, str]:
    implementations: list[Any] = []

    def look(key: Any) -> Any:
        implementations.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    data = jax.eval_shape(look, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    if not isinstance(implementations[0], str):
        raise TypeError("a PRNG key of an implementation that is not registered with JAX under a name")
    return data, implementations[0]


def _one_copy(leaf: jax.Array) -> jax.Array:
    if leaf.is_fully_replicated:
        # A new object each time: the host view that JAX caches in an array would forbid donating its buffer.
        return leaf.addressable_shards[0].data
    return leaf


def _is_empty(node: Any) -> bool:
    structure = jax.tree_util.tree_structure(node)
    return structure.num_leaves == 0 and structure.num_nodes == 1


def _split(entries: tuple[Any, ...]) -> tuple[tuple[str, ...], str]:
    keys: list[str] = []
    nodes = ""
    for entry in entries:
        if isinstance(entry, jax.tree_util.SequenceKey):
            keys.append(str(entry.idx))
            nodes += "s"
        elif isinstance(entry, jax.tree_util.GetAttrKey):
            keys.append(str(entry.name))
            nodes += "a"
        else:
            keys.append(str(getattr(entry, "key", entry)))
            nodes += "d"
    return tuple(keys), nodes
