"""Waiting for what was dispatched."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from monsess.dispatch import Count


class Nonfinite:
    """A count on devices, and what is done to it."""

    def __init__(self):
        self.done = []

    def is_ready(self):
        return "waited" in self.done

    def block_until_ready(self):
        self.done.append("waited")
        return self

    def __array__(self, dtype=None, copy=None):
        self.done.append("read")
        return np.asarray(3, np.int32)


@pytest.mark.parametrize(("alone", "done"), [(True, ["read"]), (False, ["waited", "read"])])
def test_a_step_is_done_when_all_devices_are(alone, done):
    """Reading a value that all devices hold waits for one of them only."""
    nonfinite = Nonfinite()
    count = Count(nonfinite, alone)
    assert not count.is_ready()
    assert count.block_until_ready() is count
    assert int(count) == int(count) == 3
    assert nonfinite.done == done


def test_a_count_is_read_once():
    value = jnp.asarray(3, jnp.int32)
    count = Count(value, alone=True)
    assert int(count.block_until_ready()) == 3
    value.delete()
    assert int(count) == 3
