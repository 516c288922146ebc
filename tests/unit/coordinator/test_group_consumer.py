"""Consumer groups (KIP-848), one situation each: behaviour that clients rely on, by error code."""

from __future__ import annotations

import pytest

from mqd.coordinator.group import regex
from mqd.coordinator.group.consumer.requests import problem_of
from mqd.coordinator.group.consumer_protocol import decode_assignment, decode_subscription, encode_assignment
from mqd.coordinator.group.offsets import CommitOffsets, CommittedOffset, DeleteOffsets, FetchOffsets
from mqd.coordinator.group.settings import ClassicSettings
from mqd.protocol.errors import ErrorCode as E
from mqd.protocol.messages import ConsumerGroupHeartbeatRequest as Request
from tests.unit.coordinator.consumer_shell import ConsumerShell, subscription


@pytest.fixture
def shell() -> ConsumerShell:
    return ConsumerShell()


# -- joining and moving ----------------------------------------------------------------------------


def test_the_first_member_has_everything_at_once(shell: ConsumerShell) -> None:
    response = shell.enter("m1")
    assert (response.error_code, response.member_id, response.member_epoch, shell.report(response)) == (
        0,
        "m1",
        1,
        {"a": (0, 1, 2, 3)},
    )
    assert shell.core.state_name == "Stable" and shell.core.kind == "consumer"


def test_version_0_gets_its_member_id(shell: ConsumerShell) -> None:
    assert shell.enter("").member_id == "made-up"


def test_a_second_member_waits_for_partitions_that_the_first_releases(shell: ConsumerShell) -> None:
    shell.enter("m1")
    second = shell.enter("m2")
    assert (second.member_epoch, shell.report(second)) == (2, {})
    assert second.heartbeat_interval_ms < shell.heartbeat("m1", 1).heartbeat_interval_ms, (
        "a waiting member sends heartbeats sooner"
    )
    first = shell.heartbeat("m1", 1, {"a": (0, 1, 2, 3)})
    assert first.member_epoch == 1 and shell.consumer.members["m1"].assigned != shell.consumer.members["m1"].revoking
    kept = tuple(shell.consumer.members["m1"].assigned.values())[0]
    assert len(kept) == 2, "what it keeps it keeps all the time"
    assert shell.report(shell.heartbeat("m2", 2)) is None, "nothing is free yet"
    done = shell.heartbeat("m1", 1, {"a": kept})
    assert done.member_epoch == 2
    assert shell.report(shell.heartbeat("m2", 2)) == {"a": tuple(index for index in range(4) if index not in kept)}
    assert shell.core.state_name == "Stable"


def test_a_lost_response(shell: ConsumerShell) -> None:
    """The old epoch with only its own partitions gets the response again, otherwise it is fenced."""
    shell.enter("m1")
    shell.enter("m2")
    kept = shell.report(shell.heartbeat("m1", 1, {"a": (0, 1, 2, 3)}))
    assert shell.heartbeat("m1", 1, kept).member_epoch == 2
    again = shell.heartbeat("m1", 1, kept)
    assert (again.error_code, again.member_epoch, shell.report(again)) == (0, 2, kept)
    assert shell.heartbeat("m1", 1, {"a": (0, 1, 2, 3)}).error_code == E.FENCED_MEMBER_EPOCH
    assert shell.heartbeat("m1", 1).error_code == E.FENCED_MEMBER_EPOCH
    assert shell.heartbeat("m1", 3).error_code == E.FENCED_MEMBER_EPOCH
    back = shell.enter("m1")
    assert (back.error_code, back.member_epoch, shell.report(back)) == (0, 2, kept)


def test_unknown_groups_members_and_epochs_are_refused(shell: ConsumerShell) -> None:
    assert shell.heartbeat("m1", 5).error_code == E.GROUP_ID_NOT_FOUND
    shell.enter("m1")
    assert shell.heartbeat("m2", 1).error_code == E.UNKNOWN_MEMBER_ID
    assert shell.heartbeat("m2", -1).error_code == E.UNKNOWN_MEMBER_ID
    assert shell.heartbeat("m2", 1, instance_id="i").error_code == E.UNKNOWN_MEMBER_ID


