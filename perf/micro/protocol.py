"""The cost of the Python codec: microseconds per message, milliseconds to compile one, microseconds
per record.

    python perf/micro/protocol.py            a table (best of 5 rounds; one core; nothing else
                                             should run)
    python perf/micro/protocol.py --json     one JSON object, for perf/history.jsonl
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from mqd.protocol import SUPPORTED, codec, decode_request, encode_request
from mqd.protocol.messages import (
    CreateTopicsRequest,
    IncrementalAlterConfigsRequest,
    ListOffsetsRequest,
    MetadataRequest,
    MetadataResponse,
    message_class,
)
from mqd.protocol.records import Record, decode_batch, encode_batch

ROUNDS = 5


def best_us(work: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(repeats):
            work()
        best = min(best, (time.perf_counter() - begun) / repeats)
    return round(best * 1e6, 2)


def requests() -> dict[str, tuple[object, int]]:
    topics = [f"topic-number-{number}" for number in range(10)]
    offsets = [ListOffsetsRequest.Partition(partition_index=number, timestamp=-1) for number in range(10)]
    configs = [IncrementalAlterConfigsRequest.Config(name="retention.ms", value="1000") for _ in range(3)]
    return {
        "Metadata v12, 3 topics": (
            MetadataRequest(topics=[MetadataRequest.Topic(name=name) for name in topics[:3]]),
            12,
        ),
        "Metadata v4, 3 topics": (MetadataRequest(topics=[MetadataRequest.Topic(name=name) for name in topics[:3]]), 4),
        "ListOffsets v7, 10 partitions": (
            ListOffsetsRequest(topics=[ListOffsetsRequest.Topic(name="topic", partitions=offsets)]),
            7,
        ),
        "CreateTopics v7, 10 topics": (
            CreateTopicsRequest(topics=[CreateTopicsRequest.Topic(name=name) for name in topics]),
            7,
        ),
        "IncrementalAlterConfigs v1, 3 configs": (
            IncrementalAlterConfigsRequest(
                resources=[
                    IncrementalAlterConfigsRequest.Resource(resource_type=2, resource_name="topic", configs=configs)
                ]
            ),
            1,
        ),
    }


def metadata_response() -> MetadataResponse:
    partition = MetadataResponse.Partition
    partitions = [
        partition(partition_index=number, leader_id=1, leader_epoch=3, replica_nodes=[1, 2, 3], isr_nodes=[1, 2, 3])
        for number in range(100)
    ]
    brokers = [MetadataResponse.Broker(node_id=number, host="localhost", port=9092) for number in range(3)]
    return MetadataResponse(
        cluster_id="x" * 22, brokers=brokers, topics=[MetadataResponse.Topic(name="topic", partitions=partitions)]
    )


def compile_ms() -> tuple[float, float]:
    """(mean, worst) of compiling encoder and decoder of every message and version."""
    spent = []
    for spec in SUPPORTED.values():
        for kind in ("Request", "Response"):
            cls = message_class(spec.key, kind)
            for version in range(spec.min_version, spec.max_version + 1):
                begun = time.perf_counter()
                codec._compile_encoder(cls, version)
                codec._compile_decoder(cls, version)
                spent.append(time.perf_counter() - begun)
    return round(sum(spent) / len(spent) * 1e3, 2), round(max(spent) * 1e3, 2)


def measure() -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, (request, version) in requests().items():
        frame = encode_request(request, version, 1)
        figures[f"parse {name} ({len(frame)} bytes), us"] = best_us(lambda frame=frame: decode_request(frame), 2000)
    response = metadata_response()
    data = codec.encode(response, 12)
    figures["build Metadata response v12, 100 partitions, us"] = best_us(metadata_response, 100)
    figures[f"write Metadata response v12, 100 partitions ({len(data)} bytes), us"] = best_us(
        lambda: codec.encode(response, 12), 200
    )
    figures["read Metadata response v12, 100 partitions, us"] = best_us(
        lambda: codec.decode(MetadataResponse, 12, data), 200
    )
    (
        figures["compile one message and version, both ways, mean ms"],
        figures["compile one message and version, both ways, worst ms"],
    ) = compile_ms()
    records = [
        Record(value=b"v" * 100, key=b"key-%d" % number, timestamp_ms=1_700_000_000_000 + number)
        for number in range(1000)
    ]
    for compression in ("none", "lz4", "zstd"):
        batch = encode_batch(records, compression=compression)
        figures[f"write a record, {compression}, us"] = round(
            best_us(lambda kind=compression: encode_batch(records, compression=kind), 5) / 1000, 3
        )
        figures[f"read a record, {compression}, us"] = round(
            best_us(lambda batch=batch: list(decode_batch(batch)), 5) / 1000, 3
        )
    return figures


if __name__ == "__main__":
    measured = measure()
    if "--json" in sys.argv[1:]:
        print(json.dumps(measured))
    else:
        for title, figure in measured.items():
            print(f"{figure:10.2f}  {title}")
