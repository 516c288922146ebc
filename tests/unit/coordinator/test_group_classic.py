"""Classic groups, one situation each: behaviour that Kafka's clients rely on, by error code."""

from __future__ import annotations

import pytest

from mqd.coordinator.group.classic.members import PENDING_MAX
from mqd.coordinator.group.offsets import CommitOffsets, CommittedOffset
from mqd.protocol.errors import ErrorCode as E
from tests.unit.coordinator.group_shell import GroupShell


@pytest.fixture
def shell() -> GroupShell:
    return GroupShell()


# -- joining ---------------------------------------------------------------------------------------


def test_a_new_member_must_join_again_with_its_id(shell: GroupShell) -> None:
    first = shell.reply(shell.join(version=4))
    assert (first.error_code, first.member_id) == (E.MEMBER_ID_REQUIRED, "m-1")
    number = shell.join(first.member_id, version=4)
    shell.advance(0)
    response = shell.reply(number)
    assert (
        response.error_code,
        response.generation_id,
        response.leader,
        response.protocol_name,
        response.protocol_type,
    ) == (0, 1, "m-1", "range", "consumer")
    assert [(one.member_id, one.metadata) for one in response.members] == [("m-1", b"m")]


def test_before_version_4_a_member_joins_at_once(shell: GroupShell) -> None:
    number = shell.join(version=3)
    shell.advance(0)
    assert shell.reply(number).error_code == 0


def test_an_unknown_member_id(shell: GroupShell) -> None:
    response = shell.reply(shell.join("stranger"))
    assert (response.error_code, response.member_id) == (E.UNKNOWN_MEMBER_ID, "stranger")
    assert shell.core.is_empty


def test_the_first_rebalance_waits_for_further_members() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=300)
    first = shell.join(version=3)
    shell.advance(250)
    second = shell.join(version=3)
    shell.advance(250)
    assert shell.reply(first) is None
    shell.advance(50)
    assert shell.reply(first).generation_id == shell.reply(second).generation_id == 1
    assert len(shell.reply(first).members) == 2 and shell.reply(second).members == []


def test_the_first_rebalance_does_not_wait_forever() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=300)
    first = shell.join(version=3, rebalance=1_000)
    for _ in range(11):
        shell.join(version=3, rebalance=1_000)
        shell.advance(100)
    assert shell.reply(first).error_code == 0


def test_the_protocol_that_most_members_want_and_all_support() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=10)
    numbers = [
        shell.join(version=3, protocols={"sticky": b"", "range": b"1", "old": b""}),
        shell.join(version=3, protocols={"range": b"2", "old": b""}),
        shell.join(version=3, protocols={"old": b"", "range": b"3", "sticky": b""}),
    ]
    shell.advance(10)
    leader = shell.reply(numbers[0])
    assert leader.protocol_name == "range" and [one.metadata for one in leader.members] == [b"1", b"2", b"3"]


@pytest.mark.parametrize("options", [{"kind": "connect"}, {"protocols": {"other": b""}}, {"kind": ""}])
def test_a_member_with_inconsistent_protocols(shell: GroupShell, options: dict) -> None:
    shell.stable(1)
    assert shell.reply(shell.join(**options)).error_code == E.INCONSISTENT_GROUP_PROTOCOL


def test_the_first_member_must_have_a_protocol(shell: GroupShell) -> None:
    assert shell.reply(shell.join(kind="")).error_code == E.INCONSISTENT_GROUP_PROTOCOL


def test_a_follower_that_missed_its_response_gets_it_again(shell: GroupShell) -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    leader, follower = shell.stable(2)
    again = shell.reply(shell.join(follower))
    assert (again.error_code, again.generation_id, again.leader, again.members) == (0, 1, leader, [])
    assert shell.core.state_name == "Stable"


def test_a_leader_that_rejoins_causes_a_rebalance() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    leader, follower = shell.stable(2)
    number = shell.join(leader)
    assert shell.core.state_name == "PreparingRebalance" and shell.reply(number) is None
    assert shell.beat(follower, 1) == E.REBALANCE_IN_PROGRESS
    assert [(one.member_id, one.waited_for) for one in shell.core.held_up_by()] == [(follower, "join")]
    shell.join(follower)
    assert shell.reply(number).generation_id == 2


