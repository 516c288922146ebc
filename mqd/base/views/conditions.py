"""The filter of a view (view.filter): a condition on the headers of a record, for example

    tag IN ('a', 'b') AND NOT EXISTS test AND region LIKE 'eu-%' AND priority >= 5

parse() reads it; compile_filter() translates it into the bytecode that the broker evaluates
(native/wire/filter.h).

    condition   = conjunction { OR conjunction }
    conjunction = negation { AND negation }
    negation    = NOT negation | ( condition ) | EXISTS name
                | name ( = | != | <> | < | <= | > | >= ) value
                | name [NOT] IN ( value {, value} ) | name [NOT] LIKE 'prefix%'
    name        = letters, digits, _ . - , beginning with a letter or _; or anything in double quotes
    value       = 'text', a quote in it doubled; or a whole number of at most 18 digits

Text is compared byte by byte, in UTF-8; a number is compared only with headers that are whole
decimal numbers. A comparison with a header that the record does not have is false, even != and NOT
IN; NOT (...) is true whenever its operand is false.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

NODES_MAX = 64  # MQD_FILTER_NODES_MAX
NESTING_MAX = 64
TEXT_BYTES_MAX = 4096
NAME_BYTES_MAX = 255
OPERATORS = ("=", "!=", "<", "<=", ">", ">=")
LIKE, NOT_LIKE, EXISTS = "LIKE", "NOT LIKE", "EXISTS"
_TEXT_OPERATORS = (*OPERATORS, LIKE, NOT_LIKE)  # in the order of their instructions
_EXISTS_CODE, _TEXT_CODE_FIRST, _NUMBER_CODE_FIRST = 1, 2, 10
_COMBINING_CODES = {"AND": 16, "OR": 17, "NOT": 18}
_WORDS = ("AND", "OR", "NOT", "IN", "LIKE", "EXISTS")
_TOKEN = re.compile(
    r"""\s*(?:(?P<text>'(?:[^']|'')*')|(?P<quoted>"(?:[^"]|"")+")|(?P<number>-?[0-9]+(?![A-Za-z0-9_.]))"""
    r"""|(?P<word>[A-Za-z_][A-Za-z0-9_.-]*)|(?P<sign><=|>=|<>|!=|[=<>(),]))"""
)


class Compare(NamedTuple):
    """`operator`: one of OPERATORS; LIKE or NOT_LIKE, with text; or EXISTS, whose value is ignored."""

    name: str
    operator: str
    value: str | int = ""


class Combine(NamedTuple):
    operator: str  # AND, OR with two operands; NOT with one
    operands: tuple[Node, ...]


Node = Compare | Combine


class FilterError(ValueError):
    """The message says what is wrong, and at which position."""


class _Token(NamedTuple):
    kind: str  # text, name, number, sign, word (a keyword, in capitals), end
    value: str
    position: int


