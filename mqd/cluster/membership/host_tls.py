"""TLS for a connection between hosts, if the handshake (handshake.py) has agreed on it. Sans-I/O: bytes
in, bytes out.

    tls = HostTls(context, server_side, node_id)
    send(tls.begin()); until tls.done: send(tls.feed(received bytes))
    send(tls.seal(data)); tls.open(received bytes) -> data

Both sides have certificates. Once TLS is established, each side sends a verdict inside it: whether the
other's certificate belongs to the node that the handshake has authenticated. A verdict is a length of
two bytes and a reason, which is empty if the certificate is accepted. TLS alone would close the
connection without a reason for the other side's log.

Invariants
    T1  no byte of the next protocol is sent or read before each side has accepted the other's
        certificate
    T2  a refusal reaches the other side: after HandshakeFailed the caller sends `refusal_bytes`, and
        closes only when the peer has closed, or after a timeout: a reset could discard data in flight
Concurrency: one call at a time; seal() in the order in which its results are sent.
"""

import ssl

from mqd.cluster.membership.handshake import HandshakeFailed
from mqd.security import host_identity

READ_BYTES = 256 << 10
REASON_BYTES_MAX = 1024


class HostTls:
    """`node_id`: the peer's, as authenticated in the handshake."""

    def __init__(self, context: ssl.SSLContext, server_side: bool, node_id: int) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._in, self._out, server_side)
        self._node_id = node_id
        self._plain = bytearray()  # decrypted, but not read yet
        self._established = self._ended = False
        self.done = False
        self.refusal_bytes = b""  # to be sent after a failure

    def begin(self) -> bytes:
        return self.feed(b"")

    def feed(self, data: bytes) -> bytes:
        """Takes received bytes until `done`, and returns the bytes to send now. Raises HandshakeFailed."""
        self._in.write(data)
        try:
            if not self._established:
                try:
                    self._ssl.do_handshake()
                except ssl.SSLWantReadError:
                    return self._out.read()
                self._established = True
                self._send_verdict()
            self._decrypt()
            self._read_verdict()
        except (ssl.SSLError, ConnectionError) as error:
            self.refusal_bytes = self._out.read()
            raise HandshakeFailed(host_identity.reason_of(error)) from error
        return self._out.read()

    def _send_verdict(self) -> None:
        """Checks the peer's certificate and sends the verdict. Raises WrongHost."""
        try:
            host_identity.check_peer(self._ssl.getpeercert(), self._node_id)
        except host_identity.WrongHost as error:
            reason = str(error).encode()[:REASON_BYTES_MAX]
            self._ssl.write(len(reason).to_bytes(2, "big") + reason)
            raise
        self._ssl.write(b"\0\0")

    def _read_verdict(self) -> None:
        """Reads the peer's verdict. Raises ConnectionError if the peer refuses or has closed the connection."""
        size = int.from_bytes(self._plain[:2], "big") if len(self._plain) >= 2 else 0
        if size > REASON_BYTES_MAX:
            raise ConnectionError(f"the peer gives a reason of {size} bytes; at most {REASON_BYTES_MAX} are allowed")
        if len(self._plain) >= 2 + size:
            reason = self._plain[2 : 2 + size].decode(errors="replace")
            del self._plain[: 2 + size]
            if reason:
                raise ConnectionError(f"refused by the peer: {reason}")
            self.done = True
        elif self._ended:
            raise ConnectionError("the peer has closed the connection")

    def _decrypt(self) -> None:
        """Decrypts the received bytes. Raises ssl.SSLError."""
        while not self._ended:
            try:
                data = self._ssl.read(READ_BYTES)
            except ssl.SSLWantReadError:
                return
            except ssl.SSLZeroReturnError:
                data = b""
            self._ended = not data
            self._plain += data

    def seal(self, data: bytes) -> bytes:
        assert self.done
        unsent = memoryview(data)
        while unsent:
            unsent = unsent[self._ssl.write(unsent) :]
        return self._out.read()

    def open(self, data: bytes) -> bytes:
        """Returns the data that can be decrypted, or b"" if more bytes are needed. Raises EOFError if the peer
        has closed the connection, OSError if the bytes are not authentic.
        """
        assert self.done
        self._in.write(data)
        self._decrypt()
        if self._ended and not self._plain:
            raise EOFError("the peer has closed the connection")
        plain, self._plain = bytes(self._plain), bytearray()
        return plain
