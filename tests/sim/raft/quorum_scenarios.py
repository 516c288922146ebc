"""Directed traces of the quorum: histories that random schedules rarely reach, and former bugs.
Each takes the class of the core, for planted bugs.
"""

from __future__ import annotations

import msgspec

from mqd.cluster.raft import events
from mqd.cluster.raft.core import QuorumCore, standalone_meta
from mqd.cluster.raft.events import QuorumSettings, VoteState
from mqd.cluster.raft.messages import Batch, ReplicaKey, SnapshotMeta, leader_change_batch, voters_batch
from tests.sim.kernel import Violation
from tests.sim.raft.quorum_host import Host, chain
from tests.sim.raft.quorum_world import Plan, World

QUIET = Plan(
    voters=3,
    hosts=3,
    drift_max=0.0,
    restart=0,
    wipe=0,
    pause=0,
    cut=0,
    isolate=0,
    heal=0,
    noise=0,
    disk_slow=0,
    disk_full=0,
    transfer=0,
    change=0,
)


def quiet(seed: int, core_class: type[QuorumCore], **changes) -> World:
    return World(seed, QUIET._replace(**changes), core_class)


def led(seed: int, core_class: type[QuorumCore], **changes) -> tuple[World, Host, list[Host]]:
    """A working quorum: the world, its leader, the other voters."""
    world = quiet(seed, core_class, **changes)
    if not world.until(lambda: world.active is not None and world.active.core.has_lease(world.active.clock.now()), 10):
        raise Violation("H1", "no leader is elected")
    world.seconds(0.5)
    leader = world.active
    votes = [voter.node_id for voter in leader.core.voters]
    return world, leader, [host for host in world.hosts.values() if host is not leader and host.node_id in votes]


def restarted_voter(seed: int, core_class: type[QuorumCore]) -> None:
    """C has not heard from the leader for long. B, which has, is killed and restarted at once: its
    promise is still in force (TiKV #15035).
    """
    world, leader, (second, third) = led(seed, core_class)
    world.cut(leader.node_id, third.node_id)
    world.seconds(2.6)
    second.stop(1)
    world.cut(leader.node_id, second.node_id)
    second.start()
    world.seconds(5)


def promised_voter(seed: int, core_class: type[QuorumCore]) -> None:
    """C is a candidate while B still hears from the leader."""
    world, leader, (second, third) = led(seed, core_class)
    world.clients_work = False  # C's log is up to date
    world.seconds(1)
    world.cut(leader.node_id, third.node_id)
    world.seconds(2.6)
    world.cut(leader.node_id, second.node_id)
    world.seconds(5)


def deaf_predecessor(seed: int, core_class: type[QuorumCore]) -> None:
    """The leader hands over, but no longer receives messages: it cannot learn that the successor
    was elected.
    """
    world, leader, others = led(seed, core_class)
    world.clients_work = False
    world.seconds(1)
    for host in others:
        world.cut(host.node_id, leader.node_id, both=False)
    leader.handle(events.TransferLeadership())
    world.seconds(1)
    if not any(host.is_active for host in others):
        raise Violation("H1", "no voter takes over at once")


def returning_voter(seed: int, core_class: type[QuorumCore]) -> None:
    """A voter that was cut off for long returns: the leader stays (KIP-996)."""
    world, leader, (second, _) = led(seed, core_class)
    epoch = leader.core.epoch
    world.cut_off(second.node_id)
    world.seconds(20)
    world.network.heal()
    world.seconds(5)
    if leader.core.epoch != epoch or not leader.is_active:
        raise Violation("stable", f"epoch {epoch} has become {leader.core.epoch}")


def lonely_leader(seed: int, core_class: type[QuorumCore]) -> None:
    """A leader that reaches no voter resigns, even when the cut is in only one direction."""
    for both in (True, False):
        world, leader, others = led(seed, core_class)
        for host in others:
            world.cut(host.node_id, leader.node_id, both)
        world.seconds(3.6)
        if leader.is_active:
            raise Violation("check-quorum", "it leads a majority of none")


def stalled_disk(seed: int, core_class: type[QuorumCore]) -> None:
    """The disk of the leader hangs. The others commit without it, but it can apply nothing: another
    host must lead.
    """
    world, leader, others = led(seed, core_class)
    leader.disk_delay = 1_000_000_000
    if not world.until(lambda: any(host.is_active for host in others), 8):
        raise Violation("H1", "the leader with the hanging disk stays")


def failover(seed: int, core_class: type[QuorumCore]) -> float:
    """Seconds until another host is active after the leader's host was lost."""
    world, leader, others = led(seed, core_class)
    leader.stop(0)
    before = world.kernel.now
    if not world.until(lambda: any(host.is_active for host in others), 3):
        raise Violation("failover", "no controller within 3 seconds")
    return (world.kernel.now - before) / 1e6


