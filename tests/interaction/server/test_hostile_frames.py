"""Invalid frames: each closes at most its own connection, with a log line that names the client and
the reason; other clients are not affected.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import time

import pytest

from mqd.protocol import KNOWN, SUPPORTED, decode_response, encode_request, with_length
from mqd.protocol.messages import FetchRequest, ListOffsetsRequest, MetadataRequest, ProduceRequest, message_class
from mqd.protocol.records import has_valid_crc
from tests.interaction.traffic import (
    API_VERSIONS,
    CORRUPT_MESSAGE,
    FETCH,
    INVALID_RECORD,
    LIST_OFFSETS,
    METADATA,
    PATIENCE_S,
    PRODUCE,
    PRODUCE_VERSION,
    TOO_LARGE,
    UNKNOWN_TOPIC,
    UNKNOWN_TOPIC_ID,
    UNSUPPORTED_FOR_MESSAGE_FORMAT,
    Watch,
    batch,
    create_topic,
    eventually,
    fetch,
    fetch_request,
    log_end,
    must_produce,
    one_outcome,
    produce,
    produce_request,
    read_batches,
)
from tests.kafka_connection import ConnectionEnded, KafkaConnection


@pytest.fixture(scope="module")
def watch(shared_broker) -> Watch:
    return Watch(shared_broker)


class Bystanders:
    """A connection to each worker and the records written so far. `look` checks that they are still
    served and that their records are intact.
    """

    def __init__(self, watch: Watch, connections: list[KafkaConnection], topic: str) -> None:
        self.watch, self.connections, self.topic, self.written = watch, connections, topic, 0
        self.pids = watch.worker_pids()
        create_topic(connections[0], topic)

    def look(self) -> None:
        for kafka in self.connections:
            assert must_produce(kafka, self.topic, 0, b"bystander %d" % self.written) == self.written
            self.written += 1
        assert self.watch.worker_pids() == self.pids, f"a worker died\n{self.watch.broker.logs()}"

    def end(self) -> None:
        stored = b"".join(read_batches(self.connections[0], self.topic, 0))
        assert [stored.count(b"bystander %d" % number) > 0 for number in range(self.written)] == [True] * self.written
        assert log_end(self.connections[0], self.topic, 0) == self.written


class Standing:
    """The bystanders shared by all tests of this module, created on demand: long-lived connections
    show the effects of many tests. Replaced after a failure.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch, self._held = watch, contextlib.ExitStack()
        self._one: Bystanders | None = None
        self._count = 0

    def get(self) -> Bystanders:
        if self._one is None:
            connections = self._held.enter_context(self._watch.connection_to_each_worker())
            self._one = Bystanders(self._watch, connections, f"bystanders-hostile-frames-{self._count}")
            self._count += 1
        return self._one

    def forget(self) -> None:
        self._one = None
        self._held.close()


@pytest.fixture(scope="module")
def standing(watch: Watch):
    one = Standing(watch)
    yield one
    one.get().end()
    one.forget()


@pytest.fixture
def bystanders(standing: Standing):
    one = standing.get()
    try:
        yield one
        one.look()
    except BaseException:
        standing.forget()
        raise


# -- the length word -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (struct.pack(">i", -1), "-1 bytes"),
        (struct.pack(">i", -(2**31)), "-2147483648 bytes"),
        (struct.pack(">i", 0), "0 bytes"),
        (struct.pack(">i", 7), "7 bytes"),
        (struct.pack(">i", 2**31 - 1), "2147483647 bytes is larger than socket.request.max.bytes=104857600"),
        (struct.pack(">i", 104857601), "104857601 bytes is larger than socket.request.max.bytes=104857600"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "1195725856 bytes is larger"),
        (bytes.fromhex("8000002a0103"), "not the Kafka protocol"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), "TLS on a plain-text listener"),
    ],
)
def test_an_impossible_length_closes_the_connection(watch, bystanders, data, cause):
    before = watch.total("protocol_errors")
    with watch.connect() as kafka:
        kafka.send_raw(data)
        assert kafka.is_closed_by_peer()
    assert eventually(lambda: watch.total("protocol_errors") - before, "it is counted") == 1
    line = watch.wait_logged("closing the connection", cause, "connection=")
    assert "WARNING" in line


