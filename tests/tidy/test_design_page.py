"""docs/design/cluster.md: every rule that the code cites is there, and the files it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "design" / "cluster.md").read_text()
NAMED = sorted(set(re.findall(r"`((?:native|mqd|tests)/[\w/.]+)`", PAGE)))
ROOMS = ("native/replica", "mqd/cluster")


def cited() -> dict[str, str]:
    """Each replication rule cited in these folders, and where. Other folders number their own."""
    found: dict[str, str] = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix in {".py", ".c", ".h"}:
                for rule in re.findall(r"(?<![\w-])R(\d+b?)\b", path.read_text()):
                    found.setdefault(f"R{rule}", str(path.relative_to(ROOT)))
    return found


def test_every_rule_that_the_code_cites_is_on_the_page() -> None:
    rules = cited()
    assert len(rules) > 10
    assert not {rule: path for rule, path in rules.items() if f"| {rule} |" not in PAGE}


@pytest.mark.parametrize("name", NAMED)
def test_files_named_on_the_page_exist(name: str) -> None:
    assert (ROOT / name).exists()
