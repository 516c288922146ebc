"""CRC-32C (Castagnoli) as Kafka uses it: computed by the native core if the extension can be
imported, otherwise by numpy in lanes.

The fallback cuts the bytes into equal lanes, walks all lanes together (one table lookup per step
for all of them) and joins the results: a CRC is linear, so the checksum of lane A followed by lane
B is A's checksum, advanced by as many zero bytes as B has, xor B's. Source: RFC 3720 appendix B.4;
zlib's crc32_combine for advancing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

_POLYNOMIAL = 0x82F63B78
_LANES_BYTES_MIN = 2048  # for less data a plain loop is as fast


def _byte_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _byte_table()


def _step_bytes(register: int, data: bytes | memoryview) -> int:
    """The shift register after more bytes, without the inversions of CRC-32C."""
    table = _TABLE
    for byte in data:
        register = table[(register ^ byte) & 0xFF] ^ register >> 8
    return register


@functools.lru_cache(maxsize=64)
def _zero_bytes_tables(count: int) -> tuple[list[int], ...]:
    """Returns four tables that advance a register by `count` zero bytes: look up each byte of the
    register in its table, and xor the four results.
    """
    # `power` begins as the matrix that advances by one zero byte, and is squared for each bit of
    # count; `result` is the product of the powers whose bits are set
    power, result = [_step_bytes(1 << bit, b"\0") for bit in range(32)], [1 << bit for bit in range(32)]
    while count:
        if count & 1:
            result = [_multiply(power, column) for column in result]
        power = [_multiply(power, column) for column in power]
        count >>= 1
    return tuple([_multiply(result, value << shift) for value in range(256)] for shift in (0, 8, 16, 24))


def _multiply(columns: list[int], vector: int) -> int:
    """Multiplies a matrix of bits by a vector of bits."""
    product, bit = 0, 0
    while vector:
        if vector & 1:
            product ^= columns[bit]
        vector >>= 1
        bit += 1
    return product


def _step_lanes(register: int, data: memoryview) -> int:
    import numpy

    lane_count = min(1024, max(8, int(len(data) ** 0.5) // 8 * 8))
    lane_bytes = len(data) // lane_count
    table = numpy.array(_TABLE, dtype=numpy.uint32)
    columns = (
        numpy.frombuffer(data[: lane_count * lane_bytes], dtype=numpy.uint8)
        .reshape(lane_count, lane_bytes)
        .T.astype(numpy.uint32)
    )
    registers = numpy.zeros(lane_count, dtype=numpy.uint32)
    registers[0] = register
    for column in columns:
        registers = table[(registers ^ column) & 0xFF] ^ registers >> 8
    first, second, third, fourth = _zero_bytes_tables(lane_bytes)
    joined = 0
    for lane in registers.tolist():
        joined = (
            first[joined & 255] ^ second[joined >> 8 & 255] ^ third[joined >> 16 & 255] ^ fourth[joined >> 24] ^ lane
        )
    return _step_bytes(joined, data[lane_count * lane_bytes :])


def crc32c_fallback(data: bytes | bytearray | memoryview, crc: int = 0) -> int:
    """CRC-32C of `data`, continuing from the checksum `crc` of the bytes before."""
    view = memoryview(data).cast("B")
    register = crc ^ 0xFFFFFFFF
    register = _step_lanes(register, view) if len(view) >= _LANES_BYTES_MIN else _step_bytes(register, view)
    return register ^ 0xFFFFFFFF


@functools.cache
def _fastest_implementation() -> Callable[..., int]:
    try:
        from mqd.native import crc32c as native
    except ImportError:  # the extension is not built: tools still read batches
        return crc32c_fallback
    return native


def crc32c(data: bytes | bytearray | memoryview, crc: int = 0) -> int:
    """CRC-32C of `data`, continuing from the checksum `crc` of the bytes before."""
    return _fastest_implementation()(data, crc)