def test_complete_requests_before_an_invalid_frame_get_responses(watch, bystanders):
    with watch.connect() as kafka:
        frame = with_length(
            encode_request(
                produce_request(bystanders.topic, {0: batch(b"bystander %d" % bystanders.written)}),
                PRODUCE_VERSION,
                1,
                "honest",
            )
        )
        kafka.send_raw(frame)
        response = decode_response(kafka.receive_frame(), PRODUCE, PRODUCE_VERSION)[1]
        assert one_outcome(response).error_code == 0
        bystanders.written += 1
        kafka.send_raw(struct.pack(">i", -5))
        assert kafka.is_closed_by_peer()


@pytest.mark.both_backends
def test_a_frame_sent_byte_by_byte_gets_a_response(watch, bystanders):
    with watch.connect() as kafka:
        for byte in with_length(
            encode_request(
                produce_request(bystanders.topic, {0: batch(b"bystander %d" % bystanders.written)}),
                PRODUCE_VERSION,
                7,
                "slow",
            )
        ):
            kafka.send_raw(bytes([byte]))
        assert one_outcome(decode_response(kafka.receive_frame(), PRODUCE, PRODUCE_VERSION)[1]).error_code == 0
        bystanders.written += 1


@pytest.mark.both_backends
def test_connections_that_end_within_a_frame_leave_nothing(watch, bystanders):
    large = with_length(
        encode_request(produce_request("nowhere", {0: batch(bytes(200_000))}), PRODUCE_VERSION, 1, "cut")
    )
    small = with_length(
        encode_request(produce_request(bystanders.topic, {0: batch(b"never whole")}), PRODUCE_VERSION, 1, "cut")
    )
    cuts = [small[:at] for at in range(len(small))] + [large[:at] for at in (1, 4, 5, 40_000, 65_536, 131_072, 199_999)]
    for cut in cuts:
        with watch.connect() as kafka:
            kafka.send_raw(cut)
    watch.wait_quiet(connections=len(bystanders.connections) + 30)
    eventually(lambda: watch.total("heap_bytes") < 65536, "the heap is given back")


# -- APIs and versions -----------------------------------------------------------------------------


def _frame(api_key: int, version: int, body: bytes = b"") -> bytes:
    return with_length(struct.pack(">hhih", api_key, version, 77, 1) + b"x" + body)


def test_an_unknown_api_ends_the_connection(watch, bystanders):
    for api_key in (-1, -32768, 32767, 9999, *sorted(set(KNOWN) - set(SUPPORTED))):
        with watch.connect() as kafka:
            kafka.send_raw(_frame(api_key, 0, bytes(20)))
            assert kafka.is_closed_by_peer(), api_key
    # the first: later ones may be rate-limited in the log
    line = watch.wait_logged("api key -1 is not supported", "connection=")
    assert "WARNING" in line and "client=x" in line
    bystanders.look()


def test_an_unknown_version_ends_the_connection(watch, bystanders):
    for api_key in sorted(set(SUPPORTED) - {API_VERSIONS}):
        spec = SUPPORTED[api_key]
        for version in (spec.max_version + 1, spec.min_version - 1, 32767, -1, -32768):
            with watch.connect() as kafka:
                kafka.send_raw(_frame(api_key, version, bytes(40)))
                assert kafka.is_closed_by_peer(), (spec.name, version)
    bystanders.look()


@pytest.mark.parametrize("version", [-1, 5, 99, 32767])
def test_an_unknown_version_of_api_versions_gets_the_supported_ones(watch, version):
    with watch.connect() as kafka:
        tags = b"\0" if version >= 3 else b""  # of the header; the body's layout is unknown
        kafka.send_raw(_frame(API_VERSIONS, version, tags + b"\x04new\x041.0\0"))
        correlation_id, body = decode_response(kafka.receive_frame(), API_VERSIONS, 0)
        assert (correlation_id, body.error_code) == (77, 35)
        assert {API_VERSIONS} <= {api.api_key for api in body.api_keys}
        assert kafka.call(API_VERSIONS, 3).error_code == 0  # and the connection stays open


# -- batches that are wrong ------------------------------------------------------------------------


