"""Names on the pages exist: links, files, properties; and every folder has its page."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from mqd.base.config import BROKER, GROUP, TOPIC
from mqd.cli.main import COMMANDS as COMMAND_NAMES
from mqd.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
ROOMS = sorted(
    {path.parent for path in (ROOT / "mqd").glob("*/__init__.py")}
    | {ROOT / "native", ROOT / "native" / "tests", ROOT / "tests"}
)
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(room / "README.md" for room in ROOMS if (room / "README.md").is_file()),
    ]
)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("room", ROOMS, ids=_name)
def test_every_folder_has_its_page(room: Path) -> None:
    assert (room / "README.md").is_file()


def _anchors(page: Path) -> set[str]:
    """The anchors that a site such as GitHub makes of the page's headings."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    shown = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in shown}


def _leads_somewhere(page: Path, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = page.parent / file if file else page
    return target.exists() and (not anchor or target.suffix != ".md" or anchor in _anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    assert [link for link in links if "://" not in link and not _leads_somewhere(page, link)] == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:native|mqd|tests|docs|perf)/[\w/.-]+\.\w+)`", page.read_text())
    written_by_make = {"perf/history.jsonl"}
    assert [name for name in named if name not in written_by_make and not (ROOT / name).exists()] == []


def test_tests_cited_for_promises_exist() -> None:
    """`FILE`: `TEST`, `TEST` on the page of promises; a test in C has no test_ before its name."""
    found = 0
    for file, names in re.findall(
        r"`((?:native|tests)/[\w/]+\.(?:py|c))`:((?:,?\s+`\w+`)+)", (ROOT / "docs" / "durability.md").read_text()
    ):
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^(?:def |BOTH\(){name}\b", (ROOT / file).read_text(), re.MULTILINE), (
                f"{file} has no {name}"
            )
            found += 1
    assert found > 10


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "docs" / "operations.md", ROOT / "docs" / "durability.md"], ids=_name
)
def test_properties_that_are_set_exist(page: Path) -> None:
    """NAME=VALUE, as a reader would copy it."""
    named = set(re.findall(r"(?<![\w.-])([a-z]+(?:\.[a-z]+)+)=", page.read_text()))
    of_others = {"check.crcs", "group.protocol", "directory.id"}  # of clients, of meta.properties
    assert named - BROKER.keys() - TOPIC.keys() - GROUP.keys() - of_others == set()


COMMANDS = sorted(
    {
        line.strip()
        for page in PAGES
        for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if re.match(r"\s*mqd [a-z]", line)
    }
)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_of_the_pages_are_understood(line: str) -> None:
    """As a reader would copy them: the command exists, with these options and this many arguments.
    Values are checked when it runs.
    """
    words = shlex.split(re.split(r" [<>|] ?", line)[0], comments=True)[1:]
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group):
        _, found, words = command.resolve_command(context, words)
        assert found is not None
        command, context = found, click.Context(found, parent=context)
    values, rest, _ = command.make_parser(context).parse_args(list(words))
    assert rest == []
    missing = [param.name for param in command.params if param.required and not values.get(param.name or "")]
    assert missing == []


def _texts() -> Iterator[str]:
    """The texts of all modules: strings, parts of f-strings, and docstrings."""
    for path in sorted((ROOT / "mqd").rglob("*.py")):
        yield from (
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )


def test_commands_that_texts_name_exist() -> None:
    """A verb behind a noun everywhere, the noun itself in backquotes."""
    groups = {
        name: set(command.commands)
        for name in COMMAND_NAMES
        if isinstance(command := cli.get_command(click.Context(cli), name), click.Group)
    }
    named = {found for text in _texts() for found in re.findall(r"(`?)\bmqd ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?", text)}
    assert {f"mqd {noun}" for quoted, noun, _ in named if quoted and noun not in COMMAND_NAMES} == set()
    assert {
        f"mqd {noun} {verb}" for _, noun, verb in named if verb and noun in groups and verb not in groups[noun]
    } == set()
