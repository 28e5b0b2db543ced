"""The leaf table of session.json: every leaf's spec, and the values that Orbax refuses or would change."""

from __future__ import annotations

import base64
import collections
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from monsess.checkpoint.leaves import EmptySpec, LeafSpec, LeafTable, dtype_name, named_dtype

#: frozenset[str]: dtypes that Orbax was seen to store and return bit for bit.
_ORBAX_DTYPES = frozenset(
    [
        *("bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
        *("float8_e5m2fnuz", "float8_e8m0fnu", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
    ]
)


def check_against(spec: LeafSpec, value: Any) -> str | None:
    """Say how a host value differs from its spec; None if it does not."""
    if spec.kind == "python":
        found = type(value).__name__
        return None if found == spec.dtype else f"Python {spec.dtype} expected, {found} found"
    if not isinstance(value, np.ndarray):
        return f"{spec} expected, {type(value).__name__} found"
    if value.shape != spec.shape or dtype_name(value.dtype) != spec.dtype:
        return f"{spec.dtype}{list(spec.shape)} expected, {dtype_name(value.dtype)}{list(value.shape)} found"
    return None


def pack(specs: Sequence[LeafSpec], values: Sequence[Any]) -> tuple[list[dict[str, Any]], Any]:
    """Split host values into the leaf table and the tree for Orbax.

    Returns:
        The table's JSON rows, and nested dicts and lists of numpy arrays and Python scalars for Orbax, in which a leaf
        that only the table holds is None.
    """
    rows: list[dict[str, Any]] = []
    shown: list[Any] = []
    names = [".".join(spec.keys) for spec in specs]
    unclear = _unclear(names)
    for spec, row, name, value in zip(specs, specs_as_json(specs), names, values, strict=True):
        fits = name not in unclear
        if spec.kind == "python":
            row["value"] = _encode_python(value)
            fits = fits and (type(value) in (bool, float) or (type(value) is int and -(2**63) <= value < 2**63))
        elif fits and spec.dtype in _ORBAX_DTYPES and value.size:
            row["item"] = name
        else:
            row["raw"] = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode("ascii")
            fits = False
        rows.append(row)
        shown.append(value if fits else None)
    empties = specs.empties if isinstance(specs, LeafTable) else ()
    return rows, nest(specs, shown, empties)


def specs_as_json(specs: Sequence[LeafSpec]) -> list[dict[str, Any]]:
    """The rows of the leaf table without values, which `unpack_specs` reads."""
    rows: list[dict[str, Any]] = []
    for spec in specs:
        row: dict[str, Any] = {
            "path": spec.path,
            "keys": list(spec.keys),
            "nodes": spec.nodes,
            "kind": spec.kind,
            "shape": list(spec.shape),
            "dtype": spec.dtype,
        }
        if spec.key_impl is not None:
            row["key_impl"] = spec.key_impl
        if spec.finite is not None:
            row["finite"] = spec.finite
        rows.append(row)
    return rows


def unpack_specs(session: Mapping[str, Any]) -> LeafTable:
    """The specs that a session.json describes."""
    specs = [
        LeafSpec(
            path=row["path"],
            keys=tuple(row["keys"]),
            kind=row["kind"],
            shape=tuple(row["shape"]),
            dtype=row["dtype"],
            key_impl=row.get("key_impl"),
            finite=row.get("finite"),
            nodes=row["nodes"],
        )
        for row in session["leaves"]
    ]
    return LeafTable(specs, (EmptySpec(tuple(e["keys"]), e["nodes"], e["kind"]) for e in session.get("empties", ())))


def empties_as_json(specs: Sequence[LeafSpec]) -> list[dict[str, Any]]:
    """The nodes without leaves, as session.json holds them."""
    found = specs.empties if isinstance(specs, LeafTable) else ()
    return [{"keys": list(e.keys), "nodes": e.nodes, "kind": e.kind} for e in found]


def unpack_row(row: Mapping[str, Any]) -> Any:
    """The value of a leaf that the table itself holds."""
    if row["kind"] == "python":
        return _decode_python(row["dtype"], row["value"])
    raw = bytearray(base64.b64decode(row["raw"], validate=True))  # mutable, so that the array is writable
    return np.frombuffer(raw, named_dtype(row["dtype"])).reshape(row["shape"])


def nest(specs: Sequence[LeafSpec], values: Sequence[Any], empties: Iterable[EmptySpec] = ()) -> Any:
    """Nested dicts and lists of ``values``: sequences become lists, everything else dicts with text keys."""
    hollow = {"none": None, "sequence": [], "container": {}}
    items = [(s.keys, s.nodes or "d" * len(s.keys), v) for s, v in zip(specs, values, strict=True)]
    items += [(e.keys, e.nodes, hollow[e.kind]) for e in empties]
    if len(items) == 1 and not items[0][0]:
        return items[0][2]
    root: dict[str, Any] = {}
    sequences: set[tuple[str, ...]] = set()
    for keys, nodes, value in items:
        node = root
        for depth, key in enumerate(keys):
            if nodes[depth] == "s":
                sequences.add(keys[:depth])
            if depth == len(keys) - 1:
                node[key] = value
            else:
                node = node.setdefault(key, {})
    for keys in sorted(sequences, key=len, reverse=True):  # the innermost first: a list has no text keys to walk by
        parent: Any = {"": root}
        name = ""
        for key in keys:
            parent, name = parent[name], key
        parts = parent[name]
        parent[name] = [parts.get(str(i)) for i in range(1 + max(map(int, parts)))]
        if not keys:
            return parent[name]
    return root


def _unclear(names: Sequence[str]) -> set[str]:
    """Names that Orbax would mix up: it joins a path's parts with dots, and stores each leaf under ``<name>/``."""
    counts = collections.Counter(names)
    found = {name for name, count in counts.items() if count > 1}
    for name in counts:
        parts = name.split("/")
        if any("/".join(parts[:i]) in counts for i in range(1, len(parts))):
            found.add(name)
    return found


def _encode_python(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return hex(value)  # decimal text has a length limit in Python
    parts = (value,) if isinstance(value, float) else (value.real, value.imag)
    return base64.b64encode(struct.pack(f"<{len(parts)}d", *parts)).decode("ascii")  # keeps the bits of a NaN


def _decode_python(kind: str, stored: Any) -> Any:
    if kind == "bool":
        return bool(stored)
    if kind == "int":
        return int(stored, 16)
    raw = base64.b64decode(stored, validate=True)
    return struct.unpack("<d", raw)[0] if kind == "float" else complex(*struct.unpack("<2d", raw))
