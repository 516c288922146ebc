"""The broker's state of a share-partition (native/share/state.h), built with planted bugs that can
be switched on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from tests.planted_library import build

_module = build(
    "share_state",
    "share",
    ["share/pool.h", "share/state.h"],
    ["base/error.c", "wire/buffer.c", "wire/share_state.c", "wire/wire.c"],
)
ffi, lib = _module.ffi, _module.lib

PREFIX = "MQD_PLANTED_"
PLANTED = {name.removeprefix(PREFIX): getattr(lib, name) for name in dir(lib) if name.startswith(PREFIX)}
AVAILABLE, ACQUIRED, DELAYED = lib.MQD_SHARE_AVAILABLE, lib.MQD_SHARE_ACQUIRED, lib.MQD_SHARE_DELAYED
WAITING = lib.MQD_SHARE_WAITING
ACKNOWLEDGED, ARCHIVED, ARCHIVING = lib.MQD_SHARE_ACKNOWLEDGED, lib.MQD_SHARE_ARCHIVED, lib.MQD_SHARE_ARCHIVING
GAP, ACCEPT, RELEASE, REJECT, RENEW = range(5)
INVALID_REQUEST, INVALID_RECORD_STATE = lib.MQD_SHARE_INVALID_REQUEST, lib.MQD_SHARE_INVALID_RECORD_STATE
NEVER = lib.MQD_SHARE_NEVER
SPAN_MAX, RUN_COUNT_MAX = lib.MQD_SHARE_SPAN_MAX, lib.MQD_SHARE_RUN_COUNT_MAX
RUNS = 20_000


class Run(NamedTuple):
    first: int
    last: int
    state: int
    count: int


class Batch(NamedTuple):
    """`records`: (delta of the offset, hash of the key), where there is FIFO."""

    first: int
    last: int
    skipped: bool = False
    records: Sequence[tuple[int, int]] | None = None


class Ack(NamedTuple):
    first: int
    last: int
    types: bytes


class Settings(NamedTuple):
    lock_ms: int = 30_000
    delivery_limit: int = 5
    open_max: int = 2_000
    backoff_ms: int = 0
    backoff_ms_max: int = 60_000
    dead_letters: bool = False
    fifo: int = 0


class Difference(NamedTuple):
    start: int
    runs: list[Run]
    finished_count: int
    is_whole: bool


class Share:
    def __init__(
        self, settings: Settings, start: int, planted: Collection[str] = (), size_bytes: int = 1 << 24
    ) -> None:
        self._memory = ffi.new("uint8_t[]", size_bytes + 64)
        self._pool = ffi.new("struct mqd_share_pool *")
        address = int(ffi.cast("uintptr_t", self._memory))
        lib.mqd_share_pool_init(self._pool, self._memory + -address % 64, size_bytes)
        self.native = ffi.new("struct mqd_share *")
        self._out = ffi.new("struct mqd_share_run[]", RUNS)
        self._planted = sum(PLANTED[name] for name in planted)
        self._init(settings, start)

    def _init(self, settings: Settings, start: int) -> None:
        lib.mqd_share_init(self.native, self._pool, ffi.new("struct mqd_share_settings *", settings), start)
        self.native.planted = self._planted

    def set(self, settings: Settings) -> None:
        for name, value in settings._asdict().items():
            setattr(self.native.settings, name, value)

    def _runs(self, count: int) -> list[Run]:
        return [Run(run.first, run.last, run.state, run.count) for run in ffi.unpack(self._out, count)]

    @property
    def hashed(self) -> int:
        return lib.mqd_share_next_key_offset(self.native)

    def reach(self, records_max: int) -> int:
        return lib.mqd_share_read_until(self.native, records_max)

    def next(self) -> int:
        return lib.mqd_share_next_offset(self.native)

    def acquire(
        self, member: int, now_ms: int, records_max: int, strict: bool, from_: int, batches: Sequence[Batch]
    ) -> list[Run]:
        acquisition = ffi.new("struct mqd_share_acquisition *", (member, now_ms, records_max, strict))
        keys = [
            ffi.NULL if one.records is None else ffi.new("struct mqd_share_record[]", one.records) for one in batches
        ]
        given = ffi.new(
            "struct mqd_share_batch[]",
            [(*one[:3], kept, len(one.records or ())) for one, kept in zip(batches, keys, strict=True)],
        )
        return self._runs(lib.mqd_share_acquire(self.native, acquisition, from_, given, len(batches), self._out, RUNS))

    def acknowledge(self, member: int, acks: Sequence[Ack], now_ms: int) -> int:
        types: list[Any] = [ffi.from_buffer("uint8_t[]", ack.types) for ack in acks]
        given = ffi.new(
            "struct mqd_share_acknowledgement[]",
            [(ack.first, ack.last, kept, len(ack.types)) for ack, kept in zip(acks, types, strict=True)],
        )
        return lib.mqd_share_acknowledge(self.native, member, given, len(acks), now_ms)

    def release_member(self, member: int, now_ms: int) -> int:
        return lib.mqd_share_release_member(self.native, member, now_ms)

    def expire(self, now_ms: int) -> int:
        return lib.mqd_share_expire(self.native, now_ms, 0xFFFFFFFF)

    def archive(self, first: int, last: int) -> int:
        return lib.mqd_share_archive(self.native, first, last)

    def log_start(self, offset: int) -> None:
        lib.mqd_share_set_log_start(self.native, offset)

    def difference(self, runs_max: int = RUNS) -> Difference:
        out = ffi.new("struct mqd_share_difference *")
        lib.mqd_share_take_difference(self.native, self._out, runs_max, out)
        return Difference(out.start, self._runs(out.run_count), out.finished_count, bool(out.is_whole))

    def snapshot(self) -> list[Run]:
        following = ffi.new("int64_t *")
        runs = self._runs(lib.mqd_share_snapshot(self.native, self.start, self._out, RUNS, following))
        assert following[0] == -1
        return runs

    def load(self, settings: Settings, start: int, runs: Sequence[Run]) -> int:
        """Clears everything first, like a new leader."""
        lib.mqd_share_destroy(self.native)
        self._init(settings, start)
        return lib.mqd_share_load(self.native, ffi.new("struct mqd_share_run[]", list(runs)), len(runs))

    def check(self) -> None:
        lib.mqd_share_check(self.native)

    def at(self, offset: int) -> tuple[int, int]:
        run = lib.mqd_share_state_at(self.native, offset)
        return run.state, run.count

    def destroy(self) -> int:
        """Returns how many blocks of the pool are still in use."""
        lib.mqd_share_destroy(self.native)
        return self._pool.used

    @property
    def start(self) -> int:
        return self.native.start

    @property
    def end(self) -> int:
        return self.native.end

    def positions(self) -> tuple[int, int, int, int, int, int]:
        native = self.native
        return (
            native.start,
            native.end,
            native.open_count,
            native.acquired_count,
            lib.mqd_share_run_count(native),
            lib.mqd_share_deadline(native),
        )
