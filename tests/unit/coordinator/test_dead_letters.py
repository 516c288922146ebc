"""Dead letters: the writer of a share-partition, step by step, and the records that it writes. Whole
histories: tests/sim/share/test_dead_letters_sim.py.
"""

from __future__ import annotations

import pytest

from mqd.coordinator.share.dead_letter_writer import (
    ARCHIVE_TIMEOUT_MS,
    BACKOFF_MS,
    BACKOFF_MS_MAX,
    COMMITTING,
    FENCING,
    LETTERS_MAX,
    LOADING,
    READING,
    STOPPED,
    WRITING,
    WRITING_PROGRESS,
    Archive,
    DeadLetterWriter,
    Letter,
    LoadedState,
    ObservedWrite,
    Outcome,
    Progress,
    Step,
    Wake,
    Woken,
    parse_progress,
    ranges_of,
)
from mqd.coordinator.share.letter_records import (
    BATCH_OVERHEAD_BYTES,
    EXHAUSTED_MESSAGE,
    REJECTED_MESSAGE,
    CopiedFields,
    LetterSource,
    batches,
    letter_records,
    size_upper_bound,
)
from mqd.coordinator.share.runs import ARCHIVED, ARCHIVING, Run
from mqd.protocol.records import decode_batch, decode_batch_header

SOURCE = LetterSource("orders", 3, "jobs", 5)


class Writer:
    """Each method is one event; the actions are recorded."""

    def __init__(
        self, *runs: Run, progress: str | None = None, progress_end: int | None = None, progress_bytes_max: int = 4_000
    ) -> None:
        self.now_ms, self.core = 1_000, DeadLetterWriter(7, progress_bytes_max)
        self.actions = self.core.start()
        self.expect(FENCING)
        self.done()
        self.expect(LOADING)
        self.done(loaded=LoadedState(4, runs))
        self.expect(READING)
        self.done(progress=progress, progress_end=progress_end)

    def handle(self, event: ObservedWrite | Outcome | Woken) -> None:
        self.actions = self.core.handle(event, self.now_ms)
        self.core.check()

    def done(self, **fields: object) -> None:
        self.handle(Outcome(self.core.token, **fields))

    def expect(self, kind: str) -> Step:
        (step,) = self.actions
        assert isinstance(step, Step) and step.kind == kind
        return step

    def archive(self) -> tuple[tuple[int, int], ...]:
        archive, _ = self.actions
        assert isinstance(archive, Archive) and (archive.state_epoch, archive.leader_epoch) == (4, 7)
        return archive.ranges

    def observe(self, *runs: Run, start: int = -1, state_epoch: int = 4) -> None:
        self.handle(ObservedWrite(state_epoch, start, runs))


def dead(first: int, last: int, deliveries: int = 1) -> Run:
    return Run(first, last, ARCHIVING, deliveries)


def progress_of(*offsets: int) -> str:
    return Progress(4, 7, ranges_of(offsets)).encode()


def test_records_rejected_meanwhile_are_in_the_next_transaction() -> None:
    writer = Writer(dead(5, 6), dead(9, 9, 5))
    assert writer.expect(WRITING).letters == (Letter(5, 1), Letter(6, 1), Letter(9, 5))
    writer.observe(dead(20, 20))
    assert writer.actions == []
    writer.done()
    assert parse_progress(writer.expect(WRITING_PROGRESS).progress) == Progress(4, 7, [(5, 6), (9, 9)])
    writer.done()
    writer.expect(COMMITTING)
    writer.done()
    assert writer.archive() == ((5, 6), (9, 9)) and writer.core.letter_count == 3
    writer.observe(Run(5, 6, ARCHIVED, 1))
    assert writer.actions == []  # one progress record is enough only if all of it is archived
    writer.observe(Run(9, 9, ARCHIVED, 5), start=10)
    assert writer.expect(WRITING).letters == (Letter(20, 1),)


def test_records_named_in_the_progress_record_have_their_dead_letter() -> None:
    writer = Writer(dead(5, 9), progress=progress_of(3, 6, 7))
    assert writer.archive() == ((6, 7),)
    writer.observe(Run(6, 7, ARCHIVED, 1))
    assert [letter.offset for letter in writer.expect(WRITING).letters] == [5, 8, 9]


@pytest.mark.parametrize("progress", [Progress(3, 7, [(5, 5)]).encode(), "", "5", "3;4;7;5", "2;4;5", "1;4;x", "1;4"])
def test_a_progress_record_of_another_state_epoch_or_version_is_ignored(progress: str) -> None:
    assert Writer(dead(5, 5), progress=progress).expect(WRITING).letters == (Letter(5, 1),)


def test_a_progress_record_of_version_1_is_known() -> None:
    assert Writer(dead(5, 9), progress="1;4;3,3-1").archive() == ((6, 7),)


def test_records_at_the_offsets_of_lost_ones_get_their_own_letter() -> None:
    writer = Writer(dead(5, 9), progress=progress_of(5, 6, 7, 8), progress_end=7)
    assert writer.archive() == ((5, 6),)
    writer.observe(Run(5, 6, ARCHIVED, 1))
    assert [letter.offset for letter in writer.expect(WRITING).letters] == [7, 8, 9]


def test_failures_are_retried_with_backoff_forever() -> None:
    writer = Writer(dead(5, 5))
    waited: list[int] = []
    for _ in range(8):
        writer.done(succeeded=False)
        (wake,) = writer.actions
        assert isinstance(wake, Wake)
        waited.append(wake.at_ms - writer.now_ms)
        writer.handle(Woken())
        assert writer.actions == []  # too early
        writer.now_ms = wake.at_ms
        writer.handle(Woken())
        writer.expect(FENCING)
    assert waited == [min(BACKOFF_MS << turn, BACKOFF_MS_MAX) for turn in range(8)]


def test_archive_is_sent_again_to_an_owner_that_does_not_archive() -> None:
    writer = Writer(dead(5, 5), progress=progress_of(5))
    writer.now_ms += ARCHIVE_TIMEOUT_MS
    writer.handle(Woken())
    writer.expect(FENCING)


def test_another_state_epoch_restarts_the_mover() -> None:
    writer = Writer(dead(5, 5))
    stale = writer.core.token
    writer.observe(dead(8, 8), state_epoch=5)
    writer.expect(FENCING)
    writer.handle(Outcome(stale))
    assert writer.actions == []


def test_a_writer_of_an_earlier_leader_stops() -> None:
    core = DeadLetterWriter(7)
    core.start()
    core.handle(Outcome(core.token), 0)
    assert core.handle(Outcome(core.token, is_superseded=True), 0) == [] and core.phase == STOPPED
    assert core.handle(ObservedWrite(4, -1, (dead(1, 1),)), 0) == []


def test_records_without_a_letter_are_archived() -> None:
    writer = Writer(dead(5, 6))
    writer.done(is_unwanted=True)
    assert writer.archive() == ((5, 6),) and writer.core.letter_count == 0


def test_a_transaction_is_bounded_by_the_size_of_its_progress_record() -> None:
    scattered = [dead(offset, offset) for offset in range(0, 4_000, 2)]
    assert len(Writer(*scattered).expect(WRITING).letters) == LETTERS_MAX
    letters = Writer(*scattered, progress_bytes_max=100).expect(WRITING).letters
    assert len(letters) > 10 and len(progress_of(*(letter.offset for letter in letters))) <= 100


def test_headers_say_which_record_and_why() -> None:
    letters = [Letter(8, 1), Letter(9, 5)]
    copied = {9: CopiedFields(b"k", b"v", (("own", b"1"), ("__dlq.errors.offset", b"old")))}
    first, second = letter_records(SOURCE, letters, copied, 50, 1_000)
    assert first.headers == [
        ("__dlq.errors.topic", b"orders"),
        ("__dlq.errors.partition", b"3"),
        ("__dlq.errors.offset", b"8"),
        ("__dlq.errors.group", b"jobs"),
        ("__dlq.errors.delivery.count", b"1"),
        ("__dlq.errors.message", REJECTED_MESSAGE.encode()),
    ]
    assert (first.key, first.value) == (None, None)
    assert (second.key, second.value, second.headers[0]) == (b"k", b"v", ("own", b"1"))
    assert dict(second.headers)["__dlq.errors.offset"] == b"9"
    assert dict(second.headers)["__dlq.errors.message"] == EXHAUSTED_MESSAGE.encode()


def test_a_letter_that_is_too_large_has_only_headers() -> None:
    copied = {8: CopiedFields(b"k", bytes(1_000)), 9: CopiedFields(b"k", bytes(10))}
    first, second = letter_records(SOURCE, [Letter(8, 1), Letter(9, 1)], copied, 50, 1_000)
    assert first.value is None and second.value == bytes(10)
    assert size_upper_bound(second) + BATCH_OVERHEAD_BYTES <= 1_000


def test_batches_are_transactional_and_not_larger_than_allowed() -> None:
    records = letter_records(SOURCE, [Letter(offset, 1) for offset in range(20)], {}, 50, 1_000)
    found = batches(records, 1_000, 77, 2)
    assert len(found) > 1 and all(len(batch) <= 1_000 for batch in found)
    for batch in found:
        header = decode_batch_header(batch)
        assert (header.producer_id, header.producer_epoch, header.base_sequence) == (77, 2, -1)
        assert header.attributes & 16
    offsets = [dict(one.headers)["__dlq.errors.offset"] for batch in found for one in decode_batch(batch)]
    assert offsets == [b"%d" % offset for offset in range(20)]
