"""Reads a partition's records from mapped segments of this host's broker, without a socket; they
are copied only once, into Arrow's buffers.

    # raises NotLocal if TCP must be used
    views = open_views(options, cluster, range_, report_loss, pool)
    # Yields up to the range's end, or until it cannot continue: then `position` is less than the
    # range's end, and TCP takes over.
    for view in views.views(): ...

    L1  an attachment belongs to one process (a worker that Spark forked opens its own); it is
        cached until the attachment ends
    L2  with read_committed the aborted transactions are queried over the attachment when the reader
        needs them
    L3  if expected records do not arrive within WAIT_S (the leader moved, the replica here lags,
        the partition changes its owner), reading continues over TCP
Concurrency: one thread.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from mqd.client.shm.reading import BlockPool, PartitionReader
from mqd.native import NativeError
from mqd.native.client import Client
from mqd.protocol.api import decode_response, encode_request
from mqd.protocol.errors import ProtocolError
from mqd.protocol.messages import FetchRequest
from mqd.shm import rendezvous
from mqd.spark.options import SourceOptions
from mqd.spark.planning import Range
from mqd.spark.wire import Cluster, MqdReadError

log = logging.getLogger("mqd.spark")

RECORDS_MAX, BYTES_MAX = 16384, 2 << 20  # limits of one view, so that its columns stay in the CPU cache
WAIT_S, POLL_S = 0.5, 0.002
ATTACH_TIMEOUT_MS = 3000
RESPONSE_TIMEOUT_S = 10.0
FETCH, VERSION = 1, 13  # API key and version
_request_numbers = itertools.count(1)
_clients: dict[tuple[int, str, str], Client] = {}  # L1: by process, socket and server


class NotLocal(Exception):
    """A partition cannot be read from this host's memory; the text is the reason."""


def _attach(path: str, server: str, client_id: str) -> Client:
    client = _clients.get((os.getpid(), path, server))
    if client is None:
        try:
            client = Client(
                path,
                client_id=client_id,
                data_bytes=64 << 10,
                request_bytes=64 << 10,
                timeout_ms=ATTACH_TIMEOUT_MS,
                server=server,
            )
        except NativeError as error:
            raise NotLocal(f"{path}: {error}") from error
        _clients[os.getpid(), path, server] = client
    return client


def _forget(client: Client) -> None:
    for key, cached_client in list(_clients.items()):
        if cached_client is client:
            del _clients[key]
            client.close()


