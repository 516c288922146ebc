"""The quorum core by single events: a quorum of one, elections, the leader, followers; waiting for
the disk, and refusals.
"""

from __future__ import annotations

import pytest

from mqd.cluster.raft import events
from mqd.cluster.raft.core import QuorumBroken
from mqd.cluster.raft.events import NO_DEADLINE, Stored, VoteState
from mqd.cluster.raft.messages import (
    DATA,
    EndEpoch,
    Fetch,
    FetchResponse,
    ReplicaKey,
    VoteRequest,
    VoteResponse,
    leader_change_batch,
    make_batch,
)
from tests.unit.cluster.quorum_driver import SECOND, Driver, answer, follower, key, messages, meta, of, three

# -- a quorum of one -------------------------------------------------------------------------------


def test_one_voter_elects_itself_and_commits_with_its_own_flush_alone() -> None:
    driver = Driver()
    assert [type(effect) for effect in driver.effects[:1]] == [events.PersistVote]
    assert not of(driver(events.DiskDone(1)), events.BecameActive)
    effects = driver(events.DiskDone(2))
    assert of(effects, events.BecameActive) == [events.BecameActive(1, 1, previous_epoch=0)]
    effects = driver(events.Propose("p", (b"a", b"b"), 1))
    assert [type(effect) for effect in effects] == [events.AppendLog]
    effects = driver(events.DiskDone(3))
    assert [batch.values for batch in of(effects, events.Committed)[0].batches] == [(b"a", b"b")]
    assert not of(driver.effects, events.Send)
    assert driver.core.next_deadline_ns == NO_DEADLINE == driver.core.lease_deadline_ns(driver.now)


def test_one_flush_may_cover_many_appends() -> None:
    driver = Driver()
    driver.disk()
    for number in range(3):
        driver(events.Propose(number, (b"x",), 1 + number))
    effects = driver(events.DiskDone(5))
    assert of(effects, events.Committed)[0].next_offset == 4


def test_a_full_disk_refuses_changes_and_the_quorum_of_one_continues() -> None:
    driver = Driver()
    driver.disk()
    driver(events.Propose("first", (b"a",), 1))
    driver(events.Propose("second", (b"b",), 2))
    effects = driver(events.DiskRefused(3, "no space"))
    assert of(effects, events.ProposalsDropped) == [events.ProposalsDropped(1, "no space")]
    assert driver.core.is_active and driver.core.next_offset == 1
    driver(events.Propose("third", (b"c",), 1))
    assert of(driver(events.DiskDone(5)), events.Committed)[0].batches[0].values == (b"c",)


def test_a_write_to_a_full_disk_at_the_start_is_retried() -> None:
    driver = Driver()
    driver(events.DiskRefused(1, "no space"))
    assert not driver.core.is_leader
    effects = driver.after(2)
    assert of(effects, events.PersistVote)
    driver.disk()
    assert driver.core.is_active


def test_batches_sent_to_others_are_not_dropped_but_left_to_a_new_epoch() -> None:
    driver = Driver()
    driver.disk()
    driver.fetch(9)
    driver(events.Propose("first", (b"a",), 1))
    effects = driver(events.DiskRefused(3, "no space"))
    assert of(effects, events.Deposed) and not of(effects, events.ProposalsDropped)
    driver.after(5)
    driver.disk()
    assert driver.core.is_active and driver.core.epoch == 2


def test_a_proposal_made_for_another_offset_is_refused() -> None:
    driver = Driver()
    assert of(driver(events.Propose("early", (b"a",), 0)), events.ProposalRefused)
    driver.disk()
    assert of(driver(events.Propose("stale", (b"a",), 0)), events.ProposalRefused)[0].token == "stale"
    assert of(driver(events.Propose("large", (b"a" * (9 << 20),), 1)), events.ProposalRefused)


def test_a_restart_applies_the_log_only_after_an_election() -> None:
    log = (leader_change_batch(0, 1, key(1)), make_batch(1, 1, DATA, (b"a",)))
    driver = Driver(stored=Stored(VoteState(1, key(1)), meta(1), 10, log))
    assert not of(driver.effects, events.Committed)
    effects = driver.disk()
    assert of(effects, events.Committed)[0].batches[:2] == log and driver.core.epoch == 2