def test_leaving(shell: ConsumerShell) -> None:
    shell.enter("m1")
    shell.enter("m2")
    gone = shell.heartbeat("m1", -1)
    assert (gone.error_code, gone.member_epoch) == (0, -1)
    assert shell.report(shell.heartbeat("m2", 2)) == {"a": (0, 1, 2, 3)}
    shell.heartbeat("m2", -1)
    assert shell.core.state_name == "Empty" and shell.core.exists
    assert shell.enter("m3").member_epoch == 5, "epochs continue"


def test_a_group_may_be_full() -> None:
    shell = ConsumerShell(max_size=1)
    shell.enter("m1")
    assert shell.enter("m2").error_code == E.GROUP_MAX_SIZE_REACHED
    assert shell.enter("m1").error_code == 0


# -- time ------------------------------------------------------------------------------------------


def test_a_member_without_heartbeats_is_removed(shell: ConsumerShell) -> None:
    shell.enter("m1")
    shell.advance(40_000)
    shell.heartbeat("m1", 1)
    shell.enter("m2")
    shell.advance(44_999)
    assert set(shell.consumer.members) == {"m1", "m2"}
    shell.heartbeat("m2", 2)
    shell.advance(1)
    assert set(shell.consumer.members) == {"m2"}
    assert shell.report(shell.heartbeat("m2", 2)) == {"a": (0, 1, 2, 3)}
    assert shell.heartbeat("m1", 1).error_code == E.UNKNOWN_MEMBER_ID


def test_a_member_that_revokes_nothing_is_removed_despite_its_heartbeats(shell: ConsumerShell) -> None:
    shell.enter("m1")
    shell.enter("m2")
    for _ in range(9):
        assert shell.heartbeat("m1", 1, {"a": (0, 1, 2, 3)}).error_code == 0
        shell.heartbeat("m2", 2)
        shell.advance(1_000)
    shell.heartbeat("m1", 1, {"a": (0, 1, 2, 3)})
    shell.advance(1_000)
    assert set(shell.consumer.members) == {"m2"}


def test_a_static_member_returns_and_no_partition_moves(shell: ConsumerShell) -> None:
    shell.enter("m1", instance_id="i1")
    shell.enter("m2", instance_id="i2")
    kept = shell.report(shell.heartbeat("m1", 1, {"a": (0, 1, 2, 3)}))
    shell.heartbeat("m1", 1, kept)
    shell.heartbeat("m2", 2)
    assert shell.enter("m3", instance_id="i1").error_code == E.UNRELEASED_INSTANCE_ID
    left = shell.heartbeat("m1", -2, instance_id="i1")
    assert (left.error_code, left.member_epoch) == (0, -2)
    assert shell.heartbeat("m1", 2, instance_id="i1").error_code == E.FENCED_MEMBER_EPOCH
    epoch = shell.consumer.epoch
    back = shell.enter("m3", instance_id="i1")
    assert (back.error_code, back.member_epoch, shell.report(back)) == (0, 2, kept)
    assert shell.consumer.epoch == epoch
    assert shell.heartbeat("m1", 2, instance_id="i1").error_code == E.FENCED_INSTANCE_ID
    assert shell.heartbeat("m1", -1, instance_id="i1").error_code == E.FENCED_INSTANCE_ID


def test_a_static_member_changes_to_the_consumer_protocol_within_its_session(shell: ConsumerShell) -> None:
    """It is stopped without LeaveGroup, like static members, and restarted immediately with
    group.protocol=consumer.
    """
    joined = shell.classic_join("", "a", instance_id="i")
    shell.advance(1)
    old = shell.reply(joined)
    synced = shell.sync(
        old.member_id, old.generation_id, {old.member_id: encode_assignment(1, {"a": (0, 1, 2, 3)})}, instance="i"
    )
    assert shell.reply(synced).error_code == 0
    entered = shell.enter("new", instance_id="i")
    assert (
        entered.error_code == 0
        and shell.report(entered) == {"a": (0, 1, 2, 3)}
        and list(shell.consumer.members) == ["new"]
    )
    assert shell.beat(old.member_id, old.generation_id, instance="i") == E.FENCED_INSTANCE_ID
    assert shell.enter("third", instance_id="i").error_code == E.UNRELEASED_INSTANCE_ID, (
        "of the consumer protocol, and in its session"
    )


