"""Share-partitions at their coordinator checked with share_state_histories.py; and proof of its
effectiveness: each planted bug is caught.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mqd.coordinator.share import core as share
from mqd.coordinator.share import records
from mqd.coordinator.share.core import SharePartition
from mqd.coordinator.share.runs import Run, Runs
from tests.property.share_state_histories import run
from tests.tiers import quick

SEEDS_OF_A_SHARE = 8  # about 120 events each
PLANTED_SEEDS = 40


@pytest.mark.parametrize("share_number", quick(list(range(200)), [0]))
def test_histories(share_number: int) -> None:
    first = share_number * SEEDS_OF_A_SHARE
    assert sum(run(seed).event_count for seed in range(first, first + SEEDS_OF_A_SHARE)) > 800


def test_histories_are_deterministic() -> None:
    assert run(7).log == run(7).log


def test_histories_reach_rare_cases() -> None:
    assert {42, 74, 124} <= set().union(*(run(seed).refused for seed in range(3)))


# -- planted bugs ----------------------------------------------------------------------------------

PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def planted(function: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    PLANTED[function.__name__] = function
    return function


@planted
def the_last_write_wins(patch: pytest.MonkeyPatch) -> None:
    original = Runs.merge

    def merge(self: Runs, new: Run) -> None:
        kept = [one for one in self.runs if one.last < new.first or one.first > new.last]
        self.runs, self.firsts = kept, [one.first for one in kept]
        original(self, new)

    patch.setattr(Runs, "merge", merge)


@planted
def neighbours_are_not_joined(patch: pytest.MonkeyPatch) -> None:
    from mqd.coordinator.share import runs

    patch.setattr(runs, "_append", lambda merged, *run: merged.append(Run(*run)))


@planted
def states_below_the_start_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Runs, "advance", lambda self, start_offset: None)


@planted
def a_run_is_dropped_whole(patch: pytest.MonkeyPatch) -> None:
    def advance(self: Runs, start_offset: int) -> None:
        kept = [one for one in self.runs if one.first >= start_offset]
        self.runs, self.firsts = kept, [one.first for one in kept]

    patch.setattr(Runs, "advance", advance)


@planted
def old_leaders_can_write(patch: pytest.MonkeyPatch) -> None:
    original = SharePartition._write_error
    patch.setattr(
        SharePartition, "_write_error", lambda self, event: 0 if original(self, event) == 74 else original(self, event)
    )


@planted
def old_states_can_be_written(patch: pytest.MonkeyPatch) -> None:
    original = SharePartition._write_error
    patch.setattr(
        SharePartition, "_write_error", lambda self, event: 0 if original(self, event) == 124 else original(self, event)
    )


@planted
def a_new_leader_is_not_persisted(patch: pytest.MonkeyPatch) -> None:
    original = SharePartition._on_read
    patch.setattr(SharePartition, "_on_read", lambda self, event, now_ms: original(self, event, now_ms)[-1:])


@planted
def the_start_is_not_persisted(patch: pytest.MonkeyPatch) -> None:
    original = records.update_record
    patch.setattr(
        records,
        "update_record",
        lambda key, snapshot_epoch, leader_epoch, start_offset, complete_count, runs: original(
            key, snapshot_epoch, leader_epoch, -1, complete_count, runs
        ),
    )


@planted
def a_snapshot_lacks_the_leader_epoch(patch: pytest.MonkeyPatch) -> None:
    original = records.snapshot_record
    patch.setattr(
        records, "snapshot_record", lambda key, epoch, state, leader, *rest: original(key, epoch, state, 0, *rest)
    )


@planted
def a_snapshot_is_taken_before_the_write(patch: pytest.MonkeyPatch) -> None:
    original = SharePartition._snapshot

    def snapshot(self: SharePartition, now_ms: int) -> list:
        full, self.runs = self.runs, Runs(self.runs.runs[:-1])
        actions = original(self, now_ms)
        self.runs = full
        return actions

    patch.setattr(SharePartition, "_snapshot", snapshot)


@planted
def snapshots_are_never_due(patch: pytest.MonkeyPatch) -> None:
    original = SharePartition._persist

    def persisted(self: SharePartition, *arguments: object) -> list:
        self.update_count = 0
        return original(self, *arguments)

    patch.setattr(SharePartition, "_persist", persisted)


@planted
def states_of_lost_records_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SharePartition, "_drop_lost_state", lambda self, epochs: False)


@planted
def a_run_is_cut_one_offset_late(patch: pytest.MonkeyPatch) -> None:
    original = Runs.truncate
    patch.setattr(Runs, "truncate", lambda self, end: original(self, end + 1))


@planted
def a_deletion_writes_no_tombstone(patch: pytest.MonkeyPatch) -> None:
    original = SharePartition._on_forget
    patch.setattr(SharePartition, "_on_forget", lambda self, event, now_ms: original(self, event, now_ms)[1:])


@planted
def an_initialization_keeps_the_states(patch: pytest.MonkeyPatch) -> None:
    original = SharePartition._on_initialize

    def on_initialize(self: SharePartition, event: share.Initialize, now_ms: int) -> list:
        kept = self.runs
        actions = original(self, event, now_ms)
        self.runs = kept
        return actions

    patch.setattr(SharePartition, "_on_initialize", on_initialize)


@planted
def responds_before_it_persists(patch: pytest.MonkeyPatch) -> None:
    original = SharePartition.handle
    patch.setattr(SharePartition, "handle", lambda self, event, now_ms: original(self, event, now_ms)[::-1])


@pytest.mark.parametrize("name", quick(list(PLANTED), ["the_last_write_wins"]))
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        for seed in range(PLANTED_SEEDS):
            run(seed)
