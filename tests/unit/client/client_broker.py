"""A broker for clients under test, in this process: it handles frames that a native client would
carry through shared memory.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

from mqd.client import requests
from mqd.protocol.api import decode_request, encode_response
from mqd.protocol.headers import SUPPORTED
from mqd.protocol.messages import ApiVersionsResponse, MetadataResponse


class FakeBroker:
    """`answers[api_key](request) -> response, or None for never`. `attach()` is an opener; `kill()`
    ends all attachments, like a dead worker.
    """

    def __init__(self, topics: dict[str, int] | None = None, transaction_version: int = 2) -> None:
        self.topics = dict(topics or {})
        self.transaction_version = transaction_version
        self.answers: dict[int, Callable[[Any], Any]] = {
            requests.API_VERSIONS: self._api_versions,
            requests.METADATA: self._metadata,
        }
        self.seen: list[tuple[int, Any]] = []
        self.refuse: OSError | None = None
        self.clients: list[FakeNative] = []

    def attach(self) -> FakeNative:
        if self.refuse is not None:
            raise self.refuse
        self.clients.append(FakeNative(self))
        return self.clients[-1]

    def kill(self) -> None:
        for client in self.clients:
            client.dead = True
            client.wake()

    def answer(self, frame: bytes) -> bytes | None:
        header, request = decode_request(frame)
        self.seen.append((header.api_key, request))
        response = self.answers[header.api_key](request)
        return None if response is None else encode_response(header, response)

    def _api_versions(self, _request: Any) -> ApiVersionsResponse:
        keys = [
            ApiVersionsResponse.ApiVersion(api_key=spec.key, min_version=spec.min_version, max_version=spec.max_version)
            for spec in SUPPORTED.values()
        ]
        feature = ApiVersionsResponse.FinalizedFeature(
            name="transaction.version", max_version_level=self.transaction_version, min_version_level=0
        )
        return ApiVersionsResponse(api_keys=keys, finalized_features=[feature])

    def _metadata(self, request: Any) -> MetadataResponse:
        names = sorted(self.topics) if request.topics is None else [topic.name for topic in request.topics]
        return MetadataResponse(
            brokers=[MetadataResponse.Broker(node_id=1, host="127.0.0.1", port=9092)],
            cluster_id="fake",
            controller_id=1,
            topics=[self._topic(name) for name in names],
        )

    def _topic(self, name: str) -> MetadataResponse.Topic:
        if name not in self.topics:
            return MetadataResponse.Topic(error_code=3, name=name)
        partitions = [
            MetadataResponse.Partition(
                partition_index=index, leader_id=1, leader_epoch=0, replica_nodes=[1], isr_nodes=[1]
            )
            for index in range(self.topics[name])
        ]
        return MetadataResponse.Topic(name=name, topic_id=name.encode().ljust(16, b"\1")[:16], partitions=partitions)


class FakeNative:
    """The native client's interface that mqd.client.shm.attachment uses. Responses arrive at the
    next poll.
    """

    worker = 0

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self.dead = False
        self.closed = False
        self.room = True
        self._responses: list[bytes] = []
        self._ready: list[bytes] = []
        self._event = threading.Event()

    def _check(self) -> None:
        assert not self.closed, "used after it was closed"
        if self.dead:
            raise BrokenPipeError(errno.EPIPE, "the worker has ended")

    def submit(self, frame: bytes) -> bool:
        self._check()
        if not self.room:
            return False
        response = self.broker.answer(frame)
        if response is not None:
            self._responses.append(response)
            self._event.set()
        return True

    def flush(self) -> None:
        self._check()

    def poll(self) -> None:
        self._check()
        self._ready += self._responses
        self._responses = []

    def next_response(self) -> bytes | None:
        return self._ready.pop(0) if self._ready else None

    def wait(self, timeout_us: int) -> int:
        came = self._event.wait(timeout_us / 1e6)
        self._event.clear()
        return int(came)

    def wake(self) -> None:
        self._event.set()

    def close(self) -> None:
        self.closed = True
