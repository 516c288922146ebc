"""The handshake between hosts: two ends connected in memory, and possible attacks of an outsider."""

import random

import msgspec
import pytest

from mqd.cluster.membership import handshake
from mqd.cluster.membership.gossip_messages import LIFE_UNIT, PacketOut, Refused, Seal
from mqd.cluster.membership.handshake import HandshakeFailed, HandshakeRefused, Identity, Initiator, Refusal, Responder

KEY = handshake.derive_key(b"a secret of the cluster's own", "handshake")
A = Identity(1, "directory-a", "cluster", feature_last=29, host="127.0.0.1", port=9094)
B = Identity(2, "directory-b", "cluster", feature_last=29, host="127.0.0.2", port=9094)


def nonce(seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(handshake.NONCE_BYTES)


def pair(key_a=KEY, key_b=KEY, purpose="controller", decide=lambda hello: B, worker=-1):
    return Initiator(key_a, purpose, A, nonce(1), worker), Responder(key_b, decide, nonce(2))


def give(side, data: bytes, step: int = 1 << 20) -> tuple[bytes, bytes]:
    """(bytes to send, bytes left over)"""
    out = b""
    while data and side.missing_bytes:
        take = min(side.missing_bytes, step, len(data))
        out += side.feed(data[:take])
        data = data[take:]
    return out, data


def run(initiator, responder, step: int = 1 << 20) -> tuple[bytes, bytes]:
    to_responder, to_initiator = initiator.opening(), b""
    sent = [b"", b""]
    while to_responder or to_initiator:
        sent[0] += to_responder
        to_initiator, rest = give(responder, to_responder, step)
        assert not rest
        sent[1] += to_initiator
        to_responder, rest = give(initiator, to_initiator, step)
        assert not rest
    return sent[0], sent[1]


@pytest.mark.parametrize("step", [1, 3, 1 << 20])
def test_both_sides_know_each_other(step):
    initiator, responder = pair(purpose="data", worker=3)
    run(initiator, responder, step)
    assert initiator.done and responder.done
    assert initiator.peer == B and initiator.missing_bytes == responder.missing_bytes == 0
    assert responder.peer.identity == A and responder.peer.purpose == "data" and responder.peer.worker == 3


def test_bytes_after_the_handshake_are_not_read():
    """H4: a descriptor that is handed on must still have the protocol's first byte unread."""
    initiator, responder = pair()
    challenge, _ = give(responder, initiator.opening())
    proof, _ = give(initiator, challenge)
    _, rest = give(responder, proof + b"first frame")
    assert responder.done and rest == b"first frame"
    with pytest.raises(ValueError):
        responder.feed(b"x")


def test_a_peer_without_the_key_learns_nothing():
    """H1, H3: a peer without the key gets a nonce and nothing more."""
    initiator, responder = pair(key_a=handshake.derive_key(b"another cluster's secret", "handshake"))
    challenge, _ = give(responder, initiator.opening())
    assert b"directory-b" not in challenge and len(challenge) < 100
    proof, _ = give(initiator, challenge)
    with pytest.raises(HandshakeFailed, match="key"):
        give(responder, proof)
    assert not responder.done and responder.peer is None and responder.missing_bytes == 0


def test_a_responder_without_the_key_is_detected():
    initiator, _ = pair()
    _, impostor = pair(key_b=b"x" * 32)
    challenge, _ = give(impostor, initiator.opening())
    give(initiator, challenge)
    response = msgspec.msgpack.encode({"identity": msgspec.to_builtins(B), "refusal": None})
    forged = msgspec.msgpack.encode({"answer": response, "mac": b"\0" * 32})
    with pytest.raises(HandshakeFailed, match="key"):
        give(initiator, len(forged).to_bytes(4, "big") + forged)
    assert initiator.peer is None


def test_a_refusal_is_reported_and_proven():
    refusal = Refusal(handshake.REFUSED_CLUSTER, "of cluster X, this host is of cluster Y")
    initiator, responder = pair(decide=lambda hello: refusal)
    with pytest.raises(HandshakeRefused, match="cluster X") as refused:
        run(initiator, responder)
    assert refused.value.code == handshake.REFUSED_CLUSTER and responder.refused == refusal
    assert not responder.done and responder.peer is None and not initiator.done
    # H5: the same message without the key
    initiator, responder = pair()
    challenge, _ = give(responder, initiator.opening())
    give(initiator, challenge)
    response = msgspec.msgpack.encode({"identity": None, "refusal": msgspec.to_builtins(refusal)})
    forged = msgspec.msgpack.encode({"answer": response, "mac": b"\1" * 32})
    with pytest.raises(HandshakeFailed) as failed:
        give(initiator, len(forged).to_bytes(4, "big") + forged)
    assert not isinstance(failed.value, HandshakeRefused)


def test_a_key_that_is_being_replaced():
    """One side may be one step ahead of the other."""
    old, new = KEY, handshake.derive_key(b"the next secret of the cluster", "handshake")
    steps = [(old,), (old, new), (new, old), (new,)]
    for one, mine in enumerate(steps):
        for two, theirs in enumerate(steps):
            initiator = Initiator(mine[0], "data", A, nonce(1))
            responder = Responder(theirs[0], lambda hello: B, nonce(2), other_keys=theirs[1:])
            if mine[0] in theirs:
                run(initiator, responder)
                assert initiator.done and responder.done
            else:
                assert abs(one - two) > 1
                with pytest.raises(HandshakeFailed, match="key"):
                    run(initiator, responder)


def test_datagrams_while_a_key_is_being_replaced() -> None:
    packet = PacketOut(b"2" * 16, 1, 1, b"1" * 16, LIFE_UNIT, 1, 0, -1, None, [])
    old, new = Seal(b"o" * 32, "cluster"), Seal(b"n" * 32, "cluster")
    both = Seal(b"o" * 32, "cluster", [b"n" * 32])
    for seal in (old, new):
        both.open(seal.seal(packet))
    old.open(both.seal(packet))
    with pytest.raises(Refused):
        new.open(both.seal(packet))
    both.set_keys([b"n" * 32, b"o" * 32])
    new.open(both.seal(packet))
    both.open(old.seal(packet))
    both.set_keys([b"n" * 32])
    with pytest.raises(Refused):
        both.open(old.seal(packet))


@pytest.mark.parametrize("ours", range(3))
@pytest.mark.parametrize("theirs", range(3))
def test_tls_is_agreed_or_refused(ours, theirs):
    initiator = Initiator(KEY, "data", A, nonce(1), tls=ours)
    responder = Responder(KEY, lambda hello: B, nonce(2), tls=theirs)
    if handshake.TLS_REQUIRED in (ours, theirs) and handshake.TLS_OFF in (ours, theirs):
        with pytest.raises(HandshakeRefused, match=r"has cluster.tls=required, .*mqd up --secure") as refused:
            run(initiator, responder)
        assert refused.value.code == handshake.REFUSED_TLS
        assert responder.refused is not None and responder.refused.code == handshake.REFUSED_TLS
        assert not initiator.done and not responder.done and responder.peer is None
    else:
        run(initiator, responder)
        assert initiator.done and responder.done
        assert initiator.uses_tls == responder.uses_tls == (min(ours, theirs) > handshake.TLS_OFF)


def test_a_release_without_tls():
    """Its Hello and its response lack the field."""
    fields = {"version": 1, "nonce": nonce(1), "purpose": "data", "identity": msgspec.to_builtins(A), "worker": 0}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=handshake.Hello).tls == handshake.TLS_OFF
    for ours, taken in ((handshake.TLS_ALLOWED, True), (handshake.TLS_REQUIRED, False)):
        initiator = Initiator(KEY, "data", A, nonce(1), tls=ours)
        challenge = msgspec.msgpack.encode({"version": 1, "nonce": nonce(2)})
        initiator.feed(len(challenge).to_bytes(4, "big"))
        initiator.feed(challenge)
        response = msgspec.msgpack.encode({"identity": msgspec.to_builtins(B), "refusal": None})
        mac = handshake._mac(KEY, b"responder", initiator.opening()[8:], challenge, response)
        signed = msgspec.msgpack.encode({"answer": response, "mac": mac})
        initiator.feed(len(signed).to_bytes(4, "big"))
        if taken:
            initiator.feed(signed)
            assert initiator.done and not initiator.uses_tls
        else:
            with pytest.raises(HandshakeRefused, match="the responder cannot use TLS"):
                initiator.feed(signed)
            assert not initiator.done


