"""Coordinators at the end of a transaction, without a lease, and after a predecessor."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from mqd.acceptor.coordinators import InternalPartitions
from mqd.coordinator.internal_topic import CoordinatorError, partition_for
from mqd.coordinator.runtime import RETRY_S
from mqd.coordinator.topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import FindCoordinatorRequest
from mqd.protocol.records import decode_batch
from tests.unit.acceptor.handler_broker import HandlerBroker
from tests.unit.coordinator.test_runtime import (
    NOT_AVAILABLE,
    NOT_COORDINATOR,
    commit,
    fetch,
    find,
    run,
    shard_of,
    store,
    until,
)


def test_markers_end_pending_offsets(tmp_path: Path) -> None:
    from mqd.coordinator.group.offsets import CommitOffsets, CommittedOffset

    async def scenario(broker: HandlerBroker) -> None:
        coordinators = broker.broker.coordinators
        await commit(broker, 5)
        for producer_id, offset in ((7, 50), (8, 60)):
            await coordinators.groups.request(
                "g",
                lambda number: CommitOffsets(
                    number, 3, "", None, -1, (CommittedOffset("t", 0, offset),), -1, producer_id, 0
                ),
            )
        partition = partition_for("g", 3)
        await coordinators.groups.write_marker(partition, 8, 0, 0, False)
        assert await fetch(broker) == (0, 5)
        await coordinators.groups.write_marker(partition, 7, 0, 0, True)
        assert await fetch(broker) == (0, 50)
        shard = shard_of(broker, "g")
        broker.owners.refuse = int(ErrorCode.INVALID_PRODUCER_EPOCH)
        with pytest.raises(CoordinatorError) as refused:
            await coordinators.groups.write_marker(partition, 7, 0, 0, True)
        assert refused.value.error_code == ErrorCode.INVALID_PRODUCER_EPOCH and shard_of(broker, "g") is shard, (
            "a marker of the past disturbs no group"
        )
        broker.owners.refuse = int(ErrorCode.KAFKA_STORAGE_ERROR)
        with pytest.raises(CoordinatorError):
            await coordinators.groups.write_marker(partition, 7, 0, 0, True)
        with pytest.raises(CoordinatorError):
            await coordinators.groups.write_marker(99, 7, 0, 0, True)

    run(tmp_path, scenario)


def test_a_core_that_fails_at_the_end_of_a_transaction_is_reloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its marker was half processed and not written, and callers that waited for it waited forever."""
    from mqd.coordinator.actions import TransactionEnded
    from mqd.coordinator.group.offsets import CommitOffsets, CommittedOffset

    async def scenario(broker: HandlerBroker) -> None:
        coordinators = broker.broker.coordinators
        await coordinators.groups.request(
            "g", lambda number: CommitOffsets(number, 3, "", None, -1, (CommittedOffset("t", 0, 50),), -1, 7, 0)
        )
        partition, shard = partition_for("g", 3), shard_of(broker, "g")
        core = shard.core("g")
        handle, failed = core.handle, []

        def failing(event: object, now_ms: int) -> list:
            if isinstance(event, TransactionEnded):
                failed.append(event)
                raise KeyError("our own fault")
            return handle(event, now_ms)

        monkeypatch.setattr(core, "handle", failing)
        written = len(broker.owners.batches)
        with pytest.raises(CoordinatorError) as answered:
            await asyncio.wait_for(coordinators.groups.write_marker(partition, 7, 0, 0, True), 20)
        assert failed and answered.value.error_code == NOT_AVAILABLE and len(broker.owners.batches) == written
        assert shard_of(broker, "g") is not shard
        store(broker, OFFSETS_TOPIC, partition)
        await until(lambda: shard_of(broker, "g") is not None)
        await coordinators.groups.write_marker(partition, 7, 0, 0, True)
        assert await fetch(broker) == (0, 50)

    run(tmp_path, scenario)


def test_the_end_of_a_transaction_is_written_soon_without_a_waiting_client(tmp_path: Path) -> None:
    from mqd.coordinator.transaction.events import AddPartitions, EndTransaction, InitProducerId
    from mqd.coordinator.transaction.records import State, decode_value

    async def scenario(broker: HandlerBroker) -> None:
        await broker.send_request(FindCoordinatorRequest(key_type=1, coordinator_keys=["id"]), 4)
        transactions = broker.broker.coordinators.transactions
        await until(
            lambda: (
                transactions.partition_states
                and all(place.shard is not None for place in transactions.partition_states)
            )
        )
        await transactions.request("id", lambda number: InitProducerId(number, 60_000, spare_producer_id=5))
        await transactions.request("id", lambda number: AddPartitions(number, 5, 0, (("t", 0),), 2))
        slots = broker.metadata.topics[TRANSACTIONS_TOPIC].partitions
        await transactions.request("id", lambda number: EndTransaction(number, 5, 0, True, 2))

        def states() -> list[State]:
            slot = slots[transactions.partition_for("id")].slot
            return [
                decode_value(record.value).state
                for at, batch in broker.owners.batches
                if at == slot
                for record in decode_batch(batch)
            ]

        assert states() == [State.EMPTY, State.ONGOING, State.PREPARE_COMMIT], "the answer did not wait"
        await until(lambda: len(states()) == 4)
        assert states()[-1] == State.COMPLETE_COMMIT

    run(tmp_path, scenario)


