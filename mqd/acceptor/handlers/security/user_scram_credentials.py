"""DescribeUserScramCredentials 0, AlterUserScramCredentials 0 (KIP-554): lists, sets and removes
users' credentials, one for each SCRAM mechanism.

A client sends only the salted password, from which the broker computes what it stores
(mqd/security/scram.py). Clients can read only the mechanism and the number of iterations.
"""

from mqd.acceptor.broker import Context
from mqd.acceptor.rights import DENIAL_ERRORS
from mqd.cluster.host import messages
from mqd.cluster.metadata.records import ScramCredential
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
)
from mqd.protocol.repeated import repeated
from mqd.security.acl import Operation, ResourceType
from mqd.security.scram import MECHANISM_NUMBERS, new_decoy_secret, verifier_of

_MECHANISMS = {number: name for name, number in MECHANISM_NUMBERS.items()}
TIMEOUT_MS = 30_000  # the request has no timeout field
Result = AlterUserScramCredentialsResponse.AlterUserScramCredentialsResult


async def handle(
    context: Context,
    header: RequestHeader,
    request: DescribeUserScramCredentialsRequest | AlterUserScramCredentialsRequest,
) -> DescribeUserScramCredentialsResponse | AlterUserScramCredentialsResponse:
    if isinstance(request, AlterUserScramCredentialsRequest):
        return await _alter(context, request)
    return _describe(context, request)


def _describe(context: Context, request: DescribeUserScramCredentialsRequest) -> DescribeUserScramCredentialsResponse:
    credentials: dict[str, list[ScramCredential]] = {}
    for (user, _), credential in sorted(context.broker.metadata.scram_credentials.items()):
        credentials.setdefault(user, []).append(credential)
    names = [user.name for user in request.users] if request.users else list(credentials)
    repeated_names = set(repeated(names))
    results = []
    for name in dict.fromkeys(names):
        result = DescribeUserScramCredentialsResponse.DescribeUserScramCredentialsResult(user=name)
        if name in repeated_names:
            result.error_code = int(ErrorCode.DUPLICATE_RESOURCE)
            result.error_message = (
                f"Cannot describe SCRAM credentials for the same user twice in a single request: {name}"
            )
        elif name not in credentials:
            result.error_code = int(ErrorCode.RESOURCE_NOT_FOUND)
            result.error_message = f"Attempt to describe a user credential that does not exist: {name}"
        else:
            result.credential_infos = [
                DescribeUserScramCredentialsResponse.CredentialInfo(
                    mechanism=credential.mechanism, iterations=credential.iterations
                )
                for credential in credentials[name]
            ]
        results.append(result)
    return DescribeUserScramCredentialsResponse(results=results)


async def _alter(context: Context, request: AlterUserScramCredentialsRequest) -> AlterUserScramCredentialsResponse:
    users = dict.fromkeys(
        [deletion.name for deletion in request.deletions] + [upsertion.name for upsertion in request.upsertions]
    )
    if not context.authorize(Operation.ALTER, ResourceType.CLUSTER):
        denied = DENIAL_ERRORS[ResourceType.CLUSTER]
        return AlterUserScramCredentialsResponse(
            results=[Result(user=user, error_code=denied, error_message=error_message(denied)) for user in users]
        )
    change = messages.AlterScramCredentials(
        [(deletion.name, deletion.mechanism) for deletion in request.deletions],
        [_credential(upsertion) for upsertion in request.upsertions],
        new_decoy_secret(),  # for the salts of unknown users, if the cluster has no such secret yet
    )
    response = await context.change(change, TIMEOUT_MS)
    results = response.users or [messages.UserResult(user, response.error, response.message) for user in users]
    return AlterUserScramCredentialsResponse(
        results=[Result(user=result.user, error_code=result.error, error_message=result.message) for result in results]
    )


def _credential(upsertion: AlterUserScramCredentialsRequest.ScramCredentialUpsertion) -> ScramCredential:
    """The credential, not yet validated: the controller refuses, for example, unknown mechanisms."""
    mechanism = _MECHANISMS.get(upsertion.mechanism, "SCRAM-SHA-256")
    verifier = verifier_of(mechanism, bytes(upsertion.salted_password), bytes(upsertion.salt), upsertion.iterations)
    return ScramCredential(
        upsertion.name,
        upsertion.mechanism,
        verifier.salt,
        verifier.iterations,
        verifier.stored_key,
        verifier.server_key,
    )
