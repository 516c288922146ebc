"""Topics with schedule.to, on one broker and on three, with confluent-kafka's clients."""

from __future__ import annotations

import os
import signal
import time
import xmlrpc.client
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from supervisor.xmlrpc import SupervisorTransport

from mqd.base import paths
from tests.broker import Broker
from tests.cluster import Cluster
from tests.polling import eventually


def bootstrap_of(broker: Broker) -> str:
    return getattr(broker, "bootstrap", f"127.0.0.1:{broker.port}")


def create(broker: Broker, name: str, replicas: int = 1, **config: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap_of(broker)})
    topic = NewTopic(name, 1, replicas, config={key.replace("_", "."): value for key, value in config.items()})
    (made,) = admin.create_topics([topic]).values()
    made.result(20)


def timer_pid(broker: Broker) -> int:
    """The pid of the timer; 0: it does not run."""
    address = f"unix://{paths.layout(broker.data_dir).supervisor_socket}"
    server = xmlrpc.client.ServerProxy("http://127.0.0.1", SupervisorTransport(None, None, address))
    return int(server.supervisor.getProcessInfo("mqd-timer")["pid"])


class Target:
    """The records of the target topic, read by a consumer with read_committed."""

    def __init__(self, broker: Broker, topic: str, bootstrap: str = "") -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap or bootstrap_of(broker),
                "group.id": topic,
                "isolation.level": "read_committed",
                "log.connection.close": False,
            }
        )
        self._consumer.assign([TopicPartition(topic, 0, 0)])
        self.records: list[tuple[str, float]] = []  # value, and when it was read

    def take(self, count: int, timeout_s: float = 40.0) -> list[str]:
        """Reads until there are at least this many in total."""
        end = time.monotonic() + timeout_s
        while len(self.records) < count and time.monotonic() < end:
            for message in self._consumer.consume(100, 0.1):
                if message.error() is not None:
                    assert message.error().retriable() or message.error().code() < 0, message.error()
                    continue
                assert not [name for name, _ in message.headers() or () if name.startswith("mqd-")]
                self.records.append((message.value().decode(), time.time() * 1000))
        return [value for value, _ in self.records]

    def leader_of(self, topic: str) -> int:
        return int(self._consumer.list_topics(topic, 20).topics[topic].partitions[0].leader)

    def close(self) -> None:
        self._consumer.close()


def test_schedules(start_broker: Callable[..., Broker]) -> None:
    """Records arrive when they are due, and once, even if the timer is killed; cancelled ones do
    not.
    """
    broker = start_broker()
    create(broker, "orders")
    assert timer_pid(broker) == 0, "a broker without schedules has no timer"
    create(broker, "later", schedule_to="orders", schedule_delay_ms="1")
    producer = Producer({"bootstrap.servers": f"127.0.0.1:{broker.port}"})
    offsets: dict[str, int] = {}

    def send(value: str, **headers: int) -> None:
        named = [(name.replace("_", "-"), str(number)) for name, number in headers.items()]

        def keep(error: object, message: object) -> None:
            assert error is None
            offsets[value] = message.offset()  # type: ignore[attr-defined]

        producer.produce("later", value.encode(), b"k", headers=[*named, ("own", b"1")], on_delivery=keep)

    begin = int(time.time() * 1000)
    send("at once")
    producer.flush(60)
    target = Target(broker, "orders")
    assert target.take(1) == ["at once"]
    now = int(time.time() * 1000)
    dues = {f"{number}": now + 300 + 25 * (number * 7 % 80) for number in range(80)}
    for value, due in dues.items():
        send(value, mqd_deliver_at=due)
    send("cancelled", mqd_delay_ms=3_000)
    send("replaced", mqd_delay_ms=3_000)
    send("hours", mqd_delay_ms=7_200_000)
    producer.flush(60)
    send("cancellation", mqd_cancel=offsets["cancelled"])
    send("instead", mqd_replace=offsets["replaced"], mqd_delay_ms=2_800)
    send("last", mqd_delay_ms=4_000)  # due after all others: a duplicate would arrive before it
    producer.flush(60)
    for count in (10, 40):
        target.take(1 + count)
        os.kill(timer_pid(broker), signal.SIGKILL)
    eventually(lambda: broker.pid("mqd-timer") == timer_pid(broker) != 0, broker.status)
    assert sorted(target.take(83)) == sorted(["at once", *dues, "instead", "last"])
    for value, came in target.records:
        assert came >= dues.get(value, begin), value
    target.close()
    _is_on_the_metrics_page(broker)
    _refused(broker)


