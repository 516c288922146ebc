"""Workers' checks before they write: records without keys, in every compression; transactions, with
a coordinator played by the test; the transport over the link.
"""

import asyncio
import struct
from pathlib import Path

import cramjam
import pytest

from mqd import native
from mqd.acceptor.checks import CheckResult, Checks, check_records
from mqd.native import Descriptor, DescriptorKind
from mqd.protocol.compression import LZ4, decompress
from mqd.protocol.errors import ErrorCode
from mqd.protocol.records import HEADER_BYTES, Record, encode_batch
from tests.unit.acceptor.handler_broker import HandlerBroker
from tests.unit.acceptor.test_handler_link import ACCEPTOR, Wire, run

CODECS = ("gzip", "snappy", "lz4", "zstd")


def batch(keys: list[bytes | None], compression: str) -> bytes:
    return encode_batch(
        [Record(b"value %d" % i, key, headers=[("h", None)]) for i, key in enumerate(keys)], compression=compression
    )


def refusal(response: CheckResult) -> tuple[int, list[int], str]:
    unkeyed, index_count, message_bytes = struct.unpack_from("=IHH", response.payload)
    indexes = list(struct.unpack_from(f"={index_count}i", response.payload, 8))
    assert len(response.payload) == 8 + 4 * index_count + message_bytes
    return unkeyed, indexes, response.payload[8 + 4 * index_count :].decode()


@pytest.mark.parametrize("codec", CODECS)
def test_records_need_keys(codec: str) -> None:
    assert check_records(batch([b"a", b"", b"c"], codec)) == CheckResult(0)  # an empty key is a key
    error, payload = check_records(memoryview(batch([b"a", None, b"c", None], codec)))
    assert (error, refusal(CheckResult(error, payload))) == (ErrorCode.INVALID_RECORD, (2, [1, 3], ""))
    unkeyed, indexes, _ = refusal(check_records(batch([None] * 1000, codec)))
    assert unkeyed == 1000 and indexes == list(range(native.RECORD_ERROR_COUNT_MAX))


@pytest.mark.parametrize("codec", CODECS)
def test_damaged_batches_are_refused_for_good(codec: str) -> None:
    whole = batch([b"key"] * 50, codec)
    for damaged in (
        whole[:HEADER_BYTES] + b"\xff" * (len(whole) - HEADER_BYTES),
        whole[:57] + struct.pack(">i", 51) + whole[61:],  # one record more than there are
        whole[:57] + struct.pack(">i", 49) + whole[61:],
        whole[:57] + struct.pack(">i", 0x7FFFFFFF) + whole[61:],
        whole[:HEADER_BYTES],
    ):
        error, payload = check_records(damaged)
        unkeyed, indexes, message = refusal(CheckResult(error, payload))
        assert error == ErrorCode.INVALID_RECORD and not unkeyed and not indexes and message


def test_a_decompression_bomb_is_refused() -> None:
    bomb = encode_batch([Record(bytes(200 << 20), b"key")], compression="zstd")
    assert len(bomb) < 100_000
    error, payload = check_records(bomb)
    assert error == ErrorCode.INVALID_RECORD and "bytes" in refusal(CheckResult(error, payload))[2]


def test_plain_records_natively() -> None:
    plain = batch([b"a", None], "none")[HEADER_BYTES:]
    assert native.validate_records(plain, 2, 64) == (1, [1])
    assert native.validate_records(b"", 0, 64) == (0, [])
    for wrong, count in ((plain, 1), (plain, 3), (plain[:-1], 2), (plain + b"\0", 2)):
        with pytest.raises(ValueError, match="record"):
            native.validate_records(wrong, count, 64)


class Coordinator:
    """Returns the prepared responses one after the other, the last one forever."""

    def __init__(self, *responses: list[int] | int) -> None:
        self.answers, self.requested = list(responses), 0

    async def check(self, payload: bytes) -> list[int] | int:
        self.requested += 1
        return self.answers[min(self.requested, len(self.answers)) - 1]


CONCURRENT = int(ErrorCode.CONCURRENT_TRANSACTIONS)


def request_all(coordinator: Coordinator, version: int) -> CheckResult:
    return asyncio.run(Checks(coordinator).check_transaction(b"", version))


def test_the_end_of_the_last_transaction_is_waited_for() -> None:
    coordinator = Coordinator(CONCURRENT, [CONCURRENT], [0])
    assert request_all(coordinator, 12) == CheckResult(0, struct.pack("=h", 0))
    assert coordinator.requested == 3
    coordinator = Coordinator(CONCURRENT)
    assert request_all(coordinator, 12) == CheckResult(CONCURRENT)  # but not for long
    assert 1 < coordinator.requested <= 6
    coordinator = Coordinator([19, CONCURRENT])
    assert request_all(coordinator, 11) == CheckResult(0, struct.pack("=2h", 19, CONCURRENT))
    assert coordinator.requested == 1


