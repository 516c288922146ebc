"""Gossip by single events: precedence, suspicion, windows, bounds, the wire."""

from __future__ import annotations

import random

import msgspec
import pytest

from mqd.cluster.membership import gossip_events as events
from mqd.cluster.membership.gossip import EXCHANGE_COUNT_MAX, GossipCore
from mqd.cluster.membership.gossip_events import (
    ALIVE,
    DEAD,
    LEFT,
    SUSPECT,
    DuplicateNodeId,
    MemberChanged,
    Profile,
    PushPull,
    SendDatagram,
    Settings,
    StoreLife,
)
from mqd.cluster.membership.gossip_messages import (
    DATAGRAM_BYTES_MAX,
    LIFE_MAX,
    LIFE_UNIT,
    Ack,
    Alive,
    Dead,
    Left,
    Load,
    MemberEntry,
    Nack,
    PacketOut,
    Ping,
    PingRequest,
    Raw,
    Refused,
    Seal,
    State,
    Suspect,
    decode_stream,
    encode,
    encode_update,
    life_of,
)
from mqd.cluster.membership.gossip_parts import Broadcasts, Health, ReplayWindow, Suspicion, TokenBucket

SEAL = Seal(b"k" * 32, "cluster")
DIRECTORY = b"\x01" * 16


def directory(number: int) -> bytes:
    return number.to_bytes(16, "big")


def alive(number: int, incarnation: int = LIFE_UNIT, **fields) -> Alive:
    return Alive(number, directory(number), incarnation, f"host-{number}", 9094, **fields)


class Peer:
    """Another host, controlled by the test."""

    def __init__(self, number: int) -> None:
        self.number, self.sequence = number, 0

    def says(
        self,
        *updates,
        body=None,
        to: bytes = DIRECTORY,
        to_life: int = 1,
        incarnation: int = LIFE_UNIT,
        controller: tuple[int, int] = (-1, -1),
    ) -> events.DatagramReceived:
        self.sequence += 1
        raw = [Raw(encode_update(update)) for update in updates]
        return events.DatagramReceived(
            SEAL.seal(
                PacketOut(
                    to, to_life, self.number, directory(self.number), incarnation, self.sequence, *controller, body, raw
                )
            )
        )


class Bench:
    """A core with members 2..count, at rest."""

    def __init__(self, count: int = 5, settings: Settings | None = None, **options) -> None:
        self.core = GossipCore(
            Profile(1, DIRECTORY, "host-1", 9094), SEAL, settings or Settings(), random.Random(1), 1, **options
        )
        self.now = 1_000
        self.peers = {number: Peer(number) for number in range(2, count + 1)}
        self.give(events.Started())
        self.give(
            events.StateReceived(State(-1, -1, [MemberEntry(alive(number), ALIVE, LIFE_UNIT) for number in self.peers]))
        )
        self.give(events.Tick(), 5)

    def give(self, event: events.Event, wait_ms: int = 0) -> list:
        self.now += wait_ms
        effects = self.core.handle(event, self.now)
        self.core.check()
        return effects

    def wait(self, wait_ms: int) -> list:
        return [effect for _ in range(wait_ms) for effect in self.give(events.Tick(), 1)]

    def send(self, number: int, *updates, **options) -> list:
        return self.give(self.peers[number].says(*updates, **options))

    def state(self, number: int) -> str:
        return self.core.view(number).state

    def packets(self, effects: list) -> list:
        return [SEAL.open(effect.data) for effect in effects if isinstance(effect, SendDatagram)]