def test_a_static_member_that_does_not_return(shell: ConsumerShell) -> None:
    shell.enter("m1", instance_id="i1")
    shell.heartbeat("m1", -2, instance_id="i1")
    shell.advance(45_000)
    assert shell.consumer.is_empty


# -- subscriptions ---------------------------------------------------------------------------------


def test_expressions(shell: ConsumerShell) -> None:
    shell.cluster.set("orders-1", 2)
    shell.cluster.set("orders", 1)
    response = shell.enter("m1", subscribed_topic_names=None, subscribed_topic_regex="orders-.*")
    assert shell.report(response) == {"orders-1": (0, 1)}
    shell.cluster.set("orders-2", 1)
    response = shell.heartbeat("m1", 1)
    assert (response.member_epoch, shell.report(response)) == (2, {"orders-1": (0, 1), "orders-2": (0,)})
    shell.cluster.set("others", 1)
    assert shell.heartbeat("m1", 2).member_epoch == 2, "what it does not match is none of its business"
    bad = shell.heartbeat("m1", 2, subscribed_topic_regex="(?<=a)b")
    assert bad.error_code == E.INVALID_REGULAR_EXPRESSION and "(?<=a)b" in bad.error_message
    assert shell.enter("m2", subscribed_topic_regex="[").error_code == E.INVALID_REGULAR_EXPRESSION
    shell.enter("m3", subscribed_topic_names=["others"])
    described = {member.member_id: member.subscribed_topic_regex for member in shell.describe().members}
    assert described == {"m1": "orders-.*", "m3": ""}  # as in Kafka: never null


def test_an_expression_matches_what_its_member_may_describe(shell: ConsumerShell) -> None:
    """By the rights of each member, even after a restart and when rights change."""
    expression = {"subscribed_topic_names": None, "subscribed_topic_regex": "orders-.*"}
    for name in ("orders-1", "orders-2", "orders-3"):
        shell.cluster.set(name, 1)
    shell.cluster.hidden = {"User:alice": {"orders-1", "orders-2"}, "User:bob": {"orders-1"}}
    shell.principal = "User:alice"
    assert shell.report(shell.enter("alice", **expression)) == {"orders-3": (0,)}
    shell.principal = "User:bob"
    assert shell.report(shell.enter("bob", **expression)) == {"orders-2": (0,)}
    held = {member.member_id: member.assigned for member in shell.consumer.members.values()}
    shell.restart()
    assert {member.member_id: member.assigned for member in shell.consumer.members.values()} == held
    assert shell.heartbeat("bob", 2).member_epoch == 2, "nothing has changed"

    shell.cluster.hidden["User:bob"] = {"orders-2"}
    shell.cluster.version += 1
    response = shell.heartbeat("bob", 2)
    assert shell.report(response) in ({}, {"orders-1": (0,)})
    assert "orders-2" not in (shell.report(response) or {})

    shell.principal = "User:alice"  # a member that has authenticated as another user
    response = shell.heartbeat("bob", response.member_epoch, {})
    assert "orders-1" not in (shell.report(response) or {})
    shell.core.check()


def test_the_principal_of_a_member_is_kept_only_with_an_expression(shell: ConsumerShell) -> None:
    shell.principal = "User:alice"
    shell.enter("m1")
    assert shell.consumer.members["m1"].description.authorized_as is None
    assert b"User:alice" not in b"".join(value or b"" for _, value in shell.log)


def test_an_expensive_expression_is_bounded() -> None:
    matcher = regex.RegexMatcher()
    assert matcher.matching("(a+)+$", frozenset(["a" * 240 + "b", "aaa"])) == {"aaa"}
    with pytest.raises(regex.BadExpression):
        matcher.check("a" * (regex.REGEX_CHARS_MAX + 1))
    with pytest.raises(regex.BadExpression):
        matcher.check("((x{500}){500}){500}")


