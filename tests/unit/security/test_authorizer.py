"""The authorizer compared with the simplest decision (reference.py), in Python and in the reactor's
table.
"""

from __future__ import annotations

import random
import struct

import pytest

from mqd.security.acl import AclBinding, AclFilter, Operation, PatternType, Permission, ResourceType
from mqd.security.authorizer import Authorizer
from mqd.security.subject import compile_subject
from tests.tiers import quick
from tests.unit.security import reference
from tests.unit.security.reference import HOSTS, NAMES, OPERATIONS, PRINCIPALS, TYPES, random_binding

TOPIC, LITERAL, PREFIXED = ResourceType.TOPIC, PatternType.LITERAL, PatternType.PREFIXED


def authorizer_of(*bindings: AclBinding, allow_everyone: bool = False, super_users: tuple[str, ...] = ()) -> Authorizer:
    made = Authorizer(super_users, allow_everyone)
    made.replace({index.to_bytes(16): binding for index, binding in enumerate(bindings)})
    return made


def allow(operation: int, name: str, pattern_type: int = LITERAL, principal: str = "User:alice") -> AclBinding:
    return AclBinding(TOPIC, pattern_type, name, principal, "*", operation, Permission.ALLOW)


def mask_in_bytes(table: bytes, name: bytes) -> int:
    """The lookup as described in rights_table.py, using only the bytes."""
    size, literal_count, prefix_count, default, _ = struct.unpack_from("<IIIHH", table)
    assert size == len(table)

    def entry(index: int) -> tuple[bytes, int, int]:
        offset, parent, length, mask, _ = struct.unpack_from("<IIHHI", table, 16 + 16 * index)
        return table[offset : offset + length], parent, mask

    entries = [entry(index) for index in range(literal_count + prefix_count)]
    literals, prefixes = entries[:literal_count], entries[literal_count:]
    assert literals == sorted(literals) and prefixes == sorted(prefixes)
    for known, _, mask in literals:
        if known == name:
            return mask
    index = max((place for place, (prefix, _, _) in enumerate(prefixes) if prefix <= name), default=0xFFFFFFFF)
    while index != 0xFFFFFFFF:
        prefix, parent, mask = prefixes[index]
        if name.startswith(prefix):
            return mask
        assert parent == 0xFFFFFFFF or parent < index
        index = parent
    return default


@pytest.mark.parametrize("seed", quick(range(60), range(15)))
def test_random_rules(seed: int) -> None:
    """Checked through every interface: Python, the bytes, the explanation."""
    chance = random.Random(seed)
    bindings = [random_binding(chance) for _ in range(chance.randrange(40))]
    supers, allow_everyone = {"User:admin"}, seed % 2 == 0
    made = authorizer_of(*bindings, allow_everyone=allow_everyone, super_users=("User:admin",))
    for _ in range(400):
        principal, host = chance.choice([*PRINCIPALS, "User:admin", "User:x"]), chance.choice(HOSTS)
        operation, kind = chance.choice(OPERATIONS), chance.choice(TYPES)
        name = chance.choice([*NAMES, "z", "abcd", "日"])
        expected = reference.decide(bindings, supers, allow_everyone, principal, host, operation, kind, name)
        assert made.allows(principal, host, operation, kind, name) is expected, (principal, host, operation, name)
        assert made.explain(principal, host, operation, kind, name).is_allowed is expected
        subject = compile_subject(made, principal, host)
        tables = (
            (TOPIC, subject.topics),
            (ResourceType.TRANSACTIONAL_ID, subject.transactional_ids),
            (ResourceType.GROUP, subject.groups),
        )
        for kind, table in tables:
            expected = reference.decide(bindings, supers, allow_everyone, principal, host, operation, kind, name)
            assert bool(mask_in_bytes(table, name.encode()) >> operation & 1) is expected


@pytest.mark.parametrize("seed", range(20))
def test_changes_equal_a_rebuild(seed: int) -> None:
    chance = random.Random(seed)
    made, expected = Authorizer(allow_everyone=True), {}
    for _ in range(60):
        put = {chance.randrange(30).to_bytes(16): random_binding(chance) for _ in range(chance.randrange(4))}
        removed = [chance.randrange(30).to_bytes(16) for _ in range(chance.randrange(3))]
        before = made.generation
        made.change(put, removed)
        expected = {acl_id: binding for acl_id, binding in expected.items() if acl_id not in removed} | put
        assert made.generation > before and made.bindings == expected
        fresh = Authorizer(allow_everyone=True)
        fresh.replace(expected)
        for _ in range(20):
            question = (chance.choice(PRINCIPALS), chance.choice(HOSTS), chance.choice(OPERATIONS), TOPIC)
            name = chance.choice(NAMES)
            assert made.allows(*question, name) == fresh.allows(*question, name)
            assert made.allows_any(*question) == fresh.allows_any(*question)
    made.replace({})
    assert not made._patterns and not made._by_principal


