"""Brokers and the active controller together, by single traces: a broker joins and leaves, replicas
follow, and what each side knows of the other.
"""

import msgspec
import pytest

from mqd.cluster.broker import core as broker_core
from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host import messages
from mqd.cluster.metadata import core as metadata_core
from mqd.cluster.metadata.records import PartitionState
from mqd.cluster.metadata.rules import brokers as broker_rules
from mqd.protocol.errors import ErrorCode as E
from tests.unit.controller.controller_world import OPTIONS, Host, World


@pytest.fixture
def world() -> World:
    world = World(7, 4)
    world.settle(20)
    assert world.send_request(messages.CreateTopic("t", 4, 3, {}, {})).error == 0
    return world


def partitions(world: World, name: str = "t") -> tuple[PartitionState, ...]:
    return world.unlogged.topics[name].partitions


def cut_off(world: World, node: int) -> None:
    world.cut |= {(node, other) for other in world.hosts} | {(other, node) for other in world.hosts}


def run(world: World, milliseconds: int, step_ms: int = 100) -> None:
    """Links lose nothing except cut ones; all hosts apply at once."""
    end = world.now_ms + milliseconds
    world.random.seed(1)
    while world.now_ms < end:
        world.now_ms += step_ms
        if world.active >= 0:
            world.renew_lease()
        world.links = [entry for entry in world.links if (entry[2], entry[1]) not in world.cut]
        world.quiet = True
        for _ in range(3):
            world.deliver()
            while world.proposed:
                world.commit()
            for host in world.up():
                while host.applied < len(world.log) and (world.active, host.node) not in world.cut:
                    world.learn(host)
            world.now_ms += 1
        for host in world.up():
            world.on_broker(host, broker_core.Tick())
            world.metadata(host, metadata_core.Tick())
            for key in list(host.logs):
                if key not in host.leaders:
                    world.fetch(host, key)
        for _ in range(6):
            world.propose()
        world.links = [entry for entry in world.links if (entry[2], entry[1]) not in world.cut]
        world.quiet = False
        world.check()


def test_the_lease_of_a_cut_off_broker_ends_before_it_is_fenced(world: World) -> None:
    cut_off(world, 2)
    host, began = world.hosts[2], world.now_ms
    ended = fenced = 0
    while not fenced:
        run(world, 100)
        if not ended and host.sent.lease_until_ms <= world.now_ms:
            ended = world.now_ms
        if world.unlogged.brokers[2].fenced:
            fenced = world.now_ms
    assert (
        began < ended < fenced
        and OPTIONS.session_ms - OPTIONS.heartbeat_ms <= fenced - began <= OPTIONS.session_ms + 1_500
    )
    assert all(partition.leader != 2 and 2 not in partition.in_sync_replicas for partition in partitions(world))
    world.cut.clear()
    run(world, 3_000)
    assert not world.unlogged.brokers[2].fenced and host.sent.lease_until_ms > world.now_ms
    assert all(2 in partition.in_sync_replicas for partition in partitions(world) if 2 in partition.replicas)


def test_a_tick_when_a_session_ends_fences_and_one_before_does_not(world: World) -> None:
    active = world.hosts[world.active]
    assert world.hosts[2].core.next_expiry_ms is None or world.active == 2, (
        "only the active controller has sessions to end"
    )
    world.cut.update((a, b) for a in world.hosts for b in world.hosts if a != b)  # no heartbeats from here on
    expiry_ms = active.core.next_expiry_ms
    assert world.now_ms < expiry_ms <= world.now_ms + OPTIONS.session_ms
    world.metadata(active, metadata_core.LeaseChanged(expiry_ms + 1_000))

    def fences(now_ms: int) -> bool:
        return any(
            isinstance(action, metadata_core.Persist) for action in active.core.handle(metadata_core.Tick(), now_ms)
        )

    for now_ms in range(world.now_ms, expiry_ms, 200):
        active.core.handle(metadata_core.Tick(), now_ms)
    assert not fences(expiry_ms - 1) and fences(expiry_ms)


