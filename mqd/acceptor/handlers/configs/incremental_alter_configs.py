"""IncrementalAlterConfigs 0-1 (KIP-339): set, delete, append to and subtract from single
configurations.
"""

from mqd.acceptor.broker import Context
from mqd.acceptor.handlers.configs import alter_configs
from mqd.cluster.host.messages import ConfigOperation
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import IncrementalAlterConfigsRequest, IncrementalAlterConfigsResponse

OPERATIONS = {0: "set", 1: "delete", 2: "append", 3: "subtract"}


async def handle(
    context: Context, header: RequestHeader, request: IncrementalAlterConfigsRequest
) -> IncrementalAlterConfigsResponse:
    resources = [
        alter_configs.Resource(
            resource.resource_type,
            resource.resource_name,
            [
                ConfigOperation(
                    config.name,
                    OPERATIONS.get(config.config_operation, f"operation {config.config_operation}"),
                    config.value,
                )
                for config in resource.configs
            ],
        )
        for resource in request.resources
    ]
    results = await alter_configs.alter(context, resources, replace=False, validate_only=request.validate_only)
    return IncrementalAlterConfigsResponse(
        responses=[
            IncrementalAlterConfigsResponse.ResourceResponse(
                error_code=result.error,
                error_message=result.message,
                resource_type=result.type,
                resource_name=result.name,
            )
            for result in results
        ]
    )
