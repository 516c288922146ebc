"""The client's classic membership core and the broker's classic group core in one world
(client_classic_world.py); and the assignors by themselves.
"""

from __future__ import annotations

import random

import pytest

from mqd.client.group.assignors import (
    ASSIGNORS,
    Subscription,
    assign_cooperative,
    assign_sticky,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from mqd.client.group.classic import ClassicCore
from tests.sim.client.client_classic_world import ClassicWorld, run
from tests.sim.client.client_group_world import MAX_POLL_MS, SESSION_MS, leaves_slowly
from tests.tiers import quick

QUICK_SEEDS = 25


def test_histories() -> None:
    received: set[int] = set()
    for seed in range(QUICK_SEEDS):
        received |= run(seed).received
    assert {0, 25, 27, 79} <= received


def test_a_member_that_leaves_keeps_its_partitions_until_they_are_released() -> None:
    for seed in range(5):
        member, valid_ms = leaves_slowly(ClassicWorld(seed), poll_ms=20 * SESSION_MS)
        assert member.is_gone and valid_ms > 2.9 * SESSION_MS


def test_an_application_that_never_releases_them_loses_them() -> None:
    for seed in range(5):
        member, valid_ms = leaves_slowly(ClassicWorld(seed), poll_ms=MAX_POLL_MS)
        assert member.is_gone and MAX_POLL_MS < valid_ms < MAX_POLL_MS + SESSION_MS + 100


@pytest.mark.slow
@pytest.mark.parametrize("share", range(10))
def test_many_histories(share: int) -> None:
    for seed in range(1_000 + 100 * share, 1_100 + 100 * share):
        run(seed)


def keeps_what_it_has_when_it_joins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ClassicCore,
        "_start_action",
        lambda self, kind, places, actions, _before=ClassicCore._start_action: (
            None if kind.__name__ == "Revoke" else _before(self, kind, places, actions)
        ),
    )
    patch.setattr(ClassicCore, "check", lambda self: None)


def never_rejoins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClassicCore, "_rejoin", lambda self, now_ms: None)


@pytest.mark.parametrize(
    "plant", quick([keeps_what_it_has_when_it_joins, never_rejoins], [keeps_what_it_has_when_it_joins])
)
def test_planted_bugs_are_found(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(QUICK_SEEDS):
            run(seed)


@pytest.mark.parametrize("name", sorted(ASSIGNORS))
def test_assignors_give_each_partition_to_a_subscriber(name: str) -> None:
    for seed in range(200):
        rng = random.Random(seed)
        counts = {f"t{index}": rng.randrange(1, 9) for index in range(rng.randrange(1, 5))}
        members = {
            f"m{index}": Subscription(frozenset(rng.sample(sorted(counts), rng.randrange(0, len(counts) + 1))))
            for index in range(rng.randrange(1, 6))
        }
        found = ASSIGNORS[name](members, counts)
        given = [place for places in found.values() for place in places]
        assert sorted(given) == sorted(
            (topic, index)
            for topic, count in counts.items()
            if any(topic in one.topics for one in members.values())
            for index in range(count)
        )
        assert all(topic in members[member_id].topics for member_id, places in found.items() for topic, _ in places)


def test_sticky_moves_little_and_cooperatively() -> None:
    everything = frozenset({"t"})
    counts = {"t": 12}
    first = assign_cooperative({"a": Subscription(everything), "b": Subscription(everything)}, counts)
    assert [len(places) for places in first.values()] == [6, 6]
    members = {name: Subscription(everything, frozenset(first.get(name, ()))) for name in "abc"}
    target = assign_sticky(members, counts)
    assert (
        [len(target[name]) for name in "abc"] == [4, 4, 4] and target["a"] <= first["a"] and target["b"] <= first["b"]
    )
    round_one = assign_cooperative(members, counts)
    assert round_one["c"] == set() and round_one["a"] == target["a"]
    members = {name: Subscription(everything, frozenset(round_one[name])) for name in "abc"}
    assert assign_cooperative(members, counts) == target
    both = {name: Subscription(everything, frozenset({("t", 0)})) for name in "ab"}
    # both claim it, so both give it up
    assert not any(("t", 0) in places for places in assign_cooperative(both, {"t": 1}).values())


def test_member_metadata() -> None:
    one = Subscription(frozenset({"a", "b"}), frozenset({("a", 0), ("a", 3), ("b", 1)}))
    assert decode_subscription(encode_subscription(one)) == one
    assert decode_assignment(encode_assignment(one.owned)) == one.owned and decode_assignment(b"") == frozenset()
    data = encode_subscription(one)
    for size in range(len(data)):
        with pytest.raises(ValueError):
            decode_subscription(data[:size])
    with pytest.raises(ValueError):
        decode_assignment(b"\0\1\x7f\xff\xff\xff")
