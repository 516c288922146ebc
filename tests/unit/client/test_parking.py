"""The consumer's long-polling Fetch against a broker's side of KIP-227, implemented from the
proposal's text.
"""

from __future__ import annotations

import random

from mqd.client.shm.parking import PositionSession
from mqd.protocol.api import decode_request, encode_request
from mqd.protocol.messages import FetchResponse

A, B = b"a" * 16, b"b" * 16


class Sessions:
    """Takes requests as sent over the wire; checks that its state matches the client's."""

    def __init__(self) -> None:
        self.sessions: dict[int, tuple[int, dict[tuple[bytes, int], int]]] = {}
        self.next_id = 1
        self.full = self.partial = self.partitions = 0

    def answer(self, request: object, refuse: bool = False) -> FetchResponse:
        request = decode_request(encode_request(request, 13, 1))[1]
        assert request.max_bytes == 0
        named = {
            (topic.topic_id, one.partition): one.fetch_offset for topic in request.topics for one in topic.partitions
        }
        forgotten = {(topic.topic_id, index) for topic in request.forgotten_topics_data for index in topic.partitions}
        self.partitions += len(named)
        if request.session_epoch == 0:
            assert request.session_id == 0 and not forgotten
            self.full += 1
            if refuse:
                return self._response(0, named)
            self.sessions[self.next_id] = (1, named)
            self.next_id += 1
            return self._response(self.next_id - 1, named)
        self.partial += 1
        if request.session_id not in self.sessions:
            return FetchResponse(error_code=70)
        epoch, known = self.sessions[request.session_id]
        if request.session_epoch != epoch:
            return FetchResponse(error_code=71)
        known = {place: offset for place, offset in {**known, **named}.items() if place not in forgotten}
        self.sessions[request.session_id] = (1 if epoch == 2**31 - 1 else epoch + 1, known)
        return self._response(request.session_id, known)

    def _response(self, session_id: int, known: dict[tuple[bytes, int], int]) -> FetchResponse:
        topics: dict[bytes, FetchResponse.TopicResponse] = {}
        for (topic_id, index), offset in known.items():
            topic = topics.setdefault(topic_id, FetchResponse.TopicResponse(topic_id=topic_id))
            topic.partitions.append(FetchResponse.PartitionData(partition_index=index, high_watermark=offset))
        return FetchResponse(session_id=session_id, responses=list(topics.values()))


def _turn(
    session: PositionSession, broker: Sessions, positions: dict[tuple[bytes, int], int], refuse: bool = False
) -> bool:
    """The broker's session matches the client's afterwards; False: it has lost the session."""
    response = broker.answer(session.request(positions, 100), refuse)
    found = {(topic_id, index): data.high_watermark for topic_id, index, data in session.on_response(response)}
    if response.error_code:
        assert session.is_session_error(response.error_code) and not found
        return False
    assert found == positions
    return True


def test_only_changes_are_sent() -> None:
    session, broker = PositionSession(), Sessions()
    positions = {(A, index): 10 for index in range(500)} | {(B, 1): 5}
    assert _turn(session, broker, positions)
    assert broker.partitions == 501
    positions[A, 3] = 11
    assert _turn(session, broker, positions)
    del positions[B, 1]
    assert _turn(session, broker, positions)
    assert (broker.full, broker.partial, broker.partitions) == (1, 2, 502)


def test_a_forgotten_session_and_a_lost_response() -> None:
    session, broker = PositionSession(), Sessions()
    positions = {(A, 0): 1}
    assert _turn(session, broker, positions)
    broker.sessions.clear()
    assert not _turn(session, broker, positions)
    assert _turn(session, broker, positions)
    session.request(positions, 100)
    session.reset()  # no response came
    assert _turn(session, broker, positions) and broker.full == 3
    assert not session.is_session_error(3)


def test_a_broker_without_free_sessions() -> None:
    session, broker = PositionSession(), Sessions()
    for offset in range(3):
        assert _turn(session, broker, {(A, 0): offset, (A, 1): 7}, refuse=True)
    assert (broker.full, broker.partial) == (3, 0)


def test_epochs_wrap_around() -> None:
    session, broker = PositionSession(), Sessions()
    assert _turn(session, broker, {(A, 0): 1})
    session._epoch = 2**31 - 1
    broker.sessions[1] = (2**31 - 1, broker.sessions[1][1])
    for offset in range(3):
        assert _turn(session, broker, {(A, 0): offset})
    assert broker.full == 1


def test_histories() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        session, broker = PositionSession(), Sessions()
        positions: dict[tuple[bytes, int], int] = {}
        for _ in range(60):
            place = (rng.choice((A, B)), rng.randrange(6))
            if rng.random() < 0.3:
                positions.pop(place, None)
            else:
                positions[place] = rng.randrange(100)
            if rng.random() < 0.05:
                broker.sessions.clear()
            if rng.random() < 0.05:
                session.request(positions, 1)
                session.reset()
            if not _turn(session, broker, positions, refuse=rng.random() < 0.1):
                assert _turn(session, broker, positions)
