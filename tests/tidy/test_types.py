"""What mypy does not check by itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_silenced_complaint_names_its_code_and_its_reason() -> None:
    silent = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "mqd").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "# type: ignore" in line and not re.search(r"# type: ignore\[[a-z-]+(, [a-z-]+)*\]  # \S", line)
    ]
    assert silent == [], "write: # type: ignore[code]  # why types cannot express it"


def test_names_that_tests_use_exist() -> None:
    """mypy checks only mqd/. Of what it says about tests, this counts: a name that was renamed is
    otherwise noticed when the test runs, and slow tests run rarely. A planted bug that uses a private
    name of the class that it breaks, or overrides it, would no longer be the bug that it was.
    """
    tool = [str(Path(sys.executable).parent / "mypy"), "--no-error-summary", "--check-untyped-defs", "tests", "perf"]
    done = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    missing = re.compile(
        r'error: (Module( "[^"]*")? has no attribute|Name "[^"]*" is not defined|"\w+" has no attribute "_[a-z]'
        r"|.* undefined in superclass)"
    )
    assert [line for line in done.stdout.splitlines() if missing.search(line)] == []


def test_fields_of_structs_that_python_fills_exist() -> None:
    """A field of a C struct in `ffi.new("struct name *", {"field": ...})` is a string to mypy."""
    headers = "\n".join(path.read_text() for path in (ROOT / "native").rglob("*.h"))
    bodies = dict(re.findall(r"^struct (\w+) \{(.*?)^\}", headers, re.MULTILINE | re.DOTALL))
    missing = []
    for path in (path for folder in ("mqd", "tests", "perf") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="new"), args=[ast.Constant(value=str(pointer)), ast.Dict(keys=keys)]
                ):
                    body = bodies.get(pointer.removeprefix("struct ").rstrip(" *"))
                    names = {key.value for key in keys if isinstance(key, ast.Constant)}
                    missing += [
                        f"{path}:{node.lineno}: {pointer} {name}"
                        for name in sorted(names)
                        if body is not None and not re.search(rf"\b{name}\b", body)
                    ]
    assert missing == []
