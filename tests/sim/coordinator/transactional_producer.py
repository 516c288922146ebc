"""Transactional producers of a simulated cluster, and readers of committed records. They only know
hosts and the leaders that hosts report, and follow the protocol, in version 2 (KIP-890) or before.

A version 2 producer's requests are repeated and delayed, including EndTxn and Produce, into later
transactions. The older protocol cannot distinguish those from valid ones: there a request is valid
as long as its connection is open. Several producers may share a transactional id: each fences the
others. Some leave their transaction open forever.
"""

from __future__ import annotations

from collections.abc import Generator
from struct import Struct
from typing import TYPE_CHECKING, Any

from mqd.coordinator.internal_topic import partition_for
from mqd.coordinator.log import records_batch
from mqd.protocol.messages import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
)
from tests.sim.clients import TIMEOUT, Client
from tests.sim.coordinator.transaction_history import OFFSET, Fate, record_of
from tests.sim.disks import Entry
from tests.sim.kernel import MILLISECOND, Violation
from tests.sim.replica.native_producers import Aborted, Carried, parsed

if TYPE_CHECKING:
    from tests.sim.coordinator.transaction_cluster import TransactionCluster

LOST = -1000  # instead of an error code: no response
AGAIN = frozenset((3, 5, 6, 7, 13, 14, 15, 16, 19, 20, 51, 56))  # error codes after which a client retries
OUT_OF_ORDER, UNKNOWN_PRODUCER = 45, 59
BASE_SEQUENCE_AT, BASE_SEQUENCE = 53, Struct(">i")
BATCH_MAX = 3
TRIES_MAX = 40

Step = tuple[str, tuple[Any, ...]]
Script = Generator[Step, Any, Any]


class Fenced(Exception):
    """The transaction no longer belongs to this producer, or that is unknown: it starts over."""