def _tokens(text: str) -> list[_Token]:
    tokens, position, end = [], 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            rest = text[position:].lstrip()
            raise FilterError(f"{rest.split()[0][:20]!r} at character {len(text) - len(rest) + 1} cannot be read")
        kind, raw = match.lastgroup or "", match[match.lastgroup or 0]
        if kind in ("text", "quoted"):
            token = _Token(
                "text" if kind == "text" else "name", raw[1:-1].replace(raw[0] * 2, raw[0]), match.start(kind)
            )
        elif kind == "word":
            is_keyword = raw.upper() in _WORDS
            token = _Token("word" if is_keyword else "name", raw.upper() if is_keyword else raw, match.start(kind))
        else:
            token = _Token(kind, "!=" if raw == "<>" else raw, match.start(kind))
        tokens.append(token)
        position = match.end()
    return [*tokens, _Token("end", "", end)]


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._next_index = 0
        self._nesting = 0

    def parse(self) -> Node:
        node = self._condition()
        if self._next.kind != "end":
            raise self._expected_error("AND, OR or the end")
        return node

    @property
    def _next(self) -> _Token:
        return self._tokens[self._next_index]

    def _expected_error(self, expected: str) -> FilterError:
        token = self._next
        found = (
            "the filter ends" if token.kind == "end" else f"there is {token.value!r} at character {token.position + 1}"
        )
        return FilterError(f"{found} where {expected} should be")

    def _accept(self, kind: str, *values: str) -> _Token | None:
        token = self._next
        if token.kind != kind or (values and token.value not in values):
            return None
        self._next_index += 1
        return token

    def _expect(self, expected: str, kind: str, *values: str) -> _Token:
        token = self._accept(kind, *values)
        if token is None:
            raise self._expected_error(expected)
        return token

    def _condition(self) -> Node:
        node = self._conjunction()
        while self._accept("word", "OR"):
            node = Combine("OR", (node, self._conjunction()))
        return node

    def _conjunction(self) -> Node:
        node = self._negation()
        while self._accept("word", "AND"):
            node = Combine("AND", (node, self._negation()))
        return node

    def _negation(self) -> Node:
        self._nesting += 1
        if self._nesting > NESTING_MAX:
            raise FilterError(f"NOT and parentheses are nested more than {NESTING_MAX} deep")
        try:
            return self._nested()
        finally:
            self._nesting -= 1

    def _nested(self) -> Node:
        if self._accept("word", "NOT"):
            return Combine("NOT", (self._negation(),))
        if self._accept("sign", "("):
            node = self._condition()
            self._expect("')'", "sign", ")")
            return node
        if self._accept("word", "EXISTS"):
            return Compare(self._name(), EXISTS)
        return self._comparison(self._name())

    def _name(self) -> str:
        token = self._expect("the name of a header, NOT, EXISTS or '('", "name")
        if len(token.value.encode()) > NAME_BYTES_MAX:
            raise FilterError(f"the name at character {token.position + 1} has more than {NAME_BYTES_MAX} bytes")
        return token.value

    def _comparison(self, name: str) -> Node:
        sign = self._accept("sign", *OPERATORS)
        if sign is not None:
            return Compare(name, sign.value, self._value())
        negated = self._accept("word", "NOT") is not None
        if self._accept("word", "LIKE"):
            return Compare(name, NOT_LIKE if negated else LIKE, self._prefix())
        self._expect("IN or LIKE" if negated else "=, !=, <, <=, >, >=, IN, LIKE or NOT", "word", "IN")
        self._expect("'('", "sign", "(")
        compared: list[Node] = [Compare(name, "!=" if negated else "=", self._value())]
        while self._accept("sign", ","):
            compared.append(Compare(name, "!=" if negated else "=", self._value()))
        self._expect("',' or ')'", "sign", ")")
        return reduce(lambda left, right: Combine("AND" if negated else "OR", (left, right)), compared)

    def _value(self) -> str | int:
        number = self._accept("number")
        if number is not None:
            if len(number.value.lstrip("-")) > 18:
                raise FilterError(f"the number at character {number.position + 1} has more than 18 digits")
            return int(number.value)
        return self._expect("'text' or a whole number", "text").value

    def _prefix(self) -> str:
        token = self._expect("'text%'", "text")
        prefix = token.value.removesuffix("%")
        if prefix == token.value or "%" in prefix or "_" in prefix:
            raise FilterError(
                f"the pattern at character {token.position + 1} must be a prefix followed by %, without any other %"
                " or _"
            )
        return prefix


def parse(text: str) -> Node:
    """Raises FilterError."""
    if len(text.encode()) > TEXT_BYTES_MAX:
        raise FilterError(f"it has more than {TEXT_BYTES_MAX} bytes")
    node = _Parser(text).parse()
    count = node_count(node)
    if count > NODES_MAX:
        raise FilterError(
            f"it has {count} comparisons and operators, at most {NODES_MAX} are allowed"
            " (each value of IN counts as two)"
        )
    return node


def node_count(node: Node) -> int:
    """Counts the nodes without recursion: a chain of AND is as deep as it is long."""
    count, pending = 0, [node]
    while pending:
        current = pending.pop()
        count += 1
        if isinstance(current, Combine):
            pending += current.operands
    return count


def compile_filter(text: str) -> bytes:
    """Raises FilterError."""
    return b"".join(_instructions(parse(text)))


def _instructions(node: Node) -> Sequence[bytes]:
    if isinstance(node, Combine):
        operands = [part for operand in node.operands for part in _instructions(operand)]
        return [*operands, bytes([_COMBINING_CODES[node.operator]])]
    name = node.name.encode()
    head = bytes([len(name)]) + name
    if node.operator == EXISTS:
        return [bytes([_EXISTS_CODE]) + head]
    if isinstance(node.value, int):
        return [
            bytes([_NUMBER_CODE_FIRST + OPERATORS.index(node.operator)])
            + head
            + node.value.to_bytes(8, "big", signed=True)
        ]
    value = node.value.encode()
    return [
        bytes([_TEXT_CODE_FIRST + _TEXT_OPERATORS.index(node.operator)]) + head + len(value).to_bytes(2, "big") + value
    ]