def test_a_new_controller_waits_a_whole_session(world: World) -> None:
    cut_off(world, 2)
    run(world, OPTIONS.session_ms - 1_500)
    world.depose()
    world.elect(3)
    elected = world.now_ms
    run(world, OPTIONS.session_ms - 1_000)
    assert not world.unlogged.brokers[2].fenced
    run(world, 2_000)
    assert world.unlogged.brokers[2].fenced and world.now_ms - elected >= OPTIONS.session_ms


def test_without_a_lease_of_its_own_the_controller_neither_grants_nor_fences(world: World) -> None:
    active = world.hosts[world.active]
    world.metadata(active, metadata_core.LeaseChanged(0))
    now = world.now_ms + 10 * OPTIONS.session_ms
    assert not [
        action for action in active.core.handle(metadata_core.Tick(), now) if isinstance(action, metadata_core.Persist)
    ]
    epoch = world.unlogged.brokers[2].epoch
    (response,) = active.core.handle(metadata_core.PeerReceived(2, broker_messages.Heartbeat(2, epoch, 5, 100)), now)
    assert response.message.lease_ms == 0 and not response.message.fenced


def test_a_proof_of_death_fences_at_once(world: World) -> None:
    led = [partition.index for partition in partitions(world) if partition.leader == 2]
    began = world.now_ms
    world.on_broker(world.hosts[2], broker_core.HostDied())
    world.kill_worker(world.hosts[2])
    assert world.hosts[2].sent.lease_until_ms == 0
    run(world, 300)
    assert world.unlogged.brokers[2].fenced and world.now_ms - began < 500
    assert led and all(partitions(world)[index].leader not in (2, -1) for index in led)
    run(world, 3_000)
    assert world.unlogged.brokers[2].fenced, "no host there acts"
    world.on_broker(world.hosts[2], broker_core.HostDied(False))
    run(world, 3_000)
    assert not world.unlogged.brokers[2].fenced


def test_partitions_of_a_dead_worker_are_led_by_others_at_once(world: World) -> None:
    led = [partition.index for partition in partitions(world) if partition.leader == 2]
    followed = [partition.index for partition in partitions(world) if partition.leader != 2 and 2 in partition.replicas]
    world.now_ms += 10
    world.kill_worker(world.hosts[2])
    fetch, world.fetch = world.fetch, lambda *_: None
    run(world, 200)
    assert led and followed
    for index in led:
        partition = partitions(world)[index]
        assert (
            partition.leader not in (2, -1)
            and 2 not in partition.in_sync_replicas
            and len(partition.in_sync_replicas) == 2
        )
    if world.hosts[2].broker._registration.worker_count == 1:
        assert all(2 not in partitions(world)[index].in_sync_replicas for index in followed)
    world.fetch = fetch
    run(world, 2_000)
    assert all(2 in partitions(world)[index].in_sync_replicas for index in (*led, *followed)), (
        "its files are as they were"
    )


def test_a_needed_dead_worker_leads_again_in_another_epoch() -> None:
    world = World(7, 2)
    world.settle(20)
    assert world.send_request(messages.CreateTopic("t", 4, 2, {}, {"min.insync.replicas": "2"})).error == 0
    assert world.send_request(messages.CreateTopic("alone", 4, 1, {}, {})).error == 0
    before = {
        (name, partition.index): partition
        for name in ("t", "alone")
        for partition in partitions(world, name)
        if partition.leader == 2
    }
    world.kill_worker(world.hosts[2])
    run(world, 300)
    assert len(before) == 4
    for (name, index), old in before.items():
        new = partitions(world, name)[index]
        assert (new.leader, new.leader_epoch, new.in_sync_replicas) == (2, old.leader_epoch + 1, old.in_sync_replicas)


