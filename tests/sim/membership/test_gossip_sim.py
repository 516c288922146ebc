"""Simulated histories of gossiping hosts: faults, then calm. Each planted bug must be found; the
real core must survive them all.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from mqd.cluster.membership import gossip_events as events
from mqd.cluster.membership.gossip import GossipCore
from mqd.cluster.membership.gossip_events import ALIVE, DEAD, SUSPECT
from tests.sim.membership.gossip_world import Broken, Host, Weather, World
from tests.tiers import quick

ROOT = Path(__file__).resolve().parents[3]
SETTLE_MS = 40_000
RATE_MAX = 120  # datagrams of one host in any second, of at most 12 hosts in the worst storm
IDLE_RATE_MAX = 14  # two probes and their responses, an exchange or two


def storm(world: World, until: int, hostile: bool = True) -> None:
    """Random faults."""
    rng, hosts = world.rng, world.hosts
    world.weather = Weather(
        rng.choice((0, 0, 0.05, 0.2)), rng.choice((0, 0.1)), rng.choice((3, 30, 120)), rng.choice((0, 0.2))
    )
    kinds: list[Callable[[], None]] = rng.sample(_kinds(world), rng.randint(2, len(_kinds(world))))
    while world.now < until:
        world.run(world.now + rng.randrange(50, 3_000))
        rng.choice(kinds)()
        if hostile:
            for _ in range(5):
                world.attack(rng.choice(hosts))


def _kinds(world: World) -> list[Callable[[], None]]:
    rng, hosts = world.rng, world.hosts

    def crash() -> None:
        host = rng.choice(hosts)
        if host.core is not None and not host.leaving:
            world.crash(host)
            if rng.random() < 0.8:
                world.at(world.now + rng.randrange(200, 12_000), restart, host)

    def restart(host: Host) -> None:
        if host.core is None:
            how = rng.random()
            if how < 0.15:
                world.wipe(host)
            elif how < 0.3:
                host.life = max(0, host.life - rng.randrange(3))  # restored from an old copy
                host.incarnation_seen = 0
            world.start(host)

    def revive() -> None:
        restart(rng.choice(hosts))

    def pause() -> None:
        host = rng.choice(hosts)
        if world.runs(host):
            world.pause(host, world.now + rng.choice((150, 700, 3_000, 20_000)))

    def cut_pair() -> None:
        a, b = rng.sample(range(1, len(hosts) + 1), 2)
        links = [(a, b)] if rng.random() < 0.5 else [(a, b), (b, a)]
        world.cut_links(links, world.now + rng.randrange(500, 15_000))

    def isolate() -> None:
        one = rng.randrange(1, len(hosts) + 1)
        way = rng.randrange(3)
        links = [
            link
            for other in range(1, len(hosts) + 1)
            if other != one
            for link in ((one, other), (other, one))[0 if way != 1 else 1 : 2 if way != 0 else 1]
        ]
        world.cut_links(links, world.now + rng.randrange(500, 15_000))

    def halves() -> None:
        side = {number for number in range(1, len(hosts) + 1) if rng.random() < 0.5}
        links = [
            (a, b)
            for a in range(1, len(hosts) + 1)
            for b in range(1, len(hosts) + 1)
            if a != b and (a in side) != (b in side)
        ]
        if links:
            world.cut_links(links, world.now + rng.randrange(500, 25_000))

    def leave() -> None:
        host = rng.choice(hosts)
        if world.runs(host) and not host.leaving:
            world.leave(host)

    def controller() -> None:
        host = rng.choice(hosts)
        if world.runs(host):
            world.controller = (world.controller[0] + 1, host.node_id)
            world.give(host, events.ControllerKnown(host.node_id, world.controller[0]))

    def profile() -> None:
        host = rng.choice(hosts)
        if world.runs(host) and not host.leaving:
            world.give(
                host,
                events.ProfileChanged(
                    msgspec.structs.replace(host.core.membership.profile, worker_count=rng.randrange(64))
                ),
            )

    def hint() -> None:
        host, other = rng.sample(hosts, 2)
        if world.runs(host):
            world.give(host, events.UnreachableHint(other.node_id))
            world.give(host, events.LoadMeasured(broker_epoch=rng.randrange(100)))

    return [crash, revive, pause, cut_pair, isolate, halves, leave, controller, profile, hint]


def history(seed: int, make: Callable[..., GossipCore] = GossipCore, steps_ms: int = 60_000) -> World:
    rng = random.Random(seed)
    world = World(seed, rng.choice((2, 3, 5, 9)), make=make, drift=rng.choice((0.0, 0.02, 0.1)))
    world.start_all()
    world.run(3_000)
    storm(world, steps_ms)
    world.calm()
    for host in world.hosts:
        if host.core is None:
            world.start(host)
    for host in world.hosts:  # a host that knew the controller may have been wiped
        if host.core is not None and world.controller[0] >= 0:
            world.give(host, events.ControllerKnown(world.controller[1], world.controller[0]))
            break
    world.settle(SETTLE_MS)
    world.check_rates(RATE_MAX)
    world.run(world.now + 15_000)
    world.check_rates(IDLE_RATE_MAX, world.now - 4_000)
    return world


@pytest.mark.parametrize("first_seed", quick(range(0, 40, 5), [0, 5]))
def test_histories_hold_the_invariants(first_seed: int) -> None:
    worlds = [history(seed) for seed in range(first_seed, first_seed + 5)]
    assert sum(len(world.deaths) for world in worlds) > 20, "too little happens to prove anything"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_histories(block: int) -> None:
    for seed in range(10_000 + block * 50, 10_050 + block * 50):
        history(seed)


def test_runs_are_deterministic() -> None:
    assert history(7).trace == history(7).trace


# -- guarantees with few faults ------------------------------------------------------------------


def calm_world(seed: int, count: int, weather: Weather | None = None, **options) -> World:
    world = World(seed, count, **options)
    world.start_all()
    world.run(8_000)
    world.weather = weather or Weather()
    return world


@pytest.mark.parametrize("seed", quick(range(6), [0]))
def test_a_bad_network_alone_causes_no_false_death(seed: int) -> None:
    """5 % of all datagrams lost, others late or repeated: two minutes without a false death."""
    world = calm_world(seed, 9, Weather(loss=0.05, duplicate=0.05, delay_ms=60))
    world.run(120_000)
    assert world.deaths == [] and world.disagreement() == ""
    world.check_rates(60)


@pytest.mark.parametrize("count", quick([3, 9, 24], [3, 9]))
def test_all_hosts_learn_of_a_death(count: int) -> None:
    """Suspected by all within 4 s, dead for all within 6 s, with any seed."""
    for seed in range(8):
        world = calm_world(seed, count, Weather(loss=0.02, delay_ms=10))
        victim = world.hosts[seed % count]
        began = world.now
        world.crash(victim)
        world.run(began + 15_000)
        suspected = [
            when
            for when, _, _, after, identity in world.changes
            if when > began and after == SUSPECT and identity[0] == victim.node_id
        ]
        dead = [when for when, _, identity in world.deaths if when > began and identity[0] == victim.node_id]
        assert len(dead) == count - 1
        assert max(suspected) - began < 4_000 and max(dead) - began < 6_000
        assert not world.false_deaths()


def first_suspicion_ms(world: World, victim: Host) -> int:
    """Milliseconds from now, when the victim crashes, until the first of the others suspects it."""
    began = world.now
    world.crash(victim)
    world.run(began + 8_000)
    return (
        min(
            when
            for when, _, _, after, identity in world.changes
            if when > began and after == SUSPECT and identity[0] == victim.node_id
        )
        - began
    )


def test_a_failed_host_is_suspected_within_three_intervals() -> None:
    """Suspected within three intervals: the predecessor's turn comes after two at most, and its probe
    takes one. Probes in random order alone would not reach one host of seven in that time.
    """
    world = calm_world(5, 24)
    for victim in world.hosts[3:18]:
        assert first_suspicion_ms(world, victim) < 3 * world.settings.probe_interval_ms * (1 + world.drift) + 20


def test_the_predecessor_skips_a_suspect() -> None:
    """Neighbours in the ring fail together: the second is suspected two intervals after the first."""
    for seed in range(6):
        world = calm_world(seed, 24)
        ring = sorted(world.hosts, key=lambda host: host.directory_id)
        world.crash(ring[4])
        assert first_suspicion_ms(world, ring[5]) < 6 * world.settings.probe_interval_ms * (1 + world.drift) + 20


def test_a_link_that_is_cut_one_way_causes_no_death() -> None:
    """Indirect probes succeed where two hosts cannot reach each other."""
    world = calm_world(1, 5)
    world.cut_links([(1, 2)], world.now + 30_000)
    world.cut_links([(4, 3), (3, 4)], world.now + 30_000)
    world.run(world.now + 30_000)
    assert world.deaths == []


def test_hosts_are_probed_over_tcp_when_udp_is_blocked() -> None:
    """A firewall that drops all UDP: every host is probed over TCP."""
    world = World(3, 4)
    world.start_all()
    world.weather = Weather(loss=1.0)
    world.run(90_000)
    assert world.deaths == [] and all(host.core.membership.live_count == 4 for host in world.hosts)


def stand_still(seed: int, make: Callable[..., GossipCore] = GossipCore) -> World:
    """The first of five hosts is paused for 20 s while it waits for a probe's response."""
    world = calm_world(seed, 5, Weather(delay_ms=90), make=make)
    host = world.hosts[0]
    while not host.core.prober.probes:
        world.run(world.now + 1)
    world.pause(host, world.now + 20_000)
    return world


