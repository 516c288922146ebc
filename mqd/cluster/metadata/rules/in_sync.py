"""AlterPartition (KIP-497, KIP-903): a leader proposes a new in-sync set; proposals are applied at most
once and in order (rules R6, R6b, R7).

A proposal has the leader's broker epoch, the partition's epochs, and the broker epochs with which
the members fetched. If one of them differs from the metadata, the proposal is refused. A decision is
final: a copy of the proposal that arrives later has a sequence that was already handled. It gets the
same response, or, after a newer proposal, OPERATION_NOT_ATTEMPTED.

Handled proposals are remembered for one controller epoch only: a proposal is addressed to one
controller epoch, and refused in any other.
"""

from typing import NamedTuple

import msgspec

from mqd.cluster.broker.messages import InSyncProposal, InSyncResult
from mqd.cluster.metadata.records import BrokerState, PartitionChange, PartitionState, TopicState
from mqd.cluster.metadata.rules.partitions import Target
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.metadata.view import View
from mqd.protocol.errors import ErrorCode


class HandledProposal(NamedTuple):
    """A partition's newest decided proposal."""

    broker_epoch: int
    leader_epoch: int
    sequence: int
    result: InSyncResult
    version: int  # version of the state on which the decision is based


class Proposals:
    """The handled proposals (R6b), at most one per partition."""

    def __init__(self) -> None:
        self._handled: dict[tuple[bytes, int], HandledProposal] = {}

    def decide(
        self, view: View, node_id: int, broker_epoch: int, proposal: InSyncProposal
    ) -> tuple[InSyncResult, tuple[TopicState, PartitionChange] | None]:
        """Returns the result, to be sent once the change and the state that it depends on are committed,
        and the change or None.
        """
        key = (proposal.topic_id, proposal.index)
        handled = self._handled.get(key)
        if handled is not None and _is_comparable(handled, broker_epoch, proposal):
            if proposal.sequence < handled.sequence:
                return _result(proposal, ErrorCode.OPERATION_NOT_ATTEMPTED), None
            if proposal.sequence == handled.sequence:
                return handled.result, None
        topic_and_partition = view.partition(proposal.topic_id, proposal.index)
        if topic_and_partition is None:
            return (
                _result(
                    proposal,
                    (
                        ErrorCode.UNKNOWN_TOPIC_ID
                        if proposal.topic_id not in view.state.topics_by_id
                        else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                    ),
                ),
                None,
            )
        topic, partition = topic_and_partition
        error = _refusal_error(view, node_id, broker_epoch, partition, proposal)
        change = None
        if error == 0:
            target = Target(partition)
            members = {node for node, _ in proposal.in_sync}
            target.in_sync = tuple(node for node in partition.replicas if node in members)
            target.recovering = partition.recovering and not proposal.recovered
            change = view.change_to(topic, target)
            if change is None:
                # the proposal equals the current state, so no newer state will be announced
                error = ErrorCode.OPERATION_NOT_ATTEMPTED
        result = _result_after(proposal, error, partition, change)
        # leader epoch first: the leader of a later epoch may have a lower broker epoch
        if handled is None or (handled.leader_epoch, handled.broker_epoch) <= (proposal.leader_epoch, broker_epoch):
            self._handled[key] = HandledProposal(
                broker_epoch, proposal.leader_epoch, proposal.sequence, result, view.state.version
            )
        return result, None if change is None else (topic, change)

    def prune(self, state: MetadataState) -> None:
        """Drops entries of deleted topics, once there are many entries."""
        if len(self._handled) > 2 * state.partition_count + 1000:
            self._handled = {key: handled for key, handled in self._handled.items() if key[0] in state.topics_by_id}

    def on_persist_failed(self, version: int) -> None:
        """The records from offset `version` will never be in a log: replaces the results that depend on them
        with refusals, which are sent if the proposals are repeated.
        """
        for key, handled in list(self._handled.items()):
            if handled.version >= version:
                result = msgspec.structs.replace(
                    handled.result,
                    error=int(ErrorCode.OPERATION_NOT_ATTEMPTED),
                    leader=-1,
                    leader_epoch=-1,
                    partition_epoch=-1,
                    in_sync_replicas=[],
                )
                self._handled[key] = handled._replace(result=result)


def _is_comparable(handled: HandledProposal, broker_epoch: int, proposal: InSyncProposal) -> bool:
    """R6b: whether both sequences are from the same leader in the same epochs."""
    return (handled.broker_epoch, handled.leader_epoch) == (broker_epoch, proposal.leader_epoch)


def _stale_error(
    broker: BrokerState | None, node_id: int, broker_epoch: int, partition: PartitionState, proposal: InSyncProposal
) -> int:
    """R6: the error if the proposal was made in a state other than the current one; 0 = none."""
    if broker is None or broker.epoch != broker_epoch:
        return ErrorCode.STALE_BROKER_EPOCH
    if proposal.leader_epoch < partition.leader_epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    # The leader has seen a later state than this controller knows, so this controller is stale.
    if proposal.leader_epoch > partition.leader_epoch:
        return ErrorCode.NOT_CONTROLLER
    if partition.leader != node_id:
        return ErrorCode.NOT_LEADER_OR_FOLLOWER
    if proposal.partition_epoch != partition.partition_epoch:
        return ErrorCode.INVALID_UPDATE_VERSION
    return 0


def _has_not_restarted(member: BrokerState, epoch: int) -> bool:
    """KIP-903: whether the member has not restarted since the fetches that the leader counted."""
    return member.epoch == epoch


def _refusal_error(
    view: View, node_id: int, broker_epoch: int, partition: PartitionState, proposal: InSyncProposal
) -> int:
    broker = view.state.brokers.get(node_id)
    members = [node for node, _ in proposal.in_sync]
    if (
        not members
        or len(set(members)) != len(members)
        or not set(members) <= set(partition.replicas)
        or node_id not in members
    ):
        return ErrorCode.INVALID_REQUEST
    error = _stale_error(broker, node_id, broker_epoch, partition, proposal)
    if error != 0:
        return error
    for node, epoch in proposal.in_sync:
        member = view.state.brokers.get(node)
        if (
            member is None
            or not view.is_unfenced(node)
            or (node not in partition.in_sync_replicas and not view.may_lead(node))
        ):
            return ErrorCode.INELIGIBLE_REPLICA
        if not _has_not_restarted(member, epoch):
            return ErrorCode.INELIGIBLE_REPLICA
    return 0


def _result(proposal: InSyncProposal, error: int) -> InSyncResult:
    return InSyncResult(
        proposal.topic_id, proposal.index, proposal.sequence, int(error), proposed_in=proposal.leader_epoch
    )


def _result_after(
    proposal: InSyncProposal, error: int, partition: PartitionState, change: PartitionChange | None
) -> InSyncResult:
    def new_or_old(new, before):
        return before if new is None else new

    return InSyncResult(
        topic_id=proposal.topic_id,
        index=proposal.index,
        sequence=proposal.sequence,
        error=int(error),
        leader=partition.leader if change is None else new_or_old(change.leader, partition.leader),
        leader_epoch=partition.leader_epoch + (change is not None and change.raises_leader_epoch),
        partition_epoch=partition.partition_epoch + (change is not None),
        in_sync_replicas=list(
            partition.in_sync_replicas
            if change is None
            else new_or_old(change.in_sync_replicas, partition.in_sync_replicas)
        ),
        proposed_in=proposal.leader_epoch,
    )