def test_without_a_coordinator_no_transaction_begins() -> None:
    assert asyncio.run(Checks().check_transaction(b"", 12)) == CheckResult(ErrorCode.INVALID_TXN_STATE)


def send_request(
    wire: Wire, payload: bytes, flags: int, token: int = 7, generation: int | None = None, offset: int = 4096
) -> None:
    wire.arenas[1][offset : offset + len(payload)] = payload
    generation = wire.control.endpoint_generation(ACCEPTOR) if generation is None else generation
    descriptor = Descriptor(
        kind=DescriptorKind.CHECK,
        flags=flags,
        token=token,
        offset=offset,
        size_bytes=len(payload),
        error=generation,
        a=12,
        b=1,
    )
    assert wire.ends[1].send(ACCEPTOR, descriptor)
    wire.ends[1].flush()


def test_checks_over_the_link(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker, wire: Wire) -> None:
        wire.link.checks = Checks(Coordinator([0, 48]))
        send_request(wire, b"payload", native.CHECK_TRANSACTION)
        (response,) = await wire.receive(1)
        assert (response.kind, response.token, response.error) == (DescriptorKind.CHECKED, 7, 0)
        assert wire.payload(response) == struct.pack("=2h", 0, 48)
        wire.release(1, response)
        await wire.until(lambda: wire.link.arena_extents[0] == 0)
        send_request(wire, batch([b"k"], "zstd"), native.CHECK_RECORDS, 8)
        send_request(wire, batch([None], "lz4"), native.CHECK_RECORDS, 9, offset=8192)
        responses = {response.token: response for response in await wire.receive(1, 2)}
        assert (responses[8].error, responses[8].size_bytes) == (0, 0)
        assert responses[9].error == ErrorCode.INVALID_RECORD
        assert refusal(CheckResult(0, wire.payload(responses[9]))) == (1, [0], "")
        await wire.until(lambda: wire.link.request_count == 0)
        wire.link.checks.close()

    run(tmp_path, scenario)


def test_checks_that_cannot_be_served(tmp_path: Path) -> None:
    class Broken:
        async def check(self, payload: bytes) -> list[int] | int:
            raise RuntimeError("broken")

    async def scenario(broker: HandlerBroker, wire: Wire) -> None:
        send_request(wire, b"payload", native.CHECK_TRANSACTION)  # there is no acceptor to respond
        assert (await wire.receive(1))[0].error == ErrorCode.NOT_ENOUGH_REPLICAS
        wire.link.checks = Checks(Broken())
        send_request(wire, b"payload", native.CHECK_TRANSACTION)
        assert (await wire.receive(1))[0].error == ErrorCode.NOT_ENOUGH_REPLICAS
        generation = wire.control.endpoint_generation(ACCEPTOR)
        far = Descriptor(
            kind=DescriptorKind.CHECK,
            flags=native.CHECK_RECORDS,
            token=5,
            offset=1 << 40,
            size_bytes=100,
            error=generation,
        )
        assert wire.ends[1].send(ACCEPTOR, far)
        send_request(wire, b"payload", native.CHECK_TRANSACTION, 6, generation + 1)  # for another acceptor
        send_request(wire, b"payload", native.CHECK_TRANSACTION, 8)
        assert [(one.token, one.error) for one in await wire.receive(1, 2)] == [
            (5, ErrorCode.NOT_ENOUGH_REPLICAS),
            (8, ErrorCode.NOT_ENOUGH_REPLICAS),
        ]

    run(tmp_path, scenario)


def test_linked_lz4_blocks_are_refused() -> None:
    """Java's consumers cannot read past them (KIP-57)."""
    whole = bytearray(encode_batch([Record(b"v")] * 3, compression="lz4"))
    assert check_records(bytes(whole), native.CHECK_PARSE).error == 0
    records = decompress(LZ4, memoryview(whole)[HEADER_BYTES:])
    compressor = cramjam.lz4.Compressor(level=0, content_checksum=False, block_linked=True)
    compressor.compress(records)
    linked = bytes(whole[:HEADER_BYTES]) + bytes(compressor.finish())
    response = check_records(linked, native.CHECK_PARSE)
    assert response.error == ErrorCode.INVALID_RECORD and b"depend on each other" in response.payload