def test_reading_implies_describing_but_denying_it_does_not() -> None:
    made = authorizer_of(allow(Operation.READ, "a"))
    assert made.allows("User:alice", "1.2.3.4", Operation.DESCRIBE, TOPIC, "a")
    assert not made.allows("User:alice", "1.2.3.4", Operation.WRITE, TOPIC, "a")
    denying = AclBinding(TOPIC, LITERAL, "a", "User:alice", "*", Operation.READ, Permission.DENY)
    made = authorizer_of(allow(Operation.ALL, "a"), denying)
    assert made.allows("User:alice", "1.2.3.4", Operation.DESCRIBE, TOPIC, "a")
    assert not made.allows("User:alice", "1.2.3.4", Operation.READ, TOPIC, "a")


def test_any_resource_of_a_type() -> None:
    """KIP-679; a denial that covers everything allowed leaves nothing."""
    write = ("User:alice", "1.2.3.4", Operation.WRITE, TOPIC)
    assert not authorizer_of().allows_any(*write)
    assert authorizer_of(allow(Operation.WRITE, "a")).allows_any(*write)
    assert authorizer_of(allow(Operation.ALL, "*")).allows_any(*write)
    assert not authorizer_of(allow(Operation.READ, "a")).allows_any(*write)
    for name, pattern_type in (("*", LITERAL), ("a", PREFIXED), ("abc", LITERAL)):
        denial = AclBinding(TOPIC, pattern_type, name, "User:*", "*", Operation.WRITE, Permission.DENY)
        assert not authorizer_of(allow(Operation.WRITE, "abc"), denial).allows_any(*write)
    denial = AclBinding(TOPIC, PREFIXED, "abcd", "User:*", "*", Operation.ALL, Permission.DENY)
    assert authorizer_of(allow(Operation.WRITE, "abc", PREFIXED), denial).allows_any(*write)


def test_all_spellings_of_an_address_match() -> None:
    rule = AclBinding(TOPIC, LITERAL, "a", "User:alice", "2001:db8:0:0:0:0:0:1", Operation.READ, Permission.ALLOW)
    made = authorizer_of(rule, AclBinding(TOPIC, LITERAL, "b", "User:alice", "10.0.0.1", 3, Permission.ALLOW))
    assert made.allows("User:alice", "2001:db8::1", Operation.READ, TOPIC, "a")
    assert not made.allows("User:alice", "2001:db8::2", Operation.READ, TOPIC, "a")
    assert made.allows("User:alice", "::ffff:10.0.0.1", Operation.READ, TOPIC, "b")


def test_ten_thousand_rules_of_one_principal() -> None:
    """A chain of prefixes of each other, the longest possible, and many names beside it."""
    chain = [allow(Operation.READ, "p" * size, PREFIXED) for size in range(1, 250)]
    made = authorizer_of(*chain, *(allow(Operation.WRITE, f"t{index}") for index in range(10_000)))
    assert made.allows("User:alice", "", Operation.READ, TOPIC, "p" * 300)
    assert made.allows("User:alice", "", Operation.WRITE, TOPIC, "t9999")
    assert not made.allows("User:alice", "", Operation.WRITE, TOPIC, "t10000")
    table = compile_subject(made, "User:alice", "").topics
    assert mask_in_bytes(table, b"p" * 300) == made.allowed_operations("User:alice", "", TOPIC, "p" * 300)


@pytest.mark.parametrize(
    ("acl_filter", "found"),
    [
        (AclFilter(), ["a", "ab", "*", "p"]),
        (AclFilter(name="ab"), ["ab"]),
        (AclFilter(pattern_type=PatternType.MATCH, name="ab"), ["ab", "*", "p"]),
        (AclFilter(pattern_type=PatternType.MATCH, name="x"), ["*"]),
        (AclFilter(pattern_type=LITERAL), ["a", "ab", "*"]),
        (AclFilter(pattern_type=PREFIXED, name="a"), ["p"]),
        (AclFilter(principal="User:bob"), ["*"]),
        (AclFilter(operation=Operation.WRITE), ["ab"]),
        (AclFilter(permission=Permission.DENY), []),
        (AclFilter(resource_type=ResourceType.GROUP), []),
        (AclFilter(host="10.0.0.1"), []),
    ],
)
def test_filters(acl_filter: AclFilter, found: list[str]) -> None:
    rules = {
        b"a": allow(Operation.READ, "a"),
        b"ab": allow(Operation.WRITE, "ab"),
        b"*": allow(Operation.READ, "*", principal="User:bob"),
        b"p": allow(Operation.READ, "a", PREFIXED),
    }
    made = Authorizer()
    made.replace(rules)
    assert list(made.matching(acl_filter)) == [name.encode() for name in found]


def test_a_verdict_names_the_rule() -> None:
    made = authorizer_of(allow(Operation.READ, "a", PREFIXED), super_users=("User:root",))
    verdict = made.explain("User:alice", "1.2.3.4", Operation.READ, TOPIC, "abc")
    assert str(verdict.binding) == "ALLOW User:alice READ on TOPIC prefix a from *"
    assert "super user" in made.explain("User:root", "1.2.3.4", Operation.READ, TOPIC, "abc").reason
    assert made.explain("User:bob", "1.2.3.4", Operation.READ, TOPIC, "abc") == (False, "no rule allows it", None)