def test_tls_cannot_be_downgraded_without_the_key():
    """H6: a host in the middle changes the initiator's Hello."""
    initiator, responder = Initiator(KEY, "data", A, nonce(1), tls=1), Responder(KEY, lambda hello: B, nonce(2), tls=1)
    hello = msgspec.msgpack.decode(initiator.opening()[8:], type=handshake.Hello)
    weaker = msgspec.msgpack.encode(msgspec.structs.replace(hello, tls=0))
    challenge, _ = give(responder, handshake.MAGIC + len(weaker).to_bytes(4, "big") + weaker)
    proof, _ = give(initiator, challenge)
    with pytest.raises(HandshakeFailed, match="key"):
        give(responder, proof)


def test_decide_is_not_called_before_the_proof():
    requests = []
    initiator, responder = pair(key_a=b"wrong" * 7, decide=lambda hello: requests.append(hello) or B)
    with pytest.raises(HandshakeFailed):
        run(initiator, responder)
    assert requests == []


def test_a_recorded_connection_cannot_be_replayed():
    """H2: the responder's nonce is new, and so is the expected proof."""
    initiator, responder = pair()
    from_initiator, _ = run(initiator, responder)
    again = Responder(KEY, lambda hello: B, nonce(3))
    with pytest.raises(HandshakeFailed):
        give(again, from_initiator)


