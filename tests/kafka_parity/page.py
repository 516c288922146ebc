"""`python -m tests.kafka_parity.page > docs/protocol.md`: mqd's APIs and versions, and every difference
from Apache Kafka that is allowed.
"""

from __future__ import annotations

from mqd.protocol import table
from tests.kafka_parity.allowed import ALLOWED, OPEN
from tests.kafka_parity.compare import ANY, Allowed
from tests.kafka_parity.stories import FEWER, LEFT_OUT, WHOLE

INTRODUCTION = """
## Differences from Apache Kafka 4.2

mqd and Apache Kafka are sent the same requests, and their responses are compared field by field
(`python -m tests.kafka_parity`). Only the differences below are allowed. In the API column, `*`
stands for every API; at the beginning of a field, it stands for any path. `only Kafka` and
`only mqd` mark elements of a list that only Kafka or only mqd returns; `on resend` marks the
response to a batch that is sent again; `outcome` is what happens to the request. "order" means that
only the order of the list differs, and "any" is any value.

"""
OPEN_INTRODUCTION = """
### Still to be decided

These differ from Kafka and are neither fixed nor justified yet.

"""
LEFT_OUT_INTRODUCTION = """
### Not compared

"""
FEWER_INTRODUCTION = f"""
### Fewer than {WHOLE} cases

Each version of each API is compared in at least {WHOLE} distinct cases, except these, for which fewer exist:

"""


def rows(entries: tuple[Allowed, ...]) -> str:
    lines = ["| API | versions | field | Kafka | mqd | reason |", "| --- | --- | --- | --- | --- | --- |"]
    for entry in entries:
        values = ("order", "order") if entry.order else (_value(entry.kafka), _value(entry.mqd))
        lines.append(
            f"| {entry.api} | {entry.versions} | `{entry.field}` | {values[0]} | {values[1]} | {entry.reason} |"
        )
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    return "any" if value == ANY else f"`{value!r}`"


def section() -> str:
    left_out = "".join(f"* **{name}**: {reason}.\n" for name, reason in LEFT_OUT.items())
    fewer = "".join(f"* **{name}** {versions}: {reason}.\n" for name, (versions, reason) in FEWER.items())
    still = OPEN_INTRODUCTION + rows(OPEN) if OPEN else ""
    return INTRODUCTION + rows(ALLOWED) + still + LEFT_OUT_INTRODUCTION + left_out + FEWER_INTRODUCTION + fewer


def page() -> str:
    """The text of docs/protocol.md."""
    return table.render_page() + section()


if __name__ == "__main__":
    print(page(), end="")
