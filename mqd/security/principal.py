"""Principals such as "User:alice", the names of authenticated clients; and the rules that derive a
user's name from a certificate's subject (`ssl.principal.mapping.rules`, KIP-371) or from the login
name of a local process (`local.principal.mapping.rules`).

Rules are separated by commas; the first one that matches decides:

    RULE:pattern/replacement/   the whole name must match; $1 in the replacement is the first group
    RULE:pattern/replacement/L  as above, then converted to lower case (U: upper case)
    DEFAULT                     the name unchanged
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from mqd.base.config import broker_value
from mqd.base.property_values import ConfigError

USER = "User"
ANONYMOUS = "User:ANONYMOUS"
# The principal of local processes that run as the broker's own user. They have full control of the
# broker anyway, so this principal is always a super user. It has a type of its own, so that no
# client's principal can equal it.
BROKER = "Local:broker"
NAME_BYTES_MAX = 255


def user(name: str) -> str:
    """The principal of a user. Raises ValueError, with the reason."""
    if name in ("", "*"):
        raise ValueError(f"a user's name must not be {name!r}")
    if len(name.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
        raise ValueError(f"a user's name has at most {NAME_BYTES_MAX} bytes")
    if not name.isprintable():
        raise ValueError("a user's name has an unprintable character")
    return f"{USER}:{name}"


def parse(text: str) -> tuple[str, str]:
    """(type, name) of "User:alice". Raises ValueError."""
    kind, colon, name = text.partition(":")
    if not colon or not kind or not name:
        raise ValueError(f"expected a principal of the form type:name, such as User:alice, not {text!r}")
    return kind, name


def super_users(text: str) -> frozenset[str]:
    """The principals in the value of `super.users`, separated by semicolons. Raises ValueError."""
    principals = frozenset(filter(None, (part.strip() for part in text.split(";"))))
    for principal in principals:
        parse(principal)
    return principals


class MappingRule(NamedTuple):
    pattern: re.Pattern[str] | None  # None: DEFAULT
    replacement: str
    case_flag: str  # "", "L" (lower case), "U" (upper case)

    def apply(self, name: str) -> str | None:
        """The mapped name; None: the rule does not match."""
        if self.pattern is None:
            return name
        match = self.pattern.fullmatch(name)
        if match is None:
            return None
        mapped = _GROUP.sub(lambda group: match[int(group[1])] or "", self.replacement)
        return {"L": mapped.lower, "U": mapped.upper}.get(self.case_flag, mapped.__str__)()


_GROUP = re.compile(r"\$(\d)")
# As in Kafka: a slash in a pattern or replacement is written \/.
_RULE = re.compile(r"\s*(?:(DEFAULT)|RULE:((?:\\.|[^\\/])*)/((?:\\.|[^\\/])*)/([LU]?))\s*(?:,|$)")


def mapping_rules(text: str) -> tuple[MappingRule, ...]:
    """Parses rules; without any, names stay unchanged. Raises ValueError, which quotes the invalid
    rule.
    """
    rules: list[MappingRule] = []
    position = 0
    while position < len(text):
        match = _RULE.match(text, position)
        if match is None or match.end() == position:
            raise ValueError(f"expected RULE:pattern/replacement/[LU] or DEFAULT, not {text[position:]!r}")
        position = match.end()
        rules.append(MappingRule(None, "", "") if match[1] else _rule(match[2], match[3], match[4]))
    return tuple(rules) or (MappingRule(None, "", ""),)


def _rule(pattern: str, replacement: str, case_flag: str) -> MappingRule:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    for group in _GROUP.findall(replacement):
        if int(group) > compiled.groups:
            raise ValueError(f"${group} in {replacement!r}: {pattern!r} has {compiled.groups} groups")
    return MappingRule(compiled, replacement.replace("\\/", "/"), case_flag)


def local_rules(config: Mapping[str, str]) -> tuple[MappingRule, ...]:
    """The rules for local processes. Raises ConfigError."""
    name = "local.principal.mapping.rules"
    text = str(broker_value(config, name))
    try:
        return mapping_rules(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}", name, text) from None


def map_name(rules: tuple[MappingRule, ...], name: str) -> str | None:
    """The name as rewritten by the first rule that matches; None if no rule matches."""
    return next((result for rule in rules if (result := rule.apply(name)) is not None), None)
