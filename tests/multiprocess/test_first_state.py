"""The chief's state, initialised or restored, is that of all processes: every dtype and kind of key, every bit."""

from __future__ import annotations

import pytest
from cluster import outputs


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pmap", "shard_map"])
def test_every_leaf_keeps_every_bit_on_its_way_to_the_others(cluster, engine, figures):
    url = cluster.folder("checkpoints")
    for count, devices, last_step in ((2, 2, 1), (2, 1, 2), (3, 1, 3)):
        ended = cluster.run(
            count,
            devices,
            url=str(url),
            engine=engine,
            call="cluster_scenarios:every_leaf",
            arguments={"last_step": last_step},
        )
        assert [one.code for one in ended] == [0] * count, outputs(ended)
        assert [one.report["restored_from"] for one in ended] == [None if last_step == 1 else last_step - 1] * count
    leaves = f"{ended[0].report['leaves']} leaves of {ended[0].report['dtypes']} dtypes"
    figures.append(f"{leaves}, {engine}: every bit in all processes")