def test_topic_changes_cause_a_rebalance(shell: ConsumerShell) -> None:
    shell.enter("m1", "a", "b")
    shell.cluster.set("a", 5)
    assert shell.report(shell.heartbeat("m1", 1)) == {"a": (0, 1, 2, 3, 4)}
    shell.cluster.set("b", 1)
    assert shell.heartbeat("m1", 2).member_epoch == 3
    shell.cluster.set("a", 0)
    response = shell.heartbeat(
        "m1", 3, {"a": (0, 1, 2, 3, 4), "b": (0,)} if "a" in shell.cluster.topics else {"b": (0,)}
    )
    assert (response.member_epoch, shell.report(response)) == (4, {"b": (0,)})


def test_a_topic_change_that_another_event_notices_first_causes_a_rebalance(shell: ConsumerShell) -> None:
    """The expiry of offsets and DeleteOffsets resolve the subscriptions, too."""
    shell.enter("m1", "a")
    shell.cluster.set("a", 5)
    shell.send_request(lambda number: DeleteOffsets(number, (("a", (0,)),)))
    assert shell.report(shell.heartbeat("m1", 1)) == {"a": (0, 1, 2, 3, 4)}


def test_a_recreated_topic_is_a_new_topic(shell: ConsumerShell) -> None:
    old = shell.enter("m1").assignment.topic_partitions[0].topic_id
    shell.cluster.set("a", 2)
    response = shell.heartbeat("m1", 1, {})
    assert response.assignment.topic_partitions[0].topic_id != old and shell.report(response) == {"a": (0, 1)}


def test_the_majority_chooses_the_assignor(shell: ConsumerShell) -> None:
    shell.enter("m1", server_assignor="range")
    assert shell.consumer.assignor == "range"
    shell.enter("m2", server_assignor="uniform")
    shell.enter("m3", server_assignor="uniform")
    assert shell.describe().assignor_name == "uniform"


def test_a_large_group_makes_few_targets() -> None:
    shell = ConsumerShell({"a": 1500})
    shell.enter("m0")
    before = shell.consumer.assignment_epoch
    for number in range(1, 200):
        shell.enter(f"m{number}")
    assert shell.consumer.epoch == before + 199 and shell.consumer.assignment_epoch == before
    shell.now += 2_000
    shell.heartbeat("m1", before)
    assert shell.consumer.assignment_epoch == shell.consumer.epoch and len(shell.consumer.target) == 200


# -- offsets ---------------------------------------------------------------------------------------


def test_commits_are_checked_against_the_epoch(shell: ConsumerShell) -> None:
    shell.enter("m1")

    def commit(member_id: str, epoch: int, version: int = 9) -> int:
        response = shell.send_request(
            lambda number: CommitOffsets(number, version, member_id, None, epoch, (CommittedOffset("a", 0, 7),))
        )
        return response.error or response.errors[0]

    assert commit("m1", 1) == 0
    assert commit("m1", 0) == commit("m1", 2) == E.STALE_MEMBER_EPOCH
    assert commit("m2", 1) == commit("", -1) == E.UNKNOWN_MEMBER_ID
    assert commit("m1", 1, version=8) == E.UNSUPPORTED_VERSION
    assert shell.core.commit_error(CommitOffsets(0, 5, "", None, -1, (), producer_id=4)) == 0, (
        "a transaction whose producer does not tell of its consumer"
    )
    fetch = lambda member_id, epoch: (
        shell.send_request(lambda number: FetchOffsets(number, None, member_id=member_id, member_epoch=epoch)).error
    )  # noqa: E731
    assert (fetch("m1", 1), fetch(None, -1), fetch("m1", 3), fetch("m2", 1), fetch("", -1)) == (
        0,
        0,
        E.STALE_MEMBER_EPOCH,
        E.UNKNOWN_MEMBER_ID,
        E.UNKNOWN_MEMBER_ID,
    )
    assert shell.delete() == E.NON_EMPTY_GROUP
    shell.heartbeat("m1", -1)
    assert commit("", -1) == 0
    assert shell.delete() == 0 and not shell.core.exists
    shell.restart()
    assert not shell.core.exists, "the log has nothing of it"


# -- the log ---------------------------------------------------------------------------------------