def _is_on_the_metrics_page(broker: Broker) -> None:
    def text() -> str:
        with urlopen(f"http://127.0.0.1:{broker.status()['metrics_port']}/metrics") as page:
            return page.read().decode()

    pending = 'mqd_schedule_pending{partition="0",topic="later"} 1.0'  # the timer reports once a second
    eventually(lambda: pending in text(), text)
    assert 'mqd_schedule_late_seconds_count{partition="0",topic="later"}' in text()


def _refused(broker: Broker) -> None:
    """Invalid records, and topics that cannot be schedules."""
    producer, failed = Producer({"bootstrap.servers": f"127.0.0.1:{broker.port}", "linger.ms": 50}), []
    for value in (b"31622400000000000", b"soon", b"1"):
        producer.produce(
            "later",
            value,
            headers=[("mqd-delay-ms", value)],
            on_delivery=lambda error, message: failed.append((error.code() if error else 0, message.value())),
        )
    producer.flush(60)
    # as in KIP-467: the refused records by their index, and the other one with them
    other = KafkaError._INVALID_DIFFERENT_RECORD
    assert sorted(failed) == [(other, b"1"), *((KafkaError.INVALID_RECORD, v) for v in (b"31622400000000000", b"soon"))]
    for name, config, reason in (
        ("a", {"schedule_to": "missing"}, "there is no such topic"),
        ("a", {"schedule_to": "a"}, "to itself"),
        ("a", {"schedule_to": "orders", "cleanup_policy": "compact"}, "must not be compacted"),
        ("a", {"schedule_to": "__consumer_offsets"}, "internal"),
        ("a", {"schedule_to": "orders", "schedule_delay_ms": "31622400001"}, "schedule.delay.ms"),
    ):
        with pytest.raises(KafkaException) as refusal:
            create(broker, name, **config)
        assert refusal.value.args[0].code() == KafkaError.INVALID_CONFIG
        assert reason in refusal.value.args[0].str()


@pytest.mark.slow
def test_schedules_survive_their_hosts(tmp_path: Path) -> None:
    """Each record once and never early, while the hosts that lead the schedule are killed one after
    the other, and restarted.
    """
    with Cluster(tmp_path) as cluster:
        first = cluster.brokers[1]
        create(first, "orders", replicas=3)
        create(first, "later", replicas=3, schedule_to="orders")
        producer = Producer({"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True})
        begin = int(time.time() * 1000)
        dues = {f"{number}": begin + 2_000 + 20 * (number * 7 % 1_000) for number in range(1_000)}
        for value, due in dues.items():
            producer.produce("later", value.encode(), headers=[("mqd-deliver-at", str(due))])
        assert producer.flush(30) == 0
        target = Target(first, "orders", cluster.bootstrap)
        for count in (100, 400, 700):
            target.take(count)
            leader = target.leader_of("later")
            cluster.brokers[leader].kill_all()
            target.take(count + 150, timeout_s=60.0)
            cluster.brokers[leader].start()
        target.take(len(dues), timeout_s=90.0)
        # due after all others: a duplicate would arrive before it
        producer.produce("later", b"last", headers=[("mqd-delay-ms", "1")])
        assert producer.flush(30) == 0
        values = target.take(len(dues) + 1, timeout_s=60.0)
        target.close()
        assert sorted(values) == sorted([*dues, "last"]), cluster.logs()
        assert all(came >= dues.get(value, begin) for value, came in target.records)