def test_a_host_that_was_paused_suspects_no_other() -> None:
    """A process that was stopped finds its timers overdue and the responses unread: it must not
    suspect hosts because of that.
    """
    for seed in range(10):
        world = stand_still(seed)
        world.run(world.now + 40_000)
        assert [
            change for change in world.changes if change[1] == 1 and change[0] > 8_000 and change[3] in (SUSPECT, DEAD)
        ] == []
        assert world.disagreement() == ""


def split(seed: int, make: Callable[..., GossipCore] = GossipCore) -> World:
    """No host has seeds any longer; two halves are cut off from each other for half a minute."""
    world = calm_world(seed, 6, make=make)
    for host in world.hosts:
        world.give(host, events.SeedsChanged(()))
    world.cut_links([(a, b) for a in range(1, 7) for b in range(1, 7) if (a < 4) != (b < 4)], world.now + 30_000)
    world.run(world.now + 30_000)
    assert all(host.core.membership.live_count == 3 for host in world.hosts)
    return world


def test_two_halves_find_each_other_again() -> None:
    for seed in range(5):
        split(seed).settle(8_000)
    with pytest.raises(Broken, match="S2"):
        split(0, _with("prober", reconnect=lambda prober, original, member: None)).settle(40_000)


def test_a_host_that_left_is_not_called_dead() -> None:
    world = calm_world(5, 5)
    world.leave(world.hosts[2])
    world.run(world.now + 10_000)
    assert world.deaths == [] and world.hosts[2].core is None
    assert all(host.core.view(3).state == "left" for host in world.hosts if host.core)
    world.start(world.hosts[2])
    world.settle(5_000)


