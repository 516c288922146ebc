"""Kafka's compression codecs, in the formats that Kafka uses, with a bound on the decompressed
size.

    code 1 gzip     RFC 1952 members
    code 2 snappy   xerial's stream: 16-byte header (0x82 "SNAPPY" 0, version, lowest compatible
                    version), then blocks of an int32 size and raw snappy. A bare raw snappy block
                    is read too: some clients write it
    code 3 lz4      LZ4 frames with independent blocks: Java's reader refuses linked ones (KIP-57)
    code 4 zstd     Zstandard frames (KIP-110)

The output goes into a mapping as large as the bound: a decompression bomb takes only the memory of
the pages that it fills. Codecs: cramjam, imported when first used.
"""

from __future__ import annotations

import mmap
import struct

from mqd.protocol.errors import ProtocolError

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
DECOMPRESSED_BYTES_MAX = 128 << 20

_XERIAL_MAGIC = b"\x82SNAPPY\0"
_XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK_BYTES = 32 << 10
# the maximum expansion of one compressed byte, by format, so that short input gets a smaller buffer
# (zstd has no such bound)
_RATIO_MAX = {GZIP: 1032, LZ4: 255}


def codec_number(compression: int | str) -> int:
    """Raises ValueError for an unknown codec."""
    number = CODECS.index(compression) if compression in CODECS else compression
    if not isinstance(number, int) or not 0 <= number < len(CODECS):
        raise ValueError(f"unknown compression {compression!r}; use one of {', '.join(CODECS)}")
    return number


def compress(compression: int | str, data: bytes, level: int | None = None) -> bytes:
    """`level`: the codec's own compression level (KIP-390); snappy ignores it."""
    number = codec_number(compression)
    if number == NONE:
        return bytes(data)
    import cramjam

    if number == GZIP:
        return bytes(cramjam.gzip.compress(data, level))
    if number == SNAPPY:
        return _compress_xerial(data)
    if number == LZ4:
        compressor = cramjam.lz4.Compressor(
            level=level if level is not None else 0, content_checksum=False, block_linked=False
        )
        compressor.compress(data)
        return bytes(compressor.finish())
    return bytes(cramjam.zstd.compress(data, level))


def _compress_xerial(data: bytes) -> bytes:
    import cramjam

    blocks, view = [_XERIAL_HEADER], memoryview(data)
    for start in range(0, len(view), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(view[start : start + _XERIAL_BLOCK_BYTES]))
        blocks += (struct.pack(">i", len(block)), block)
    return b"".join(blocks)


def decompress(compression: int, data: bytes | memoryview, size_max: int = DECOMPRESSED_BYTES_MAX) -> bytes:
    """Raises ProtocolError when the data has another format, or decompresses to more than
    `size_max` bytes.
    """
    if compression == NONE:
        if len(data) > size_max:
            raise _too_large(compression, size_max)
        return bytes(data)
    if compression not in range(len(CODECS)):
        raise ProtocolError(f"compression type {compression} does not exist", "record batch", "attributes")
    if compression == SNAPPY:
        return _decompress_snappy(bytes(data), size_max)
    import cramjam

    module = {GZIP: cramjam.gzip, LZ4: cramjam.lz4, ZSTD: cramjam.zstd}[compression]
    output_bytes_max = min(size_max, len(data) * _RATIO_MAX.get(compression, size_max) + 4096)
    with mmap.mmap(-1, output_bytes_max + 1) as buffer:  # one byte more tells "exactly the bound" from "beyond it"
        try:
            size = module.decompress_into(data, buffer)
        except cramjam.DecompressionError as error:
            if "write whole buffer" in str(error):
                raise _too_large(compression, size_max) from None
            raise _damaged(compression, str(error)) from None
        if size > output_bytes_max:
            raise _too_large(compression, size_max)
        return buffer[:size]


def _decompress_snappy(data: bytes, size_max: int) -> bytes:
    if not data.startswith(_XERIAL_MAGIC):
        return _decompress_snappy_block(data, size_max, size_max)
    blocks, position, size = [], len(_XERIAL_HEADER), 0
    while position < len(data):
        if position + 4 > len(data):
            raise _damaged(SNAPPY, "a block's size is cut off")
        (block_bytes,) = struct.unpack_from(">i", data, position)
        position += 4
        if not 0 < block_bytes <= len(data) - position:
            raise _damaged(SNAPPY, f"a block of {block_bytes} bytes where {len(data) - position} remain")
        block_data = _decompress_snappy_block(data[position : position + block_bytes], size_max - size, size_max)
        blocks.append(block_data)
        size += len(block_data)
        position += block_bytes
    return b"".join(blocks)


def _decompress_snappy_block(block: bytes, output_bytes_max: int, size_max: int) -> bytes:
    import cramjam

    try:
        size = cramjam.snappy.decompress_raw_len(block)
        if size > output_bytes_max:
            raise _too_large(SNAPPY, size_max)
        # two or three bytes of input encode a copy of at most 64 bytes: a valid block claims no
        # more than this, and a larger claim must not be allocated
        if size > 64 * len(block) + 64:
            raise _damaged(SNAPPY, f"{len(block)} bytes claim to expand to {size}")
        return bytes(cramjam.snappy.decompress_raw(block))
    except cramjam.DecompressionError as error:
        raise _damaged(SNAPPY, str(error)) from None


def _too_large(compression: int, size_max: int) -> ProtocolError:
    return ProtocolError(
        f"{CODECS[compression]} data expands to more than {size_max} bytes: read it with a higher limit if it is valid",
        "record batch",
        "records",
    )


def _damaged(compression: int, problem: str) -> ProtocolError:
    return ProtocolError(f"damaged {CODECS[compression]} data: {problem}", "record batch", "records")