def test_own_proof_cannot_be_reflected():
    """H2: an attacker without the key connects to a host and echoes that host's proof from its role
    as initiator elsewhere: the roles differ.
    """
    victim, _ = pair()
    nonce_of_attacker = nonce(9)
    challenge = msgspec.msgpack.encode({"version": 1, "nonce": nonce_of_attacker})
    proof, _ = give(victim, len(challenge).to_bytes(4, "big") + challenge)
    mac = msgspec.msgpack.decode(proof[4:])["mac"]
    response = msgspec.msgpack.encode({"identity": msgspec.to_builtins(B), "refusal": None})
    forged = msgspec.msgpack.encode({"answer": response, "mac": mac})
    with pytest.raises(HandshakeFailed):
        give(victim, len(forged).to_bytes(4, "big") + forged)


@pytest.mark.parametrize("field, value", [("purpose", "data"), ("worker", 5), ("nonce", nonce(77))])
def test_a_hello_changed_on_the_way_is_refused(field, value):
    initiator, responder = pair()
    hello = msgspec.msgpack.decode(initiator.opening()[8:])
    hello[field] = value
    changed = msgspec.msgpack.encode(hello)
    challenge, _ = give(responder, b"MQDP" + len(changed).to_bytes(4, "big") + changed)
    proof, _ = give(initiator, challenge)
    with pytest.raises(HandshakeFailed):
        give(responder, proof)


def test_hostile_bytes_end_the_connection():
    generator = random.Random(4)
    opening = pair()[0].opening()
    cases = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"MQDP" + (1 << 31).to_bytes(4, "big"),
        b"MQDP\0\0\0\0",
        b"MQDP" + (4097).to_bytes(4, "big"),
        b"MQDP\0\0\0\1\xc1",
    ]
    cases += [opening[:4] + (8).to_bytes(4, "big") + generator.randbytes(8) for _ in range(200)]
    for _ in range(500):
        mangled = bytearray(opening)
        for _ in range(generator.randint(1, 4)):
            mangled[generator.randrange(4, len(mangled))] = generator.randrange(256)
        cases.append(bytes(mangled))
    for data in cases:
        _, responder = pair()
        try:
            give(responder, data)
        except HandshakeFailed:
            assert responder.missing_bytes == 0
        assert not responder.done


def test_keys_differ_by_use():
    assert (
        handshake.derive_key(b"secret", "handshake")
        != handshake.derive_key(b"secret", "gossip")
        != handshake.derive_key(b"other", "gossip")
    )
