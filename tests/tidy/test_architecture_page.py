"""ARCHITECTURE.md names files and functions: they must exist, or the page lies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
FUNCTIONS = sorted(set(re.findall(r"`([\w/]+\.(?:c|py)):(\w+)`", PAGE)))
FILES = sorted(set(re.findall(r"`((?:native|mqd)/[\w/]+\.(?:c|h|py))`", PAGE)))


def test_page_walks_both_paths() -> None:
    names = {function for _, function in FUNCTIONS}
    assert {
        "mqd_produce_on_request",
        "mqd_partition_write",
        "mqd_fetch_evaluate",
        "mqd_reader_find",
        "mqd_output_send",
    } <= names


@pytest.mark.parametrize(("path", "function"), FUNCTIONS, ids=lambda value: value)
def test_function_exists(path: str, function: str) -> None:
    source = (ROOT / path).read_text()
    pattern = rf"^[\w* ]+\b{function}\(" if path.endswith(".c") else rf"^\s*(?:async )?(?:def|class) {function}\b"
    assert re.search(pattern, source, flags=re.M), f"{path} defines no {function}"


@pytest.mark.parametrize("path", FILES)
def test_file_exists(path: str) -> None:
    assert (ROOT / path).is_file()
