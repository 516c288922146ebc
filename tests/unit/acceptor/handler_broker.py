"""A broker in one process for tests of handlers: the real controller (cores, shell, log on disk,
control segment), the real acceptor above its socket, and workers that apply all updates. Only
sockets and reactors are missing; tests set the positions of partitions.
"""

import asyncio
import mmap
import random
from pathlib import Path

import msgspec

from mqd import native
from mqd.acceptor import dispatch
from mqd.acceptor.broker import Broker
from mqd.acceptor.broker_state import Origin
from mqd.acceptor.coordinators import Coordinators
from mqd.acceptor.metadata import Metadata
from mqd.acceptor.transactions import create_coordinators
from mqd.base.config import load_broker
from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.broker.core import BrokerCore
from mqd.cluster.host import messages
from mqd.cluster.host.core import HostCore
from mqd.cluster.metadata.core import MetadataCore
from mqd.cluster.metadata.rules.configs import ConfigRules
from mqd.cluster.metadata.rules.placement import PARTITIONS_MAX
from mqd.cluster.raft.core import QuorumCore
from mqd.cluster.raft.events import QuorumSettings
from mqd.cluster.raft.identity import directory_text, load_or_create_key
from mqd.cluster.raft.messages import SnapshotMeta, Voter
from mqd.cluster.raft.store import QuorumStore
from mqd.controller import directories
from mqd.controller.shell import Shell, directory_reports, new_topic_id
from mqd.protocol.api import decode_response, encode_request
from mqd.protocol.codec import message_of
from mqd.protocol.records import decode_batch_header

NODE = 1
QUORUM_SETTINGS = QuorumSettings()
WORKER_COUNT = 2
ACCEPTOR = "acceptor"
ORIGIN = Origin(0, "10.1.2.3", 9092)


class _Subscriber:
    """Replaces a connection in Shell.on_message."""

    def __init__(self, number: object, name: str) -> None:
        self.number, self.name = number, name


class Table:
    """The control segment with positions set by a test."""

    def __init__(self, control: native.Control) -> None:
        self._control = control
        self.positions: dict[int, dict[str, int]] = {}

    @property
    def metadata_version(self) -> int:
        return self._control.metadata_version

    @property
    def lease_deadline_ns(self) -> int:
        return self._control.lease_deadline_ns

    @property
    def log_level(self) -> int:
        return self._control.log_level

    @log_level.setter
    def log_level(self, level: int) -> None:
        self._control.log_level = level

    def endpoint_generation(self, endpoint: int) -> int:
        return self._control.endpoint_generation(endpoint)

    def slot_view(self, slot: int) -> native.SlotView:
        return msgspec.structs.replace(self._control.slot_view(slot), **self.positions.get(slot, {}))


