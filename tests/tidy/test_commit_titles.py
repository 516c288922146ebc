"""Titles of commits: `area: what changes`, at most 72 characters; the reason is in the body."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SINCE = "797f2db182a90cb439f56c403c6d9c060c19afea"  # older ones are not checked
# too long; they were pushed before the check had passed, and other commits followed them
TOO_LONG = frozenset(
    {
        "c2bb8c028172a497dc521d4f4987001d04f74861",
        "d14876019b691defd06c8f6ce0a04ca410b5e5f5",
        "bf388c4bc7d81a9069021eba1011452328ccedbb",
        "65776fe70224ad7d08dbc649a75ff81b1e9979e6",
        "5b2948623b92d925a904633a96546364d4cdf416",
        "753cb87059bc3c9e69dd375c544c2dd6402b6d10",
        "4a08562336e03115f488ada807009a03ebc56ce9",
    }
)
LENGTH_MAX = 72
FORM = re.compile(r"[\w.,/() -]+: \S.*[^.]|Merge .+|Revert .+")


def wrong(title: str) -> bool:
    return len(title) > LENGTH_MAX or not FORM.fullmatch(title)


def titles() -> list[str]:
    """Of the commits after SINCE; none in a source distribution or a shallow clone without it."""
    if not (ROOT / ".git").exists():
        return []
    known = subprocess.run(["git", "cat-file", "-e", f"{SINCE}^{{commit}}"], cwd=ROOT, capture_output=True)
    if known.returncode:
        return []
    command = ["git", "log", "--format=%H %s", f"{SINCE}..HEAD"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [title for commit, _, title in (line.partition(" ") for line in lines) if commit not in TOO_LONG]


def test_titles_have_area_and_change() -> None:
    assert [title for title in titles() if wrong(title)] == []


@pytest.mark.parametrize(
    "title", ["mend the tests", "log: " + "x" * 68, "log: the end is here.", "log:without a space", "log: "]
)
def test_a_wrong_title_is_found(title: str) -> None:
    assert wrong(title)
