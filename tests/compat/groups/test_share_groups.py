"""Share groups of third-party clients: Java's KafkaShareConsumers while processes of the broker are
killed, where every record is delivered until it is accepted or rejected, and not again after that
was confirmed; and franz-go, with strict counts and renewed locks. Also mqd's own share consumer
with Apache Kafka's broker.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker import Broker
from tests.compat.go_client import build_go_client, round_trip
from tests.compat.java_client import build_java_client, java_command
from tests.compat.kafka_tools import KafkaTools
from tests.compat.programs.program import Program, kill_process
from tests.crash.workload import wait_until
from tests.interaction.client import test_client_share_consumer as ours
from tests.interaction.cluster.test_cluster_moves import Load
from tests.interaction.share_members import Output, begin_at_first_record, lag

pytestmark = pytest.mark.slow

GROUP, TOPIC, PARTITIONS = "workers", "work", 4
SECONDS = 60.0
DELIVERIES = 10
MARKERS = 1_000_000_000  # values of records written at the end; greater than those of the load
KILLED = ("mqd-worker-0", "mqd-acceptor", "mqd-worker-1", "broker", "mqd-acceptor")
CONFIG = {
    # records of a killed worker's members at other workers are released when their locks expire
    "group.share.min.record.lock.duration.ms": "1000",
    "group.share.record.lock.duration.ms": "3000",
    "group.share.delivery.count.limit": str(DELIVERIES),  # kills must not exhaust a record's deliveries
}


@pytest.mark.timeout(500)
def test_share_consumers_while_processes_are_killed(tmp_path: Path) -> None:
    home = build_java_client()
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(Broker(tmp_path / "data", config=CONFIG))
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_topics([NewTopic(TOPIC, PARTITIONS)])[TOPIC].result(SECONDS)
        begin_at_first_record(broker.bootstrap, GROUP)
        command = java_command(home, broker.bootstrap, "share", GROUP, TOPIC)
        members = [Program(command, tmp_path / f"member-{number}") for number in range(2)]
        outputs = [member.output for member in members]
        address = [("127.0.0.1", broker.port)]

        def state() -> str:
            return "\n".join([f"lag {lag(address, GROUP)}", *(member.tail() for member in members), broker.logs()])

        with Load(broker, TOPIC, PARTITIONS) as load:
            for member in members:
                stack.enter_context(member)
            for name in KILLED:
                before = len(Output(outputs).answered)
                wait_until(lambda: len(Output(outputs).answered) > before + 200, SECONDS, state)  # noqa: B023
                kill_process(broker, name)
        sent = {int(value) for values in load.sent.values() for value in values}
        wait_until(lambda: lag(address, GROUP) == [0] * PARTITIONS, SECONDS, state)
        assert not any(member.ended() for member in members), state()
        for member in members:
            member.kill()
        output = Output(outputs)
        with Program(command, tmp_path / "last") as last:
            # unsettled records are acquired before newly written ones
            producer = Producer({"bootstrap.servers": broker.bootstrap})
            markers = {MARKERS + partition for partition in range(PARTITIONS)}
            for partition in range(PARTITIONS):
                producer.produce(TOPIC, str(MARKERS + partition), partition=partition)
            assert producer.flush(SECONDS) == 0
            wait_until(lambda: Output([last.output]).deliveries.keys() >= markers, SECONDS, last.tail)
            assert Output([last.output]).deliveries.keys() == markers and not last.ended(), last.tail()

    print(output.check(sent, DELIVERIES))


@pytest.mark.timeout(700)
def test_a_share_group_of_franz_go(tmp_path: Path) -> None:
    program = build_go_client()
    with Broker(tmp_path / "data") as broker:
        begin_at_first_record(broker.bootstrap, GROUP)
        done = round_trip(program, seeds=broker.bootstrap, topic=TOPIC, share=GROUP, count=1000)
        assert (done.returncode, done.stdout) == (0, "settled 1000 released 100\n"), done.stderr
        assert lag([("127.0.0.1", broker.port)], GROUP) == [0, 0, 0]


@pytest.mark.timeout(400)
def test_our_share_consumer_at_apache_kafka(kafka_tools: KafkaTools) -> None:
    settings = {
        "group_share_min_record_lock_duration_ms": "1000",
        "share_coordinator_state_topic_replication_factor": "1",
        "share_coordinator_state_topic_min_isr": "1",
    }
    with kafka_tools.broker(**settings) as bootstrap:
        for story, partitions in (
            (ours.test_each_type_of_acknowledgement, 2),
            (ours.test_implicit_mode_accepts_with_the_next_poll_or_commit, 2),
            (ours.test_consume_returns_at_most_num_messages, 1),
            (ours.test_a_renewed_lock_is_kept_and_another_expires, 1),
        ):
            jobs = ours.Jobs(SimpleNamespace(bootstrap=bootstrap), "tcp", partitions)
            story(jobs)
            for consumer in jobs.consumers:
                consumer.close()
