"""The lines of logs/audit.log, (event, fields), for a change of rules, users or tokens."""

from collections.abc import Iterator

from mqd.cluster.host import messages

CHANGES = (
    messages.CreateAcls,
    messages.DeleteAcls,
    messages.AlterScramCredentials,
    messages.CreateDelegationToken,
    messages.SetTokenExpiry,
)
Line = tuple[str, dict[str, str]]


def lines(change: messages.Change, answer: messages.Answer) -> Iterator[Line]:
    """Only for changes that were made according to the controller's answer."""
    match change:
        case messages.CreateAcls():
            for binding in change.bindings if not answer.error else ():
                yield "acl created", {"acl": str(binding)}
        case messages.DeleteAcls():
            for binding in sorted({binding for removed in answer.removed_acls for binding in removed}):
                yield "acl removed", {"acl": str(binding)}
        case messages.AlterScramCredentials():
            for user in dict.fromkeys(one.user for one in answer.users if not one.error):
                yield "password changed", {"user": user}
        case messages.CreateDelegationToken():
            if not answer.error:
                yield "token created", {"owner": change.token.owner, "token": change.token.token_id}
        case messages.SetTokenExpiry():
            if not answer.error and not answer.token_error:
                yield "token renewed" if change.is_renewal else "token expired", {"token": change.token_id}