def _broken(data: bytes, at: int = -1) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


def test_a_bad_checksum_is_corrupt_message_for_its_partition_only(watch):
    with watch.connection_to_each_worker() as connections:
        name = f"crc-{watch.broker.config['io.backend']}"
        create_topic(connections[0], name, 4)
        for round_number, kafka in enumerate(connections):
            wrong = {
                0: batch(b"good"),
                1: _broken(batch(b"flipped")),
                2: _broken(batch(b"size"), at=11),
                3: batch(b"good"),
            }
            body = kafka.call(PRODUCE, PRODUCE_VERSION, produce_request(name, wrong))
            outcomes = body.responses[0].partition_responses
            assert [outcome.error_code for outcome in outcomes] == [0, CORRUPT_MESSAGE, INVALID_RECORD, 0]
            assert "checksum" in outcomes[1].error_message.lower() or "crc" in outcomes[1].error_message.lower(), (
                outcomes[1]
            )
            assert [log_end(kafka, name, partition) for partition in range(4)] == [
                round_number + 1,
                0,
                0,
                round_number + 1,
            ]
        for partition in (1, 2):  # also reported by a worker that does not own it
            watch.wait_logged("batch refused", "connection=", f"partition={name}-{partition}", logs="mqd-worker-0.log")
            watch.wait_logged("batch refused", "connection=", f"partition={name}-{partition}", logs="mqd-worker-1.log")


def test_a_batch_too_large_is_message_too_large_for_its_partition_only(watch):
    with watch.connection_to_each_worker() as connections:
        name = f"large-{watch.broker.config['io.backend']}"
        create_topic(connections[0], name, 2, max_message_bytes="2000")
        for round_number, kafka in enumerate(connections):
            body = kafka.call(
                PRODUCE, PRODUCE_VERSION, produce_request(name, {0: batch(bytes(2000)), 1: batch(bytes(1000))})
            )
            outcomes = body.responses[0].partition_responses
            assert [outcome.error_code for outcome in outcomes] == [TOO_LARGE, 0]
            assert [log_end(kafka, name, partition) for partition in range(2)] == [0, round_number + 1]


def test_the_broker_default_of_the_largest_batch(watch):
    with watch.connect() as kafka:
        name = f"largest-{watch.broker.config['io.backend']}"
        create_topic(kafka, name)
        assert produce(kafka, name, 0, batch(bytes(1048588 - 61 - 20))).error_code == 0
        assert produce(kafka, name, 0, batch(bytes(1048588))).error_code == TOO_LARGE
        assert log_end(kafka, name, 0) == 1


def test_unknown_topics_and_partitions_are_reported_as_such(watch):
    with watch.connect() as kafka:
        name = f"known-{watch.broker.config['io.backend']}"
        topic_id = create_topic(kafka, name)
        assert produce(kafka, "unheard-of", 0, batch(b"x")).error_code == UNKNOWN_TOPIC
        assert produce(kafka, name, 1, batch(b"x")).error_code == UNKNOWN_TOPIC
        assert produce(kafka, name, -1, batch(b"x")).error_code == UNKNOWN_TOPIC
        assert fetch(kafka, "unheard-of", 0, 0).error_code == UNKNOWN_TOPIC
        assert fetch(kafka, name, 1, 0).error_code == UNKNOWN_TOPIC
        requested = ListOffsetsRequest.Topic(
            name="unheard-of", partitions=[ListOffsetsRequest.Partition(partition_index=0, timestamp=-1)]
        )
        assert (
            kafka.call(LIST_OFFSETS, 5, ListOffsetsRequest(topics=[requested])).topics[0].partitions[0].error_code
            == UNKNOWN_TOPIC
        )
        for id_, error in ((topic_id, 0), (bytes(15) + b"\x07", UNKNOWN_TOPIC_ID), (bytes(16), UNKNOWN_TOPIC_ID)):
            assert (
                one_outcome(kafka.call(PRODUCE, 13, produce_request("", {0: batch(b"x")}, topic_id=id_))).error_code
                == error
            )
            assert one_outcome(kafka.call(FETCH, 13, fetch_request("", {0: 0}, topic_id=id_))).error_code == error
        assert log_end(kafka, name, 0) == 1


