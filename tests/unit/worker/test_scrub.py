"""When a stored segment is verified, and what the verification of a piece finds."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mqd._native")

from mqd import native
from mqd.log import damage
from mqd.log.damage import Damage
from mqd.worker import scrub
from mqd.worker.scrub import DAY_MS, FIRST_PASS_MS, SEALED_MS, ScrubPlan, check_piece, next_sound, sealed_bases
from tests.unit.log.log_files import encode_batch, write_segment

WEEK_MS = 7 * DAY_MS
A, B = (b"a" * 16, 0), (b"b" * 16, 3)


# -- planning --------------------------------------------------------------------------------------


def when_due(plan: ScrubPlan, until_ms: int, step_ms: int) -> dict[scrub.SegmentKey, int]:
    """segment -> when a fake clock first found it due; each is verified at once."""
    seen: dict[scrub.SegmentKey, int] = {}
    for now_ms in range(0, until_ms, step_ms):
        while (segment := plan.due(now_ms)) is not None:
            seen.setdefault(segment, now_ms)
            plan.on_verified(segment, now_ms)
    return seen


def test_segments_found_at_start_are_spread_over_a_day() -> None:
    plan = ScrubPlan(WEEK_MS, random.Random(1).random)
    plan.set_sealed(A, range(2400), 0)
    seen = when_due(plan, FIRST_PASS_MS + 1000, 60_000)
    assert len(seen) == 2400
    hours = [sum(hour * 3_600_000 <= when < (hour + 1) * 3_600_000 for when in seen.values()) for hour in range(24)]
    assert min(hours) > 50 and max(hours) < 160, hours


def test_a_newly_sealed_segment_is_due_within_the_hour_and_then_every_week() -> None:
    plan = ScrubPlan(WEEK_MS, lambda: 0.999)
    plan.set_sealed(A, [], 0)
    plan.set_sealed(A, [0], 1000)
    assert plan.due(1000 + SEALED_MS // 2) is None
    assert plan.due(1000 + SEALED_MS) == (A, 0)
    assert plan.due(1000 + SEALED_MS) == (A, 0), "it stays due until it is put off"
    plan.on_verified((A, 0), 2 * SEALED_MS)
    plan.set_sealed(A, [0, 10], 3 * SEALED_MS)
    assert plan.due(4 * SEALED_MS) == (A, 10)
    plan.on_verified((A, 10), 4 * SEALED_MS)
    assert plan.due(2 * SEALED_MS + WEEK_MS - 1) is None
    assert plan.due(2 * SEALED_MS + WEEK_MS) == (A, 0)


def test_nothing_waits_longer_than_the_interval() -> None:
    plan = ScrubPlan(1000, lambda: 0.999)
    plan.set_sealed(A, [0], 0)
    assert plan.due(1000) == (A, 0)
    plan.on_damaged((A, 0), 1000)
    plan.set_sealed(A, [0, 5], 1000)
    assert plan.due(1998) is None
    assert plan.due(2000) in {(A, 0), (A, 5)}
    plan.check_again((A, 0), 2000, DAY_MS)
    plan.on_verified((A, 5), 2000)
    assert plan.due(2999) is None and plan.due(3000) is not None


def test_damage_is_verified_again_after_a_day() -> None:
    plan = ScrubPlan(WEEK_MS, lambda: 0.0)
    plan.set_sealed(A, [0], 0)
    plan.on_damaged((A, 0), 0)
    assert plan.due(DAY_MS - 1) is None and plan.due(DAY_MS) == (A, 0)


def test_the_longest_due_partition_is_first() -> None:
    chances = iter([0.5, 0.1, 0.9])
    plan = ScrubPlan(1000, lambda: next(chances))
    for key in (A, B, (b"c" * 16, 0)):
        plan.set_sealed(key, [0], 0)
    order = []
    while (segment := plan.due(5000)) is not None:
        order.append(segment[0])
        plan.on_verified(segment, 5000)
    assert order == [B, A, (b"c" * 16, 0)]


def test_deleted_partitions_are_never_due() -> None:
    plan = ScrubPlan(1000, lambda: 0.0)
    plan.set_sealed(A, [0, 10, 20], 0)
    plan.set_sealed(B, [0], 0)
    assert plan.set_sealed(A, [10, 20], 1) == {0}
    plan.on_verified((A, 0), 1)  # it was deleted while it was read
    plan.forget(A)
    plan.forget(A)
    assert when_due(plan, 10_000, 100).keys() == {(B, 0)}
    assert plan.partitions() == [B]
    plan.set_sealed(A, [10], 10_000)
    assert plan.due(10_000) == (A, 10)


@given(st.lists(st.tuples(st.sampled_from("lfvda"), st.integers(0, 3), st.integers(0, 3000)), max_size=200))
def test_the_plan_contains_exactly_the_listed_segments(steps: list[tuple[str, int, int]]) -> None:
    plan, listed, now_ms = ScrubPlan(5000, random.Random(2).random), {A: set[int](), B: set[int]()}, 0
    for what, number, wait_ms in steps:
        key = (A, B)[number % 2]
        now_ms += wait_ms
        due = plan.due(now_ms)
        assert due is None or due[1] in listed[due[0]]
        if what == "l":
            listed[key] = {number * wait_ms % 7 + extra for extra in range(wait_ms % 5)}
            plan.set_sealed(key, listed[key], now_ms)
        elif what == "f":
            listed[key] = set()
            plan.forget(key)
        elif due is not None:
            {
                "v": plan.on_verified,
                "d": plan.on_damaged,
                "a": lambda segment, now: plan.check_again(segment, now, 100),
            }[what](due, now_ms)
    assert len(plan._heap) <= 64 + 2 * 14 + 14
    left = set()
    while (due := plan.due(now_ms + 5000)) is not None:
        left.add(due)
        plan.on_verified(due, now_ms + 5000)
    assert left == {(key, base) for key, bases in listed.items() for base in bases}


@pytest.mark.parametrize(
    ("bases", "start", "active", "sealed"),
    [
        ([0], 0, 0, []),
        ([0, 10, 20], 0, 20, [0, 10]),
        ([0, 10, 20], 15, 20, [10]),
        ([0, 10, 20], 10, 20, [10]),
        ([0, 10, 20], 25, 20, []),
        ([10, 20], 5, 20, [10]),
        ([], 0, 0, []),
    ],
)
def test_only_readable_sealed_segments_are_verified(
    bases: list[int], start: int, active: int, sealed: list[int]
) -> None:
    assert sealed_bases(bases, start, active) == sealed


# -- reading ---------------------------------------------------------------------------------------


def batches(count: int, first: int = 100, step: int = 3) -> list[bytes]:
    return [encode_batch(first + step * number, [1000 + number] * step) for number in range(count)]


def walk(path: Path, base: int) -> tuple[int, int, str | None, int]:
    """(position, next offset, problem, pieces) at the end."""
    piece, count = scrub._Piece(0, base, 0, False), 0
    while not piece.is_at_end:
        piece = check_piece(path, piece.position, piece.next_offset)
        count += 1
    return piece.position, piece.next_offset, piece.problem, count


def flip(path: Path, position: int, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("piece_bytes", [1, 61, 200, 1000, 4 << 20])
def test_pieces_cover_a_segment_whatever_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(scrub, "PIECE_BYTES", piece_bytes)
    path = write_segment(tmp_path, 100, batches(20))
    position, next_offset, problem, count = walk(path, 100)
    assert (position, next_offset, problem) == (path.stat().st_size, 160, None)
    assert count == 1 or 61 < piece_bytes < 4 << 20


@pytest.mark.parametrize("piece_bytes", [1, 200, 1000, 4 << 20])
def test_each_flipped_bit_is_found_at_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(scrub, "PIECE_BYTES", piece_bytes)
    written = batches(8)
    path = write_segment(tmp_path, 100, written)
    start = sum(map(len, written[:5]))
    # the leader epoch is not covered by the checksum; nor is the base offset, but a decreasing one
    # is detected
    unsummed = range(12, 16)
    for byte in [byte for byte in range(7, len(written[5])) if byte not in unsummed]:
        bit = 0 if byte == 7 else 3  # 115 -> 114: below the end of the previous batch
        flip(path, start + byte, bit)
        position, _, problem, _ = walk(path, 100)
        assert (position, problem is not None) == (start, True), f"byte {byte}"
        flip(path, start + byte, bit)
    assert walk(path, 100)[2] is None


def test_a_truncated_and_an_empty_segment(tmp_path: Path) -> None:
    written = batches(3)
    path = write_segment(tmp_path, 100, written)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert walk(path, 100)[0] == len(whole) - len(written[2]) and walk(path, 100)[2] is not None
    path.write_bytes(b"")
    assert walk(path, 100) == (0, 100, None, 1)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        check_piece(path, 0, 100)


def test_where_reading_continues(tmp_path: Path) -> None:
    written = batches(4)
    path = write_segment(tmp_path, 100, written)
    positions = [sum(map(len, written[:number])) for number in range(4)]
    flip(path, positions[1] + 70)
    assert next_sound(path, positions[1], 500) == (106, positions[2])
    flip(path, positions[2] + 70)
    assert next_sound(path, positions[1], 500) == (500, -1), "the one behind is bad as well"
    assert next_sound(path, positions[3], 500) == (500, -1), "there is none behind"
    flip(path, positions[1] + 9)
    assert next_sound(path, positions[1], 500) == (500, -1), "its length is not to be believed"


def test_uncached_reads_fall_back_on_older_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "_RWF_DONTCACHE", 1 << 30)  # no kernel supports it
    path = write_segment(tmp_path, 100, batches(5))
    assert walk(path, 100)[:3] == (path.stat().st_size, 115, None)


def test_a_disk_that_cannot_read_is_damage_and_a_lack_of_descriptors_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_segment(tmp_path, 100, batches(5))

    def refuse(code: int, part: str) -> None:
        def preadv(*_: object) -> int:
            raise OSError(code, os.strerror(code))

        def segment_scan(*_: object, **__: object) -> native.ScanResult:
            raise native.NativeError(code, f"{part} at position 4711")

        monkeypatch.setattr(scrub.os, "preadv", preadv)
        monkeypatch.setattr(scrub.native, "segment_scan", segment_scan)

    refuse(errno.EIO, "cannot read segment 100")
    assert walk(path, 100) == (0, 100, "the disk cannot read it: cannot read segment 100 at position 4711", 1)
    refuse(errno.ENOMEM, "no memory")
    with pytest.raises(OSError, match="Cannot allocate"):
        check_piece(path, 0, 100)


# -- the notice ------------------------------------------------------------------------------------


def test_found_damage_is_read_back(tmp_path: Path) -> None:
    one = Damage("t", b"\x00\xff" * 8, 2, 100, 4711, "a batch's CRC is wrong", 106, 5)
    assert damage.read(tmp_path, 0) == []
    damage.write(tmp_path, 0, [one])
    assert damage.read(tmp_path, 0) == [one] and damage.read(tmp_path, 1) == []
    damage.write(tmp_path, 0, [])
    assert damage.read(tmp_path, 0) == []
    (tmp_path / "damage.0.json").write_text('[{"topic": 1}]')
    assert damage.read(tmp_path, 0) == []
