"""SaslHandshake 0-1 and SaslAuthenticate 0-2 (KIP-43, KIP-152, KIP-368). Requests out of order, and
those on a listener without authentication, are refused as in Kafka.
"""

from mqd.acceptor.authentication import IllegalState, Refused, UnsupportedMechanism
from mqd.acceptor.broker import CloseConnection, Context
from mqd.native import PrincipalKind
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)


async def handle(
    context: Context, header: RequestHeader, request: SaslHandshakeRequest | SaslAuthenticateRequest
) -> SaslHandshakeResponse | SaslAuthenticateResponse:
    if isinstance(request, SaslHandshakeRequest):
        return _handshake(context, request)
    return await _authenticate(context, request)


def _handshake(context: Context, request: SaslHandshakeRequest) -> SaslHandshakeResponse:
    authentication, origin = context.broker.authentication, context.origin
    try:
        authentication.begin(origin.connection, origin.listener_id, request.mechanism)
    except IllegalState:
        return SaslHandshakeResponse(error_code=int(ErrorCode.ILLEGAL_SASL_STATE))
    except UnsupportedMechanism:
        context.ends_connection = True
        return SaslHandshakeResponse(
            error_code=int(ErrorCode.UNSUPPORTED_SASL_MECHANISM),
            mechanisms=list(authentication.mechanisms(origin.listener_id)),
        )
    return SaslHandshakeResponse(mechanisms=list(authentication.mechanisms(origin.listener_id)))


async def _authenticate(context: Context, request: SaslAuthenticateRequest) -> SaslAuthenticateResponse:
    authentication, origin = context.broker.authentication, context.origin
    current_principal = origin.principal if origin.principal_kind in (PrincipalKind.SASL, PrincipalKind.TOKEN) else ""
    try:
        step = await authentication.step(
            origin.connection, origin.listener_id, origin.peer_ip, current_principal, bytes(request.auth_bytes)
        )
    except IllegalState as error:
        # as in Kafka; a client that sent a raw token would otherwise wait for a response
        context.ends_connection = not current_principal and bool(authentication.mechanisms(origin.listener_id))
        return SaslAuthenticateResponse(error_code=int(ErrorCode.ILLEGAL_SASL_STATE), error_message=str(error))
    except Refused as error:
        _check_lease(context)
        context.ends_connection, context.delay_s = True, error.delay_s
        return SaslAuthenticateResponse(error_code=int(ErrorCode.SASL_AUTHENTICATION_FAILED), error_message=str(error))
    if step.principal:
        _check_lease(context, step.principal)
        kind = PrincipalKind.TOKEN if step.used_delegation_token else PrincipalKind.SASL
        context.authenticated_as = step.principal, step.lifetime_ms, kind
    return SaslAuthenticateResponse(auth_bytes=step.token, session_lifetime_ms=step.lifetime_ms)


def _check_lease(context: Context, principal: str = "") -> None:
    """Raises CloseConnection if this host has lost its lease: it may not know of changed passwords
    and deleted users. Where rights are checked, such a host neither serves requests nor accepts
    credentials, so that clients try another host. Super users are admitted, so that they can find out
    what is wrong.
    """
    rules = context.broker.authorizer
    if rules is not None and not context.broker.may_lead() and principal not in rules.super_users:
        raise CloseConnection("this host has lost its lease and does not know which credentials are valid")
