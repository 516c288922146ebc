"""DescribeTransactions version 0 (KIP-664): state, producer and partitions of transactional ids."""

from mqd.acceptor.broker import Context
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.transaction.events import Describe, Description
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import DescribeTransactionsRequest, DescribeTransactionsResponse
from mqd.security.acl import Operation, ResourceType


async def handle(
    context: Context, header: RequestHeader, request: DescribeTransactionsRequest
) -> DescribeTransactionsResponse:
    return DescribeTransactionsResponse(
        transaction_states=[await _describe(context, name) for name in request.transactional_ids]
    )


async def _describe(context: Context, name: str) -> DescribeTransactionsResponse.TransactionState:
    service = context.broker.transactions
    if not name:
        return _refused(name, ErrorCode.INVALID_REQUEST)
    if service is None:
        return _refused(name, ErrorCode.TRANSACTIONAL_ID_NOT_FOUND)
    try:
        description = await service.request(name, Describe)
    except CoordinatorError as error:
        return _refused(name, error.error_code)
    if not isinstance(description, Description):
        return _refused(name, ErrorCode.TRANSACTIONAL_ID_NOT_FOUND)
    topics: dict[str, list[int]] = {}
    for topic, index in description.partitions:
        if not context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, topic, named_in_request=False):
            continue
        topics.setdefault(topic, []).append(index)
    return DescribeTransactionsResponse.TransactionState(
        error_code=0,
        transactional_id=name,
        transaction_state=description.state,
        transaction_timeout_ms=description.timeout_ms,
        transaction_start_time_ms=description.start_ms,
        producer_id=description.producer_id,
        producer_epoch=description.producer_epoch,
        topics=[
            DescribeTransactionsResponse.Topic(topic=topic, partitions=sorted(indexes))
            for topic, indexes in sorted(topics.items())
        ],
    )


def _refused(name: str, error: int) -> DescribeTransactionsResponse.TransactionState:
    return DescribeTransactionsResponse.TransactionState(error_code=int(error), transactional_id=name)