def test_a_new_coordinator_has_not_heard_from_the_members_yet() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    leader, silent = shell.stable(2)
    shell.advance(100)
    shell.restart()
    shell.join(leader)
    (held_up_by,) = shell.core.held_up_by()
    assert (held_up_by.member_id, held_up_by.seen_ms) == (silent, -1)
    assert shell.beat(silent, 1) == E.REBALANCE_IN_PROGRESS and shell.core.held_up_by()[0].seen_ms == shell.now


def test_changed_metadata_causes_a_rebalance() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    _, follower = shell.stable(2)
    shell.join(follower, protocols={"range": b"other topics"})
    assert shell.core.state_name == "PreparingRebalance"


def test_a_member_that_does_not_rejoin_in_time_is_removed() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    leader, follower = shell.stable(2, rebalance=5_000)
    number = shell.join(leader, rebalance=5_000)
    for _ in range(5):
        shell.advance(1_000)
        if shell.reply(number) is None:
            assert shell.beat(follower, 1) == E.REBALANCE_IN_PROGRESS  # alive, but busy: max.poll.interval.ms
    assert [one.member_id for one in shell.reply(number).members] == [leader]
    assert shell.beat(follower, 1) == E.UNKNOWN_MEMBER_ID


def test_a_join_repeated_over_another_connection_completes_the_first() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    leader, _ = shell.stable(2)
    first, second = shell.join(leader), shell.join(leader)
    assert shell.reply(first).error_code == E.REBALANCE_IN_PROGRESS and shell.reply(second) is None


def test_a_full_group() -> None:
    shell = GroupShell(max_size=2, initial_rebalance_delay_ms=1)
    shell.stable(2)
    response = shell.reply(shell.join(version=3))
    assert (response.error_code, response.member_id) == (E.GROUP_MAX_SIZE_REACHED, "")


def test_a_static_member_of_a_full_group_may_come_back() -> None:
    shell = GroupShell(max_size=2, initial_rebalance_delay_ms=1)
    shell.stable(2, instances=True)
    assert shell.reply(shell.join(instance="i1")).error_code == 0


def test_pending_members_are_bounded(shell: GroupShell) -> None:
    first = shell.reply(shell.join()).member_id
    shell.core.check = lambda: None  # it visits all members, every time
    for _ in range(PENDING_MAX):
        shell.join()
    assert (
        len(shell.classic.members.pending) == PENDING_MAX
        and shell.reply(shell.join(first)).error_code == E.UNKNOWN_MEMBER_ID
    )


def test_a_pending_member_is_not_kept_for_a_long_session(shell: GroupShell) -> None:
    """With a half-hour session, an otherwise empty group would be kept for half an hour, and
    rebalances of a real one would wait.
    """
    shell.join(version=9, session=1_800_000)
    shell.advance(shell.settings.pending_timeout_ms - 1)
    assert not shell.core.is_empty
    shell.advance(1)
    assert shell.core.is_empty


def test_a_pending_member_expires_with_its_session() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    (leader,) = shell.stable(1)
    shell.join(session=6_000)
    number = shell.join(leader)
    assert shell.reply(number) is None and [one.waited_for for one in shell.core.held_up_by()] == ["first join"]
    shell.advance(6_000)
    assert shell.reply(number).generation_id == 2


def test_a_new_member_that_disappeared_does_not_block_the_group() -> None:
    shell = GroupShell(new_member_join_timeout_ms=50_000, initial_rebalance_delay_ms=1)
    leader, follower = shell.stable(2, rebalance=300_000)
    number = shell.join(version=3, rebalance=300_000)
    for _ in range(50):
        assert shell.beat(leader, 1) == shell.beat(follower, 1) == E.REBALANCE_IN_PROGRESS
        shell.advance(1_000)
    assert shell.reply(number).error_code == E.UNKNOWN_MEMBER_ID


# -- syncing ---------------------------------------------------------------------------------------


def test_assignments_go_to_their_members_and_into_the_log() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    ids = shell.stable(3)
    for number, member_id in enumerate(ids):
        assert shell.reply(shell.sync(member_id, 1)).assignment == b"a%d" % number
    shell.restart()
    assert [one.assignment for one in shell.classic.members.by_id.values()] == [b"a0", b"a1", b"a2"]
    assert all(shell.beat(member_id, 1) == 0 for member_id in ids)


