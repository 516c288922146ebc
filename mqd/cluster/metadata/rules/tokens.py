"""Rules for delegation tokens (KIP-48, KIP-373): which principals may renew and expire a
token, and until when.

Pure functions of the state and the change, as in topics.py. The acceptor checks whether a principal
may create a token for another, and computes the password of a token. Times: wall clock of the host
that got the request. As in Kafka, a token is still valid in the millisecond of its expiry time.
"""

from collections import Counter

import msgspec

from mqd.cluster.host import messages
from mqd.cluster.metadata.limits import TOKEN_BYTES_MAX, TOKEN_COUNT_MAX, TOKENS_PER_REQUESTER_MAX
from mqd.cluster.metadata.records import DelegationToken, DelegationTokenRemoved, DelegationTokenSet, Record
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.state import MetadataState
from mqd.protocol.errors import ErrorCode

REMOVALS_PER_BATCH_MAX = 1000  # tokens removed in one batch


def is_expired(token: DelegationToken, now_ms: int) -> bool:
    return min(token.expires_ms, token.renewable_until_ms) < now_ms


def create(state: MetadataState, token: DelegationToken) -> list[Record]:
    names = (token.owner, token.requester, *token.renewers)
    if sum(len(name.encode()) for name in names) > TOKEN_BYTES_MAX:
        raise Refusal(
            ErrorCode.INVALID_REQUEST, f"The principals in a token must have at most {TOKEN_BYTES_MAX} bytes in total."
        )
    if not token.token_id or token.token_id in state.delegation_tokens:
        raise Refusal(ErrorCode.INVALID_REQUEST, "A new token needs an id that no other token has.")
    if len(state.delegation_tokens) >= TOKEN_COUNT_MAX:
        raise Refusal(
            ErrorCode.POLICY_VIOLATION, f"There are {TOKEN_COUNT_MAX} delegation tokens, which is the maximum."
        )
    if (
        Counter(existing.requester for existing in state.delegation_tokens.values())[token.requester]
        >= TOKENS_PER_REQUESTER_MAX
    ):
        raise Refusal(
            ErrorCode.POLICY_VIOLATION,
            f"{token.requester} has requested {TOKENS_PER_REQUESTER_MAX} delegation tokens, which is the maximum;"
            " expire some.",
        )
    return [DelegationTokenSet(token)]


def set_expiry(
    state: MetadataState, change: messages.SetTokenExpiry, request_id: int
) -> tuple[messages.Response, str | None, list[Record]]:
    """Changes or removes a token, with Kafka's order of checks: an expired token can still be removed."""
    token = state.delegation_tokens.get(change.token_id)
    removes = change.period_ms < 0 and not change.is_renewal
    has_expired = token is not None and is_expired(token, change.now_ms)
    if token is None:
        error = ErrorCode.DELEGATION_TOKEN_NOT_FOUND
    elif has_expired and change.is_renewal:
        error = ErrorCode.DELEGATION_TOKEN_EXPIRED
    elif change.requester not in (token.owner, *token.renewers):
        error = ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH
    elif has_expired and not removes:
        error = ErrorCode.DELEGATION_TOKEN_EXPIRED
    elif removes:
        removed = DelegationTokenRemoved(token.token_id)
        return messages.Response(request_id, 0, expires_ms=change.now_ms), None, [removed]
    else:
        changed = msgspec.structs.replace(
            token, expires_ms=min(token.renewable_until_ms, change.now_ms + change.period_ms)
        )
        return messages.Response(request_id, 0, expires_ms=changed.expires_ms), None, [DelegationTokenSet(changed)]
    return messages.Response(request_id, 0, token_error=int(error)), None, []


def remove_expired(state: MetadataState, now_ms: int) -> list[Record]:
    """Removes expired tokens, at most REMOVALS_PER_BATCH_MAX."""
    expired_ids = (token.token_id for token in state.delegation_tokens.values() if is_expired(token, now_ms))
    return [DelegationTokenRemoved(token_id) for _, token_id in zip(range(REMOVALS_PER_BATCH_MAX), expired_ids)]