def _find_broker(options: SourceOptions, cluster: Cluster, range_: Range) -> tuple[str, str]:
    """The client socket and server name of a broker on this host: one of bootstrap.servers, or the
    partition's leader. Any replica will do: it is read up to its high watermark; a broker without a
    replica returns an error.
    """
    result = rendezvous.find(options.kafka.bootstrap_servers)
    if result.path is not None:
        return result.path, result.server
    if options.kafka.transport == "auto" and not _may_have_broker():
        raise NotLocal(result.reason)
    try:
        metadata = cluster.metadata([range_.topic])
    except OSError as error:
        raise NotLocal(str(error)) from error
    topic = metadata.topics.get(range_.topic)
    address = metadata.brokers.get(topic.leaders.get(range_.partition, -1)) if topic is not None else None
    if address is None:
        raise NotLocal("the partition's leader is not known")
    host, port = address
    result = rendezvous.find(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    if result.path is None:
        raise NotLocal(result.reason)
    return result.path, result.server


def _may_have_broker() -> bool:
    """Whether this host may have a broker at all. Checked before the metadata is queried."""
    return any(directory.is_dir() for directory in rendezvous.directories())


def open_views(
    options: SourceOptions, cluster: Cluster, range_: Range, report_loss: Callable[[int, str], None], pool: BlockPool
) -> LocalBatchViews:
    """Opens the partition in this host's memory. Raises NotLocal."""
    client = _attach(*_find_broker(options, cluster, range_), options.kafka.client_id)
    try:
        return LocalBatchViews(client, int(options.kafka.read_committed), range_, report_loss, pool)
    except NativeError as error:
        _forget(client)
        raise NotLocal(str(error)) from error


class LocalBatchViews:
    """See the module's docstring."""

    def __init__(
        self, client: Client, isolation: int, range_: Range, report_loss: Callable[[int, str], None], pool: BlockPool
    ) -> None:
        self._client, self._isolation, self._range, self._report_loss = client, isolation, range_, report_loss
        self._reader: PartitionReader | None = PartitionReader(
            client, range_.topic, range_.topic_id, range_.partition, range_.start, isolation, pool=pool
        )
        self.position = range_.start

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def views(self) -> Iterator[Any]:
        """Yields the records; ends early if TCP must continue. Raises MqdReadError for data that TCP
        could not read either.
        """
        reader = self._reader
        assert reader is not None
        waiting_since_s: float | None = None
        while reader.position < self._range.end:
            try:
                view = reader.read(RECORDS_MAX, BYTES_MAX)
            except OSError as error:
                log.info(
                    "%s-%d: the attachment has ended (%s): continuing over TCP at offset %d",
                    self._range.topic,
                    self._range.partition,
                    error,
                    self.position,
                )
                _forget(self._client)
                return
            if view is not None:
                self.position, waiting_since_s = reader.position, None
                yield view
                continue
            if self.position < reader.position:  # control batches, aborted transactions
                self.position, waiting_since_s = reader.position, None
            problem = reader.take_problem()
            if problem is None:
                waiting_since_s = waiting_since_s or time.monotonic()
                if time.monotonic() - waiting_since_s > WAIT_S:  # L3
                    return
                # the log has the range's records, but they are not readable here yet: the leader
                # is changing, or this replica lags
                time.sleep(POLL_S)
            elif problem.kind == "aborted":
                if not self._query_aborted():
                    return
            elif problem.kind == "corrupt":
                raise MqdReadError(
                    f"{self._range.topic}-{self._range.partition}: a damaged record batch at offset {self.position}:"
                    f" {problem.text}. `mqd log dump` shows it; to skip it, set startingOffsets to a later offset"
                )
            else:  # out of range or deleted: the leader reports the cause over TCP
                return

    def _query_aborted(self) -> bool:
        """Queries the aborted transactions (L2). Returns False if there is no usable response."""
        reader, range_ = self._reader, self._range
        assert reader is not None
        requested = FetchRequest.Partition(
            partition=range_.partition, fetch_offset=reader.position, partition_max_bytes=1 << 20
        )
        request = FetchRequest(
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=0,
            isolation_level=1,
            topics=[FetchRequest.Topic(topic_id=range_.topic_id, partitions=[requested])],
        )
        try:
            response = _request(self._client, request)
        except (OSError, ProtocolError) as error:
            log.info(
                "%s-%d: aborted transactions cannot be queried (%s): continuing over TCP",
                range_.topic,
                range_.partition,
                error,
            )
            _forget(self._client)
            return False
        for topic in response.responses:
            for data in topic.partitions:
                if not data.error_code and data.last_stable_offset > reader.position:
                    reader.set_aborted(
                        [(entry.producer_id, entry.first_offset) for entry in data.aborted_transactions or []],
                        data.last_stable_offset,
                    )
                    return True
        return False


def _request(client: Client, request: Any) -> Any:
    """Returns the response to one request; no other thread uses the attachment. Raises OSError,
    ProtocolError.
    """
    number = next(_request_numbers) % (1 << 29) + 1
    frame = encode_request(request, VERSION, number, "spark-mqd")
    deadline = time.monotonic() + RESPONSE_TIMEOUT_S
    while not client.submit(frame):
        client.wait(1000)
        client.poll()
        if time.monotonic() > deadline:
            raise TimeoutError("the broker did not accept the request")
    client.flush()
    while True:
        received = client.next_response()
        if received is not None:
            response_number, response = decode_response(received, FETCH, VERSION)
            if response_number == number:
                return response
            continue
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError(f"no response within {RESPONSE_TIMEOUT_S:g} s")
        if client.wait(int(remaining_s * 1e6)):
            client.poll()
