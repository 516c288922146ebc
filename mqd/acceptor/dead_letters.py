"""Dead letters of the share-partitions that this host leads (KIP-1191): carries out the actions of
their writers (mqd/coordinator/share/dead_letter_writer.py).

A writer's transactional id names its share-partition; its requests are those of a transactional
client (InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn, TxnOffsetCommit, EndTxn, OffsetFetch),
handled here or by the coordinator's host, like those of a local client (local/relay.py). The writer's
progress record is the metadata of an offset that it commits for the group whose id is
PROGRESS_GROUP followed by the share group's id. Letters go to the owner of their partition, like a
coordinator's records; if another host leads the partition, they go through that host's acceptor.

This runs in the acceptor rather than in a separate process, because the states that owners write
pass through the acceptor anyway, and dead letters are rare. The load is bounded: at most
IN_FLIGHT_MAX transactions write at a time. Each writes CHUNK_BYTES of copied records at a time;
the disks' threads read them.

Bounds: one writer for each share-partition that this host leads and that has had dead letters; idle
writers are dropped when there are IDLE_MAX writers. Concurrency: the event loop's thread.
"""

import asyncio
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, Protocol

from mqd.acceptor.broker_state import LISTENER_LOCAL, BrokerState, Origin
from mqd.acceptor.coordinators import CREATE_TIMEOUT_MS, Coordinators
from mqd.acceptor.interbroker.client import PeerError, Peers
from mqd.acceptor.interbroker.share_states import READ, WRITE, ShareStates
from mqd.acceptor.interbroker.transactions import remote_leader_id
from mqd.base import config as configuration
from mqd.base import logging
from mqd.base.dead_letters import AUTO_CREATE, CREATED_CONFIG, ENABLED, TOPIC_PREFIX, problem_of_name
from mqd.cluster.host import messages
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.log import BATCH_BYTES_MAX, AppendError
from mqd.coordinator.share import letter_records
from mqd.coordinator.share.dead_letter_writer import (
    COMMITTING,
    FENCING,
    LOADING,
    READING,
    STOPPED,
    WRITING,
    WRITING_PROGRESS,
    Archive,
    DeadLetterWriter,
    Letter,
    LoadedState,
    ObservedWrite,
    Outcome,
    Step,
    Wake,
    Woken,
    parse_progress,
)
from mqd.coordinator.share.letter_records import CopiedFields, LetterSource
from mqd.coordinator.share.records import runs_of, share_partition_name
from mqd.coordinator.share.runs import ARCHIVING
from mqd.coordinator.topics import OFFSETS_TOPIC, TRANSACTION_STATE
from mqd.log.batches import CorruptBatch
from mqd.log.lookup import records_at
from mqd.protocol import codec
from mqd.protocol.api import decode_request, decode_response, encode_request, encode_response
from mqd.protocol.errors import ErrorCode, ProtocolError, error_name
from mqd.protocol.headers import KNOWN
from mqd.protocol.messages import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    OffsetFetchRequest,
    OffsetForLeaderEpochRequest,
    ProduceRequest,
    ProduceResponse,
    ReadShareGroupStateRequest,
    TxnOffsetCommitRequest,
)

PROGRESS_GROUP = "__dlq."  # followed by the share group's id
TRANSACTION_TIMEOUT_MS = 60_000
STEP_TIMEOUT_S = 45.0
RETRY_S, RETRY_S_MAX, RETRY_FOR_S = 0.01, 0.3, 15.0
PRODUCE, PRODUCE_VERSION, PRODUCE_TIMEOUT_S = 0, 9, 10.0  # between hosts
IN_FLIGHT_MAX = 8
CHUNK_BYTES = 4 << 20
IDLE_MAX = 10_000
GROUPS_COUNTED_MAX = 10_000

# errors that disappear when a coordinator has loaded, has moved, or has ended the previous transaction
_TRANSIENT = frozenset(
    map(
        int,
        (
            ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
            ErrorCode.COORDINATOR_NOT_AVAILABLE,
            ErrorCode.NOT_COORDINATOR,
            ErrorCode.CONCURRENT_TRANSACTIONS,
            ErrorCode.UNSTABLE_OFFSET_COMMIT,
        ),
    )
)
# struct mqd_share_owner_request (native/server/share/share.h), then for each range its first
# offset, its last offset, and the number of acknowledgement types that follow (here 0)
_REQUEST = struct.Struct("=16sQiIIIHBBB3x")
_REQUEST_ARCHIVE = 5
_RANGE = struct.Struct("=qqI")

