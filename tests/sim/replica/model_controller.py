"""The controller of the small world: atomic, never fails, reached through lossy links; and the
broker's side of it. The rules (R6, R6b, R8-R10, R13) in their shortest form.

It replaces quorum and metadata cores where only partitions are tested, and the checkers are proven
here: each rule named in `off` is broken on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.sim.history import PartitionView
from tests.sim.kernel import MILLISECOND, Kernel, Network, Process
from tests.sim.replica.partition_replica import (
    FENCED_EPOCH,
    INELIGIBLE,
    INVALID_VERSION,
    NOT_ATTEMPTED,
    Assignment,
    Member,
    Proposal,
)


class Broker(NamedTuple):
    epoch: int
    incarnation: int
    directory: int
    fenced: bool


class Part(NamedTuple):
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    eligible: tuple[int, ...]
    last_known: tuple[int, ...]
    leader: int
    leader_epoch: int
    partition_epoch: int


class Metadata(NamedTuple):
    version: int
    parts: dict[Any, Part]  # replaced, never modified
    brokers: dict[int, Broker]


class ModelController:
    def __init__(
        self,
        kernel: Kernel,
        node: int,
        parts: dict[Any, tuple[int, ...]],
        min_in_sync: int,
        off: frozenset[str],
        flush_on_ack: bool,
        session: int,
        chosen: Callable[[Any, int], None],
    ) -> None:
        self.kernel = kernel
        self.node = node
        self.process = Process("controller")
        self.min_in_sync = min_in_sync
        self.off = off
        self.flush_on_ack = flush_on_ack
        self.session = session
        self._chosen = chosen
        self.metadata = Metadata(
            0, {partition: Part(replicas, (), (), (), -1, 0, 0) for partition, replicas in parts.items()}, {}
        )
        self.fresh: set[Any] = set(parts)  # never had a leader: any replica will do
        self._received: dict[int, int] = {}
        # partition -> (leader epoch, broker epoch), sequence, response
        self._handled: dict[Any, tuple[tuple[int, int], int, tuple[int, int], int]] = {}
        kernel.after(100 * MILLISECOND, self.process, self._tick)

    # -- state -------------------------------------------------------------------------------------

    def view(self, partition: Any) -> PartitionView:
        part = self.metadata.parts[partition]
        return PartitionView(
            part.leader,
            part.leader_epoch,
            part.partition_epoch,
            part.replicas,
            part.in_sync,
            part.eligible,
            self.min_in_sync,
        )

    def _commit(self, parts: dict[Any, Part], brokers: dict[int, Broker]) -> None:
        old = self.metadata
        if not parts and not brokers:
            return
        self.metadata = Metadata(old.version + 1, {**old.parts, **parts}, {**old.brokers, **brokers})
        for partition, part in parts.items():
            if part.leader_epoch != old.parts[partition].leader_epoch:
                self._chosen(partition, part.leader_epoch)

    def _unfenced(self, node: int) -> bool:
        broker = self.metadata.brokers.get(node)
        return broker is not None and not broker.fenced

    def _elected(self, partition: Any, part: Part, able: Callable[[int], bool]) -> Part:
        """R8: with another leader, or unchanged."""
        in_sync, eligible = part.in_sync, part.eligible
        leader = next((node for node in part.replicas if node in in_sync and able(node)), -1)
        if leader < 0 and not in_sync:
            leader = next((node for node in part.replicas if node in eligible and able(node)), -1)
            if leader < 0 and (partition in self.fresh or "R13" in self.off):
                leader = next((node for node in part.replicas if able(node)), -1)
            if leader >= 0:
                in_sync, eligible = (leader,), tuple(node for node in eligible if node != leader)
        if leader >= 0:
            self.fresh.discard(partition)
        if leader == part.leader and in_sync == part.in_sync:
            return part
        return part._replace(
            leader=leader,
            in_sync=in_sync,
            eligible=eligible,
            leader_epoch=part.leader_epoch + 1,
            partition_epoch=part.partition_epoch + 1,
        )

    # -- sessions ----------------------------------------------------------------------------------

    def _tick(self) -> None:
        for node, broker in list(self.metadata.brokers.items()):
            if not broker.fenced and self.kernel.now - self._received[node] > self.session:
                self.fence(node)
        self.kernel.after(100 * MILLISECOND, self.process, self._tick)

    def fence(self, node: int) -> None:
        """R8."""
        broker = self.metadata.brokers[node]
        parts = {}
        for partition, part in self.metadata.parts.items():
            if node not in part.in_sync and part.leader != node:
                continue
            in_sync = tuple(each for each in part.in_sync if each != node)
            eligible = part.eligible
            if not in_sync and "R8" in self.off:
                in_sync = part.in_sync  # the last one stays in the set, whatever it loses
            elif len(in_sync) < self.min_in_sync and node not in eligible:
                eligible += (node,)
            changed = part._replace(in_sync=in_sync, eligible=eligible)
            if part.leader == node:
                changed = self._elected(
                    partition, changed._replace(leader=-2), lambda each: each != node and self._unfenced(each)
                )
            else:
                changed = changed._replace(partition_epoch=part.partition_epoch + 1)
            parts[partition] = changed
        self._commit(parts, {node: broker._replace(fenced=True)})

    def on_register(
        self, node: int, incarnation: int, directory: int, clean_epoch: int, proven: bool, respond: Callable[..., None]
    ) -> None:
        old = self.metadata.brokers.get(node)
        if old is not None and incarnation < old.incarnation:
            return  # late: its successor is registered already
        if old is not None and old.incarnation != incarnation:
            if not old.fenced:
                if not proven:
                    return
                self.fence(node)
            unclean = directory != old.directory or (clean_epoch != old.epoch and not self.flush_on_ack)
            if unclean and "R9" not in self.off:
                self._exclude(node)
        if old is None or old.incarnation != incarnation:
            self._commit({}, {node: Broker(self.metadata.version + 1, incarnation, directory, True)})
        self._received[node] = self.kernel.now
        respond(self.metadata.brokers[node].epoch)

    def _exclude(self, node: int) -> None:
        """R9: it returned without its page cache."""
        parts = {}
        for partition, part in self.metadata.parts.items():
            if node in part.eligible or node in part.in_sync:
                parts[partition] = part._replace(
                    eligible=tuple(each for each in part.eligible if each != node),
                    in_sync=(
                        tuple(each for each in part.in_sync if each != node) if "R8" not in self.off else part.in_sync
                    ),
                    last_known=(*part.last_known, node),
                    partition_epoch=part.partition_epoch + 1,
                )
        self._commit(parts, {})

    def on_heartbeat(self, node: int, epoch: int, version: int, respond: Callable[..., None]) -> None:
        broker = self.metadata.brokers.get(node)
        if broker is None or broker.epoch != epoch:
            return
        self._received[node] = self.kernel.now
        if broker.fenced and version >= broker.epoch:
            self._commit({}, {node: broker._replace(fenced=False)})
            self._commit(
                {
                    partition: changed
                    for partition, part in self.metadata.parts.items()
                    if part.leader < 0 and (changed := self._elected(partition, part, self._unfenced)) is not part
                },
                {},
            )
        respond(not self.metadata.brokers[node].fenced, self.metadata if self.metadata.version > version else None)

    # -- in-sync sets ------------------------------------------------------------------------------

    def on_alter_partition(self, node: int, partition: Any, proposal: Proposal, respond: Callable[..., None]) -> None:
        """R6b around R6."""
        key, sequence = (proposal.leader_epoch, proposal.broker_epoch), proposal.sequence
        known = self._handled.get(partition)
        if "R6b" not in self.off and known is not None:
            if known[0] > key:
                # it may have been accepted: not a final refusal
                return respond(sequence, proposal.leader_epoch, FENCED_EPOCH)
            if known[0] == key and known[1] > sequence:
                return respond(sequence, proposal.leader_epoch, NOT_ATTEMPTED)
            if known[0] == key and known[1] == sequence:
                return respond(*known[2], known[3])
        error = self._alter(node, partition, proposal)
        self._handled[partition] = (key, sequence, (sequence, proposal.leader_epoch), error)
        respond(sequence, proposal.leader_epoch, error)

    def _alter(self, node: int, partition: Any, proposal: Proposal) -> int:
        part, brokers = self.metadata.parts[partition], self.metadata.brokers
        leader = brokers.get(node)
        if "R6" not in self.off:
            if (
                part.leader != node
                or part.leader_epoch != proposal.leader_epoch
                or part.partition_epoch != proposal.partition_epoch
                or leader is None
                or leader.epoch != proposal.broker_epoch
            ):
                return INVALID_VERSION
        nodes = [each for each, _ in proposal.in_sync]
        if not set(nodes) <= set(part.replicas) or node not in nodes:
            return INELIGIBLE
        for each, epoch in proposal.in_sync:
            if not self._unfenced(each) or ("903" not in self.off and brokers[each].epoch != epoch):
                return INELIGIBLE
        in_sync = tuple(each for each in part.replicas if each in nodes)
        eligible = (
            ()
            if len(in_sync) >= self.min_in_sync
            else tuple(dict.fromkeys([each for each in part.eligible + part.in_sync if each not in in_sync]))
        )
        last_known = () if len(in_sync) >= self.min_in_sync else part.last_known
        leads = part.leader if part.leader in in_sync or "R6" not in self.off else node
        self._commit(
            {
                partition: part._replace(
                    in_sync=in_sync,
                    eligible=eligible,
                    last_known=last_known,
                    leader=leads,
                    partition_epoch=part.partition_epoch + 1,
                )
            },
            {},
        )
        return 0

    def move_leader(self, partition: Any, target: int) -> None:
        part = self.metadata.parts[partition]
        if target in part.in_sync and self._unfenced(target) and target != part.leader >= 0:
            self._commit(
                {
                    partition: part._replace(
                        leader=target, leader_epoch=part.leader_epoch + 1, partition_epoch=part.partition_epoch + 1
                    )
                },
                {},
            )

    def new_epochs(self, node: int, dead: dict[Any, int]) -> None:
        """A worker of that host died (as its keeper reports): the partitions it led, in these
        leader epochs, need new ones.
        """
        parts = {}
        for partition, epoch in dead.items():
            part = self.metadata.parts[partition]
            if part.leader == node and part.leader_epoch == epoch:
                parts[partition] = part._replace(leader_epoch=epoch + 1, partition_epoch=part.partition_epoch + 1)
        self._commit(parts, {})


class ModelBroker:
    """The controller process of a host, as the counterpart of ModelController."""

    def __init__(
        self,
        host: Any,
        controller: ModelController,
        network: Network,
        heartbeat: int,
        session: int,
        off: frozenset[str],
    ) -> None:
        self.host = host
        self.kernel: Kernel = host.kernel
        self.controller = controller
        self.network = network
        self.process = Process(f"broker {host.node}")
        self.off = off
        self.heartbeat = heartbeat
        self.session_ns = int(session * 1_000 * 0.9)
        self.epoch = -1
        self.metadata: Metadata = host.metadata
        if "R10" in off:
            self._apply(everything=True)
        self._turn()

    def _turn(self) -> None:
        host, controller = self.host, self.controller
        if self.epoch < 0:
            self._call(
                controller.on_register,
                self._on_registered,
                host.node,
                host.incarnation,
                host.directory,
                host.clean_epoch,
                True,
            )
        else:
            self._call(
                controller.on_heartbeat,
                self._on_heartbeat,
                host.node,
                self.epoch,
                self.metadata.version,
                stamp=host.clock_ns(),
            )
            dead = {
                partition: epoch
                for partition, epoch in host.dead_epochs.items()
                if self.metadata.parts[partition].leader_epoch == epoch
            }
            if dead:  # until it is visible
                self._call(controller.new_epochs, lambda: None, host.node, dead, reply=False)
        self.kernel.after(self.heartbeat, self.process, self._turn)

    def _call(
        self,
        method: Callable[..., None],
        then: Callable[..., None],
        *arguments: Any,
        stamp: int | None = None,
        reply: bool = True,
    ) -> None:
        def answer(*what: Any) -> None:
            self.network.send(
                self.controller.node, self.host.node, self.process, then, *(what if stamp is None else (stamp, *what))
            )

        arguments = (*arguments, answer) if reply else arguments
        self.network.send(self.host.node, self.controller.node, self.controller.process, method, *arguments)

    def _on_registered(self, epoch: int) -> None:
        if self.epoch < 0:
            self.epoch = epoch
            self.host.broker_epoch = epoch
            self.kernel.after(0, self.process, self._beat)

    def _beat(self) -> None:
        self._call(
            self.controller.on_heartbeat,
            self._on_heartbeat,
            self.host.node,
            self.epoch,
            self.metadata.version,
            stamp=self.host.clock_ns(),
        )

    def _on_heartbeat(self, stamp: int, unfenced: bool, metadata: Metadata | None) -> None:
        host = self.host
        if unfenced:
            host.lease_deadline_ns = max(host.lease_deadline_ns, stamp + self.session_ns)
        if metadata is not None and metadata.version > self.metadata.version:
            self.metadata = metadata
            self._apply()
            self._beat()

    def _apply(self, everything: bool = False) -> None:
        host, metadata = self.host, self.metadata
        host.on_metadata(metadata)
        if not everything and metadata.version < self.epoch:
            return  # R10
        worker = host.worker
        if worker is None:
            return
        for partition in metadata.parts:
            given = self.assignment(partition)
            if given is not None:
                host.network.send(host.node, host.node, worker.process, worker.assign, partition, given)

    def assignment(self, partition: Any) -> Assignment | None:
        metadata, node = self.metadata, self.host.node
        part = metadata.parts[partition]
        if node not in part.replicas:
            return None
        own = metadata.brokers.get(node)
        epoch = self.epoch if self.epoch >= 0 else (own.epoch if own is not None else -1)
        members = []
        for each in part.replicas:
            broker = metadata.brokers.get(each)
            members.append(
                Member(
                    each,
                    each in part.in_sync,
                    broker is not None and not broker.fenced,
                    broker.epoch if broker is not None else -1,
                )
            )
        return Assignment(
            node,
            epoch,
            part.leader,
            part.leader_epoch,
            part.partition_epoch,
            self.controller.min_in_sync,
            tuple(members),
        )

    def propose(self, worker: Any, partition: Any, proposal: Proposal) -> None:
        def answer(*what: Any) -> None:
            self.network.send(
                self.controller.node, self.host.node, worker.process, worker.on_answered, partition, *what
            )

        self.network.send(
            self.host.node,
            self.controller.node,
            self.controller.process,
            self.controller.on_alter_partition,
            self.host.node,
            partition,
            proposal,
            answer,
        )
