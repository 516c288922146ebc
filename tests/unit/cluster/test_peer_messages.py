"""The envelope of messages between controllers."""

import random

import msgspec
import pytest

from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host import messages as controller_messages
from mqd.cluster.membership import formation, peer_messages
from mqd.cluster.membership.peer_messages import PeerProtocolError, body_size, decode, encode
from mqd.cluster.raft import messages as quorum_messages


def test_every_core_has_its_messages_in_one_union():
    key = quorum_messages.ReplicaKey(1, b"d" * 16)
    request = controller_messages.Request(1, controller_messages.CreateTopic("t", 1, -1, {}, {}))
    for message in (
        formation.FormationQuery(7),
        quorum_messages.BeginEpoch(1, 2, key),
        broker_messages.Heartbeat(1, 5, 1000, 40),
        broker_messages.ChangeForwarded(1, 5, 9, 3, request),
    ):
        frame = encode(message)
        assert body_size(frame[:4]) == len(frame) - 4 and decode(frame[4:]) == message


def test_unknown_messages_and_fields_are_skipped():
    """Hosts of two versions coexist."""
    assert decode(msgspec.msgpack.encode({"type": "Tomorrow", "x": 1})) is None
    assert decode(
        msgspec.msgpack.encode({"type": "FormationAsk", "ask_id": 1, "tomorrow": 2})
    ) == formation.FormationQuery(1)
    change = {
        "type": "ChangeForwarded",
        "node_id": 1,
        "broker_epoch": 1,
        "request_id": 1,
        "incarnation": 1,
        "request": {"type": "Request", "request_id": 1, "change": {"type": "Tomorrow"}},
    }
    assert decode(msgspec.msgpack.encode(change)) is None


def test_lengths_are_checked_on_both_sides():
    for size in (0, peer_messages.MESSAGE_BYTES_MAX + 1, 0xFFFFFFFF):
        with pytest.raises(PeerProtocolError):
            body_size(size.to_bytes(4, "big"))
    with pytest.raises(PeerProtocolError):
        encode(
            quorum_messages.SnapshotChunk(
                1, 1, quorum_messages.ReplicaKey(1, b""), 1, 1, 0, bytes(peer_messages.MESSAGE_BYTES_MAX), 0
            )
        )


def test_hostile_bytes_are_refused():
    generator = random.Random(5)
    frame = encode(formation.FormationResponse(1, formation.Member(1, "d", "h", 1), "", 0, ("a:1",), "", ()))[4:]
    for _ in range(2000):
        mangled = bytearray(frame)
        for _ in range(generator.randint(1, 3)):
            mangled[generator.randrange(len(mangled))] = generator.randrange(256)
        try:
            decode(bytes(mangled))
        except PeerProtocolError:
            pass
    for body in (
        b"",
        b"\xc1",
        b"\x93" * 5000,
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode({"type": "FormationAsk", "ask_id": "x"}),
    ):
        with pytest.raises(PeerProtocolError):
            decode(body)
