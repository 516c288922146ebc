"""The acceptor's link and hand-off, over real rings, arenas and sockets in one process; the test
plays the worker's side.
"""

import asyncio
import mmap
import os
import socket
from pathlib import Path

import pytest

from mqd import native
from mqd.acceptor import dispatch
from mqd.acceptor.link import BATCH_TOKEN_BIT, EXTENT_BYTES, PIECE_BYTES, TURN_REQUESTS_MAX, Link
from mqd.native import Descriptor, DescriptorKind
from mqd.protocol.api import decode_response, encode_request
from mqd.protocol.messages import MetadataRequest, ProduceRequest
from tests.unit.acceptor.handler_broker import HandlerBroker
from tests.unit.acceptor.test_handler_metadata import create

ENDPOINTS = 4  # two workers, acceptor, controller
ACCEPTOR = 2
ARENA_BYTES = 4 << 20


class Wire:
    """Two workers' ends and the acceptor's."""

    def __init__(self, broker: HandlerBroker) -> None:
        self.links = links = mmap.mmap(-1, native.links_size_bytes(ENDPOINTS))
        native.links_format(links, ENDPOINTS)
        self.eventfds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(ENDPOINTS)]
        self.control = broker.control
        for endpoint in range(ENDPOINTS):
            self.control.set_endpoint_state(endpoint, native.ProcessState.RUNNING, 1)
        self.arenas: list[mmap.mmap | None] = [
            mmap.mmap(-1, 1 << 20),
            mmap.mmap(-1, 1 << 20),
            mmap.mmap(-1, ARENA_BYTES),
            None,
        ]
        self.ends = [native.Endpoint(self.control, links, endpoint, ENDPOINTS, self.eventfds) for endpoint in range(3)]
        os.eventfd_read(self.eventfds[ACCEPTOR])  # a process that opens the segment wakes all others
        self.link = Link(
            broker.broker,
            self.control,
            self.ends[ACCEPTOR],
            self.eventfds[ACCEPTOR],
            self.arenas[ACCEPTOR],
            self.arenas,
            2,
        )
        self.link.start(asyncio.get_running_loop())

    def restart(self, worker: int) -> None:
        """The keeper has proven its death, and a successor runs; the acceptor does not know yet."""
        self.control.set_endpoint_state(worker, native.ProcessState.DEAD, 0)
        self.ends[worker].close()
        self.ends[worker] = native.Endpoint(self.control, self.links, worker, ENDPOINTS, self.eventfds)
        self.control.set_endpoint_state(worker, native.ProcessState.RUNNING, 2)

    def close(self) -> None:
        self.link.stop()
        for end in self.ends:
            end.close()
        for fd in self.eventfds:
            os.close(fd)

    def send_request(self, worker: int, token: int, frame: bytes, offset: int = 0) -> None:
        self.arenas[worker][offset : offset + len(frame)] = frame
        local = int.from_bytes(socket.inet_aton("10.9.8.7"), "little")
        assert self.ends[worker].send(
            ACCEPTOR,
            Descriptor(
                kind=DescriptorKind.REQUEST, token=token, offset=offset, size_bytes=len(frame), slot=4242, b=1, c=local
            ),
        )
        self.ends[worker].flush()

    async def receive(self, worker: int, count: int = 1, rounds: int = 2000) -> list[Descriptor]:
        found: list[Descriptor] = []
        for _ in range(rounds):
            found += [descriptor for _, descriptor in self.ends[worker].drain()]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.001)
        raise AssertionError(f"{len(found)} of {count} arrived")

    def payload(self, descriptor: Descriptor) -> bytes:
        return bytes(self.arenas[ACCEPTOR][descriptor.offset : descriptor.offset + descriptor.size_bytes])

    def release(self, worker: int, descriptor: Descriptor) -> None:
        self.ends[worker].send(
            ACCEPTOR, Descriptor(kind=DescriptorKind.RELEASE, token=descriptor.token, offset=descriptor.offset)
        )
        self.ends[worker].flush()

    async def turns(self) -> None:
        """Turns of the event loop that poll the eventfd: an acceptor that has been woken handles
        its messages within them.
        """
        for _ in range(10):
            await asyncio.sleep(0)

    async def until(self, condition) -> None:
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0.001)
        raise AssertionError("never came true")


