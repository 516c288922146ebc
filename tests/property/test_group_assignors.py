"""Server-side assignors checked against their guarantees (A1-A6 of
mqd/coordinator/group/consumer/assignors.py), on random groups.
"""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from mqd.coordinator.group.consumer.assignors import (
    ASSIGNORS,
    MemberSpec,
    Partitions,
    check_assignment,
    range_,
    uniform,
)
from tests.tiers import examples

TOPICS = [number.to_bytes(16, "big") for number in range(5)]
QUICK = settings(max_examples=examples(75, 300), deadline=None)
counts_of = st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 9), min_size=1)


def spec(topics, current: Partitions | None = None) -> MemberSpec:
    return MemberSpec(frozenset(topics), current or {})


@st.composite
def groups(draw, alike: bool) -> tuple[dict[str, MemberSpec], dict[bytes, int]]:
    """With an assignor's result from before the members and the topics changed."""
    counts, old_counts = draw(counts_of), draw(counts_of)
    shared = draw(st.frozensets(st.sampled_from(TOPICS), min_size=1))

    def subscription() -> frozenset[bytes]:
        return shared if alike else draw(st.frozensets(st.sampled_from(TOPICS)))

    before = {f"m{number}": spec(subscription()) for number in range(draw(st.integers(0, 7)))}
    had = ASSIGNORS[draw(st.sampled_from(sorted(ASSIGNORS)))](before, old_counts) if before else {}
    stay = [member_id for member_id in before if draw(st.booleans())]
    members = {
        member_id: spec(before[member_id].topics if alike or draw(st.booleans()) else subscription(), had[member_id])
        for member_id in stay
    }
    members |= {f"n{number}": spec(subscription()) for number in range(draw(st.integers(0 if stay else 1, 5)))}
    return members, counts


def size(partitions: Partitions) -> int:
    return sum(map(len, partitions.values()))


def flat(partitions: Partitions) -> set[tuple[bytes, int]]:
    return {(topic, index) for topic, indexes in partitions.items() for index in indexes}


@QUICK
@given(groups(alike=True))
def test_uniform_alike_is_even_and_moves_least(case) -> None:
    members, counts = case
    found = uniform(members, counts)
    check_assignment(members, counts, found)
    assert uniform(members, counts) == found
    sizes = sorted(size(found[member_id]) for member_id in members)
    assert sizes[-1] - sizes[0] <= 1
    total = sum(sizes)
    low, extra = divmod(total, len(members))
    valid = {
        member_id: {one for one in flat(spec.current) if one[0] in spec.topics and one[1] < counts.get(one[0], 0)}
        for member_id, spec in members.items()
    }
    # The most that any even assignment can keep: every member keeps up to the lower share, and
    # `extra` of those who have more keep one more.
    most = sum(min(len(mine), low) for mine in valid.values()) + min(
        extra, sum(len(mine) > low for mine in valid.values())
    )
    assert sum(len(flat(found[member_id]) & mine) for member_id, mine in valid.items()) == most


@QUICK
@given(groups(alike=False))
def test_uniform_mixed_cannot_be_improved_by_one_move(case) -> None:
    members, counts = case
    found = uniform(members, counts)
    check_assignment(members, counts, found)
    assert uniform(members, counts) == found
    for giver, taker in itertools.permutations(members, 2):
        if size(found[giver]) - size(found[taker]) > 1:
            assert not members[taker].topics & found[giver].keys()


@QUICK
@given(groups(alike=False))
def test_uniform_mixed_settles(case) -> None:
    """It repeats its assignment."""
    members, counts = case
    found = uniform(members, counts)
    again = uniform({member_id: MemberSpec(one.topics, found[member_id]) for member_id, one in members.items()}, counts)
    assert again == found


@QUICK
@given(groups(alike=False))
def test_range_assigns_adjacent_partitions(case) -> None:
    members, counts = case
    found = range_(members, counts)
    check_assignment(members, counts, found)
    assert range_(members, counts) == found
    for topic, count in counts.items():
        subscribers = [member_id for member_id, one in members.items() if topic in one.topics]
        shares = [found[member_id].get(topic, ()) for member_id in subscribers]
        for share in shares:
            assert list(share) == list(range(share[0], share[0] + len(share))) if share else True
        if subscribers:
            assert max(map(len, shares)) - min(map(len, shares)) <= 1 and sum(map(len, shares)) == count


@QUICK
@given(groups(alike=True))
def test_range_lets_topics_be_joined(case) -> None:
    """A member has the same range of all topics with as many partitions."""
    members, counts = case
    found = range_(members, counts)
    for one, other in itertools.combinations(
        [topic for topic in counts if topic in next(iter(members.values())).topics], 2
    ):
        if counts[one] == counts[other]:
            assert all(partitions.get(one) == partitions.get(other) for partitions in found.values())


def test_range_keeps_its_order_when_members_come_and_go() -> None:
    topic = TOPICS[0]
    first = range_({f"m{number}": spec([topic]) for number in range(3)}, {topic: 6})
    assert first == {"m0": {topic: (0, 1)}, "m1": {topic: (2, 3)}, "m2": {topic: (4, 5)}}
    later = range_({"m0": spec([topic], first["m0"]), "m2": spec([topic], first["m2"]), "a": spec([topic])}, {topic: 6})
    assert later == {"m0": {topic: (0, 1)}, "m2": {topic: (2, 3)}, "a": {topic: (4, 5)}}


def test_members_without_subscriptions_get_nothing() -> None:
    for assign in ASSIGNORS.values():
        assert assign({}, {}) == {}
        assert assign({"m": spec([])}, {TOPICS[0]: 3}) == {"m": {}}
        assert assign({"m": spec([TOPICS[1]])}, {TOPICS[0]: 3}) == {"m": {}}
