"""Collects the source lines of a generated codec, each with the field that it handles, and the
constants that the lines use. Shared by the encoder and the decoder.
"""

from __future__ import annotations

import struct
from types import CodeType, FunctionType, TracebackType
from typing import Any

# The field path to report when a generated line raises; for a line that handles several fixed-size
# fields, the path and the size of each.
Label = str | tuple[tuple[str, int], ...] | None


class CodeWriter:
    """Appends indented lines; the `label` of a line is the field path to report when it raises."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.labels: list[Label] = [None]  # by line number, from 1
        self.indent = 1
        self.names: dict[str, object] = {}  # the globals of the generated code
        self._counter = 0

    def add(self, line: str, label: Label) -> None:
        self.lines.append("    " * self.indent + line)
        self.labels.append(label)

    def fresh(self, prefix: str) -> str:
        """A variable name that is not used yet."""
        self._counter += 1
        return f"{prefix}{self._counter}"

    def constant(self, value: object, prefix: str) -> str:
        """The name by which the lines refer to `value`."""
        for name, known in self.names.items():
            if known is value:
                return name
        name = self.fresh(prefix)
        self.names[name] = value
        return name

    def struct_function(self, layout: str, function: str) -> str:
        """The name by which the lines call `pack` or `unpack_from` of struct.Struct(layout)."""
        name = f"{function}_{layout[1:].replace('?', 'o')}"
        if name not in self.names:
            self.names[name] = getattr(struct.Struct(layout), function)
        return name

    def build(self, head: str, title: str) -> FunctionType:
        self.lines.insert(0, head)
        self.labels.insert(1, None)
        code = compile("\n".join(self.lines), f"<{title}>", "exec")
        namespace: dict[str, Any] = dict(self.names)
        exec(code, namespace)  # noqa: S102 - our own schema is the only input
        return namespace["run"]

    def locate(self, traceback: TracebackType | None, code: CodeType) -> tuple[Label, dict[str, Any]]:
        """The label of the generated line that failed, and that frame's variables."""
        label: Label = None
        variables: dict[str, Any] = {}
        while traceback is not None:
            if traceback.tb_frame.f_code is code:
                label, variables = self.labels[traceback.tb_lineno], traceback.tb_frame.f_locals
            traceback = traceback.tb_next
        return label, variables