@pytest.mark.parametrize(
    ("member", "generation", "protocol", "error"),
    [
        ("nobody", 1, "range", E.UNKNOWN_MEMBER_ID),
        (None, 0, "range", E.ILLEGAL_GENERATION),
        (None, 2, "range", E.ILLEGAL_GENERATION),
        (None, 1, "sticky", E.INCONSISTENT_GROUP_PROTOCOL),
    ],
)
def test_an_inconsistent_sync(
    shell: GroupShell, member: str | None, generation: int, protocol: str, error: int
) -> None:
    (only,) = shell.stable(1)
    assert shell.reply(shell.sync(member or only, generation, protocol=protocol)).error_code == error


def test_a_rebalance_makes_members_waiting_for_an_assignment_rejoin(shell: GroupShell) -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    numbers = [shell.join(version=3) for _ in range(2)]
    shell.advance(1)
    leader, follower = (shell.reply(number).member_id for number in numbers)
    waiting = shell.sync(follower, 1)
    assert shell.beat(follower, 1) == 0, "a heartbeat while the rebalance completes is one"
    assert [(one.member_id, one.waited_for) for one in shell.core.held_up_by()] == [(leader, "assignment")]
    shell.join(version=3)
    assert shell.reply(waiting).error_code == E.REBALANCE_IN_PROGRESS
    assert shell.reply(shell.sync(leader, 1)).error_code == E.REBALANCE_IN_PROGRESS


def test_a_lost_leader_does_not_take_the_followers_that_wait_for_it_along() -> None:
    """All sessions end in the same millisecond; the leader's end gives the followers new ones."""
    shell = GroupShell(initial_rebalance_delay_ms=1)
    numbers = [shell.join(version=3) for _ in range(3)]
    shell.advance(1)
    _, *followers = (shell.reply(number).member_id for number in numbers)
    waiting = [shell.sync(follower, 1) for follower in followers]
    shell.advance(10_000)
    assert [shell.reply(number).error_code for number in waiting] == [E.REBALANCE_IN_PROGRESS] * 2
    again = [shell.join(follower, version=3) for follower in followers]
    assert [shell.reply(number).generation_id for number in again] == [2, 2]


def test_a_member_that_never_syncs_is_removed() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    numbers = [shell.join(version=3, rebalance=5_000) for _ in range(2)]
    shell.advance(1)
    leader, follower = (shell.reply(number).member_id for number in numbers)
    shell.sync(leader, 1, {leader: b"mine"})
    assert shell.core.state_name == "Stable" and [one.waited_for for one in shell.core.held_up_by()] == ["sync"]
    for _ in range(5):
        shell.beat(follower, 1)
        shell.advance(1_000)
    assert shell.beat(follower, 1) == E.UNKNOWN_MEMBER_ID and shell.beat(leader, 1) == E.REBALANCE_IN_PROGRESS


def test_a_generation_too_large_for_a_record_is_refused() -> None:
    shell = GroupShell(record_bytes_max=1_000)
    number = shell.join(version=3)
    shell.advance(0)
    member_id = shell.reply(number).member_id
    assert shell.reply(shell.sync(member_id, 1, {member_id: bytes(2_000)})).error_code == E.UNKNOWN_SERVER_ERROR
    assert shell.core.state_name == "PreparingRebalance" and not shell.log


# -- sessions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("member", "generation", "error"),
    [
        ("nobody", 1, E.UNKNOWN_MEMBER_ID),
        ("", 1, E.UNKNOWN_MEMBER_ID),
        (None, 7, E.ILLEGAL_GENERATION),
        (None, -1, E.ILLEGAL_GENERATION),
    ],
)
def test_inconsistent_heartbeats(shell: GroupShell, member: str | None, generation: int, error: int) -> None:
    (only,) = shell.stable(1)
    assert shell.beat(only if member is None else member, generation) == error


def test_a_session_expires_unless_prolonged_by_a_heartbeat() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    alive, silent = shell.stable(2, session=10_000)
    shell.advance(9_000)
    assert shell.beat(alive, 1) == 0
    shell.advance(1_000)
    assert shell.beat(alive, 1) == E.REBALANCE_IN_PROGRESS and shell.beat(silent, 1) == E.UNKNOWN_MEMBER_ID
    assert "sent no heartbeat" in shell.classic.rebalance_reason


