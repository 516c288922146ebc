"""The recorded results of Apache Kafka 4.2: answers.json, written by `python -m
tests.kafka_parity.rights`, verified by the slow tier.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("answers.json")
Found = dict[str, dict[str, list[Any]]]


def record(found: Found) -> None:
    """Rows with equal results are adjacent, to keep the file readable."""
    by_api: dict[str, list[str]] = {}
    for name, response in sorted(found.items()):
        by_api.setdefault(json.dumps(response), []).append(name)
    shown = [{"answer": json.loads(response), "rows": names} for response, names in by_api.items()]
    FILE.write_text(json.dumps(shown, indent=1) + "\n")


def recorded() -> Found:
    return {name: group["answer"] for group in json.loads(FILE.read_text()) for name in group["rows"]}