def test_precedence() -> None:
    """Every pair of a first and a second claim, at the previous, the same and the next incarnation."""
    make = {
        ALIVE: lambda i: alive(3, i),
        SUSPECT: lambda i: Suspect(3, directory(3), i, 2),
        DEAD: lambda i: Dead(3, directory(3), i, 2),
        LEFT: lambda i: Left(3, directory(3), i),
    }
    base = 2 * LIFE_UNIT
    for first in make:
        for second in make:
            for step in (-1, 0, 1):
                bench = Bench()
                bench.send(2, alive(3, base))
                bench.send(2, make[first](base))
                assert bench.state(3) == first
                bench.send(2, make[second](base + step))
                rank = [ALIVE, SUSPECT, DEAD, LEFT].index
                if second == ALIVE:
                    expected = ALIVE if step > 0 else first
                elif second == SUSPECT and first in (DEAD, LEFT):
                    expected = first  # only the host itself can refute that
                else:
                    expected = second if step >= 0 and rank(second) > rank(first) else first
                assert bench.state(3) == expected, (first, second, step)
                assert bench.core.view(3).incarnation >= base


def test_claims_about_this_host_are_refuted() -> None:
    for slander in (
        Suspect(1, DIRECTORY, LIFE_UNIT, 3),
        Dead(1, DIRECTORY, LIFE_UNIT, 3),
        Left(1, DIRECTORY, LIFE_UNIT),
    ):
        bench = Bench()
        packets = bench.packets(bench.send(2, slander))
        assert bench.core.membership.incarnation == LIFE_UNIT + 1
        assert any(
            isinstance(update, Alive) and update.incarnation == LIFE_UNIT + 1
            for packet in packets
            for update in packet.updates
        )
        bench.send(2, slander)  # an old one
        assert bench.core.membership.incarnation == LIFE_UNIT + 1


def test_an_old_slander_in_a_ping_is_answered_with_the_truth() -> None:
    bench = Bench()
    bench.send(2, Suspect(1, DIRECTORY, LIFE_UNIT + 5, 3))
    (packet,) = bench.packets(bench.send(4, Dead(1, DIRECTORY, LIFE_UNIT, 4), body=Ping(7, "host-4", 9094)))
    assert packet.body == Ack(7) and packet.updates[0].incarnation == LIFE_UNIT + 6


def test_a_later_life_of_this_host_is_outlived_and_kept() -> None:
    bench = Bench()
    effects = bench.send(2, Dead(1, DIRECTORY, 9 * LIFE_UNIT + 3, 2))
    assert bench.core.membership.incarnation == 9 * LIFE_UNIT + 4 or StoreLife(10) in effects
    bench = Bench()
    assert StoreLife(10) in bench.send(2, Suspect(1, DIRECTORY, 10 * LIFE_UNIT - 1, 2))
    assert bench.core.membership.life == 10


def test_the_highest_incarnation_is_not_refuted() -> None:
    bench = Bench()
    bench.send(2, Suspect(1, DIRECTORY, (LIFE_MAX + 1) * LIFE_UNIT - 1, 2))
    assert bench.core.membership.life == 1 and bench.core.counts["unrefutable"] == 1


def test_before_joining_a_known_life_is_an_old_copy() -> None:
    core = GossipCore(Profile(1, DIRECTORY, "host-1", 9094), SEAL, Settings(), random.Random(1), 1, [("seed", 1)])
    core.handle(events.Started(), 0)
    (push,) = [effect for effect in core.handle(events.Tick(), 1) if isinstance(effect, PushPull)]
    effects = core.handle(
        events.StateReceived(
            State(
                3,
                2,
                [
                    MemberEntry(alive(2), ALIVE, LIFE_UNIT),
                    MemberEntry(alive(1).__class__(1, DIRECTORY, LIFE_UNIT, "old", 1), DEAD, LIFE_UNIT),
                ],
            ),
            push.exchange_id,
        ),
        2,
    )
    assert StoreLife(2) in effects and core.joined and core.membership.life == 2 and core.controller.epoch == 3


