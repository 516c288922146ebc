"""This host as a broker: registers, renews its lease by heartbeats, fences itself, and forwards its
processes' requests to the active controller. Sans-I/O.

Every host has a broker core, including the active controller's host: mqd/controller delivers
messages for this host's node id to the local metadata core. When the controller process restarts,
only the values in Started (node id, directory id, incarnation, ...) and the metadata log remain.

Invariants (check())
    B1  the lease ends no later than `lease_ms` after `sent_ms` of an answered heartbeat of the current
        registration; the arrival time of the response does not matter
    B2  the broker is ready (R10) only while the committed metadata has this incarnation's registration,
        and this host's workers have applied it
    B3  the stored proposal for a partition is its worker's newest one; the worker gets at most one
        response for each leader epoch and sequence
    B4  a client's change is sent at most once; the client gets exactly one response
Bounds: CHANGES_WAITING_MAX changes in flight; further changes are refused with a retriable error. One
proposal per partition.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from mqd.cluster.broker import messages as peer
from mqd.cluster.broker.events import Action as Action
from mqd.cluster.broker.events import ChangeRequested as ChangeRequested
from mqd.cluster.broker.events import ClientGone as ClientGone
from mqd.cluster.broker.events import ControllerKnown as ControllerKnown
from mqd.cluster.broker.events import DirectoriesFull as DirectoriesFull
from mqd.cluster.broker.events import DirectoriesSeen as DirectoriesSeen
from mqd.cluster.broker.events import Event as Event
from mqd.cluster.broker.events import HostDied as HostDied
from mqd.cluster.broker.events import InSyncProposed as InSyncProposed
from mqd.cluster.broker.events import LeadershipsLost as LeadershipsLost
from mqd.cluster.broker.events import MetadataApplied as MetadataApplied
from mqd.cluster.broker.events import MetadataCommitted as MetadataCommitted
from mqd.cluster.broker.events import NotYetRegistered as NotYetRegistered
from mqd.cluster.broker.events import PartitionEmptied as PartitionEmptied
from mqd.cluster.broker.events import PeerReceived as PeerReceived
from mqd.cluster.broker.events import Refused as Refused
from mqd.cluster.broker.events import ReplicaMoved as ReplicaMoved
from mqd.cluster.broker.events import ReplicasFailed as ReplicasFailed
from mqd.cluster.broker.events import Reply as Reply
from mqd.cluster.broker.events import SendPeer as SendPeer
from mqd.cluster.broker.events import SetBroker as SetBroker
from mqd.cluster.broker.events import ShutDown as ShutDown
from mqd.cluster.broker.events import ShutdownRequested as ShutdownRequested
from mqd.cluster.broker.events import Started as Started
from mqd.cluster.broker.events import Tick as Tick
from mqd.cluster.broker.events import ToWorker as ToWorker
from mqd.cluster.broker.reports import Change, Proposal, Reports
from mqd.cluster.host import messages
from mqd.cluster.metadata.rules import brokers as broker_rules
from mqd.protocol.errors import ErrorCode

# a proposal refused with one of these errors has had no effect, and no copy of it can have one
SAFE_REFUSALS = frozenset({ErrorCode.INELIGIBLE_REPLICA, ErrorCode.OPERATION_NOT_ATTEMPTED})
INT64_MAX = (1 << 63) - 1
CHANGES_WAITING_MAX = 10_000
CHANGE_WAIT_MS_MAX = 30_000
HEARTBEATS_PER_DIRECTORY_REPORT = 10


class BrokerCore(Reports):
    """`state`: MetadataCore.committed; read-only, and always the same object."""

    def handle(self, event: Event, now_ms: int) -> list[Action]:
        """`now_ms`: CLOCK_BOOTTIME, which advances while the machine is suspended."""
        if self._ended:
            return []
        return [*_HANDLERS[type(event)](self, event, now_ms), *self._set_broker()]

    def _set_broker(self) -> list[Action]:
        """Writes changed values to the control segment. A restarted controller process leaves its
        predecessor's values there until it has newer ones.
        """
        if self.broker_epoch < 0 and self._last_set_broker is None:
            return []
        lease_until_ms = (
            0
            if self.fenced or self._dead or self.broker_epoch < 0
            else INT64_MAX
            if self._is_only_voter
            else self._lease_until_ms
        )
        set_broker = SetBroker(
            self.broker_epoch,
            self._registration.incarnation if self._registration else -1,
            lease_until_ms,
            self.ready,
            self.fenced,
        )
        if set_broker == self._last_set_broker:
            return []
        self._last_set_broker = set_broker
        return [set_broker]

    # -- registration and heartbeats ---------------------------------------------------------------

    def _on_started(self, event: Started, now_ms: int) -> list[Action]:
        self._registration, self._process_number, self._started_ms = event.registration, event.process_number, now_ms
        self._directories_to_report = tuple(event.registration.directories)
        self._inherited_lease = (event.broker_epoch, event.lease_until_ms)
        return self._register(now_ms)

    def _register(self, now_ms: int) -> list[Action]:
        if self._registration is None or self.broker_epoch >= 0 or self._controller_id < 0:
            return []
        self._register_at_ms = now_ms + self._options.register_retry_ms
        return self._to_controller(self._registration)

    def _on_controller_known(self, event: ControllerKnown, now_ms: int) -> list[Action]:
        changed = (event.node_id, event.epoch) != (self._controller_id, self._controller_epoch)
        self._controller_id, self._controller_epoch = event.node_id, event.epoch
        self._is_only_voter = event.is_only_voter
        if not changed:
            return []
        actions = self._give_up_changes()
        if self._controller_id >= 0:
            # without a report the new controller would consider all directories usable
            self._directories_to_report = (
                tuple(self._registration.directories) if self._registration is not None else None
            )
            actions += (
                self._register(now_ms)
                + self._heartbeat(now_ms)
                + self._propose([key for key, entry in self._proposals.items() if not entry.refused], now_ms)
                + self._repeat_reports(now_ms)
            )
        return actions

    def _on_register_response(self, message: peer.RegisterBrokerResponse, now_ms: int) -> list[Action]:
        if (
            self._registration is None
            or message.incarnation != self._registration.incarnation
            or self.broker_epoch >= 0
        ):
            return []
        if message.error == 0:
            self.broker_epoch, self._wait_logged = message.broker_epoch, False
            self._lease_until_ms, self._sent_ms, self._answered_ms = 0, -1, self._started_ms - 1
            if self._inherited_lease[0] == message.broker_epoch and self._inherited_lease[1] > now_ms:
                self._lease_until_ms, self.fenced = self._inherited_lease[1], False
                self.ready = True  # only a ready broker gets a lease in the control segment
            self._check_ready()
            return self._heartbeat(now_ms)
        if message.error == ErrorCode.NOT_CONTROLLER:
            return []
        if message.error == ErrorCode.DUPLICATE_BROKER_REGISTRATION:
            was_logged, self._wait_logged = self._wait_logged, True
            return [] if was_logged else [NotYetRegistered(message.message)]
        return [Refused(message.message)]

    def _heartbeat(self, now_ms: int) -> list[Action]:
        if self.broker_epoch < 0 or self._controller_id < 0 or self._dead:
            return []
        is_urgent = self._shutdown_since_ms >= 0 or self.fenced
        self._heartbeat_at_ms = now_ms + (self._options.heartbeat_ms // 10 if is_urgent else self._options.heartbeat_ms)
        self._heartbeat_count += 1
        if (
            self._registration is not None
            and self._directories_to_report is None
            and self._heartbeat_count % HEARTBEATS_PER_DIRECTORY_REPORT == 0
        ):
            self._directories_to_report = tuple(self._registration.directories)
        directories, self._directories_to_report = self._directories_to_report or (), None
        self._sent_ms = now_ms
        return self._to_controller(
            peer.Heartbeat(
                self.node_id,
                self.broker_epoch,
                now_ms,
                self.applied_version,
                self._shutdown_since_ms >= 0,
                list(directories),
            )
        )

    def _on_heartbeat_response(self, message: peer.BrokerHeartbeatResponse, now_ms: int) -> list[Action]:
        """Accepts a response only if this process sent the heartbeat in the current registration, and
        later than the last heartbeat that got a response.
        """
        if message.broker_epoch != self.broker_epoch or not self._answered_ms < message.sent_ms <= self._sent_ms:
            return []
        if message.error == ErrorCode.NOT_CONTROLLER:
            return []
        self._answered_ms = message.sent_ms
        if message.error:
            self.broker_epoch, self.fenced, self._lease_until_ms = -1, True, 0
            self._check_ready()
            return self._register(now_ms)
        self.fenced = message.fenced
        if message.fenced:
            self._lease_until_ms = 0
        elif message.lease_ms > 0:
            self._lease_until_ms = max(self._lease_until_ms, message.sent_ms + message.lease_ms)
        if message.should_shutdown:
            return self._end("all hosts know that this host no longer leads any partition")
        if self._shutdown_since_ms >= 0:
            self._heartbeat_at_ms = min(self._heartbeat_at_ms, now_ms + self._options.heartbeat_ms // 20)
        return []

    def _on_directories_seen(self, event: DirectoriesSeen, now_ms: int) -> list[Action]:
        if self._registration is not None and list(event.directories) != self._registration.directories:
            self._registration = msgspec.structs.replace(self._registration, directories=list(event.directories))
            self._directories_to_report = event.directories
            self._fail_replicas_in_unusable_directories()
            return self._repeat_reports(now_ms)
        return []

    # -- metadata ----------------------------------------------------------------------------------

    def _on_metadata_applied(self, event: MetadataApplied, now_ms: int) -> list[Action]:
        self._applied = max(self._applied, event.version)
        return self._after_progress(now_ms)

    def _on_metadata_committed(self, event: MetadataCommitted, now_ms: int) -> list[Action]:
        self._committed, self._known_version = (
            max(self._committed, event.version),
            max(self._known_version, event.known_version),
        )
        self._prune()
        self._fail_replicas_in_unusable_directories()
        return self._after_progress(now_ms)

    def _after_progress(self, now_ms: int) -> list[Action]:
        actions: list[Action] = []
        was_ready = self.ready
        self._check_ready()
        broker = self._state.brokers.get(self.node_id)
        # the metadata already shows this host as unfenced: the response to the next heartbeat will have a lease
        will_be_unfenced = (
            self.fenced and broker is not None and broker.epoch == self.broker_epoch and not broker.fenced
        )
        if (self.ready and not was_ready) or will_be_unfenced or self._shutdown_since_ms >= 0:
            actions += self._heartbeat(now_ms)  # the controller waits for this heartbeat
        for number, change in list(self._changes.items()):
            if change.waiting_response is not None and change.waiting_response.version <= self.applied_version:
                actions += self._finish_change(number, change.waiting_response)
        return actions

    def _check_ready(self) -> None:
        """R10. Once ready, the host stays ready for this registration."""
        broker, registration = self._state.brokers.get(self.node_id), self._registration
        is_registered = (
            broker is not None
            and registration is not None
            and self.broker_epoch >= 0
            and broker.epoch == self.broker_epoch
            and (broker.incarnation, broker.directory_id) == (registration.incarnation, registration.directory_id)
        )
        self.ready = is_registered and (
            self.ready or broker_rules.has_applied_registration(self.applied_version, self.broker_epoch)
        )

    # -- in-sync sets ------------------------------------------------------------------------------

    def _on_in_sync_proposed(self, event: InSyncProposed, now_ms: int) -> list[Action]:
        key = (event.proposal.topic_id, event.proposal.index)
        pending = self._proposals.get(key)
        if pending is not None and pending.proposal == event.proposal:
            pending.client = event.client  # repeated after a reconnection
            if pending.refused:
                return []
            pending.sent_epoch = -1
        else:
            self._proposals[key] = Proposal(event.client, event.proposal)
        return [] if self._proposing else self._propose_new(now_ms)

    def _propose_new(self, now_ms: int) -> list[Action]:
        """Sends all new proposals in one message. While a message is in flight, callers let proposals wait
        for the next one, so that ten thousand simultaneous changes take only a few messages and a few
        batches of the log.
        """
        return self._propose([key for key, entry in self._proposals.items() if entry.sent_epoch < 0], now_ms)

    def _propose(self, keys: list[tuple[bytes, int]], now_ms: int) -> list[Action]:
        if not keys or self.broker_epoch < 0 or self._controller_id < 0:
            return []
        self._proposing = True
        proposals = []
        for key in keys:
            entry = self._proposals[key]
            entry.sent_epoch, entry.sent_ms = self._controller_epoch, now_ms
            proposal = entry.proposal
            proposals.append(
                peer.InSyncProposal(
                    proposal.topic_id,
                    proposal.index,
                    proposal.leader_epoch,
                    proposal.partition_epoch,
                    proposal.sequence,
                    list(proposal.in_sync),
                    proposal.recovered,
                )
            )
        return self._to_controller(
            peer.AlterPartition(self._controller_epoch, self.node_id, self.broker_epoch, proposals)
        )

    def _on_alter_partition_response(self, message: peer.AlterPartitionResponse, now_ms: int) -> list[Action]:
        """A success is accepted from any controller. A refusal is accepted only from the controller to
        which the newest copy was sent: another controller may still apply that copy (R6b).

        A refusal because the partition has changed (its epochs, its leader) does not show that an
        earlier copy had no effect: that copy may have caused the change, under a controller that ended
        before it responded. The worker gets no response, keeps the union of both sets, and learns the
        outcome from the metadata.
        """
        if message.error:
            return []  # sent again once this broker is registered, or the new controller is known
        actions: list[Action] = []
        self._proposing = False
        for result in message.results:
            key = (result.topic_id, result.index)
            entry = self._proposals.get(key)
            if (
                entry is None
                or (entry.proposal.leader_epoch, entry.proposal.sequence) != (result.proposed_in, result.sequence)
                or message.broker_epoch != self.broker_epoch
            ):
                continue
            if result.error == ErrorCode.NOT_CONTROLLER or (
                result.error and message.controller_epoch != entry.sent_epoch
            ):
                continue
            if result.error and result.error not in SAFE_REFUSALS:
                entry.refused = True
                continue
            del self._proposals[key]
            actions.append(
                ToWorker(
                    entry.client,
                    messages.InSyncResponse(
                        result.topic_id, result.index, entry.proposal.leader_epoch, result.sequence, result.error
                    ),
                )
            )
        return actions + self._propose_new(now_ms)

    # -- changes -----------------------------------------------------------------------------------

    def _on_change_requested(self, event: ChangeRequested, now_ms: int) -> list[Action]:
        def refuse(error: int, text: str) -> list[Action]:
            return [Reply(event.client, messages.Response(event.request.request_id, int(error), text))]

        if self._controller_id < 0 or self.broker_epoch < 0:
            return refuse(ErrorCode.NOT_CONTROLLER, "No active controller is known; try again.")
        if len(self._changes) >= CHANGES_WAITING_MAX:
            return refuse(ErrorCode.REQUEST_TIMED_OUT, "Too many changes are in progress; try again.")
        self._change_number += 1
        self._changes[self._change_number] = Change(event.client, event.request, now_ms)
        return self._to_controller(
            peer.ChangeForwarded(
                self.node_id, self.broker_epoch, self._change_number, self._process_number, event.request
            )
        )

    def _on_change_response(self, message: peer.ChangeResponse, now_ms: int) -> list[Action]:
        change = self._changes.get(message.request_id)
        if change is None or message.incarnation != self._process_number or change.waiting_response is not None:
            return []
        if message.response.error == 0 and message.version > self.applied_version and not change.request.validate_only:
            change.waiting_response = message
            return []
        return self._finish_change(message.request_id, message)

    def _finish_change(self, number: int, message: peer.ChangeResponse) -> list[Action]:
        change = self._changes.pop(number)
        response = msgspec.structs.replace(message.response, request_id=change.request.request_id)
        return [Reply(change.client, response, message.topic_name)]

    def _give_up_changes(self) -> list[Action]:
        """Gives up the changes in flight when the active controller changes: they get no response, and it is
        not known whether they were made.
        """
        lost = [number for number, change in self._changes.items() if change.waiting_response is None]
        text = "The active controller has changed; whether the change was made is not known."
        return [self._give_up_change(number, ErrorCode.NOT_CONTROLLER, text) for number in lost]

    def _give_up_change(self, number: int, error: int, text: str) -> Reply:
        change = self._changes.pop(number)
        return Reply(change.client, messages.Response(change.request.request_id, int(error), text))

    def _on_client_gone(self, event: ClientGone, now_ms: int) -> list[Action]:
        self._changes = {number: change for number, change in self._changes.items() if change.client != event.client}
        self._proposals = {key: entry for key, entry in self._proposals.items() if entry.client != event.client}
        return []

    # -- ending ------------------------------------------------------------------------------------

    def _on_host_died(self, event: HostDied, now_ms: int) -> list[Action]:
        self._dead = event.dead
        if event.dead:
            self.fenced, self._lease_until_ms = True, 0
            # after the proof, the response to a registration must not restore this lease
            self._inherited_lease = (-1, 0)
            # responses to heartbeats sent before the proof must not grant a lease
            self._answered_ms = self._sent_ms
            return self._repeat_reports(now_ms)
        return self._heartbeat(now_ms)

    def _on_shutdown_requested(self, event: ShutdownRequested, now_ms: int) -> list[Action]:
        if self._shutdown_since_ms >= 0:
            return []
        self._shutdown_since_ms = now_ms
        return self._heartbeat(now_ms) if self.broker_epoch >= 0 else self._end("this broker is not registered")

    def _end(self, reason: str) -> list[Action]:
        """Ends this broker. The last actions withdraw the lease in the control segment and shut down."""
        epoch = self.broker_epoch
        self.fenced, self.ready, self._lease_until_ms = True, False, 0
        withdrawal = self._set_broker()
        self._ended = True
        return [*withdrawal, ShutDown(epoch, reason)]

    def _on_tick(self, event: Tick, now_ms: int) -> list[Action]:
        actions: list[Action] = []
        if (
            self._shutdown_since_ms >= 0
            and now_ms - self._shutdown_since_ms >= self._options.shutdown_wait_ms + self._options.session_ms
        ):
            return self._end("no controller has agreed in time; the other hosts wait until this broker's session ends")
        if self.broker_epoch < 0 and now_ms >= self._register_at_ms:
            actions += self._register(now_ms)
        elif now_ms >= self._heartbeat_at_ms:
            actions += self._heartbeat(now_ms)
        due = [
            key
            for key, entry in self._proposals.items()
            if not entry.refused and (entry.sent_epoch < 0 or now_ms - entry.sent_ms >= self._options.heartbeat_ms // 2)
        ]
        actions += self._propose(due, now_ms)
        if now_ms >= self._repeat_at_ms:
            actions += self._repeat_reports(now_ms)
        expired = [number for number, change in self._changes.items() if now_ms - change.since_ms >= CHANGE_WAIT_MS_MAX]
        text = (
            f"The change was not answered, or not applied on this host, within {CHANGE_WAIT_MS_MAX // 1000} s; it may"
            " still take effect."
        )
        return actions + [self._give_up_change(number, ErrorCode.REQUEST_TIMED_OUT, text) for number in expired]

    def _on_peer_received(self, event: PeerReceived, now_ms: int) -> list[Action]:
        message = event.message
        if message.node_id != self.node_id:
            return []
        match message:
            case peer.RegisterBrokerResponse():
                return self._on_register_response(message, now_ms)
            case peer.BrokerHeartbeatResponse():
                return self._on_heartbeat_response(message, now_ms)
            case peer.AlterPartitionResponse():
                return self._on_alter_partition_response(message, now_ms)
            case peer.ChangeResponse():
                return self._on_change_response(message, now_ms)
        return []

    # -- invariants --------------------------------------------------------------------------------

    def check(self) -> None:
        assert (
            self._lease_until_ms in (0, self._inherited_lease[1])
            or self._lease_until_ms <= self._answered_ms + self._options.session_ms
        ), "B1"
        self._check_registered()
        assert all(key == (entry.proposal.topic_id, entry.proposal.index) for key, entry in self._proposals.items()), (
            "B3"
        )
        assert len(self._changes) <= CHANGES_WAITING_MAX, "B4"
        assert not (self.fenced and self._lease_until_ms), "B1"

    def _check_registered(self) -> None:
        if self.ready:
            broker = self._state.brokers.get(self.node_id)
            assert self.broker_epoch >= 0 and broker is not None and broker.epoch >= self.broker_epoch, "B2"


_HANDLERS: dict[type, Callable[[BrokerCore, Any, int], list[Action]]] = {
    Started: BrokerCore._on_started,
    ControllerKnown: BrokerCore._on_controller_known,
    PeerReceived: BrokerCore._on_peer_received,
    MetadataApplied: BrokerCore._on_metadata_applied,
    MetadataCommitted: BrokerCore._on_metadata_committed,
    InSyncProposed: BrokerCore._on_in_sync_proposed,
    ChangeRequested: BrokerCore._on_change_requested,
    ClientGone: BrokerCore._on_client_gone,
    LeadershipsLost: BrokerCore._on_leaderships_lost,
    ReplicaMoved: BrokerCore._on_replica_moved,
    ReplicasFailed: BrokerCore._on_replicas_failed,
    DirectoriesFull: BrokerCore._on_directories_full,
    PartitionEmptied: BrokerCore._on_partition_emptied,
    DirectoriesSeen: BrokerCore._on_directories_seen,
    HostDied: BrokerCore._on_host_died,
    ShutdownRequested: BrokerCore._on_shutdown_requested,
    Tick: BrokerCore._on_tick,
}