def proven(seed: int, core_class: type[QuorumCore], restarted: bool = False) -> float:
    """Seconds until another host is active after the leader's processes were killed; its keeper
    notifies the others. `restarted`: a successor of the controller runs before they are notified.
    """
    world, leader, others = led(seed, core_class)
    epoch = leader.core.epoch
    leader.stop(1)
    leader.prove(epoch)
    if restarted:
        leader.start()
    before = world.kernel.now
    if not world.until(lambda: any(host.is_active for host in world.hosts.values()), 3):
        raise Violation("failover", "no controller within 3 seconds")
    taken = (world.kernel.now - before) / 1e6
    world.seconds(2)  # the request is repeated
    if world.active is None or max(host.core.epoch for host in others) > epoch + 4:
        raise Violation(
            "stable", f"epoch {epoch}, then one after the other to {max(host.core.epoch for host in others)}"
        )
    return taken


def old_proof(seed: int, core_class: type[QuorumCore]) -> None:
    """Three voters of five learn late that a leader has died, when another one leads whom they do
    not hear at the moment: the notice is out of date.
    """
    world, leader, others = led(seed, core_class, hosts=5, voters=5)
    epoch = leader.core.epoch
    leader.stop(1)
    world.until(lambda: world.active is not None, 10)
    leader.start()
    world.clients_work = False
    world.seconds(1)
    successor = world.active
    now = successor.core.epoch
    world.cut_off(successor.node_id)
    leader.prove(epoch)
    world.seconds(1)
    world.network.heal()
    world.seconds(3)
    if world.active is not successor or successor.core.epoch != now:
        raise Violation("stable", f"epoch {now} was disturbed")


def formation(seed: int, core_class: type[QuorumCore]) -> float:
    """Seconds until three new hosts have a controller."""
    world = quiet(seed, core_class)
    if not world.until(lambda: world.active is not None, 3):
        raise Violation("H1", "no leader is elected")
    return world.kernel.now / 1e6


def handover(seed: int, core_class: type[QuorumCore]) -> float:
    """Seconds without a controller after the leader shuts down cleanly with changes under way."""
    world, leader, others = led(seed, core_class)
    leader.handle(events.TransferLeadership())
    world.until(lambda: not leader.is_active, 3)
    leader.stop(1)
    before = world.kernel.now
    if not world.until(lambda: any(host.is_active for host in others), 3):
        raise Violation("H1", "no voter takes over")
    return (world.kernel.now - before) / 1e6


def all_restarted(seed: int, core_class: type[QuorumCore]) -> float:
    """Seconds until there is a controller after all three lost power: no voter remembers its
    promises, so all wait as if they had just made one.
    """
    world, _, _ = led(seed, core_class)
    for host in world.hosts.values():
        host.stop(0)
    for host in world.hosts.values():
        host.start()
    before = world.kernel.now
    if not world.until(lambda: world.active is not None, 5):
        raise Violation("H1", "no leader is elected")
    return (world.kernel.now - before) / 1e6


def forced(seed: int, core_class: type[QuorumCore]) -> None:
    """Two of three are lost permanently; the third is forced to continue. If a lost one returns it
    is of an older generation: no other voter accepts it, and it gets the reason.
    """
    world, leader, others = led(seed, core_class)
    world.clients_work = False
    world.seconds(1)
    survivor = others[0]
    for host in world.hosts.values():
        host.stop(0)
    disk = survivor.disk
    meta, data = survivor.snapshot_of_all()
    disk.snapshot, disk.log = (standalone_meta(meta, (world.voter(survivor.node_id),)), data), []
    survivor.start()
    if not world.until(lambda: survivor.is_active, 3):
        raise Violation("H1", "the survivor does not lead")
    leader.start()
    world.seconds(10)
    if not survivor.is_active or len(survivor.core.voters) != 1:
        raise Violation("generation", "the survivor was disturbed")
    if not leader.outdated:
        raise Violation("generation", "the outdated host was not told so")


def late_grant(seed: int, host_class: type[Host]) -> None:
    """A broker learns seconds later that its heartbeat has arrived; then the link to the controller
    is cut.
    """
    world = World(seed, QUIET, host_class=host_class)
    world.seconds(3)
    leader = world.active
    host = next(host for host in world.hosts.values() if host is not leader)
    link = world.network.links[leader.node_id - 1][host.node_id - 1]
    link.delay_min, link.delay_max = 3_500_000, 4_000_000
    world.seconds(1.5)
    world.cut(host.node_id, leader.node_id, both=False)
    world.seconds(10)
    if not world.counts.get("fenced"):
        raise Violation("H1", "no host is fenced")


# -- prepared logs ---------------------------------------------------------------------------------