def test_suspicion_runs_out_sooner_when_others_confirm() -> None:
    for confirmers, expected in (((), 6_000), ((3,), 3_500), ((3, 4), 2_038), ((3, 4, 5), 1_000), ((3, 3, 3), 3_500)):
        bench = Bench(7, Settings(probe_interval_ms=500, confirmer_count=0))
        began = bench.now
        bench.send(2, Suspect(7, directory(7), LIFE_UNIT, 2))
        for by in confirmers:
            bench.send(2, Suspect(7, directory(7), LIFE_UNIT, by))
        while bench.state(7) != DEAD:
            bench.give(events.Tick(), 1)
            for number in (2, 3, 4, 5, 6):  # they live
                bench.core.prober._probe_ids.pop((number, directory(number)), None)
            bench.core.prober.probes.clear()
            bench.core.prober._probe_ids.clear()
            assert bench.now - began < 7_000
        assert abs(bench.now - began - expected) <= 2


def test_members_are_probed_twice_as_often_while_many_are_suspected() -> None:
    for suspect_count, expected in ((0, 10), (2, 10), (3, 20)):
        bench = Bench(9, Settings(probe_interval_ms=500, confirmer_count=0))
        for number in range(2, 2 + suspect_count):
            bench.send(9, Suspect(number, directory(number), LIFE_UNIT, 9))
        probed: list[object] = []
        bench.core.prober.probe = probed.append  # type: ignore[method-assign]
        bench.wait(5_000)
        assert abs(len(probed) - expected) <= 1


def test_a_state_does_not_declare_hosts_dead() -> None:
    """Push-pull: the other side's dead are suspected here, and may say that they live."""
    bench = Bench()
    bench.give(
        events.StateReceived(
            State(
                -1,
                -1,
                [
                    MemberEntry(alive(2), ALIVE, LIFE_UNIT),
                    MemberEntry(alive(3), DEAD, LIFE_UNIT),
                    MemberEntry(alive(9), DEAD, LIFE_UNIT),
                ],
            )
        )
    )
    assert bench.state(3) == SUSPECT and bench.core.view(9) is None


def test_invalid_datagrams_change_nothing() -> None:
    bench = Bench()
    good = bench.peers[2].says(Dead(3, directory(3), LIFE_UNIT, 2)).data
    other = Seal(b"x" * 32, "cluster"), Seal(b"k" * 32, "another")
    wrong = [
        b"",
        good[:-1],
        good + b"\0",
        b"mqg2" + good[4:],
        good[:36],
        bytes(2000),
        *(seal.seal(SEAL.open(good)) for seal in other),
    ]
    wrong += [good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :] for place in range(len(good))]
    for data in wrong:
        assert bench.give(events.DatagramReceived(data)) == []
    assert bench.core.counts["refused"] == len(wrong) and bench.state(3) == ALIVE
    bench.give(events.DatagramReceived(good))
    assert bench.state(3) == DEAD


def test_repeated_or_misdirected_datagrams_change_nothing() -> None:
    bench = Bench()
    first = bench.peers[2].says(Suspect(3, directory(3), LIFE_UNIT, 2))
    bench.give(first)
    bench.send(2, alive(3, LIFE_UNIT + 1))
    for event in (
        first,
        bench.peers[2].says(Dead(3, directory(3), LIFE_UNIT + 1, 2), to=directory(4)),
        bench.peers[2].says(Dead(3, directory(3), LIFE_UNIT + 1, 2), to_life=2),
    ):
        assert bench.give(event) == []
    assert bench.state(3) == ALIVE


def test_an_unknown_sender_gets_a_bounded_rate_of_responses_and_changes_nothing() -> None:
    bench = Bench()
    stranger = Peer(77)
    responses = 0
    for _ in range(500):
        effects = bench.give(stranger.says(Dead(3, directory(3), LIFE_UNIT, 77), body=Ping(5, "host-77", 9094)))
        responses += len(effects)
    assert responses == bench.core.settings.unknown_rate_per_s and bench.state(3) == ALIVE


def test_responses_to_any_host_are_bounded() -> None:
    bench = Bench()
    sent = sum(len(bench.packets(bench.send(2, body=Ping(5, "host-2", 9094)))) for _ in range(2_000))
    assert sent <= bench.core.settings.response_burst + 5


