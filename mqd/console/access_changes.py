"""Changes to users, rules (ACLs) and quotas."""

from __future__ import annotations

import click

from mqd.cli import access
from mqd.cli.access import QuotaEntity
from mqd.cli.acl_text import rule_columns
from mqd.cli.common import CliError, Settings
from mqd.cli.verbs.quota import Rate
from mqd.console.changing import BadForm, Change, Form, command_of, required
from mqd.security import principal

USERS_PAGE, RULES_PAGE, QUOTAS_PAGE = (("/access", {"show": section}) for section in ("users", "rules", "quotas"))
RULE_FIELDS = ("principal", "permission", "operations", "resource", "host")
ENTITY_FIELDS = ("user", "client", "ip")
QUOTA_FIELDS = (*ENTITY_FIELDS, *access.QUOTA_KEYS)
DEFAULT = "<default>"


# -- users -----------------------------------------------------------------------------------------


def set_password(settings: Settings, form: Form) -> Change:
    name = required(form, "name", "a name for the user")
    try:
        user_principal = principal.user(name)
    except ValueError as error:
        raise BadForm(str(error)) from None
    exists = name in access.users(settings)

    def apply() -> str:
        password = access.generated_password()
        access.set_password(settings, name, access.SaltedPassword(password, is_generated=True))
        return password

    effects = ["A password is generated and shown once."]
    if exists:
        effects.append(
            f"{name} exists: its old password will stop working. Open connections stay until they must authenticate"
            " again."
        )
    else:
        effects.append(
            f"{user_principal} may only do what rules allow: nothing, unless there are rules for it or for all users."
        )
    return Change(
        f"{'Give a new password to' if exists else 'Create'} the user {name}?",
        command_of(settings, "user", "create", name, *(["--replace"] if exists else [])),
        effects,
        apply,
        f"{'Set the password of' if exists else 'Created'} the user {name}.",
        USERS_PAGE,
    )


def delete_user(settings: Settings, form: Form) -> Change:
    name = required(form, "name", "a user")
    access.require_user(settings, name)
    return Change(
        f"Delete the user {name}?",
        command_of(settings, "user", "delete", name),
        [
            "Its password will stop working. Rules that name it stay, and so do open connections until they must"
            " authenticate again."
        ],
        lambda: access.delete_user(settings, name),
        f"Deleted the user {name}.",
        USERS_PAGE,
        text_to_type=name,
        is_dangerous=True,
    )


# -- rules -----------------------------------------------------------------------------------------

_TITLES = ("Principal", "Permission", "Operation", "Resource", "From")


def _permission(form: Form) -> str:
    permission = form.get("permission", "allow")
    if permission not in ("allow", "deny"):
        raise BadForm(f"the permission must be allow or deny, not {permission!r}")
    return permission


def add_rule(settings: Settings, form: Form) -> Change:
    who = required(form, "principal", "a principal: alice, or * for every user")
    operations = required(form, "operations", "operations: read,write or all").replace(" ", "")
    resource = required(form, "resource", "a resource: topic/orders, topic/orders-*, group/*, cluster")
    host, permission = form.get("host", "").strip() or "*", _permission(form)
    try:
        rules = access.parse_rules(permission, who, operations, resource, host)
        existing = set(access.rules(settings, access.parse_filter(None, None, resource, None, None)))
    except ValueError as error:
        raise BadForm(str(error)) from None
    added = [rule for rule in rules if rule not in existing]
    arguments = [permission, who, operations, resource, *(["--from", host] if host != "*" else [])]
    effects = [f"{len(added)} rule{'s' * (len(added) != 1)} would be added."]
    if len(added) < len(rules):
        existing_count = len(rules) - len(added)
        effects.append(f"{existing_count} other rule{'s exist' if existing_count > 1 else ' exists'} already.")
    if permission == "deny":
        effects.append("The operations are refused even if other rules allow them.")
    return Change(
        f"{permission.capitalize()} {who} {operations} on {resource}?",
        command_of(settings, "acl", *arguments),
        effects,
        lambda: access.create_rules(settings, rules),
        f"{'Allowed' if permission == 'allow' else 'Denied'} {who} {operations} on {resource}.",
        RULES_PAGE,
        _TITLES,
        [rule_columns(rule) for rule in added],
        is_dangerous=permission == "deny",
    )


