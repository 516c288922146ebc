"""From the previous version to this one, and back while that is possible: files written by the
previous version's code, and its behaviour. (test_cluster_versions.py negotiates levels between
hosts of this version.)
"""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Message, Producer

from tests import previous_version
from tests.broker import Broker, BrokerFailed
from tests.cluster import Cluster
from tests.interaction.cluster.test_cluster_moves import Load
from tests.interaction.cluster.test_cluster_versions import upgrade
from tests.interaction.cluster_clients import all_in_sync, create, read, run, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
PARTITIONS = 3
LEFT_BEHIND = "Install the version that the other hosts run"


def use_previous(broker: Broker) -> None:
    broker.environment = previous_version.environment()
    broker.config.pop("core.files.allow", None)  # a property that the previous version does not have


def use_this(broker: Broker) -> None:
    broker.environment = {}


class GroupReader:
    """A group member that reads and commits continuously. `values`: by partition, in the order
    read; after a rebalance some may be repeated.
    """

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "upgraded",
                "auto.offset.reset": "earliest",
                "auto.commit.interval.ms": 200,
            }
        )
        self._consumer.subscribe([topic])
        self.values: dict[int, list[bytes]] = {index: [] for index in range(PARTITIONS)}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._end.is_set():
            message = self._consumer.poll(0.1)
            if message is not None and message.error() is None:
                self.values[message.partition()].append(message.value())

    def has(self, sent: dict[int, list[bytes]]) -> bool:
        return all(set(self.values[index]) >= set(values) for index, values in sent.items())

    def __enter__(self) -> GroupReader:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._end.set()
        self._thread.join()
        self._consumer.close()


class Transactions:
    """A producer whose transactions write their number to each partition."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._bootstrap, self._topic = bootstrap, topic
        self.committed = 0
        self._failure: BaseException | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        producer = Producer(
            {
                "bootstrap.servers": self._bootstrap,
                "transactional.id": "upgraded",
                "linger.ms": 1,
                "transaction.timeout.ms": 60_000,
            }
        )
        try:
            producer.init_transactions(60)
            while not self._end.wait(0.02):
                if self._commit(producer):
                    self.committed += 1
        except BaseException as error:
            self._failure = error

    def _commit(self, producer: Producer) -> bool:
        producer.begin_transaction()
        try:
            for index in range(PARTITIONS):
                producer.produce(self._topic, str(self.committed).encode(), partition=index)
            self._until_done(lambda: producer.commit_transaction(60))
        except KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise
            self._until_done(lambda: producer.abort_transaction(60))
            return False
        return True

    @staticmethod
    def _until_done(step) -> None:
        while True:
            try:
                return step()
            except KafkaException as error:
                if not error.args[0].retriable():
                    raise

    def __enter__(self) -> Transactions:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._end.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure


def committed_values(bootstrap: str, topic: str, count: int) -> dict[int, list[bytes]]:
    with closing(
        Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "committed",
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
            }
        )
    ) as consumer:
        consumer.subscribe([topic])
        found: dict[int, list[bytes]] = {index: [] for index in range(PARTITIONS)}
        while sum(map(len, found.values())) < count:
            message: Message | None = consumer.poll(30)
            assert message is not None, f"{found} of {count}"
            if message.error() is None:
                found[message.partition()].append(message.value())
        last = consumer.poll(1)
        assert last is None or last.error() is not None, last.value()
        return found


def test_three_brokers_are_upgraded_under_load(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    for member in cluster:
        use_previous(member)

    def roll(node_id: int, use) -> None:
        member = cluster.brokers[node_id]
        member.stop()
        use(member)
        member.start()
        until("all replicas are in sync", lambda: all_in_sync(cluster, "rolled"), cluster)

    with cluster:
        for topic in ("rolled", "atomic"):
            create(cluster, topic, PARTITIONS)
        with GroupReader(cluster.bootstrap, "rolled") as reader:
            with Transactions(cluster.bootstrap, "atomic") as transactions, Load(cluster, "rolled", PARTITIONS) as load:

                def wait_for_transactions(state: str) -> None:
                    before = transactions.committed
                    until(f"transactions continue {state}", lambda: transactions.committed > before + 5, cluster)

                wait_for_transactions("on the previous version")
                roll(1, use_this)
                roll(2, use_this)
                code, output = upgrade(cluster)
                assert code == 1 and "node 3 does not support" in output, output
                roll(2, use_previous)  # a downgrade is possible until the features are raised
                roll(2, use_this)
                roll(3, use_this)
                wait_for_transactions("on this version")
                code, output = upgrade(cluster)
                assert code == 0 and "are in force now" in output, output
                wait_for_transactions("with the new features")
                roll(1, use_this)
            until("the group has read everything", lambda: reader.has(load.sent), cluster)
        for index, values in load.sent.items():
            assert read(cluster, "rolled", len(values), index) == values
        numbers = [str(number).encode() for number in range(transactions.committed)]
        found = committed_values(cluster.bootstrap, "atomic", PARTITIONS * len(numbers))
        assert found == {index: numbers for index in range(PARTITIONS)}

        member = cluster.brokers[3]
        member.stop()
        use_previous(member)
        with pytest.raises(BrokerFailed, match=LEFT_BEHIND):
            member.start()
        use_this(member)
        member.start()


def test_one_host_is_upgraded_and_back_until_the_features_are_raised(tmp_path: Path) -> None:
    broker = Broker(tmp_path / "data", workers=1)
    sent: list[bytes] = []
    known: list[bytes] = []

    def place_and_read() -> None:
        """Twenty records; a group reads them, and none is delivered to it again."""
        producer = Producer({"bootstrap.servers": broker.bootstrap, "acks": "all"})
        for number in range(len(sent), len(sent) + 20):
            sent.append(str(number).encode())
            producer.produce("kept", sent[-1])
        assert producer.flush(60) == 0
        settings = {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "kept",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
        with closing(Consumer(settings)) as consumer:
            consumer.subscribe(["kept"])
            while len(known) < len(sent):
                message = consumer.poll(30)
                assert message is not None, f"{len(known)} of {len(sent)} records"
                if message.error() is None:
                    known.append(message.value())
            consumer.commit(asynchronous=False)
        assert known == sent

    use_previous(broker)
    with broker:
        place_and_read()
        for use in (use_this, use_previous, use_this):
            broker.stop()
            use(broker)
            broker.start()
            place_and_read()
        done = run("cluster", "upgrade", "-b", broker.bootstrap)
        assert done.returncode == 0 and "are in force now" in done.stdout, done.stdout + done.stderr
        place_and_read()
        broker.stop()
        use_previous(broker)
        with pytest.raises(BrokerFailed, match=LEFT_BEHIND):
            broker.start()
        use_this(broker)
        broker.start()
        place_and_read()