def test_an_old_report_of_a_dead_worker_only_applies_where_still_valid(world: World) -> None:
    active = world.hosts[world.active].core
    topic_id, epoch = world.unlogged.topics["t"].topic_id, world.unlogged.brokers[2].epoch
    for partition in partitions(world):
        led, followed = (
            [(topic_id, partition.index, partition.leader_epoch)],
            [(topic_id, partition.index, partition.partition_epoch)],
        )
        stale = [(topic_id, partition.index, 99), (topic_id, 99, 0), (b"x" * 16, 0, 0)]
        wrong = (followed, led) if partition.leader == 2 else (led, followed if 2 not in partition.replicas else [])
        for lost, silent in (
            (stale, stale),
            (wrong[0] if partition.leader != 2 else [], wrong[1] if partition.leader == 2 else []),
        ):
            assert (
                active.handle(
                    metadata_core.PeerReceived(2, broker_messages.WorkersDied(2, epoch, lost, silent)), world.now_ms
                )
                == []
            )
        assert (
            active.handle(
                metadata_core.PeerReceived(2, broker_messages.WorkersDied(2, epoch - 1, led, followed)), world.now_ms
            )
            == []
        )


def test_a_controlled_shutdown_leaves_nothing_led_and_all_in_sync(world: World) -> None:
    host, epoch = world.hosts[2], world.unlogged.brokers[2].epoch
    began = world.now_ms
    world.on_broker(host, broker_core.ShutdownRequested())
    while not host.ended:
        run(world, 50, 50)
        assert world.now_ms - began < 3_000
    assert world.unlogged.brokers[2].fenced
    assert all(
        partition.leader not in (2, -1) and 2 not in partition.in_sync_replicas and len(partition.in_sync_replicas) >= 2
        for partition in partitions(world)
    )
    world.crash(2, clean=True)
    assert host.clean_epoch == epoch
    world.restart(2)
    run(world, 3_000)
    assert not world.unlogged.brokers[2].fenced


def test_a_shutdown_waits_for_a_replica_that_catches_up(world: World) -> None:
    """A rolling restart that is too quick would leave partitions with fewer in-sync replicas than
    producers require.
    """
    world.crash(3)
    run(world, OPTIONS.session_ms + 2_000)
    world.restart(3)
    host = world.hosts[2]
    world.on_broker(host, broker_core.ShutdownRequested())
    for _ in range(200):
        run(world, 50, 50)
        if world.unlogged.brokers[3].fenced:
            continue
        assert all(len(partition.in_sync_replicas) >= 2 for partition in partitions(world))
        if host.ended:
            break
    assert host.ended


def test_a_shutdown_without_a_response_completes(world: World) -> None:
    world.depose()
    host = world.hosts[2]
    world.on_broker(host, broker_core.ShutdownRequested())
    run(world, OPTIONS.shutdown_wait_ms + OPTIONS.session_ms - 500, 500)
    assert not host.ended
    run(world, 1_000)
    assert host.ended


