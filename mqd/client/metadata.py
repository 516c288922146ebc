"""A cache of the broker's topic metadata: requested once for many callers, and again when it is old.

1. One request is under way at a time; topics requested meanwhile are in the next one.
2. `version` changes with every response; waiting callers then check again.
Concurrency: with the attachment's lock held, except for find(), which takes it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from confluent_kafka import admin

from mqd.client import requests
from mqd.client.messages import KafkaError, KafkaException, broker_error, local_error
from mqd.client.requests import ClusterInfo, TopicInfo

_RETRY_S = 0.1
_NEVER = float("inf")


class MetadataCache:
    """`topics` by name, also those with an error; `names` by topic id; `cluster`."""

    def __init__(self, attachment: Any, max_age_s: float) -> None:
        self.topics: dict[str, TopicInfo] = {}
        self.names: dict[bytes, str] = {}
        self.cluster = ClusterInfo(None, -1, {})
        self.version = 0
        self.error: KafkaError | None = None  # of the last request; None: it had a response
        self._attachment = attachment
        self._max_age_s = max_age_s
        self._requested: dict[str, bool] = {}  # name -> whether the broker may create it
        self._all_requested = False
        self._is_under_way = False
        self._refresh_at = _NEVER

    # -- requests ----------------------------------------------------------------------------------

    def refresh(self, topics: Iterable[str] | None = (), allow_auto_create: bool = False) -> None:
        """Requests metadata soon, without waiting. `topics`: names; None: all topics; (): the known
        topics. `version` will change.
        """
        if topics is None:
            self._all_requested = True
        else:
            for name in topics or list(self.topics):
                self._requested[name] = self._requested.get(name, False) or allow_auto_create
        self._request()

    def learn(self, response: Any) -> None:
        """Adds the topics of a response to a Metadata request that the caller has sent itself. Raises
        KafkaException if the response is invalid.
        """
        cluster, topics = requests.read_metadata(response)
        self._store([topic.name for topic in topics], cluster, topics)
        self.version += 1
        self._attachment.changed.notify_all()

    def expire(self) -> None:
        """Requests the metadata again, because it may be outdated. The old metadata is used until the
        response arrives.
        """
        if self.topics:
            self.refresh()

    def find(self, name: str, timeout: float, allow_auto_create: bool = False) -> TopicInfo:
        """Returns the topic; repeats the request until the topic exists. Raises KafkaException with the
        topic's error, _TIMED_OUT or _TRANSPORT.
        """
        with self._attachment.lock:
            cached = self.topics.get(name)
            if cached is not None and not cached.error:
                return cached
            self.refresh([name], allow_auto_create)
        results: list[TopicInfo] = []

        def is_found() -> bool:
            info = self.topics.get(name)
            if info is not None and not info.error:
                results.append(info)
            return bool(results)

        deadline = time.monotonic() + timeout
        while not self._attachment.wait_for(is_found, min(_RETRY_S, max(deadline - time.monotonic(), 0))):
            if time.monotonic() >= deadline:
                info = self.topics.get(name)
                raise KafkaException(
                    broker_error(info.error, f"topic {name}")
                    if info is not None and info.error
                    else self.error or local_error(KafkaError._TIMED_OUT)
                )
            with self._attachment.lock:
                self.refresh([name], allow_auto_create)
        return results[-1]

    def list_topics(self, topic: str | None, timeout: float, allow_auto_create: bool = False) -> Any:
        """Sends a request and returns its response as confluent_kafka's ClusterMetadata. Raises
        KafkaException; TypeError if `topic` is not a name.
        """
        if topic is not None and not isinstance(topic, str):
            raise TypeError(f"argument 1 must be str or None, not {type(topic).__name__}")
        attachment = self._attachment
        version = attachment.api.pick(requests.METADATA)
        response = attachment.request(
            requests.METADATA,
            version,
            requests.metadata_request(None if topic is None else [topic], allow_auto_create),
            timeout,
        )
        cluster, topics = requests.read_metadata(response)
        return cluster_metadata(cluster, topics)

    # -- the driver's turn -------------------------------------------------------------------------

    def on_turn(self, now: float) -> float:
        if now >= self._refresh_at:
            self._refresh_at = _NEVER
            self.refresh()
        return self._refresh_at

    def _request(self) -> None:
        if (
            self._is_under_way
            or not (self._requested or self._all_requested)
            or not self._attachment.api.versions
            or self._attachment.fatal is not None
        ):
            return
        may_create = any(self._requested.values()) and not self._all_requested
        names = None if self._all_requested else sorted(self._requested)
        self._requested, self._all_requested = {}, False
        self._is_under_way = True
        version = self._attachment.api.pick(requests.METADATA)
        self._attachment.send(
            requests.METADATA,
            version,
            requests.metadata_request(names, may_create),
            lambda response, error: self._on_response(names, response, error),
        )

    def _on_response(self, names: list[str] | None, response: Any, error: KafkaError | None) -> None:
        self._is_under_way = False
        self.version += 1
        self.error = error
        now = time.monotonic()
        if error is None:
            try:
                self._store(names, *requests.read_metadata(response))
            except KafkaException as problem:
                self.error = error = problem.args[0]
        self._refresh_at = now + (self._max_age_s if error is None else _RETRY_S)
        if not self._attachment.is_closed:
            self._request()
        self._attachment.changed.notify_all()

    def _store(self, names: list[str] | None, cluster: ClusterInfo, topics: list[TopicInfo]) -> None:
        self.cluster = cluster
        if names is None:
            self.topics.clear()
            self.names.clear()
        for topic in topics:
            self.topics[topic.name] = topic
            if topic.topic_id != requests.NO_TOPIC_ID:
                self.names[topic.topic_id] = topic.name


def cluster_metadata(cluster: ClusterInfo, topics: list[TopicInfo]) -> admin.ClusterMetadata:
    """The result of confluent_kafka's list_topics()."""
    result = admin.ClusterMetadata()
    result.cluster_id = cluster.cluster_id  # type: ignore[assignment]  # its class annotates it as None
    result.controller_id = cluster.controller_id
    for node_id, (host, port) in cluster.brokers.items():
        broker = result.brokers[node_id] = admin.BrokerMetadata()
        broker.id, broker.port = node_id, port
        broker.host = host  # type: ignore[assignment]  # as above
        result.orig_broker_id = node_id
        result.orig_broker_name = f"{host}:{port}/{node_id}"  # type: ignore[assignment]  # as above
    for info in topics:
        topic = result.topics[info.name] = admin.TopicMetadata()
        topic.topic = info.name
        topic.error = broker_error(info.error) if info.error else None
        for index, leader in enumerate(info.leaders):
            partition = topic.partitions[index] = admin.PartitionMetadata()
            partition.id, partition.leader = index, leader
            partition.replicas, partition.isrs = list(info.replicas[index]), list(info.in_sync_replicas[index])
            partition.error = None if leader >= 0 else broker_error(5)  # LEADER_NOT_AVAILABLE
    return result