def test_a_commit_prolongs_the_session(shell: GroupShell) -> None:
    (only,) = shell.stable(1, session=10_000)
    for _ in range(3):
        shell.advance(9_000)
        shell.number += 1
        shell.handle(CommitOffsets(shell.number, 8, only, None, 1, (CommittedOffset("t", 0, 5),)))
        assert shell.reply(shell.number).error == 0
    assert shell.beat(only, 1) == 0


def test_after_a_restart_members_have_a_whole_session() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    ids = shell.stable(2, session=10_000)
    shell.advance(9_999)
    shell.restart()
    shell.advance(9_999)
    assert [shell.beat(member_id, 1) for member_id in ids] == [0, 0]


# -- static members --------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [5, 8, 9])
def test_a_static_member_returns_without_a_rebalance(version: int) -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    ids = shell.stable(2, instances=True)
    response = shell.reply(shell.join(instance="i1", version=version))
    assert (response.error_code, response.generation_id, response.leader) == (
        0,
        1,
        ids[0],
    ) and response.member_id != ids[1]
    assert shell.core.state_name == "Stable" and shell.beat(ids[0], 1, "i0") == 0
    assert shell.reply(shell.sync(response.member_id, 1, instance="i1")).assignment == b"a1"
    assert shell.beat(ids[1], 1, "i1") == E.FENCED_INSTANCE_ID and shell.beat(ids[1], 1) == E.UNKNOWN_MEMBER_ID
    assert shell.reply(shell.sync(ids[1], 1, instance="i1")).error_code == E.FENCED_INSTANCE_ID
    assert shell.reply(shell.join(ids[1], instance="i1")).error_code == E.FENCED_INSTANCE_ID
    shell.restart()
    assert shell.beat(response.member_id, 1, "i1") == 0, "its new id is in the log"


def test_a_static_leader_that_returns_knows_whether_it_leads() -> None:
    for version, skips in ((8, False), (9, True)):
        shell = GroupShell(initial_rebalance_delay_ms=1)
        ids = shell.stable(2, instances=True)
        response = shell.reply(shell.join(instance="i0", version=version))
        assert response.skip_assignment is skips
        if skips:  # KIP-814: it leads, and need not assign
            assert response.leader == response.member_id and len(response.members) == 2
        else:  # older ones must not believe that they lead
            assert response.leader == ids[0] and response.members == []
        assert shell.classic.leader == response.member_id


def test_a_static_member_that_changes_the_choice_of_protocol_rebalances() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    shell.stable(1, instances=True)
    shell.join(instance="i0", protocols={"sticky": b"", "range": b"m"})
    assert shell.classic.generation == 2


def test_a_replaced_member_that_waits_is_fenced_at_once() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    ids = shell.stable(2, instances=True)
    waiting = shell.join(ids[0], instance="i0")
    shell.join(instance="i0")
    assert shell.reply(waiting).error_code == E.FENCED_INSTANCE_ID


def test_an_absent_static_member_stays_through_a_rebalance() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    ids = shell.stable(2, instances=True, session=60_000, rebalance=5_000)
    number = shell.join(ids[0], instance="i0", session=60_000, rebalance=5_000)
    shell.advance(5_000)
    assert [one.group_instance_id for one in shell.reply(number).members] == ["i0", "i1"]


# -- leaving ---------------------------------------------------------------------------------------


def test_members_leave_one_by_one_and_together() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    ids = shell.stable(4, instances=True)
    assert shell.leave((ids[0], "i0"), ("", "i1"), ("nobody", None), ("wrong", "i2"), ("", None), ("", "i9")) == [
        0,
        0,
        E.UNKNOWN_MEMBER_ID,
        E.FENCED_INSTANCE_ID,
        E.UNKNOWN_MEMBER_ID,
        E.UNKNOWN_MEMBER_ID,
    ]
    assert list(shell.classic.members.static_member_ids) == ["i2", "i3"] and shell.classic.leader == ids[2]


def test_the_last_one_to_leave_makes_an_empty_generation(shell: GroupShell) -> None:
    (only,) = shell.stable(1)
    assert shell.leave((only, None)) == [0]
    assert (shell.core.state_name, shell.classic.generation, shell.core.kind) == ("Empty", 2, "classic")
    shell.restart()
    assert (shell.core.state_name, shell.classic.generation, shell.classic.protocol_type) == ("Empty", 2, "consumer")


