"""Words and phrases that were removed from code and pages must not return."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# perf/native is not read yet
READ = ("docs", "mqd", "native", "perf", "tests", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
LEFT_OUT = ("perf/native/", "perf/history.jsonl", "mqd/protocol/messages/", "tests/tidy/test_language.py")
SUFFIXES = {".py", ".c", ".h", ".md"}
# archaic words, translated turns, and processes that speak
PHRASES = re.compile(
    r"\b(nobody|whoever|whomever|anew|of whom|asked as|in vain|goes on|what it holds|in its stead"
    r"|not to be had|(?:is|are|was|were|be) told|(?:is|are|was|were) (?:tried|asked) again"
    r"|at hand|keep[s]? (?:their|its) answers|answers keep|(?:until|unless|when) told"
    r"|for ever|held against|other people's|as ever|by chance|beside each other|all the same"
    r"|cannot be told|heard of|hears? (?:no|of|it)|lets? go of|sha(?:kes?|king) hands"
    r"|knows nothing of|has nothing of|makes itself heard|answers? of the)\b",
    re.IGNORECASE,
)
# a docstring, or a comment to the end of its line
COMMENT = re.compile(r'"""[^"]*(?:"{1,2}[^"]+)*"""|(?<!\S)# .*')
TEST_NAME = re.compile(r"\bdef (test_\w+)")
# the break between two lines of a comment: a new line, its indentation, and * of C or # of Python
JOINED = re.compile(r"\n[ \t]*(?:\*(?!/)|#|//)?[ \t]*")


def found(text: str) -> list[str]:
    return [match.group() for match in PHRASES.finditer(JOINED.sub(" ", text))]


def prose(source: str) -> str:
    """The comments and docstrings of a test module, and the names of its tests as words. Its
    strings are data: a group or a user may be called nobody.
    """
    texts = [match.group() for match in COMMENT.finditer(source)]
    names = [name.replace("_", " ") for name in TEST_NAME.findall(source)]
    return ". ".join([*texts, *names]).replace("`nobody`", "")


def _text(path: Path) -> str:
    text = path.read_text()
    return prose(text) if path.suffix == ".py" and "tests" in path.relative_to(ROOT).parts else text


def _pages() -> Iterator[Path]:
    """All files of the tree in git; in a source distribution, all that are there."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", *READ], cwd=ROOT, capture_output=True, text=True, check=True)
        names = listed.stdout.splitlines()
    else:
        tops = [ROOT / name for name in READ]
        names = [str(path.relative_to(ROOT)) for top in tops for path in ([top] if top.is_file() else top.rglob("*"))]
    for name in names:
        path = ROOT / name
        if path.suffix in SUFFIXES and not name.startswith(LEFT_OUT) and path.name != "_native.c" and path.is_file():
            yield path


def test_the_language_is_plain() -> None:
    assert {str(path.relative_to(ROOT)): phrases for path in _pages() if (phrases := found(_text(path)))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "# the worker is told",
        "/* its successor\n * is\n * told */",
        "a key that is not\n    to be had",
        "Nobody waits.",
    ],
)
def test_a_phrase_is_found_also_across_lines(text: str) -> None:
    assert found(text)


def test_of_a_test_module_names_and_comments_are_read() -> None:
    source = 'def test_nobody_is_heard():\n    """Told once."""\n    user = "nobody"  # in vain\n'
    assert found(prose(source)) == ["in vain", "nobody"]


def test_plain_text_passes() -> None:
    assert not found("The response is sent again; no client waits for it, and the rest is handed out.")