def test_a_wiped_host_is_another_member() -> None:
    world = calm_world(6, 4)
    old = (4, world.hosts[3].directory_id)
    world.crash(world.hosts[3])
    world.wipe(world.hosts[3])
    world.by_identity[old] = Host(99, 4, old[1])
    world.run(world.now + 1_000)
    world.start(world.hosts[3])
    world.run(world.now + 20_000)
    assert world.hosts[0].core.view(4).directory_id == world.hosts[3].directory_id
    assert world.hosts[0].core.membership.members[old].state == DEAD
    world.give(world.hosts[0], events.Forget(4))
    assert old not in world.hosts[0].core.membership.members and world.hosts[0].core.view(4).state == ALIVE


# -- planted bugs ----------------------------------------------------------------------------------


def _with(part: str, **methods: Callable) -> Callable[..., GossipCore]:
    """A core whose part has other methods."""

    def make(*arguments, **options) -> GossipCore:
        core = GossipCore(*arguments, **options)
        target = core if part == "core" else getattr(core, part)
        for name, method in methods.items():
            original = getattr(target, name)
            setattr(target, name, lambda *a, _m=method, _o=original, **k: _m(target, _o, *a, **k))
        return core

    return make


def _deaf_to_repetition(core, original, data):
    core._windows.clear()
    original(data)


