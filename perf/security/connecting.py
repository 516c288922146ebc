"""`python -m perf.security.connecting PORT CA USER PASSWORD THREADS MILLISECONDS`: opens connections one
after another in each thread, with a full TLS handshake and SCRAM-SHA-256 as Java's client does both,
and closes them. Prints {"count": ..., "seconds": ...} as JSON.
"""

from __future__ import annotations

import functools
import json
import socket
import ssl
import struct
import sys
import threading
import time
from typing import Any

from mqd.protocol import decode_response, encode_request, with_length
from mqd.protocol.messages import ApiVersionsRequest
from mqd.security import client

HOST = "127.0.0.1"


def _receive(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise ConnectionError("the broker closed the connection")
        found += part
    return bytes(found)


def _send(connection: socket.socket, api_key: int, request: object, version: int) -> Any:
    connection.sendall(with_length(encode_request(request, version, 1, "connecting")))
    (length,) = struct.unpack(">i", _receive(connection, 4))
    return decode_response(_receive(connection, length), api_key, version)[1]


def _connect(port: int, context: ssl.SSLContext, security: client.ClientSecurity) -> None:
    with socket.create_connection((HOST, port), 30) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with context.wrap_socket(plain, server_hostname=HOST) as connection:
            send = functools.partial(_send, connection)
            send(18, ApiVersionsRequest(client_software_name="connecting", client_software_version="1"), 3)
            security.authenticate(send)


def main() -> None:
    port, ca, user, password, threads, milliseconds = sys.argv[1:]
    # a client computes this once for all its connections
    client.salted_password = functools.cache(client.salted_password)
    context = ssl.create_default_context(cafile=ca)
    security = client.ClientSecurity(
        {
            "security.protocol": "SASL_SSL",
            "sasl.mechanisms": "SCRAM-SHA-256",
            "sasl.username": user,
            "sasl.password": password,
        }
    )
    counts = [0] * int(threads)
    failures: list[BaseException] = []
    began = time.monotonic()
    end = began + int(milliseconds) / 1000

    def run(number: int) -> None:
        try:
            while time.monotonic() < end:
                _connect(int(port), context, security)
                counts[number] += 1
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=run, args=(number,)) for number in range(len(counts))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failures:
        raise failures[0]
    print(json.dumps({"count": sum(counts), "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    main()
