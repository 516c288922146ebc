"""Mutual authentication: two hosts prove to each other that they have the cluster's key before either
reads other messages. Sans-I/O: bytes in, bytes out.

Every connection between hosts begins with this handshake, on the controller's listener and on the
inter-broker listener:

    initiator                                             responder
    "MQDP", hello (nonce, identity, purpose)         ->
                                                    <-    challenge (nonce)
    proof  HMAC(key, "initiator", hello, nonce)     ->
                                                    <-    answer (identity or refusal) with
                                                          HMAC(key, "responder", hello, nonce,
                                                               answer)

Frames: 4-byte big-endian length, then msgpack; at most FRAME_BYTES_MAX. After the handshake the
connection uses the protocol of its `purpose`; the initiator sends first.

Hello and answer say whether a side can use TLS and whether it must. If both can, the connection
continues as TLS 1.3 (`uses_tls`): the initiator is the TLS client, the responder the server, and each
checks that the other's certificate belongs to the node that authenticated here
(mqd/security/host_identity.py). A side that must use TLS refuses one that cannot.

Invariants
    H1  until the peer has proven that it has the key, its hello is not trusted; the responder sends
        its identity only after the initiator's proof
    H2  each proof covers both nonces, the purpose, both identities and the prover's role, so it is not
        valid on another connection, for another purpose or in the other direction
    H3  proofs are compared in constant time; a wrong proof, an oversized frame or a frame out of turn
        ends the connection without a response
    H4  only the handshake's bytes are consumed: feed() takes at most `missing_bytes` bytes, so the
        socket can be passed to another process after the handshake
    H5  a refusal is authenticated like an acceptance: a peer without the key cannot make a host
        believe that it was refused
    H6  the proofs cover the TLS modes of both sides: without the key they cannot be changed, and a peer
        without the key cannot cause a TLS handshake

Limits: without TLS the bytes after the handshake are neither encrypted nor authenticated. Concurrency:
one object per connection, one call at a time. Each nonce is passed in: NONCE_BYTES from os.urandom.
"""

import hashlib
import hmac
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

MAGIC = b"MQDP"
VERSION = 1
NONCE_BYTES = 32
FRAME_BYTES_MAX = 4096
KEY_BYTES_MIN = 16
HANDSHAKE_SECONDS_MAX = 5.0  # callers disconnect a peer that has not finished by then
PURPOSES = ("controller", "data", "gossip")

# A responder's reasons for a refusal; from these the initiator decides whether to retry.
REFUSED_CLUSTER = "cluster"  # the initiator belongs to another cluster, or another generation of it
REFUSED_FEATURES = "features"  # no feature level that both support
REFUSED_WORKER = "worker"  # no such worker here
REFUSED_IDENTITY = "identity"  # the node id belongs to another host, or is the responder's own
REFUSED_PURPOSE = "purpose"  # not offered on this listener
REFUSED_BUSY = "busy"  # too many connections, or not ready yet
REFUSED_TLS = "tls"  # one side must use TLS, the other cannot

# TLS modes of a side (cluster.tls). Releases without TLS between hosts send none, which means TLS_OFF.
TLS_OFF, TLS_ALLOWED, TLS_REQUIRED = range(3)


class Identity(msgspec.Struct, frozen=True):
    """A host's identity, as sent to its peers."""

    node_id: int
    directory_id: str  # id of the metadata directory: a wiped host is another host
    cluster_id: str = ""  # "" = not in a cluster yet
    generation: int = 0  # generation of the cluster, raised by force-standalone
    empty: bool = False  # its metadata log is empty and it has never voted
    feature_first: int = 0  # metadata levels that this host can read, inclusive
    feature_last: int = 0
    host: str = ""  # address of its controller listener for other hosts; "" = none
    port: int = 0
    features: dict[str, tuple[int, int]] = {}  # levels that it supports, inclusive


class Hello(msgspec.Struct, frozen=True):
    version: int
    nonce: bytes
    purpose: str  # one of PURPOSES
    identity: Identity
    worker: int = -1  # purpose "data": the worker that the socket is for
    tls: int = TLS_OFF


class _Challenge(msgspec.Struct, frozen=True):
    version: int
    nonce: bytes


class _Proof(msgspec.Struct, frozen=True):
    mac: bytes


class Refusal(msgspec.Struct, frozen=True):
    code: str  # REFUSED_*
    message: str


class _Response(msgspec.Struct, frozen=True):
    identity: Identity | None
    refusal: Refusal | None
    tls: int = TLS_OFF