def test_a_restart_in_the_middle_of_a_rebalance(shell: ConsumerShell) -> None:
    shell.enter("m1")
    shell.enter("m2")
    shell.heartbeat("m1", 1, {"a": (0, 1, 2, 3)})
    before = {name: member.current for name, member in shell.consumer.members.items()}
    shell.restart()
    assert {name: member.current for name, member in shell.consumer.members.items()} == before
    assert shell.report(shell.heartbeat("m2", 2)) is None
    shell.advance(10_000)
    assert set(shell.consumer.members) == {"m2"}, (
        "after a restart, too, a member that does not revoke has no longer than its timeout"
    )


def test_a_damaged_log_never_gives_a_partition_to_two(shell: ConsumerShell) -> None:
    shell.enter("m1")
    shell.enter("m2")
    kept = shell.report(shell.heartbeat("m1", 1, {"a": (0, 1, 2, 3)}))
    old = {key: value for key, value in shell.log if key[:2] == b"\x00\x08" and key.endswith(b"m1")}
    shell.heartbeat("m1", 1, kept)
    shell.heartbeat("m2", 2)
    shell.log += old.items()  # m1's former partitions are restored, not its current ones
    shell.restart()
    assert len(shell.consumer.members) == 1
    survivor = next(iter(shell.consumer.members))
    shell.restart()
    assert list(shell.consumer.members) == [survivor], "and that is what is in the log"


def test_an_empty_group_is_deleted_with_its_last_offset(shell: ConsumerShell) -> None:
    shell.enter("m1")
    shell.heartbeat("m1", -1)
    assert shell.core.exists
    shell.advance(700_000)
    assert not shell.core.exists


# -- migration -------------------------------------------------------------------------------------


def classic_group(shell: ConsumerShell, count: int = 2) -> list[str]:
    """A stable classic group; each member has one partition of a."""
    numbers = [shell.classic_join("", "a") for _ in range(count)]
    shell.advance(1)
    numbers = [
        (
            shell.classic_join(shell.reply(number).member_id, "a")
            if number in shell.replies and shell.reply(number).generation_id != shell.classic.generation
            else number
        )
        for number in numbers
    ]
    shell.advance(1)
    ids = [shell.reply(number).member_id for number in numbers]
    generation = shell.classic.generation
    given = {name: encode_assignment(1, {"a": (2 * number, 2 * number + 1)}) for number, name in enumerate(ids)}
    for name in sorted(ids, key=lambda name: name != shell.classic.leader):
        shell.sync(name, generation, given if name == shell.classic.leader else None)
    assert shell.core.state_name == "Stable"
    return ids


def test_upgrade_and_downgrade(shell: ConsumerShell) -> None:
    one, two = classic_group(shell)
    response = shell.enter("new")
    assert response.error_code == 0 and shell.core.kind == "consumer"
    assert {name: shell.consumer.members[name].assigned for name in (one, two)} == {
        name: {shell.cluster.topics["a"].topic_id: (2 * number, 2 * number + 1)}
        for number, name in enumerate((one, two))
    }
    assert [member.member_type for member in shell.describe().members] == [0, 0, 1]
    generation = shell.consumer.members[one].epoch
    assert shell.beat(one, generation) == E.REBALANCE_IN_PROGRESS
    for name, owned in ((one, (0, 1)), (two, (2, 3))):
        joined = shell.reply(shell.classic_join(name, "a", owned={"a": owned}))
        synced = shell.reply(shell.sync(name, joined.generation_id))
        kept = decode_assignment(synced.assignment)
        assert synced.error_code == 0 and set(kept.get("a", ())) <= set(owned)
        if set(kept.get("a", ())) != set(owned):
            joined = shell.reply(shell.classic_join(name, "a", owned=kept))
            assert shell.reply(shell.sync(name, joined.generation_id)).error_code == 0
        assert shell.beat(name, joined.generation_id) == 0
    assert shell.report(shell.heartbeat("new", response.member_epoch)) is not None
    assert shell.core.state_name == "Stable"
    shell.restart()
    assert shell.core.kind == "consumer" and shell.core.state_name == "Stable"
    held = {name: shell.consumer.members[name].assigned for name in (one, two)}
    shell.heartbeat("new", -1)
    assert shell.core.kind == "classic" and shell.core.state_name == "PreparingRebalance"
    topic_id = shell.cluster.topics["a"].topic_id
    assert {
        name: decode_assignment(member.assignment).get("a", ()) for name, member in shell.classic.members.by_id.items()
    } == {name: parts.get(topic_id, ()) for name, parts in held.items()}
    shell.restart()
    assert shell.core.kind == "classic" and set(shell.classic.members.by_id) == {one, two}


