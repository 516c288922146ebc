"""Access control lists and credentials in the metadata: their records, the processes that receive
them, and the limits.
"""

from __future__ import annotations

import msgspec
import pytest

from mqd.acceptor.metadata import Metadata
from mqd.cluster.host import core as host_core
from mqd.cluster.host import messages
from mqd.cluster.metadata import features, limits
from mqd.cluster.metadata.core import RECORDS_NOT_FOR_WORKERS, Committed, MetadataCore, Publish
from mqd.cluster.metadata.records import (
    AclCreated,
    AclRemoved,
    BrokerConfigured,
    FeatureLevelSet,
    ScramCredential,
    ScramCredentialRemoved,
    ScramCredentialSet,
)
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules import security
from mqd.cluster.metadata.rules.configs import ConfigRules
from mqd.cluster.metadata.state import MetadataState, Snapshot
from mqd.protocol.errors import ErrorCode as E
from mqd.security import scram
from mqd.security.acl import AclBinding, AclFilter, PatternType
from tests.unit.cluster.test_host_core import Host
from tests.unit.controller import test_cores
from tests.unit.controller.cores_world import World


def acl(name: str, principal: str = "User:alice", operation: int = 3, permission: int = 3) -> AclBinding:
    return AclBinding(2, PatternType.LITERAL, name, principal, "*", operation, permission)


def credential(user: str, mechanism: int = 1, key: bytes = b"k") -> ScramCredential:
    return ScramCredential(user, mechanism, b"salt", 4096, key, b"s")


def state_of(*bindings: AclBinding) -> MetadataState:
    state = MetadataState()
    for index, binding in enumerate(bindings):
        state.apply(AclCreated(index.to_bytes(16), binding))
    return state


def created(state: MetadataState, *bindings: AclBinding) -> list[AclCreated]:
    ids = iter(range(1000, 2_000_000))
    return security.create_acls(state, messages.CreateAcls(list(bindings)), lambda: next(ids).to_bytes(16))  # type: ignore[return-value]


def test_an_existing_rule_is_not_created_again() -> None:
    state = state_of(acl("a"))
    records = created(state, acl("a"), acl("b"), acl("b"))
    assert [record.binding for record in records] == [acl("b")]
    for record in records:
        state.apply(record)
    state.check()
    assert created(state, acl("b")) == []


def test_exact_filters_are_looked_up_and_others_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that compares every filter with every rule would outlast the controller's lease."""
    monkeypatch.setattr(security, "COMPARISONS_MAX", 10)
    rules = [acl(name) for name in "abcd"]
    state = state_of(*rules)
    exact = [AclFilter(*msgspec.structs.astuple(rule)) for rule in (*rules, acl("missing"))]
    assert all(one.only_match() is not None for one in exact)

    def deleted(filters: list[AclFilter]) -> tuple[list[list[AclBinding]], int]:
        response, _, records = security.delete_acls(state, messages.DeleteAcls(filters), 7)
        return response.removed_acls, len(records)

    assert deleted(exact) == ([[rule] for rule in rules] + [[]], 4)
    assert deleted([AclFilter(), AclFilter(name="b")]) == ([rules, [rules[1]]], 4)
    with pytest.raises(Refusal, match="3 filters with wildcards .* send at most 2"):
        deleted([AclFilter()] * 3)
    for field in AclFilter.__struct_fields__:
        vague = msgspec.structs.replace(exact[0], **{field: getattr(AclFilter(), field)})
        assert vague.only_match() is None and deleted([vague])[0][0][0] == rules[0]
    assert msgspec.structs.replace(exact[0], pattern_type=PatternType.MATCH).only_match() is None


@pytest.mark.parametrize(
    "wrong",
    [
        acl(""),
        acl("a", operation=1),
        acl("a", operation=99),
        acl("a", permission=1),
        msgspec.structs.replace(acl("a"), pattern_type=PatternType.MATCH),
        msgspec.structs.replace(acl("a"), resource_type=1),
    ],
)
def test_invalid_rules_are_refused(wrong: AclBinding) -> None:
    with pytest.raises(Refusal, match="not a valid rule"):
        created(state_of(), wrong)


def test_each_filter_reports_its_removed_rules_and_a_rule_is_removed_once() -> None:
    state = state_of(acl("a"), acl("b"), acl("c"))
    change = messages.DeleteAcls([AclFilter(name="a"), AclFilter(principal="User:alice"), AclFilter(name="x")])
    response, _, records = security.delete_acls(state, change, 7)
    assert response.removed_acls == [[acl("a")], [acl("a"), acl("b"), acl("c")], []]
    assert len(records) == 3
    for record in records:
        state.apply(record)
    state.check()
    assert not state.acls


