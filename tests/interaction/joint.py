"""A driver and children of a joint transaction, of raw requests."""

from __future__ import annotations

from mqd.coordinator.transaction.joint import JOINT_PREFIX
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import EndTxnRequest, FindCoordinatorRequest, InitProducerIdRequest
from tests.interaction.traffic import INIT_PRODUCER_ID, eventually
from tests.interaction.transactional import END_TXN, FIND_COORDINATOR, RawProducer, fresh

AGAIN = frozenset(
    (
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.CONCURRENT_TRANSACTIONS,
    )
)


def joint_id() -> str:
    return JOINT_PREFIX + fresh("query")


class Driver:
    """Requests of one run. `batch` names the batch of each request."""

    def __init__(self, kafka, name: str | None = None, run: str = "run-1", timeout_ms: int = 60_000) -> None:
        self.kafka, self.name, self.run, self.timeout_ms = kafka, name or joint_id(), run, timeout_ms
        kafka.call(FIND_COORDINATOR, 4, FindCoordinatorRequest(key_type=1, coordinator_keys=[self.name]))

    def enlist_once(self, batch: int, producer_id: int = -1, producer_epoch: int = -1):
        joint = InitProducerIdRequest.Joint(batch_id=batch, run_id=self.run)
        request = InitProducerIdRequest(
            transactional_id=self.name,
            transaction_timeout_ms=self.timeout_ms,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            joint=joint,
        )
        return self.kafka.call(INIT_PRODUCER_ID, 5, request)

    def enlist(self, batch: int):
        """The response, if the broker was reached."""

        def request():
            response = self.enlist_once(batch)
            return None if response.error_code in AGAIN else response

        return eventually(request, "a child of the joint transaction")

    def child(self, batch: int) -> RawProducer:
        response = self.enlist(batch)
        assert response.error_code == 0 and response.producer_id >= 0, response
        producer = RawProducer(self.kafka, self.name)
        producer.adopt(response)
        return producer

    def end_once(self, batch: int, *winners: RawProducer, committed: bool = True):
        named = [EndTxnRequest.Winner(producer_id=one.producer_id, producer_epoch=one.epoch) for one in winners]
        joint = EndTxnRequest.Joint(batch_id=batch, run_id=self.run, winners=named)
        return self.kafka.call(
            END_TXN,
            5,
            EndTxnRequest(
                transactional_id=self.name, producer_id=-1, producer_epoch=-1, committed=committed, joint=joint
            ),
        )

    def end(self, batch: int, *winners: RawProducer, committed: bool = True) -> tuple[int, int]:
        """(error, last committed batch)."""

        def request():
            response = self.end_once(batch, *winners, committed=committed)
            return None if response.error_code in AGAIN else response

        response = eventually(request, "the end of the joint transaction")
        return response.error_code, response.joint.committed_batch_id
