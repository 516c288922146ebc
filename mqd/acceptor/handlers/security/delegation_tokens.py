"""CreateDelegationToken 1-3, RenewDelegationToken 1-2, ExpireDelegationToken 1-2,
DescribeDelegationToken 1-3 (KIP-48, KIP-373, KIP-900): credentials that users pass to their
programs instead of their own.

A client that authenticated with a token may not send these requests. A principal may create tokens
for itself and, with CREATE_TOKENS on another user, for that user. The owner and the renewers of a
token may renew and expire it. It is visible to its owner, requester and renewers, and to principals
with DESCRIBE on the token or DESCRIBE_TOKENS on its owner.
"""

from mqd.acceptor.broker import Context
from mqd.acceptor.broker_state import INT64_MAX
from mqd.base import clock
from mqd.cluster.host import messages
from mqd.cluster.metadata.records import DelegationToken
from mqd.native import PrincipalKind
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import (
    CreateDelegationTokenRequest,
    CreateDelegationTokenResponse,
    DescribeDelegationTokenRequest,
    DescribeDelegationTokenResponse,
    ExpireDelegationTokenRequest,
    ExpireDelegationTokenResponse,
    RenewDelegationTokenRequest,
    RenewDelegationTokenResponse,
)
from mqd.security import principal, tokens
from mqd.security.acl import Operation, ResourceType

TIMEOUT_MS = 30_000  # the requests have no timeout field
NO_TIME = -1  # as in Kafka: the value of every time field in the response to a refused request
_MAY_USE_TOKEN_APIS = (PrincipalKind.SASL, PrincipalKind.TLS, PrincipalKind.LOCAL)
Request = (
    CreateDelegationTokenRequest
    | RenewDelegationTokenRequest
    | ExpireDelegationTokenRequest
    | DescribeDelegationTokenRequest
)
Response = (
    CreateDelegationTokenResponse
    | RenewDelegationTokenResponse
    | ExpireDelegationTokenResponse
    | DescribeDelegationTokenResponse
)


async def handle(context: Context, header: RequestHeader, request: Request) -> Response:
    if isinstance(request, CreateDelegationTokenRequest):
        return await _create(context, request)
    if isinstance(request, DescribeDelegationTokenRequest):
        return _describe(context, request)
    if isinstance(request, RenewDelegationTokenRequest):
        lifetime_ms = context.broker.tokens.lifetime_ms
        period_ms = min(request.renew_period_ms, lifetime_ms) if request.renew_period_ms > 0 else lifetime_ms
        error, expires_ms = await _change_expiry(context, bytes(request.hmac), period_ms, True)
        return RenewDelegationTokenResponse(error_code=error, expiry_timestamp_ms=expires_ms)
    error, expires_ms = await _change_expiry(
        context, bytes(request.hmac), max(request.expiry_time_period_ms, -1), False
    )
    return ExpireDelegationTokenResponse(error_code=error, expiry_timestamp_ms=expires_ms)


def _is_allowed(context: Context) -> bool:
    return context.origin.principal_kind in _MAY_USE_TOKEN_APIS


# -- creating --------------------------------------------------------------------------------------


async def _create(context: Context, request: CreateDelegationTokenRequest) -> CreateDelegationTokenResponse:
    requester = context.origin.principal
    owner = (
        f"{request.owner_principal_type}:{request.owner_principal_name}" if request.owner_principal_name else requester
    )
    response = CreateDelegationTokenResponse()
    response.principal_type, _, response.principal_name = owner.partition(":")
    response.token_requester_principal_type, _, response.token_requester_principal_name = requester.partition(":")
    response.issue_timestamp_ms = response.expiry_timestamp_ms = response.max_timestamp_ms = NO_TIME
    response.error_code = _creation_refusal(context, owner, requester) or _validity_error(context, request, owner)
    if response.error_code:
        return response
    service = context.broker.tokens
    now_ms, lifetime_ms = clock.now_ms(), service.max_lifetime_ms
    if request.max_lifetime_ms > 0:
        lifetime_ms = min(lifetime_ms, request.max_lifetime_ms)
    renewable_until_ms = min(now_ms + lifetime_ms, INT64_MAX)
    renewers = tuple(
        dict.fromkeys(f"{renewer.principal_type}:{renewer.principal_name}" for renewer in request.renewers)
    )
    expires_ms = min(renewable_until_ms, now_ms + service.lifetime_ms)
    token = DelegationToken(tokens.new_id(), owner, requester, renewers, now_ms, renewable_until_ms, expires_ms)
    decision = await context.change(messages.CreateDelegationToken(token), TIMEOUT_MS)
    response.error_code = decision.error
    if not decision.error:
        response.issue_timestamp_ms, response.expiry_timestamp_ms = now_ms, expires_ms
        response.max_timestamp_ms, response.token_id = renewable_until_ms, token.token_id
        response.hmac = service.hmac_of(token.token_id)
    return response


