"""Delegation tokens in the metadata: who may change one, when it expires, which processes receive
it.
"""

from __future__ import annotations

import msgspec
import pytest

from mqd.acceptor.metadata import Metadata
from mqd.cluster.host import core as host_core
from mqd.cluster.host import messages
from mqd.cluster.metadata import core as metadata_core
from mqd.cluster.metadata import features, limits
from mqd.cluster.metadata.core import Publish
from mqd.cluster.metadata.records import DelegationToken, DelegationTokenRemoved, DelegationTokenSet, Record
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules import tokens
from mqd.cluster.metadata.state import MetadataState, Snapshot
from mqd.protocol.errors import ErrorCode as E
from tests.unit.cluster.test_host_core import Host
from tests.unit.controller.cores_world import World

NOW = 1_700_000_000_000
OWNER, RENEWER, OTHER = "User:alice", "User:ren", "User:bob"


def token(token_id: str = "t", expires_ms: int = NOW + 1000, **more) -> DelegationToken:
    return DelegationToken(
        **{
            "token_id": token_id,
            "owner": OWNER,
            "requester": "User:boss",
            "renewers": (RENEWER,),
            "issued_ms": NOW,
            "renewable_until_ms": NOW + 5000,
            "expires_ms": expires_ms,
            **more,
        }
    )


def state_of(*found: DelegationToken) -> MetadataState:
    state = MetadataState()
    for one in found:
        state.apply(DelegationTokenSet(one))
    return state


def expiry(
    requester: str, now_ms: int, period_ms: int, is_renewal: bool, token_id: str = "t"
) -> tuple[int, int, list[Record]]:
    """(error, expiry, records)"""
    change = messages.SetTokenExpiry(token_id, requester, now_ms, period_ms, is_renewal)
    response, _, records = tokens.set_expiry(state_of(token()), change, 7)
    assert response.request_id == 7 and response.error == 0, "a refusal waits for the metadata too"
    return response.token_error, response.expires_ms, records


def test_a_token_is_renewed_up_to_its_maximum() -> None:
    for who in (OWNER, RENEWER):
        assert expiry(who, NOW + 10, 3000, True) == (0, NOW + 3010, [DelegationTokenSet(token("t", NOW + 3010))])
    assert expiry(OWNER, NOW + 10, 1 << 62, True)[1] == NOW + 5000
    assert expiry(OWNER, NOW + 1000, 1, True)[0] == 0, "it lives through its last millisecond"


def test_a_token_is_expired_at_once_or_later() -> None:
    assert expiry(RENEWER, NOW + 10, -1, False) == (0, NOW + 10, [DelegationTokenRemoved("t")])
    assert expiry(OWNER, NOW + 10, 0, False)[1] == NOW + 10
    assert expiry(OWNER, NOW + 10, 9000, False)[1] == NOW + 5000
    assert expiry(OWNER, NOW + 9000, -1, False)[2] == [DelegationTokenRemoved("t")], "as in Kafka, even when it is late"


@pytest.mark.parametrize("is_renewal", [True, False])
def test_refusals(is_renewal: bool) -> None:
    assert expiry(OWNER, NOW, 5, is_renewal, "no")[0] == expiry(OWNER, NOW, 5, is_renewal, "")[0]
    assert expiry(OWNER, NOW, 5, is_renewal, "")[::2] == (E.DELEGATION_TOKEN_NOT_FOUND, [])
    for other in (OTHER, "User:boss"):  # the requester has no right to it
        assert expiry(other, NOW, 5, is_renewal)[::2] == (E.DELEGATION_TOKEN_OWNER_MISMATCH, [])
    assert expiry(OWNER, NOW + 1001, 5, is_renewal)[::2] == (E.DELEGATION_TOKEN_EXPIRED, [])
    # in the order of Kafka's checks
    both = E.DELEGATION_TOKEN_EXPIRED if is_renewal else E.DELEGATION_TOKEN_OWNER_MISMATCH
    assert expiry(OTHER, NOW + 1001, 5, is_renewal)[0] == both


