"""Members of groups on a simulated cluster: the client's real membership cores (KIP-848, and the
classic protocol with cooperative and eager assignors) against the real cores of groups in the
coordinators of simulated hosts. The members' work on partitions and their commits are simulated
here too; faults of members are drawn from a separate random stream.

Checked at each step, besides the assertions of both kinds of cores
    C5, C6  in the log of __consumer_offsets: group_ledger.py
    C5      a committed offset in a response is at least that of any response sent before the
            request
    C6      a member in the log works only on partitions that the log assigns to it (KIP-848); no
            two members of the current generation work on one partition (classic)
    C6      no member gets an epoch or a generation that is not in the log
and after everything has been repaired
    LIVE    every group matches its live members: exactly one member works on each of their
            partitions
Rules that can be off: `commit` (the epoch of a commit is not checked), `unreleased` (partitions are
reassigned before their owner has released them); those of coordinators.py; `again`
(group_member.py).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from mqd.client.group.events import Leave, Subscribe
from mqd.client.group.membership import State
from mqd.coordinator.group.consumer.cluster import FixedCluster
from mqd.coordinator.group.consumer.members import Owners
from mqd.coordinator.group.group import Group
from mqd.coordinator.group.offsets import OffsetsSettings
from mqd.coordinator.group.settings import ClassicSettings, ConsumerSettings
from tests.sim.client.client_classic_world import COOPERATIVE, EAGER
from tests.sim.client.client_group_world import INTERVAL_MS, MAX_POLL_MS, SESSION_MS, SUBSCRIPTIONS, TOPICS
from tests.sim.coordinator.group_ledger import Ledger, Ledgers
from tests.sim.coordinator.group_member import ClassicMember, ConsumerMember, Member
from tests.sim.kernel import MILLISECOND, SECOND, Violation

if TYPE_CHECKING:
    from tests.sim.cluster.cluster_host import ClusterHost
    from tests.sim.cluster.cluster_world import ClusterWorld

KINDS = ("consumer", "cooperative", "eager")
MEMBERS_MAX = 4
SETTLE_MAX = 45 * SECOND
FAULTS = {"join": 30, "die": 6, "leave": 8, "stop": 10, "busy": 8, "connection": 8, "subscribe": 6, "topic": 4}


class _Careless(Owners):
    """Ignores that partitions have owners."""

    def get(self, topic_id: bytes, index: int) -> str | None:
        return None

    def claim(self, member_id: str, partitions: Any) -> None:
        pass

    release = claim


class _Group(Group):
    """A group core with rules that can be off."""

    off: frozenset[str] = frozenset()

    def commit_error(self, event: Any) -> int:
        return 0 if "commit" in self.off else super().commit_error(event)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "consumer" and value is not None and "unreleased" in self.off:
            value.owners = _Careless()
        super().__setattr__(name, value)

    def check(self) -> None:
        if "unreleased" not in self.off:
            super().check()


class MemberGroup:
    """One group: the `world` of Member and of the cores below it."""

    fatal_codes: frozenset[int] = frozenset()

    def __init__(self, groups: MemberGroups, name: str, kind: str, partition: Any) -> None:
        self.groups, self.name, self.kind, self.partition = groups, name, kind, partition
        self.cluster_world = groups.world
        self.kernel, self.rng, self.cluster = groups.world.kernel, groups.random, groups.cluster
        self.assignors = COOPERATIVE if kind == "cooperative" else EAGER
        self.members: list[Member] = []
        self.acked: dict[tuple[str, int], int] = {}  # offsets reported as committed, to any member

    @property
    def now_ms(self) -> int:
        return self.kernel.now // MILLISECOND

    @property
    def ledger(self) -> Ledger:
        return self.groups.ledgers[self.partition].group(self.name)

    def delay_ms(self) -> int:
        return 0  # the network adds its own delay

    def join(self) -> None:
        kind = ConsumerMember if self.kind == "consumer" else ClassicMember
        member = kind(self, f"{self.name}-m{self.groups.new_number()}")
        self.members.append(member)
        member.give(self.rng.choice(SUBSCRIPTIONS))
        member.wake()

    # -- what is checked ---------------------------------------------------------------------------

    def report(self, member_id: str, epoch: int) -> None:
        """A coordinator has sent a member a response with this epoch or generation."""
        ledger = self.ledger
        known = ledger.generation if self.kind != "consumer" else ledger.highest(member_id)
        if epoch > known:
            raise Violation("C6", f"{self.name}: {member_id} is told {epoch}; the log knows of {known}")

    def check(self) -> None:
        (self._check_consumers if self.kind == "consumer" else self._check_classic)()

    def _check_consumers(self) -> None:
        """A removed member that does not know it yet continues alone: its commits are refused."""
        ledger = self.ledger
        for member in self.members:
            core = member.core
            if core.state is not State.MEMBER or core.member_id not in ledger.members:
                continue
            foreign = member.works_on - ledger.holds(core.member_id)
            if foreign and ledger.members[core.member_id].epoch >= core.epoch:
                raise Violation(
                    "C6",
                    f"{self.name}: {core.member_id} at epoch {core.epoch} works on {_named(foreign)}, which the log"
                    f" does not give it ({ledger.members[core.member_id]})",
                )

    def _check_classic(self) -> None:
        ledger, owners = self.ledger, {}
        known = ledger.member_ids()
        for member in self.members:
            core = member.core
            if core.has_lost_partitions or core.epoch != ledger.generation or core.member_id not in known:
                continue
            for place in member.works_on:
                if owners.setdefault(place, core.member_id) != core.member_id:
                    raise Violation(
                        "C6",
                        f"{self.name}: {owners[place]} and {core.member_id} both work on {place} in generation"
                        f" {ledger.generation}",
                    )

    # -- the end -----------------------------------------------------------------------------------

    def settle(self) -> None:
        for member in self.members:
            member.busy_until_ms = 0
            self.kernel.go_on(member.process)
            if not member.is_closing and member.core.subscription is None:
                member.give(Subscribe(TOPICS))
            member.wake()
        if not any(not member.is_closing for member in self.members):
            self.join()

    def unsettled(self) -> str:
        """A description of the problem; "" = none."""
        world, ledger = self.cluster_world, self.ledger
        if world.stuck(self.partition):
            return ""  # it has no coordinator until an operator acts
        living = {member.core.member_id for member in self.members}
        if living != ledger.member_ids():
            return f"members are {sorted(ledger.member_ids())}, there live {sorted(living)}"
        known = {topic: found.partition_count for topic in TOPICS if (found := self.cluster.topic(topic)) is not None}
        requested = {topic for member in self.members for topic in member.wants(known)}
        expected = sorted((member_place(self, topic), index) for topic in requested for index in range(known[topic]))
        found = sorted(place for member in self.members for place in member.works_on)
        if found != expected:
            return f"worked on is {_named(found)}, not {_named(expected)}"
        for member in self.members:
            if member.core.state is not State.MEMBER:
                return f"{member.core.member_id} is {member.core.state}"
            if self.kind == "consumer" and member.works_on != ledger.holds(member.core.member_id):
                return (
                    f"{member.core.member_id} works on {_named(member.works_on)}; the log gives it"
                    f" {_named(ledger.holds(member.core.member_id))}"
                )
        return ""


def member_place(group: MemberGroup, topic: str) -> bytes:
    return group.cluster.topic(topic).topic_id if group.kind == "consumer" else topic.encode()


def _named(places: Any) -> list[str]:
    return [f"{place[0].hex()[-4:]}-{place[1]}" for place in sorted(places)]


class MemberGroups:
    """All groups of one run."""

    def __init__(self, world: ClusterWorld) -> None:
        self.world = world
        self.random = Random(f"members {world.seed}")
        self.cluster = self._new_cluster({topic: self.random.randrange(1, 5) for topic in TOPICS})
        # in the order in which they were set
        self.counts = [(topic, found.partition_count) for topic, found in self.cluster.topics.items()]
        self.groups: list[MemberGroup] = []
        self.ledgers: dict[Any, Ledgers] = {}
        self.received: set[int] = set()  # error codes that members got
        self.refused: set[int] = set()  # and those of commits and offset fetches
        self.counts_of: dict[str, int] = {}
        self._clusters: list[FixedCluster] = []
        self._numbers = 0
        self._has_faults = True
        self.is_over = False
        self.dirty = False
        self._gap = self.random.choice((100, 300, 800)) * MILLISECOND
        self._weights = {kind: self.random.random() * weight for kind, weight in FAULTS.items()}

    def _new_cluster(self, counts: dict[str, int] | None = None) -> FixedCluster:
        return FixedCluster(counts, ConsumerSettings(session_timeout_ms=SESSION_MS, heartbeat_interval_ms=INTERVAL_MS))

    def new_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def core_maker(self, host: ClusterHost) -> Callable[[str], Group]:
        """For a new acceptor: its topics are those it gets when it starts."""
        cluster = self._new_cluster()
        for topic, count in self.counts:
            cluster.set(topic, count)
        self._clusters.append(cluster)
        settings = ClassicSettings(
            initial_rebalance_delay_ms=300,
            min_session_timeout_ms=100,
            pending_timeout_ms=1_500,
            new_member_join_timeout_ms=3_000,
        )

        def make(name: str) -> Group:
            group = _Group(name, settings, OffsetsSettings(), cluster)
            group.off = self.world.off
            return group

        return make

    # -- the run -----------------------------------------------------------------------------------

    def begin(self) -> None:
        coordinated = self.world.coordinated()
        kinds = {f"group-{number}": KINDS[number % len(KINDS)] for number in range(self.world.plan.members)}
        self.ledgers = {partition: Ledgers(kinds) for partition in coordinated}
        for number in range(self.world.plan.members):
            group = MemberGroup(
                self, f"group-{number}", KINDS[number % len(KINDS)], coordinated[number % len(coordinated)]
            )
            self.groups.append(group)
            for _ in range(self.random.randrange(1, 4)):
                group.join()
        self.world.kernel.after(self._gap, None, self._fault)

    def heal(self) -> None:
        """Runs until every group is settled, or until it is clear that one never will be."""
        self._has_faults = False
        for group in self.groups:
            group.settle()
        self._wait()
        self.is_over = True  # members stay, and commit no more

    def _wait(self) -> None:
        kernel = self.world.kernel
        last = kernel.now + SETTLE_MAX
        while kernel.now < last and any(group.unsettled() for group in self.groups):
            kernel.run(until=kernel.now + 500 * MILLISECOND)

    def check(self) -> None:
        committed = self.world.history.committed
        for partition, ledgers in self.ledgers.items():
            self.dirty |= ledgers.advance(committed.get(partition, ()))
        if self.dirty:
            self.dirty = False
            for group in self.groups:
                group.check()

    def check_end(self) -> None:
        """Coordinators may have moved since, for leader balance: members may be about to rejoin."""
        self._wait()
        for group in self.groups:
            if problem := group.unsettled():
                raise Violation("LIVE", f"{group.name} ({group.kind}) has not settled: {problem}")

    # -- what happens to members -------------------------------------------------------------------

    def _fault(self) -> None:
        if not self._has_faults:
            return
        random = self.random
        kind = random.choices(list(self._weights), list(self._weights.values()))[0]
        group = random.choice(self.groups)
        self.counts_of[kind] = self.counts_of.get(kind, 0) + 1
        self.world.kernel.report("member", kind, group.name)
        getattr(self, "_" + kind)(random, group, random.choice(group.members) if group.members else None)
        self.dirty = True
        self.world.kernel.after(int(random.expovariate(1 / self._gap)) + 1, None, self._fault)

    def _join(self, random: Random, group: MemberGroup, _member: Member | None) -> None:
        if len(group.members) < MEMBERS_MAX:
            group.join()

    def _die(self, random: Random, group: MemberGroup, member: Member | None) -> None:
        if member is not None:
            group.members.remove(member)
            member.process.die()

    def _leave(self, random: Random, group: MemberGroup, member: Member | None) -> None:
        if member is not None and not member.is_closing:
            member.is_closing = random.random() < 0.7
            member.give(Leave())
            if not member.is_closing:
                member.give(random.choice(SUBSCRIPTIONS))
            member.wake()

    def _stop(self, random: Random, group: MemberGroup, member: Member | None) -> None:
        if member is not None and not member.process.stopped:
            member.process.stopped = True
            kernel = self.world.kernel
            kernel.after(
                random.choice((200, 1_000, SESSION_MS, 2 * SESSION_MS)) * MILLISECOND + random.randrange(SECOND),
                None,
                kernel.go_on,
                member.process,
            )

    def _busy(self, random: Random, group: MemberGroup, member: Member | None) -> None:
        if member is not None:
            member.busy_until_ms = group.now_ms + random.randrange(2 * MAX_POLL_MS)

    def _connection(self, random: Random, group: MemberGroup, member: Member | None) -> None:
        if member is not None and not member.process.stopped:
            member.break_connection()
            member.wake()

    def _subscribe(self, random: Random, group: MemberGroup, member: Member | None) -> None:
        if member is not None and not member.is_closing:
            member.give(random.choice(SUBSCRIPTIONS))
            member.wake()

    def _topic(self, random: Random, group: MemberGroup, _member: Member | None) -> None:
        """Adds partitions to a topic; every process learns of it in its own time."""
        topic = random.choice(TOPICS)
        count = self.cluster.topic(topic).partition_count + 1
        if count > 6:
            return
        self.counts.append((topic, count))
        self.cluster.set(topic, count)
        for cluster in self._clusters:
            self.world.kernel.after(random.randrange(2_000) * MILLISECOND, None, _grow, cluster, topic, count)


def _grow(cluster: FixedCluster, topic: str, count: int) -> None:
    found = cluster.topic(topic)
    if found is None or found.partition_count < count:
        cluster.set(topic, count)
