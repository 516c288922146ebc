"""UnregisterBroker version 0 (KIP-631): removes the registration of a broker that is down and no
longer holds replicas; the controller decides. If there is only one broker, it handles the request
itself, so it is not down.

With mqd's own tagged field 9100, the request prepares a removal: a live broker gives up all
replicas and gets no new ones (DRAIN), or may get replicas again (UNDRAIN).
"""

from mqd.acceptor.broker import Context
from mqd.cluster.host import messages
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import UnregisterBrokerRequest, UnregisterBrokerResponse

TIMEOUT_MS = 30_000  # the request has no field for it
UNREGISTER, DRAIN, UNDRAIN = 0, 1, 2


async def handle(context: Context, header: RequestHeader, request: UnregisterBrokerRequest) -> UnregisterBrokerResponse:
    broker = context.broker
    if request.drain != UNREGISTER:
        response = await broker.controller.request(
            messages.DrainBroker(request.broker_id, request.drain == UNDRAIN), TIMEOUT_MS
        )
        return UnregisterBrokerResponse(error_code=response.error, error_message=response.message)
    if not broker.metadata.is_single_host:
        response = await broker.controller.request(messages.UnregisterBroker(request.broker_id), TIMEOUT_MS)
        return UnregisterBrokerResponse(error_code=response.error, error_message=response.message)
    if request.broker_id == broker.node_id or request.broker_id in broker.metadata.brokers:
        text = f"Broker {request.broker_id} is running; stop it before it is unregistered."
        return UnregisterBrokerResponse(error_code=int(ErrorCode.INVALID_REQUEST), error_message=text)
    text = f"Broker ID {request.broker_id} is not currently registered."
    return UnregisterBrokerResponse(error_code=int(ErrorCode.BROKER_ID_NOT_REGISTERED), error_message=text)