def test_the_table_is_bounded() -> None:
    bench = Bench(5, Settings(member_count_max=8))
    bench.send(2, *(alive(number) for number in range(10, 30)))
    assert len(bench.core.membership.members) == 8 and bench.core.counts["table_full"] == 16
    bench.send(2, Dead(3, directory(3), LIFE_UNIT, 2))
    bench.send(2, alive(50))
    assert bench.core.view(50) is not None and bench.core.view(3) is None
    full = Bench(Settings().member_count_max + 1).core.state()
    assert decode_stream(encode(full)) == full and len(full.entries) == 4097


def test_a_dead_member_is_forgotten_after_a_while() -> None:
    bench = Bench(5, Settings(dead_retention_ms=60_000))
    bench.send(2, Dead(3, directory(3), LIFE_UNIT, 2))
    bench.core.membership.members[(3, directory(3))].since_ms -= 60_001
    bench.core.membership.sweep()
    assert bench.core.view(3) is None


def test_a_member_that_is_contacted_again_receives_the_whole_state() -> None:
    """Only by the host that contacted it: a member that another host contacted exchanges states
    with that one.
    """
    bench = Bench(5, Settings(push_pull_interval_ms=10**9))
    for number in (3, 4):
        bench.send(2, Dead(number, directory(number), LIFE_UNIT, 2))
    called = None
    while called is None:
        bench.give(events.Tick(), 1)
        called = bench.core._reconnecting
        assert bench.now < 60_000
    other = 7 - called[0]
    for number in (other, called[0]):
        effects = bench.send(2, alive(number, 2 * LIFE_UNIT)) + bench.wait(5)
        exchanges = [(effect.host, effect.port) for effect in effects if isinstance(effect, events.PushPull)]
        assert exchanges == ([(f"host-{number}", 9094)] if number == called[0] else []), bench.state(number)


def test_probe_asks_others_and_tcp_before_it_suspects() -> None:
    bench = Bench(5)
    seen: list = []
    while not any(isinstance(change, MemberChanged) for change in seen):
        seen += bench.give(events.Tick(), 1)
        assert bench.now < 4_000
    bodies = [packet.body for packet in bench.packets(seen)]
    assert sum(isinstance(body, PingRequest) for body in bodies) >= 3 and any(
        isinstance(effect, events.ProbeStream) for effect in seen
    )
    (suspected,) = [effect for effect in seen if isinstance(effect, MemberChanged)]
    reported = [
        packet
        for packet in bench.packets(seen)
        if packet.to_directory_id == suspected.member.directory_id
        and any(isinstance(update, Suspect) for update in packet.updates)
    ]
    assert reported, "the suspect itself receives the suspicion"


def test_nacks_count_against_the_target_not_against_this_host() -> None:
    for with_nacks, expected in ((False, 3), (True, 0)):
        bench = Bench(5)
        while not bench.core.prober.probes:
            bench.give(events.Tick(), 1)
        (probe_id,) = bench.core.prober.probes
        target = bench.core.prober.probes[probe_id].identity[0]
        bench.wait(200)
        for number in (2, 3, 4, 5):
            if with_nacks and number != target:
                bench.send(number, body=Nack(probe_id))
        bench.wait(300)
        assert bench.core.health.score == expected


def test_an_unsolicited_response_is_ignored() -> None:
    bench = Bench(5)
    bench.core.health.worsen(4)
    while not bench.core.prober.probes:
        bench.give(events.Tick(), 1)
    (probe_id,) = bench.core.prober.probes
    target = bench.core.prober.probes[probe_id].identity[0]
    other = next(number for number in (2, 3, 4, 5) if number != target)
    bench.send(other, body=Ack(probe_id))  # not the target, and not asked to help
    bench.send(target, body=Ack(probe_id + 1))
    assert bench.core.prober.probes
    bench.send(target, body=Ack(probe_id))
    assert not bench.core.prober.probes and bench.core.health.score == 3


