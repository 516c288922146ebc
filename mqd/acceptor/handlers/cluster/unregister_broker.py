"""UnregisterBroker version 0 (KIP-631): removes the registration of a broker that is down and holds
no replicas any more; the controller decides. A single broker handles the request for itself, so it
is not down.

With a tagged field of our own (9100) the request prepares a removal: a live broker gives up all
replicas and gets no new ones (DRAIN), or gets replicas again (TAKE_PART).
"""

from mqd.acceptor.broker import Context
from mqd.cluster.host import messages
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import UnregisterBrokerRequest, UnregisterBrokerResponse

TIMEOUT_MS = 30_000  # the request has no field for it
FORGET, DRAIN, TAKE_PART = 0, 1, 2


async def handle(context: Context, header: RequestHeader, request: UnregisterBrokerRequest) -> UnregisterBrokerResponse:
    broker = context.broker
    if request.drain != FORGET:
        response = await broker.controller.request(
            messages.DrainBroker(request.broker_id, request.drain == TAKE_PART), TIMEOUT_MS
        )
        return UnregisterBrokerResponse(error_code=response.error, error_message=response.message)
    if not broker.metadata.is_alone:
        response = await broker.controller.request(messages.UnregisterBroker(request.broker_id), TIMEOUT_MS)
        return UnregisterBrokerResponse(error_code=response.error, error_message=response.message)
    if request.broker_id == broker.node_id or request.broker_id in broker.metadata.brokers:
        text = f"Broker {request.broker_id} is running; stop it before it is unregistered."
        return UnregisterBrokerResponse(error_code=int(ErrorCode.INVALID_REQUEST), error_message=text)
    text = f"Broker ID {request.broker_id} is not currently registered."
    return UnregisterBrokerResponse(error_code=int(ErrorCode.BROKER_ID_NOT_REGISTERED), error_message=text)