def test_a_policy_may_forbid_migration() -> None:
    shell = ConsumerShell(may_upgrade=False, may_downgrade=False)
    classic_group(shell)
    assert shell.enter("new").error_code == E.GROUP_ID_NOT_FOUND
    assert shell.core.kind == "classic" and shell.core.state_name == "Stable"


def test_groups_of_another_type_are_unchanged(shell: ConsumerShell) -> None:
    shell.join(version=3, kind="connect")
    shell.advance(1)
    assert shell.enter("new").error_code == E.GROUP_ID_NOT_FOUND and shell.core.kind == "classic"


def test_an_upgrade_that_is_refused_changes_nothing(shell: ConsumerShell) -> None:
    classic_group(shell)
    log = list(shell.log)
    assert shell.enter("new", subscribed_topic_regex="[").error_code == E.INVALID_REGULAR_EXPRESSION
    assert shell.core.kind == "classic" and shell.log == log and shell.core.state_name == "Stable"


def test_an_empty_group_changes_its_type(shell: ConsumerShell) -> None:
    shell.enter("m1")
    shell.heartbeat("m1", -1)
    shell.classic_join("", "a")
    shell.advance(1)
    assert shell.core.kind == "classic"
    shell.restart()
    assert shell.core.consumer is None


def test_a_classic_member_gets_its_id_before_its_subscription_is_read(shell: ConsumerShell) -> None:
    shell.enter("m1")
    requested = shell.reply(shell.classic_join("", version=4, metadata=b""))
    assert requested.error_code == E.MEMBER_ID_REQUIRED
    joined = shell.reply(shell.classic_join(requested.member_id, version=4, metadata=b""))
    assert joined.error_code == E.INCONSISTENT_GROUP_PROTOCOL


def test_a_classic_member_joins_a_consumer_group(shell: ConsumerShell) -> None:
    shell.enter("m1")
    requested = shell.reply(shell.classic_join("", "a", version=4))
    assert requested.error_code == E.MEMBER_ID_REQUIRED and requested.member_id
    joined = shell.reply(shell.classic_join(requested.member_id, "a", version=4))
    assert (joined.error_code, joined.generation_id, joined.protocol_name, joined.leader) == (0, 2, "range", "")
    assert decode_assignment(shell.reply(shell.sync(requested.member_id, 2)).assignment) == {}
    kept = shell.report(shell.heartbeat("m1", 1, {"a": (0, 1, 2, 3)}))
    assert shell.beat(requested.member_id, 2) == 0, "nothing is free for it yet"
    shell.heartbeat("m1", 1, kept)
    assert shell.beat(requested.member_id, 2) == E.REBALANCE_IN_PROGRESS
    again = shell.reply(shell.classic_join(requested.member_id, "a", owned={}))
    assert decode_assignment(shell.reply(shell.sync(requested.member_id, again.generation_id)).assignment)["a"]
    assert shell.beat(requested.member_id, 1) == E.ILLEGAL_GENERATION
    assert shell.beat("m1", 2) == E.UNKNOWN_MEMBER_ID, "it speaks the other protocol"
    wrong = shell.reply(shell.classic_join("", "a", protocol="sticky"))
    assert wrong.error_code == E.INCONSISTENT_GROUP_PROTOCOL
    left = shell.leave((requested.member_id, None), ("m1", None), ("nobody", None))
    assert left == [0, 0, E.UNKNOWN_MEMBER_ID], "members of either protocol leave so"


def test_a_member_that_claims_an_unknown_instance_id_is_unknown(shell: ConsumerShell) -> None:
    shell.enter("m1")
    claimed = shell.reply(shell.classic_join("m1", "a", instance_id="elsewhere"))
    assert (claimed.error_code, claimed.member_id) == (E.UNKNOWN_MEMBER_ID, "")


