"""The checker finds each planted fault, and nothing in a correct history."""

import dataclasses

import pytest

from tests.crash.checker import Acknowledged, FinalLog, History, Seen, check, identity_of, make_value

COUNT = 40


def sound() -> tuple[History, dict[tuple[str, int], FinalLog]]:
    """Two idempotent producers that alternate on two partitions; the last four records are in the
    log without an acknowledgement.
    """
    history = History(sent={"p0": COUNT, "p1": COUNT}, idempotent={"p0", "p1"})
    final = {("t", partition): FinalLog(0, 0, []) for partition in range(2)}
    for counter in range(COUNT):
        for producer in ("p0", "p1"):
            partition = counter % 2
            log = final["t", partition]
            offset, log.log_end_offset = log.log_end_offset, log.log_end_offset + 1
            value = make_value(producer, counter)
            log.records.append((offset, value))
            if counter < COUNT - 2:
                history.acknowledged.append(Acknowledged(producer, counter, "t", partition, offset, counter))
                for observer in ("c0", "c1"):
                    history.seen.append(Seen(observer, "t", partition, offset, value, counter))
    return history, final


def kinds(history: History, final: dict[tuple[str, int], FinalLog], **options) -> set[str]:
    return {one.kind for one in check(history, final, **options)}


def test_nothing_is_found_in_a_correct_history():
    assert check(*sound()) == []


def test_values_carry_their_identity_and_are_unique():
    values = {make_value(producer, counter) for producer in ("a", "b") for counter in range(500)}
    assert len(values) == 1000
    assert identity_of(make_value("a", 499)) == ("a", 499)
    for broken in (b"", b"abc", None, make_value("a", 1)[:-1]):
        with pytest.raises(ValueError, match="no producer"):
            identity_of(broken)


def test_an_acknowledged_record_that_was_truncated_is_lost():
    history, final = sound()
    log = final["t", 0]
    del log.records[20:]
    log.log_end_offset = 20
    assert {"lost", "vanished"} == kinds(history, final)


def test_a_missing_partition_is_lost():
    history, final = sound()
    del final["t", 1]
    assert "lost" in kinds(history, final)


def test_an_unacknowledged_end_may_be_truncated():
    history, final = sound()
    log = final["t", 0]
    del log.records[-2:]
    log.log_end_offset -= 2
    assert check(history, final) == []


def test_records_below_the_log_start_may_be_missing():
    history, final = sound()
    log = final["t", 0]
    del log.records[:10]
    log.log_start_offset = 10
    assert check(history, final) == []


def test_a_duplicate():
    history, final = sound()
    log = final["t", 0]
    log.records.append((log.log_end_offset, make_value("p0", 4)))
    log.log_end_offset += 1
    assert kinds(history, final) == {"duplicate"}
    assert check(dataclasses.replace(history, idempotent={"p1"}), final) == []  # others may


def test_a_duplicate_in_another_partition():
    history, final = sound()
    log = final["t", 1]
    log.records.append((log.log_end_offset, make_value("p0", 4)))
    log.log_end_offset += 1
    assert "duplicate" in kinds(history, final)


def test_records_in_another_order():
    history, final = sound()
    records = final["t", 0].records
    (first, one), (second, other) = records[36], records[38]  # beyond the acknowledged ones: counters 36 and 38 of p0
    assert identity_of(one)[0] == identity_of(other)[0]
    history.acknowledged = [ack for ack in history.acknowledged if ack.offset < 36]
    history.seen = [seen for seen in history.seen if seen.offset < 36]
    records[36], records[38] = (first, other), (second, one)
    assert kinds(history, final) == {"reordered"}


def test_one_changed_byte():
    history, final = sound()
    offset, value = final["t", 0].records[7]
    final["t", 0].records[7] = (offset, value[:3] + bytes([value[3] ^ 1]) + value[4:])
    assert kinds(history, final) == {"corrupt"}


def test_an_offset_that_changed_its_value():
    history, final = sound()
    offset, _ = final["t", 0].records[-1]
    history.seen.append(Seen("c0", "t", 0, 38, make_value("p0", 38), 99))
    history.seen.append(Seen("c0", "t", 0, offset, make_value("p1", 39), 99))
    assert "changed" in kinds(history, final)


def test_an_acknowledgement_of_another_offset():
    history, final = sound()
    history.acknowledged[5] = dataclasses.replace(history.acknowledged[5], offset=history.acknowledged[5].offset + 1)
    assert kinds(history, final) == {"changed"}


def test_an_acknowledgement_without_an_offset():
    history, final = sound()
    first = history.acknowledged[0] = dataclasses.replace(history.acknowledged[0], offset=None)
    assert kinds(history, final) == set()
    history.seen = [one for one in history.seen if (one.partition, one.offset) != (first.partition, 0)]
    log = final["t", first.partition]
    log.records[0] = (0, make_value("p2", 0))
    history.sent["p2"] = 1
    assert kinds(history, final) == {"lost"}


def test_a_hole_in_the_log():
    history, final = sound()
    del final["t", 0].records[-2]
    assert kinds(history, final) == {"gap"}
    del final["t", 0].records[-1]  # now the end is missing
    assert kinds(history, final) == {"gap"}


def test_a_consumer_that_skips_or_repeats():
    history, final = sound()
    skipped = [one for one in history.seen if (one.observer, one.partition, one.offset) != ("c1", 0, 9)]
    assert kinds(dataclasses.replace(history, seen=skipped), final) == {"disordered"}
    again = history.seen + [dataclasses.replace(history.seen[0], at_ns=99)]
    assert kinds(dataclasses.replace(history, seen=again), final) == {"disordered"}


def test_a_record_read_by_a_consumer_vanished():
    history, final = sound()
    history.acknowledged = [ack for ack in history.acknowledged if ack.offset < 30]
    for log in final.values():
        del log.records[30:]
        log.log_end_offset = 30
    assert kinds(history, final) == {"vanished"}
    assert check(history, final, volatile_topics=["t"]) == []


def test_a_record_that_was_not_sent():
    history, final = sound()
    log = final["t", 0]
    log.records.append((log.log_end_offset, make_value("p0", COUNT)))
    log.log_end_offset += 1
    assert kinds(history, final) == {"unsent"}


def test_records_until_a_time():
    history, final = sound()
    for log in final.values():
        del log.records[20:]
        log.log_end_offset = 20
    assert check(history, final) != []
    assert check(history.until(20), final) == []
