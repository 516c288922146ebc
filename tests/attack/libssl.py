"""OpenSSL for a client, by ctypes: features that Python's ssl lacks, key updates and renegotiation."""

from __future__ import annotations

import ctypes
import socket

_TLS1_2, _TLS1_3 = 0x0303, 0x0304
_CTRL_SET_MIN, _CTRL_SET_MAX = 123, 124
_UPDATE_NOT_REQUESTED, _UPDATE_REQUESTED = 0, 1


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL("libssl.so.3")
    pointer, number = ctypes.c_void_p, ctypes.c_int
    for name, result, arguments in (
        ("TLS_client_method", pointer, []),
        ("SSL_CTX_new", pointer, [pointer]),
        ("SSL_CTX_free", None, [pointer]),
        ("SSL_CTX_ctrl", ctypes.c_long, [pointer, number, ctypes.c_long, pointer]),
        ("SSL_new", pointer, [pointer]),
        ("SSL_free", None, [pointer]),
        ("SSL_set_fd", number, [pointer, number]),
        ("SSL_connect", number, [pointer]),
        ("SSL_do_handshake", number, [pointer]),
        ("SSL_read", number, [pointer, ctypes.c_char_p, number]),
        ("SSL_write", number, [pointer, ctypes.c_char_p, number]),
        ("SSL_key_update", number, [pointer, number]),
        ("SSL_renegotiate", number, [pointer]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


_library = _load()


class Session:
    """A blocking connection, which does not verify the server. Raises ConnectionError."""

    def __init__(self, connection: socket.socket, is_tls_1_2: bool = False) -> None:
        connection.settimeout(None)  # libssl uses the descriptor itself
        seconds = (20).to_bytes(8, "little") + bytes(8)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, seconds)
        self._socket = connection
        self._context = _library.SSL_CTX_new(_library.TLS_client_method())
        version = _TLS1_2 if is_tls_1_2 else _TLS1_3
        for bound in (_CTRL_SET_MIN, _CTRL_SET_MAX):
            _library.SSL_CTX_ctrl(self._context, bound, version, None)
        self._ssl = _library.SSL_new(self._context)
        _library.SSL_set_fd(self._ssl, connection.fileno())
        self._must(_library.SSL_connect(self._ssl), "handshake")

    def send(self, data: bytes) -> None:
        self._must(_library.SSL_write(self._ssl, data, len(data)), "write")

    def receive(self, size_bytes_max: int = 1 << 16) -> bytes:
        buffer = ctypes.create_string_buffer(size_bytes_max)
        found = self._must(_library.SSL_read(self._ssl, buffer, size_bytes_max), "read")
        return buffer.raw[:found]

    def update_key(self, is_answered: bool) -> None:
        """Sent with the next data."""
        kind = _UPDATE_REQUESTED if is_answered else _UPDATE_NOT_REQUESTED
        self._must(_library.SSL_key_update(self._ssl, kind), "key update")
        self._must(_library.SSL_do_handshake(self._ssl), "key update")

    def renegotiate(self) -> None:
        self._must(_library.SSL_renegotiate(self._ssl), "renegotiation")
        self._must(_library.SSL_do_handshake(self._ssl), "renegotiation")

    def close(self) -> None:
        _library.SSL_free(self._ssl)
        _library.SSL_CTX_free(self._context)
        self._socket.close()

    def _must(self, result: int, what: str) -> int:
        if result <= 0:
            raise ConnectionError(f"the {what} has failed")
        return result

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
