"""A rolling upgrade between hosts that support different feature levels, under load. The tree has
one version, so the "older" hosts are this one with a cap on what they support (MQD_TEST_FEATURES,
mqd/cluster/metadata/features.py): this tests the negotiation - the levels in force, which hosts are
admitted, which refuse to start - and not that an older version's code reads what a newer one
writes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broker import BrokerFailed
from tests.cluster import Cluster
from tests.interaction.cluster.test_cluster_moves import Load
from tests.interaction.cluster_clients import all_in_sync, create, read, run, until

OLDER = {"MQD_TEST_FEATURES": "mqd.version=0"}
PARTITIONS = 3


def roll(cluster: Cluster, node_id: int, environment: dict[str, str]) -> None:
    """Stops the host, installs the version, starts it; returns when all replicas are in sync."""
    member = cluster.brokers[node_id]
    member.stop()
    member.environment = environment
    member.start()
    until("all replicas are in sync", lambda: all_in_sync(cluster, "rolled"), cluster)


def upgrade(cluster: Cluster) -> tuple[int, str]:
    done = run("cluster", "upgrade", "-b", cluster.bootstrap)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rolling_upgrade_under_load(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    for member in cluster:
        member.environment = OLDER
    with cluster:
        create(cluster, "rolled", PARTITIONS)
        with Load(cluster, "rolled", PARTITIONS) as load:
            code, output = upgrade(cluster)
            assert code == 0 and "nothing to raise" in output, output
            for node_id in (1, 2):
                roll(cluster, node_id, {})
                code, output = upgrade(cluster)
                assert code == 1 and "node 3 does not support mqd.version 10 (it supports 0 to 0)" in output, output
                assert ("node 2 does not" in output) == (node_id == 1)
            roll(cluster, 3, {})
            code, output = upgrade(cluster)
            assert code == 0 and "are in force now: mqd.version 10" in output, output
            assert "nothing to raise" in upgrade(cluster)[1]
            refused_at_the_start(cluster, 3)
            refused_as_a_newcomer(cluster, 4)
            roll(cluster, 3, {})
        for index, values in load.sent.items():
            assert read(cluster, "rolled", len(values), index) == values


def refused_at_the_start(cluster: Cluster, node_id: int) -> None:
    member = cluster.brokers[node_id]
    member.stop()
    member.environment = OLDER
    with pytest.raises(BrokerFailed) as failed:
        member.start()
    assert (
        "the cluster no longer supports this version of mqd: the level of mqd.version is 10, and the host supports"
        " 0 to 0. Install the version that the other hosts run" in str(failed.value)
    )
    member.environment = {}
    member.start()


def refused_as_a_newcomer(cluster: Cluster, node_id: int) -> None:
    member = cluster._member(node_id)
    member.environment = OLDER
    with pytest.raises(BrokerFailed) as failed:
        member.start()
    assert (
        "the connecting host runs a version of mqd that this cluster no longer supports: the level of mqd.version is"
        " 10, and the host supports 0 to 0" in str(failed.value)
    ), failed.value