def prepared(
    seed: int,
    core_class: type[QuorumCore],
    voters: tuple[int, ...],
    hosts: int,
    logs: dict[int, list[Batch]],
    votes: dict[int, VoteState],
    committed: int,
) -> World:
    """Hosts that do not run yet, with the content of their disks; the first `committed` batches of
    node 2 are committed.
    """
    settings = QuorumSettings(fetch_bytes_max=1)
    world = World(seed, QUIET._replace(hosts=hosts), core_class, settings, found=False)
    meta = SnapshotMeta(0, 0, tuple(world.voter(node) for node in voters), 1)
    for node, log in logs.items():
        host = world.hosts[node]
        host.disk.snapshot = (meta, msgspec.msgpack.encode((0, b"", b"." * 100)))
        host.disk.log, host.disk.vote = list(log), votes[node]
    for batch in logs[2][:committed]:
        world.committed.append(batch)
        world._commits = [(batch.epoch, batch)]
        world._digests[batch.next_offset] = chain(world._digests[batch.base_offset], batch)
        world._committed_offset = batch.next_offset
    return world


def key(node: int) -> ReplicaKey:
    return ReplicaKey(node, node.to_bytes(16, "big"))


def figure_eight(seed: int, core_class: type[QuorumCore]) -> None:
    """Raft's figure 8: a record of an older epoch is not committed by being on a majority; a host
    with a newer record, of epoch 3, may still be elected.
    """
    first, second, third = (
        leader_change_batch(0, 1, key(1)),
        leader_change_batch(1, 2, key(1)),
        leader_change_batch(1, 3, key(3)),
    )
    logs = {1: [first, second], 2: [first], 3: [first, third]}
    votes = {1: VoteState(2, key(1)), 2: VoteState(3, key(3)), 3: VoteState(3, key(3))}
    world = prepared(seed, core_class, (1, 2, 3), 3, logs, votes, committed=1)
    world.hosts[1].start()
    world.hosts[2].start()
    world.until(lambda: world._committed_offset > 1, 10)
    world.cut(1, 2)
    world.hosts[1].stop(0)
    world.hosts[3].start()
    world.seconds(10)
    if world.active is None:
        raise Violation("H1", "two of three voters elect no leader")


def two_leaders_in_turn(seed: int, core_class: type[QuorumCore]) -> None:
    """The first published single-server change: S1 has 'add 5' in its log and is cut off; S2 is
    elected and immediately removes S1, which S3 also gets; then S1, S4 and S5 are connected.
    """
    world = prepared(seed, core_class, (1, 2, 3, 4), 5, {2: []}, {2: VoteState()}, committed=0)
    opening = leader_change_batch(0, 1, key(1))
    added = voters_batch(1, 1, tuple(world.voter(node) for node in (1, 2, 3, 4, 5)))
    logs = {1: [opening, added], 2: [opening], 3: [opening], 4: [opening], 5: [opening, added]}
    world = prepared(
        seed, core_class, (1, 2, 3, 4), 5, logs, {node: VoteState(1, key(1)) for node in logs}, committed=1
    )
    for host in world.hosts.values():
        host.start()
    world.cut_off(1, 5)
    world.hosts[3].core.election_deadline_ns = world.hosts[4].core.election_deadline_ns = 1 << 62
    for count in (1, 2):  # S3 and S4 have fetched, and none of them gets a response
        if not world.until(
            lambda: world.hosts[2].core.is_leader and len(world.hosts[2].core.leading.replicas) == count, 10
        ):
            raise Violation("H1", "three of four voters elect no leader")
        for requested in sorted(world.hosts[2].core.leading.replicas):
            world.cut(2, requested.node_id)
    world.network.links[1][2].cut = world.network.links[2][1].cut = False
    world.hosts[2].handle(events.RemoveVoter("out", key(1)))
    world.seconds(1)
    world.network.heal()
    world.cut_off(2, 3)
    world.seconds(10)
    if world.active is None or world.active.node_id not in (1, 5):
        raise Violation("H1", "three of five voters elect no leader")


# -- former bugs -----------------------------------------------------------------------------------


def rumours(seed: int, core_class: type[QuorumCore]) -> None:
    """A leader resigns and no other voter is notified. The others used to name it to each other
    forever: 'X leads this epoch'.
    """
    world, leader, others = led(seed, core_class, hosts=5)
    world.cut_off(leader.node_id)
    world.until(lambda: not leader.core.is_leader, 10)
    for host in others:
        host.process.stopped = True  # so that none of them is elected meanwhile
    world.seconds(1)
    world.network.heal()
    for host in others:
        world.kernel.go_on(host.process)
    world.seconds(8)
    world.check_healed()


def removal_not_committed(seed: int, core_class: type[QuorumCore]) -> None:
    """Of two voters the leader removes itself and is cut off before the other one has the change.
    Only it can win the next election, though it is in no voter set of its log.
    """
    world, leader, (second,) = led(seed, core_class, voters=2)
    world.cut_off(leader.node_id)
    leader.handle(events.RemoveVoter("out", leader.key))
    world.until(lambda: not leader.core.is_leader, 10)
    world.seconds(1)
    world.network.heal()
    world.seconds(8)
    world.check_healed()
    if leader.core.is_voter or world.active is not second:
        raise Violation("V1", "the removal was not finished")