def test_a_classic_member_that_does_not_rejoin_is_removed(shell: ConsumerShell) -> None:
    shell.enter("m1")
    joined = shell.reply(shell.classic_join("", "a"))
    shell.sync(joined.member_id, joined.generation_id)
    shell.enter("m2")
    for _ in range(4):
        assert shell.beat(joined.member_id, joined.generation_id) in (0, E.REBALANCE_IN_PROGRESS)
        shell.heartbeat("m1", shell.consumer.members["m1"].epoch, {})
        shell.advance(5_000)
    assert joined.member_id not in shell.consumer.members


# -- what needs no state ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "version", "error"),
    [
        ({"group_id": ""}, 1, E.INVALID_REQUEST),
        ({"member_id": ""}, 1, E.INVALID_REQUEST),
        ({"member_id": ""}, 0, None),
        ({"member_id": "", "member_epoch": 1}, 0, E.INVALID_REQUEST),
        ({"member_id": "", "member_epoch": -1}, 0, E.INVALID_REQUEST),
        ({"member_id": "", "member_epoch": -2, "instance_id": "i"}, 0, None),
        ({"member_id": "", "member_epoch": -2, "instance_id": "i"}, 1, E.INVALID_REQUEST),
        ({"member_epoch": -3}, 1, E.INVALID_REQUEST),
        ({"member_epoch": -2}, 1, E.INVALID_REQUEST),
        ({"instance_id": ""}, 1, E.INVALID_REQUEST),
        ({"rack_id": ""}, 1, E.INVALID_REQUEST),
        ({"rebalance_timeout_ms": -1}, 1, E.INVALID_REQUEST),
        ({"rebalance_timeout_ms": -9}, 1, E.INVALID_REQUEST),
        ({"topic_partitions": None}, 1, E.INVALID_REQUEST),
        ({"topic_partitions": [Request.TopicPartitions(topic_id=bytes(16), partitions=[0])]}, 1, E.INVALID_REQUEST),
        ({"subscribed_topic_names": None}, 1, E.INVALID_REQUEST),
        ({"subscribed_topic_names": []}, 1, None),
        ({"subscribed_topic_names": ["x" * 9_000]}, 1, E.INVALID_REQUEST),
        ({"subscribed_topic_names": ["x" * 200] * 2_000}, 1, E.INVALID_REQUEST),
        ({"server_assignor": "sticky"}, 1, E.UNSUPPORTED_ASSIGNOR),
        ({"server_assignor": "range"}, 1, None),
    ],
)
def test_invalid_requests_are_refused(fields: dict, version: int, error: E | None) -> None:
    whole = {
        "group_id": "g",
        "member_id": "m",
        "member_epoch": 0,
        "rebalance_timeout_ms": 1,
        "topic_partitions": [],
        "subscribed_topic_names": ["a"],
        **fields,
    }
    problem = problem_of(Request(**whole), version, ("uniform", "range"))
    assert (problem and problem[0]) == error


def test_the_embedded_protocol() -> None:
    data = subscription("b", "a", owned={"a": (1, 0)})
    parsed = decode_subscription(data)
    assert (parsed.version, parsed.topics, parsed.owned) == (1, ("a", "b"), {"a": (0, 1)})
    for end in range(len(data)):
        with pytest.raises(ValueError):
            decode_subscription(data[:end])
    assert decode_assignment(encode_assignment(3, {"t": (0, 5)})) == {"t": (0, 5)}
    with pytest.raises(ValueError):
        decode_assignment(b"\x00\x01\x7f\xff\xff\xff")


def test_a_group_too_large_for_one_batch_is_not_downgraded(shell: ConsumerShell) -> None:
    shell.settings = ClassicSettings(initial_rebalance_delay_ms=0, record_bytes_max=300)
    shell.core = shell._new()
    shell.enter("m1")
    joined = shell.reply(shell.classic_join("", "a"))
    shell.heartbeat("m1", -1)
    assert shell.core.kind == "consumer"
    again = shell.reply(shell.classic_join(joined.member_id, "a"))
    assert decode_assignment(shell.reply(shell.sync(joined.member_id, again.generation_id)).assignment) == {
        "a": (0, 1, 2, 3)
    }
