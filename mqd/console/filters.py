"""The filter of a search: substrings of key, value and headers, and one condition on a JSON value."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

PATH_MAX = 300  # characters
STEPS_MAX = 32
VALUES_MAX = 1000  # values at one path in one record ([*] selects many)
_STEP = re.compile(r'\.([^\s.\[\]=!<>~"\']+)|\[(\d{1,9})\]|\["([^"]*)"\]|\[(\*)\]')
_COMPARISON = re.compile(r"\s*(==?|!=|<=|>=|<|>|~)\s*(\S.*)", re.DOTALL)
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
EVERY_ELEMENT = object()  # the step [*] of a path into an array
CONDITION_FORMS = (
    '$.name, $.items[0].sku, $["a b"] or $.items[*].sku, then =, !=, <, <=, >, >= or ~ (contains) and a value'
)


class BadFilter(ValueError):
    """The message shows the correct form."""


class Condition(msgspec.Struct, frozen=True):
    """If `comparison` is "", the condition holds for every document in which the path exists."""

    steps: tuple[Any, ...]  # the path: keys of objects, indexes of arrays, EVERY_ELEMENT
    comparison: str = ""
    operand: Any = None

    def holds(self, document: Any) -> bool:
        return any(self._is_met_by(value) for value in _values_at(document, self.steps, [VALUES_MAX]))

    def _is_met_by(self, value: Any) -> bool:
        if not self.comparison:
            return True
        if self.comparison == "~":
            return str(self.operand) in (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        if isinstance(value, bool) != isinstance(self.operand, bool):  # in Python, True equals 1
            return self.comparison == "!="
        try:
            return _OPERATORS[self.comparison](value, self.operand)
        except TypeError:
            return False  # strings and numbers have no order


def _values_at(document: Any, steps: tuple[Any, ...], remaining: list[int]) -> Iterator[Any]:
    """Yields the values at a path. `remaining`: how many more values may be yielded, in a list of one
    number that all recursive calls share.
    """
    if not steps:
        remaining[0] -= 1
        if remaining[0] >= 0:
            yield document
        return
    step, rest = steps[0], steps[1:]
    if step is EVERY_ELEMENT:
        for element in document if isinstance(document, list) else ():
            if remaining[0] <= 0:
                return
            yield from _values_at(element, rest, remaining)
    elif isinstance(step, int):
        if isinstance(document, list) and step < len(document):
            yield from _values_at(document[step], rest, remaining)
    elif isinstance(document, dict) and step in document:
        yield from _values_at(document[step], rest, remaining)


def parse_condition(text: str) -> Condition:
    """Raises BadFilter."""
    text = text.strip()
    if not text.startswith("$") or len(text) > PATH_MAX:
        raise BadFilter(f"a JSON condition is {CONDITION_FORMS}")
    at, steps = 1, []
    while match := _STEP.match(text, at):
        at = match.end()
        name, index, quoted, star = match.groups()
        steps.append(EVERY_ELEMENT if star else int(index) if index else quoted if quoted is not None else name)
    if len(steps) > STEPS_MAX:
        raise BadFilter(f"a path has {STEPS_MAX} steps at most")
    rest = text[at:].strip()
    if not rest:
        return Condition(tuple(steps))
    match = _COMPARISON.fullmatch(rest)
    if match is None:
        raise BadFilter(f"{rest[:40]!r} is not understood: a JSON condition is {CONDITION_FORMS}")
    try:
        operand = json.loads(match[2])
    except (ValueError, RecursionError):
        operand = match[2]
    return Condition(tuple(steps), "=" if match[1] == "==" else match[1], match[2] if match[1] == "~" else operand)


class Filter(msgspec.Struct, frozen=True):
    """A filter of records. Empty fields are ignored; all others must match. Text is compared as UTF-8
    bytes.
    """

    key: bytes = b""
    value: bytes = b""
    header: bytes | None = None
    header_value: bytes | None = None
    condition: Condition | None = None

    @property
    def is_empty(self) -> bool:
        return not self.key and not self.value and self.header is None and self.condition is None

    def matches(self, message: Any) -> bool:
        """Invalid UTF-8 and invalid JSON are not errors: they do not match."""
        if self.key and self.key not in (message.key() or b""):
            return False
        if self.value and self.value not in (message.value() or b""):
            return False
        if self.header is not None and not any(
            name.encode() == self.header and (self.header_value is None or self.header_value in (value or b""))
            for name, value in message.headers() or ()
        ):
            return False
        return self.condition is None or self._meets_condition(message.value() or b"")

    def _meets_condition(self, value: bytes) -> bool:
        assert self.condition is not None
        try:
            return self.condition.holds(json.loads(value))
        except (ValueError, RecursionError):
            return False


def parse(key: str, value: str, header: str, condition: str) -> Filter:
    """`header`: NAME or NAME=SUBSTRING. Raises BadFilter."""
    name, equals, substring = header.partition("=")
    return Filter(
        key.encode(),
        value.encode(),
        name.strip().encode() if name.strip() else None,
        substring.strip().encode() if equals and substring.strip() else None,
        parse_condition(condition) if condition.strip() else None,
    )