def test_without_a_lease_no_committed_offsets_are_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the simulator: an isolated host knows for a while which offsets were committed, but
    not which are.
    """

    async def scenario(broker: HandlerBroker) -> None:
        assert await commit(broker, 5) == [0] and await fetch(broker) == (0, 5)
        store(broker, OFFSETS_TOPIC, partition_for("g", 3))
        monkeypatch.setattr(broker.broker, "may_lead", lambda: False)
        assert (await fetch(broker))[0] == NOT_COORDINATOR
        assert (await commit(broker, 6))[0] == NOT_COORDINATOR
        monkeypatch.undo()
        await until(lambda: shard_of(broker, "g") is not None)
        assert await fetch(broker) == (0, 5)

    run(tmp_path, scenario)


def test_loads_that_fail_take_nothing_from_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bad core filled the budget of all groups of its host within seconds."""
    failed: list[object] = []

    async def scenario(broker: HandlerBroker) -> None:
        coordinators = broker.broker.coordinators
        assert await commit(broker, 5) == [0]
        used = coordinators.budget.used_bytes
        store(broker, OFFSETS_TOPIC, partition_for("g", 3))
        after_load = coordinators.groups._after_load

        def failing(core: object) -> object:
            if len(failed) < 3:
                failed.append(core)
                raise KeyError("our own fault")
            return after_load(core)

        monkeypatch.setattr(coordinators.groups, "_after_load", failing)
        with monkeypatch.context() as patch:
            patch.setattr(broker.broker, "may_lead", lambda: False)
            assert (await fetch(broker))[0] == NOT_COORDINATOR
        await until(lambda: shard_of(broker, "g") is not None and len(failed) == 3)
        assert await fetch(broker) == (0, 5)
        assert coordinators.budget.used_bytes == used > 0

    run(tmp_path, scenario)


def test_without_a_lease_no_client_is_sent_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        assert [(one.error_code, one.node_id) for one in (await find(broker)).coordinators] == [(0, 1), (0, 1)]
        with monkeypatch.context() as patch:
            patch.setattr(broker.broker, "may_lead", lambda: False)
            away = (NOT_AVAILABLE, -1)
            assert [(one.error_code, one.node_id) for one in (await find(broker)).coordinators] == [away, away]
            image = broker.metadata.topics["__consumer_offsets"]
            elsewhere = [msgspec.structs.replace(one, leader=7) for one in image.partitions]
            patch.setitem(broker.metadata.topics, image.name, msgspec.structs.replace(image, partitions=elsewhere))
            patch.setattr(broker.broker, "endpoint", lambda node_id, _address: (f"host{node_id}", 9092))
            assert [(one.error_code, one.node_id) for one in (await find(broker)).coordinators] == [(0, 7), (0, 7)], (
                "others coordinate what they lead"
            )
        assert [(one.error_code, one.node_id) for one in (await find(broker)).coordinators] == [(0, 1), (0, 1)]

    run(tmp_path, scenario)


def test_a_host_that_was_without_a_lease_loads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the simulator: a host that finds no coordinator gives up a transaction's markers;
    when its lease was back before the check, they were not written again, and the transaction hung.
    """

    from mqd.coordinator.transaction.events import AddPartitions, EndTransaction, InitProducerId
    from mqd.coordinator.transaction.records import State

    async def scenario(broker: HandlerBroker) -> None:
        await broker.send_request(FindCoordinatorRequest(key_type=1, coordinator_keys=["id"]), 4)
        transactions = broker.broker.coordinators.transactions
        markers = broker.broker.transactions.markers
        await until(
            lambda: (
                transactions.partition_states
                and all(place.shard is not None for place in transactions.partition_states)
            )
        )
        monkeypatch.setattr(markers, "_exists", lambda *_: True)  # failed writes are retried indefinitely
        await transactions.request("id", lambda number: InitProducerId(number, 60_000, spare_producer_id=5))
        await transactions.request("id", lambda number: AddPartitions(number, 5, 0, (("gone", 0),), 2))
        await transactions.request("id", lambda number: EndTransaction(number, 5, 0, True, 2))
        assert transactions.core("id").state == State.PREPARE_COMMIT
        store(broker, TRANSACTIONS_TOPIC, transactions.partition_for("id"))
        monkeypatch.setattr(broker.broker, "may_lead", lambda: False)
        assert markers._core("id") is None
        assert transactions.partition_states[transactions.partition_for("id")].shard is None
        monkeypatch.undo()
        await until(lambda: transactions.partition_states[transactions.partition_for("id")].shard is not None)
        await until(lambda: transactions.core("id").state == State.COMPLETE_COMMIT)

    run(tmp_path, scenario)


def test_a_partition_is_loaded_when_what_a_predecessor_sent_is_written_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner may be stalled while it has the write. Records loaded before that lack it, and
    later ones are written after it (R6; found by the simulator: a group's generation decreased).
    """

    async def scenario(broker: HandlerBroker) -> None:
        assert await commit(broker, 5) == [0]
        groups = broker.broker.coordinators.groups
        place = groups.partition_states[partition_for("g", 3)]
        broker.owners.hold = True
        late = asyncio.create_task(commit(broker, 6))
        await until(lambda: broker.owners._held)
        store(broker, OFFSETS_TOPIC, place.index)
        monkeypatch.setattr(InternalPartitions, "served", lambda *_: None)  # the lease lapses
        groups.check_partitions()
        assert await late == [NOT_COORDINATOR]
        monkeypatch.undo()
        await asyncio.sleep(RETRY_S + 0.01)
        groups.check_partitions()
        assert place.loading is None and place.shard is None
        broker.owners.hold = False
        broker.owners.release()
        await until(lambda: place.shard is not None)
        assert await fetch(broker) == (0, 6)

    run(tmp_path, scenario)