@pytest.mark.parametrize(
    "records", [None, b"", bytes(10), bytes(61), bytes(100)], ids=["null", "none", "10", "61", "100"]
)
def test_bytes_that_are_not_records_are_refused(watch, records):
    with watch.connect() as kafka:
        name = f"empty-{watch.broker.config['io.backend']}-{0 if records is None else len(records) + 1}"
        create_topic(kafka, name)
        outcome = one_outcome(kafka.call(PRODUCE, PRODUCE_VERSION, produce_request(name, {0: records})))
        assert outcome.error_code in (CORRUPT_MESSAGE, INVALID_RECORD, UNSUPPORTED_FOR_MESSAGE_FORMAT), outcome
        assert outcome.error_message
        assert log_end(kafka, name, 0) == 0


# -- mutations -------------------------------------------------------------------------------------

EXTREMES = (
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\x80\x00\x00\x00",
    b"\x00\x00\x00\x00",
    b"\x00\x00\xff\xff",
    b"\xff\xff\xff\xff\x0f",
    b"\xff\x7f",
    b"\x00\x01\x00\x00",
)
WINDOW = 48


def valid_frames(topic: str, topic_id: bytes) -> list[tuple[int, int, bytes]]:
    """(api key, version, frame): valid ones of the hot requests, small and with several topics."""
    found = []
    for version in range(3, 14):
        data = [ProduceRequest.PartitionData(index=index, records=batch(b"mutant", b"two")) for index in (0, 1)]
        topics = [ProduceRequest.TopicData(name=topic, topic_id=topic_id, partition_data=data)] * 2
        found.append((PRODUCE, version, ProduceRequest(acks=1, timeout_ms=1000, topic_data=topics)))
    for version in range(4, 19):
        partitions = [
            FetchRequest.Partition(partition=index, fetch_offset=0, partition_max_bytes=4096) for index in (0, 1)
        ]
        forgotten = (
            [FetchRequest.ForgottenTopic(topic=topic, topic_id=topic_id, partitions=[0])] if version >= 7 else []
        )
        found.append(
            (
                FETCH,
                version,
                FetchRequest(
                    max_wait_ms=1,
                    min_bytes=0,
                    max_bytes=65536,
                    session_epoch=0,
                    topics=[FetchRequest.Topic(topic=topic, topic_id=topic_id, partitions=partitions)],
                    forgotten_topics_data=forgotten,
                ),
            )
        )
    for version in range(1, 12):
        partitions = [
            ListOffsetsRequest.Partition(partition_index=index, timestamp=when)
            for index, when in ((0, -1), (1, -2), (0, -3), (1, 5))
        ]
        found.append(
            (
                LIST_OFFSETS,
                version,
                ListOffsetsRequest(topics=[ListOffsetsRequest.Topic(name=topic, partitions=partitions)]),
            )
        )
    for version in range(1, 14):
        found.append(
            (
                METADATA,
                version,
                MetadataRequest(topics=[MetadataRequest.Topic(name=topic)], allow_auto_topic_creation=False),
            )
        )
    return [
        (key, version, encode_request(request, version, 5, "mutant"))
        for key, version, request in found
        if KNOWN[key].min_version <= version <= KNOWN[key].max_version
    ]


def mutate(frame: bytes, chance: random.Random) -> bytes:
    """Makes one to three changes after api key and version; the length word matches the result, so
    the invalid part is inside.
    """
    data = bytearray(frame)
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(4, max(5, len(data)))
        kind = chance.randrange(6)
        if kind == 0:
            data[at : at + 1] = bytes([data[at] ^ 1 << chance.randrange(8)]) if at < len(data) else b""
        elif kind == 1:
            extreme = chance.choice(EXTREMES)
            data[at : at + len(extreme)] = extreme
        elif kind == 2:
            del data[at : at + chance.randrange(1, 32)]
        elif kind == 3:
            data[at:at] = chance.randbytes(chance.randrange(1, 32))
        elif kind == 4:
            del data[at:]
        else:
            data[at:at] = data[at : at + chance.randrange(1, 200)]
    return bytes(data)


