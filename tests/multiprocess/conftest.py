"""Jobs of several processes share what forks them."""

from __future__ import annotations

import pytest
from cluster import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster
