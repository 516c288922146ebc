"""The notation in which the configuration properties (mqd.base.properties) are written, and its
parser. One property is a line, followed by what it does, indented by four spaces:

    name: kind[(choices)] [>=minimum] [<=maximum] [pattern=expression] [flags] [= default]
        What it does; further lines are joined by one space.
        refused VALUE: why this value, which Kafka supports, is not supported

    retention.ms: as log.retention.ms [= default]    a broker's property, set for a topic or group
        What it does there; if omitted, the text of the broker's property.

`choices` are separated by `|`. The flags are the bool fields of Property. Without `=` the
property is not set by default; with nothing after `=`, the default is empty. INT_MAX and LONG_MAX
are replaced by their values.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1


class Property(msgspec.Struct, frozen=True):
    """`default` is text, as in a file; None means: not set (`doc` says what happens then). Bounds
    are inclusive.
    """

    name: str
    kind: str  # int | long | double | bool | string | list | enum
    default: str | None
    doc: str
    minimum: int | float | None = None
    maximum: int | float | None = None
    choices: tuple[str, ...] = ()  # of an enum; of each member of a list
    may_be_empty: bool = False  # of a list with choices
    pattern: str = ""  # regular expression for each member of a list; `doc` explains it
    # values that Kafka supports and mqd does not (yet): value -> reason
    refused: dict[str, str] = {}
    dynamic: bool = False  # may be changed while the broker runs (IncrementalAlterConfigs)
    # for a topic's property: the broker's property that supplies the default
    broker_name: str | None = None
    sensitive: bool = False  # never shown
    per_listener: bool = False  # listener.name.NAME.PROPERTY overrides it for one listener
    ignored: bool = False  # accepted for compatibility with existing files; has no effect


_HEAD = re.compile(
    r"(?P<name>\S+): (?:as (?P<broker>\S+)|(?P<kind>int|long|double|bool|string|list|enum)(?:\((?P<choices>[^)]+)\))?)"
    r"(?: >=(?P<minimum>\S+))?(?: <=(?P<maximum>\S+))?(?: pattern=(?P<pattern>\S+))?"
    r"(?P<flags>(?: (?:dynamic|may_be_empty|sensitive|per_listener|ignored))*)(?P<given> =)?(?(given)(?:"
    r" (?P<default>.+))?)$"
)
_NAMED_NUMBERS = {"INT_MAX": INT_MAX, "LONG_MAX": LONG_MAX}


def _bound(text: str | None) -> int | float | None:
    if text is None:
        return None
    return _NAMED_NUMBERS[text] if text in _NAMED_NUMBERS else float(text) if "." in text else int(text)


def _property(block: str, broker: Mapping[str, Property]) -> Property:
    head, *lines = block.splitlines()
    match = _HEAD.match(head)
    if match is None:
        raise ValueError(f"cannot read the property {head!r}")
    body = [line.strip() for line in lines]
    doc = " ".join(line for line in body if not line.startswith("refused "))
    refused = dict(line.removeprefix("refused ").split(": ", 1) for line in body if line.startswith("refused "))
    default = None if match["given"] is None else match["default"] or ""
    default = default if default not in _NAMED_NUMBERS else str(_NAMED_NUMBERS[default])
    flags: dict[str, Any] = dict.fromkeys(match["flags"].split(), True)
    if match["broker"]:
        broker_property = broker[match["broker"]]
        return msgspec.structs.replace(
            broker_property,
            name=match["name"],
            default=broker_property.default if default is None else default,
            doc=doc or broker_property.doc,
            dynamic=True,
            broker_name=broker_property.name,
        )
    return Property(
        match["name"],
        match["kind"],
        default,
        doc,
        minimum=_bound(match["minimum"]),
        maximum=_bound(match["maximum"]),
        choices=tuple(match["choices"].split("|")) if match["choices"] else (),
        pattern=match["pattern"] or "",
        refused=refused,
        **flags,
    )


def table(text: str, broker: Mapping[str, Property] | None = None) -> dict[str, Property]:
    """The properties by name, in the order of the text. `broker`: the table that `as` refers to.
    Raises ValueError naming the line.
    """
    entries = [_property(block, broker or {}) for block in re.split(r"\n(?=\S)", text.strip("\n"))]
    properties = {entry.name: entry for entry in entries}
    if len(properties) < len(entries):
        raise ValueError("a property is listed twice")
    return properties
