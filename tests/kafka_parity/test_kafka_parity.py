"""mqd compared with Apache Kafka: a share of the cases. `python -m tests.kafka_parity` runs every API and version."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mqd.protocol import KNOWN
from mqd.protocol import messages as m
from mqd.protocol.schema.language import Versions
from perf.peers import maven
from perf.peers.peer import Unavailable
from tests.compat.kafka_tools import POM
from tests.kafka_parity.allowed import ALLOWED, OPEN
from tests.kafka_parity.brokers import both
from tests.kafka_parity.compare import ON_RESEND, Allowed, Difference, Table, differences
from tests.kafka_parity.journal import Journal
from tests.kafka_parity.model import World
from tests.kafka_parity.runner import Comparison, Report, divides, is_missing
from tests.kafka_parity.sides import Outcome
from tests.kafka_parity.stories import KEYS, generate
from tests.kafka_parity.witnesses import FIRST_NUMBER, WITNESSES, directed

QUICK = (
    ("Fetch", 12),
    ("ListOffsets", 11),
    ("Metadata", 4),
    ("OffsetFetch", 8),
    ("FindCoordinator", 4),
    ("Heartbeat", 4),
    ("LeaveGroup", 5),
    ("InitProducerId", 4),
    ("EndTxn", 3),
    ("ListGroups", 5),
)
SEED = int(os.environ.get("PARITY_SEED", "1"))


def _table() -> Table:
    return Table(ALLOWED + OPEN)


def _assert_alike(comparison: Comparison) -> None:
    lines = list(comparison.report.lines())
    print(f"seed {SEED}", *lines, sep="\n")
    assert not comparison.report.found, "\n".join(line for line in lines if line.startswith("DIFFERENT"))


def test_a_share_of_the_hot_apis(tmp_path: Path) -> None:
    try:
        maven.java()
        maven.jars(POM)
    except Unavailable as reason:
        pytest.skip(f"Apache Kafka cannot be had: {reason}")
    with both(tmp_path, _table()) as comparison:
        for name, version in QUICK:
            comparison.run(KEYS[name], version, SEED, 5)
        for name, version in sorted({(one.api, version) for one in WITNESSES for version in one.versions}):
            comparison.run(KEYS[name], version, SEED, 0)
        _assert_alike(comparison)
        met = comparison.table.used_entries()
    assert [one for one in WITNESSES if not any(map(one.is_for, met))] == [], "lines that their witness does not meet"


def test_cases_are_those_of_their_seed() -> None:
    first = generate(KEYS["OffsetCommit"], 8, 1, 20)
    assert len({repr(case) for case in first}) == 20
    assert repr(generate(KEYS["OffsetCommit"], 8, 1, 20)) == repr(first)
    assert repr(generate(KEYS["OffsetCommit"], 8, 1, 40)[:20]) == repr(first)
    assert repr(generate(KEYS["OffsetCommit"], 8, 2, 20)) != repr(first)


def test_each_witness_belongs_to_one_line_of_the_table() -> None:
    for one in WITNESSES:
        (line,) = filter(one.is_for, ALLOWED)
        if not one.of:
            assert all(version in Versions.parse(line.versions) for version in one.versions), one


def test_directed_cases_are_compared_beside_those_of_every_seed_and_do_not_count_as_theirs() -> None:
    numbers = [number for number, _ in directed(KEYS["Produce"], 11)]
    assert numbers[:2] == [FIRST_NUMBER, FIRST_NUMBER + 1]
    journal = Journal()
    journal.add({("Produce", 11, 1, number): ([], []) for number in (0, *numbers)}, Table(()))
    assert Report(journal).scarce(3) == ["Produce 11: 1 cases"]


def test_steps_after_a_failure_of_one_side_alone_are_not_compared() -> None:
    field = "responses[].partition_responses[].error_code"
    assert divides(Difference("Produce", 9, field, -1, 76))
    assert divides(Difference("Produce", 9, field, 49, 0))
    assert not divides(Difference("Produce", 9, field, 48, 87))
    assert not divides(Difference("Produce", 9, "responses[].partition_responses[].base_offset", 0, 1))


def test_a_version_with_too_few_cases_needs_a_reason() -> None:
    journal = Journal()
    for number in range(2):
        for case in (("Fetch", 12, 1, number), ("ApiVersions", 0, 1, number), ("DescribeCluster", 1, 1, number)):
            journal.add({case: ([], [])}, Table(()))
    journal.add({("Fetch", 12, 2, number): ([], []) for number in range(3)}, Table(()))  # another seed's cases
    journal.add({("DescribeCluster", 1, 2, 0): ([], [])}, Table(()))  # may repeat the first one's
    assert Report(journal).scarce(3) == ["DescribeCluster 1: 2 cases"]
    assert Report(journal).scarce(2) == []


def test_an_awaited_field_is_read_from_the_first_element_of_each_list() -> None:
    acquired = m.ShareFetchResponse.AcquiredRecords(0, 4, 1)
    for runs in ([], [acquired]):
        partition = m.ShareFetchResponse.Partition(acquired_records=runs)
        body = m.ShareFetchResponse(responses=[m.ShareFetchResponse.Topic(partitions=[partition])])
        assert is_missing(body, "responses.partitions.acquired_records") is (not runs)
    assert is_missing(m.ShareFetchResponse(), "responses.partitions.acquired_records")
    assert is_missing(m.ShareGroupHeartbeatResponse(), "assignment.topic_partitions")


def test_an_entry_of_the_table_covers_its_api_versions_and_field_alone() -> None:
    field = "topics[].partitions[].error_code"
    entry = ALLOWED[0].__class__("Fetch", "4-9", field, "a reason", kafka=3, mqd=6)
    table = Table((entry,))
    assert not table.allows(Difference("Fetch", 10, field, 3, 6))
    assert not table.allows(Difference("ListOffsets", 4, field, 3, 6))
    assert not table.allows(Difference("Fetch", 4, "topics[].error_code", 3, 6))
    assert not table.allows(Difference("Fetch", 4, field, 6, 3))
    assert table.unused() == [entry]
    assert table.allows(Difference("Fetch", 9, field, 3, 6))
    assert not table.unused()


def test_an_entry_may_ask_for_a_part_of_an_error_message() -> None:
    table = Table((ALLOWED[0].__class__("Fetch", "4", "error_code", "a reason", kafka=0, mqd=40, said="min.insync"),))
    assert not table.allows(Difference("Fetch", 4, "error_code", 0, 40))
    assert not table.allows(Difference("Fetch", 4, "error_code", 0, 40, ("", "retention.ms cannot be 'x'")))
    assert table.allows(Difference("Fetch", 4, "error_code", 0, 40, ("", "min.insync.replicas is too large")))


def test_a_difference_of_codes_has_the_messages_beside_them() -> None:
    resource = m.AlterConfigsResponse.ResourceResponse
    bodies = [
        m.AlterConfigsResponse(responses=[resource(error_code=code, error_message=message, resource_name="a")])
        for code, message in ((0, None), (40, "why"))
    ]
    outcomes = Outcome("answered", bodies[0]), Outcome("answered", bodies[1])
    (found,) = differences(33, 1, outcomes, (World("a"), World("a")), Table(()))
    assert found.messages == ("", "why")


def test_duplicate_names_are_paired_by_error() -> None:
    def outcome(*codes: int) -> Outcome:
        results = [m.DeleteTopicsResponse.TopicResult(name="t", error_code=code) for code in codes]
        return Outcome("answered", m.DeleteTopicsResponse(responses=results))

    def found(kafka: Outcome, mqd: Outcome, table: tuple[Allowed, ...]) -> list[tuple[str, object, object]]:
        compared = differences(KEYS["DeleteTopics"], 5, (kafka, mqd), (World("a"), World("a")), Table(table))
        return [(one.field, one.kafka, one.mqd) for one in compared]

    unordered = (Allowed("DeleteTopics", "1-6", "responses", "hash tables", order=True),)
    field = "responses[].error_code"
    assert found(outcome(42, 0), outcome(0, 42), unordered) == []
    assert found(outcome(42, 0), outcome(0, 3), unordered) == [(field, 42, 3)]
    assert found(outcome(42, 0), outcome(0, 42), ()) == [(field, 42, 0), (field, 0, 42)]


def test_members_with_the_same_symbol_are_paired_by_equality() -> None:
    def outcome(*assignments: bytes) -> Outcome:
        members = [
            m.DescribeGroupsResponse.Member(f"one-{number:08x}-1111-1111-1111-111111111111", member_assignment=assigned)
            for number, assigned in enumerate(assignments)
        ]
        return Outcome("answered", m.DescribeGroupsResponse(groups=[m.DescribeGroupsResponse.Group(members=members)]))

    def found(kafka: Outcome, mqd: Outcome) -> list[tuple[str, object, object]]:
        table = Table((Allowed("DescribeGroups", "0-6", "groups[].members", "hash tables", order=True),))
        compared = differences(KEYS["DescribeGroups"], 5, (kafka, mqd), (World("a"), World("a")), table)
        return [(one.field, one.kafka, one.mqd) for one in compared]

    assert found(outcome(b"", b"whole"), outcome(b"whole", b"")) == []
    assert found(outcome(b"", b"whole"), outcome(b"whole", b"x")) == [
        ("groups[].members[].member_assignment", b"", b"x")
    ]


def _found(key: int, version: int, kafka: object, mqd: object) -> list[tuple[str, object, object]]:
    """Without a table."""
    outcomes = Outcome("answered", kafka), Outcome("answered", mqd)
    compared = differences(key, version, outcomes, (World("a"), World("a")), Table(()))
    return [(one.field, one.kafka, one.mqd) for one in compared]


def test_topics_without_partitions_may_be_missing_only_where_kafka_failed() -> None:
    def answer(*topics: tuple[str, list[int]]) -> m.FetchResponse:
        made = m.FetchResponse.PartitionData
        return m.FetchResponse(
            responses=[
                m.FetchResponse.TopicResponse(
                    topic=name, partitions=[made(number, code) for number, code in enumerate(codes)]
                )
                for name, codes in topics
            ]
        )

    code, alone = "responses[].partitions[].error_code", "responses[] only Kafka"
    failed = answer(("t", [-1]), ("empty", []))
    assert _found(KEYS["Fetch"], 4, failed, answer(("t", [3]))) == [(code, -1, 3)]
    assert _found(KEYS["Fetch"], 4, failed, answer()) == [(alone, "'t'", None)]
    for codes in ([], [0], [-1, 0]):
        whole = answer(("t", codes), ("empty", []))
        assert _found(KEYS["Fetch"], 4, whole, answer(("t", codes))) == [(alone, "'empty'", None)]


def test_an_error_where_kafka_wrote_a_batch_is_not_one_where_it_repeated_an_answer() -> None:
    def answer(code: int, log_append_time_ms: int = -1) -> m.ProduceResponse:
        partition = m.ProduceResponse.PartitionResponse(0, code, 0, log_append_time_ms)
        return m.ProduceResponse(responses=[m.ProduceResponse.TopicResponse("t", partition_responses=[partition])])

    field = "responses[].partition_responses[].error_code"
    assert _found(KEYS["Produce"], 9, answer(0), answer(45)) == [(field, 0, 45)]
    assert _found(KEYS["Produce"], 9, answer(46), answer(45)) == [(field, 46, 45)]
    repeated = f"{field}{ON_RESEND}"
    assert _found(KEYS["Produce"], 9, answer(0, 1_700_000_000_000), answer(45)) == [(repeated, 0, 45)]
    assert divides(Difference("Produce", 9, repeated, 0, 45))


def test_a_run_continues_with_missing_and_differing_cases(tmp_path: Path) -> None:
    entry = ALLOWED[0].__class__("Fetch", "4-9", "error_code", "a reason", kafka=3, mqd=6)
    table, file = Table((entry,)), tmp_path / "journal"
    differed, once = Difference("Fetch", 4, "error_code", 1, 2), Difference("Fetch", 4, "error_code", 5, 2)
    assert table.allows(Difference("Fetch", 4, "error_code", 3, 6))
    same, other = ("Fetch", 4, 1, 0), ("Fetch", 4, 1, 1)
    Journal(file).add({same: ([], [once]), other: ([differed], [])}, table)
    journal = Journal(file)
    assert (journal.is_done(same), journal.is_done(other), journal.is_done(("Fetch", 4, 2, 0))) == (True, False, False)
    assert journal.unmet(Table((entry,))) == []
    report = Report(journal)
    assert (report.cases, dict(report.found)) == ({("Fetch", 4): 2}, {differed: [other]})
    journal.add({other: ([], [])}, table)
    assert Journal(file).is_done(other) and not Report(Journal(file)).found


@pytest.mark.parametrize("entry", ALLOWED + OPEN, ids=lambda entry: f"{entry.api}-{entry.field}")
def test_an_entry_has_a_reason_and_an_api_that_is_known(entry) -> None:
    assert len(entry.reason) > 10
    assert entry.api == "*" or entry.api in {spec.name for spec in KNOWN.values()}


def test_a_name_is_the_same_symbol_at_both_brokers() -> None:
    one, other = World("a-"), World("b-")
    assert (one.resolve("¤t"), other.resolve("¤t")) == ("a-t", "b-t")
