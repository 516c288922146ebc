"""Requests to brokers over TCP, blocking, one at a time on a connection: the driver's requests, and
the executors' Fetch.

    cluster = Cluster(settings)                             # KafkaSettings; connects on first use
    metadata = cluster.metadata(["orders"])                 # leaders, topic ids
    response = cluster.connection_to(node_id).request(request)    # mqd.protocol's messages
    cluster.with_retries("offsets of orders", attempt)      # retries transient errors: a broker
                                                            # that restarts, a leader that moves

    W1  retries end: after `api_timeout_s`, or UNKNOWN_TIMEOUT_S for a missing topic or partition
        (MqdMissingError), the last problem is raised, with the request and the broker
Concurrency: one thread. After fork the parent's objects must not be used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from mqd.client.tcp.connection import Connection, NoCommonVersion
from mqd.protocol.errors import ERRORS, ErrorCode, is_retriable
from mqd.protocol.messages import MetadataRequest
from mqd.security.client import ClientSecurity, NotAuthenticated
from mqd.spark.options import KafkaSettings

PAUSE_MIN_S, PAUSE_MAX_S = 0.05, 1.0
API_TIMEOUT_S = 60.0  # kafka.default.api.timeout.ms
UNKNOWN_TIMEOUT_S = 2.0  # for missing topics: a broker's metadata may lag
PORT_DEFAULT = 9092
MISSING_CODES = frozenset(
    {
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.INCONSISTENT_TOPIC_ID,
        ErrorCode.INVALID_TOPIC_EXCEPTION,
    }
)
_NO_TOPIC_ID = bytes(16)

T = TypeVar("T")


class MqdReadError(RuntimeError):
    """Records or their metadata cannot be read; the text names topic, partition and offset, the
    cause and the remedy.
    """


class MqdMissingError(MqdReadError):
    """The requested topic or partition does not exist, as far as the queried brokers know."""


class BrokerError(Exception):
    """An error in a broker's response: `code` is Kafka's."""

    def __init__(self, code: int, request_name: str = "") -> None:
        error = ERRORS.get(code)
        text = f"{error.name} ({error.message})" if error else f"error {code}"
        super().__init__(f"{request_name}: {text}" if request_name else text)
        self.code = code

    @property
    def is_retriable(self) -> bool:
        return is_retriable(self.code)


def check(code: int, request_name: str) -> None:
    if code:
        raise BrokerError(code, request_name)


def parse_servers(text: str) -> list[tuple[str, int]]:
    """Parses bootstrap.servers. Raises MqdReadError."""
    servers = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        host, colon, port = word.rpartition(":") if not word.endswith("]") else (word, "", "")
        if colon and not port.isdecimal():
            raise MqdReadError(f"kafka.bootstrap.servers: {word!r} is not host:port")
        servers.append(((host or word).strip("[]"), int(port) if colon else PORT_DEFAULT))
    if not servers:
        raise MqdReadError(f"kafka.bootstrap.servers: {text!r} has no host; use host:port, separated by commas")
    return servers


class BrokerConnection(Connection):
    """One connection, as the driver and the executors use it. Raises OSError when the broker cannot
    be reached or the connection ends, ProtocolError when received bytes are not Kafka's protocol.
    """

    def __init__(
        self, host: str, port: int, client_id: str, timeout_s: float, security: ClientSecurity | None = None
    ) -> None:
        try:
            super().__init__(host, port, client_id, timeout_s, security, "mqd-spark")
        except NotAuthenticated as error:
            raise MqdReadError(str(error)) from None

    def pick(self, api_key: int, version_max: int = 1 << 14) -> int:
        """The newest version that both sides support. Raises MqdReadError."""
        try:
            return super().pick(api_key, version_max)
        except NoCommonVersion as error:
            raise MqdReadError(str(error)) from None


class Topic(msgspec.Struct, frozen=True):
    """`leaders` by partition index: node ids, -1 = none at present."""

    name: str
    topic_id: bytes
    leaders: dict[int, int]
    error: int = 0


class Metadata(msgspec.Struct, frozen=True):
    brokers: dict[int, tuple[str, int]]
    topics: dict[str, Topic]


class Cluster:
    """See the module's docstring."""

    def __init__(self, settings: KafkaSettings) -> None:
        self.settings = settings
        timeout = settings.others.get("default.api.timeout.ms", "")
        self.api_timeout_s = int(timeout) / 1000 if timeout.isdigit() else API_TIMEOUT_S
        self._servers = parse_servers(settings.bootstrap_servers)
        self._links: dict[tuple[str, int], BrokerConnection] = {}
        self.brokers: dict[int, tuple[str, int]] = {}
        # number of calls of prefer_other_brokers(); the brokers that any_connection() tries first
        self._rotation_count, self._preferred = 0, list[tuple[str, int]]()

    def close(self) -> None:
        links, self._links, self._preferred = self._links, {}, []
        for link in links.values():
            link.close()

    def new_connection(self, node_id: int) -> BrokerConnection:
        """A connection that only the caller uses."""
        address = self.brokers.get(node_id)
        if address is None:
            raise ConnectionError(f"broker {node_id} is not in the metadata")
        return self._open(address)

    def _open(self, address: tuple[str, int]) -> BrokerConnection:
        settings = self.settings
        return BrokerConnection(
            *address, settings.client_id, settings.request_timeout_s, ClientSecurity(settings.security)
        )

    def connection_to(self, node_id: int) -> BrokerConnection:
        address = self.brokers.get(node_id)
        if address is None:
            raise ConnectionError(f"broker {node_id} is not in the metadata")
        return self._link(address)

    def any_connection(self) -> BrokerConnection:
        """A connection to any reachable broker: first those selected by prefer_other_brokers(),
        then other connected ones, bootstrap.servers, and those of the metadata.
        """
        problems = []
        for address in dict.fromkeys([*self._preferred, *self._links, *self._servers, *self.brokers.values()]):
            try:
                link = self._link(address)
            except OSError as error:
                problems.append(str(error))
            else:
                self._preferred = [address] if self._preferred else []
                return link
        raise ConnectionError("; ".join(problems))

    def prefer_other_brokers(self, silent: tuple[str, int] | None = None) -> None:
        """Makes any_connection() rotate to other brokers until close(). `silent`: the address of a
        broker that does not respond; it is used only if no other broker can be reached.
        """
        addresses = list(dict.fromkeys([*self._servers, *(self.brokers[node] for node in sorted(self.brokers))]))
        self._rotation_count += 1
        first = self._rotation_count % len(addresses)
        self._preferred = sorted(addresses[first:] + addresses[:first], key=lambda address: address == silent)

    def _link(self, address: tuple[str, int]) -> BrokerConnection:
        link = self._links.get(address)
        if link is None or link.closed:
            link = self._links[address] = self._open(address)
        return link

    def metadata(self, names: Iterable[str] | None) -> Metadata:
        """`names` None: all topics. A missing topic has an `error`."""
        topics = None if names is None else [MetadataRequest.Topic(name=name, topic_id=_NO_TOPIC_ID) for name in names]
        response = self.any_connection().request(MetadataRequest(topics=topics, allow_auto_topic_creation=False))
        self.brokers = {broker.node_id: (broker.host, broker.port) for broker in response.brokers}
        found_topics = {
            topic.name: Topic(
                topic.name,
                topic.topic_id,
                {
                    partition.partition_index: partition.leader_id
                    for partition in sorted(topic.partitions, key=lambda partition: partition.partition_index)
                },
                topic.error_code,
            )
            for topic in response.topics
            if not (names is None and topic.is_internal)
        }
        return Metadata(self.brokers, found_topics)

    def with_retries(self, request_name: str, attempt: Callable[[], T], pause_s: float = PAUSE_MIN_S) -> T:
        """Calls attempt() and retries transient errors. `request_name` is for messages. Raises
        MqdReadError.
        """
        began, pause = time.monotonic(), max(pause_s, 0.001)
        while True:
            try:
                return attempt()
            except (OSError, BrokerError) as error:
                if isinstance(error, BrokerError) and not error.is_retriable:
                    raise MqdReadError(f"{request_name}: {error}") from error
                self.close()
                waited = time.monotonic() + pause - began
                if (
                    isinstance(error, BrokerError)
                    and error.code in MISSING_CODES
                    and waited >= min(UNKNOWN_TIMEOUT_S, self.api_timeout_s)
                ):
                    raise MqdMissingError(f"{request_name}: {error}") from error
                if waited >= self.api_timeout_s:
                    raise MqdReadError(
                        f"{request_name}: no response within {self.api_timeout_s:g} s from"
                        f" {self.settings.bootstrap_servers}: {error}. Check that the broker is running and that"
                        " kafka.bootstrap.servers is right. kafka.default.api.timeout.ms sets how long to wait"
                    ) from error
            time.sleep(pause)  # between attempts: there is no notification when another process is back
            pause = min(2 * pause, PAUSE_MAX_S)
