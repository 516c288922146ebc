"""Rules for access control lists (KIP-140) and users' credentials (KIP-554).

Pure functions of the state and the change, as in topics.py; Refusal carries Kafka's error code.
The acceptor has already refused rules and filters that are invalid in any state.
"""

from collections.abc import Callable

from mqd.cluster.host import messages
from mqd.cluster.metadata.limits import SCRAM_CREDENTIAL_COUNT_MAX, check_acls
from mqd.cluster.metadata.records import (
    AclCreated,
    AclRemoved,
    BrokerConfigured,
    Record,
    ScramCredential,
    ScramCredentialRemoved,
    ScramCredentialSet,
)
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.state import MetadataState
from mqd.protocol.errors import ErrorCode
from mqd.security import scram
from mqd.security.acl import AclBinding, Operation, PatternType, Permission, ResourceType

CHANGES_MAX = 100_000  # rules, or filters, in one request
COMPARISONS_MAX = 1_000_000  # these take about a second; the controller's lease is longer (1.5 s by default)
USER_BYTES_MAX = 255
SCRAM_MECHANISMS = frozenset(scram.MECHANISM_NUMBERS.values())
_Decision = tuple[messages.Response, str | None, list[Record]]


def create_acls(state: MetadataState, change: messages.CreateAcls, new_id: Callable[[], bytes]) -> list[Record]:
    bindings = [binding for binding in dict.fromkeys(change.bindings) if binding not in state.acl_ids]
    for binding in bindings:
        _check_binding(binding)
    check_acls(state, bindings)
    return [AclCreated(new_id(), binding) for binding in bindings]


def _check_binding(binding: AclBinding) -> None:
    """Refuses rules that are invalid in any state, independently of the acceptor's check."""
    if (
        binding.resource_type not in ResourceType.__members__.values()
        or binding.resource_type in (ResourceType.UNKNOWN, ResourceType.ANY)
        or binding.pattern_type not in (PatternType.LITERAL, PatternType.PREFIXED)
        or binding.operation not in Operation.__members__.values()
        or binding.operation in (Operation.UNKNOWN, Operation.ANY)
        or binding.permission not in (Permission.ALLOW, Permission.DENY)
        or not binding.name
    ):
        raise Refusal(ErrorCode.INVALID_REQUEST, f"This is not a valid rule: {binding}.")


def delete_acls(state: MetadataState, change: messages.DeleteAcls, request_id: int) -> _Decision:
    if len(change.filters) > CHANGES_MAX:
        raise Refusal(
            ErrorCode.INVALID_REQUEST,
            f"The request has {len(change.filters)} filters; at most {CHANGES_MAX} are allowed.",
        )
    only_matches = [acl_filter.only_match() for acl_filter in change.filters]
    if only_matches.count(None) * len(state.acls) > COMPARISONS_MAX:
        raise Refusal(
            ErrorCode.POLICY_VIOLATION,
            f"{only_matches.count(None)} filters with wildcards in one request are too many for {len(state.acls)}"
            f" rules; send at most {max(1, COMPARISONS_MAX // len(state.acls))}, or filters that set every field.",
        )
    removed: list[list[AclBinding]] = []
    records: dict[bytes, Record] = {}
    for acl_filter, only_match in zip(change.filters, only_matches, strict=True):
        if only_match is None:
            matched = [(acl_id, binding) for acl_id, binding in state.acls.items() if acl_filter.matches(binding)]
        else:
            matched = [(state.acl_ids[only_match], only_match)] if only_match in state.acl_ids else []
        removed.append([binding for _, binding in matched])
        records.update((acl_id, AclRemoved(acl_id)) for acl_id, _ in matched)
    return messages.Response(request_id, 0, removed_acls=removed), None, list(records.values())


def alter_scram_credentials(state: MetadataState, change: messages.AlterScramCredentials, request_id: int) -> _Decision:
    """If one change to a user has an error, none of that user's changes is made. Returns the results as
    in Kafka: one for each change that is made, one for each user with an error.
    """
    errors: dict[str, tuple[ErrorCode, str]] = {}
    removals: set[tuple[str, int]] = set()
    settings: dict[tuple[str, int], ScramCredential] = {}
    for user, mechanism in change.removals:
        if user in errors:
            continue
        error = _name_error(user, mechanism)
        if (user, mechanism) in removals:
            error = _ALTERED_TWICE
        elif error is None and (user, mechanism) not in state.scram_credentials:
            error = (ErrorCode.RESOURCE_NOT_FOUND, "Attempt to delete a user credential that does not exist")
        if error is not None:
            errors[user] = error
        removals.add((user, mechanism))
    for credential in change.settings:
        user, key = credential.user, (credential.user, credential.mechanism)
        if user in errors:
            continue
        error = (
            _ALTERED_TWICE if key in removals or key in settings else _name_error(*key) or _credential_error(credential)
        )
        if error is not None:
            errors[user] = error
        settings[key] = credential
    records: list[Record] = [ScramCredentialRemoved(*key) for key in sorted(removals) if key[0] not in errors]
    records += [ScramCredentialSet(credential) for credential in settings.values() if credential.user not in errors]
    all_brokers_config = state.broker_configs.get("", {})
    if settings and change.decoy_secret and scram.DECOY_SECRET_PROPERTY not in all_brokers_config:
        records.append(BrokerConfigured("", {**all_brokers_config, scram.DECOY_SECRET_PROPERTY: change.decoy_secret}))
    new_count = sum(
        key not in state.scram_credentials for key, credential in settings.items() if credential.user not in errors
    )
    if len(state.scram_credentials) + new_count > SCRAM_CREDENTIAL_COUNT_MAX:
        raise Refusal(
            ErrorCode.POLICY_VIOLATION,
            f"There would be {len(state.scram_credentials) + new_count} credentials; the maximum is"
            f" {SCRAM_CREDENTIAL_COUNT_MAX}.",
        )
    results = [messages.UserResult(user) for user, _ in sorted(removals) if user not in errors]
    results += [
        messages.UserResult(credential.user) for credential in settings.values() if credential.user not in errors
    ]
    results += [messages.UserResult(user, int(error), text) for user, (error, text) in errors.items()]
    return messages.Response(request_id, 0, users=results), None, records


_Error = tuple[ErrorCode, str]
_ALTERED_TWICE: _Error = (ErrorCode.DUPLICATE_RESOURCE, "A user credential cannot be altered twice in the same request")


def _name_error(user: str, mechanism: int) -> _Error | None:
    if not user:
        return ErrorCode.UNACCEPTABLE_CREDENTIAL, "Username must not be empty"
    if mechanism not in SCRAM_MECHANISMS:
        return ErrorCode.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism"
    return None


def _credential_error(credential: ScramCredential) -> _Error | None:
    if credential.iterations < scram.ITERATIONS_MIN:
        return ErrorCode.UNACCEPTABLE_CREDENTIAL, "Too few iterations"
    if credential.iterations > scram.ITERATIONS_MAX:
        return ErrorCode.UNACCEPTABLE_CREDENTIAL, "Too many iterations"
    if len(credential.user.encode()) > USER_BYTES_MAX:
        return ErrorCode.UNACCEPTABLE_CREDENTIAL, f"A user's name must have at most {USER_BYTES_MAX} bytes"
    if max(map(len, (credential.salt, credential.stored_key, credential.server_key))) > USER_BYTES_MAX:
        return ErrorCode.UNACCEPTABLE_CREDENTIAL, f"A salt or key must have at most {USER_BYTES_MAX} bytes"
    return None
