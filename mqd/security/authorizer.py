"""Authorizes the operations of principals by the rules of Kafka's StandardAuthorizer.

1. A super user may do everything.
2. A rule applies if its principal is the caller or `User:*`, its host is the caller's or `*`, and
   its pattern matches the resource: the literal name, a prefix of it, or the literal `*`.
3. If a rule that applies denies the operation, or all operations, the operation is denied.
4. Otherwise, if a rule that applies allows the operation, all operations, or an operation that
   implies this one (acl.ALLOWED_BY), the operation is allowed.
5. Otherwise it is denied, unless allow.everyone.if.no.acl.found is true and no rule of any
   principal names the resource.

For each principal and host the rules of one resource type are compiled into a RightsTable, which
the reactor gets too (subject.py).

If the host is not known (""), all DENY rules apply, whatever their host, but only those ALLOW rules
whose host is `*`.

Invariants
    A1  a RightsTable is never older than the rules: every change of rules drops all tables
    A2  `generation` rises with every change of rules
Bounds: TABLES_MAX compiled tables; at this number all are dropped. They are compiled on demand.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mqd.base.config import broker_value
from mqd.security.acl import (
    ALLOWED_BY,
    EVERY_USER,
    WILDCARD,
    AclBinding,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    canonical_host,
)
from mqd.security.principal import BROKER, super_users
from mqd.security.rights_table import EVERYTHING, RightsTable, compile_table

TABLES_MAX = 4096
# Stands for a resource that no rule names; Kafka uses the same name for this.
_UNNAMED = "hardcode"


class Verdict(NamedTuple):
    """A decision with its reason, for human readers."""

    is_allowed: bool
    reason: str
    binding: AclBinding | None = None


def from_config(config: Mapping[str, str]) -> "Authorizer | None":
    """The authorizer that the broker's properties configure; None: everything is allowed."""
    if not broker_value(config, "authorizer.class.name"):
        return None
    return Authorizer(
        {*super_users(str(broker_value(config, "super.users"))), BROKER},
        bool(broker_value(config, "allow.everyone.if.no.acl.found")),
    )


