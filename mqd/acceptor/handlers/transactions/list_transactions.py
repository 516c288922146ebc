"""ListTransactions 0-2 (KIP-664, KIP-994, KIP-1152): the transactional ids that this host
coordinates, filtered by state, producer id, duration, and pattern.
"""

from collections.abc import Callable

from mqd.acceptor.broker import Context
from mqd.coordinator.group.regex import BadExpression, compile_regex
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.transaction.core import Transaction
from mqd.coordinator.transaction.events import Description
from mqd.coordinator.transaction.joint import JointTransaction
from mqd.coordinator.transaction.records import STATE_NAMES
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import ListTransactionsRequest, ListTransactionsResponse
from mqd.security.acl import Operation, ResourceType

_KNOWN_STATES = {*STATE_NAMES.values(), "PrepareEpochFence"}


async def handle(context: Context, header: RequestHeader, request: ListTransactionsRequest) -> ListTransactionsResponse:
    service = context.broker.transactions
    if service is None or not service.coordinator.partition_count:
        return ListTransactionsResponse(unknown_state_filters=_unknown_states(request))
    try:
        service.coordinator.check_loaded()
        pattern_matches = compile_regex(request.transactional_id_pattern) if request.transactional_id_pattern else None
    except CoordinatorError as error:
        return ListTransactionsResponse(error_code=error.error_code)
    except BadExpression:
        return ListTransactionsResponse(error_code=int(ErrorCode.INVALID_REGULAR_EXPRESSION))
    now_ms = service.now_ms()
    states = []
    for _, core in service.coordinator.items():
        assert isinstance(core, Transaction | JointTransaction)
        description = core.description()
        if description is None or not _matches(description, request, pattern_matches, now_ms):
            continue
        name = description.transactional_id
        if not context.authorize(Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, name, named_in_request=False):
            continue
        for producer_id in _producer_ids(core, description, request):
            states.append(
                ListTransactionsResponse.TransactionState(
                    transactional_id=description.transactional_id,
                    producer_id=producer_id,
                    transaction_state=description.state,
                )
            )
    return ListTransactionsResponse(unknown_state_filters=_unknown_states(request), transaction_states=states)


def _unknown_states(request: ListTransactionsRequest) -> list[str]:
    return [name for name in request.state_filters if name not in _KNOWN_STATES]


def _producer_ids(
    core: Transaction | JointTransaction, description: Description, request: ListTransactionsRequest
) -> list[int]:
    """The producer ids to list for this transactional id: those of its producers that the request
    names, or only the current one if the request names none.
    """
    if not request.producer_id_filters:
        return [description.producer_id]
    producer_ids = set(request.producer_id_filters)
    return [
        producer_id
        for producer_id in {description.producer_id: 0, **core.open_producers()}
        if producer_id in producer_ids
    ]


def _matches(
    description: Description,
    request: ListTransactionsRequest,
    pattern_matches: Callable[[str], object] | None,
    now_ms: int,
) -> bool:
    if request.state_filters and description.state not in request.state_filters:
        return False
    # As in Kafka, includes ids whose transactions have ended or never began.
    if request.duration_filter >= 0 and now_ms - description.start_ms <= request.duration_filter:
        return False
    return pattern_matches is None or bool(pattern_matches(description.transactional_id))