def test_a_pending_member_may_leave(shell: GroupShell) -> None:
    member_id = shell.reply(shell.join()).member_id
    assert shell.leave((member_id, None)) == [0]
    assert shell.core.is_empty


def test_an_unknown_group_has_no_members_to_leave(shell: GroupShell) -> None:
    assert shell.leave(("nobody", None)) == [E.UNKNOWN_MEMBER_ID]


# -- committing ------------------------------------------------------------------------------------


def test_commits_from_members_and_from_outside_a_group() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)

    def commit(
        member_id: str, generation: int, instance: str | None = None, producer_id: int = -1, version: int = 8
    ) -> int:
        shell.number += 1
        shell.handle(
            CommitOffsets(
                shell.number,
                version,
                member_id,
                instance,
                generation,
                (CommittedOffset("t", 0, 5),),
                producer_id=producer_id,
                producer_epoch=0,
            )
        )
        return shell.reply(shell.number).error

    assert commit("m", 3) == E.ILLEGAL_GENERATION and commit("m", 3, version=9) == E.GROUP_ID_NOT_FOUND
    assert commit("", -1) == 0
    ids = shell.stable(2)
    assert commit(ids[0], 1) == 0
    assert commit("nobody", 1) == E.UNKNOWN_MEMBER_ID and commit(ids[0], 2) == E.ILLEGAL_GENERATION
    assert commit("", -1) == E.UNKNOWN_MEMBER_ID and commit("", -1, producer_id=9) == 0
    assert commit(ids[0], 1, instance="i") == E.UNKNOWN_MEMBER_ID
    shell.join(ids[0])
    assert commit(ids[1], 1) == 0, "while members are to join again they may still commit"
    shell.join(ids[1])
    assert shell.core.state_name == "CompletingRebalance"
    assert commit(ids[1], 2) == E.REBALANCE_IN_PROGRESS and commit(ids[1], 2, producer_id=9) == 0


# -- the group's end -------------------------------------------------------------------------------


def test_deleting(shell: GroupShell) -> None:
    assert shell.delete() == E.GROUP_ID_NOT_FOUND
    (only,) = shell.stable(1)
    shell.number += 1
    shell.handle(CommitOffsets(shell.number, 8, only, None, 1, (CommittedOffset("t", 0, 5),)))
    assert shell.delete() == E.NON_EMPTY_GROUP
    shell.leave((only, None))
    assert shell.delete() == 0 and shell.core.is_empty
    shell.restart()
    assert shell.core.is_empty


def test_an_empty_group_without_offsets_is_deleted(shell: GroupShell) -> None:
    (only,) = shell.stable(1)
    shell.leave((only, None))
    shell.advance(600_000)
    assert shell.core.is_empty and shell.log[-1][1] is None


def test_a_group_above_the_limit_after_a_restart_rejoins() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    ids = shell.stable(3)
    shell.settings = type(shell.settings)(max_size=2)
    shell.restart()
    assert shell.core.state_name == "PreparingRebalance"
    responses = [shell.reply(shell.join(member_id)) for member_id in ids]
    assert responses[2].error_code == E.GROUP_MAX_SIZE_REACHED and shell.classic.generation == 2


def test_described_and_listed() -> None:
    shell = GroupShell(initial_rebalance_delay_ms=1)
    assert shell.core.describe() is None and shell.core.state_name == "Dead"
    ids = shell.stable(2)
    group = shell.core.describe()
    assert (group.group_state, group.protocol_type, group.protocol_data) == ("Stable", "consumer", "range")
    assert [
        (one.member_id, one.client_id, one.client_host, one.member_metadata, one.member_assignment)
        for one in group.members
    ] == [(ids[0], "client", "/10.0.0.1", b"m", b"a0"), (ids[1], "client", "/10.0.0.1", b"m", b"a1")]
    assert tuple(shell.core.listing()) == ("g", "consumer", "Stable", "classic")
    shell.join(ids[0])
    between = [(one.member_metadata, one.member_assignment) for one in shell.core.describe().members]
    assert between == [(b"", b"a0"), (b"", b"a1")]