def test_relayed_ping() -> None:
    bench = Bench(5)
    request = PingRequest(99, "host-2", 9094, 3, directory(3), 1, "host-3", 9094, 150)
    (ping,) = bench.packets(bench.send(2, body=request))
    assert isinstance(ping.body, Ping) and ping.to_directory_id == directory(3)
    (ack,) = bench.packets(bench.send(3, body=Ack(ping.body.probe_id)))
    assert ack.body == Ack(99) and ack.to_directory_id == directory(2)
    (ping,) = bench.packets(bench.send(2, body=request))
    assert any(packet.body == Nack(99) for packet in bench.packets(bench.wait(151)))


def test_the_controller_hint_never_decreases() -> None:
    bench = Bench()
    assert events.ControllerSeen(3, 5) in bench.send(2, controller=(5, 3))
    assert bench.send(4, controller=(4, 2)) == [] and bench.core.controller == events.ControllerSeen(3, 5)
    bench.give(events.ControllerKnown(2, 6))
    packets = bench.packets(bench.wait(1_000))
    assert len([packet for packet in packets if (packet.controller_epoch, packet.controller_id) == (6, 2)]) >= 9, (
        "told in rounds of their own"
    )


def test_load_is_piggybacked_and_only_the_newest_counts() -> None:
    bench = Bench()
    bench.send(2, Load(3, directory(3), 1, 5, cpu_permille=500))
    bench.send(2, Load(3, directory(3), 1, 4, cpu_permille=100), Load(88, directory(88), 1, 1))
    assert bench.core.view(3).load.cpu_permille == 500
    bench.give(events.LoadMeasured(cpu_permille=77, metadata_version=12))
    packets = []
    for _ in range(40):
        packets += bench.packets(bench.give(events.Tick(), 90))
        for number in (2, 3, 4, 5):
            for probe_id in list(bench.core.prober.probes):
                bench.send(number, body=Ack(probe_id))
    for _ in range(40):
        packets += bench.packets(bench.give(events.Tick(), 90))
    own = [
        update for packet in packets for update in packet.updates if isinstance(update, Load) and update.node_id == 1
    ]
    assert own and own[0].cpu_permille == 77 and own[0].life == 1


def test_two_of_one_node_id_are_reported_to_the_operator() -> None:
    bench = Bench()
    effects = bench.send(2, Alive(3, directory(333), LIFE_UNIT, "host-3b", 9094))
    assert any(isinstance(effect, DuplicateNodeId) and effect.node_id == 3 for effect in effects)


def test_leaving() -> None:
    bench = Bench()
    effects = bench.give(events.Leave())
    assert any(isinstance(update, Left) for packet in bench.packets(effects) for update in packet.updates)
    done = []
    for _ in range(1_000):
        done += bench.give(events.Tick(), 1)
    assert (
        done.count(events.LeaveDone()) == 1
        and bench.send(2, Dead(1, DIRECTORY, LIFE_UNIT, 2), body=Ping(1, "host-2", 9094)) == []
    )


def test_exchanges_are_bounded_and_given_up() -> None:
    core = GossipCore(
        Profile(1, DIRECTORY, "host-1", 9094),
        SEAL,
        Settings(join_interval_ms=2, join_interval_ms_max=2),
        random.Random(1),
        1,
        [("seed", 1)],
    )
    core.handle(events.Started(), 0)
    requested = sum(
        isinstance(effect, PushPull) for now in range(1, 4_000) for effect in core.handle(events.Tick(), now)
    )
    assert requested == EXCHANGE_COUNT_MAX


def test_the_longest_datagram() -> None:
    """Hosts with the longest names, everything at once: within the frame."""
    profile = Profile(
        2**31 - 1, b"\xff" * 16, "h" * 255, 65535, "r" * 200, "v" * 64, 1 << 61, 1 << 61, 1 << 61, 1 << 61
    )
    core = GossipCore(profile, SEAL, Settings(), random.Random(1), LIFE_MAX - 1, ())
    core.handle(events.Started(), 0)
    longest = [
        Alive(
            2**31 - 1 - n,
            bytes([n]) * 16,
            LIFE_UNIT * LIFE_MAX,
            "h" * 255,
            65535,
            "r" * 200,
            "v" * 64,
            1 << 61,
            1 << 61,
            1 << 61,
            1 << 61,
        )
        for n in range(20)
    ]
    core.handle(events.StateReceived(State(-1, -1, [MemberEntry(one, ALIVE, one.incarnation) for one in longest])), 1)
    sizes = [
        len(effect.data)
        for now in range(1, 3_000, 10)
        for effect in core.handle(events.Tick(), now)
        if isinstance(effect, SendDatagram)
    ]
    assert max(sizes) <= DATAGRAM_BYTES_MAX and max(sizes) > 1_000


