"""Principals and the rules that map names to them."""

from __future__ import annotations

import pytest

from mqd.security import principal

DN = "CN=Alice,OU=Ops,O=Org,C=DE"


@pytest.mark.parametrize(
    ("rules", "name", "expected"),
    [
        ("", DN, DN),
        ("DEFAULT", DN, DN),
        (r"RULE:^CN=(.*?),OU=(.*?),.*$/$1@$2/", DN, "Alice@Ops"),
        (r"RULE:^CN=(.*?),OU=(.*?),.*$/$1@$2/L,DEFAULT", DN, "alice@ops"),
        (r"RULE:^CN=(.*?),.*$/$1/U", DN, "ALICE"),
        (r"RULE:^DN=.*$/x/, RULE:^CN=(.*?),.*$/$1/", DN, "Alice"),
        (r"RULE:^DN=.*$/x/", DN, None),
        (r"RULE:CN=Alice/x/", DN, None),  # the whole name
        (r"RULE:^a\/(.*)$/b\/$1/", "a/c", "b/c"),
        (r"RULE:(a)|(b)/$1$2/", "b", "b"),
    ],
)
def test_mapping_rules(rules: str, name: str, expected: str | None) -> None:
    assert principal.map_name(principal.mapping_rules(rules), name) == expected


@pytest.mark.parametrize("rules", ["x", "RULE:a", "RULE:(/x/", "RULE:a/$1/", "DEFAULT x", "RULE:a/b/X", ",DEFAULT"])
def test_wrong_rules_are_named(rules: str) -> None:
    with pytest.raises(ValueError, match="RULE:|regular expression|groups"):
        principal.mapping_rules(rules)


def test_users() -> None:
    assert principal.user("älice") == "User:älice"
    for wrong in ("", "*", "a\nb", "a\0", "x" * 256, "ä" * 128):
        with pytest.raises(ValueError, match="user's name"):
            principal.user(wrong)


def test_super_users() -> None:
    assert principal.super_users("User:a; User:CN=b,O=c;") == {"User:a", "User:CN=b,O=c"}
    assert principal.super_users("") == frozenset()
    with pytest.raises(ValueError, match="User:alice"):
        principal.super_users("alice")
