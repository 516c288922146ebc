"""Records with a valid checksum and invalid contents: replaying them either reports the error, or
gives a core that works.
"""

from __future__ import annotations

import random

import pytest

from mqd.coordinator.actions import Persist, TimerFired
from mqd.coordinator.group.classic.events import Heartbeat, JoinGroup, LeaveGroup, SyncGroup
from mqd.coordinator.group.classic.rebalance import TIMERS as CLASSIC_TIMERS
from mqd.coordinator.group.consumer.cluster import FixedCluster
from mqd.coordinator.group.consumer.core import TIMERS as CONSUMER_TIMERS
from mqd.coordinator.group.consumer.events import ConsumerDescribe, ConsumerHeartbeat
from mqd.coordinator.group.cores import GroupCoreFactory
from mqd.coordinator.group.group import Group
from mqd.coordinator.group.offsets import OffsetsSettings
from mqd.coordinator.group.settings import ClassicSettings
from mqd.coordinator.transaction import events
from mqd.coordinator.transaction.cores import TransactionCoreFactory
from mqd.coordinator.transaction.records import State, TransactionValue, encode_key, encode_partitions, encode_value
from mqd.coordinator.transaction.state import Settings
from mqd.protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    SyncGroupRequest,
)
from tests.tiers import examples, quick
from tests.unit.coordinator.group_shell import GroupShell

SUBSCRIPTION = b"\0\1\0\0\0\1\0\1t\0\0\0\0\0\0\0\0"
ROUNDS = examples(1000, 4000)


def damaged(chance: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        out[chance.randrange(len(out))] = chance.choice((0, 255, 127, 128, chance.randrange(256)))
    if chance.random() < 0.1:
        del out[chance.randrange(1, len(out)) :]
    return bytes(out)


@pytest.mark.parametrize("seed", quick(range(3), [0]))
def test_transactional_ids(seed: int) -> None:
    chance = random.Random(seed)
    cores = TransactionCoreFactory(Settings())
    for _ in range(ROUNDS):
        partitions = (("t", 0), ("u", 3))
        state, epoch = chance.choice([one for one in State if one != State.DEAD]), chance.choice((0, 3, 32766, 32767))
        value = TransactionValue(
            5,
            epoch,
            60_000,
            state,
            partitions,
            1000,
            1000,
            chance.choice((-1, 5)),
            chance.choice((-1, 9)),
            chance.choice((0, 2)),
        )
        core = cores.make("id")
        try:
            core.replay(encode_key("id"), damaged(chance, encode_value(value, encode_partitions(partitions))))
        except ValueError:
            continue
        core.on_loaded(5000)
        for number in range(6):
            producer = (core.producer_id, core.producer_epoch)
            event = chance.choice(
                (
                    events.InitProducerId(number, 60_000, -1, -1, 77),
                    events.AddPartitions(number, *producer, (("z", 1),), chance.choice((0, 2))),
                    TimerFired("due"),
                    events.EndTransaction(number, *producer, chance.random() < 0.5, chance.choice((0, 2)), 99),
                    events.MarkersWritten(core._attempt),
                    events.Describe(number),
                    events.AbortByAdministrator(number, core.producer_id),
                )
            )
            core.handle(event, 5000 + number * 40_000)


def consumer_log() -> list[tuple[bytes, bytes]]:
    group, found = Group("g", ClassicSettings(), OffsetsSettings(), FixedCluster({"t": 6})), {}
    for member_id in ("m1", "m2", "m3"):
        for action in group.handle(heartbeat(0, member_id, 0), 10):
            if isinstance(action, Persist):
                found.update(action.records)
    return [(key, value) for key, value in found.items() if value is not None]


def classic_log() -> list[tuple[bytes, bytes]]:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    shell.stable(3)
    return [(key, value) for key, value in shell.log if value is not None]


def heartbeat(number: int, member_id: str, epoch: int) -> ConsumerHeartbeat:
    joins = (
        {"rebalance_timeout_ms": 1000, "subscribed_topic_names": ["t"], "topic_partitions": []} if epoch == 0 else {}
    )
    return ConsumerHeartbeat(
        number, "c", "/h", ConsumerGroupHeartbeatRequest(group_id="g", member_id=member_id, member_epoch=epoch, **joins)
    )


@pytest.mark.parametrize("seed", quick(range(3), [0]))
@pytest.mark.parametrize("make_log", [consumer_log, classic_log])
def test_groups(seed: int, make_log) -> None:
    chance, log = random.Random(seed), make_log()
    for _ in range(ROUNDS // 2):
        group = Group("g", ClassicSettings(), OffsetsSettings(), FixedCluster({"t": 6}))
        cores = GroupCoreFactory(lambda name, group=group: group)
        hit = chance.randrange(len(log))
        for number, (key, value) in enumerate(log):
            damages = number == hit or chance.random() < 0.2
            try:
                key = damaged(chance, key) if chance.random() < 0.05 else key
                if cores.core_name_of(key) == "g":
                    group.replay(key, damaged(chance, value) if damages else value)
            except ValueError:
                pass
        now = 1_000_000
        group.on_loaded(now)
        for number in range(8):
            now += chance.choice((1, 500, 60_000))
            group.handle(_event(chance, group, number), now)
            group.describe(), group.listing()


def _event(chance: random.Random, group: Group, number: int) -> object:
    members = [*group.classic.members.by_id, *(group.consumer.members if group.consumer is not None else ()), "x"]
    member_id = chance.choice(members)
    known = group.consumer.members.get(member_id) if group.consumer is not None else None
    epoch, generation = known.epoch if known is not None else 0, group.classic.generation
    protocols = [JoinGroupRequest.Protocol(name="range", metadata=SUBSCRIPTION)]
    join = JoinGroupRequest(
        group_id="g",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=1000,
        member_id=chance.choice(("", member_id)),
        protocol_type="consumer",
        protocols=protocols,
    )
    return chance.choice(
        (
            heartbeat(number, member_id, epoch),
            heartbeat(number, "new", 0),
            heartbeat(number, member_id, -1),
            ConsumerDescribe(number),
            JoinGroup(number, 3, "c", "/h", join, f"n{number}"),
            Heartbeat(number, HeartbeatRequest(group_id="g", member_id=member_id, generation_id=generation)),
            SyncGroup(number, SyncGroupRequest(group_id="g", member_id=member_id, generation_id=generation)),
            LeaveGroup(
                number, LeaveGroupRequest(group_id="g", members=[LeaveGroupRequest.MemberIdentity(member_id=member_id)])
            ),
            *(TimerFired(name) for name in (*CLASSIC_TIMERS, *CONSUMER_TIMERS)),
        )
    )


def test_numbers_at_the_end_of_their_range_are_refused() -> None:
    """The next one could not be written: the group's partition would be reloaded with every
    attempt.
    """
    log = [*consumer_log(), *classic_log()]
    group = Group("g", ClassicSettings(), OffsetsSettings(), FixedCluster({"t": 6}))
    # key type -> offset of the epoch or generation in the value
    epochs = {3: 2, 6: 2, 8: 2, 2: 2 + 2 + len("consumer")}
    seen = 0
    for key, value in log:
        at = epochs.get(key[1])
        if at is not None:
            seen += 1
            with pytest.raises(ValueError, match="epoch|generation"):
                group.replay(key, value[:at] + b"\x7f\xff\xff\xff" + value[at + 4 :])
    assert seen >= 4
