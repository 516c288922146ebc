"""An executor's link over shared memory: detecting a response."""

from __future__ import annotations

from mqd.spark.local_link import LocalLink


class ResponseReceived:
    """A native client whose response arrived long ago; only poll() takes it in."""

    def __init__(self, *responses: bytes) -> None:
        self._come, self._taken = list(responses), []

    def next_response(self) -> bytes | None:
        return self._taken.pop(0) if self._taken else None

    def wait(self, timeout_us: int) -> int:
        assert timeout_us >= 0
        return bool(self._come)

    def poll(self) -> None:
        self._taken += self._come
        self._come.clear()


def link_with(*responses: bytes) -> LocalLink:
    link = LocalLink.__new__(LocalLink)
    link._client, link._response, link.host, link.port, link._timeout_s = (
        ResponseReceived(*responses),
        None,
        "host",
        1,
        30.0,
    )  # type: ignore[assignment]
    return link


def test_a_response_that_arrived_earlier_is_detected_without_waiting() -> None:
    """A task with slow rows polls for it without waiting, and considered the broker silent."""
    link = link_with(b"one", b"two")
    assert link.ready(0) and link.ready(0)
    assert [link.receive(), link.receive()] == [b"one", b"two"]


def test_without_a_response_nothing_is_ready() -> None:
    assert not link_with().ready(0) and not link_with().ready(0.01)
