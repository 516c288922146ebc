"""Bugs planted in the rules by which a log survives crashes (`native/log/planted_bugs.h`): with each
of them the named native test fails, and without it the test passes.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.tiers import quick

NATIVE = Path(__file__).resolve().parents[3] / "native"
LIMIT_S = 300

# bug -> (program, the test that must find it)
FOUND_BY = {
    "NO_SCAN": ("test_log_recovery", "every_flipped_bit_is_found"),
    "OLD_BATCH": ("test_log_old_content", "old_batches_are_not_read"),
    "KEEP_LATER": ("test_log_recovery", "damage_cuts_the_log_and_deletes_later_segments"),
    "CUT_FLUSHED": ("test_log_recovery", "damage_below_the_recovery_point_stays"),
    "UNCHECKED_LAST": ("test_log_recovery", "damage_below_the_recovery_point_stays"),
    "NO_FLUSH": ("test_log_recovery", "what_recovery_has_found_is_flushed"),
    "NO_REWRITE": ("test_log_recovery", "what_recovery_has_found_is_flushed"),
    "REUSE_OFFSETS": ("test_log_recovery", "log_start_comes_from_the_checkpoint"),
    "EMPTY_FIRST": ("test_log_txn_sum", "an_interrupted_rebuild_is_begun_again"),
    "NO_CHECKSUM": ("test_log_txn_sum", "a_lost_or_damaged_txnindex_is_refused_by_readers_and_rebuilt_from_the_log"),
    "NOT_SHORTENED": ("test_log_recovery", "a_truncation_before_valid_batches_is_recorded"),
    "NOT_MISSING": ("test_log_missing", "the_only_replica_continues_at_its_former_log_end"),
    "NO_MARK": ("test_log_cut", "an_interrupted_truncation_is_completed"),
    "MARK_EARLY": ("test_log_cut", "a_truncation_ends_when_its_deletions_are_durable"),
    "OLD_POINT": ("test_log_cut", "an_old_recovery_point_is_not_trusted_above_a_truncation"),
    "NO_ENTRY": ("test_log_append", "high_watermark_is_exact_in_both_flush_modes"),
    "NO_ABORTED": ("test_log_model", "no_sequence_of_failures_loses_durable_records"),
    "COVER_LATER": ("test_log_append", "high_watermark_is_exact_in_both_flush_modes"),
    "FAILED_FLUSH": ("test_log_append", "a_failed_sync_fences"),
    "DIRECTORY_USED": ("test_reactor_disk", "a_failed_flush_fences_and_every_request_gets_an_error"),
    "NO_CLOSE": ("test_log_append", "a_clean_shutdown_flushes"),
    "KEEP_TORN": ("test_log_refused", "a_full_disk_leaves_everything_as_before"),
    "KEEP_RESERVED": ("test_log_append", "preallocation_runs_ahead_and_is_trimmed"),
    "OVERTAKE": ("test_reactor_leaders", "a_batch_does_not_overtake_the_one_that_was_refused_before_it"),
    "NO_OUTPUT": ("test_compact", "a_compacted_segment_replaces_nothing_before_it_is_flushed"),
    "OLD_INDEX": ("test_compact", "an_interrupted_swap_leaves_no_old_index_beside_the_new_log"),
    "LOG_LAST": ("test_compact", "a_segment_is_deleted_before_its_aborted_transactions"),
    "SWAP_EARLY": ("test_compact", "a_swap_ends_when_its_deletions_are_durable"),
    "UNDO_EARLY": ("test_compact", "an_undone_swap_keeps_its_files_until_the_list_is_gone"),
    "CUT_RESERVING": ("test_log_append", "what_a_disk_refuses_to_release_is_tried_again_later"),
    "CUT_UNCHECKED": ("test_reactor_periodic", "only_what_is_still_idle_is_released"),
}


def bits() -> dict[str, int]:
    text = (NATIVE / "log/planted_bugs.h").read_text()
    return {name: int(bit) for name, bit in re.findall(r"MQD_PLANTED_(\w+) = (\d+)", text)}


@functools.cache
def build(program: str) -> str:
    target = f"build/planted/{program}"
    made = subprocess.run(
        ["make", "-s", "-C", "native/tests", target], cwd=NATIVE.parent, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return str(NATIVE / "tests" / target)


def run(program: str, test: str, planted: int) -> str:
    """What the program prints when it runs only this test."""
    done = subprocess.run(
        [build(program), test],
        env={**os.environ, "MQD_PLANTED_LOG": str(planted)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    return done.stdout


def test_each_bug_has_a_test() -> None:
    assert list(FOUND_BY) == list(bits())
    assert list(bits().values()) == [1 << i for i in range(len(FOUND_BY))]


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("bug", quick(FOUND_BY, {"NO_SCAN", "EMPTY_FIRST"}))
def test_bug_is_found(bug: str) -> None:
    program, test = FOUND_BY[bug]
    sound = run(program, test, 0)
    assert re.search(rf"^ok +{test}", sound, re.M) and "FAILED" not in sound, sound
    output = run(program, test, bits()[bug])
    found = re.search(rf"^FAILED {test}|^mqd: invariant broken: ", output, re.M)
    assert found, f"{bug} is not found:\n{output}"
