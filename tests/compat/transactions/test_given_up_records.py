"""librdkafka gives up records that it has sent when it aborts, and reuses their sequence numbers:
no record acknowledged afterwards is lost, and the producer continues.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import confluent_kafka
import pytest

from tests.compat.clients import DEADLINE_SECONDS
from tests.interaction.traffic import create_topic, eventually, log_end
from tests.interaction.transactional import read_committed
from tests.kafka_connection import KafkaConnection
from tests.ports import free_port

PRODUCE = 0


class Proxy:
    """Between a client and a broker. Once `cut`, a connection that carries records is closed when
    it has taken them, before the response arrives, and new ones lead nowhere until `mend`.
    """

    def __init__(self, port: int, listener: socket.socket) -> None:
        self._port, self._listener, self._dark = port, listener, False
        self._connections: list[socket.socket] = []
        self._stranded: list[socket.socket] = []
        self._start(self._accept)

    @staticmethod
    def _start(work, *arguments) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._dark:
                    self._stranded.append(client)
                    continue
                broker = socket.create_connection(("127.0.0.1", self._port))
                self._connections += [client, broker]
                self._start(self._requests, client, broker)
                self._start(self._answers, broker, client)

    def _answers(self, broker: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := broker.recv(65536):
                client.sendall(data)
        _end(client)

    def _requests(self, client: socket.socket, broker: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                head = _exactly(client, 6)
                size, key = struct.unpack(">ih", head)
                if self._dark and key == PRODUCE:
                    _end(client, socket.SHUT_WR)
                broker.sendall(head + _exactly(client, size - 2))
                if self._dark and key == PRODUCE:
                    return _end(client)
        _end(broker)

    def cut(self) -> None:
        self._dark = True

    def mend(self) -> None:
        self._dark = False
        for client in self._stranded:
            client.close()

    def close(self) -> None:
        self._listener.close()
        for one in [*self._connections, *self._stranded]:
            _end(one)
            one.close()


def _exactly(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = source.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _end(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(how)


@pytest.fixture
def cut_off(start_broker):
    """(broker, proxy): clients go to the broker through the proxy."""
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        broker = start_broker(config={"advertised.listeners": f"PLAINTEXT://127.0.0.1:{listener.getsockname()[1]}"})
        proxy = Proxy(broker.port, listener)
        yield broker, proxy
        proxy.close()


def test_an_abort_that_gives_up_sent_records_loses_no_later_ones(cut_off) -> None:
    broker, proxy = cut_off
    topic, acknowledged = "given-up", []

    def on_delivery(error: confluent_kafka.KafkaError | None, message: confluent_kafka.Message) -> None:
        if error is None:
            acknowledged.append(message.value())
        elif error.code() == confluent_kafka.KafkaError._PURGE_QUEUE:
            proxy.mend()  # it has given them up

    with KafkaConnection(port=broker.port, timeout_s=DEADLINE_SECONDS) as kafka:
        create_topic(kafka, topic)
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": broker.bootstrap,
                "transactional.id": "gives up",
                "linger.ms": 0,
                "reconnect.backoff.max.ms": 200,
                "on_delivery": on_delivery,
            }
        )
        producer.init_transactions(DEADLINE_SECONDS)
        producer.begin_transaction()
        producer.produce(topic, b"before", partition=0)
        producer.commit_transaction(DEADLINE_SECONDS)  # the marker is the log's second record

        producer.begin_transaction()
        proxy.cut()
        for number in range(4):
            producer.produce(topic, b"given up %d" % number, partition=0)
        eventually(lambda: log_end(kafka, topic, 0) > 2, "the records never came")
        producer.abort_transaction(DEADLINE_SECONDS)

        tries = 0
        while not _commits(producer, topic, b"kept %d" % tries):
            tries += 1
            assert tries < 5
        assert tries == 1, "librdkafka does not use sequences again any more: this test shows nothing"
        assert acknowledged == [b"before", b"kept 1"]
        assert read_committed(kafka, topic, 0) == [b"before", b"kept 1"]


def _commits(producer: confluent_kafka.Producer, topic: str, value: bytes) -> bool:
    """KafkaException for every error after which an application cannot continue."""
    producer.begin_transaction()
    try:
        producer.produce(topic, value, partition=0)
        producer.commit_transaction(DEADLINE_SECONDS)
    except confluent_kafka.KafkaException as error:
        if not error.args[0].txn_requires_abort():
            raise
        producer.abort_transaction(DEADLINE_SECONDS)
        return False
    return True
