"""Share groups, schedules, views and deduplication together, under the faults of tests/chaos."""

from __future__ import annotations

JOBS, VIEW, LATER, DUE, UNIQUE, LETTERS = "jobs", "jobs-a", "later", "due", "unique", "dlq.jobs"
PARTITIONS = {JOBS: 3, LATER: 2, DUE: 2, UNIQUE: 2, LETTERS: 2}
GROUP = "workers"
DELIVERIES_MAX = 10
LOCK_S = 5.0
ACCEPT, RELEASE, REJECT = "accept", "release", "reject"


def tag_of(number: int) -> str:
    """The value of the header `tag` of a record of JOBS. The view selects "a"."""
    return "a" if number % 4 == 0 else "b"


def outcome_of(number: int, delivery_count: int) -> str:
    """What a worker does with a job: most are accepted, some at the second attempt; some are rejected,
    and few released until they have no attempt left.
    """
    if number % 10 == 7:
        return REJECT
    if number % 100 == 50 or (number % 10 == 3 and delivery_count == 1):
        return RELEASE
    return ACCEPT