log = logging.get("acceptor.dead_letters")


class StepFailed(Exception):
    """The step failed and is retried later."""


class Owners(Protocol):
    """The link to the owners of partitions."""

    def archive(self, owner: int, slot: int, payload: bytes, owner_generation: int) -> None: ...


class DeadLetterFigures(NamedTuple):
    """The dead letters of one group on this host."""

    written_count: int  # since the start of this process
    waiting_count: int
    oldest_age_ms: int  # age of the oldest waiting letter, as far as this process knows


class _Writer:
    def __init__(self, name: str, group_id: str, topic_id: bytes, partition: int, core: DeadLetterWriter) -> None:
        self.name, self.group_id, self.topic_id, self.partition = name, group_id, topic_id, partition
        self.core = core
        self.lock = asyncio.Lock()  # held during LOADING, and while the owner's READs and WRITEs are handled
        self.producer = (-1, -1)  # id, epoch
        self.timer: asyncio.TimerHandle | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.problem = ""  # the last problem that was logged

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        for task in self.tasks:
            task.cancel()


class DeadLetters:
    """`peers`: set before the first request if there are other hosts."""

    def __init__(
        self,
        broker: BrokerState,
        coordinators: Coordinators,
        owners: Owners,
        respond: Callable[[Origin, bytes], Awaitable[bytes | None]],
    ) -> None:
        self._respond = respond  # handles a request's frame as if a client had sent it
        self._broker, self._coordinators, self._owners = broker, coordinators, owners
        self._states: ShareStates = coordinators.share_states
        self.peers: Peers | None = None
        self._writers: dict[str, _Writer] = {}
        self._write_slots = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._written: Counter[str] = Counter()
        self._origin = Origin(LISTENER_LOCAL, peer_ip="127.0.0.1", is_host=True)

    def stop(self) -> None:
        for writer in self._writers.values():
            writer.stop()
        self._writers.clear()

    def _now_ms(self) -> int:
        return self._coordinators.clock.now_ms()

    def figures(self) -> dict[str, DeadLetterFigures]:
        """The figures by group. Called by the thread that serves a scrape, so each dictionary is
        copied in one step.
        """
        figures = {group: DeadLetterFigures(count, 0, 0) for group, count in dict(self._written).items()}
        for writer in list(self._writers.values()):
            sum_so_far = figures.get(writer.group_id, DeadLetterFigures(0, 0, 0))
            since, now_ms = dict(writer.core.pending_since_ms), self._now_ms()
            oldest_age_ms = now_ms - min(since.values(), default=now_ms)
            figures[writer.group_id] = DeadLetterFigures(
                sum_so_far.written_count,
                sum_so_far.waiting_count + len(since),
                max(sum_so_far.oldest_age_ms, oldest_age_ms),
            )
        return figures

    # -- what owners read and write ----------------------------------------------------------------

    async def respond_to_owner(self, api_key: int, group_id: str, topic_id: bytes, part: Any) -> Any:
        """Handles an owner's READ or WRITE of one share-partition, like ShareStates.respond_one."""
        name = share_partition_name(group_id, topic_id, part.partition)
        writer = self._writers.get(name)
        if writer is None:
            result = await self._states.respond_one(api_key, group_id, topic_id, part)
            self._observe(name, api_key, group_id, topic_id, part, result)
            return result
        async with writer.lock:
            result = await self._states.respond_one(api_key, group_id, topic_id, part)
            self._observe(name, api_key, group_id, topic_id, part, result)
            return result

    def _observe(self, name: str, api_key: int, group_id: str, topic_id: bytes, part: Any, result: Any) -> None:
        if api_key not in (READ, WRITE) or result.error_code:
            return
        batches = result.state_batches if api_key == READ else part.state_batches
        writer = self._writers.get(name)
        if any(batch.delivery_state == ARCHIVING for batch in batches):
            if writer is None or writer.core.leader_epoch < part.leader_epoch or writer.core.phase == STOPPED:
                writer = self._begin(name, group_id, topic_id, part.partition, part.leader_epoch)
        if writer is not None and api_key == WRITE and writer.core.leader_epoch == part.leader_epoch:
            self._handle(writer, ObservedWrite(part.state_epoch, part.start_offset, tuple(runs_of(batches))))

    def _begin(self, name: str, group_id: str, topic_id: bytes, partition: int, leader_epoch: int) -> _Writer:
        previous = self._writers.pop(name, None)
        if previous is not None:
            previous.stop()
        if len(self._writers) >= IDLE_MAX:
            for idle in [other for other in self._writers.values() if not other.core.pending]:
                self._end(idle)
        core = DeadLetterWriter(leader_epoch, self._coordinators.offsets_settings.metadata_bytes_max)
        writer = self._writers[name] = _Writer(name, group_id, topic_id, partition, core)
        self._act(writer, core.start())
        return writer

    def _end(self, writer: _Writer) -> None:
        writer.stop()
        if self._writers.get(writer.name) is writer:
            del self._writers[writer.name]

    # -- a writer's actions -------------------------------------------------------------------------

    def _handle(self, writer: _Writer, event: ObservedWrite | Outcome | Woken) -> None:
        count_before = writer.core.letter_count
        self._act(writer, writer.core.handle(event, self._now_ms()))
        if writer.core.letter_count > count_before and (
            writer.group_id in self._written or len(self._written) < GROUPS_COUNTED_MAX
        ):
            self._written[writer.group_id] += writer.core.letter_count - count_before
        if writer.core.phase == STOPPED:
            self._end(writer)

    def _act(self, writer: _Writer, actions: Iterable[Step | Archive | Wake]) -> None:
        loop = asyncio.get_running_loop()
        for action in actions:
            if isinstance(action, Step):
                task = loop.create_task(self._carry_out(writer, action))
                writer.tasks.add(task)
                task.add_done_callback(writer.tasks.discard)
            elif isinstance(action, Archive):
                self._archive(writer, action)
            else:
                if writer.timer is not None:
                    writer.timer.cancel()
                delay_s = max(0, action.at_ms - self._now_ms()) / 1000
                writer.timer = loop.call_later(delay_s, self._handle, writer, Woken())

    def _archive(self, writer: _Writer, action: Archive) -> None:
        """Asks the owner to archive records. If that fails, the writer's next LOADING finds them
        again.
        """
        image = self._broker.metadata.by_id(writer.topic_id)
        partition = image.partitions[writer.partition] if image and writer.partition < len(image.partitions) else None
        view = self._broker.view(partition) if partition is not None else None
        if partition is None or view is None:
            return
        group = writer.group_id.encode()
        epochs = (action.state_epoch & 0xFFFFFFFF) << 32 | action.leader_epoch & 0xFFFFFFFF
        head = _REQUEST.pack(
            writer.topic_id, epochs, writer.partition, 0, 0, len(action.ranges), len(group), _REQUEST_ARCHIVE, 0, 0
        )
        ranges = b"".join(_RANGE.pack(first, last, 0) for first, last in action.ranges)
        self._owners.archive(view.owner, partition.slot, head + group + ranges, view.owner_generation)

    async def _carry_out(self, writer: _Writer, step: Step) -> None:
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                if step.kind == LOADING:
                    await self._load(writer, step)
                    return
                outcome = await self._run_step(writer, step)
                if step.kind != FENCING:
                    writer.problem = ""
        except (StepFailed, CoordinatorError, AppendError, PeerError, ProtocolError, OSError) as error:
            outcome = Outcome(step.token, succeeded=False)
            self._log_problem(writer, step, str(error) or "timeout")  # TimeoutError, an OSError, has no text
        except Exception:
            log.exception("dead letters cannot be written; retrying", group=writer.group_id, step=step.kind)
            outcome = Outcome(step.token, succeeded=False)
        if self._writers.get(writer.name) is writer:
            self._handle(writer, outcome)

    def _log_problem(self, writer: _Writer, step: Step, problem: str) -> None:
        if problem != writer.problem:
            writer.problem = problem
            log.warning(
                "dead letters wait; the step is retried until it succeeds",
                group=writer.group_id,
                partition=writer.partition,
                step=step.kind,
                reason=problem,
            )

    # -- steps -------------------------------------------------------------------------------------

    async def _run_step(self, writer: _Writer, step: Step) -> Outcome:
        if step.kind == FENCING:
            return await self._fence(writer, step)
        if step.kind == READING:
            progress = await self._fetch_progress(writer)
            progress_end = await self._fetch_progress_end(writer, progress)
            return Outcome(step.token, progress=progress, progress_end=progress_end)
        producer_id, producer_epoch = writer.producer
        if step.kind == WRITING:
            async with self._write_slots:
                return await self._write(writer, step, producer_id, producer_epoch)
        if step.kind == WRITING_PROGRESS:
            await self._write_progress(writer, step, producer_id, producer_epoch)
        else:
            assert step.kind == COMMITTING
            await self._request(
                EndTxnRequest(
                    transactional_id=self._transactional_id(writer),
                    producer_id=producer_id,
                    producer_epoch=producer_epoch,
                    committed=True,
                ),
                3,
            )
        return Outcome(step.token)

    def _transactional_id(self, writer: _Writer) -> str:
        return PROGRESS_GROUP + writer.name

    async def _fence(self, writer: _Writer, step: Step) -> Outcome:
        image = self._broker.metadata.by_id(writer.topic_id)
        leader = image.partitions[writer.partition].leader if image and writer.partition < len(image.partitions) else -2
        if leader not in (-1, self._broker.node_id):
            return Outcome(step.token, is_superseded=True)  # deleted, or another host leads it
        transactions = self._coordinators.transactions
        if transactions is None or not await transactions.ensure_topic():
            raise StepFailed(f"topic {TRANSACTION_STATE.name} cannot be created")
        response = await self._request(
            InitProducerIdRequest(
                transactional_id=self._transactional_id(writer), transaction_timeout_ms=TRANSACTION_TIMEOUT_MS
            ),
            4,
        )
        if writer.core.token == step.token:
            writer.producer = response.producer_id, response.producer_epoch
        return Outcome(step.token)

    async def _load(self, writer: _Writer, step: Step) -> None:
        """The owner's READs and WRITEs wait until the loaded state is applied."""
        request_class = ReadShareGroupStateRequest
        part = request_class.Partition(partition=writer.partition, leader_epoch=writer.core.leader_epoch)
        topic = request_class.Topic(topic_id=writer.topic_id, partitions=[part])
        request = request_class(group_id=writer.group_id, topics=[topic])
        async with writer.lock:
            response: Any = await self._states.respond(request)
            result = response.results[0].partitions[0]
            if self._writers.get(writer.name) is not writer:
                return
            if not result.error_code:
                loaded = LoadedState(result.state_epoch, tuple(runs_of(result.state_batches)))
                self._handle(writer, Outcome(step.token, loaded=loaded))
            elif result.error_code in (
                ErrorCode.FENCED_LEADER_EPOCH,
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                ErrorCode.INVALID_REQUEST,  # the state was deleted
            ):
                self._handle(writer, Outcome(step.token, is_superseded=True))
            else:
                raise StepFailed(error_name(result.error_code))

    async def _fetch_progress(self, writer: _Writer) -> str | None:
        source = self._source(writer)
        if not await self._coordinators.groups.ensure_topic():
            raise StepFailed(f"topic {OFFSETS_TOPIC} cannot be created")
        response = await self._request(
            OffsetFetchRequest(
                group_id=PROGRESS_GROUP + writer.group_id,
                topics=[OffsetFetchRequest.Topic(name=source.topic, partition_indexes=[source.partition])],
                require_stable=True,
            ),
            7,
        )
        return response.topics[0].partitions[0].metadata

    async def _fetch_progress_end(self, writer: _Writer, text: str | None) -> int | None:
        """Returns Outcome.progress_end, which matters after an unclean election: the log may then have
        other records at the offsets of lost records.
        """
        progress = parse_progress(text or "")
        if progress is None or not 0 <= progress.leader_epoch < writer.core.leader_epoch:
            return None
        source, request_class = self._source(writer), OffsetForLeaderEpochRequest
        part = request_class.Partition(
            partition=source.partition,
            current_leader_epoch=writer.core.leader_epoch,
            leader_epoch=progress.leader_epoch,
        )
        topic = request_class.Topic(topic=source.topic, partitions=[part])
        response = await self._request(request_class(topics=[topic]), 3)
        end_offset = int(response.topics[0].partitions[0].end_offset)
        return end_offset if end_offset >= 0 else None

    async def _write_progress(self, writer: _Writer, step: Step, producer_id: int, producer_epoch: int) -> None:
        source, group_id = self._source(writer), PROGRESS_GROUP + writer.group_id
        identity: dict[str, Any] = {
            "transactional_id": self._transactional_id(writer),
            "producer_id": producer_id,
            "producer_epoch": producer_epoch,
            "group_id": group_id,
        }
        await self._request(AddOffsetsToTxnRequest(**identity), 3)
        request_class = TxnOffsetCommitRequest
        part = request_class.Partition(
            partition_index=source.partition, committed_offset=0, committed_metadata=step.progress
        )
        topic = request_class.Topic(name=source.topic, partitions=[part])
        await self._request(request_class(**identity, topics=[topic]), 3)

    def _source(self, writer: _Writer) -> LetterSource:
        image = self._broker.metadata.by_id(writer.topic_id)
        if image is None or writer.partition >= len(image.partitions):
            raise StepFailed("the topic was deleted")
        settings = self._coordinators.cluster.share_settings(writer.group_id)
        return LetterSource(image.name, writer.partition, writer.group_id, settings.delivery_count_limit)

    # -- writing -----------------------------------------------------------------------------------

    async def _write(self, writer: _Writer, step: Step, producer_id: int, producer_epoch: int) -> Outcome:
        source = self._source(writer)
        settings = self._coordinators.cluster.share_settings(writer.group_id)
        target = settings.dead_letter_topic
        if not target or target == source.topic:
            if target:
                log.warning(
                    "a record of the dead-letter topic itself was rejected; no dead letter is written for it",
                    group=writer.group_id,
                )
            return Outcome(step.token, is_unwanted=True)
        image = await self._ensure_target(target)
        effective = configuration.topic_effective(self._broker.effective_config(), image.config)
        if effective[ENABLED] != "true":
            raise StepFailed(f"topic {target} takes no dead letters; set {ENABLED}=true for it")
        index = source.partition % len(image.partitions)
        await self._request(
            AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=self._transactional_id(writer),
                v3_and_below_producer_id=producer_id,
                v3_and_below_producer_epoch=producer_epoch,
                v3_and_below_topics=[AddPartitionsToTxnRequest.Topic(name=target, partitions=[index])],
            ),
            3,
        )
        batch_bytes_max = min(configuration.topic_number(effective, "max.message.bytes"), BATCH_BYTES_MAX)
        unwritten = list(step.letters)
        while unwritten:
            count, copied = len(unwritten), dict[int, CopiedFields]()
            if settings.copies_dead_records:
                count, copied = await self._read_copies(writer, unwritten)
            records = letter_records.letter_records(
                source, unwritten[:count], copied, int(time.time() * 1000), batch_bytes_max
            )
            for batch in letter_records.batches(records, batch_bytes_max, producer_id, producer_epoch):
                await self._append(target, index, batch)
            del unwritten[:count]
        return Outcome(step.token)

    async def _ensure_target(self, name: str) -> messages.TopicImage:
        """Returns the dead-letter topic, which is created if necessary. Raises StepFailed."""
        image = self._broker.metadata.topics.get(name)
        if image is None:
            if not self._broker.broker_value(AUTO_CREATE):
                raise StepFailed(f"topic {name} does not exist; create it with {ENABLED}=true")
            change = messages.CreateTopic(name, -1, -1, {}, dict(CREATED_CONFIG))
            response = await self._broker.controller.request(change, CREATE_TIMEOUT_MS)
            if response.error not in (0, ErrorCode.TOPIC_ALREADY_EXISTS):
                raise StepFailed(f"topic {name} cannot be created: {response.message or error_name(response.error)}")
            image = self._broker.metadata.topics.get(name)
        if image is None or not image.partitions:
            raise StepFailed(f"topic {name} does not exist on this host yet")
        problem = problem_of_name(name, str(self._broker.broker_value(TOPIC_PREFIX) or ""))
        if problem or image.internal:
            raise StepFailed(problem or f"topic {name} is internal")
        return image

    async def _read_copies(self, writer: _Writer, letters: list[Letter]) -> tuple[int, dict[int, CopiedFields]]:
        """Returns how many of the letters, starting with the first, were looked up, and their records
        by offset. Records that the log no longer has are missing.
        """
        image = self._broker.metadata.by_id(writer.topic_id)
        if image is None:
            raise StepFailed("the topic was deleted")
        partition = image.partitions[writer.partition]
        path = self._broker.path_of(image.name, partition)
        offsets = [letter.offset for letter in letters]
        try:
            count, records = await self._broker.disks.read(partition.log_dir, records_at, path, offsets, CHUNK_BYTES)
        except CorruptBatch as error:
            log.error("a dead record cannot be read; its letter has only headers", topic=image.name, reason=str(error))
            return 1, {}
        return count, {record.offset: CopiedFields(record.key, record.value, record.headers) for record in records}

    async def _append(self, topic: str, index: int, batch: bytes) -> None:
        """Raises AppendError or PeerError. Even then the batch may have been written; the writer's next
        step is FENCING.
        """
        node_id = remote_leader_id(self._broker, topic, index)
        if node_id < 0:
            await self._coordinators.log.append(topic, index, batch)
            return
        if self.peers is None:
            raise StepFailed("another host leads the dead letters' partition")
        part = ProduceRequest.PartitionData(index=index, records=batch)
        request = ProduceRequest(
            acks=-1,
            timeout_ms=int(PRODUCE_TIMEOUT_S * 1000),
            topic_data=[ProduceRequest.TopicData(name=topic, partition_data=[part])],
        )
        response = await self.peers.request(node_id, request, PRODUCE_VERSION, PRODUCE_TIMEOUT_S)
        error = response.responses[0].partition_responses[0].error_code
        if error:
            raise AppendError(error, is_outcome_unknown=True)

    async def serve(self, frame: bytes) -> bytes:
        """Appends another host's dead letters to partitions that this host leads. Raises
        ProtocolError."""
        request: Any
        header, request = decode_request(frame, KNOWN)
        responses = []
        for topic in request.topic_data:
            parts = []
            for part in topic.partition_data:
                error = 0
                try:
                    await self._coordinators.log.append(topic.name, part.index, bytes(part.records or b""))
                except AppendError as failure:
                    error = failure.error
                parts.append(ProduceResponse.PartitionResponse(index=part.index, error_code=error, base_offset=-1))
            responses.append(ProduceResponse.TopicResponse(name=topic.name, partition_responses=parts))
        return encode_response(header, ProduceResponse(responses=responses))

    # -- requests like a client's ------------------------------------------------------------------

    async def _request(self, request: object, version: int) -> Any:
        """Returns the response if it has no error. Raises StepFailed."""
        api_key, delay_s = codec.message_of(type(request))[0].api_key, RETRY_S
        frame = encode_request(request, version, 1, "mqd-dead-letters")
        deadline_s = time.monotonic() + RETRY_FOR_S
        while True:
            body = await self._respond(self._origin, frame)
            if body is None:
                raise StepFailed("no response")
            response: Any = decode_response(body, api_key, version)[1]
            error = _error_of(response)
            if not error:
                return response
            if error not in _TRANSIENT or time.monotonic() > deadline_s:
                raise StepFailed(f"{type(request).__name__.removesuffix('Request')}: {error_name(error)}")
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RETRY_S_MAX)


def _error_of(response: Any) -> int:
    """The first error code in the response."""
    error = getattr(response, "error_code", 0)
    for topic in getattr(response, "topics", None) or getattr(response, "results_by_topic_v3_and_below", None) or ():
        for part in getattr(topic, "partitions", None) or getattr(topic, "results_by_partition", None) or ():
            error = error or getattr(part, "error_code", 0) or getattr(part, "partition_error_code", 0)
    return int(error)
