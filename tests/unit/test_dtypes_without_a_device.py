"""Element types that JAX names and its devices do not have; using one would abort the process."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import monsess as ms


@pytest.mark.parametrize("name", ["float6_e2m3fn", "float6_e3m2fn", "int1", "uint1"])
def test_they_are_refused_with_their_path(name):
    kind = getattr(ml_dtypes, name, None)
    assert kind is not None, "ml_dtypes no longer has it: take it out of the list"
    with pytest.raises(ms.UnstorableLeafError, match=f"'params/w' is of dtype {name}"):
        ms.MonitoredTrainingSession(lambda: {"params": {"w": np.zeros(4, kind)}})