JOIN_GROUP = (11).to_bytes(2, "big") + b"what follows is not looked at"


def everything(version: int = 9) -> bytes:
    return encode_request(MetadataRequest(topics=None), version, 5)


def run(tmp_path: Path, scenario) -> None:
    async def body() -> None:
        async with HandlerBroker(tmp_path) as broker:
            wire = Wire(broker)
            try:
                await scenario(broker, wire)
            finally:
                wire.close()

    asyncio.run(body())


def test_request_and_response(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker, wire: Wire) -> None:
        await create(broker, "orders")
        for worker in (0, 1):
            wire.send_request(worker, 77, everything())
            (response,) = await wire.receive(worker)
            assert (response.kind, response.token, response.a) == (DescriptorKind.RESPONSE, 77, broker.metadata.version)
            assert response.flags == native.RESPONSE_CACHEABLE
            _, metadata = decode_response(wire.payload(response), 3, 9)
            assert (metadata.brokers[0].host, metadata.brokers[0].port) == ("10.9.8.7", 4242)
            assert wire.link.arena_extents[0] == 1
            wire.release(worker, response)
            await wire.until(lambda: wire.link.arena_extents[0] == 0)

    run(tmp_path, scenario)


def test_a_long_request_frees_its_arena_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JoinGroup waits for other members; its bytes must not occupy the worker's arena meanwhile."""

    async def scenario(broker: HandlerBroker, wire: Wire) -> None:
        others = asyncio.Event()

        async def answer(*_: object) -> dispatch.Outcome:
            await others.wait()
            return dispatch.Outcome(b"at last")

        monkeypatch.setattr(dispatch, "respond", answer)
        wire.send_request(0, 7, everything())
        (parked,) = await wire.receive(0)
        assert (parked.kind, parked.token) == (DescriptorKind.PARKED, 7)
        others.set()
        (response,) = await wire.receive(0)
        assert (response.kind, response.token, wire.payload(response)) == (DescriptorKind.RESPONSE, 7, b"at last")

    run(tmp_path, scenario)


def test_an_authentication_that_waits_and_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first step is not a task of its own."""
    checked: list[asyncio.Future[bytes]] = []

    async def scenario(broker: HandlerBroker, wire: Wire) -> None:
        async def respond(_broker: object, _address: object, frame: bytes, *_: object) -> dispatch.Outcome:
            if frame.endswith(b"at once"):
                return dispatch.Outcome(b"done")
            if frame.endswith(b"fails"):
                raise ValueError("a bug")
            checked.append(asyncio.get_running_loop().create_future())
            try:
                return dispatch.Outcome(await checked[-1])
            except OSError:
                return dispatch.Outcome(b"refused")

        monkeypatch.setattr(dispatch, "respond", respond)
        authenticate = (36).to_bytes(2, "big")
        for token, text in enumerate((b"at once", b"waits", b"is refused", b"fails")):
            wire.send_request(0, token, authenticate + text, 100 * token)
        found = {descriptor.token: descriptor for descriptor in await wire.receive(0, 2)}
        assert wire.payload(found[0]) == b"done" and found[3].kind == DescriptorKind.CLOSE
        assert len(found) == 2 and wire.link.request_count == 2
        checked[0].set_result(b"checked")
        checked[1].set_exception(OSError())
        found = {descriptor.token: descriptor for descriptor in await wire.receive(0, 2)}
        assert [wire.payload(found[token]) for token in (1, 2)] == [b"checked", b"refused"]

    run(tmp_path, scenario)


def test_a_delayed_response_does_not_keep_its_request_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of clients whose tokens of 512 KiB were refused wait for seconds."""

    async def scenario(broker: HandlerBroker, wire: Wire) -> None:
        async def answer(*_: object) -> dispatch.Outcome:
            return dispatch.Outcome(b"refused", ends_connection=True, delay_s=0.2)

        monkeypatch.setattr(dispatch, "respond", answer)
        wire.send_request(0, 1, everything())
        await wire.until(lambda: any("outcome" in work._coroutine.cr_frame.f_locals for work in wire.link._tasks))
        (work,) = wire.link._tasks
        assert "frame" not in work._coroutine.cr_frame.f_locals
        message = await wire.receive(0, 2)
        assert message[0].kind == DescriptorKind.PARKED and wire.payload(message[1]) == b"refused"

    run(tmp_path, scenario)