def test_credentials_of_users_are_independent() -> None:
    state = MetadataState()
    state.apply(ScramCredentialSet(credential("old")))
    change = messages.AlterScramCredentials([("old", 1), ("old", 2)], [credential("new", key=b"x")])
    response, _, records = security.alter_scram_credentials(state, change, 7)
    assert [(one.user, one.error) for one in response.users] == [("new", 0), ("old", E.RESOURCE_NOT_FOUND)]
    assert records == [ScramCredentialSet(credential("new", key=b"x"))], "a user with an error keeps all"
    _, _, records = security.alter_scram_credentials(state, messages.AlterScramCredentials([("old", 1)], []), 7)
    assert records == [ScramCredentialRemoved("old", 1)]


def test_the_secret_for_salts_is_created_with_the_first_password_and_kept() -> None:
    state = MetadataState()
    state.apply(BrokerConfigured("", {"log.retention.ms": "1000"}))
    none = messages.AlterScramCredentials([("old", 1)], [], "unused")
    assert security.alter_scram_credentials(state, none, 1)[2] == []
    for user, secret in (("a", "first"), ("b", "second")):
        change = messages.AlterScramCredentials([], [credential(user)], secret)
        for record in security.alter_scram_credentials(state, change, 2)[2]:
            state.apply(record)
    assert state.broker_configs == {"": {"log.retention.ms": "1000", scram.DECOY_SECRET_PROPERTY: "first"}}
    state.check()


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(acl("a"), acl("b"))
    monkeypatch.setattr(limits, "ACL_COUNT_MAX", 3)
    assert created(state, acl("c"), acl("a"))
    with pytest.raises(Refusal, match="4 access control lists; 3 is the maximum") as refusal:
        created(state, acl("c"), acl("d"))
    assert refusal.value.error == E.POLICY_VIOLATION
    monkeypatch.setattr(limits, "ACL_COUNT_MAX", 100)
    monkeypatch.setattr(limits, "ACL_BYTES_MAX", 1 << 20)
    with pytest.raises(Refusal, match="1 MiB is the maximum"):
        created(state, acl("c" * (1 << 20)))
    monkeypatch.setattr(security, "SCRAM_CREDENTIAL_COUNT_MAX", 1)
    with pytest.raises(Refusal, match="2 credentials; the maximum is 1"):
        security.alter_scram_credentials(
            state, messages.AlterScramCredentials([], [credential("a"), credential("b")]), 1
        )
    long = messages.AlterScramCredentials([], [credential("a" * 256)])
    response, _, records = security.alter_scram_credentials(state, long, 1)
    assert response.users[0].error == E.UNACCEPTABLE_CREDENTIAL and not records


def test_the_image_can_hold_the_maximum_of_rules_and_credentials() -> None:
    bindings = [(bytes(16), acl("t" * 100, f"User:{index:050}")) for index in range(1000)]
    credentials = [ScramCredential(f"{index:050}", 2, bytes(24), 16384, bytes(64), bytes(64)) for index in range(1000)]
    one = messages.Image(1, "c", 1, [], [], {})
    full = msgspec.structs.replace(one, acls=bindings, scram_credentials=credentials)
    names = 1000 * (100 + 55 + 1)
    extra = len(msgspec.msgpack.encode(full)) - len(msgspec.msgpack.encode(one)) - names
    assert extra * (limits.ACL_COUNT_MAX / 1000) + limits.ACL_BYTES_MAX < 60 << 20


def test_older_hosts_get_no_record_that_they_cannot_read() -> None:
    world = World()
    world.settle()
    for change in (messages.CreateAcls([acl("a")]), messages.AlterScramCredentials([], [credential("u")])):
        response = world.send_request(change)
        assert response.error == E.INVALID_UPDATE_VERSION and "mqd cluster upgrade" in (response.message or "")
    level = messages.FeatureUpdate(features.MQD_VERSION, 2, 1)
    assert world.send_request(messages.UpdateFeatures([level])).error == 0
    number = world.request(messages.CreateAcls([acl("a")]))
    world.flush_log()
    assert number not in world.answers, "a worker has not applied it"
    world.settle()
    assert world.answers[number].error == 0 and world.core.committed.acl_ids.keys() == {acl("a")}
    for change in (messages.CreateAcls([acl("b")]), messages.DeleteAcls([AclFilter(name="b")])):
        first = world.request(change)
        world.flush_log()
        again = world.request(change)
        world.flush_log()
        assert not {first, again} & world.answers.keys(), "a repetition is answered before its rule is in force"
        world.settle()
        assert world.answers[again].error == world.answers[first].error == 0
        assert world.send_request(messages.AllocateProducerIds(1)).error == 0  # nothing that workers get
        assert world.send_request(change).error == 0
    number = world.request(messages.AlterScramCredentials([], [credential("u")]))
    world.flush_log()
    assert world.answers[number].error == 0, "workers have no credentials"


def test_the_snapshot_has_all() -> None:
    state = state_of(acl("a"), acl("b"))
    state.apply(AclRemoved(bytes(16)))
    state.apply(ScramCredentialSet(credential("u")))
    state.apply(FeatureLevelSet(features.MQD_VERSION, 2))
    state.check()
    again = MetadataState.from_snapshot(msgspec.msgpack.decode(msgspec.msgpack.encode(state.snapshot()), type=Snapshot))
    assert again == state


