"""The rights of one principal from one host on the resources of one type, compiled so that a
decision is one lookup: for Python (RightsTable.mask) and for the reactor (encode).

A mask has a bit for each allowed Operation (acl.Operation). Masks are complete: the mask of a
literal name includes the rules for its prefixes and for `*`, the mask of a prefix those for shorter
prefixes. The lookup of a name is

    1. the literal entry with exactly this name; otherwise
    2. the entry of the longest prefix of it; otherwise
    3. the default mask.

Step 2 is a binary search: all names between a prefix of the name and the name itself start with
that prefix. The search starts at the last prefix entry not greater than the name, and follows
`parent` (the longest entry that is a proper prefix of this one) until the entry is a prefix of the
name: this is the longest one.

As bytes (encode), little-endian:

    offset  size
         0     4  size of the whole table
         4     4  number L of literal entries
         8     4  number P of prefix entries
        12     2  default mask
        14     2  zero
        16  16 L  literal entries, in the order of their names' bytes (memcmp, then the shorter first)
           16 P   prefix entries, in the same order
                  the names, without terminators

    An entry:
         0     4  offset of its name from the table's beginning
         4     4  index of its parent among the prefix entries; NO_PARENT for none and for literals
         8     2  size of its name
        10     2  mask
        12     4  zero
"""

import struct
from bisect import bisect_right
from collections.abc import Iterable, Mapping

from mqd.security.acl import ALLOWED_BY, EVERY_OPERATION, WILDCARD, AclBinding, Operation, PatternType, Permission

HEADER = struct.Struct("<IIIHH")
ENTRY = struct.Struct("<IIHHI")
NO_PARENT = 0xFFFFFFFF

_Masks = tuple[int, int]  # allowed, denied


class RightsTable:
    __slots__ = ("literals", "prefix_names", "prefix_masks", "parents", "default_mask")

    def __init__(self, literals: Mapping[str, int], prefixes: Mapping[str, int], default_mask: int) -> None:
        self.literals = dict(literals)
        self.prefix_names = sorted(prefixes)  # code points sort like their UTF-8 bytes
        self.prefix_masks = [prefixes[name] for name in self.prefix_names]
        self.parents = _parents(self.prefix_names)
        self.default_mask = default_mask

    def mask(self, name: str) -> int:
        """The allowed operations on the resource of this name."""
        literal_mask = self.literals.get(name)
        if literal_mask is not None:
            return literal_mask
        index = _longest_prefix(self.prefix_names, self.parents, name)
        return self.prefix_masks[index] if index >= 0 else self.default_mask

    def encode(self) -> bytes:
        literal_names = sorted(self.literals)
        names = [name.encode() for name in (*literal_names, *self.prefix_names)]
        masks = [*(self.literals[name] for name in literal_names), *self.prefix_masks]
        parents = [-1] * len(literal_names) + self.parents
        offset = HEADER.size + ENTRY.size * len(names)
        size = offset + sum(map(len, names))
        parts = [HEADER.pack(size, len(literal_names), len(self.prefix_names), self.default_mask, 0)]
        for name, mask, parent in zip(names, masks, parents):
            parts.append(ENTRY.pack(offset, parent if parent >= 0 else NO_PARENT, len(name), mask, 0))
            offset += len(name)
        return b"".join([*parts, *names])


def compile_table(
    bindings: Iterable[AclBinding], patterns: Iterable[tuple[int, str]], allow_everyone: bool
) -> RightsTable:
    """`bindings`: the rules for this principal and host on resources of one type. `patterns`: with
    allow.everyone.if.no.acl.found, (pattern type, name) of all principals' rules of this type.
    """
    literals: dict[str, _Masks] = {}
    prefixes: dict[str, _Masks] = {}
    for pattern_type, name in patterns:
        (literals if pattern_type == PatternType.LITERAL else prefixes)[name] = (0, 0)
    for binding in bindings:
        entries = literals if binding.pattern_type == PatternType.LITERAL else prefixes
        entries[binding.name] = _union(entries.get(binding.name, (0, 0)), _masks(binding))
    wildcard_masks = literals.get(WILDCARD, (0, 0))
    default_mask = EVERY_OPERATION if allow_everyone and WILDCARD not in literals else _effective(wildcard_masks)
    names = sorted(prefixes)
    parents = _parents(names)
    prefix_masks: list[_Masks] = []  # each prefix's own masks, joined with those of shorter prefixes and of `*`
    for name, parent in zip(names, parents):
        prefix_masks.append(_union(prefixes[name], prefix_masks[parent] if parent >= 0 else wildcard_masks))
    literal_masks = {}
    for name, own_masks in literals.items():
        index = _longest_prefix(names, parents, name)
        literal_masks[name] = _effective(_union(own_masks, prefix_masks[index] if index >= 0 else wildcard_masks))
    return RightsTable(
        literal_masks, {name: _effective(masks) for name, masks in zip(names, prefix_masks)}, default_mask
    )


def _masks(binding: AclBinding) -> _Masks:
    if binding.permission == Permission.ALLOW:
        return ALLOWED_BY.get(binding.operation, 0), 0
    return 0, EVERY_OPERATION if binding.operation == Operation.ALL else 1 << binding.operation


def _union(one: _Masks, other: _Masks) -> _Masks:
    return one[0] | other[0], one[1] | other[1]


def _effective(masks: _Masks) -> int:
    return masks[0] & ~masks[1]


def _longest_prefix(names: list[str], parents: list[int], name: str) -> int:
    """Index of the longest of the sorted `names` that is a prefix of `name`, or -1."""
    index = bisect_right(names, name) - 1
    while index >= 0 and not name.startswith(names[index]):
        index = parents[index]
    return index


def _parents(names: list[str]) -> list[int]:
    """For each name, in sorted order: the index of the longest other name that is a prefix of it,
    or -1.
    """
    parents: list[int] = []
    for index, name in enumerate(names):
        candidate = index - 1
        while candidate >= 0 and not name.startswith(names[candidate]):
            candidate = parents[candidate]
        parents.append(candidate)
    return parents


EVERYTHING = RightsTable({}, {}, EVERY_OPERATION)