def test_a_long_request_ends_when_its_client_disconnects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that repeatedly connects, joins a waiting group and disconnects must not fill this
    process with requests.
    """

    async def scenario(broker: HandlerBroker, wire: Wire) -> None:
        others = asyncio.Event()

        async def answer(*_: object) -> dispatch.Outcome:
            await others.wait()
            return dispatch.Outcome(b"at last")

        def abandon(token: int, generation: int) -> None:
            wire.ends[0].send(ACCEPTOR, Descriptor(kind=DescriptorKind.CANCEL, token=token, error=generation))
            wire.ends[0].flush()

        monkeypatch.setattr(dispatch, "respond", answer)
        wire.send_request(0, 7, JOIN_GROUP)
        wire.send_request(0, 8, JOIN_GROUP, 1000)
        assert {(one.kind, one.token) for one in await wire.receive(0, 2)} == {
            (DescriptorKind.PARKED, 7),
            (DescriptorKind.PARKED, 8),
        }
        generation = wire.control.endpoint_generation(ACCEPTOR)
        abandon(7, generation + 1)  # for a predecessor
        abandon(9, generation)
        abandon(8, generation)
        await wire.until(lambda: wire.link.request_count == 1)
        others.set()
        (response,) = await wire.receive(0)
        assert (response.kind, response.token) == (DescriptorKind.RESPONSE, 7)
        await wire.until(lambda: wire.link.request_count == 0)
        assert not any(wire.link._parked)

    run(tmp_path, scenario)


def test_requests_of_a_dead_worker_end_and_its_tokens_can_be_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(broker: HandlerBroker, wire: Wire) -> None:
        others, answered, ended = asyncio.Event(), [], []

        async def answer(_broker: object, _address: object, frame: bytes, *_: object) -> dispatch.Outcome:
            try:
                await others.wait()
            except asyncio.CancelledError:
                ended.append(frame)
                raise
            answered.append(frame)
            return dispatch.Outcome(b"at last")

        monkeypatch.setattr(dispatch, "respond", answer)
        wire.send_request(0, 7, JOIN_GROUP)
        wire.send_request(0, 8, everything(), 1000)
        wire.send_request(1, 7, JOIN_GROUP)
        await wire.receive(0, 2)
        await wire.receive(1)
        wire.send_request(0, 9, JOIN_GROUP + b"late")  # not parked yet
        await wire.until(lambda: wire.link.request_count == 4)
        wire.restart(0)
        wire.send_request(0, 7, JOIN_GROUP + b"again")
        wire.link.on_worker_death(0)
        await wire.until(lambda: sorted(ended) == sorted([JOIN_GROUP, JOIN_GROUP + b"late"]))
        (parked,) = await wire.receive(0)
        assert (parked.kind, parked.token) == (DescriptorKind.PARKED, 7)
        assert set(wire.link._parked[0]) == {7} and set(wire.link._parked[1]) == {7}
        wire.ends[0].send(
            ACCEPTOR, Descriptor(kind=DescriptorKind.CANCEL, token=7, error=wire.control.endpoint_generation(ACCEPTOR))
        )
        wire.ends[0].flush()
        await wire.until(lambda: JOIN_GROUP + b"again" in ended)
        others.set()
        await wire.until(lambda: wire.link.request_count == 0)
        assert sorted(answered) == sorted([everything(), JOIN_GROUP]), (
            "a change is carried out, even if its client has gone"
        )

    run(tmp_path, scenario)


def test_requests_without_a_response(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker, wire: Wire) -> None:
        wire.send_request(0, 1, b"\xff" * 20)
        wire.send_request(0, 2, encode_request(ProduceRequest(acks=0), 1, 5), 100)
        assert {(one.kind, one.token) for one in await wire.receive(0, 2)} == {
            (DescriptorKind.CLOSE, 1),
            (DescriptorKind.CLOSE, 2),
        }
        wire.ends[0].send(
            ACCEPTOR, Descriptor(kind=DescriptorKind.REQUEST, token=3, offset=(1 << 20) - 4, size_bytes=100)
        )
        wire.ends[0].flush()
        assert [(one.kind, one.token) for one in await wire.receive(0)] == [(DescriptorKind.CLOSE, 3)]

    run(tmp_path, scenario)


def test_requests_sent_to_a_predecessor_are_not_carried_out(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker, wire: Wire) -> None:
        generation = wire.control.endpoint_generation(ACCEPTOR)
        for token, requested in ((1, generation + 1), (2, generation)):
            wire.ends[0].send(
                ACCEPTOR,
                Descriptor(
                    kind=DescriptorKind.REQUEST, token=token, offset=(1 << 20) - 4, size_bytes=100, error=requested
                ),
            )
        wire.ends[0].flush()
        assert [(one.kind, one.token) for one in await wire.receive(0)] == [(DescriptorKind.CLOSE, 2)]

    run(tmp_path, scenario)


def test_large_responses_are_sent_in_pieces_and_wait_for_space(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker, wire: Wire) -> None:
        body = os.urandom(3 * PIECE_BYTES + 5)
        for token in (1, 2):  # together more than the arena holds
            wire.link._respond(token - 1, token, body, native.RESPONSE_CACHEABLE, 9)
        wire.link._send_waiting()
        wire.ends[ACCEPTOR].flush()
        for worker in (0, 1):
            got, flags = b"", []
            while len(got) < len(body):
                for piece in await wire.receive(worker):
                    assert piece.token == worker + 1 and piece.size_bytes <= PIECE_BYTES
                    got += wire.payload(piece)
                    flags.append(piece.flags)
                    wire.release(worker, piece)
            assert got == body
            assert flags == [native.RESPONSE_MORE] * 3 + [native.RESPONSE_CACHEABLE]
        await wire.until(lambda: wire.link.arena_extents[0] == 0)

    run(tmp_path, scenario)


def test_full_ring_loses_nothing(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker, wire: Wire) -> None:
        count = 3 * native.LINK_DESCRIPTOR_COUNT
        for token in range(count):
            wire.link._respond(0, token, b"%d" % token, 0, 0)
        wire.link._send_waiting()
        wire.ends[ACCEPTOR].flush()
        seen = []
        while len(seen) < count:
            for piece in await wire.receive(0):
                seen.append((piece.token, wire.payload(piece)))
                wire.release(0, piece)
        assert seen == [(token, b"%d" % token) for token in range(count)]
        await wire.until(lambda: wire.link.arena_extents[0] == 0)

    run(tmp_path, scenario)


def test_a_turn_of_the_loop_takes_up_few_requests(tmp_path: Path) -> None:
    """Connections are accepted between turns: pipelined requests of some clients must not delay
    them.
    """

    async def scenario(_broker: HandlerBroker, wire: Wire) -> None:
        request_count = 4 * TURN_REQUESTS_MAX
        taken: list[int] = []
        on_turn, on_request = wire.link._on_turn, wire.link._on_request

        def counted() -> None:
            taken.append(0)
            on_turn()

        def count(worker: int, descriptor: Descriptor) -> None:
            taken[-1] += 1
            on_request(worker, descriptor)

        wire.link._on_turn, wire.link._on_request = counted, count  # type: ignore[method-assign]
        for token in range(request_count):
            wire.send_request(0, token, everything())
        responses = await wire.receive(0, request_count)
        assert sorted(response.token for response in responses) == list(range(request_count))
        assert sum(taken) == request_count and max(taken) <= TURN_REQUESTS_MAX, taken

    run(tmp_path, scenario)


def test_a_release_for_a_predecessor_frees_nothing(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker, wire: Wire) -> None:
        wire.link._respond(0, 5, b"answer", 0, 0)
        wire.link._send_waiting()
        wire.ends[ACCEPTOR].flush()
        (piece,) = await wire.receive(0)
        wire.ends[0].send(ACCEPTOR, Descriptor(kind=DescriptorKind.RELEASE, token=4, offset=piece.offset))
        wire.ends[1].send(ACCEPTOR, Descriptor(kind=DescriptorKind.RELEASE, token=5, offset=piece.offset))
        wire.ends[0].flush()
        wire.ends[1].flush()
        wire.send_request(1, 9, everything())
        await wire.receive(1)  # the releases came before it
        assert wire.link.arena_extents[0] == 2 and wire.payload(piece) == b"answer"
        wire.release(0, piece)
        wire.release(0, piece)  # a second release has no effect
        await wire.until(lambda: wire.link.arena_extents[0] == 1)

    run(tmp_path, scenario)


def test_death_of_a_worker_voids_its_tokens(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker, wire: Wire) -> None:
        await wire.until(lambda: wire.link._next_turn is None)  # it sleeps
        wire.link._respond(0, 5, b"x" * (10 * EXTENT_BYTES), 0, 0)
        wire.link._respond(1, 6, b"y", 0, 0)
        wire.link._send_waiting()
        assert wire.link.arena_extents[0] == 11
        wire.send_request(0, 8, everything())
        wire.control.set_endpoint_state(0, native.ProcessState.DEAD, 0)
        wire.link.on_worker_death(0)
        assert wire.link.arena_extents[0] == 1 and wire.link.request_count == 0
        wire.ends[ACCEPTOR].flush()
        assert [one.token for one in await wire.receive(0)] == [5], "the dead one's request was not answered"

    run(tmp_path, scenario)


def test_death_of_a_worker_before_the_link_begins_and_after_it_has_ended(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker, wire: Wire) -> None:
        unstarted = Link(
            broker.broker,
            wire.control,
            wire.ends[ACCEPTOR],
            wire.eventfds[ACCEPTOR],
            wire.arenas[ACCEPTOR],
            wire.arenas,
            2,
        )
        wire.link.stop()
        wire.send_request(1, 1, everything())
        for link in (unstarted, wire.link):
            link.on_worker_death(0)
            await wire.turns()
            assert link.request_count == 0 and not wire.ends[1].drain()

    run(tmp_path, scenario)


def test_death_of_a_worker_that_was_about_to_wake_it_leaves_the_acceptor_awake(tmp_path: Path) -> None:
    """Killed after clearing the sleeper's flag, before writing the eventfd: nothing else would ever
    write it.
    """

    async def scenario(broker: HandlerBroker, wire: Wire) -> None:
        await wire.until(lambda: wire.link._next_turn is None)  # it sleeps
        wire.ends[0].close()
        nowhere = os.eventfd(0, os.EFD_NONBLOCK)
        wire.ends[0] = native.Endpoint(wire.control, wire.links, 0, ENDPOINTS, [nowhere] * ENDPOINTS)
        wire.send_request(0, 1, everything())
        assert os.read(nowhere, 8)
        os.close(nowhere)
        wire.send_request(1, 2, everything())
        await wire.turns()
        assert wire.link.request_count == 0 and not wire.ends[1].drain(), "it is deaf"
        wire.control.set_endpoint_state(0, native.ProcessState.DEAD, 0)
        wire.link.on_worker_death(0)
        (response,) = await wire.receive(1)
        assert (response.kind, response.token) == (DescriptorKind.RESPONSE, 2)
        wire.release(1, response)
        wire.send_request(1, 3, everything())
        (response,) = await wire.receive(1)
        assert response.token == 3

    run(tmp_path, scenario)


# -- batches of coordinators -----------------------------------------------------------------------


class Outcomes:
    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def on_produced(self, token: int, error: int, base_offset: int, redirect: int = -1) -> bool:
        assert redirect == -1
        self.seen.append((token, error, base_offset))
        return True


def test_batches_go_to_their_owner_in_order_and_get_results(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker, wire: Wire) -> None:
        outcomes = wire.link.appends = Outcomes()
        batches = [os.urandom(100 + 5000 * number) for number in range(5)]
        for number, batch in enumerate(batches):
            wire.link.send_batch(
                1, BATCH_TOKEN_BIT | number, 40 + number, batch, native.PRODUCE_CONTROL | native.PRODUCE_ACKS_ALL, 7, 99
            )
        arrived = await wire.receive(1, 5)
        assert [wire.payload(one) for one in arrived] == batches
        assert [(one.kind, one.token, one.slot, one.a, one.c) for one in arrived] == [
            (DescriptorKind.PRODUCE, BATCH_TOKEN_BIT | number, 40 + number, 7, 99) for number in range(5)
        ]
        assert {one.flags for one in arrived} == {native.PRODUCE_CONTROL | native.PRODUCE_ACKS_ALL}
        used = wire.link.arena_extents[0]
        assert used > 0
        for one in arrived[:3]:  # written, not yet below the high watermark: the bytes are returned first
            wire.ends[1].send(ACCEPTOR, Descriptor(kind=DescriptorKind.RELEASE, slot=one.slot, token=one.token))
        wire.ends[1].flush()
        await wire.until(lambda: wire.link.arena_extents[0] < used)
        assert outcomes.seen == []
        for one in arrived:
            wire.ends[1].send(
                ACCEPTOR,
                Descriptor(kind=DescriptorKind.PRODUCED, slot=one.slot, token=one.token, error=0, a=one.slot * 10),
            )
        wire.ends[1].flush()
        await wire.until(lambda: len(outcomes.seen) == 5 and wire.link.arena_extents[0] == 0)
        assert outcomes.seen == [(BATCH_TOKEN_BIT | number, 0, 400 + 10 * number) for number in range(5)]

    run(tmp_path, scenario)


def test_batches_wait_for_space_and_are_reclaimed_from_dead_workers(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker, wire: Wire) -> None:
        wire.link.appends = Outcomes()
        batch = os.urandom(1 << 20)
        for number in range(8):  # twice what the arena holds
            wire.link.send_batch(0, BATCH_TOKEN_BIT | number, number, batch, 0, -1, 0)
        seen: list[int] = []
        while len(seen) < 6:
            for one in await wire.receive(0):
                assert wire.payload(one) == batch
                seen.append(one.slot)
                wire.ends[0].send(ACCEPTOR, Descriptor(kind=DescriptorKind.RELEASE, slot=one.slot, token=one.token))
            wire.ends[0].flush()
        assert seen == sorted(seen)
        wire.link.on_worker_death(0)
        assert wire.link.arena_extents[0] == 0
        wire.link.send_batch(1, BATCH_TOKEN_BIT | 77, 5, b"for another", 0, -1, 0)
        (one,) = await wire.receive(1)
        assert wire.payload(one) == b"for another"

    run(tmp_path, scenario)
