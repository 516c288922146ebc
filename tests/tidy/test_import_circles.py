"""No module of mqd imports itself through others, even in imports for annotations (TYPE_CHECKING):
modules that know each other's types cannot be understood separately. Imports inside functions do
not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _imports(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports outside functions and classes."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If):
            yield from _imports([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            handlers = [statement for handler in node.handlers for statement in handler.body]
            yield from _imports([*node.body, *handlers, *node.orelse, *node.finalbody])


def graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> its imports among these modules."""
    found: dict[str, set[str]] = {}
    for module, source in sources.items():
        names: set[str] = set()
        for node in _imports(ast.parse(source).body):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif node.module is not None:
                for alias in node.names:
                    member = f"{node.module}.{alias.name}"
                    names.add(member if member in sources else node.module)
        found[module] = (names & sources.keys()) - {module}
    return found


def circle(imports: Mapping[str, set[str]]) -> list[str]:
    """One circle, or nothing."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_through_others() -> None:
    sources = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in (ROOT / "mqd").rglob("*.py")
    }
    assert len(sources) > 400
    assert circle(graph(sources)) == []


def test_a_circle_is_found() -> None:
    sources = {"a": "from b import x", "b": "try:\n    import c\nexcept ImportError:\n    pass", "c": "import a"}
    assert set(circle(graph(sources))) == {"a", "b", "c"}
    sources["c"] = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a"
    assert set(circle(graph(sources))) == {"a", "b", "c"}
    sources["c"] = "def later():\n    import a\n"
    assert circle(graph(sources)) == []