class Authorizer:
    """Rules by id, and the settings `super.users` and `allow.everyone.if.no.acl.found`."""

    def __init__(self, super_users: Iterable[str] = (), allow_everyone: bool = False) -> None:
        self.super_users = frozenset(super_users)
        self.allow_everyone = allow_everyone
        self.generation = 0
        self.bindings: dict[bytes, AclBinding] = {}
        self._by_principal: dict[str, dict[bytes, AclBinding]] = {}
        # (resource type, pattern type, name) -> number of rules
        self._patterns: Counter[tuple[int, int, str]] = Counter()
        self._tables: dict[tuple[str, str, int], RightsTable] = {}

    # -- rules -------------------------------------------------------------------------------------

    def replace(self, bindings: Mapping[bytes, AclBinding]) -> None:
        self.bindings.clear()
        self._by_principal.clear()
        self._patterns.clear()
        self.change(bindings, ())

    def change(self, put: Mapping[bytes, AclBinding], removed: Iterable[bytes]) -> None:
        """Removes rules, then adds some. A removed id that is not known is ignored; an added rule
        replaces the rule with the same id.
        """
        for acl_id in [*removed, *put]:
            old = self.bindings.pop(acl_id, None)
            if old is not None:
                self._unindex(acl_id, old)
        for acl_id, binding in put.items():
            self.bindings[acl_id] = binding
            self._by_principal.setdefault(binding.principal, {})[acl_id] = binding
            self._patterns[binding.resource_type, binding.pattern_type, binding.name] += 1
        self._tables.clear()
        self.generation += 1

    def _unindex(self, acl_id: bytes, binding: AclBinding) -> None:
        principal_rules = self._by_principal[binding.principal]
        del principal_rules[acl_id]
        if not principal_rules:
            del self._by_principal[binding.principal]
        key = (binding.resource_type, binding.pattern_type, binding.name)
        self._patterns[key] -= 1
        if not self._patterns[key]:
            del self._patterns[key]

    def matching(self, acl_filter: AclFilter) -> dict[bytes, AclBinding]:
        candidates = self.bindings
        if acl_filter.principal is not None:
            candidates = self._by_principal.get(acl_filter.principal, {})
        return {acl_id: binding for acl_id, binding in candidates.items() if acl_filter.matches(binding)}

    # -- decisions ---------------------------------------------------------------------------------

    def allows(self, principal: str, host: str, operation: int, resource_type: int, name: str) -> bool:
        return bool(self.table(principal, host, resource_type).mask(name) >> operation & 1)

    def allowed_operations(self, principal: str, host: str, resource_type: int, name: str) -> int:
        """The allowed operations, as a mask (KIP-430)."""
        return self.table(principal, host, resource_type).mask(name)

    def allows_any(self, principal: str, host: str, operation: int, resource_type: int) -> bool:
        """Whether the operation is allowed on at least one resource of the type (KIP-679). As in
        Kafka, this check does not consider operations that imply another.
        """
        if self.allows(principal, host, operation, resource_type, _UNNAMED):
            return True
        denied: dict[int, set[str]] = {PatternType.LITERAL: set(), PatternType.PREFIXED: set()}
        allowed: list[AclBinding] = []
        for binding in self._rules_for(principal, host, resource_type):
            if binding.operation not in (operation, Operation.ALL):
                continue
            if binding.permission == Permission.ALLOW:
                allowed.append(binding)
            elif binding.pattern_type == PatternType.LITERAL and binding.name == WILDCARD:
                return False
            else:
                denied[binding.pattern_type].add(binding.name)
        return any(not _is_dominated(binding, denied) for binding in allowed)

    def explain(self, principal: str, host: str, operation: int, resource_type: int, name: str) -> Verdict:
        """The decision of allows(), with the rule that determines it."""
        if principal in self.super_users:
            return Verdict(True, f"{principal} is a super user")
        allowing_rule: AclBinding | None = None
        for binding in sorted(self._rules_for(principal, host, resource_type)):
            if not binding.covers(name):
                continue
            if binding.permission == Permission.DENY and binding.operation in (operation, Operation.ALL):
                return Verdict(False, "a rule denies it", binding)
            if binding.permission == Permission.ALLOW and ALLOWED_BY.get(binding.operation, 0) >> operation & 1:
                allowing_rule = allowing_rule or binding
        if allowing_rule is not None:
            return Verdict(True, "a rule allows it", allowing_rule)
        if self.allow_everyone and not self._any_rule_covers(resource_type, name):
            return Verdict(True, "no rule names the resource, and allow.everyone.if.no.acl.found is true")
        return Verdict(False, "no rule allows it")

    def table(self, principal: str, host: str, resource_type: int) -> RightsTable:
        if principal in self.super_users:
            return EVERYTHING
        key = (principal, host, resource_type)
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= TABLES_MAX:
                self._tables.clear()
            table = self._tables[key] = compile_table(
                self._rules_for(principal, host, resource_type), self._patterns_of(resource_type), self.allow_everyone
            )
        return table

    # -- lookups ----------------------------------------------------------------------------------

    def _rules_for(self, principal: str, host: str, resource_type: int) -> list[AclBinding]:
        """The rules for this principal and host on resources of the type."""
        host = canonical_host(host)
        return [
            binding
            for name in dict.fromkeys((principal, EVERY_USER))
            for binding in self._by_principal.get(name, {}).values()
            if binding.resource_type == resource_type
            and (
                binding.host == WILDCARD
                or canonical_host(binding.host) == host
                or (not host and binding.permission == Permission.DENY)
            )
        ]

    def _patterns_of(self, resource_type: int) -> list[tuple[int, str]]:
        """(pattern type, name) of every rule of the type; used only with
        allow.everyone.if.no.acl.found.
        """
        if not self.allow_everyone:
            return []
        return [(pattern_type, name) for kind, pattern_type, name in self._patterns if kind == resource_type]

    def _any_rule_covers(self, resource_type: int, name: str) -> bool:
        patterns = self._patterns
        return (
            (resource_type, PatternType.LITERAL, name) in patterns
            or (resource_type, PatternType.LITERAL, WILDCARD) in patterns
            or any((resource_type, PatternType.PREFIXED, name[:end]) in patterns for end in range(1, len(name) + 1))
        )


def _is_dominated(binding: AclBinding, denied: Mapping[int, set[str]]) -> bool:
    """Whether DENY rules cover everything that an ALLOW rule allows."""
    name = binding.name
    if binding.pattern_type == PatternType.LITERAL:
        if name == WILDCARD:
            return False
        if name in denied[PatternType.LITERAL]:
            return True
    prefixes = denied[PatternType.PREFIXED]
    return bool(prefixes) and any(name[:end] in prefixes for end in range(1, len(name) + 1))
