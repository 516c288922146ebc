"""Quotas of users whose clients do not use TCP: a process of another user attaches to the broker
through shared memory, and to a host that has to relay its batches.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqd.base import cluster_key
from mqd.protocol.messages import CreateTopicsRequest, MetadataRequest
from tests.cluster import Cluster, Member
from tests.compat import topics
from tests.interaction.security.test_user_quotas import PRODUCE, RATE, TOPIC, limit, throttled_ms
from tests.interaction.traffic import eventually
from tests.kafka_connection import KafkaConnection
from tests.other_user import LOGIN, OtherUser, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
RIGHTS = {
    "authorizer.class.name": "standard",
    "allow.everyone.if.no.acl.found": "true",
    "super.users": "User:ANONYMOUS",
    "local.socket.permissions": "0666",
    "local.principal.mapping.rules": f"RULE:{LOGIN}/alice/",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two hosts. Not in pytest's directory, which other users cannot traverse."""
    if reason := why_not():
        pytest.skip(reason)
    directory = Path(tempfile.mkdtemp(prefix="mqd-quotas-"))
    directory.chmod(0o711)
    key = directory / "cluster.key"
    cluster_key.make(key)
    config = {**RIGHTS, "quota.window.num": "2", "default.replication.factor": "1", "cluster.key.file": str(key)}
    with Cluster(directory, 2, config=config) as made:
        with contextlib.closing(admin(made.brokers[1])) as kafka:
            topic = CreateTopicsRequest.Topic(name=TOPIC, num_partitions=1, replication_factor=1)
            assert not kafka.call(19, 7, CreateTopicsRequest(topics=[topic])).topics[0].error_code
            topics.wait_served(kafka, TOPIC)
        yield made
    shutil.rmtree(directory)


def admin(member: Member) -> KafkaConnection:
    return KafkaConnection(member.address, member.port, timeout_s=30)


def local(member: Member, client_id: str) -> OtherUser:
    return OtherUser(Path(member.status()["client_socket"]), client_id)


@pytest.mark.parametrize("leads", [True, False], ids=["shared_memory", "relayed"])
def test_a_user_is_charged_at_the_host_that_it_is_attached_to(cluster: Cluster, leads: bool) -> None:
    with contextlib.ExitStack() as ends:
        kafka = ends.enter_context(contextlib.closing(admin(cluster.brokers[1])))
        asked = MetadataRequest(topics=[MetadataRequest.Topic(name=TOPIC)])
        leader = kafka.call(3, 12, asked).topics[0].partitions[0].leader_id
        leading = cluster.brokers[leader]
        member = leading if leads else next(one for one in cluster if one is not leading)
        one, two = (ends.enter_context(contextlib.closing(local(member, name))) for name in ("one", "two"))
        eventually(lambda: throttled_ms(one, 10) == 0, "it can write, and owes nothing")
        limit(kafka, PRODUCE, RATE, user="alice")
        try:
            times: list[float] = []

            def owes() -> bool:
                times.append(time.monotonic())
                return throttled_ms(one) > 1000

            eventually(owes, "the quota of alice holds")
            throttled_ms(two, 10)
            assert time.monotonic() - times[-1] > 1.0, "her other client waits until the debt is paid"
            assert throttled_ms(ends.enter_context(contextlib.closing(admin(leading)))) == 0, (
                "another user of the leader"
            )
        finally:
            limit(kafka, PRODUCE, None, user="alice")
