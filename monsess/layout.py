"""How a batch of this process comes to lie on its devices: rows become a device axis and the rows of each device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from monsess.errors import BatchError

REMAINDERS = ("error", "drop", "pad")


class NothingLeftError(BatchError):
    """``remainder="drop"`` drops every row: the batch has fewer rows than there are devices."""


class Layout:
    """Places batches on the devices of this process, sharded along a new leading device axis.

    What `lay_out` returns is private: neither a loader that refills its buffer nor a caller that changes or deletes
    its arrays reaches it. Nothing here runs a collective, so that it may be called from the thread that prefetches.

    Args:
        devices: The local devices (`jax.Device`), in the order in which they get their rows.
        axis_name: The name of the device axis.

    Raises:
        ValueError: There are no devices.
    """

    def __init__(self, devices: Sequence[Any], axis_name: str = "data") -> None:
        if not devices:
            raise ValueError("Layout needs at least one device, found none. Pass jax.local_devices().")
        self.devices = tuple(devices)
        self.device_count = len(devices)
        self.axis_name = axis_name
        self.mesh = Mesh(np.asarray(devices, dtype=object), (axis_name,))
        self.sharding = NamedSharding(self.mesh, PartitionSpec(axis_name))
        self._may_alias = devices[0].platform == "cpu"

    def lay_out(
        self, batch: Any, *, what: str = "the batch", remainder: str = "error", place: bool = True
    ) -> tuple[Any, jax.Array | None, int]:
        """Place ``batch`` on the devices.

        Args:
            batch: A pytree of arrays ``[local_batch, ...]``: numpy, jax, or what ``np.asarray`` takes. 64-bit numbers
                become 32-bit ones as everywhere in JAX, unless its 64-bit mode is on.
            what: How messages call the batch.
            remainder: If ``local_batch`` is no multiple of the device count: ``"error"``, ``"drop"`` the last rows, or
                ``"pad"`` by repeating the last row.
            place: False leaves host arrays on the host, as private copies of the same shape: a compiled step moves
                them faster than an explicit placement does.

        Returns:
            The placed pytree with leaves ``[n_devices, per_device, ...]``; the mask, bool ``[n_devices, per_device]``
            and False for repeated rows (on the host with ``place=False``), or None unless ``remainder="pad"``;
            and ``per_device``.

        Raises:
            BatchError: Leaves without a leading axis, leaves that disagree about it, a leading axis that does not fit
                the devices, or a leaf that is no array of this process.
        """
        if remainder not in REMAINDERS:
            raise ValueError(f"remainder must be one of {', '.join(map(repr, REMAINDERS))}, found {remainder!r}.")
        leaves, treedef = jax.tree_util.tree_flatten(batch)
        leaves = [self._as_array(leaf, batch, i, what) for i, leaf in enumerate(leaves)]
        rows = self._rows(leaves, batch, what)
        per_device = self._per_device(rows, leaves, batch, what, remainder)
        total = per_device * self.device_count

        waiting: list[int] = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, jax.Array):
                leaves[i] = self._arrange_on_device(leaf, rows, total)
            else:
                leaves[i] = self._arrange_on_host(leaf, rows, total, self._may_alias or not place)
                waiting.append(i)
        mask: Any = None
        if remainder == "pad":
            leaves.append((np.arange(total) < rows).reshape(self.device_count, per_device))

        if place:
            placed = jax.device_put(leaves, self.sharding)
        else:
            placed = [jax.device_put(x, self.sharding) if isinstance(x, jax.Array) else x for x in leaves]
        if place and waiting and not self._may_alias:
            jax.block_until_ready([placed[i] for i in waiting])  # the transfer is over: the host memory is free again
        if remainder == "pad":
            mask = placed.pop()
        return jax.tree_util.tree_unflatten(treedef, placed), mask, per_device

    def scalar(self, x: Any, what: str = "the argument") -> jax.Array:
        """Place a value without axes on every device.

        Args:
            x: A number, a 0-d array or a single typed PRNG key.
            what: How messages call it.

        Returns:
            An array ``[n_devices]``, one element per device.

        Raises:
            BatchError: ``x`` has axes, or is nothing that a device can hold.
        """
        leaf = self._as_array(x, x, 0, what)
        if leaf.ndim:
            raise BatchError(f"A value without axes was expected, found the shape {list(leaf.shape)}. Lay it out.")
        if isinstance(leaf, jax.Array):
            return jax.device_put(_broadcast(_on_one_device(leaf), self.device_count), self.sharding)
        return jax.device_put(np.full(self.device_count, leaf, leaf.dtype), self.sharding)

    def _as_array(self, leaf: Any, batch: Any, index: int, what: str) -> np.ndarray | jax.Array:
        if isinstance(leaf, jax.Array):
            if not leaf.is_fully_addressable:
                raise BatchError(
                    f"{_name(batch, index, what)} lies on devices of other processes too. Hand each process its own "
                    "rows, as an array of its own devices or of the host."
                )
            return leaf
        try:
            array = np.asarray(leaf)
        except Exception as error:
            raise BatchError(
                f"{_name(batch, index, what)} is a {type(leaf).__name__} that numpy cannot read ({error}). Convert it "
                "to an array in the input."
            ) from error
        if array.dtype.kind in "OSUTMm" or array.dtype.names:
            raise BatchError(
                f"{_name(batch, index, what)} has the dtype {array.dtype}, which no device can hold. Turn it into "
                "numbers in the input, or leave it out of the batch."
            )
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))

    def _rows(self, leaves: list[Any], batch: Any, what: str) -> int:
        if not leaves:
            raise BatchError(
                f"{_capital(what)} holds no arrays, found {batch!r:.80}. Expected leaves [local_batch, ...]."
            )
        for i, leaf in enumerate(leaves):
            if not leaf.ndim:
                raise BatchError(
                    f"{_name(batch, i, what)} has no leading axis to split over the {_devices(self.device_count)} "
                    f"(shape [], dtype {leaf.dtype}). Make it an array [local_batch, ...]; Python lists are read as "
                    "containers, so wrap them in np.asarray. A single value is handed over as a further argument: "
                    "run(step, batch, value)."
                )
        rows = leaves[0].shape[0]
        for i, leaf in enumerate(leaves):
            if leaf.shape[0] != rows:
                raise BatchError(
                    f"{_name(batch, 0, what)} has the shape {list(leaves[0].shape)}. {_name(batch, i, what)} has "
                    f"{list(leaf.shape)}. All leaves must have the same leading axis [local_batch, ...]. If a leaf is "
                    "no data, leave it out of the batch."
                )
        return rows

    def _per_device(self, rows: int, leaves: list[Any], batch: Any, what: str, remainder: str) -> int:
        per_device, rest = divmod(rows, self.device_count)
        if remainder == "pad" and rows:
            return per_device + bool(rest)
        if per_device and (not rest or remainder == "drop"):
            return per_device

        found = f"{_name(batch, 0, what)} has the shape {list(leaves[0].shape)}"
        devices = _devices(self.device_count)
        if not rows:
            raise BatchError(f"{found}: it holds no rows for the {devices}. Leave empty batches out of the input.")
        if remainder == "drop":
            raise NothingLeftError(
                f"{found}: fewer rows than the {devices}, so that remainder='drop' leaves nothing. Make the batch at "
                f"least {self.device_count} rows."
            )
        fitting = [str(n * self.device_count) for n in (per_device, per_device + 1) if n]
        raise BatchError(
            f"{found}: its leading axis {rows} is not divisible by the {devices} of this process. Make it "
            f"{' or '.join(fitting)} rows, or pass remainder='drop' or remainder='pad'. What counts are this "
            "process's devices (jax.local_device_count()), not all of the job's."
        )

    def _arrange_on_host(self, leaf: np.ndarray, rows: int, total: int, copy: bool) -> np.ndarray:
        shape = (self.device_count, total // self.device_count, *leaf.shape[1:])
        if total > rows:
            leaf = np.concatenate([leaf, np.repeat(leaf[-1:], total - rows, axis=0)])
        elif copy:
            leaf = np.array(leaf[:total], order="C")  # the device may go on using this memory
        return np.reshape(leaf[:total], shape)

    def _arrange_on_device(self, leaf: jax.Array, rows: int, total: int) -> jax.Array:
        """Reshape without a collective: those of a second thread could meet the step's in another order."""
        per_device = total // self.device_count
        shards = self._shards_in_order(leaf, per_device) if rows == total else None
        if shards is None:
            arranged = _arrange(_on_one_device(leaf), self.device_count, per_device, rows)
        else:
            shape = (self.device_count, per_device, *leaf.shape[1:])
            parts = [_arrange(shard, 1, per_device, per_device) for shard in shards]
            arranged = jax.make_array_from_single_device_arrays(shape, self.sharding, parts)
        return arranged

    def _shards_in_order(self, leaf: jax.Array, per_device: int) -> list[jax.Array] | None:
        """The shards in the order of the mesh, if each device already holds exactly its own rows."""
        shards = {shard.device: shard for shard in leaf.addressable_shards}
        found: list[jax.Array] = []
        for i, device in enumerate(self.mesh.devices.flat):
            shard = shards.get(device)
            own = (slice(i * per_device, (i + 1) * per_device), *map(slice, leaf.shape[1:]))
            if shard is None or any(
                a.indices(size) != b.indices(size) for a, b, size in zip(own, shard.index, leaf.shape, strict=False)
            ):
                return None
            found.append(shard.data)
        return found


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _arrange(x: jax.Array, n: int, per_device: int, rows: int) -> jax.Array:
    total = n * per_device
    if total > rows:
        last = jax.lax.slice_in_dim(x, rows - 1, rows)
        x = jax.numpy.concatenate([x, jax.numpy.broadcast_to(last, (total - rows, *x.shape[1:]))])
    return jax.numpy.reshape(jax.lax.slice_in_dim(x, 0, total), (n, per_device, *x.shape[1:]))


@functools.partial(jax.jit, static_argnums=1)
def _broadcast(x: jax.Array, n: int) -> jax.Array:
    return jax.numpy.broadcast_to(x, (n,))


def _on_one_device(leaf: jax.Array) -> jax.Array:
    if len(leaf.sharding.device_set) == 1:
        return leaf
    if leaf.is_fully_replicated:
        return leaf.addressable_shards[0].data
    device = min(leaf.sharding.device_set, key=lambda device: device.id)
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jax.device_put(jax.device_get(jax.random.key_data(leaf)), device)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jax.device_put(jax.device_get(leaf), device)  # a plain device_put would be an implicit trip to the host


def _name(batch: Any, index: int, what: str) -> str:
    path = jax.tree_util.tree_flatten_with_path(batch)[0][index][0]
    return f"Leaf {jax.tree_util.keystr(path, simple=True, separator='/')!r} of {what}" if path else _capital(what)


def _capital(what: str) -> str:
    return what[0].upper() + what[1:]


def _devices(count: int) -> str:
    return f"{count} local device{'s' if count > 1 else ''}"
