"""AlterConfigs 0-2 (KIP-133): replaces the whole configuration of a resource; configs that are not
named are reset.
"""

import asyncio
from collections import Counter
from typing import NamedTuple

from mqd.acceptor.broker import Context
from mqd.acceptor.handlers.configs import broker_loggers
from mqd.base import dead_letters
from mqd.base.config import topic_effective
from mqd.cluster.host import messages
from mqd.cluster.host.messages import ConfigOperation
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules.configs import RESOURCE_GROUP
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import AlterConfigsRequest, AlterConfigsResponse
from mqd.security.acl import Operation, ResourceType

TIMEOUT_MS = 30_000  # the request has no timeout field


class Resource(NamedTuple):
    type: int
    name: str
    operations: list[ConfigOperation]


class Result(NamedTuple):
    type: int
    name: str
    error: int
    message: str | None


async def handle(context: Context, header: RequestHeader, request: AlterConfigsRequest) -> AlterConfigsResponse:
    resources = [
        Resource(
            resource.resource_type,
            resource.resource_name,
            [ConfigOperation(config.name, "set", config.value) for config in resource.configs],
        )
        for resource in request.resources
    ]
    results = await alter(context, resources, replace=True, validate_only=request.validate_only)
    return AlterConfigsResponse(
        responses=[
            AlterConfigsResponse.ResourceResponse(
                error_code=result.error,
                error_message=result.message,
                resource_type=result.type,
                resource_name=result.name,
            )
            for result in results
        ]
    )


def _dead_letter_topic_problem(context: Context, resource: Resource) -> str:
    """Returns why the group's dead-letter topic is refused, or "" if it is accepted. A missing topic
    may be created later; an existing one must accept dead letters. A topic that the client may not
    describe is treated as missing; it still gets no dead letters unless it accepts them.
    """
    names = [
        operation.value
        for operation in resource.operations
        if operation.name == dead_letters.TOPIC and operation.value and operation.operation != "delete"
    ]
    image = context.broker.metadata.topics.get(names[0]) if resource.type == RESOURCE_GROUP and names else None
    if (
        image is None
        or topic_effective(context.broker.effective_config(), image.config)[dead_letters.ENABLED] == "true"
    ):
        return ""
    if not context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, image.name):
        return ""
    return f"topic {image.name} takes no dead letters; set its {dead_letters.ENABLED}=true first"


async def alter(context: Context, resources: list[Resource], replace: bool, validate_only: bool) -> list[Result]:
    """One result for each distinct resource, in order."""
    broker = context.broker
    counts = Counter((resource.type, resource.name) for resource in resources)
    by_key = {(resource.type, resource.name): resource for resource in resources}

    async def alter_one(resource: Resource) -> Result:
        if counts[resource.type, resource.name] > 1:
            return Result(
                resource.type, resource.name, int(ErrorCode.INVALID_REQUEST), "Each resource must appear at most once."
            )
        if resource.type == broker_loggers.RESOURCE_BROKER_LOGGER and not replace:
            try:
                broker_loggers.alter(broker, resource.name, resource.operations, validate_only)
            except Refusal as refusal:
                return Result(resource.type, resource.name, refusal.error, refusal.message)
            return Result(resource.type, resource.name, 0, None)
        if problem := _dead_letter_topic_problem(context, resource):
            return Result(resource.type, resource.name, int(ErrorCode.INVALID_CONFIG), problem)
        change = messages.AlterConfig(resource.type, resource.name, resource.operations, replace)
        response = await broker.controller.request(change, TIMEOUT_MS, validate_only)
        return Result(resource.type, resource.name, response.error, response.message)

    return list(await asyncio.gather(*(alter_one(resource) for resource in by_key.values())))