class TransactionalProducer(Client):
    def __init__(
        self,
        world: TransactionCluster,
        transactional_id: str,
        version: int,
        partitions: list[Any],
        pause: int,
        timeout_ms: int,
        commits_offsets: bool,
    ) -> None:
        self.cluster = world
        self.history = world.transactional
        self.id, self.version, self.timeout_ms = transactional_id, version, timeout_ms
        self.commits_offsets = commits_offsets
        self.identity = (-1, -1)
        self.sequences: dict[Any, int] = {}
        self._script = self._live()
        self._step: Step | None = None
        self._is_waiting = False
        super().__init__(world, partitions, pause)

    # -- one request at a time ---------------------------------------------------------------------

    def turn(self) -> None:
        """Time to continue, or the response timed out."""
        if self._is_waiting:
            self._take((LOST, None))
        elif self._step is None:
            self._take(None)
        else:
            self._send(*self._step)

    def _take(self, response: Any) -> None:
        self._is_waiting = False
        self._step = next(self._script, None) if self._step is None else self._go_on(response)
        if self._step is None:
            return
        kind, arguments = self._step
        if kind == "wait":
            self.again(arguments[0])
        else:
            self._send(kind, arguments)

    def _go_on(self, response: Any) -> Step | None:
        try:
            return self._script.send(response)
        except StopIteration:
            return None

    def on_answer(self, error: int, response: Any) -> None:
        self._take((error, response))

    def _send(self, kind: str, arguments: tuple[Any, ...]) -> None:
        if kind == "wait":
            self._take(None)
            return
        self._is_waiting = True
        self.again(TIMEOUT)
        token = self.token
        caller = (self.world.client_node, self.process, self.answered, token)
        getattr(self, "_send_" + kind)(caller, lambda: self.version >= 2 or self.token == token, *arguments)
        # and again, much later
        if kind in ("produce", "request") and self.version >= 2 and self.kernel.random.random() < 0.1:
            delay = self.kernel.random.randrange(4_000) * MILLISECOND
            self.kernel.after(
                delay,
                None,
                getattr(self, "_send_" + kind),
                (self.world.client_node, None, None, 0),
                lambda: True,
                *arguments,
            )

    def _send_request(self, caller: Any, is_open: Any, partition: Any, request: Any, version: int) -> None:
        """To the coordinator of that partition."""
        self._to_acceptor(self.leader(partition), caller, is_open, request, version)

    def _send_once(self, caller: Any, is_open: Any, partition: Any, request: Any, version: int) -> None:
        self._to_acceptor(self.leader(partition), caller, lambda: self.token == caller[3], request, version)

    def _to_acceptor(self, node: int, caller: Any, is_open: Any, request: Any, version: int) -> None:
        world = self.cluster
        acceptor = world.hosts[node].acceptor if node >= 0 else None
        if acceptor is not None:
            world.network.send(
                world.client_node,
                node,
                acceptor.process,
                acceptor.transactions.on_request,
                request,
                version,
                caller,
                is_open,
            )

    def _send_produce(self, caller: Any, is_open: Any, partition: Any, data: bytes) -> None:
        world = self.cluster
        node = self.leader(partition)
        worker = world.worker_of(node, partition) if node >= 0 else None
        if worker is not None:
            check = worker.cluster_host.acceptor
            request = world.transactions.check(worker, self.id, 12 if self.version >= 2 else 11, data)
            del check
            world.network.send(
                world.client_node, node, worker.process, self._arrive, worker, partition, data, request, caller, is_open
            )

    @staticmethod
    def _arrive(worker: Any, partition: Any, data: bytes, request: Any, caller: Any, is_open: Any) -> None:
        if is_open():
            worker.on_transactional(partition, data, request, caller)

    # -- lifetime ----------------------------------------------------------------------------------

    def _live(self) -> Script:
        random = self.kernel.random
        while not self.stopping:
            try:
                yield from self._initialise()
                while not self.stopping:
                    yield from self._transaction()
                    yield "wait", (self.pause,)
                    if random.random() < 0.03:
                        break  # restarts
            except Fenced:
                yield "wait", (random.randrange(1, 300) * MILLISECOND,)

    def _again(self, kind: str, *arguments: Any) -> Script:
        """The first response that is not retriable: (error, response); LOST when that took too
        long.
        """
        for _ in range(TRIES_MAX):
            error, response = yield kind, arguments
            error = error or self._error_of(response)
            if error == LOST:
                continue
            if error not in AGAIN:
                return error, response
            yield "wait", (self.kernel.random.randrange(20, 80) * MILLISECOND,)
        return LOST, None

    @staticmethod
    def _error_of(response: Any) -> int:
        for name in ("results_by_topic_v3_and_below", "topics"):
            for topic in getattr(response, name, None) or ():
                for one in getattr(topic, "results_by_partition", None) or getattr(topic, "partitions", ()):
                    return one.partition_error_code if hasattr(one, "partition_error_code") else one.error_code
        return getattr(response, "error_code", 0)

    def _initialise(self, recovers: bool = False) -> Script:
        expected = self.identity if recovers else (-1, -1)
        request = InitProducerIdRequest(
            transactional_id=self.id,
            transaction_timeout_ms=self.timeout_ms,
            producer_id=expected[0],
            producer_epoch=expected[1],
        )
        error, response = yield from self._again("once", self._own_partition, request, 5 if self.version >= 2 else 4)
        if error:
            raise Fenced
        self._become(response.producer_id, response.producer_epoch)

    def _become(self, producer_id: int, epoch: int) -> None:
        if (producer_id, epoch) != self.identity:
            self.identity, self.sequences = (producer_id, epoch), {}

    @property
    def _own_partition(self) -> Any:
        return self.cluster.coordinated_by(self.id)

    def _transaction(self) -> Script:
        random = self.kernel.random
        fate = self.history.begin(self.id)
        added: set[Any] = set()
        sure, serial = True, 0
        for _ in range(random.randrange(1, 5)):
            partition = self.partitions[random.randrange(len(self.partitions))]
            if self.version < 2 and partition not in added:
                yield from self._add(partition)
                added.add(partition)
            count = random.randrange(1, BATCH_MAX + 1)
            sure = yield from self._produce(fate, partition, serial, count)
            serial += count
            if not sure:
                break
            if random.random() < 0.3:
                yield "wait", (random.randrange(1, 200) * MILLISECOND,)
        if sure and self.commits_offsets and random.random() < 0.6:
            sure = yield from self._commit_offset(fate)
        chance = random.random()
        if chance < 0.06:  # leaves it open
            if chance < 0.03:
                yield "wait", (random.randrange(3 * self.timeout_ms) * MILLISECOND,)
            raise Fenced
        yield from self._end(fate, sure and random.random() < 0.75, sure)

    def _add(self, partition: Any) -> Script:
        name, index = self.cluster.state.topics_by_id[partition[0]], partition[1]
        request = AddPartitionsToTxnRequest(
            transactions=[],
            v3_and_below_transactional_id=self.id,
            v3_and_below_producer_id=self.identity[0],
            v3_and_below_producer_epoch=self.identity[1],
            v3_and_below_topics=[AddPartitionsToTxnRequest.Topic(name=name, partitions=[index])],
        )
        error, _ = yield from self._again("request", self._own_partition, request, 3)
        if error:
            raise Fenced

    def _produce(self, fate: Fate, partition: Any, serial: int, count: int) -> Script:
        """Whether it is acknowledged."""
        sequence = self.sequences.get(partition, 0)
        data = records_batch([record_of(fate.number, serial + one) for one in range(count)], 0, *self.identity)
        data = data[:BASE_SEQUENCE_AT] + BASE_SEQUENCE.pack(sequence) + data[BASE_SEQUENCE_AT + 4 :]
        error, _ = yield from self._again("produce", partition, data)
        if error in (OUT_OF_ORDER, UNKNOWN_PRODUCER):
            raise Violation(
                "C2",
                f"{self.cluster.name(partition)}: producer {self.identity} of {self.id} is out of order at sequence"
                f" {sequence} (error {error})",
            )
        if error:
            return False
        self.sequences[partition] = sequence + count
        fate.acknowledged.update((partition, serial + one) for one in range(count))
        self.done += count
        return True

    def _commit_offset(self, fate: Fate) -> Script:
        group = self.cluster.group_of(self.id)
        if self.version < 2:
            request = AddOffsetsToTxnRequest(
                transactional_id=self.id, producer_id=self.identity[0], producer_epoch=self.identity[1], group_id=group
            )
            error, _ = yield from self._again("request", self._own_partition, request, 3)
            if error:
                return False
        one = TxnOffsetCommitRequest.Partition(partition_index=0, committed_offset=fate.number)
        commit = TxnOffsetCommitRequest(
            transactional_id=self.id,
            group_id=group,
            producer_id=self.identity[0],
            producer_epoch=self.identity[1],
            topics=[TxnOffsetCommitRequest.Topic(name="flushed", partitions=[one])],
        )
        partition = self.cluster.group_partition(self.id)
        error, _ = yield from self._again("request", partition, commit, 5 if self.version >= 2 else 3)
        if error:
            return False
        fate.acknowledged.add((partition, OFFSET))
        return True

    def _end(self, fate: Fate, commit: bool, sure: bool) -> Script:
        if not fate.acknowledged and (commit or self.version < 2):
            commit = False
        fate.requested = commit
        self.history.ends.add((*self.identity, commit))
        request = EndTxnRequest(
            transactional_id=self.id, producer_id=self.identity[0], producer_epoch=self.identity[1], committed=commit
        )
        error, response = yield from self._again("request", self._own_partition, request, 5 if self.version >= 2 else 3)
        if error:
            raise Fenced
        fate.confirmed = commit
        if self.version >= 2:
            self._become(response.producer_id, response.producer_epoch)
        elif not sure:
            yield from self._initialise(recovers=True)


