"""`python -m perf scale cluster`, small: what it measures happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import cluster_scale, loading

pytestmark = pytest.mark.slow


def test_hosts_that_are_down_add_metadata_and_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "BUILD", tmp_path)
    files: list[str] = []
    fail_over = cluster_scale._fail_over

    def looking(cluster: cluster_scale.Cluster, topics: list[str]) -> dict[str, float]:
        files.extend(path.parent.name for path in tmp_path.rglob("*.log") if path.parent.parent.name == "log")
        return fail_over(cluster, topics)

    monkeypatch.setattr(cluster_scale, "_fail_over", looking)
    found = cluster_scale.one_run(250, 50)
    assert sum(name.startswith("on-disk-") for name in files) == found["on_disk"] == 150
    assert not any(name.startswith("of-") for name in files)
    assert 0 < found["elected_s"] < cluster_scale.FAILOVER_SECONDS
    assert found["writes_paused_s"] > 1, "the writer did not meet the failover"
    assert found["in_sync_s"] > found["ready_s"] > 0
    assert not list(tmp_path.iterdir())