def test_batches_known_to_be_committed_are_applied_at_once() -> None:
    log = (leader_change_batch(0, 1, key(1)), make_batch(1, 1, DATA, (b"a",)))
    driver = Driver(stored=Stored(VoteState(1, key(1)), meta(1, 2), 10, log, committed_offset=1))
    assert of(driver.effects, events.Committed)[0].batches == log[:1]


def test_the_only_voter_keeps_a_promise_that_it_may_have_made() -> None:
    """It may be the last of several voters, and have followed a lost leader."""
    driver = Driver(stored=Stored(VoteState(3, None, key(2)), meta(1)))
    assert not of(driver.effects, events.PersistVote)
    assert not of(driver.after(1.9), events.PersistVote)
    assert of(driver.after(0.2), events.PersistVote)


def test_a_slow_disk_does_not_cause_repeated_elections() -> None:
    driver = Driver()
    driver.after(60)
    driver.disk()
    assert driver.core.is_active and driver.core.epoch == 1


# -- elections -------------------------------------------------------------------------------------


def test_no_epoch_begins_without_a_majority_that_would_vote() -> None:
    driver = Driver(stored=Stored(snapshot=meta(1, 2, 3)))
    driver.after(30)
    assert driver.core.epoch == 0 and not of(driver.effects, events.PersistVote)
    assert all(request.pre_vote for request in messages(driver.effects, VoteRequest))


def test_nothing_is_sent_before_the_vote_is_durable() -> None:
    driver = Driver(stored=Stored(snapshot=meta(1, 2, 3)))
    request = VoteRequest(1, 5, key(2), key(1), 0, 0, False, 7)
    effects = driver.receive(2, request)
    assert of(effects, events.PersistVote)[0].vote == VoteState(5, key(2)) and not of(effects, events.Send)
    assert messages(driver.disk(), VoteResponse) == [VoteResponse(1, 5, key(1), True, False, 7, -1)]
    assert (
        messages(driver.receive(3, VoteRequest(1, 5, key(3), key(1), 0, 0, False, 8)), VoteResponse)[0].granted is False
    )
    assert messages(driver.receive(2, request), VoteResponse)[0].granted is True


def test_a_vote_request_for_another_directory_is_refused() -> None:
    driver = Driver(stored=Stored(snapshot=meta(1, 2, 3)))
    assert not driver.receive(2, VoteRequest(1, 5, key(2), ReplicaKey(1, b"another-director"), 0, 0, False, 7))


def test_a_shorter_log_gets_no_vote() -> None:
    log = (leader_change_batch(0, 3, key(2)), make_batch(1, 3, DATA, (b"a",)))
    driver = Driver(stored=Stored(VoteState(3), meta(1, 2, 3), 10, log))
    driver.receive(3, VoteRequest(1, 9, key(3), key(1), 1, 3, False, 7))
    assert messages(driver.disk(), VoteResponse)[0].granted is False
    driver.receive(3, VoteRequest(1, 9, key(3), key(1), 9, 2, False, 8))
    driver.receive(3, VoteRequest(1, 9, key(3), key(1), 2, 3, False, 9))
    driver.disk()
    assert [response.granted for response in messages(driver.effects, VoteResponse)] == [False, False, True]


def test_a_follower_does_not_vote_while_its_promise_lasts() -> None:
    driver = follower()
    requested = messages(driver.effects, Fetch)[-1]
    driver.receive(2, FetchResponse(1, 4, 2, key(2), requested.sequence, 55, 0))
    driver.disk()
    request = VoteRequest(1, 9, key(3), key(1), 9, 9, False, 7)
    driver.now += 2 * SECOND - 1
    assert messages(driver.receive(3, request), VoteResponse)[0].granted is False and driver.core.epoch == 4
    driver.now += 1
    driver.receive(3, request)
    assert messages(driver.disk(), VoteResponse)[0].granted is True


def test_a_promise_ends_when_the_leader_resigns() -> None:
    driver = follower()
    driver.receive(2, FetchResponse(1, 4, 2, key(2), messages(driver.effects, Fetch)[-1].sequence, 55, 0))
    driver.disk()
    driver.receive(2, EndEpoch(1, 4, key(2), (3, 1)))
    assert (
        messages(driver.receive(3, VoteRequest(1, 4, key(3), key(1), 9, 9, True, 7)), VoteResponse)[0].granted is True
    )


