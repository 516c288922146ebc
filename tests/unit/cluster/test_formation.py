"""How empty hosts become one cluster: named scenarios, and random histories of late starts, lost
responses and wiped disks in which two clusters never get a majority.
"""

import random

import pytest

from mqd.cluster.membership import formation
from mqd.cluster.membership.formation import (
    CreateCluster,
    FormationCore,
    Join,
    Member,
    QueryReceived,
    QuerySeed,
    ResponseReceived,
    Start,
    Tick,
    Unreachable,
    Wait,
)
from tests.tiers import quick


class Host:
    def __init__(self, node_id: int, seed: str, directory: str, seeds: list[str]) -> None:
        self.node_id, self.seed = node_id, seed
        self.own = Member(node_id, directory, *formation.split(seed))
        self.core = FormationCore(self.own, seeds)
        self.decision: CreateCluster | Join | None = None
        self.waiting: tuple[str, ...] = ()


class World:
    """Hosts, requests and responses in flight; nothing arrives by itself."""

    def __init__(self, seeds: list[str], seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.seeds = seeds
        self.hosts: dict[str, Host] = {}
        self.flights: list[tuple] = []  # ("ask", from host, seed, ask) or ("answer", host, seed, answer)
        self.now_ms = 0
        self.decided: list[tuple[Member, CreateCluster | Join]] = []

    def start(self, node_id: int, address: str, directory: str, seeds: list[str] | None = None) -> Host:
        host = self.hosts[address] = Host(node_id, address, directory, self.seeds if seeds is None else seeds)
        self.carry(host, host.core.handle(Start(), self.now_ms))
        return host

    def carry(self, host: Host, effects) -> None:
        for effect in effects:
            match effect:
                case QuerySeed():
                    self.flights.append(("ask", host, effect.seed, effect.query))
                case CreateCluster() | Join():
                    host.decision = effect
                    self.decided.append((host.own, effect))
                case Wait():
                    host.waiting = effect.reasons

    def deliver(self, flight: tuple) -> None:
        kind, host, seed, what = flight
        if kind == "ask":
            there = self.hosts.get(seed)
            if there is None:
                self.carry(host, host.core.handle(Unreachable(seed, what.query_id, "connection refused"), self.now_ms))
            else:
                (effect,) = there.core.handle(QueryReceived(None, what), self.now_ms)
                self.flights.append(("answer", host, seed, effect.response))
        elif self.hosts.get(host.seed) is host:
            self.carry(host, host.core.handle(ResponseReceived(seed, what), self.now_ms))

    def settle(self, rounds: int = 60) -> None:
        for _ in range(rounds):
            while self.flights:
                self.deliver(self.flights.pop(0))
            self.now_ms += 100
            for host in list(self.hosts.values()):
                self.carry(host, host.core.handle(Tick(), self.now_ms))


SEEDS = ["a:1", "b:1", "c:1"]


def three(world: World) -> list[Host]:
    return [world.start(number, address, f"directory-{number}") for number, address in enumerate(SEEDS, 1)]


def test_alone_without_seeds():
    world = World([])
    host = world.start(1, "a:1", "directory-1")
    assert isinstance(host.decision, CreateCluster) and host.decision.voters == (host.own,)


def test_three_empty_seeds_found_the_same_cluster():
    world = World(SEEDS)
    hosts = three(world)
    world.settle()
    decisions = [host.decision for host in hosts]
    assert len({decision.cluster_id for decision in decisions}) == 1
    assert all(decision.voters == tuple(sorted(host.own for host in hosts)) for decision in decisions)
    assert sum(isinstance(decision, CreateCluster) for decision in decisions) >= 1
    assert all(decision.voter for decision in decisions if isinstance(decision, Join))


def test_two_of_three_wait_and_name_the_missing_host():
    world = World(SEEDS)
    world.start(1, "a:1", "directory-1")
    world.start(2, "b:1", "directory-2")
    world.settle()
    assert all(host.decision is None for host in world.hosts.values())
    assert any(reason.startswith("c:1") and "refused" in reason for reason in world.hosts["a:1"].waiting)
    world.start(3, "c:1", "directory-3")
    world.settle()
    assert len({host.decision.cluster_id for host in world.hosts.values()}) == 1


def advices(core: FormationCore, event: formation.Event, now_ms: int) -> list[str]:
    return [effect.advice for effect in core.handle(event, now_ms) if isinstance(effect, Wait) and effect.advice]


def test_advice_is_logged_once_when_a_seed_is_silent_for_long():
    core = FormationCore(Member(2, "d2", "b", 1), ["a:1"])
    assert not advices(core, Start(), 1_000)
    core.handle(Unreachable("a:1", 1, "Connection refused"), 1_001)
    assert not advices(core, Tick(), 1_000 + formation.ADVISE_MS - 1)
    (advice,) = advices(core, Tick(), 1_000 + formation.ADVISE_MS)
    assert "--cluster-seeds" in advice and "docs/operations.md" in advice
    for now_ms in range(20_000, 60_000, 500):
        assert not advices(core, Tick(), now_ms)
    assert not advices(core, Unreachable("a:1", 1, "another reason"), 60_000)


def test_no_advice_on_silent_seeds_while_others_respond():
    core = FormationCore(Member(2, "d2", "b", 1), ["a:1"])
    core.handle(Start(), 0)
    core.handle(
        ResponseReceived("a:1", formation.FormationResponse(1, Member(1, "d1", "a", 1), "", 0, ("a:1", "c:1"), "", ())),
        10,
    )
    assert not advices(core, Tick(), 2 * formation.ADVISE_MS)


def test_a_wiped_seed_joins_as_an_observer():
    world = World(SEEDS)
    three(world)
    world.settle()
    cluster = world.hosts["a:1"].decision.cluster_id
    wiped = world.start(3, "c:1", "directory-new")
    world.settle()
    assert isinstance(wiped.decision, Join) and wiped.decision.cluster_id == cluster and not wiped.decision.voter


def test_a_later_host_joins_and_never_founds():
    world = World(SEEDS)
    late = world.start(9, "d:1", "directory-9")
    world.start(1, "a:1", "directory-1")
    world.start(2, "b:1", "directory-2")
    world.settle()
    assert late.decision is None
    world.start(3, "c:1", "directory-3")
    world.settle()
    assert isinstance(late.decision, Join) and not late.decision.voter


def test_a_host_that_is_not_a_seed_waits_even_when_all_seeds_are_empty():
    world = World(SEEDS[:1])
    late = world.start(9, "d:1", "directory-9")
    world.start(1, "a:1", "directory-1", seeds=["a:1", "x:1"])
    world.settle()
    assert late.decision is None and "different list of seeds" in late.waiting[0]


def test_seeds_that_differ_are_reported():
    world = World(SEEDS)
    first = world.start(1, "a:1", "directory-1")
    world.start(2, "b:1", "directory-2", seeds=["a:1", "b:1"])
    world.start(3, "c:1", "directory-3")
    world.settle()
    assert first.decision is None and any(
        "has a different list of seeds: a:1, b:1" in reason for reason in first.waiting
    )


def test_a_duplicate_node_id_is_reported():
    world = World(SEEDS)
    first = world.start(1, "a:1", "directory-1")
    world.start(2, "b:1", "directory-2")
    world.start(2, "c:1", "directory-3")
    world.settle()
    assert first.decision is None and any("node id 2" in reason for reason in first.waiting)


def test_order_and_spelling_of_seeds_do_not_matter():
    assert FormationCore(Member(1, "d", "a", 1), ["B:01", " a:1 "]).seeds == ("a:1", "b:1")
    assert formation.normalise("[::1]:9094") == "[::1]:9094" and formation.split("[::1]:9094") == ("::1", 9094)
    for bad in ("a", "a:", ":1", "a:0", "a:65536", "a:b"):
        with pytest.raises(ValueError):
            formation.normalise(bad)


def test_a_response_to_an_older_request_is_not_counted():
    """A seed that was wiped since: its earlier response must not found a cluster."""
    core = FormationCore(Member(1, "d1", "a", 1), ["a:1", "b:1"])
    asks = {effect.seed: effect.query for effect in core.handle(Start(), 0) if isinstance(effect, QuerySeed)}
    assert set(asks) == {"a:1", "b:1"}
    old = formation.FormationResponse(asks["b:1"].query_id, Member(2, "old", "b", 1), "", 0, core.seeds, "", ())
    core.handle(Unreachable("b:1", asks["b:1"].query_id, "connection reset"), 10)
    core.handle(ResponseReceived("b:1", old), 20)
    assert all(state.response is None for state in core._states.values())


@pytest.mark.parametrize("first", quick(range(0, 400, 50), [0, 50]))
def test_never_two_clusters_with_a_majority(first):
    """Late starts, lost and late responses, wipes at any moment (also of founders)."""
    formed = 0
    for number in range(first, first + 50):
        world = World(SEEDS, number)
        generator = world.random
        wipe_rate = generator.choice((0.0, 0.01, 0.03, 0.1))
        had_majority: list[str] = []
        starts = 0
        for _ in range(generator.randint(30, 400)):
            action = generator.random()
            absent = [address for address in SEEDS if address not in world.hosts]
            if not world.hosts or (absent and action < 0.1) or action < wipe_rate:
                address = generator.choice(absent or SEEDS)
                world.start(SEEDS.index(address) + 1, address, f"directory-{address}-{starts}")
                starts += 1
            elif action < 0.8 and world.flights:
                flight = world.flights.pop(generator.randrange(len(world.flights)))
                if generator.random() < 0.95:
                    world.deliver(flight)
            else:
                world.now_ms += generator.choice((50, 200, 1000))
                host = world.hosts[generator.choice(sorted(world.hosts))]
                world.carry(host, host.core.handle(Tick(), world.now_ms))
            check_one_majority(world, had_majority)
        world.settle()
        check_one_majority(world, had_majority)
        formed += len(had_majority)
    assert formed >= 25


def check_one_majority(world: World, had_majority: list[str]) -> None:
    """A cluster that once had more than half of its voters' disks may have committed something:
    another one may be founded only when none of its disks is left.
    """
    decided = {host.decision.cluster_id for host in world.hosts.values() if host.decision is not None}
    assert len(decided) <= 1, "living hosts are of different clusters: one of them is stuck forever"
    members: dict[str, list[Member]] = {}
    voter_count: dict[str, int] = {}
    for host in world.hosts.values():
        if host.decision is not None and host.own in host.decision.voters:
            members.setdefault(host.decision.cluster_id, []).append(host.own)
            voter_count[host.decision.cluster_id] = len(host.decision.voters)
    for cluster, own in members.items():
        if 2 * len(own) > voter_count[cluster] and cluster not in had_majority:
            assert not [other for other in had_majority if other in members], "a second cluster beside a living one"
            had_majority.append(cluster)
