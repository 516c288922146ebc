"""Segment files for tests of the log: batches encoded as by a producer, written with indexes as by
the broker. No native extension needed.
"""

from pathlib import Path
from struct import pack

from mqd.protocol.records import HEADER


class PlainFiles:
    """mqd.log.files.Files with plain calls; `changes`: the changes in order; `fail_on`: changes
    that fail.
    """

    def __init__(self) -> None:
        self.changes: list[tuple[str, str]] = []
        self.fail_on: set[tuple[str, str]] = set()

    def _note(self, kind: str, path: Path) -> None:
        if (kind, path.name) in self.fail_on:
            raise OSError(5, "Input/output error", str(path))
        self.changes.append((kind, path.name))

    def replace(self, path: Path, data: bytes) -> None:
        self._note("replace", path)
        path.write_bytes(data)

    def unlink(self, path: Path) -> None:
        self._note("unlink", path)
        path.unlink()

    def rename(self, source: Path, target: Path) -> None:
        self._note("rename", source)
        source.rename(target)

    def make_directory(self, path: Path) -> None:
        self._note("mkdir", path)
        path.mkdir()

    def sync_directory(self, path: Path) -> None:
        self._note("sync", path)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def varint(value: int) -> bytes:
    value = value << 1 ^ value >> 63
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


def encode_record(
    offset_delta: int,
    timestamp_delta: int,
    key: bytes | None,
    value: bytes | None,
    headers: list[tuple[str, bytes | None]] | None = None,
) -> bytes:
    headers = headers or []
    body = b"\0" + varint(timestamp_delta) + varint(offset_delta) + field(key) + field(value) + varint(len(headers))
    for name, content in headers:
        body += field(name.encode()) + field(content)
    return varint(len(body)) + body


def compressed(codec: int, data: bytes) -> bytes:
    import cramjam

    if codec == 2:
        return bytes(cramjam.snappy.compress_raw(data))
    return bytes({1: cramjam.gzip, 3: cramjam.lz4, 4: cramjam.zstd}[codec].compress(data))


def encode_batch(
    base_offset: int,
    timestamps: list[int],
    codec: int = 0,
    leader_epoch: int = 0,
    log_append_time: bool = False,
    payload: bytes | None = None,
) -> bytes:
    """One record per timestamp; `payload` replaces the (compressed) records."""
    base = timestamps[0]
    records = b"".join(encode_record(i, t - base, b"k%d" % i, b"value %d" % i) for i, t in enumerate(timestamps))
    body = payload if payload is not None else compressed(codec, records) if codec else records
    attributes = codec | (8 if log_append_time else 0)
    count = len(timestamps)
    after_crc = pack(">hiqqqhii", attributes, count - 1, base, max(timestamps), -1, -1, -1, count) + body
    header = HEADER.pack(
        base_offset,
        49 + len(body),
        leader_epoch,
        2,
        crc32c(after_crc),
        attributes,
        count - 1,
        base,
        max(timestamps),
        -1,
        -1,
        -1,
        count,
    )
    return header + body


def write_segment(
    directory: Path, base_offset: int, batches: list[bytes], index_every: int = 2, seal: bool = True
) -> Path:
    """Writes .log, .index and .timeindex; an index entry before every `index_every`-th batch, the
    newest timestamp at the end when sealed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{base_offset:020d}.log"
    index, times, position, newest, newest_offset, last_entry = b"", b"", 0, -1, 0, -1
    for number, batch in enumerate(batches):
        fields = HEADER.unpack_from(batch)
        if fields[8] > newest:
            newest, newest_offset = fields[8], fields[0] + fields[6]
        if number and number % index_every == 0:
            index += pack(">ii", fields[0] - base_offset, position)
            if newest > last_entry:
                times += pack(">qi", newest, newest_offset - base_offset)
                last_entry = newest
        position += len(batch)
    if seal and newest > last_entry:
        times += pack(">qi", newest, newest_offset - base_offset)
    path.write_bytes(b"".join(batches))
    path.with_suffix(".index").write_bytes(index)
    path.with_suffix(".timeindex").write_bytes(times)
    return path