def remove_rule(settings: Settings, form: Form) -> Change:
    who, resource = required(form, "principal", "a principal"), required(form, "resource", "a resource")
    operation, host = required(form, "operations", "an operation"), form.get("host", "").strip() or "*"
    permission = _permission(form)
    try:
        rule_filter = access.parse_filter(who, operation, resource, host, permission)
    except ValueError as error:
        raise BadForm(str(error)) from None
    rules = access.rules(settings, rule_filter)
    if not rules:
        raise CliError("there is no such rule; another user may have removed it")

    def apply() -> None:
        if not access.remove_rules(settings, rule_filter):
            raise CliError("the rule no longer exists")

    arguments = [resource, "--principal", who, "--operation", operation, "--permission", permission, "--from", host]
    effects = ["The operations are refused, unless another rule allows them."]
    if permission == "deny":
        effects = ["The operations are allowed where another rule allows them."]
    return Change(
        "Remove the rule?" if len(rules) == 1 else f"Remove {len(rules)} rules?",
        command_of(settings, "acl", "remove", *arguments),
        effects,
        apply,
        f"Removed {len(rules)} rule{'s' * (len(rules) != 1)}.",
        RULES_PAGE,
        _TITLES,
        [rule_columns(rule) for rule in rules],
        is_dangerous=True,
    )


# -- quotas ----------------------------------------------------------------------------------------


def _entity(form: Form) -> tuple[QuotaEntity, list[str]]:
    """Returns the entity that the form names, and the arguments of `mqd quota` that select it."""
    entity: QuotaEntity = {}
    arguments: list[str] = []
    options = {"user": ("user", "--user", "--default-user"), "client": ("client-id", "", "--default"),
               "ip": ("ip", "--ip", "--default-ip")}  # fmt: skip
    for field, (kind, option, default) in options.items():
        name = form.get(field, "").strip()
        if not name:
            continue
        entity[kind] = None if name == DEFAULT else name
        arguments += [default] if name == DEFAULT else [option, name] if option else [name]
    if not entity:
        raise BadForm(f"name a user, a client id or an address; {DEFAULT} names the default")
    if "ip" in entity and len(entity) > 1:
        raise BadForm("a quota applies either to an address, or to a user and client")
    return entity, arguments


def _limit_value(name: str, text: str) -> float:
    try:
        if name in ("produce", "fetch"):
            return float(Rate().convert(text, None, None))
        value = float(text)
    except (click.UsageError, ValueError) as error:
        reason = error.message if isinstance(error, click.UsageError) else f"{text!r} is not a number"
        raise BadForm(f"{name}: {reason}") from None
    if not 0 < value < 1e15 or (name == "connections" and value != int(value)):
        raise BadForm(f"{name}: {text!r} is not a {'whole ' if name == 'connections' else ''}number above 0")
    return value


def set_quota(settings: Settings, form: Form) -> Change:
    entity, arguments = _entity(form)
    limits = {name: text for name in access.QUOTA_KEYS if (text := form.get(name, "").strip())}
    if not limits:
        raise BadForm("nothing to set; give one of the limits")
    values: dict[str, float | None] = {
        access.QUOTA_KEYS[name]: _limit_value(name, text) for name, text in limits.items()
    }
    access.set_quotas(settings, entity, values, dry_run=True)
    current_quotas = next((values for owner, values in access.quotas(settings, entity) if owner == entity), {})
    options = [word for name, text in limits.items() for word in (f"--{name}", text)]
    entity_name = access.entity_text(entity)
    return Change(
        f"Limit {entity_name}?",
        command_of(settings, "quota", "set", *arguments, *options),
        ["Clients above a limit are slowed down, not refused. Other limits stay unchanged."],
        lambda: access.set_quotas(settings, entity, values, dry_run=False),
        f"Limited {entity_name}.",
        QUOTAS_PAGE,
        ("Limit", "Now", "Then"),
        [
            (
                access.quota_label(name),
                access.quota_text(key, current_quotas.get(key)),
                access.quota_text(key, values[key]),
            )
            for name, key in access.QUOTA_KEYS.items()
            if key in values
        ],
    )


def delete_quota(settings: Settings, form: Form) -> Change:
    entity, arguments = _entity(form)
    keys = list(access.QUOTA_KEYS.values())
    removed = access.existing_quotas(settings, entity, keys)
    current_quotas = next((values for owner, values in access.quotas(settings, entity) if owner == entity), {})
    entity_name = access.entity_text(entity)

    def apply() -> None:
        access.remove_quotas(settings, entity, keys)

    return Change(
        f"Remove the quotas of {entity_name}?",
        command_of(settings, "quota", "delete", *arguments),
        ["It is no longer limited, unless by a default."],
        apply,
        f"Removed the quotas of {entity_name}.",
        QUOTAS_PAGE,
        ("Limit", "Now"),
        [
            (access.quota_label(name), access.quota_text(key, current_quotas.get(key)))
            for name, key in access.QUOTA_KEYS.items()
            if key in removed
        ],
        is_dangerous=True,
    )
