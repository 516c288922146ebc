"""AlterClientQuotas 0-1 (KIP-546): sets and removes quotas of users, client ids and addresses.
Entities are independent; each change is on disk and applied by every worker before it is answered.
If an entity has two parts of one type, the last one is used, as in Kafka.
"""

import asyncio

from mqd.acceptor.broker import Broker, Context
from mqd.cluster.host import messages
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import AlterClientQuotasRequest, AlterClientQuotasResponse
from mqd.protocol.repeated import repeated

TIMEOUT_MS = 30_000  # the request has no timeout field


async def handle(
    context: Context, header: RequestHeader, request: AlterClientQuotasRequest
) -> AlterClientQuotasResponse:
    for entry in request.entries:
        entry.entity = list({part.entity_type: part for part in entry.entity}.values())
    entities = [frozenset((part.entity_type, part.entity_name) for part in entry.entity) for entry in request.entries]
    refused = set(repeated(entities))
    results = [
        (
            _result(entry, int(ErrorCode.INVALID_REQUEST), "Each entity must appear at most once.")
            if entity in refused
            else _alter(context.broker, entry, request.validate_only)
        )
        for entity, entry in dict(zip(entities, request.entries, strict=True)).items()
    ]
    return AlterClientQuotasResponse(entries=list(await asyncio.gather(*results)))


async def _alter(
    broker: Broker, entry: AlterClientQuotasRequest.EntryData, validate_only: bool
) -> AlterClientQuotasResponse.EntryData:
    change = messages.AlterClientQuota(
        [(part.entity_type, part.entity_name) for part in entry.entity],
        [
            messages.QuotaOperation(operation.key, None if operation.remove else operation.value)
            for operation in entry.ops
        ],
    )
    response = await broker.controller.request(change, TIMEOUT_MS, validate_only)
    return await _result(entry, response.error, response.message)


async def _result(
    entry: AlterClientQuotasRequest.EntryData, error: int, message: str | None
) -> AlterClientQuotasResponse.EntryData:
    return AlterClientQuotasResponse.EntryData(
        error_code=error,
        error_message=message,
        entity=[
            AlterClientQuotasResponse.EntityData(entity_type=part.entity_type, entity_name=part.entity_name)
            for part in entry.entity
        ],
    )
