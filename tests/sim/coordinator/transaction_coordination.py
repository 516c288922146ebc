"""Transactions in the acceptor of a simulated host: the broker's modules (mqd/acceptor,
mqd/coordinator, mqd/coordinator/transaction) with simulated time, links and logs.

Real: the cores and shards of transactional ids and of groups, the coordinators that load, write and
unload them (mqd/coordinator/runtime.py), the log of their appends, markers and their retries, the
requests to coordinators and leaders on other hosts, the responses to CHECK, the request handlers,
and the loading of cores from a log (mqd/coordinator/load.py). Simulated: partition table and lease,
the link to the workers, connections between hosts, files.

Invariants
    A1  a connection between two acceptors delivers in order, possibly late; messages of a dead
        sender are delivered until its successor has connected
    A2  a request to another host waits at most PEER_TIMEOUT_S; then its outcome is unknown
Rules that can be off: `early` (a coordinator responds, and sends markers, before the records they
depend on are replicated), `end epoch` (EndTxn ends the current transaction, whatever epoch it
names), `one marker` (only the first of a transaction's partitions gets a marker), `one connection`
(messages that the successor's connection has overtaken are served); those of batch_worker.py.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from mqd.acceptor.broker import Context
from mqd.acceptor.broker_state import OWNER_NONE, Origin, ProducerIds
from mqd.acceptor.checks import Checks
from mqd.acceptor.coordinators import TOKEN_BASE, BrokerPartitions, InternalPartitions
from mqd.acceptor.handlers.transactions import (
    add_offsets_to_txn,
    add_partitions_to_txn,
    end_txn,
    init_producer_id,
    txn_offset_commit,
    write_txn_markers,
)
from mqd.acceptor.interbroker.client import PeerError
from mqd.acceptor.metadata import Metadata
from mqd.acceptor.transactions import _CHECK, _CHECK_PARTITION, TransactionService
from mqd.base import config as configuration
from mqd.cluster.host import messages
from mqd.coordinator.group.cores import GroupCoreFactory
from mqd.coordinator.group.group import Group
from mqd.coordinator.group.offsets import OffsetsSettings
from mqd.coordinator.group.settings import ClassicSettings
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.load import _LoadState
from mqd.coordinator.log import AppendError, LogAppender
from mqd.coordinator.runtime import Coordinator
from mqd.coordinator.shard import LoadedPartition
from mqd.coordinator.topics import CONSUMER_OFFSETS, OFFSETS_TOPIC, TRANSACTION_STATE, TRANSACTIONS_TOPIC
from mqd.coordinator.transaction.core import Transaction
from mqd.coordinator.transaction.cores import TransactionCoreFactory
from mqd.coordinator.transaction.events import WriteMarkers
from mqd.coordinator.transaction.records import State
from mqd.native import SlotState
from mqd.protocol.headers import RequestHeader
from tests.sim.event_loop import SimLoop
from tests.sim.kernel import MILLISECOND, Violation
from tests.sim.replica.native_producers import parsed

if TYPE_CHECKING:
    from tests.sim.cluster.cluster_host import ClusterHost
    from tests.sim.cluster.host_processes import Acceptor, ClusterWorker

PEER_TIMEOUT_S = 1.5
ALLOCATE_S = 1.0
NOT_LEADER, TIMED_OUT = 6, 7
HANDLERS = {
    "InitProducerIdRequest": (22, init_producer_id),
    "AddPartitionsToTxnRequest": (24, add_partitions_to_txn),
    "AddOffsetsToTxnRequest": (25, add_offsets_to_txn),
    "EndTxnRequest": (26, end_txn),
    "WriteTxnMarkersRequest": (27, write_txn_markers),
    "TxnOffsetCommitRequest": (28, txn_offset_commit),
}


class View(NamedTuple):
    """The part of a SlotView that the coordinators use."""

    state: int
    owner: int
    owner_generation: int
    leader_epoch: int
    log_end_offset: int
    high_watermark: int


class SimBroker:
    """The part of mqd.acceptor.broker.Broker that transactions need."""

    def __init__(self, coordination: Coordination) -> None:
        self._coordination, self._host = coordination, coordination.host
        self.node_id = self._host.node
        self.metadata = Metadata()
        self.table = self
        self.controller = self
        self.disks = self
        self.producer_ids = ProducerIds()
        self.authorizer = None  # everything is allowed
        self.coordinators: Any = None
        self.transactions: TransactionService | None = None

    def broker_value(self, name: str) -> configuration.Value | None:
        return configuration.broker_value({}, name)

    def broker_number(self, name: str) -> int:
        return configuration.broker_number({}, name)

    def effective_config(self) -> dict[str, str]:
        return configuration.broker_effective({}, {})

    def may_lead(self) -> bool:
        return self._host.clock_ns() < self._host.lease_deadline_ns

    def endpoint_generation(self, endpoint: int) -> int:
        worker = self._host.workers[endpoint]
        return worker.generation if worker is not None else -1

    def partition_of(self, name: str, index: int) -> messages.PartitionImage | None:
        topic = self.metadata.topics.get(name)
        return topic.partitions[index] if topic is not None and 0 <= index < len(topic.partitions) else None

    def key_of(self, slot: int) -> tuple[bytes, int] | None:
        held = self._host.slots.get(slot)
        return (held[0], held[1]) if held is not None else None

    def view(self, image: messages.PartitionImage) -> View | None:
        if image.leader != self.node_id or image.owner == OWNER_NONE or not self.may_lead():
            return None
        key, worker = self.key_of(image.slot), self._host.workers[image.owner]
        place = worker.places.get(key) if worker is not None and not worker.failed else None
        if place is None or key is None or key[1] != image.index or not place.core.leading:
            return None
        return View(
            SlotState.ONLINE,
            image.owner,
            worker.generation,
            place.core.leader_epoch,
            place.log.end,
            place.core.high_watermark,
        )

    def unserved_error(self, _image: messages.PartitionImage) -> int:
        return NOT_LEADER

    def path_of(self, _topic: str, image: messages.PartitionImage) -> tuple[bytes, int] | None:
        return self.key_of(image.slot)

    async def load(self, _log_dir: int, work: Any) -> LoadedPartition:
        """`work`: load.load with its arguments; the path is from path_of()."""
        await asyncio.sleep(self._coordination.kernel.random.randrange(1, 20) / 1000)
        return self._load(*work.args)

    def _load(self, key: tuple[bytes, int] | None, end_offset: int, cores: Any, name: str) -> LoadedPartition:
        loaded = LoadedPartition(end_offset)
        log = self._host.logs.get(key) if key is not None else None
        if log is None:
            raise OSError("its files are gone")
        state, offset = _LoadState(cores, loaded, name), 0
        while offset < min(end_offset, log.end):
            entry = log.entries[offset]
            state.on_other(parsed(entry.value.batch).info, entry.value.batch)  # type: ignore[attr-defined]
            offset += 1 + entry.left
        state.build()
        if loaded.skipped_count:
            raise Violation("LOAD", f"{name}: {loaded.skipped_count} records cannot be read")
        for core_name in [core_name for core_name, core in loaded.cores.items() if core.is_empty]:
            del loaded.cores[core_name]
        return loaded

    async def request(self, change: messages.Change, _timeout_ms: int) -> messages.Response:
        """A request to the controller."""
        coordination = self._coordination
        future = asyncio.get_running_loop().create_future()

        def answered(_token: int, response: messages.Response) -> None:
            coordination.loop.enter(lambda: future.done() or future.set_result(response))

        coordination.acceptor.on_request(change, (self.node_id, coordination.process, answered, 0))
        alarm = asyncio.get_running_loop().call_later(
            ALLOCATE_S, lambda: future.done() or future.set_result(messages.Response(0, TIMED_OUT))
        )
        try:
            return await future
        finally:
            alarm.cancel()


class SimPeers:
    """mqd.acceptor.interbroker.client.Peers: A1, A2."""

    def __init__(self, coordination: Coordination) -> None:
        self._own = coordination
        self._since = coordination.kernel.now
        self._arrives: dict[Any, int] = {}  # process -> when the last message to it arrives

    async def request(self, node_id: int, request: Any, version: int, timeout_s: float) -> object:
        own = self._own
        loop = asyncio.get_running_loop()
        acceptor = own.world.hosts[node_id].acceptor if own.broker.metadata.is_alive(node_id) else None
        if acceptor is None or acceptor.transactions is None:
            raise PeerError(f"host {node_id} is not there")
        future = loop.create_future()

        def answered(response: object) -> None:
            own.loop.enter(lambda: future.done() or future.set_result(response))

        other = acceptor.transactions
        reply = other.replier(own, answered)
        self._send(node_id, other, other.on_peer, own.host.node, self._since, request, version, reply)
        alarm = loop.call_later(
            min(timeout_s, PEER_TIMEOUT_S),
            lambda: future.done() or future.set_exception(PeerError(f"host {node_id} has not answered")),
        )
        try:
            return await future
        finally:
            alarm.cancel()

    def _send(self, node_id: int, other: Coordination, do: Callable[..., None], *arguments: object) -> None:
        own = self._own
        link, random = own.world.network.links[own.host.node][node_id], own.kernel.random
        if link.cut:
            return
        delay = random.randrange(link.delay_min, link.delay_max + 1)
        if link.loss and random.random() < link.loss:
            delay += 200 * MILLISECOND  # retransmitted by TCP
        if link.late and random.random() < link.late:
            delay += random.randrange(link.late_max)
        if random.random() < own.world.late_markers and do == other.on_peer:  # the connection stalls
            delay += random.randrange(3_000) * MILLISECOND
        if own.world.plan.last_markers and do == other.on_peer and random.random() < own.world.plan.last_markers:
            delay += random.randrange(100, 2_500) * MILLISECOND
            own.world.faults.counts["last_markers"] = own.world.faults.counts.get("last_markers", 0) + 1
            own.kernel.after(random.randrange(5) * MILLISECOND, own.process, own.host.kill_acceptor)
        at = self._arrives[other.process] = max(own.kernel.now + delay, self._arrives.get(other.process, 0) + 1)
        own.kernel.after(at - own.kernel.now, other.process, self._arrive, link, do, arguments)

    def _arrive(self, link: Any, do: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if not link.cut:
            do(*arguments)


def _raise(_job: object, _partition: object, failure: BaseException) -> None:
    """A bug of mqd, which the broker would log (E3)."""
    raise failure


class SimCoordinator(Coordinator):
    """A failure in a core fails the run; R5 is checked again when effects are sent."""

    off: frozenset[str] = frozenset()

    def _handle(self, place: Any, shard: Any, name: str, event: object, only_existing: bool = False) -> None:
        (shard.handle_existing if only_existing else shard.handle)(name, event, self._now_ms())
        shard.check()
        core = shard.core(name)
        if core is not None:
            core.check()

    def _write(self, place: Any, shard: Any, unit: Any) -> None:
        super()._write(place, shard, unit)
        if "early" in self.off:
            shard.finish_write()
            self._wake(place)

    async def _finish_write(self, place: Any, shard: Any, unit: Any, futures: Any) -> None:
        if "early" not in self.off:
            await super()._finish_write(place, shard, unit, futures)
            return
        results = await asyncio.gather(*futures, return_exceptions=True)
        if place.shard is shard and any(isinstance(result, BaseException) for result in results):
            self._unload(place, NOT_LEADER, "a write failed")


class EndsAnyEpoch(Transaction):
    def _end_version_2(self, event: Any, now_ms: int, actions: list[Any]) -> int | None:
        if self.state == State.ONGOING:
            event = msgspec.structs.replace(event, producer_epoch=self.producer_epoch)
        return super()._end_version_2(event, now_ms, actions)


class EndsAnyEpochs(TransactionCoreFactory):
    def make(self, name: str) -> Transaction:  # type: ignore[override]
        return EndsAnyEpoch(name, self._settings)


class Coordination:
    """The coordination in one acceptor."""

    def __init__(self, acceptor: Acceptor) -> None:
        self.acceptor, self.process = acceptor, acceptor.process
        self.host: ClusterHost = acceptor.host
        self.world = self.host.world
        self.kernel = self.world.kernel
        self.loop = SimLoop(self.kernel, self.process, (CoordinatorError, AppendError, PeerError))
        self._peers: dict[int, int] = {}  # node id -> the start time of the acceptor that has connected
        self._base_ms = self.host.clock.wall_ms() - self.host.clock.now_ms()
        off = self.world.off
        broker = self.broker = SimBroker(self)
        service = self.service = TransactionService(broker, self)  # type: ignore[arg-type]
        service.markers._log_failure = _raise  # type: ignore[method-assign]
        if "end epoch" in off:
            service.cores = EndsAnyEpochs(service.cores._settings)
        carry_out = self._one_marker if "one marker" in off else service.carry_out
        log = self.log = LogAppender(BrokerPartitions(broker), self, TOKEN_BASE)  # type: ignore[arg-type]
        groups = GroupCoreFactory(lambda name: Group(name, ClassicSettings(), OffsetsSettings()))  # type: ignore[arg-type,return-value]
        offsets, transactions = (InternalPartitions(broker, topic) for topic in (CONSUMER_OFFSETS, TRANSACTION_STATE))
        self.groups = SimCoordinator(OFFSETS_TOPIC, groups, offsets, log, self.now_ms)  # type: ignore[arg-type]
        self.ids = SimCoordinator(TRANSACTIONS_TOPIC, service.cores, transactions, log, self.now_ms, carry_out)  # type: ignore[arg-type]
        self.groups.off = self.ids.off = off
        service.attach(self.ids, self.groups, log, self.now_ms)
        service.connect(SimPeers(self))  # type: ignore[arg-type]
        broker.transactions, broker.coordinators = service, SimpleNamespace(groups=self.groups)
        self.checks = Checks(service)
        self.kernel.after(20 * MILLISECOND, self.process, self.loop.enter, self._start)

    def now_ms(self) -> int:
        """As SteadyClock: the wall clock at the start of the process, advanced by a monotonic
        clock.
        """
        return self._base_ms + self.host.clock.now_ms()

    def _start(self) -> None:
        self.groups.start()
        self.ids.start()

    def _one_marker(self, name: str, effect: Any, epoch: int) -> None:
        if isinstance(effect, WriteMarkers):
            effect = msgspec.structs.replace(effect, partitions=effect.partitions[:1])
        self.service.carry_out(name, effect, epoch)

    # -- events ------------------------------------------------------------------------------------

    def on_metadata(self, message: Any) -> None:
        self.broker.metadata.apply(message)
        self.loop.enter(self._look)

    def on_worker_death(self, worker: int) -> None:
        self.loop.enter(self.log.on_owner_death, worker)
        self.loop.enter(self._look)

    def _look(self) -> None:
        for each in (self.groups, self.ids):
            if each._loop is not None:
                each.check_partitions()

    # -- the link to workers -----------------------------------------------------------------------

    def send_batch(
        self, owner: int, token: int, slot: int, batch: bytes, flags: int, leader_epoch: int, owner_generation: int
    ) -> None:
        worker, key = self.host.workers[owner], self.broker.key_of(slot)
        if worker is None or worker.generation != owner_generation or key is None:
            self.kernel.after(20, self.process, self._produced, token, NOT_LEADER, -1)
            return
        self.kernel.after(
            20,
            worker.process,
            worker.on_batch,
            key,
            batch,
            flags,
            leader_epoch,
            (self.host.node, self.process, self._produced, token),
        )

    def _produced(self, token: int, error: int, offset: int) -> None:
        self.loop.enter(self.log.on_produced, token, error, offset)

    def check(
        self, worker: ClusterWorker, transactional_id: str, version: int, data: bytes
    ) -> Callable[[Any, Callable[[int], None]], None]:
        """A worker of this host asks before it begins a transaction."""
        info, name = parsed(data).info, transactional_id.encode()

        def request(partition: tuple[bytes, int], take: Callable[[int], None]) -> None:
            acceptor = self.host.acceptor
            if acceptor is not None and acceptor.transactions is not None:
                payload = (
                    _CHECK.pack(info.producer_id, info.producer_epoch, version, -1, len(name), 1, 1_000)
                    + _CHECK_PARTITION.pack(*partition, 0)
                    + name
                )
                self.kernel.after(20, acceptor.process, acceptor.transactions.on_check, payload, version, worker, take)

        return request

    def on_check(self, payload: bytes, version: int, worker: ClusterWorker, take: Callable[[int], None]) -> None:
        self.loop.enter(lambda: self.loop.create_task(self._check(payload, version, worker, take)))

    async def _check(self, payload: bytes, version: int, worker: ClusterWorker, take: Callable[[int], None]) -> None:
        response = await self.checks.check_transaction(payload, version)
        error = response.error or struct.unpack("=h", response.payload)[0]
        self.kernel.after(20, worker.process, take, error)

    # -- requests ----------------------------------------------------------------------------------

    def on_request(self, request: Any, version: int, caller: Any, is_open: Callable[[], bool]) -> None:
        """From a client, whose connection may be closed by now."""
        node, process, do, token = caller

        def reply(response: object) -> None:
            if process is not None:
                self.world.network.send(self.host.node, node, process, do, token, 0, response)

        if is_open():
            self._serve(request, version, Origin(), reply)

    def on_peer(self, node_id: int, since: int, request: Any, version: int, reply: Callable[[object], None]) -> None:
        """since: the start time of the requesting acceptor."""
        if since < self._peers.get(node_id, 0) and "one connection" not in self.world.off:
            return
        self._peers[node_id] = since
        self._serve(request, version, Origin(peer_node=node_id), reply)

    def replier(self, other: Coordination, answered: Callable[[object], None]) -> Callable[[object], None]:
        return lambda response: self.world.network.send(
            self.host.node, other.host.node, other.process, answered, response
        )

    def _serve(self, request: Any, version: int, origin: Origin, reply: Callable[[object], None]) -> None:
        number, module = HANDLERS[type(request).__name__]

        async def serve() -> None:
            reply(await module.handle(Context(self.broker, origin), RequestHeader(number, version, 0), request))  # type: ignore[arg-type]

        self.loop.enter(lambda: self.loop.create_task(serve()))
