"""A tool's output, without parts that differ from run to run: addresses, ids, times, column widths."""

from __future__ import annotations

import json
import re
from typing import Any

# In this order. Producer ids and offsets stay: they are equal on both sides.
PATTERNS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "UUID"),
        (r"(?<![\w-])(?![A-Za-z]+(Exception|Offsets)\b)[A-Za-z0-9_-]{22}(?![\w-])", "ID"),
        (r"\b[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}([.,:][0-9]+)?(Z|\b)", "DATE"),
        (r"\b1[0-9]{12}\b", "TIME"),
        (r"(?<![\w.])/?127\.[0-9]+\.[0-9]+\.[0-9]+:[0-9]+", "ADDRESS"),
        (r"(?<![\w.])/?127\.[0-9]+\.[0-9]+\.[0-9]+(\s+[0-9]{5}\b)?", "HOST"),
        (r"Timed out waiting for a node assignment\. Call: .*|Call\(.*\) timed out at .*", "TIMED OUT"),
        (r"\s+", " "),
    )
]
CONFIGS = re.compile(r"\bConfigs: (\S+)$")
IN_SYNC = re.compile(r"\bIsr: ([0-9,]+)")
STACK = re.compile(r"^\s+at |^\s*\.\.\. [0-9]+ more|^\tSuppressed: ")
MADE_UP_GROUP = re.compile(r"\b(console|perf)-consumer-[0-9]+\b")
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?(E-?[0-9]+)?|\bNaN\b")


def in_order(value: Any) -> Any:
    """JSON whose lists have no defined order."""
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value)}
    return sorted((in_order(entry) for entry in value), key=json.dumps) if isinstance(value, list) else value


def normal(text: str, places: dict[str, str], shape: bool = False) -> list[str]:
    """Its lines. `places` are this side's names for things that are named differently on the other,
    longest first. `shape`: measured numbers are not compared.
    """
    for place in sorted(places, key=len, reverse=True):
        text = text.replace(place, places[place])
    lines = []
    for line in text.splitlines():
        if STACK.match(line) or MADE_UP_GROUP.search(line):
            continue
        if line.startswith('{"brokers"'):
            line = json.dumps(in_order(json.loads(line)))
        line = IN_SYNC.sub(lambda found: "Isr: " + ",".join(sorted(found[1].split(","))), line)
        line = CONFIGS.sub(lambda found: "Configs: " + ",".join(sorted(found[1].split(","))), line)
        for pattern, replacement in PATTERNS:
            line = pattern.sub(replacement, line)
        if line := NUMBER.sub("N", line).strip() if shape else line.strip():
            lines.append(line)
    return lines
