"""The metrics server with clients that send nothing, half a request, too much, or do not read."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mqd.acceptor.metrics import server as metrics_server
from mqd.acceptor.metrics.server import CONNECTIONS_MAX, REQUEST_BYTES_MAX, MetricsServer, listen
from mqd.base.listeners import Listener
from tests.interaction.traffic import eventually

GET = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n"


class Decided:
    """Completes health checks at once, or (None) never."""

    def __init__(self, faults: dict[str, list[str] | None]) -> None:
        self._faults = faults

    def check(self, path: str, decided: Callable[[list[str]], None]) -> None:
        faults = self._faults[path]
        if faults is not None:
            decided(faults)


class Served:
    def __init__(self, render: Callable[[], bytes], faults: dict[str, list[str] | None]) -> None:
        listener = listen(Listener("METRICS", "127.0.0.1", 0), 65536, is_fixed=False)
        assert listener is not None
        self.address = listener.getsockname()
        self.server = MetricsServer(listener, render, Decided(faults))
        self.server.start()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=20)

    def send_request(self, request: bytes) -> bytes:
        with self.connect() as connection:
            connection.sendall(request)
            return all_of(connection)


def all_of(connection: socket.socket) -> bytes:
    found = b""
    while data := connection.recv(1 << 20):
        found += data
    return found


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[], bytes]], Served]]:
    with contextlib.ExitStack() as stack:

        def start(render: Callable[[], bytes], **faults: list[str] | None) -> Served:
            served = Served(render, {f"/health/{name}": found for name, found in faults.items()})
            stack.callback(served.server.stop)
            return served

        yield start


def status(response: bytes) -> int:
    return int(response.split(b" ", 2)[1])


def test_responses(serve) -> None:
    served = serve(lambda: b"a_metric 1\n")
    head, _, body = served.send_request(GET).partition(b"\r\n\r\n")
    assert status(head) == 200 and body == b"a_metric 1\n"
    assert int(re.search(rb"Content-Length: (\d+)", head)[1]) == len(body) and b"text/plain; version=0.0.4" in head
    assert status(served.send_request(GET.replace(b"/metrics", b"/metrics?name=x"))) == 200
    assert status(served.send_request(GET.replace(b"/metrics", b"/"))) == 404
    assert status(served.send_request(GET.replace(b"/metrics", b"/metrics/x"))) == 404
    for method in (b"POST", b"HEAD", b"DELETE"):
        assert status(served.send_request(GET.replace(b"GET", method))) == 405
    assert status(served.send_request(b"\x16\x03\x01\r\n\r\n")) == 400
    assert status(served.send_request(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * REQUEST_BYTES_MAX)) == 431


def test_health_checks(serve, monkeypatch) -> None:
    monkeypatch.setattr(metrics_server, "HEALTH_S", 0.2)
    served = serve(lambda: b"", live=[], ready=["worker 1 does not run", "it is fenced"])
    live, ready = (GET.replace(b"/metrics", b"/health/" + name) for name in (b"live", b"ready"))
    assert served.send_request(live).startswith(b"HTTP/1.1 200 ") and served.send_request(live).endswith(
        b"\r\n\r\nok\n"
    )
    assert status(served.send_request(ready)) == 503
    assert served.send_request(ready).endswith(b"\r\n\r\nworker 1 does not run\nit is fenced\n")
    assert status(served.send_request(live.replace(b"/live", b""))) == 404
    hanging = serve(lambda: b"a_metric 1\n", live=None, ready=[])
    assert status(hanging.send_request(live)) == 503 and hanging.send_request(live).endswith(b"does not respond\n")
    assert status(hanging.send_request(GET)) == 200 and hanging.server.connection_count == 0


def test_a_request_in_pieces_gets_a_response(serve) -> None:
    served = serve(lambda: b"a_metric 1\n")
    with served.connect() as connection:
        for byte in GET:
            connection.sendall(bytes([byte]))
        assert status(all_of(connection)) == 200


def test_a_page_is_rendered_at_intervals_and_once_for_all_waiting_requests(serve, monkeypatch) -> None:
    monkeypatch.setattr(metrics_server, "PAUSE_MIN_S", 0.5)
    began: list[float] = []
    threads: set[str] = set()

    def render() -> bytes:
        began.append(time.monotonic())
        threads.update(thread.name for thread in threading.enumerate())
        return b"page %d\n" % len(began)

    served = serve(render)
    requested = time.monotonic()
    assert served.send_request(GET).endswith(b"page 1\n")
    connections = [served.connect() for _ in range(20)]
    for connection in connections:
        connection.sendall(GET)
    assert {all_of(connection).rpartition(b"\r\n")[2] for connection in connections} == {b"page 2\n"}
    assert requested <= began[0] and began[1] - began[0] >= 0.5
    assert len(began) == 2 and "metrics-page" in threads


def test_rendering_takes_a_quarter_of_a_cpu_at_most(serve) -> None:
    spent: list[float] = []

    def render() -> bytes:
        began = time.thread_time()
        while time.thread_time() - began < 0.2:
            pass
        spent.append(time.thread_time())
        return b""

    served = serve(render)
    assert status(served.send_request(GET)) == 200
    began = time.monotonic()
    for _ in range(3):
        assert status(served.send_request(GET)) == 200
    assert sum(spent[1:]) <= (time.monotonic() - began) / 4 + 0.01


def test_a_rendering_error_is_returned_and_the_next_request_retries(serve, monkeypatch) -> None:
    monkeypatch.setattr(metrics_server, "PAUSE_MIN_S", 0.0)
    pages = iter((None, b"sound\n"))
    served = serve(lambda: b"" + next(pages))
    assert status(served.send_request(GET)) == 500
    assert served.send_request(GET).endswith(b"sound\n")


@pytest.mark.parametrize("message", [b"", GET[:-2]], ids=["silent", "half"])
def test_idle_connections_are_bounded_and_scrapes_still_served(serve, monkeypatch, message: bytes) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_S", 60.0)  # none is closed for its silence on a busy machine
    served = serve(lambda: b"a_metric 1\n")
    silent = []
    for number in range(600):
        silent.append(served.connect())
        silent[-1].sendall(message)
        if number % 100 == 50:
            assert status(served.send_request(GET)) == 200
            assert served.server.connection_count <= CONNECTIONS_MAX
    eventually(lambda: served.server.connection_count == CONNECTIONS_MAX, "fewer connections than allowed")
    for connection in silent:
        connection.close()


def test_idle_connections_are_only_closed_for_waiting_ones(serve, monkeypatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_S", 60.0)
    monkeypatch.setattr(metrics_server, "GRACE_S", 0.0)
    served = serve(lambda: b"")
    silent = [served.connect() for _ in range(CONNECTIONS_MAX)]
    assert status(served.send_request(GET)) == 200  # instead of one of them
    silent.append(served.connect())
    eventually(lambda: served.server.connection_count == CONNECTIONS_MAX, "fewer connections than allowed")
    for connection in silent:
        connection.close()


def test_a_silent_client_is_closed_in_time(serve, monkeypatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_S", 0.3)
    served = serve(lambda: b"")
    with served.connect() as silent, served.connect() as slow:
        began = time.monotonic()
        assert silent.recv(1) == b"" and time.monotonic() - began < 5
        with pytest.raises(OSError):  # a byte now and then does not prevent it
            for byte in GET * 1000:
                slow.sendall(bytes([byte]))
                time.sleep(0.05)


def test_a_client_that_does_not_read_is_closed_in_time_and_delays_no_other(serve, monkeypatch) -> None:
    monkeypatch.setattr(metrics_server, "RESPONSE_S", 3.0)  # enough for a reader on a busy machine
    monkeypatch.setattr(metrics_server, "PAUSE_MIN_S", 0.0)
    page = bytes(12 << 20)  # more than the buffers of a connection hold
    served = serve(lambda: page)
    deaf = [served.connect() for _ in range(2 * CONNECTIONS_MAX)]
    for connection in deaf:
        connection.sendall(GET)
    assert len(served.send_request(GET)) > len(page)
    eventually(lambda: served.server.connection_count == 0, "connections are left")
    for connection in deaf:
        connection.close()
