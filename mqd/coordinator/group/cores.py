"""Builds the cores of groups and loads their records. Committed offsets, up to a million, are
loaded in bulk, without a call for each.

Values are decoded here, so that an unreadable value is found during loading, not when a client
requests it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

from mqd.coordinator.actions import TransactionalCore
from mqd.coordinator.group.offsets import Offsets
from mqd.coordinator.group.records import (
    CONSUMER_GROUP_TYPES,
    GROUP_METADATA,
    SHARE_GROUP_TYPES,
    STREAMS_GROUP_TYPES,
    decode_offset_value,
    group_of_key,
    key_type_of,
    split_offset_prefix,
)

_PARTITION = struct.Struct(">i")
_VALUE_SIZE_MIN = 2 + 8 + 4 + 2 + 8  # a value of version 3 without metadata


class GroupCore(TransactionalCore, Protocol):
    offsets: Offsets


class GroupCoreFactory:
    def __init__(self, make: Callable[[str], GroupCore]) -> None:
        self.make = make

    def core_name_of(self, key: bytes) -> str | None:
        """Returns the id of the record's group. None: records of this type are not loaded. Raises
        ValueError if the key is malformed.
        """
        key_type = key_type_of(key)
        is_loaded = 0 <= key_type <= GROUP_METADATA or any(
            key_type in types for types in (CONSUMER_GROUP_TYPES, SHARE_GROUP_TYPES, STREAMS_GROUP_TYPES)
        )
        return group_of_key(key) if is_loaded else None

    def replay_all(
        self,
        cores: dict[str, GroupCore],
        records: dict[bytes, bytes],
        on_unreadable: Callable[[bytes, Exception], None],
    ) -> None:
        """Applies one record for each key, in log order. Offsets of a group may come before or
        after its other records: neither depends on the other.
        """
        tables: dict[bytes, dict[int, bytes]] = {}
        partition_of = _PARTITION.unpack_from
        for key, value in records.items():
            try:
                if key[:2] > b"\x00\x01" or len(key) < 10:
                    self._replay(cores, key, value)
                    continue
                prefix = key[:-4]
                table = tables.get(prefix)
                if table is None:
                    table = tables[prefix] = self._table(cores, prefix)
                # a value of version 3 with ASCII metadata is readable: it need not be decoded
                size = value[14] << 8 | value[15]
                if (
                    value[:2] != b"\x00\x03"
                    or len(value) != _VALUE_SIZE_MIN + size
                    or (size and not value[16:-8].isascii())
                ):
                    decode_offset_value(value)
                table[partition_of(key, len(key) - 4)[0]] = value
            except (ValueError, IndexError) as error:
                on_unreadable(key, error)
        for prefix, table in tables.items():
            if not table:  # no value could be read
                group, topic = split_offset_prefix(prefix)
                cores[group].offsets.drop_if_empty(topic)

    def _table(self, cores: dict[str, GroupCore], prefix: bytes) -> dict[int, bytes]:
        group, topic = split_offset_prefix(prefix)
        return self._core(cores, group).offsets.table(topic)

    def _core(self, cores: dict[str, GroupCore], group: str) -> GroupCore:
        core = cores.get(group)
        if core is None:
            core = cores[group] = self.make(group)
        return core

    def _replay(self, cores: dict[str, GroupCore], key: bytes, value: bytes) -> None:
        name = self.core_name_of(key)
        if name is not None:
            self._core(cores, name).replay(key, value)