class Swarm:
    """Sends each frame on its own connection, WINDOW at a time, and records the outcome: closed,
    answered, or (an acks=0, a long wait) silent.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.ends = {"closed": 0, "answered": 0, "silent": 0}

    def send(self, frames: list[bytes], seconds: float = 0.25) -> list[bytes | None]:
        """A connection without a response by the deadline is silent."""
        sockets = []
        for frame in frames:
            one = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
            one.sendall(with_length(frame))
            sockets.append(one)
        poll = select.poll()
        waiting = {one.fileno(): index for index, one in enumerate(sockets)}
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        responses: list[bytes | None] = [None] * len(frames)
        deadline = time.monotonic() + seconds
        while waiting and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                try:
                    data = sockets[waiting[fd]].recv(1 << 20)
                except ConnectionResetError:
                    data = b""
                responses[waiting.pop(fd)] = data
                poll.unregister(fd)
        for response, one in zip(responses, sockets, strict=True):
            self.ends["silent" if response is None else "answered" if response else "closed"] += 1
            one.close()
        return responses


def _run_mutations(watch: Watch, bystanders: Bystanders, count: int, seed: int) -> Swarm:
    chance = random.Random(seed)
    # far from the ids of other seeds: a changed name in a Metadata request creates a topic
    topic = f"mutants-{chance.randbytes(8).hex()}"
    seeds = valid_frames(topic, create_topic(bystanders.connections[0], topic, 2))
    swarm = Swarm(watch.broker.port)
    assert all(swarm.send([frame for _, _, frame in seeds], PATIENCE_S)), "a valid frame was not answered"
    assert swarm.ends["answered"] == len(seeds), swarm.ends
    for _ in range(count // WINDOW):
        chosen = [chance.choice(seeds) for _ in range(WINDOW)]
        for response in swarm.send([mutate(frame, chance) for _, _, frame in chosen]):
            if response:
                size, _ = struct.unpack(">ii", response[:8])
                assert 4 <= size <= 1 << 20, f"an answer of {size} bytes; seed {seed}"
        bystanders.look()
    for partition in (0, 1):  # whatever was written of it is complete
        assert all(has_valid_crc(data) for data in read_batches(bystanders.connections[0], topic, partition))
    return swarm


def test_mutated_frames_harm_no_other_client(watch, bystanders):
    swarm = _run_mutations(watch, bystanders, 4800, seed=20260)
    assert swarm.ends["closed"] > 1000 and swarm.ends["answered"] > 1000, swarm.ends
    watch.wait_logged("closing the connection", "connection=", logs="mqd-worker-*.log")
    watch.wait_quiet(connections=len(bystanders.connections) + 30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_more_mutated_frames_harm_no_other_client(watch, bystanders, seed):
    _run_mutations(watch, bystanders, 6000, seed)


@pytest.mark.parametrize("api_key", sorted(SUPPORTED))
def test_random_bodies_of_every_api_harm_no_other_client(watch, bystanders, api_key):
    chance = random.Random(api_key)
    spec = SUPPORTED[api_key]
    swarm = Swarm(watch.broker.port)
    versions = range(spec.min_version, spec.max_version + 1)
    # Metadata, OffsetFetch: the default, null, is not valid in every version
    lists = {"topics": []} if api_key in (METADATA, 9) else {}
    request = message_class(api_key, "Request")(**lists)
    whole = {version: encode_request(request, version, 3, "random") for version in versions}
    frames = [
        struct.pack(">hhih", api_key, chance.choice(versions), 3, -1) + chance.randbytes(chance.randrange(0, 80))
        for _ in range(WINDOW // 2)
    ]
    frames += [mutate(whole[chance.choice(versions)], chance) for _ in range(WINDOW // 2)]
    swarm.send(frames)
    bystanders.look()


def test_a_connection_is_closed_even_with_responses_pending(watch, bystanders):
    """An invalid frame behind a long poll closes the connection at once, not when the poll ends."""
    with watch.connect() as kafka:
        kafka.send(FETCH, 12, fetch_request(bystanders.topic, {0: bystanders.written}, max_wait_ms=120_000))
        kafka.send_raw(struct.pack(">i", -1))
        with pytest.raises(ConnectionEnded):  # a TimeoutError would mean that it waited for the poll
            kafka.receive()