class _Signed(msgspec.Struct, frozen=True):
    response: bytes = msgspec.field(name="answer")
    mac: bytes


class HandshakeFailed(RuntimeError):
    """The peer does not have the key, speaks another protocol, or has sent invalid data. The connection
    ends.
    """


class HandshakeRefused(HandshakeFailed):
    """The peer has the key, but refuses this connection."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.code = refusal.code


_encode = msgspec.msgpack.Encoder().encode
_Body = TypeVar("_Body", bound=msgspec.Struct)
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {
    message_class: msgspec.msgpack.Decoder(message_class)
    for message_class in (Hello, _Challenge, _Proof, _Response, _Signed)
}


def _decode(message_class: type[_Body], body: bytes) -> _Body:
    return _decoders[message_class].decode(body)


def derive_key(secret: bytes, use: str) -> bytes:
    """Derives a separate key for each use ("handshake", "gossip"), so that a message for one use is not
    valid for the other.
    """
    return hmac.new(secret, b"mqd cluster key: " + use.encode(), hashlib.sha256).digest()


def _tls_refusal(initiator: int, responder: int) -> Refusal | None:
    """Returns the reason why the two sides cannot agree on TLS, or None if they can."""
    if min(initiator, responder) > TLS_OFF or TLS_REQUIRED not in (initiator, responder):
        return None
    strict, other = ("initiator", "responder") if initiator == TLS_REQUIRED else ("responder", "initiator")
    return Refusal(
        REFUSED_TLS,
        f"the {strict} has cluster.tls=required, the {other} cannot use TLS between hosts: give it a host certificate"
        " and cluster.tls=allowed (mqd up --secure does both; docs/security.md), or set cluster.tls=allowed on the"
        f" {strict} until then",
    )


def _mac(key: bytes, role: bytes, *parts: bytes) -> bytes:
    mac = hmac.new(key, b"mqd peer handshake 1: " + role, hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(4, "big") + part)
    return mac.digest()


def _frame(body: bytes) -> bytes:
    assert len(body) <= FRAME_BYTES_MAX, "a handshake frame of our own is too long"
    return len(body).to_bytes(4, "big") + body


class _Side:
    """The common part of both sides: reads one frame at a time, and no byte beyond it."""

    def __init__(self, key: bytes, nonce: bytes, prefix: bytes) -> None:
        assert len(nonce) == NONCE_BYTES
        self._key = key
        self._nonce = nonce
        self._buffer = bytearray()
        self._size = -1  # size of the frame's body; -1 = not known yet
        self._prefix = prefix  # the bytes with which the peer must begin; empty after its first frame header
        self.peer: Hello | Identity | None = None  # the peer's identity, once `done`
        self.done = False
        self.uses_tls = False  # once `done`: whether the connection continues as TLS
        self._failed = False

    @property
    def missing_bytes(self) -> int:
        """The maximum number of bytes to read next; 0 when the handshake is over."""
        if self.done or self._failed:
            return 0
        return (self._size if self._size >= 0 else len(self._prefix) + 4) - len(self._buffer)

    def feed(self, data: bytes) -> bytes:
        """Takes received bytes and returns the bytes to send now. If it raises HandshakeFailed, the caller
        must close the connection without sending.
        """
        if len(data) > self.missing_bytes:
            raise ValueError(f"{len(data)} bytes passed where at most {self.missing_bytes} were expected")
        self._buffer += data
        if self.missing_bytes:
            return b""
        try:
            if self._size < 0:
                self._begin_frame()
                return b""
            body, self._buffer, self._size = bytes(self._buffer), bytearray(), -1
            return self._on_frame(body)
        except HandshakeFailed:
            self._failed = True
            raise
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._failed = True
            raise HandshakeFailed(f"the peer sent an invalid handshake: {error}") from error

    def _begin_frame(self) -> None:
        prefix, size = bytes(self._buffer[: len(self._prefix)]), int.from_bytes(self._buffer[-4:], "big")
        if prefix != self._prefix:
            raise HandshakeFailed(f"the peer does not speak mqd's protocol between hosts (it began with {prefix!r})")
        if not 0 < size <= FRAME_BYTES_MAX:
            raise HandshakeFailed(f"a handshake frame of {size} bytes; at most {FRAME_BYTES_MAX} are allowed")
        self._prefix = b""
        self._buffer.clear()
        self._size = size

    def _on_frame(self, body: bytes) -> bytes:
        raise NotImplementedError

    def _check_proof(self, received_mac: bytes, role: bytes, *parts: bytes) -> None:
        if not hmac.compare_digest(received_mac, _mac(self._key, role, *parts)):
            raise HandshakeFailed(
                "the peer does not have this cluster's key (cluster.key.file must be the same on every host)"
            )


class Initiator(_Side):
    """The side that has connected. Send opening(), then feed() the received bytes until `done`; `peer` is
    then the responder's Identity. Raises HandshakeRefused if the responder refuses.
    """

    peer: Identity | None

    def __init__(
        self, key: bytes, purpose: str, identity: Identity, nonce: bytes, worker: int = -1, tls: int = TLS_OFF
    ) -> None:
        super().__init__(key, nonce, b"")
        self._tls_mode = tls
        self._hello = _encode(Hello(VERSION, nonce, purpose, identity, worker, tls))
        self._challenge: bytes | None = None

    def opening(self) -> bytes:
        return MAGIC + _frame(self._hello)

    def _on_frame(self, body: bytes) -> bytes:
        if self._challenge is None:
            challenge = _decode(_Challenge, body)
            if challenge.version != VERSION or len(challenge.nonce) != NONCE_BYTES:
                raise HandshakeFailed(
                    f"the peer speaks version {challenge.version} of the handshake, this host {VERSION}"
                )
            self._challenge = body
            return _frame(_encode(_Proof(_mac(self._key, b"initiator", self._hello, body))))
        signed = _decode(_Signed, body)
        self._check_proof(signed.mac, b"responder", self._hello, self._challenge, signed.response)
        response = _decode(_Response, signed.response)
        if response.identity is None:
            raise HandshakeRefused(response.refusal or Refusal(REFUSED_BUSY, "the peer gave no reason"))
        if refusal := _tls_refusal(self._tls_mode, response.tls):  # a responder of an older release does not check this
            raise HandshakeRefused(refusal)
        self.peer = response.identity
        self.uses_tls = min(self._tls_mode, response.tls) > TLS_OFF
        self.done = True
        return b""


class Responder(_Side):
    """The side that has accepted the connection. feed() the received bytes until `done`; `peer` is then
    the initiator's Hello.

    `decide(hello)` is called when the initiator has proven that it has the key, and returns this host's
    Identity or a Refusal. After a refusal `refused` is set and `done` is False: send the result of
    feed(), then close.

    `other_keys`: further keys with which the initiator may authenticate while the cluster's key is
    being changed. The responder's own proof uses the same key as the initiator's proof.
    """

    peer: Hello | None

    def __init__(
        self,
        key: bytes,
        decide: Callable[[Hello], Identity | Refusal],
        nonce: bytes,
        tls: int = TLS_OFF,
        other_keys: Sequence[bytes] = (),
    ) -> None:
        super().__init__(key, nonce, MAGIC)
        self._other_keys = other_keys
        self._tls_mode = tls
        self._decide = decide
        self._hello_bytes = b""
        self._hello: Hello | None = None
        self._challenge = _encode(_Challenge(VERSION, nonce))
        self.refused: Refusal | None = None
        self.sent_identity: Identity | None = None  # the result of decide(), if it is an Identity
        self.proven_node_id: int | None = None  # the initiator's node id, once its proof was accepted

    def _on_frame(self, body: bytes) -> bytes:
        if self._hello is None:
            hello = _decode(Hello, body)
            if hello.version != VERSION or len(hello.nonce) != NONCE_BYTES:
                raise HandshakeFailed(f"the peer speaks version {hello.version} of the handshake, this host {VERSION}")
            if hello.purpose not in PURPOSES:
                raise HandshakeFailed(f"the peer names the purpose {hello.purpose!r}, which this host does not know")
            self._hello, self._hello_bytes = hello, body
            return _frame(self._challenge)
        proof = _decode(_Proof, body)
        for key in self._other_keys:
            if hmac.compare_digest(proof.mac, _mac(key, b"initiator", self._hello_bytes, self._challenge)):
                self._key = key
        self._check_proof(proof.mac, b"initiator", self._hello_bytes, self._challenge)
        self.proven_node_id = self._hello.identity.node_id
        decision = _tls_refusal(self._hello.tls, self._tls_mode) or self._decide(self._hello)
        if isinstance(decision, Refusal):
            self.refused, self._failed = decision, True
            response = _encode(_Response(None, decision))
        else:
            self.peer, self.sent_identity, self.done = self._hello, decision, True
            self.uses_tls = min(self._hello.tls, self._tls_mode) > TLS_OFF
            response = _encode(_Response(decision, None, self._tls_mode))
        return _frame(
            _encode(_Signed(response, _mac(self._key, b"responder", self._hello_bytes, self._challenge, response)))
        )
