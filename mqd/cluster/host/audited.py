"""The lines of logs/audit.log about changes to ACLs, users or tokens, as (event, fields)."""

from collections.abc import Iterator

from mqd.cluster.host import messages

AUDITED_CHANGES = (
    messages.CreateAcls,
    messages.DeleteAcls,
    messages.AlterScramCredentials,
    messages.CreateDelegationToken,
    messages.SetTokenExpiry,
)
Line = tuple[str, dict[str, str]]


def lines(change: messages.Change, response: messages.Response) -> Iterator[Line]:
    """Yields lines only for changes that were made according to the controller's response."""
    match change:
        case messages.CreateAcls():
            for binding in change.bindings if not response.error else ():
                yield "acl created", {"acl": str(binding)}
        case messages.DeleteAcls():
            for binding in sorted({binding for removed in response.removed_acls for binding in removed}):
                yield "acl removed", {"acl": str(binding)}
        case messages.AlterScramCredentials():
            for user in dict.fromkeys(one.user for one in response.users if not one.error):
                yield "password changed", {"user": user}
        case messages.CreateDelegationToken():
            if not response.error:
                yield "token created", {"owner": change.token.owner, "token": change.token.token_id}
        case messages.SetTokenExpiry():
            if not response.error and not response.token_error:
                yield "token renewed" if change.is_renewal else "token expired", {"token": change.token_id}