def _any_life(core, original, data):
    before = type(core.membership).life
    try:
        type(core.membership).life = property(lambda self: _AnyLife(before.fget(self)))
        original(data)
    finally:
        type(core.membership).life = before


class _AnyLife(int):
    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def _keeps_its_incarnation(membership, original, incarnation):
    membership.incarnation = max(membership.incarnation, incarnation)
    return True


def _late_is_now(core, original, now_ms):
    if not core._timers:
        core._stopped_ms = now_ms - core.own_time_ms
    core.own_time_ms = max(core.own_time_ms, now_ms - core._stopped_ms)


def _alive_again(membership, original, alive):
    member = membership.members.get((alive.node_id, alive.directory_id))
    if member is not None and alive.incarnation <= member.incarnation and member.state == DEAD:
        member.incarnation = alive.incarnation - 1
    original(alive)


BUGS: dict[str, Callable[..., GossipCore]] = {
    "repetitions are taken": _with("core", _on_datagram=_deaf_to_repetition),
    "datagrams for an earlier life are taken": _with("core", _on_datagram=_any_life),
    "a refutation does not outrank": _with("membership", _raise_above=_keeps_its_incarnation),
    "suspicions are not refuted": _with("membership", _refute=lambda m, o, i: None),
    "an equal incarnation revives": _with("membership", _on_alive=_alive_again),
    "the newest controller is not kept": _with(
        "core",
        _learn_controller=lambda c, o, epoch, node: (
            setattr(c._controller_hint, "epoch", min(c._controller_hint.epoch, epoch)),
            o(epoch, node),
        ),
    ),
    "gossip without end": _with("core", _sends_max=lambda c, o, multiplier: 10_000),
}


# the test below plants one in the quick tier
@pytest.mark.parametrize("bug", quick(BUGS, []))
def test_a_planted_bug_is_found(bug: str) -> None:
    for seed in range(60):
        try:
            history(seed, BUGS[bug])
        except (Broken, AssertionError, AttributeError):
            return
    pytest.fail(f"survives 60 histories: {bug}")


def test_without_the_pause_rule_live_hosts_are_suspected() -> None:
    accused = 0
    for seed in range(10):
        world = stand_still(seed, _with("core", _set_time=_late_is_now))
        world.run(world.now + 40_000)
        accused += len(
            [
                change
                for change in world.changes
                if change[1] == 1 and change[0] > 8_000 and change[3] in (SUSPECT, DEAD)
            ]
        )
    assert accused, "the rule would not be needed"


def test_two_hash_seeds_give_the_same_run() -> None:
    code = (
        "import hashlib; from tests.sim.membership.test_gossip_sim import history;"
        " print(hashlib.sha256(repr(history(7).trace).encode()).hexdigest())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] and len(runs[0]) > 60
