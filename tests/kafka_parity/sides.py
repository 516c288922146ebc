"""One broker under test: its connections, and the outcome of a request as a plain value."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
import time
from collections.abc import Callable

from mqd.protocol import ProtocolError, decode_response, encode_request, with_length
from mqd.protocol.messages import ApiVersionsRequest
from tests.kafka_connection import ConnectionEnded, KafkaConnection
from tests.kafka_parity.model import Step, World

CLIENT_ID = "judge"
API_VERSIONS, PRODUCE, JOIN_GROUP, SYNC_GROUP, ADD_PARTITIONS, DESCRIBE_SHARE_OFFSETS = 18, 0, 11, 14, 24, 90
PATIENCE_S = 6.0
READY_S = 60.0
PATIENCE_BLOCKING_S = 1.5  # of requests that may wait for other members, or never get a response
BLOCKING = (JOIN_GROUP, SYNC_GROUP, ADD_PARTITIONS, DESCRIBE_SHARE_OFFSETS)

Tamper = Callable[[int, int, bytes], bytes]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`kind`: answered (with `body`), closed, waits, silent (acks=0), undecodable."""

    kind: str
    body: object = None


class Side:
    """`tamper` changes the frames of responses: the planted differences of test_planted.py."""

    def __init__(self, name: str, port: int, tamper: Tamper | None = None) -> None:
        self.name, self.port, self._tamper = name, port, tamper
        self._connections: dict[int, KafkaConnection] = {}
        self._next = 1
        self.tampered = 0

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def close_extra(self) -> None:
        """All connections but the first: a case's own members end with it."""
        for number in [number for number in self._connections if number]:
            self._connections.pop(number).close()

    def send(self, step: Step, world: World) -> Callable[[], Outcome]:
        """Sends, and returns a function that waits for the outcome."""
        request = world.resolve(step.request)
        correlation_id = self._next
        self._next += 2
        frame = encode_request(request, step.version, correlation_id, CLIENT_ID)
        if step.damage == "cut":
            frame = frame[:-3]
        elif step.damage == "extra":
            frame += b"\x01\x02"
        is_silent = step.api_key == PRODUCE and request.acks == 0
        if is_silent:
            probe = encode_request(ApiVersionsRequest(), 0, correlation_id + 1, CLIENT_ID)
            frame = with_length(frame) + with_length(probe)
        else:
            frame = with_length(frame)
        connection = self._connection(step.connection)
        connection.socket.settimeout(PATIENCE_BLOCKING_S if step.api_key in BLOCKING else PATIENCE_S)
        with contextlib.suppress(ConnectionEnded):
            connection.send_raw(frame)
        return lambda: self._outcome(step, connection, correlation_id, is_silent)

    def call(self, step: Step, world: World) -> Outcome:
        return self.send(step, world)()

    def until(self, world: World, step: Step, good: Callable[[object], bool]) -> Outcome:
        """Repeats the request until the response is good."""
        deadline = time.monotonic() + READY_S
        while True:
            outcome = self.call(step, world)
            if outcome.kind == "answered" and good(outcome.body):
                return outcome
            assert time.monotonic() < deadline, f"{self.name} is not ready: {outcome}"
            time.sleep(0.05)  # polls another process; there is no event to wait for

    def _connection(self, number: int) -> KafkaConnection:
        if number not in self._connections:
            self._connections[number] = KafkaConnection("127.0.0.1", self.port, client_id=CLIENT_ID)
        return self._connections[number]

    def _outcome(self, step: Step, connection: KafkaConnection, correlation_id: int, is_silent: bool) -> Outcome:
        try:
            frame = connection.receive_frame()
        except TimeoutError:
            self._drop(step.connection)
            return Outcome("waits")
        except ConnectionEnded:
            self._drop(step.connection)
            return Outcome("closed")
        if is_silent and frame[:4] == struct.pack(">i", correlation_id + 1):
            return Outcome("silent")
        if self._tamper is not None:
            changed = self._tamper(step.api_key, step.version, frame)
            self.tampered += changed != frame
            frame = changed
        (answered,) = struct.unpack_from(">i", frame)
        if answered != correlation_id:
            self._drop(step.connection)
            return Outcome("undecodable", "another correlation id")
        try:
            return Outcome("answered", decode_response(frame, step.api_key, step.version)[1])
        except ProtocolError as error:
            return Outcome("undecodable", str(error))

    def _drop(self, number: int) -> None:
        self._connections.pop(number).close()
