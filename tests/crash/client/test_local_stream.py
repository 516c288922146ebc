"""10 GB through shared memory by four concurrent producers and consumers: every byte correct,
memory constant.

The format and its check: `local_stream.py`. Retention bounds the disk usage. A small stream runs
first.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mqd.client.record_batch import Blobs
from tests.crash.client.holdings import pss_bytes
from tests.crash.client.local_stream import CHUNK_RECORDS, WrongByte, check, chunks_of, pattern, words_of
from tests.crash.workload import create_topics
from tests.interaction.traffic import allocated_bytes

ROOT = Path(__file__).resolve().parents[3]
PAIRS = 4
GIB = 1 << 30
DISK_BYTES_MAX = 6 * GIB
STREAM_SECONDS = 1200.0
TOPIC = {"flush.on.ack": "false", "retention.bytes": str(512 << 20), "segment.bytes": str(64 << 20)}
# From the stream's second quarter, when all memory has been touched, to its end.
GROWTH_BYTES_MAX = {"broker": 32 << 20, "client": 16 << 20}


def start(what: str, directory: Path, settings: dict) -> subprocess.Popen:
    output = open(directory / f"{what}-{settings['partition']}.out", "w+")
    return subprocess.Popen(
        [sys.executable, "-m", "tests.crash.client.local_stream", what, json.dumps(settings)],
        cwd=ROOT,
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def report(directory: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(directory.glob("*.out")))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("stream_bytes", [64 << 20, 10 * GIB])
def test_every_byte_of_a_long_stream(start_broker, tmp_path, stream_bytes):
    broker = start_broker(config={"log.retention.check.interval.ms": "500"})
    create_topics(broker.bootstrap, {"stream": PAIRS}, {"stream": TOPIC})
    progress = tmp_path / "progress"
    progress.write_bytes(bytes(16 * PAIRS))
    clients: dict[str, subprocess.Popen] = {}
    # seconds, bytes consumed, PSS of each process, bytes on disk
    samples: list[tuple[float, int, dict[str, int], int]] = []
    began = time.monotonic()
    try:
        for partition in range(PAIRS):
            settings = {
                "bootstrap": broker.bootstrap,
                "topic": "stream",
                "partition": partition,
                "bytes": stream_bytes // PAIRS,
                "progress": str(progress),
                "idempotent": partition % 2 == 0,
            }
            for what in ("consume", "produce"):
                clients[f"{what}-{partition}"] = start(what, tmp_path, settings)
        brokers = {process["name"]: process["pid"] for process in broker.running()}
        while any(client.poll() is None for client in clients.values()):
            assert time.monotonic() < began + STREAM_SECONDS, (
                f"not done within {STREAM_SECONDS:.0f} s\n{report(tmp_path)}\n{broker.logs()}"
            )
            assert not any(client.poll() for client in clients.values()), f"{report(tmp_path)}\n{broker.logs()}"
            consumed = int(np.fromfile(progress, np.uint64)[1::2].sum())
            pss = {name: pss_bytes(pid) for name, pid in brokers.items()}
            pss.update({name: pss_of_living(client) for name, client in clients.items()})
            samples.append((time.monotonic() - began, consumed, pss, allocated_bytes(broker.data_dir)))
            time.sleep(0.25)  # between samples
    finally:
        for client in clients.values():
            if client.poll() is None:
                client.kill()
                client.wait()
    assert not any(client.returncode for client in clients.values()), f"{report(tmp_path)}\n{broker.logs()}"
    check_outcomes(tmp_path, stream_bytes)
    print_figures(samples, stream_bytes, report(tmp_path))
    assert max(disk for *_, disk in samples) < DISK_BYTES_MAX
    if stream_bytes >= GIB:
        check_that_memory_is_flat(samples)


def pss_of_living(client: subprocess.Popen) -> int:
    try:
        return pss_bytes(client.pid) if client.poll() is None else 0
    except (FileNotFoundError, ProcessLookupError):
        return 0


def check_outcomes(directory: Path, stream_bytes: int) -> None:
    outcomes = {path.stem: json.loads(path.read_text().splitlines()[-1]) for path in directory.glob("*.out")}
    assert len(outcomes) == 2 * PAIRS and all(one["transport"] == "shm" for one in outcomes.values()), outcomes
    for what in ("produce", "consume"):
        parts = [one for name, one in outcomes.items() if name.startswith(what)]
        assert sum(one["bytes"] for one in parts) >= stream_bytes
        assert all(one["records"] == chunks_of(stream_bytes // PAIRS) * CHUNK_RECORDS for one in parts), outcomes


def check_that_memory_is_flat(samples: list[tuple[float, int, dict[str, int], int]]) -> None:
    """The maximum of a process in the second half is that of the second quarter."""
    whole = samples[-1][1]
    early = [pss for _, consumed, pss, _ in samples if whole / 4 <= consumed < whole / 2]
    late = [pss for _, consumed, pss, _ in samples if consumed >= whole / 2]
    for name in late[0]:
        kind = "client" if name.startswith(("produce", "consume")) else "broker"
        before, after = max(pss[name] for pss in early), max(pss[name] for pss in late)
        assert after <= before + GROWTH_BYTES_MAX[kind], (
            f"{name}: {before >> 20} MiB of PSS in the second quarter, {after >> 20} in the second half"
        )


def print_figures(samples: list[tuple[float, int, dict[str, int], int]], stream_bytes: int, outputs: str) -> None:
    seconds = samples[-1][0]
    print(
        f"\n{stream_bytes / GIB:.2f} GiB in {seconds:.1f} s: {stream_bytes / seconds / 1e6:.0f} MB/s in and as much"
        f" out; disk at most {max(one[3] for one in samples) >> 20} MiB"
    )
    for share in (0.1, 0.25, 0.5, 0.75, 0.95):
        at, consumed, pss, disk = next(one for one in samples if one[1] >= share * samples[-1][1])
        clients = sum(value for name, value in pss.items() if name.startswith(("produce", "consume")))
        workers = sum(value for name, value in pss.items() if "worker" in name)
        rest = sum(pss.values()) - clients - workers
        print(
            f"  {at:6.1f} s {consumed / GIB:6.2f} GiB: PSS of workers {workers >> 20}, the broker's other processes"
            f" {rest >> 20}, clients {clients >> 20} MiB; disk {disk >> 20} MiB"
        )
    print(outputs)


# -- the check itself ------------------------------------------------------------------------------


def made(first: int, count: int, partition: int = 1) -> tuple[np.ndarray, list[bytes]]:
    values = [
        pattern(partition, number, 1, words_of(number // CHUNK_RECORDS)).tobytes()
        for number in range(first, first + count)
    ]
    return np.arange(first, first + count), values


def test_the_check_finds_one_wrong_bit_anywhere():
    first, count = CHUNK_RECORDS - 3, 7  # of two chunks
    offsets, values = made(first, count)
    assert check(1, offsets, Blobs.of_list(values), first) == sum(map(len, values))
    for index in range(count):
        for place in (0, len(values[index]) // 2, len(values[index]) - 1):
            spoiled = bytearray(values[index])
            spoiled[place] ^= 4
            with pytest.raises(WrongByte, match=f"offset {first + index} "):
                check(1, offsets, Blobs.of_list([*values[:index], bytes(spoiled), *values[index + 1 :]]), first)
    for wrong_values in (values[1:] + values[:1], [values[0][:-8], *values[1:]]):
        with pytest.raises(WrongByte):
            check(1, offsets, Blobs.of_list(wrong_values), first)
    with pytest.raises(WrongByte):
        check(2, offsets, Blobs.of_list(values), first)  # another partition's
    with pytest.raises(WrongByte):
        check(1, offsets, Blobs.of_list(values), first + 1)  # one was omitted
