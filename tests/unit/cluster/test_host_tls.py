"""TLS between hosts, two ends connected in memory."""

import ssl

import pytest

from mqd.cluster.membership.handshake import HandshakeFailed
from mqd.cluster.membership.host_tls import HostTls
from mqd.security import pki
from tests.unit.security.host_files import LONG_AGO, NOW, authority, host


def pair(tmp_path, initiators=None, responders=None) -> tuple[HostTls, HostTls]:
    """Nodes 1 and 2; `initiators`, `responders`: other certificates."""
    one, two = host(tmp_path, 1, pair=initiators), host(tmp_path, 2, pair=responders)
    return HostTls(one.client, False, 2), HostTls(two.server, True, 1)


def join(initiator: HostTls, responder: HostTls, step: int = 1 << 20) -> dict[HostTls, str]:
    """Returns the errors of both sides."""
    failures: dict[HostTls, str] = {}
    to = {responder: initiator.begin(), initiator: responder.begin()}
    while any(to.values()):
        for side, other in ((responder, initiator), (initiator, responder)):
            data, to[side] = to[side], b""
            while data and not side.done and side not in failures:
                try:
                    to[other] += side.feed(data[:step])
                except HandshakeFailed as error:
                    failures[side] = str(error)
                    to[other] += side.refusal_bytes
                data = data[step:]
    return failures


@pytest.mark.parametrize("step", [1, 1 << 20])
def test_two_hosts_talk(tmp_path, step):
    initiator, responder = pair(tmp_path)
    assert join(initiator, responder, step) == {} and initiator.done and responder.done
    for data in (b"a marker", b"x" * 300_000):
        sealed = initiator.seal(data)
        assert data[:8] not in sealed
        assert b"".join(responder.open(sealed[at : at + 5000]) for at in range(0, len(sealed), 5000)) == data
    assert initiator.open(responder.seal(b"an answer")) == b"an answer"


def test_data_that_arrives_with_the_handshakes_end_is_kept(tmp_path):
    """T1: the responder may send as soon as it has accepted the initiator's certificate."""
    initiator, responder = pair(tmp_path)
    to_responder = initiator.feed(responder.feed(initiator.begin()))
    assert initiator.feed(responder.feed(to_responder) + responder.seal(b"early")) == b""
    assert initiator.done and initiator.open(b"") == b"early"


@pytest.mark.parametrize("thief", ["initiator", "responder"])
def test_a_stolen_certificate_is_valid_for_its_own_host_only(tmp_path, thief):
    stolen = pki.issue_host(authority(), 3, NOW)
    initiator, responder = pair(tmp_path, **{f"{thief}s": stolen})
    failures = join(initiator, responder)
    bad, good = (initiator, responder) if thief == "initiator" else (responder, initiator)
    node = 1 if thief == "initiator" else 2
    assert failures[good].startswith(f"node {node} has a certificate of mqd://node/3; install on each host")
    assert failures[bad] == f"refused by the peer: {failures[good]}"  # T2
    assert not initiator.done and not responder.done


@pytest.mark.parametrize(
    ("certificate", "here", "there"),
    [
        (lambda: pki.issue_host(authority("another"), 3, NOW), "unable to get local issuer|self-signed", "unknown ca"),
        (lambda: pki.issue_host(authority(), 3, LONG_AGO), "certificate has expired", "certificate expired"),
        (lambda: pki.issue(authority(), "alice", ("mqd://node/3",), NOW), "has a certificate of no host", "no host"),
    ],
)
@pytest.mark.parametrize("of", ["initiator", "responder"])
def test_both_sides_get_the_reason(tmp_path, certificate, here, there, of):
    initiator, responder = pair(tmp_path, **{f"{of}s": certificate()})
    failures = join(initiator, responder)
    bad, good = (initiator, responder) if of == "initiator" else (responder, initiator)
    assert any(word in failures[good] for word in here.split("|")), failures[good]
    assert there in failures[bad], failures[bad]
    assert not bad.done and not good.done


def test_garbage_and_an_endless_reason(tmp_path):
    _, responder = pair(tmp_path)
    with pytest.raises(HandshakeFailed):
        responder.feed(b"GET / HTTP/1.1\r\n\r\n" * 10)
    assert not responder.done
    initiator, responder = pair(tmp_path)
    initiator._send_verdict = lambda: initiator._ssl.write(b"\xff\xff")  # type: ignore[method-assign]
    flight = initiator.feed(responder.feed(initiator.begin()))
    with pytest.raises(HandshakeFailed, match="a reason of 65535 bytes"):
        responder.feed(flight)


def test_older_tls_is_refused(tmp_path):
    """TLS 1.2 would show the certificates in plaintext."""
    one, two = host(tmp_path, 1), host(tmp_path, 2)
    one.client.minimum_version = ssl.TLSVersion.TLSv1_2
    one.client.maximum_version = ssl.TLSVersion.TLSv1_2
    failures = join(HostTls(one.client, False, 2), HostTls(two.server, True, 1))
    assert len(failures) == 2


def test_the_end_of_the_connection_is_detected(tmp_path):
    initiator, responder = pair(tmp_path)
    join(initiator, responder)
    sealed = bytearray(initiator.seal(b"changed on its way"))
    sealed[-1] ^= 1
    with pytest.raises(ssl.SSLError):
        responder.open(bytes(sealed))
    initiator, responder = pair(tmp_path)
    join(initiator, responder)
    with pytest.raises(ssl.SSLError):
        initiator._ssl.unwrap()
    last = initiator._out.read()
    with pytest.raises(EOFError):
        responder.open(last)
