"""Produce 0-2: advertised because older versions of librdkafka otherwise do not compress
(KAFKA-18659), but refused: their records have message formats 0 and 1, which are not supported.

The reactor handles versions 3-13.
"""

from mqd.acceptor.broker import CloseConnection, Context
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import ProduceRequest, ProduceResponse


async def handle(context: Context, header: RequestHeader, request: ProduceRequest) -> ProduceResponse:
    if header.api_version > 2:
        raise CloseConnection(f"Produce version {header.api_version} is answered by the workers")
    if request.acks == 0:
        raise CloseConnection(
            "Produce 0-2 with acks=0: message formats 0 and 1 are not stored, and acks=0 has no response to"
            " report this in"
        )
    error = int(ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT)
    return ProduceResponse(
        responses=[
            ProduceResponse.TopicResponse(
                name=topic.name,
                partition_responses=[
                    ProduceResponse.PartitionResponse(index=partition.index, error_code=error, base_offset=-1)
                    for partition in topic.partition_data
                ],
            )
            for topic in request.topic_data
        ]
    )
