"""DescribeUserScramCredentials 0, AlterUserScramCredentials 0 (KIP-554): which users have a password,
for which mechanism of SCRAM; and set or remove it.

A client sends no password but the salted one, from which the broker computes what it keeps
(mqd/security/scram.py). Nothing of that is ever told again but the number of iterations.
"""

from mqd.acceptor.broker import Context
from mqd.acceptor.rights import DENIED
from mqd.cluster.host import messages
from mqd.cluster.metadata.records import ScramCredential
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
)
from mqd.security.acl import Operation, ResourceType
from mqd.security.scram import ITERATIONS_MAX, ITERATIONS_MIN, verifier_of

MECHANISMS = {1: "SCRAM-SHA-256", 2: "SCRAM-SHA-512"}
TIMEOUT_MS = 30_000  # the request has none
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
    found: dict[str, list[ScramCredential]] = {}
    for (user, _), credential in sorted(context.broker.metadata.scram_credentials.items()):
        found.setdefault(user, []).append(credential)
    names = [user.name for user in request.users] if request.users else list(found)
    results = []
    for name in dict.fromkeys(names):
        result = DescribeUserScramCredentialsResponse.DescribeUserScramCredentialsResult(user=name)
        if names.count(name) > 1:
            result.error_code = int(ErrorCode.DUPLICATE_RESOURCE)
            result.error_message = (
                f"Cannot describe SCRAM credentials for the same user twice in a single request: {name}"
            )
        elif name not in found:
            result.error_code = int(ErrorCode.RESOURCE_NOT_FOUND)
            result.error_message = f"Attempt to describe a user credential that does not exist: {name}"
        else:
            result.credential_infos = [
                DescribeUserScramCredentialsResponse.CredentialInfo(mechanism=one.mechanism, iterations=one.iterations)
                for one in found[name]
            ]
        results.append(result)
    return DescribeUserScramCredentialsResponse(results=results)


async def _alter(context: Context, request: AlterUserScramCredentialsRequest) -> AlterUserScramCredentialsResponse:
    users = dict.fromkeys([one.name for one in request.deletions] + [one.name for one in request.upsertions])
    if not context.authorize(Operation.ALTER, ResourceType.CLUSTER):
        denied = DENIED[ResourceType.CLUSTER]
        return AlterUserScramCredentialsResponse(
            results=[Result(user=user, error_code=denied, error_message=error_message(denied)) for user in users]
        )
    errors = _errors(request)
    removals = [(one.name, one.mechanism) for one in request.deletions if one.name not in errors]
    settings = [_credential(one) for one in request.upsertions if one.name not in errors]
    results = {
        user: Result(user=user, error_code=int(error), error_message=text) for user, (error, text) in errors.items()
    }
    if removals or settings:
        answer = await context.broker.controller.request(messages.AlterScramCredentials(removals, settings), TIMEOUT_MS)
        told = answer.users or [
            messages.UserResult(user, answer.error, answer.message) for user in users if user not in errors
        ]
        for one in told:
            if one.user not in results or one.error:
                results[one.user] = Result(user=one.user, error_code=one.error, error_message=one.message)
        for user in dict.fromkeys(one.user for one in told if not one.error):
            context.broker.audit.write("user's password changed", by=context.address.principal, user=user)
    return AlterUserScramCredentialsResponse(results=[results[user] for user in users])


def _errors(request: AlterUserScramCredentialsRequest) -> dict[str, tuple[ErrorCode, str]]:
    """By user, what is wrong with the request in itself, in the words of Kafka."""
    errors: dict[str, tuple[ErrorCode, str]] = {}
    seen: set[tuple[str, int]] = set()
    for one in (*request.deletions, *request.upsertions):
        if not one.name:
            error = (ErrorCode.UNACCEPTABLE_CREDENTIAL, "Username must not be empty")
        elif one.mechanism not in MECHANISMS:
            error = (ErrorCode.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism")
        elif (one.name, one.mechanism) in seen:
            text = "A user credential cannot be altered twice in the same request"
            error = (ErrorCode.DUPLICATE_RESOURCE, text)
        elif one in request.upsertions and one.iterations < ITERATIONS_MIN:  # type: ignore[union-attr]
            error = (ErrorCode.UNACCEPTABLE_CREDENTIAL, "Too few iterations")
        elif one in request.upsertions and one.iterations > ITERATIONS_MAX:  # type: ignore[union-attr]
            error = (ErrorCode.UNACCEPTABLE_CREDENTIAL, "Too many iterations")
        else:
            seen.add((one.name, one.mechanism))
            continue
        errors.setdefault(one.name, error)
    return errors


def _credential(one: AlterUserScramCredentialsRequest.ScramCredentialUpsertion) -> ScramCredential:
    made = verifier_of(MECHANISMS[one.mechanism], bytes(one.salted_password), bytes(one.salt), one.iterations)
    return ScramCredential(one.name, one.mechanism, made.salt, made.iterations, made.stored_key, made.server_key)
