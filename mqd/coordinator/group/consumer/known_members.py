"""Finds the member that sent a heartbeat, and checks whether it was allowed to send it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from mqd.coordinator.group.consumer import requests
from mqd.coordinator.group.consumer.events import ConsumerHeartbeat
from mqd.coordinator.group.consumer.members import LEFT_STATIC_EPOCH, Member
from mqd.coordinator.group.consumer.requests import Refused
from mqd.coordinator.group.sets import contains
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import ConsumerGroupHeartbeatRequest


class Group(Protocol):
    """The part of core.ConsumerGroup that is needed here; that module imports this one."""

    group_id: str

    @property
    def members(self) -> Mapping[str, Member]: ...

    @property
    def static_member_ids(self) -> Mapping[str, str]: ...

    def check_capacity(self) -> None: ...


def find_sender(group: Group, event: ConsumerHeartbeat) -> Member | None:
    """The member that sent the heartbeat, or None if it must be created. Changes nothing. Raises
    Refused.
    """
    message = event.message
    is_join = message.member_epoch == 0
    if message.instance_id is not None:
        return _find_static(group, message)
    member = group.members.get(message.member_id)
    if member is None:
        if not is_join:
            raise Refused(
                ErrorCode.UNKNOWN_MEMBER_ID, f"Member {message.member_id} is not a member of group {group.group_id}."
            )
        group.check_capacity()
        return None
    _check_epoch(member, message)
    return member


def _find_static(group: Group, message: ConsumerGroupHeartbeatRequest) -> Member | None:
    owner_id = group.static_member_ids.get(message.instance_id) if message.instance_id is not None else None
    if message.member_epoch == 0:
        if owner_id is None:
            known = group.members.get(message.member_id)
            if known is None:
                group.check_capacity()
            return known
        if owner_id != message.member_id and (
            message.member_id in group.members or not _is_released(group.members[owner_id])
        ):
            raise Refused(
                ErrorCode.UNRELEASED_INSTANCE_ID,
                f"Static member {message.member_id} with instance id {message.instance_id} cannot join: member"
                f" {owner_id} still has it.",
            )
        return group.members[owner_id]
    if owner_id is None:
        raise Refused(ErrorCode.UNKNOWN_MEMBER_ID, f"Instance id {message.instance_id} is unknown.")
    if owner_id != message.member_id:
        raise Refused(
            ErrorCode.FENCED_INSTANCE_ID,
            f"Static member {message.member_id} with instance id {message.instance_id} was fenced by member"
            f" {owner_id}.",
        )
    _check_epoch(group.members[owner_id], message)
    return group.members[owner_id]


def _is_released(member: Member) -> bool:
    """Whether another client may take the member's place. A static member of the classic protocol
    stops without notice, and may come back under the other protocol (KIP-848, online migration).
    """
    return member.is_classic or member.epoch == LEFT_STATIC_EPOCH


def _check_epoch(member: Member, message: ConsumerGroupHeartbeatRequest) -> None:
    """Accepts the member's epoch, and the previous one if the member has missed the new one and
    reports only partitions that are assigned to it. Also accepts 0, from a member that was fenced
    or lost a response: it declares that it holds nothing.
    """
    epoch = message.member_epoch
    if epoch in (member.epoch, 0):
        return
    owned = requests.owned_partitions(message)
    if (
        epoch == member.previous_epoch
        and epoch < member.epoch
        and owned is not None
        and contains(member.assigned, owned)
    ):
        return
    comparison = "greater" if epoch > member.epoch else "smaller"
    raise Refused(
        ErrorCode.FENCED_MEMBER_EPOCH,
        f"The consumer group member has a {comparison} member epoch ({epoch}) than the one known by the group"
        f" coordinator ({member.epoch}). The member must abandon all its partitions and rejoin.",
    )