def test_the_number_of_tokens_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "TOKENS_PER_REQUESTER_MAX", 2)
    monkeypatch.setattr(tokens, "TOKEN_COUNT_MAX", 3)
    state = state_of(token("a"), token("b"))
    with pytest.raises(Refusal, match="User:boss has requested 2") as refusal:
        tokens.create(state, token("c"))
    assert refusal.value.error == E.POLICY_VIOLATION
    other = token("c", requester=OTHER)
    assert tokens.create(state, other) == [DelegationTokenSet(other)]
    state.apply(DelegationTokenSet(other))
    with pytest.raises(Refusal, match="There are 3 delegation tokens"):
        tokens.create(state, token("d", requester="User:x"))
    monkeypatch.undo()
    for wrong in (token("a"), token(""), token("e", renewers=("User:" + "r" * 1020,))):
        with pytest.raises(Refusal):
            tokens.create(state, wrong)


def test_the_image_can_hold_the_maximum() -> None:
    many = ("User:",) * ((limits.TOKEN_BYTES_MAX - 10) // 5)
    largest = token("t" * 22, owner="User:", requester="User:", renewers=many)
    assert tokens.create(MetadataState(), largest)
    assert len(msgspec.msgpack.encode(largest)) * limits.TOKEN_COUNT_MAX < 20 << 20


def test_expired_tokens_are_removed_by_the_active_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "REMOVALS_PER_BATCH_MAX", 2)
    world = World()
    world.settle()
    response = world.send_request(messages.CreateDelegationToken(token()))
    assert response.error == E.INVALID_UPDATE_VERSION, "an older host could not read it"
    assert world.send_request(messages.UpdateFeatures([messages.FeatureUpdate(features.MQD_VERSION, 3, 1)])).error == 0
    for number in range(5):
        late = token(f"t{number}", NOW + 100 if number < 3 else NOW + 300)
        change = world.request(messages.CreateDelegationToken(late))
        world.flush_log()
        assert world.answers[change].error == 0, "it concerns no worker"

    def left(wall_ms: int) -> list[str]:
        world.now_ms += 3_600_000
        for _ in range(3):
            world.metadata(metadata_core.Tick(wall_ms))
            world.flush_log()
        return sorted(world.core.committed.delegation_tokens)

    world.metadata(metadata_core.Tick(NOW + 999))
    assert len(world.core.proposed.delegation_tokens) == 5, "the first check is an hour after the controller's start"
    assert left(0) == left(NOW + 100) == ["t0", "t1", "t2", "t3", "t4"]
    assert left(NOW + 101) == ["t3", "t4"]
    world.metadata(metadata_core.Tick(NOW + 999))
    assert len(world.core.proposed.delegation_tokens) == 2, "the next look is an hour later"
    assert left(NOW + 999) == []


def test_the_snapshot_has_them() -> None:
    state = state_of(token("a"), token("b"))
    state.apply(DelegationTokenRemoved("a"))
    again = MetadataState.from_snapshot(msgspec.msgpack.decode(msgspec.msgpack.encode(state.snapshot()), type=Snapshot))
    assert again == state and list(again.delegation_tokens) == ["b"]


def test_the_acceptor_is_notified_and_no_worker() -> None:
    host, metadata = Host(), Metadata()
    host.state.apply(DelegationTokenSet(token("a")))
    host.core.handle(host_core.Started(host.state, (), (), {}), 0)

    def sent(event: host_core.Event) -> dict[str, list]:
        reported: dict[str, list] = {"worker": [], "acceptor": []}
        for action in host.core.handle(event, 0):
            if isinstance(action, host_core.Send):
                reported[action.client].append(action.message)
        for message in reported["acceptor"]:
            metadata.apply(message)
        return reported

    sent(host_core.SubscriberJoined("acceptor", messages.Subscribe("acceptor", 0, 1)))
    (image,) = sent(host_core.SubscriberJoined("worker", messages.Subscribe("worker", 0, 1)))["worker"]
    assert image.delegation_tokens == [] and metadata.delegation_tokens == {"a": token("a")}
    for record in (DelegationTokenRemoved("a"), DelegationTokenSet(token("b"))):
        host.state.apply(record)
    reported = sent(Publish(host.state.version, tokens_put=(token("b"),), tokens_removed=("a",)))
    assert not reported["worker"] and metadata.delegation_tokens == {"b": token("b")}
