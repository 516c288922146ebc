"""Runs the source of a confluent_kafka module a second time, with its imports changed to mqd.
Separate from confluent.py, so that `import mqd` does not import the parser.
"""

from __future__ import annotations

import ast
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from mqd.client.confluent import OURS, THEIRS


class RebuildingLoader:
    """Loads a module made from the counterpart's source, with its imports changed to mqd."""

    def __init__(self, theirs: ModuleSpec) -> None:
        self._theirs = theirs

    def create_module(self, _spec: ModuleSpec) -> None:
        return None

    def get_source(self, _fullname: str) -> str:
        loader: Any = self._theirs.loader
        source: str | None = loader.get_source(self._theirs.name)
        if source is None:
            raise ImportError(f"{self._theirs.name} was installed without its source, which mqd needs here")
        return source

    def get_code(self, fullname: str) -> CodeType:
        filename = self._theirs.origin or fullname
        tree = _ImportRewriter().visit(ast.parse(self.get_source(fullname), filename))
        return compile(ast.fix_missing_locations(tree), filename, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = self._theirs.origin
        exec(self.get_code(module.__name__), vars(module))


class _ImportRewriter(ast.NodeTransformer):
    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if node.level == 0 and node.module is not None:
            node.module = _rename(node.module)
        return node

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        imports: list[ast.stmt] = []
        for alias in node.names:
            renamed, bound = _rename(alias.name), alias.asname
            if renamed != alias.name and bound is None:  # `import a.b` binds the name `a`
                imports.append(ast.Import([ast.alias(renamed)]))
                renamed, bound = OURS, THEIRS
            imports.append(ast.Import([ast.alias(renamed, bound)]))
        return [ast.copy_location(statement, node) for statement in imports]


def _rename(name: str) -> str:
    return OURS + name.removeprefix(THEIRS) if name.partition(".")[0] == THEIRS else name
