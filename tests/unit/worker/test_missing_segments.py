"""A log that was opened without some of its segments: how the worker reports it, and what the
replica may still do.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

from mqd import native
from mqd.worker import shortened_log as shortened
from tests.unit.worker.test_shortened import Set


def check(made: Set, recovery: native.Recovery, has_other_replicas: bool, known_start: int = 0) -> list[bool]:
    closed: list[bool] = []
    owned = SimpleNamespace(**vars(made.owned), has_other_replicas=has_other_replicas)
    try:
        made.partitions._check_missing(owned, made.path, SimpleNamespace(close=closed.append), recovery, known_start)  # type: ignore[arg-type]
    except OSError:
        assert closed == [False]
        raise
    return closed


def test_without_its_end_one_of_several_replicas_is_shortened(tmp_path: Path) -> None:
    made = Set(tmp_path)
    assert check(made, native.Recovery(missing_from=5, missing_to=9, log_end_offset=5), has_other_replicas=True) == []
    assert shortened.is_marked(made.path)


def test_with_a_gap_in_the_middle_one_of_several_replicas_is_offline(tmp_path: Path) -> None:
    made = Set(tmp_path)
    with pytest.raises(OSError, match="offsets 5 to 8 are missing in the middle.*move the directory"):
        check(made, native.Recovery(missing_from=5, missing_to=9, log_end_offset=12), has_other_replicas=True)


@pytest.mark.parametrize("log_end", [9, 12])
def test_the_only_replica_serves_its_remaining_records(tmp_path: Path, log_end: int) -> None:
    made = Set(tmp_path)
    assert (
        check(made, native.Recovery(missing_from=5, missing_to=9, log_end_offset=log_end), has_other_replicas=False)
        == []
    )
    assert not shortened.is_marked(made.path)


@pytest.mark.parametrize(("start", "reported"), [(4, True), (0, False)])
def test_missing_first_segments_are_reported(tmp_path: Path, start: int, reported: bool) -> None:
    made = Set(tmp_path)
    lines: list[str] = []
    made.partitions._log = SimpleNamespace(error=lambda text, **fields: lines.append(f"{text} {fields}"))  # type: ignore[assignment]
    assert check(made, native.Recovery(log_start_offset=start, log_end_offset=9), has_other_replicas=False) == []
    assert bool(lines) == reported and all("'from_offset': 0, 'to_offset': 3" in line for line in lines)
