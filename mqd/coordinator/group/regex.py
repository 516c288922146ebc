"""Subscriptions by regular expression (KIP-848: SubscribedTopicRegex, RE2 syntax), matched against
whole topic names.

Any client that can join a group can supply expressions, so they run in RE2: time is linear in the
name's length, memory is bounded by REGEX_MEMORY_BYTES, and there is no backtracking. Each name is
matched once for each expression; when the topics change only new names are matched. Internal topics
match like any others, as in Kafka: `.*` reads __consumer_offsets too.

Bounds: REGEX_CHARS_MAX for one expression; CACHE_MAX cached expressions; the least recently
used is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Set

REGEX_CHARS_MAX = 8_000
REGEX_MEMORY_BYTES = 1 << 20
CACHE_MAX = 1024


class BadExpression(ValueError):
    """Not an RE2 expression, or too large; the text says why."""


def compile_regex(expression: str) -> Callable[[str], object]:
    """A function that is truthy for names that match as a whole. Raises BadExpression."""
    import re2  # imported only when a group uses expressions

    if len(expression) > REGEX_CHARS_MAX:
        raise BadExpression(f"it has {len(expression)} characters; at most {REGEX_CHARS_MAX} are allowed")
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = REGEX_MEMORY_BYTES
    try:
        return re2.compile(expression, options).fullmatch
    except (re2.error, UnicodeError) as error:
        reason = error.args[0] if error.args else error
        raise BadExpression(reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)) from None


class _CachedExpression:
    __slots__ = ("checked_names", "is_match", "matching_names")

    def __init__(self, is_match: Callable[[str], object]) -> None:
        self.is_match = is_match
        self.checked_names: Set[str] = frozenset()
        self.matching_names: frozenset[str] = frozenset()


class RegexMatcher:
    """Maps expressions to the topic names they match; shared by all groups of a process."""

    def __init__(self) -> None:
        self._cache: OrderedDict[str, _CachedExpression] = OrderedDict()

    def check(self, expression: str) -> None:
        """Raises BadExpression."""
        self._find(expression)

    def matching(self, expression: str, names: frozenset[str]) -> frozenset[str]:
        """`names`: all topics; pass the same object while they do not change. Raises BadExpression."""
        cached = self._find(expression)
        if cached.checked_names is not names:
            cached.matching_names = (cached.matching_names & names) | {
                name for name in names - cached.checked_names if cached.is_match(name)
            }
            cached.checked_names = names
        return cached.matching_names

    def _find(self, expression: str) -> _CachedExpression:
        cached = self._cache.get(expression)
        if cached is None:
            cached = self._cache[expression] = _CachedExpression(compile_regex(expression))
            if len(self._cache) > CACHE_MAX:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(expression)
        return cached