class CommittedReader(Client):
    """Reads committed records of each partition in turn, from its leader or from any replica
    (KIP-392).
    """

    def __init__(self, world: TransactionCluster, partitions: list[Any], pause: int, nearest: bool) -> None:
        self.cluster = world
        self.positions: dict[Any, int] = dict.fromkeys(partitions, 0)
        self.nearest = nearest
        self.at = 0
        super().__init__(world, partitions, pause)

    def turn(self) -> None:
        self.at = (self.at + 1) % len(self.partitions)
        partition = self.partitions[self.at]
        self.send_request(
            self.world.replica_hint(partition) if self.nearest else self.leader(partition),
            "on_read_committed",
            partition,
            self.positions[partition],
        )

    def on_answer(self, error: int, offset: int, entries: list[Entry], aborted: tuple[Aborted, ...]) -> None:
        partition = self.partitions[self.at]
        if not error and offset == self.positions[partition]:
            self._read(partition, offset, entries, aborted)
        self.again(self.pause if not error else 40 * MILLISECOND)

    def _read(self, partition: Any, offset: int, entries: list[Entry], aborted: tuple[Aborted, ...]) -> None:
        """A client's treatment of a Fetch: records of a producer are skipped from an aborted
        transaction's first offset up to the marker.
        """
        history = self.cluster.transactional
        for place, entry in enumerate(entries, offset):
            if isinstance(entry.value, Carried):
                info = parsed(entry.value.batch).info
                if info.is_control:
                    continue
                if info.is_transactional and any(
                    one.producer_id == info.producer_id and one.first_offset <= place < one.last_offset
                    for one in aborted
                ):
                    history.left_out(partition, place)
                    continue
            history.delivered(partition, place, entry)
            self.done += 1
        self.positions[partition] = offset + len(entries)


def partition_of(name: str, partitions: list[Any]) -> Any:
    """Of an internal topic: the one of a group id or transactional id."""
    return partitions[partition_for(name, len(partitions))]
