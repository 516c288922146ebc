"""One of three replicas loses files while its host is down: acknowledged records stay, whichever
replica leads next, and this one neither leads nor joins the ISR before it has caught up.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.interaction.cluster.test_cluster_lost_host import QUICK
from tests.interaction.cluster_clients import all_in_sync, create, partitions, produce, read, until, wait_for_in_sync
from tests.tiers import quick

VALUES = [b"%04d" % number + b"v" * 900 for number in range(100)]


@pytest.mark.parametrize("clean", quick([True, False], [False]))
@pytest.mark.parametrize("lost", quick(["middle", "end", "metadata"], ["metadata"]))
def test_acknowledged_records_stay(tmp_path: Path, lost: str, clean: bool) -> None:
    with Cluster(
        tmp_path, config={**QUICK, "replication.recovery.delay.ms": "-1", "log.segment.bytes": "16384"}
    ) as cluster:
        create(cluster, "t", partitions=1)
        for first in range(0, len(VALUES), 10):
            produce(cluster, "t", VALUES[first : first + 10])  # so that no batch is larger than a segment
        leader = wait_for_in_sync(cluster, "t")[0].leader
        host = next(member for member in cluster if member.node_id == leader)
        host.stop()  # its checkpoints record how far the log had reached
        host.start()
        until("all are in sync again", lambda: all_in_sync(cluster, "t"), cluster)
        host.stop() if clean else host.kill_all()
        directory = host.data_dir / "log" / "t-0"
        segments = sorted(directory.glob("*.log"))
        assert len(segments) >= 4
        {"middle": segments[1], "end": segments[-1], "metadata": directory / "partition.metadata"}[lost].unlink()
        host.start()
        if lost == "end":
            until("it has caught up", lambda: all_in_sync(cluster, "t"), cluster)
        else:
            until(
                "the others lead",
                lambda: (
                    partitions(cluster, "t")[0].leader not in (-1, leader)
                    and leader not in partitions(cluster, "t")[0].isrs
                ),
                cluster,
            )
            host.stop()
            directory.rename(directory.with_name("aside"))  # as the error message advises
            host.start()
            until("it has copied everything", lambda: all_in_sync(cluster, "t"), cluster)
        assert sorted(read(cluster, "t", len(VALUES))) == VALUES
