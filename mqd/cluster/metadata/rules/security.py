"""Rules for access control lists (KIP-140) and users' credentials (KIP-554).

Pure functions of the state and the change, as in topics.py; Refusal carries Kafka's error code.
What is wrong with a rule or a filter in itself is refused before, in the acceptor.
"""

from collections.abc import Callable

from mqd.cluster.host import messages
from mqd.cluster.metadata.limits import SCRAM_CREDENTIAL_COUNT_MAX, check_acls
from mqd.cluster.metadata.records import (
    AclCreated,
    AclRemoved,
    Record,
    ScramCredential,
    ScramCredentialRemoved,
    ScramCredentialSet,
)
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.state import MetadataState
from mqd.protocol.errors import ErrorCode
from mqd.security.acl import AclBinding, Operation, PatternType, Permission, ResourceType

CHANGES_MAX = 100_000  # rules, or filters, of one request
USER_BYTES_MAX = 255
_Decided = tuple[messages.Answer, str | None, list[Record]]


def create_acls(state: MetadataState, change: messages.CreateAcls, new_id: Callable[[], bytes]) -> list[Record]:
    bindings = [binding for binding in dict.fromkeys(change.bindings) if binding not in state.acl_ids]
    for binding in bindings:
        _check(binding)
    check_acls(state, bindings)
    return [AclCreated(new_id(), binding) for binding in bindings]


def _check(binding: AclBinding) -> None:
    """What no state may hold, whatever sent it."""
    if (
        binding.resource_type not in ResourceType.__members__.values()
        or binding.resource_type in (ResourceType.UNKNOWN, ResourceType.ANY)
        or binding.pattern_type not in (PatternType.LITERAL, PatternType.PREFIXED)
        or binding.operation not in Operation.__members__.values()
        or binding.operation in (Operation.UNKNOWN, Operation.ANY)
        or binding.permission not in (Permission.ALLOW, Permission.DENY)
        or not binding.name
    ):
        raise Refusal(ErrorCode.INVALID_REQUEST, f"This is not a rule: {binding}.")


def delete_acls(state: MetadataState, change: messages.DeleteAcls, number: int) -> _Decided:
    if len(change.filters) > CHANGES_MAX:
        raise Refusal(ErrorCode.INVALID_REQUEST, f"At most {CHANGES_MAX} filters in one request.")
    removed: list[list[AclBinding]] = []
    records: dict[bytes, Record] = {}
    for acl_filter in change.filters:
        matched = [(acl_id, binding) for acl_id, binding in state.acls.items() if acl_filter.matches(binding)]
        removed.append([binding for _, binding in matched])
        records.update((acl_id, AclRemoved(acl_id)) for acl_id, _ in matched)
    return messages.Answer(number, 0, removed_acls=removed), None, list(records.values())


def alter_scram_credentials(state: MetadataState, change: messages.AlterScramCredentials, number: int) -> _Decided:
    results: list[messages.UserResult] = []
    records: list[Record] = []
    count = len(state.scram_credentials)
    for user, mechanism in change.removals:
        if (user, mechanism) not in state.scram_credentials:
            text = "Attempt to delete a user credential that does not exist"
            results.append(messages.UserResult(user, int(ErrorCode.RESOURCE_NOT_FOUND), text))
            continue
        count -= 1
        records.append(ScramCredentialRemoved(user, mechanism))
        results.append(messages.UserResult(user))
    for credential in change.settings:
        _check_credential(credential)
        count += (credential.user, credential.mechanism) not in state.scram_credentials
        records.append(ScramCredentialSet(credential))
        results.append(messages.UserResult(credential.user))
    if count > SCRAM_CREDENTIAL_COUNT_MAX:
        raise Refusal(
            ErrorCode.POLICY_VIOLATION,
            f"There would be {count} credentials; {SCRAM_CREDENTIAL_COUNT_MAX} are the most.",
        )
    return messages.Answer(number, 0, users=results), None, records


def _check_credential(credential: ScramCredential) -> None:
    if not 0 < len(credential.user.encode()) <= USER_BYTES_MAX:
        raise Refusal(ErrorCode.UNACCEPTABLE_CREDENTIAL, f"A user's name has 1 to {USER_BYTES_MAX} bytes.")
    if max(map(len, (credential.salt, credential.stored_key, credential.server_key))) > USER_BYTES_MAX:
        raise Refusal(ErrorCode.UNACCEPTABLE_CREDENTIAL, f"A salt has at most {USER_BYTES_MAX} bytes.")