def _creation_refusal(context: Context, owner: str, requester: str) -> int:
    if not _is_allowed(context):
        return int(ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED)
    if owner != requester and not context.authorize(Operation.CREATE_TOKENS, ResourceType.USER, owner):
        return int(ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED)
    return 0


def _validity_error(context: Context, request: CreateDelegationTokenRequest, owner: str) -> int:
    """Refuses owners of types other than User: a client that a token authenticates is always a User."""
    if not context.broker.tokens.are_enabled:
        return int(ErrorCode.DELEGATION_TOKEN_AUTH_DISABLED)
    owner_type, _, owner_name = owner.partition(":")
    if owner_type != principal.USER or any(renewer.principal_type != principal.USER for renewer in request.renewers):
        return int(ErrorCode.INVALID_PRINCIPAL_TYPE)
    try:
        principal.user(owner_name)
    except ValueError:
        return int(ErrorCode.INVALID_REQUEST)
    return 0


# -- renewing and expiring -------------------------------------------------------------------------


async def _change_expiry(context: Context, token_hmac: bytes, period_ms: int, is_renewal: bool) -> tuple[int, int]:
    """Returns an error code, and when the token expires."""
    service, requester = context.broker.tokens, context.origin.principal
    if not _is_allowed(context):
        return int(ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED), NO_TIME
    if not service.are_enabled:
        return int(ErrorCode.DELEGATION_TOKEN_AUTH_DISABLED), 0
    while True:
        token = service.by_hmac(token_hmac)
        token_id = token.token_id if token is not None else ""
        change = messages.SetTokenExpiry(token_id, requester, clock.now_ms(), period_ms, is_renewal)
        response = await context.change(change, TIMEOUT_MS)
        # A token that was created on another host may have been unknown here; the controller's
        # response comes after the metadata that has it, so the second attempt finds it.
        if token is not None or response.error or service.by_hmac(token_hmac) is None:
            break
    error = response.error or response.token_error
    return error, 0 if error else response.expires_ms


# -- describing ------------------------------------------------------------------------------------


def _describe(context: Context, request: DescribeDelegationTokenRequest) -> DescribeDelegationTokenResponse:
    if not _is_allowed(context):
        return DescribeDelegationTokenResponse(error_code=int(ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED))
    if not context.broker.tokens.are_enabled:
        return DescribeDelegationTokenResponse(error_code=int(ErrorCode.DELEGATION_TOKEN_AUTH_DISABLED))
    owners = (
        None
        if request.owners is None
        else {f"{owner.principal_type}:{owner.principal_name}" for owner in request.owners}
    )
    descriptions = [
        _description(context, token)
        for token in context.broker.metadata.delegation_tokens.values()
        if (owners is None or not owners.isdisjoint(_principals_of(token))) and _may_see(context, token)
    ]
    return DescribeDelegationTokenResponse(tokens=descriptions)


def _principals_of(token: DelegationToken) -> tuple[str, ...]:
    return (token.owner, token.requester, *token.renewers)


def _may_see(context: Context, token: DelegationToken) -> bool:
    return (
        context.origin.principal in _principals_of(token)
        or context.authorize(Operation.DESCRIBE, ResourceType.DELEGATION_TOKEN, token.token_id, named_in_request=False)
        or context.authorize(Operation.DESCRIBE_TOKENS, ResourceType.USER, token.owner, named_in_request=False)
    )


def _description(context: Context, token: DelegationToken) -> DescribeDelegationTokenResponse.DescribedDelegationToken:
    described = DescribeDelegationTokenResponse.DescribedDelegationToken(
        issue_timestamp=token.issued_ms,
        expiry_timestamp=token.expires_ms,
        max_timestamp=token.renewable_until_ms,
        token_id=token.token_id,
        hmac=context.broker.tokens.hmac_of(token.token_id),
    )
    described.principal_type, _, described.principal_name = token.owner.partition(":")
    described.token_requester_principal_type, _, described.token_requester_principal_name = token.requester.partition(
        ":"
    )
    for renewer in token.renewers:
        kind, _, name = renewer.partition(":")
        described.renewers.append(
            DescribeDelegationTokenResponse.DescribedDelegationTokenRenewer(principal_type=kind, principal_name=name)
        )
    return described
