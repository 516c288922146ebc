"""SUPPORTED as Markdown, for docs/protocol.md. `python -m mqd.protocol.table` prints it."""

from __future__ import annotations

from collections.abc import Collection

from mqd.protocol.errors import ERRORS
from mqd.protocol.framing import SUPPORTED


def api_table(keys: Collection[int] | None = None) -> str:
    """One row per API: key, name, versions, first flexible version. `keys` limits it to those that are advertised."""
    rows = ["| key | API | versions | flexible from |", "| ---: | --- | --- | --- |"]
    for spec in SUPPORTED.values():
        if keys is None or spec.key in keys:
            versions = str(spec.min_version) if spec.min_version == spec.max_version else f"{spec.min_version}-{spec.max_version}"
            flexible = str(spec.flexible_from) if spec.flexible_from <= spec.max_version else "-"
            rows.append(f"| {spec.key} | {spec.name} | {versions} | {flexible} |")
    return "\n".join(rows) + "\n"


def error_table() -> str:
    """One row per Kafka error code."""
    rows = ["| code | name | retriable | meaning |", "| ---: | --- | --- | --- |"]
    rows += [f"| {error.code} | {error.name} | {'yes' if error.retriable else 'no'} | {error.message} |" for error in ERRORS.values()]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(api_table())
    print(error_table(), end="")
