"""Load on the coordinators: members of groups and transactional producers, one process, frames
encoded beforehand. Run by perf/cases_coordinators.py on the clients' CPU.

    python -m perf.coordinating members      port topic members
        All join at the same time, then one leaves: seconds until all others have their assignment.
    python -m perf.coordinating heartbeats   port topic members rate seconds
    python -m perf.coordinating transactions port topic producers rate seconds [warm]

Arguments are NAME=VALUE; one JSON object is printed. Loads are open-loop: a request is sent when it is
due, and its latency counts from then, so that queueing in this process is included.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
from collections import deque

from mqd.native import crc32c
from mqd.protocol import decode_response, encode_request
from mqd.protocol.messages import (
    EndTxnRequest,
    FindCoordinatorRequest,
    HeartbeatRequest,
    InitProducerIdRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    ProduceRequest,
    SyncGroupRequest,
)
from mqd.protocol.records import HEADER_BYTES, Record, encode_batch

PRODUCE, FIND_COORDINATOR, JOIN_GROUP, HEARTBEAT, LEAVE_GROUP, SYNC_GROUP, INIT_PRODUCER_ID, END_TXN = (
    0,
    10,
    11,
    12,
    13,
    14,
    22,
    26,
)
MEMBER_ID_REQUIRED, REBALANCE_IN_PROGRESS, CONCURRENT_TRANSACTIONS, NOT_ENOUGH_REPLICAS = 79, 27, 51, 19
NOT_READY_ERRORS = (14, 15, 16, CONCURRENT_TRANSACTIONS)
SESSION_MS = 30_000
# heartbeat interval of members that are to learn of a rebalance: a tenth of the default of client
# libraries
HEARTBEAT_S = 0.3
PARTITIONS = 3
RECORDS = (4, 3, 3)
TICK_S = 0.002


class Connection(asyncio.Protocol):
    """Sends frames in order; each reply completes a future, as bytes without the length word."""

    def __init__(self) -> None:
        self.waiting: deque[asyncio.Future[bytes]] = deque()
        self.received = bytearray()
        self.loop = asyncio.get_running_loop()

    @classmethod
    async def dial(cls, port: int) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    def connection_made(self, transport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        for future in self.waiting:
            if not future.done():
                future.set_exception(ConnectionError("the broker closed the connection"))

    def data_received(self, data: bytes) -> None:
        self.received += data
        while len(self.received) >= 4:
            end = 4 + int.from_bytes(self.received[:4], "big")
            if len(self.received) < end:
                return
            reply = bytes(self.received[4:end])
            del self.received[:end]
            future = self.waiting.popleft()
            if not future.done():
                future.set_result(reply)

    def send(self, frame: bytes) -> asyncio.Future[bytes]:
        future: asyncio.Future[bytes] = self.loop.create_future()
        self.waiting.append(future)
        self.transport.write(frame)
        return future

    async def call(self, api: int, version: int, request: object):
        reply = await self.send(encode_frame(request, version))
        return decode_response(reply, api, version)[1]


def encode_frame(request: object, version: int) -> bytes:
    frame = encode_request(request, version, 1, "load")
    return struct.pack(">I", len(frame)) + frame


async def coordinator(connection: Connection, key: str, kind: int) -> None:
    """Waits until the coordinator is available."""
    while True:
        answer = await connection.call(
            FIND_COORDINATOR, 4, FindCoordinatorRequest(key_type=kind, coordinator_keys=[key])
        )
        if answer.coordinators[0].error_code == 0:
            return
        await asyncio.sleep(0.05)


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        f"p{name}_ms": 1000 * ordered[min(int(len(ordered) * share), len(ordered) - 1)]
        for name, share in (("50", 0.5), ("99", 0.99), ("999", 0.999))
    }


# -- groups ----------------------------------------------------------------------------------------


class Member:
    def __init__(self, connection: Connection, group: str, topic: str) -> None:
        self.connection, self.group, self.topic = connection, group, topic
        self.member_id, self.generation = "", -1

    async def join(self) -> None:
        """Joins and syncs; begins again whenever another rebalance interrupts it."""
        while True:
            protocols = [
                JoinGroupRequest.Protocol(
                    name="range",
                    metadata=b"\0\1\0\0\0\1"
                    + struct.pack(">H", len(self.topic))
                    + self.topic.encode()
                    + b"\xff\xff\xff\xff",
                )
            ]
            request = JoinGroupRequest(
                group_id=self.group,
                session_timeout_ms=SESSION_MS,
                rebalance_timeout_ms=SESSION_MS,
                member_id=self.member_id,
                protocol_type="consumer",
                protocols=protocols,
            )
            joined = await self.connection.call(JOIN_GROUP, 7, request)
            if joined.error_code == MEMBER_ID_REQUIRED:
                self.member_id = joined.member_id
                continue
            if joined.error_code in NOT_READY_ERRORS:
                await asyncio.sleep(0.05)
                continue
            if joined.error_code:
                raise SystemExit(f"JoinGroup returned error {joined.error_code}")
            self.member_id, self.generation = joined.member_id, joined.generation_id
            # only the leader gets the list of members
            shares = [
                SyncGroupRequest.Assignment(member_id=one.member_id, assignment=bytes(50)) for one in joined.members
            ]
            request = SyncGroupRequest(
                group_id=self.group,
                generation_id=self.generation,
                member_id=self.member_id,
                protocol_type="consumer",
                protocol_name="range",
                assignments=shares,
            )
            synced = await self.connection.call(SYNC_GROUP, 5, request)
            if synced.error_code == 0:
                return
            if synced.error_code != REBALANCE_IN_PROGRESS:
                raise SystemExit(f"SyncGroup returned error {synced.error_code}")

    def heartbeat(self) -> bytes:
        return encode_frame(
            HeartbeatRequest(group_id=self.group, generation_id=self.generation, member_id=self.member_id), 3
        )

    async def join_after_heartbeat(self, phase_s: float) -> None:
        """Joins like a client that learns of the rebalance from the response to a heartbeat."""
        await asyncio.sleep(phase_s)
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            answer = decode_response(await self.connection.send(self.heartbeat()), HEARTBEAT, 3)[1]
            if answer.error_code == REBALANCE_IN_PROGRESS:
                return await self.join()
            if answer.error_code:
                raise SystemExit(f"Heartbeat returned error {answer.error_code}")

    async def leave(self) -> None:
        await self.connection.call(
            LEAVE_GROUP,
            3,
            LeaveGroupRequest(
                group_id=self.group, members=[LeaveGroupRequest.MemberIdentity(member_id=self.member_id)]
            ),
        )


async def members(port: int, topic: str, members: int) -> dict:
    connections = [await Connection.dial(port) for _ in range(members)]
    group = f"members-{time.time_ns()}"
    await coordinator(connections[0], group, 0)
    all_of_them = [Member(connection, group, topic) for connection in connections]
    began = time.monotonic()
    await asyncio.gather(*(one.join() for one in all_of_them))
    joined = time.monotonic() - began
    left = [
        asyncio.ensure_future(one.join_after_heartbeat(HEARTBEAT_S * number / members))
        for number, one in enumerate(all_of_them[1:])
    ]
    await asyncio.sleep(2 * HEARTBEAT_S)
    began = time.monotonic()
    await all_of_them[0].leave()
    await asyncio.gather(*left)
    return {"joined_s": joined, "left_s": time.monotonic() - began}


async def heartbeats(port: int, topic: str, members: int, rate: int, seconds: float) -> dict:
    """Groups of one member each, over a tenth as many connections: the cost of a heartbeat does not
    depend on their number.
    """
    connections = [await Connection.dial(port) for _ in range(max(members // 10, 1))]
    await coordinator(connections[0], "x", 0)
    all_of_them = [
        Member(connections[number % len(connections)], f"beats-{time.time_ns()}-{number}", topic)
        for number in range(members)
    ]
    await asyncio.gather(*(one.join() for one in all_of_them))
    frames = [(one.connection, one.heartbeat()) for one in all_of_them]
    found: list[float] = []
    wrong = 0

    def done(due: float, future: asyncio.Future[bytes]) -> None:
        nonlocal wrong
        found.append(time.monotonic() - due)
        wrong += future.result()[8:10] != b"\0\0"  # correlation id, throttle time, error

    print("ready", flush=True)
    began, sent = time.monotonic(), 0
    while (now := time.monotonic()) < began + seconds:
        while sent < (now - began) * rate:
            connection, frame = frames[sent % members]
            due = began + sent / rate
            connection.send(frame).add_done_callback(lambda future, due=due: done(due, future))
            sent += 1
        await asyncio.sleep(TICK_S)
    while len(found) < sent:
        await asyncio.sleep(TICK_S)
    return {"count": sent, "seconds": time.monotonic() - began, "errors": wrong, **percentiles(found)}


# -- transactions ----------------------------------------------------------------------------------


class TransactionalProducer:
    """Writes ten records to three partitions and ends the transaction: two requests, as a client of
    transactions v2 sends them. Only epoch and CRC of the encoded Produce change.
    """

    def __init__(self, connection: Connection, name: str, topic: str) -> None:
        self.connection, self.name, self.topic = connection, name, topic
        self.identity = (-1, -1)

    async def begin(self) -> None:
        await coordinator(self.connection, self.name, 1)
        while True:
            answer = await self.connection.call(
                INIT_PRODUCER_ID, 4, InitProducerIdRequest(transactional_id=self.name, transaction_timeout_ms=60_000)
            )
            if answer.error_code == 0:
                break
            if answer.error_code not in NOT_READY_ERRORS:
                raise SystemExit(f"InitProducerId returned error {answer.error_code}")
            await asyncio.sleep(0.05)
        self.adopt(answer.producer_id, answer.producer_epoch)

    def adopt(self, producer_id: int, epoch: int) -> None:
        if producer_id != self.identity[0]:
            self.encode(producer_id, epoch)
        self.identity = (producer_id, epoch)

    def encode(self, producer_id: int, epoch: int) -> None:
        batches = []
        for count in RECORDS:
            records = [Record(value=b"v" * 100, timestamp_ms=int(time.time() * 1000)) for _ in range(count)]
            batches.append(
                encode_batch(
                    records, producer_id=producer_id, producer_epoch=epoch, base_sequence=0, is_transactional=True
                )
            )
        data = [ProduceRequest.PartitionData(index=index, records=batch) for index, batch in enumerate(batches)]
        request = ProduceRequest(
            transactional_id=self.name,
            acks=-1,
            timeout_ms=30_000,
            topic_data=[ProduceRequest.TopicData(name=self.topic, partition_data=data)],
        )
        self.produce = bytearray(encode_frame(request, 12))
        self.places, end = [], 0
        for batch in batches:
            at = self.produce.index(batch, end)
            end = at + len(batch)
            self.places.append((at, len(batch)))
        self.end = bytearray(
            encode_frame(
                EndTxnRequest(
                    transactional_id=self.name, producer_id=producer_id, producer_epoch=0x7A7A, committed=True
                ),
                5,
            )
        )
        self.end_epoch_at = self.end.index(struct.pack(">qh", producer_id, 0x7A7A)) + 8

    async def transaction(self) -> float:
        """Runs one transaction. Returns the seconds that EndTxn took."""
        producer_id, epoch = self.identity
        for at, size in self.places:
            struct.pack_into(">h", self.produce, at + HEADER_BYTES - 10, epoch)
            struct.pack_into(">I", self.produce, at + 17, crc32c(bytes(self.produce[at + 21 : at + size])))
        frame = bytes(self.produce)
        while True:
            answer = decode_response(await self.connection.send(frame), PRODUCE, 12)[1]
            errors = {one.error_code for one in answer.responses[0].partition_responses}
            if errors == {0}:
                break
            # clients retry NOT_ENOUGH_REPLICAS too: the previous transaction's marker may have been
            # written while this one was verified
            if errors - {0, NOT_ENOUGH_REPLICAS, *NOT_READY_ERRORS}:
                raise SystemExit(f"Produce returned errors {errors}")
        struct.pack_into(">h", self.end, self.end_epoch_at, epoch)
        began = time.monotonic()
        answer = decode_response(await self.connection.send(bytes(self.end)), END_TXN, 5)[1]
        if answer.error_code:
            raise SystemExit(f"EndTxn returned error {answer.error_code}")
        taken = time.monotonic() - began
        self.adopt(answer.producer_id, answer.producer_epoch)
        return taken


async def transactions(port: int, topic: str, producers: int, rate: int, seconds: float, warm: float = 1.0) -> dict:
    """`rate`: transactions a second of all producers together. A transaction that is due while its
    producer is busy begins late; `late_p99_ms` is the p99 of that delay.
    """
    all_of_them = [
        TransactionalProducer(await Connection.dial(port), f"load-{time.time_ns()}-{number}", topic)
        for number in range(producers)
    ]
    await asyncio.gather(*(one.begin() for one in all_of_them))
    commits: list[float] = []
    whole: list[float] = []
    late: list[float] = []
    began = 0.0

    async def run(number: int, one: TransactionalProducer) -> None:
        turn = 0
        while True:
            due = began + (number + turn * producers) / rate
            turn += 1
            if due >= began + warm + seconds:
                return
            if (left := due - time.monotonic()) > 0:
                await asyncio.sleep(left)
            start = time.monotonic()
            commit = await one.transaction()
            if due >= began + warm:
                commits.append(commit)
                late.append(start - due)
                whole.append(time.monotonic() - due)

    await asyncio.gather(*(one.transaction() for one in all_of_them))
    print("ready", flush=True)
    began = time.monotonic()
    await asyncio.gather(*(run(number, one) for number, one in enumerate(all_of_them)))
    taken = time.monotonic() - began
    return {
        "count": len(commits),
        "all_count": int(rate * (warm + seconds)),
        "seconds": taken,
        "rate": rate * (warm + seconds) / taken,
        **percentiles(commits),
        "whole_p99_ms": percentiles(whole)["p99_ms"],
        "late_p99_ms": percentiles(late)["p99_ms"],
    }


WAYS = {"members": members, "heartbeats": heartbeats, "transactions": transactions}


def main() -> int:
    words = dict(word.split("=", 1) for word in sys.argv[2:])
    print(
        json.dumps(
            asyncio.run(
                WAYS[sys.argv[1]](**{name: value if name == "topic" else int(value) for name, value in words.items()})
            )
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