def test_names_that_do_not_fit_are_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="shorten"):
        GossipCore(Profile(1, DIRECTORY, "h" * 255, 1, "é" * 249, "v" * 64), SEAL, Settings(), random.Random(1), 1)


def test_states_are_checked() -> None:
    good = encode(State(-1, -1, [MemberEntry(alive(2), ALIVE, LIFE_UNIT)]))
    assert decode_stream(good).entries[0].alive.node_id == 2
    for bad in (
        b"",
        b"\xc1",
        good[:-1],
        encode(["state", -1, -1, [["a"]]]),
        encode(["state", -1, -1, [1]]),
        bytes(9 << 20),
        encode(alive(2)),
    ):
        with pytest.raises(Refused):
            decode_stream(bad)


def test_random_bytes_under_a_valid_seal_are_accepted_or_refused() -> None:
    """From a host of another version, or a faulty one: each datagram is accepted or refused, and
    the core stays consistent.
    """
    rng = random.Random(5)
    bench = Bench()
    good = msgspec.msgpack.decode(
        bench.peers[2].says(alive(9), Suspect(3, directory(3), LIFE_UNIT, 4), body=Ping(1, "h", 1)).data[36:]
    )
    for _ in range(2_000):
        damaged = bytearray(msgspec.msgpack.encode(good))
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        body = bytes(damaged)
        data = b"mqg1" + SEAL._mac(SEAL._hmacs[0], body) + body
        bench.give(events.DatagramReceived(data), rng.randrange(2))


# -- parts -----------------------------------------------------------------------------------------


def test_window_against_a_set() -> None:
    rng = random.Random(3)
    window, seen, top = ReplayWindow(), set(), 0
    for _ in range(5_000):
        number = max(1, top + rng.randint(-300, 5))
        expected = number not in seen and number > top - 256
        assert window.accept(1, number) == expected
        seen.add(number)
        top = max(top, number)
    assert window.accept(2, 1) and not window.accept(1, top + 1) and not window.accept(2, 1)


def test_broadcasts_repeat_each_a_few_times_least_sent_first() -> None:
    queue = Broadcasts(100)
    for key in range(20):
        queue.put(key, bytes([key]) * 10)
    counts: dict[int, int] = {}
    while queue:
        taken = queue.take(55, 99, 4)
        assert len(taken) == len(set(taken)) and sum(map(len, taken)) <= 55
        for data in taken:
            counts[data[0]] = counts.get(data[0], 0) + 1
        queue.check()
        assert max(counts.values()) - min(counts.get(key, 0) for key in range(20)) <= 2
    assert counts == dict.fromkeys(range(20), 4)


def test_broadcasts_are_bounded() -> None:
    queue = Broadcasts(10)
    for key in range(50):
        queue.put(key, b"x")
        queue.check()
    assert len(queue) == 10


def test_bucket_and_health() -> None:
    bucket, health = TokenBucket(10, 5, 0), Health(8)
    assert [bucket.take(0) for _ in range(6)] == [True] * 5 + [False]
    assert bucket.take(100) and not bucket.take(150)
    health.worsen(99)
    assert health.multiplier == 9
    for _ in range(20):
        health.improve()
    assert health.multiplier == 1


def test_suspicion_between_two_hosts_waits_for_no_confirmation() -> None:
    assert Suspicion(0, 1_000, 6, 0, 1).deadline_ms == 1_000 and Suspicion(0, 1_000, 6, -1, 1).deadline_ms == 1_000
    assert life_of(5 * LIFE_UNIT + 7) == 5