class Owners:
    """Replaces the link and its workers: takes batches of coordinators, and responds in the next
    turn of the loop. `refuse`: with this error instead, and counts it; `hold`: not before
    release().
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self.coordinators: Coordinators | None = None
        self.batches: list[tuple[int, bytes]] = []  # (slot, batch) in order
        self.refuse, self.refused_count = 0, 0
        self.hold = False
        self.views: dict[int, list[native.ProducerView]] = {}  # by slot
        self._held: list[tuple[int, int, int]] = []

    def send_batch(
        self, owner: int, token: int, slot: int, batch: bytes, flags: int, leader_epoch: int, owner_generation: int
    ) -> None:
        if self.refuse:
            self.refused_count += 1
            response = (token, self.refuse, -1)
        else:
            positions = self._table.positions.setdefault(slot, {})
            base_offset = positions.get("log_end_offset", 0)
            self.batches.append((slot, batch))
            end = base_offset + decode_batch_header(batch).last_offset_delta + 1
            positions["log_end_offset"] = positions["high_watermark"] = end
            response = (token, 0, base_offset)
        if self.hold:
            self._held.append(response)
        else:
            asyncio.get_running_loop().call_soon(self._answer, *response)

    async def producers(self, owner: int, slot: int) -> tuple[int, list[native.ProducerView]]:
        return 0, self.views.get(slot, [])

    def release(self) -> None:
        held, self._held = self._held, []
        for response in held:
            self._answer(*response)

    def _answer(self, token: int, error: int, base_offset: int) -> None:
        assert self.coordinators is not None
        self.coordinators.log.on_produced(token, error, base_offset)


def registration(node_id: int, key, settled) -> broker_messages.RegisterBroker:
    """The registration of a host without an inter-broker listener."""
    return broker_messages.RegisterBroker(
        node_id=node_id,
        directory_id=directory_text(key.directory_id),
        incarnation=77,
        host="127.0.0.1",
        port=9092,
        rack=None,
        inter_broker_host="",
        inter_broker_port=0,
        controller_host="",
        controller_port=0,
        worker_count=WORKER_COUNT,
        directories=list(directory_reports(settled)),
        clean_epoch=-1,
        features={},
    )


class HandlerBroker:
    """async with HandlerBroker(tmp_path, {...}) as broker: await
    broker.send_request(MetadataRequest(...), 9)
    """

    def __init__(
        self, directory: Path, config: dict[str, str] | None = None, listeners: list[tuple[str, str, int]] | None = None
    ) -> None:
        log_dirs = [directory / "a", directory / "b"]
        self.config = {**load_broker(None, {}, config or {}), "log.dirs": ",".join(map(str, log_dirs))}
        self._directory = directory
        self._listeners = listeners or [("PLAINTEXT", "127.0.0.1", 9092)]
        self.control = native.Control.format(mmap.mmap(-1, native.control_size_bytes()), WORKER_COUNT, b"b" * 16, 77, 0)
        self.table = Table(self.control)
        self.metadata = Metadata()
        self.refuse_workers: set[int] = set()  # these apply nothing
        self._answers: dict[int, asyncio.Future[messages.Response]] = {}
        self._request_id = 0
        self.last: dispatch.Outcome | None = None

    async def __aenter__(self) -> "HandlerBroker":
        key = load_or_create_key(self._directory / "metadata", NODE, new_topic_id())
        store = QuorumStore(self._directory / "metadata", key)
        stored, state, _ = store.open()
        if stored.snapshot is None:
            stored = store.initialize(SnapshotMeta(0, 0, (Voter(key, "", 0),), 1))
        metadata = MetadataCore(state, NODE, ConfigRules(self.config), new_topic_id, PARTITIONS_MAX, active=False)
        self.shell = Shell(QuorumCore(key, stored, QUORUM_SETTINGS, random.Random(1)), metadata, store, self.control)
        self.shell.server = self  # type: ignore[assignment]
        self.shell.start_quorum("cluster")
        await self.shell.wait_metadata(0)
        settled = directories.identify(
            self.config["log.dirs"].split(","), "cluster", NODE, {}, set(), lambda: new_topic_id().hex()
        )
        host = HostCore(
            NODE,
            NODE,
            WORKER_COUNT,
            native.PARTITION_SLOT_COUNT,
            {entry.directory_id: index for index, entry in enumerate(settled)},
        )
        self.shell.start(host, BrokerCore(NODE, state), settled, registration(NODE, key, settled), 1)
        self._ticking = asyncio.get_running_loop().create_task(self.shell.tick())
        await self.shell.metadata_ready
        for index in range(WORKER_COUNT):
            self.control.set_endpoint_state(index, native.ProcessState.RUNNING, 1)
            self.shell.on_message(_Subscriber(index, f"worker-{index}"), messages.Subscribe("worker", index, 0))  # type: ignore[arg-type]
        self.shell.on_message(_Subscriber(ACCEPTOR, ACCEPTOR), messages.Subscribe("acceptor", 0, 0))  # type: ignore[arg-type]
        self.broker = Broker(self.config, self._listeners, self.metadata, self, self.table)
        self.owners = Owners(self.table)
        self.broker.coordinators, self.broker.transactions = create_coordinators(self.broker, self.owners, 0)
        self.owners.coordinators = self.broker.coordinators
        self.broker.coordinators.start()
        await self.shell.in_service
        while self.metadata.version < 0:
            await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.broker.coordinators is not None
        self.broker.coordinators.stop()
        self._ticking.cancel()
        await self.shell.stop()

    # -- the controller's socket -------------------------------------------------------------------

    def send(self, number: object, message: messages.FromController) -> None:
        """Messages of the controller arrive later, in order, as over a socket."""
        asyncio.get_running_loop().call_soon(self._deliver, number, message)

    def _deliver(self, number: object, message: messages.FromController) -> None:
        if number == ACCEPTOR:
            if isinstance(message, messages.Response):
                self._answers.pop(message.request_id).set_result(message)
            else:
                self.metadata.apply(message)  # type: ignore[arg-type]
                assert self.broker.coordinators is not None
                self.broker.coordinators.on_metadata(message)
            return
        connection = _Subscriber(number, f"worker-{number}")
        if isinstance(message, messages.Command):
            self.shell.on_message(connection, messages.CommandDone(message.command_id, 0, max(message.offset, 0)))  # type: ignore[arg-type]
            return
        topics = (
            message.topics
            if isinstance(message, messages.Image)
            else [message.topic]
            if isinstance(message, messages.TopicPut)
            else []
        )
        for topic in topics:
            for partition in topic.partitions:
                if partition.owner == number and number not in self.refuse_workers:
                    self.control.set_slot_state(partition.slot, native.SlotState.ONLINE)
        if number not in self.refuse_workers:
            self.shell.on_message(connection, messages.Applied(message.version, {}))  # type: ignore[arg-type, union-attr]

    async def request(self, change: messages.Change, timeout_ms: int, validate_only: bool = False) -> messages.Response:
        self._request_id += 1
        answered = self._answers[self._request_id] = asyncio.get_running_loop().create_future()
        self.shell.on_message(
            _Subscriber(ACCEPTOR, ACCEPTOR), messages.Request(self._request_id, change, validate_only)
        )  # type: ignore[arg-type]
        return await answered

    # -- clients -----------------------------------------------------------------------------------

    async def frame(self, frame: bytes, origin: Origin = ORIGIN) -> dispatch.Outcome:
        self.last = await dispatch.respond(self.broker, origin, frame, 1)
        return self.last

    async def send_request(self, request: object, version: int, origin: Origin = ORIGIN):
        """The decoded response; request and response are encoded on the way."""
        outcome = await self.frame(encode_request(request, version, 4711), origin)
        assert outcome.close_reason is None and outcome.body is not None, outcome
        correlation_id, response = decode_response(outcome.body, message_of(type(request))[0].api_key, version)
        assert correlation_id == 4711
        return response

    def place(self, topic: str, partition: int, **positions: int) -> Path:
        """Sets the positions that the owner would publish; returns the partition's directory."""
        image = self.metadata.topics[topic].partitions[partition]
        self.table.positions[image.slot] = positions
        return self.broker.path_of(topic, image)
