"""Arrays of this process as parts of arrays over all devices of the job, and back; no byte is copied or sent."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from monsess.layout import Layout


class Across:
    """The devices of all processes as one mesh.

    Args:
        layout: The devices of this process, all of them.
        axis_name: The axis that runs over all devices.
    """

    def __init__(self, layout: Layout, axis_name: str) -> None:
        devices = jax.devices()
        self.mesh = Mesh(np.asarray(devices, dtype=object), (axis_name,))
        self._count = len(devices)
        self._whole = NamedSharding(self.mesh, PartitionSpec())
        self._split = NamedSharding(self.mesh, PartitionSpec(axis_name))
        self._local_whole = NamedSharding(layout.mesh, PartitionSpec())
        self._local_split = layout.sharding
        self._local_count = layout.device_count

    def replicated(self, tree: Any) -> Any:
        """Arrays replicated on the local devices as arrays replicated on all."""
        return jax.tree.map(self._replicated, tree)

    def split(self, tree: Any) -> Any:
        """Arrays ``[local devices, ...]`` as parts of arrays ``[all devices, ...]``; host arrays are placed."""
        return jax.tree.map(self._part, tree)

    def local(self, tree: Any) -> Any:
        """This process's copies of arrays replicated on all devices."""
        return jax.tree.map(lambda x: _made(x.shape, self._local_whole, x), tree)

    def local_rows(self, tree: Any) -> Any:
        """This process's rows of arrays ``[all devices, ...]``."""
        return jax.tree.map(lambda x: _made((self._local_count, *x.shape[1:]), self._local_split, x), tree)

    def _replicated(self, x: jax.Array) -> jax.Array:
        return x if x.sharding == self._whole else _made(x.shape, self._whole, x)

    def _part(self, x: Any) -> jax.Array:
        placed = (
            x if isinstance(x, jax.Array) and x.sharding == self._local_split else jax.device_put(x, self._local_split)
        )
        return _made((self._count, *placed.shape[1:]), self._split, placed)


def to_local(tree: Any, layout: Layout) -> Any:
    """Replicated arrays as arrays of the local devices alone, whether they lie on all devices or on these only."""
    whole = NamedSharding(layout.mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if x.is_fully_addressable else _made(x.shape, whole, x), tree)


def _made(shape: tuple[int, ...], sharding: NamedSharding, x: jax.Array) -> jax.Array:
    return jax.make_array_from_single_device_arrays(shape, sharding, [shard.data for shard in x.addressable_shards])