def test_a_shutdown_that_was_given_up_does_not_hurry_the_next(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller process of a host that is shutting down dies after the host was fenced. Its successor
    does not continue the shutdown; the next one waits again until all hosts know the new leaders.
    """
    host, active, send = world.hosts[2], world.active, world.send
    monkeypatch.setattr(
        world, "send", lambda source, target, *what: (source, target) in world.cut or send(source, target, *what)
    )
    world.on_broker(host, broker_core.ShutdownRequested())
    world.cut.add((active, 2))  # the response with which the shutdown would end
    run(world, 2_000)
    assert world.unlogged.brokers[2].fenced and not host.ended
    world.boot(host)
    world.cut.clear()
    run(world, OPTIONS.shutdown_wait_ms, 500)
    assert not world.unlogged.brokers[2].fenced
    world.cut.add((active, 3))  # host 3 learns of no leader, but its heartbeats arrive
    world.on_broker(host, broker_core.ShutdownRequested())
    run(world, 2_000)
    assert world.unlogged.brokers[2].in_controlled_shutdown and not world.unlogged.brokers[2].fenced


def test_leaderships_return_without_a_pause_between_the_batches() -> None:
    world = World(7, 4, options=msgspec.structs.replace(OPTIONS, leader_moves_max=1))
    world.settle(20)
    assert world.send_request(messages.CreateTopic("t", 16, 3, {}, {})).error == 0
    run(world, 3_000)

    def lacking() -> int:
        return sum(partition.replicas[0] == 2 and partition.leader != 2 for partition in partitions(world))

    world.crash(2)
    run(world, OPTIONS.session_ms + 2_000)
    before = lacking()
    world.restart(2)
    while lacking() == before:
        run(world, 100)
    run(world, 2_000)
    assert before >= 3 and lacking() == 0


def test_lost_replicas_are_replaced_after_the_delay_unless_the_host_returns(world: World) -> None:
    held = [partition.index for partition in partitions(world) if 3 in partition.replicas]
    world.crash(3)
    run(world, OPTIONS.replication_recovery_delay_ms - 5_000, 500)
    assert all(3 in partitions(world)[index].replicas for index in held)
    # No replica copies data: the moves do not complete.
    cut_off(world, 4)
    fetch, world.fetch = world.fetch, lambda *_: None
    world.cut.clear()
    run(world, OPTIONS.session_ms + 8_000, 500)
    moving = [partitions(world)[index] for index in held]
    assert all(
        partition.replacing == 3 and partition.removing_replicas == (3,) and len(partition.adding_replicas) == 1
        for partition in moving
    )
    world.restart(3)
    world.fetch = fetch
    run(world, 6_000)
    assert all(
        partitions(world)[index].replacing == -1 and 3 in partitions(world)[index].in_sync_replicas for index in held
    )


def test_lost_replicas_are_replaced(world: World) -> None:
    world.crash(3)
    run(world, OPTIONS.replication_recovery_delay_ms + OPTIONS.session_ms + 10_000, 500)
    for partition in partitions(world):
        assert 3 not in partition.replicas and len(partition.in_sync_replicas) == 3 and not partition.adding_replicas
    client = world.request(messages.UnregisterBroker(3), node=world.active)
    run(world, 500)
    assert world.answers[client].error == 0 and 3 not in world.unlogged.brokers


def test_new_replicas_go_to_fenced_brokers_only_where_the_live_ones_do_not_suffice(world: World) -> None:
    world.crash(3)
    run(world, OPTIONS.session_ms + 2_000)
    assert world.unlogged.brokers[3].fenced

    def request(change: messages.Change) -> messages.Response:
        client = world.request(change, node=world.active)
        run(world, 300)
        return world.answers[client]

    assert request(messages.CreateTopic("narrow", 8, 3, {}, {})).error == 0
    assert all(3 not in partition.replicas for partition in partitions(world, "narrow"))
    assert request(messages.CreateTopic("wide", 8, 4, {}, {})).error == 0
    for partition in partitions(world, "wide"):
        assert set(partition.replicas) == {1, 2, 3, 4} and partition.replicas[0] != 3
        assert partition.leader == partition.replicas[0] and set(partition.in_sync_replicas) == {1, 2, 4}
    assert request(messages.AddPartitions("wide", 9, None, 0)).error == 0
    assert 3 in partitions(world, "wide")[8].replicas and 3 not in partitions(world, "wide")[8].in_sync_replicas
    refused = request(messages.CreateTopic("wider", 1, 5, {}, {}))
    assert refused.error == E.INVALID_REPLICATION_FACTOR and "only 4 broker(s) are registered" in refused.message
    world.restart(3)
    run(world, 6_000)
    assert all(len(partition.in_sync_replicas) == 4 for partition in partitions(world, "wide"))


def test_the_default_replication_factor_counts_hosts_that_are_down() -> None:
    """A topic created during a restart of its hosts would keep fewer replicas permanently."""
    world = World(7, 3)
    world.settle(20)
    world.crash(world.active % 3 + 1)
    run(world, OPTIONS.session_ms + 2_000)
    down = [node for node, broker in world.unlogged.brokers.items() if broker.fenced]
    assert len(down) == 1
    client = world.request(messages.CreateTopic("created", 4, -1, {}, {}), node=world.active)
    run(world, 300)
    assert world.answers[client].error == 0
    for partition in partitions(world, "created"):
        assert len(partition.replicas) == 3 and partition.replicas[0] not in down
        assert set(partition.in_sync_replicas) == {1, 2, 3} - set(down)
    world.restart(down[0])
    run(world, 6_000)
    assert all(len(partition.in_sync_replicas) == 3 for partition in partitions(world, "created"))
    assert world.send_request(messages.DrainBroker(down[0])).error == 0
    assert world.send_request(messages.CreateTopic("narrow", 1, -1, {}, {})).error == 0
    assert set(partitions(world, "narrow")[0].replicas) == {1, 2, 3} - set(down)


def test_a_drained_host_holds_nothing_and_takes_nothing(world: World) -> None:
    assert world.send_request(messages.DrainBroker(2)).error == 0
    run(world, 20_000, 500)
    assert all(2 not in partition.replicas and len(partition.in_sync_replicas) == 3 for partition in partitions(world))
    assert world.send_request(messages.CreateTopic("new", 6, 3, {}, {})).error == 0
    assert all(2 not in partition.replicas for partition in partitions(world, "new"))
    refused = world.send_request(messages.CreateTopic("wide", 1, 4, {}, {}))
    assert refused.error == E.INVALID_REPLICATION_FACTOR
    assert refused.message.endswith("only 3 broker(s) are registered, not counting 1 being drained.")
    assert world.send_request(messages.DrainBroker(2, cancel=True)).error == 0
    assert world.send_request(messages.CreateTopic("wide", 1, 4, {}, {})).error == 0
    response = world.send_request(messages.UnregisterBroker(2))
    assert response.error == E.POLICY_VIOLATION and "alive" in response.message


def test_internal_topics_grow_with_the_cluster() -> None:
    world = World(3, 1)
    world.settle(20)
    assert world.send_request(messages.CreateTopic("__consumer_offsets", 5, -1, {}, {})).error == 0
    assert world.send_request(messages.CreateTopic("mine", 1, -1, {}, {})).error == 0
    assert {len(partition.replicas) for partition in partitions(world, "__consumer_offsets")} == {1}
    for node in (2, 3, 4):
        world.hosts[node] = Host(node, None)
        world.boot(world.hosts[node])
    run(world, 20_000, 500)
    assert {len(partition.in_sync_replicas) for partition in partitions(world, "__consumer_offsets")} == {3}
    assert len(partitions(world, "mine")[0].replicas) == 1
    assert world.send_request(messages.CreateTopic("other", 1, -1, {}, {})).error == 0
    assert len(partitions(world, "other")[0].replicas) == 3


def test_leadership_returns_to_stable_preferred_replicas(world: World) -> None:
    world.crash(2)
    run(world, OPTIONS.session_ms + 2_000)
    assert not [partition for partition in partitions(world) if partition.leader == 2]
    world.restart(2)
    run(world, OPTIONS.leader_balance_check_ms + OPTIONS.leader_balance_stable_ms + 1_000, 500)
    assert all(partition.leader == partition.replicas[0] for partition in partitions(world))


def test_a_new_host_gets_its_share(world: World) -> None:
    world.hosts[5] = Host(5, None)
    world.boot(world.hosts[5])
    run(world, 2_000)
    shown = world.send_request(messages.BalanceReplicas(), validate_only=True)
    assert shown.error == 0 and shown.results and not any(partition.adding_replicas for partition in partitions(world))
    assert world.send_request(messages.BalanceReplicas()).error == 0
    run(world, 20_000, 500)
    counts = broker_rules.replica_counts_by_node(world.unlogged)
    assert max(counts.values()) - min(counts.values()) <= 1 and 5 in counts