def test_the_named_successor_campaigns_at_once() -> None:
    driver = follower()
    driver.receive(2, EndEpoch(1, 4, key(2), (1, 3)))
    effects = driver.after(0.01)
    assert [request.pre_vote for request in messages(effects, VoteRequest)] == [True, True]


# -- the leader ------------------------------------------------------------------------------------


def test_a_leader_is_active_when_a_record_of_its_own_epoch_is_committed() -> None:
    driver = three(active=False)
    assert driver.core.is_leader and not driver.core.is_active and driver.core.lease_deadline_ns(driver.now) == 0
    driver.fetch(2, offset=0)
    assert not driver.core.is_active
    driver.fetch(2, offset=1)
    assert driver.core.is_active


def test_the_lease_counts_from_when_the_response_was_sent() -> None:
    driver = three()
    assert driver.core.lease_deadline_ns(driver.now) == 0
    driver.after(0.6)
    sent = messages(driver.effects, FetchResponse)[-1].sent_ns
    driver.now += SECOND // 2
    driver.fetch(2, stamp=sent)
    assert driver.core.lease_deadline_ns(driver.now) == sent + 3 * SECOND // 2
    driver.fetch(2, stamp=driver.now + 99)
    assert driver.core.lease_deadline_ns(driver.now) == sent + 3 * SECOND // 2, (
        "a stamp from the future is none of ours"
    )


def test_a_fetch_waits_for_new_records() -> None:
    driver = three()
    assert not messages(driver.fetch(2, sequence=5), FetchResponse)
    effects = driver(events.Propose("p", (b"a",), 1))
    answer = messages(effects, FetchResponse)[0]
    assert (answer.sequence, [batch.values for batch in answer.batches], answer.high_watermark) == (5, [(b"a",)], 1)
    assert not messages(driver.fetch(2, sequence=6), FetchResponse)
    assert messages(driver.disk(), FetchResponse)[0].high_watermark == 2


def test_its_own_disk_counts_only_when_it_is_flushed() -> None:
    driver = three()
    driver.fetch(3)
    driver(events.Propose("p", (b"a",), 1))
    driver.fetch(2, offset=2)
    assert driver.core.high_watermark == 1
    assert of(driver.disk(), events.Committed)[0].next_offset == 2


def test_others_commit_without_us_but_we_apply_only_flushed_records() -> None:
    driver = three()
    driver(events.Propose("p", (b"a",), 1))
    driver.fetch(2, offset=2)
    effects = driver.fetch(3, offset=2)
    assert driver.core.high_watermark == 2 and not of(effects, events.Committed)
    assert of(driver.disk(), events.Committed)


def test_the_point_where_logs_diverge_is_reported() -> None:
    driver = three()
    effects = driver.receive(3, Fetch(1, driver.core.epoch, key(3), 5, 7, 0, 0, 0))
    assert messages(effects, FetchResponse)[0].diverging == (0, 0)


def test_a_leader_that_is_cut_off_resigns() -> None:
    driver = three()
    effects = driver.after(3.1)
    assert of(effects, events.Deposed) and messages(effects, EndEpoch)
    assert driver.core.leader == -1 and driver.core.lease_deadline_ns(driver.now) == 0


def test_a_transfer_waits_until_the_successor_has_everything() -> None:
    driver = three()
    driver.fetch(2)
    driver(events.Propose("p", (b"a",), 1))
    driver(events.TransferLeadership(2))
    assert driver.core.is_leader and of(driver(events.Propose("q", (b"b",), 2)), events.ProposalRefused)
    driver.disk()
    effects = driver.fetch(2)
    assert messages(effects, EndEpoch)[0].successors[0] == 2 and of(effects, events.Deposed)


def test_describe_reports_the_offsets_of_all() -> None:
    driver = three()
    driver.fetch(8, offset=0)
    driver.now += SECOND
    view = driver.core.describe(driver.now)
    assert (view.leader, view.epoch, view.high_watermark) == (1, 1, 1)
    assert [(seen.key.node_id, seen.log_end_offset, seen.last_fetch_age_ns) for seen in view.voters] == [
        (1, 1, 0),
        (2, 1, SECOND),
        (3, -1, -1),
    ]
    assert [seen.key.node_id for seen in view.observers] == [8]


