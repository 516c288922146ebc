"""One connection to a broker: its handling when it ends or a response is late, and calls that
outlive it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from mqd.cli import kafka_request as request
from mqd.cli import moves
from mqd.cli.common import EXIT_UNREACHABLE, CliError
from mqd.cli.kafka_request import Broker, with_retries
from mqd.protocol.api import decode_request, encode_response, with_length
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import SUPPORTED, RequestHeader
from mqd.protocol.messages import ApiVersionsResponse, ListGroupsRequest, ListGroupsResponse
from tests.ports import free_port

LIST_GROUPS = 16


class Server:
    """A broker that knows ListGroups. `misbehave(count, header)`: the response to the count-th such
    request: None, the regular one; b"", it closes the connection.
    """

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", free_port()))
        self.bootstrap = "127.0.0.1:%d" % self._socket.getsockname()[1]
        self.misbehave: Callable[[int, RequestHeader], bytes | None] = lambda count, header: None
        self.count = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as stream:
            while len(head := stream.read(4)) == 4:
                header, _ = decode_request(stream.read(struct.unpack(">i", head)[0]))
                if header.api_key == LIST_GROUPS:
                    self.count += 1
                    response = self.misbehave(self.count, header)
                    if response == b"":
                        return
                    connection.sendall(
                        response
                        or with_length(
                            encode_response(
                                header, ListGroupsResponse(groups=[ListGroupsResponse.Group(group_id=f"g{self.count}")])
                            )
                        )
                    )
                else:
                    keys = [
                        ApiVersionsResponse.ApiVersion(
                            api_key=one.key, min_version=one.min_version, max_version=one.max_version
                        )
                        for one in SUPPORTED.values()
                    ]
                    connection.sendall(with_length(encode_response(header, ApiVersionsResponse(api_keys=keys))))


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


def names(broker: Broker) -> list[str]:
    return [one.group_id for one in broker.request(LIST_GROUPS, ListGroupsRequest()).groups]


def test_a_closed_connection_is_reopened(server: Server) -> None:
    server.misbehave = lambda count, header: b"" if count == 1 else None
    with Broker(server.bootstrap) as broker:
        with pytest.raises(CliError) as error:
            names(broker)
        assert error.value.exit_code == EXIT_UNREACHABLE
        assert names(broker) == ["g2"]


def test_a_late_response_is_never_taken_for_the_next_request(server: Server) -> None:
    """The first response belongs to another request: like the late response to one that was given
    up.
    """

    def another(count: int, header: RequestHeader) -> bytes | None:
        late = RequestHeader(header.api_key, header.api_version, header.correlation_id - 1, header.client_id)
        return (
            with_length(encode_response(late, ListGroupsResponse(groups=[ListGroupsResponse.Group(group_id="late")])))
            if count == 1
            else None
        )

    server.misbehave = another
    with Broker(server.bootstrap) as broker:
        with pytest.raises(CliError, match="a response to request"):
            names(broker)
        assert names(broker) == ["g2"]


def test_waiting_continues_when_a_connection_is_lost(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.misbehave = lambda count, header: b"" if count in (2, 3) else None
    monkeypatch.setattr(request, "_RETRY_S", 0)
    monkeypatch.setattr(moves, "POLL_S", 0)
    with Broker(server.bootstrap) as broker:
        moves._watch(
            "moving",
            lambda: {("t", 0)} if names(broker) != ["g5"] else set(),
            moves._StallCheck(broker, lambda left: ""),
            False,
        )
    assert server.count == 5


def test_retries_end_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now, tries = [0.0], []

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now[0]

        @staticmethod
        def sleep(seconds: float) -> None:
            now[0] += seconds

    def attempt() -> None:
        tries.append(now[0])
        raise CliError("cannot reach a broker", code)

    monkeypatch.setattr(request, "time", Clock)
    code = EXIT_UNREACHABLE
    with pytest.raises(CliError):
        with_retries(attempt)
    assert 60 <= tries[-1] <= 61
    tries.clear()
    code = 1
    with pytest.raises(CliError):
        with_retries(attempt)
    assert len(tries) == 1, "a refused request is not retried"


def test_groups_after_one_that_cannot_be_deleted_are_deleted_and_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from types import SimpleNamespace

    from mqd.cli import broker_lookup as cluster
    from mqd.cli import main

    class Cluster:
        def __init__(self, bootstrap: str) -> None: ...

        def __enter__(self) -> Cluster:
            return self

        def __exit__(self, *_: object) -> None: ...

        def request_coordinator(self, kind: int, name: str, *_: object) -> object:
            if name == "b":
                raise CliError("no coordinator answers: it is away")
            return SimpleNamespace(results=[SimpleNamespace(error_code=0)])

    monkeypatch.setattr(cluster, "Cluster", Cluster)
    assert main._run(["group", "delete", "a", "b", "c"]) == 1
    out, error = capsys.readouterr()
    assert out == "deleted group a\ndeleted group c\n" and error == "mqd: group b: no coordinator answers: it is away\n"


@pytest.mark.parametrize(
    ("code", "setting"),
    [
        (ErrorCode.SECURITY_DISABLED, "authorizer.class.name"),
        (ErrorCode.DELEGATION_TOKEN_AUTH_DISABLED, "delegation.token.secret.key"),
    ],
)
def test_what_is_disabled_names_the_setting_that_enables_it(code: ErrorCode, setting: str) -> None:
    assert setting in request.error_text(code)