def test_workers_get_rules_and_the_acceptor_credentials_too() -> None:
    host = Host()
    host.state.apply(AclCreated(b"0" * 16, acl("a")))
    host.state.apply(ScramCredentialSet(credential("u")))
    host.core.handle(host_core.Started(host.state, (), (), {}), 0)

    def joined(client: str, role: str) -> messages.Image:
        event = host_core.SubscriberJoined(client, messages.Subscribe(role, 0, 1))
        return next(one.message for one in host.core.handle(event, 0) if isinstance(one, host_core.Send))  # type: ignore[return-value]

    metadata = Metadata()
    metadata.apply(joined("acceptor", "acceptor"))
    image = joined("worker", "worker")
    assert image.acls == [(b"0" * 16, acl("a"))] and image.scram_credentials == []
    assert metadata.rules.bindings == {b"0" * 16: acl("a")} and metadata.scram_credentials[("u", 1)] == credential("u")

    def publish(*records: object) -> dict[str, list]:
        for record in records:
            host.state.apply(record)  # type: ignore[arg-type]
        reported: dict[str, list] = {"worker": [], "acceptor": []}
        event = Publish(
            host.state.version,
            acls_put=tuple(one for one in records if isinstance(one, AclCreated)),
            acls_removed=tuple(one.acl_id for one in records if isinstance(one, AclRemoved)),
            credentials_put=tuple(one.credential for one in records if isinstance(one, ScramCredentialSet)),
            credentials_removed=tuple(
                (one.user, one.mechanism) for one in records if isinstance(one, ScramCredentialRemoved)
            ),
        )
        for action in host.core.handle(event, 0):
            if isinstance(action, host_core.Send) and action.client in reported:
                reported[action.client].append(action.message)
        for message in reported["acceptor"]:
            metadata.apply(message)
        return reported

    reported = publish(AclRemoved(b"0" * 16), AclCreated(b"1" * 16, acl("b")))
    assert (
        reported["worker"]
        == reported["acceptor"]
        == [messages.AclsPut(host.state.version, [(b"1" * 16, acl("b"))], [b"0" * 16])]
    )
    assert metadata.rules.bindings == {b"1" * 16: acl("b")}
    reported = publish(ScramCredentialRemoved("u", 1), ScramCredentialSet(credential("v")))
    assert not reported["worker"] and metadata.scram_credentials == {("v", 1): credential("v")}


def test_a_batch_that_removes_what_it_created_leaves_nothing() -> None:
    """On a follower several requests may be one batch: found by the simulator, where a removed rule
    stayed in force.
    """
    core = MetadataCore(MetadataState(), 1, ConfigRules({}), lambda: b"i" * 16, 10, active=False)
    records = (
        AclCreated(b"1" * 16, acl("a")),
        AclCreated(b"2" * 16, acl("b")),
        AclRemoved(b"1" * 16),
        ScramCredentialSet(credential("u")),
        ScramCredentialRemoved("u", 1),
        ScramCredentialSet(credential("v", key=b"old")),
        ScramCredentialSet(credential("v", key=b"new")),
    )
    (publish,) = (one for one in core.handle(Committed(records, 7), 0) if isinstance(one, Publish))
    assert publish.acls_put == (AclCreated(b"2" * 16, acl("b")),) and publish.acls_removed == (b"1" * 16,)
    assert publish.credentials_put == (credential("v", key=b"new"),) and publish.credentials_removed == (("u", 1),)


def test_changes_that_workers_need_not_apply() -> None:
    assert {ScramCredentialSet, ScramCredentialRemoved} <= set(
        RECORDS_NOT_FOR_WORKERS
    ) and AclCreated not in RECORDS_NOT_FOR_WORKERS


# -- planted bugs ----------------------------------------------------------------------------------


class ForgetsRemovals(host_core.HostCore):
    """Workers do not receive the removal of a rule."""

    def _on_publish(self, event: Publish, now_ms: int) -> list[host_core.Action]:
        return super()._on_publish(msgspec.structs.replace(event, acls_removed=()), now_ms)


class ImageWithoutRules(host_core.HostCore):
    """A worker that starts knows no rules."""

    def _full_image(self, role: str) -> messages.Image:
        return msgspec.structs.replace(super()._full_image(role), acls=[])


@pytest.mark.parametrize("planted", [ForgetsRemovals, ImageWithoutRules])
def test_random_histories_find_it(planted: type[host_core.HostCore], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_core, "HostCore", planted)
    handlers = {**host_core._HANDLERS, Publish: planted._on_publish}
    monkeypatch.setattr(host_core, "_HANDLERS", handlers)
    for seed in range(1, 20):
        try:
            test_cores.random_history(seed, security=0.5)
        except (AssertionError, KeyError):
            return
    pytest.fail("no history showed it")
