"""Rules in words, formatted and parsed."""

from __future__ import annotations

import pytest

from mqd.cli import acl_text
from mqd.security.acl import AclBinding, Operation, PatternType, Permission, ResourceType

LITERAL, PREFIXED = PatternType.LITERAL, PatternType.PREFIXED


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("topic/orders", (ResourceType.TOPIC, LITERAL, "orders")),
        ("topic/orders-*", (ResourceType.TOPIC, PREFIXED, "orders-")),
        ("topic/*", (ResourceType.TOPIC, LITERAL, "*")),
        ("group/a/b", (ResourceType.GROUP, LITERAL, "a/b")),
        ("cluster", (ResourceType.CLUSTER, LITERAL, "kafka-cluster")),
        ("transactional-id/日本*", (ResourceType.TRANSACTIONAL_ID, PREFIXED, "日本")),
        ("user/alice", (ResourceType.USER, LITERAL, "User:alice")),
        ("user/Group:a", (ResourceType.USER, LITERAL, "Group:a")),
        ("user/al*", (ResourceType.USER, PREFIXED, "User:al")),
        ("user/*", (ResourceType.USER, LITERAL, "*")),
    ],
)
def test_resources(word: str, found: tuple[ResourceType, PatternType, str]) -> None:
    assert acl_text.parse_resource(word) == found
    rule = AclBinding(*found, "User:a", "*", Operation.ALL, Permission.ALLOW)
    assert acl_text.rule_columns(rule) == ("User:a", "allow", "all", word, "*")


def test_a_user_is_a_principal() -> None:
    assert acl_text.parse_resource("user/User:alice") == acl_text.parse_resource("user/alice")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("topic", "does not name a topic"),
        ("topic/", "does not name a topic"),
        ("queue/a", "not a resource"),
        ("cluster/x", "one cluster"),
    ],
)
def test_invalid_resources(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        acl_text.parse_resource(word)


def test_operations_and_principals() -> None:
    assert acl_text.parse_operations("read,WRITE,describe-configs,read", ResourceType.TOPIC) == [3, 4, 10]
    assert acl_text.parse_operations("all", ResourceType.CLUSTER) == [Operation.ALL]
    with pytest.raises(ValueError, match="'fly' is not an operation"):
        acl_text.parse_operations("read,fly", ResourceType.TOPIC)
    with pytest.raises(ValueError, match="a group has no operation write; it has read, delete"):
        acl_text.parse_operations("write", ResourceType.GROUP)
    assert acl_text.parse_principal("alice") == "User:alice" and acl_text.parse_principal("*") == "User:*"
    assert acl_text.parse_principal("User:CN=a") == "User:CN=a"