def test_a_follower_that_keeps_up_with_a_growing_log_has_caught_up() -> None:
    """KIP-836: as of the previous fetch, if it now has everything that the log contained then. It
    is never at the end: records are appended while it flushes.
    """
    driver = three()
    driver.fetch(2)
    for number in range(4):
        driver(events.Propose(number, (b"x",), driver.core.log.end_offset))
        driver.now += SECOND
        driver.disk()
        driver.fetch(2, offset=driver.core.log.end_offset - 1)
        driver.fetch(3, offset=1)
    two, three_ = driver.core.describe(driver.now).voters[1:]
    assert (two.last_fetch_age_ns, two.last_caught_up_age_ns) == (0, SECOND)
    assert (three_.last_fetch_age_ns, three_.last_caught_up_age_ns) == (0, -1), "that it fetches is not enough"


# -- followers -------------------------------------------------------------------------------------


def test_the_next_fetch_waits_for_the_disk_and_repeats_the_stamp() -> None:
    driver = follower()
    batch = leader_change_batch(0, 4, key(2))
    effects = answer(driver, batches=(batch,), high_watermark=1)
    assert (
        of(effects, events.AppendLog)[0].batches == (batch,)
        and not messages(effects, Fetch)
        and not of(effects, events.Committed)
    )
    effects = driver.disk()
    fetch = messages(effects, Fetch)[0]
    assert (fetch.offset, fetch.last_epoch, fetch.stamp_ns) == (1, 4, 77)
    assert of(effects, events.Committed)[0].batches == (batch,)


def test_the_followed_leader_is_persisted_before_a_response() -> None:
    driver = follower()
    effects = answer(driver)
    assert of(effects, events.PersistVote)[0].vote == VoteState(4, None, key(2)) and not of(effects, events.Send)
    assert messages(driver.disk(), Fetch)


def test_a_damaged_batch_is_refused() -> None:
    driver = follower()
    answer(driver)
    driver.disk()
    sound = leader_change_batch(0, 4, key(2))
    for damaged in (
        make_batch(1, 4, DATA, (b"a",)),
        make_batch(0, 5, DATA, (b"a",)),
        type(sound)(0, 4, DATA, (b"b",), sound.crc),
    ):
        assert not of(answer(driver, batches=(damaged,)), events.AppendLog)
        driver.after(0.6)
        driver.disk()
    assert of(answer(driver, batches=(sound,)), events.AppendLog)


def test_diverging_logs_are_truncated_at_a_batch_and_never_below_committed_records() -> None:
    log = (leader_change_batch(0, 1, key(1)), make_batch(1, 1, DATA, (b"a", b"b")), make_batch(3, 2, DATA, (b"c",)))
    driver = follower(vote=VoteState(2), batches=log, committed_offset=1)
    effects = answer(driver, diverging=(1, 2))
    assert of(effects, events.TruncateLog)[0].offset == 1
    fetch = messages(driver.disk(), Fetch)[0]
    assert (fetch.offset, fetch.last_epoch) == (1, 1)
    with pytest.raises(QuorumBroken):
        answer(driver, diverging=(0, 0))


def test_a_response_to_an_older_request_is_ignored() -> None:
    driver = follower()
    requested = messages(driver.effects, Fetch)[-1]
    driver.after(0.8)
    effects = driver.receive(
        2, FetchResponse(1, 4, 2, key(2), requested.sequence, 77, 5, (leader_change_batch(0, 4, key(2)),))
    )
    assert not of(effects, events.AppendLog) and not driver.core.promise.holds(driver.now)


def test_a_replica_whose_disk_is_busy_does_not_blame_the_leader() -> None:
    driver = follower()
    answer(driver, batches=(leader_change_batch(0, 4, key(2)),))
    driver.after(9)
    assert driver.core.leader == 2
    driver.disk()
    driver.after(4)
    assert driver.core.leader == -1


def test_a_follower_with_a_full_disk_fetches_again_later() -> None:
    driver = follower()
    answer(driver)
    driver.disk()
    effects = answer(driver, batches=(leader_change_batch(0, 4, key(2)),))
    effects = driver(events.DiskRefused(of(effects, events.AppendLog)[0].sequence, "no space"))
    assert driver.core.log.end_offset == 0 and not messages(effects, Fetch)
    assert messages(driver.after(0.6), Fetch)[0].offset == 0
