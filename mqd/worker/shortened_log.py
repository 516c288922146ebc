"""Keeps a replica from leading while its log is shortened. Recovery may have cut acknowledged
records off the log, because a flipped bit in flushed data looks like a torn write (C5 of
native/log/recovery/recovery.h).

Such a replica may have fewer records than the other replicas assume. A file in its directory marks
it as shortened until it has caught up. While it is marked:
    H1  it does not lead: as a leader it would make the others truncate acknowledged records. It
        reports that it does not serve the partition, so that another replica leads. It repeats the
        report while there is no leader and it is in sync: otherwise the controller would conclude
        from the silence that the replica can serve again, and make it the leader.
    H2  it follows, and counts as a replica again once a leader has added it to the in-sync set:
        then it has all records.
    H3  a sole replica is never treated like this: no other replica has more.
    H4  after an unclean election the operator may delete the file while the broker is down.
Pure except for the file.
"""

import contextlib
from pathlib import Path

import msgspec

from mqd.log.files import Files
from mqd.worker.assignments import Assignment

MARKER = "shortened"
REASON = (
    "recovery has cut its log although sound records follow the damage, so it may lack acknowledged records: it"
    " follows, and leads again when it has caught up. If no other replica is left, stop the broker and delete the file"
    f" {MARKER} in the partition's directory; the truncated records are then lost"
)


def gap_reason(path: Path, missing_from: int, missing_to: int) -> str:
    return (
        f"offsets {missing_from} to {missing_to - 1} are missing in the middle of its log, and another replica may have"
        f" them. Restore the segment from a copy, or move the directory {path} away, both while the broker is down:"
        " without the directory this host copies the partition again from the others"
    )


def is_marked(path: Path) -> bool:
    return (path / MARKER).exists()


def mark(path: Path, files: Files) -> None:
    """The mark is durable when this returns. Raises OSError."""
    files.replace(path / MARKER, b"1\n")


def unmark(path: Path, files: Files) -> None:
    """Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        files.unlink(path / MARKER)


def is_leader_or_candidate(assignment: Assignment) -> bool:
    """Whether the replica is the assigned leader, or the next candidate: in sync while there is no
    leader. A replica that is only in the ELR is elected as soon as it is available, and is in sync
    then. An operator may choose a replica that is in neither set (H4).
    """
    return assignment.leader == assignment.node_id or (assignment.leader < 0 and _is_in_sync(assignment))


def _is_in_sync(assignment: Assignment) -> bool:
    return any(member.node_id == assignment.node_id and member.in_sync for member in assignment.members)


class ShortenedState:
    """The state of one open partition, from its opening until it counts as a replica again."""

    def __init__(self) -> None:
        self._in_sync: bool | None = None  # according to the last assignment

    def on_assignment(self, assignment: Assignment) -> tuple[Assignment, bool]:
        """Returns (the assignment for the reactor, whether the replica has caught up, so that it
        counts as a replica again).
        """
        is_leader = assignment.leader == assignment.node_id
        in_sync = _is_in_sync(assignment)
        has_joined = self._in_sync is False and in_sync and assignment.leader >= 0 and not is_leader
        self._in_sync = in_sync
        if has_joined or (is_leader and assignment.recovering):
            return assignment, True
        return (msgspec.structs.replace(assignment, leader=-1), False) if is_leader else (assignment, False)
