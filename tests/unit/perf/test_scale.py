"""The models of large clusters, tested on small ones; and the page from their results."""

from __future__ import annotations

import json

import pytest

from perf import control_scale, gossip_scale, scale


def test_failures_are_known_and_counted() -> None:
    found = gossip_scale.failures(30, 0.01, 3, 1)
    assert len(found["dead_for_all_ms"]) == 3
    assert all(
        400 < suspected < dead < 8_000
        for suspected, dead in zip(found["suspected_by_all_ms"], found["dead_for_all_ms"], strict=True)
    )
    assert 3 < found["idle"]["mean_per_s"] < 8 and found["idle"]["most_per_s"] <= found["most_per_s"] < 60
    assert found["false_deaths"] == 0 and found["idle"]["bytes_per_s"] > 0
    assert found == {**gossip_scale.failures(30, 0.01, 3, 1), "idle": found["idle"]}, (
        "one seed, one run (but for CPU time)"
    )


def test_many_at_once() -> None:
    found = gossip_scale.simultaneous_failures(20, 0.01, 0.2, 1)
    assert len(found["dead_for_all_ms"]) == 4 and found["false_deaths"] == 0


def test_a_live_host_taken_for_dead_counts_as_a_false_death() -> None:
    model = gossip_scale.Model(5, 0.0, 1)
    model.run(1_000)
    model.hosts[3].alive = False  # but the model does not know
    model.run(10_000)
    assert model.false_deaths == 4 and model.false_suspicions == 4


def test_a_host_that_never_learns_ends_the_run() -> None:
    model = gossip_scale.Model(5, 0.0, 1)
    model.kill(2)
    with pytest.raises(AssertionError, match="4 hosts do not know"):
        model.detection_ms()


def test_the_page_matches_the_result() -> None:
    """The committed figures, page and charts match."""
    result = json.loads(scale.RESULT.read_text())
    page = scale.PAGE.read_text()
    assert scale.gossip_page(result).strip() in page
    assert scale.FAILURE_CHART.read_text() == scale.failure_chart(
        result
    ) and scale.RATE_CHART.read_text() == scale.rate_chart(result)


def test_the_pages_claims_match_its_figures() -> None:
    result = json.loads(scale.RESULT.read_text())["gossip"]
    for one in (*result["failures"], *result["at_once"]):
        assert one["false_deaths"] == 0 and one["most_per_s"] <= 100
    single = [ms for one in result["failures"] for ms in one["dead_for_all_ms"]]
    assert f"two of the {len(single)} single failures took" in " ".join(scale.PAGE.read_text().split())
    assert max(single) <= 5_000, "the page says that all are known within the target"
    assert all(max(one["dead_for_all_ms"]) <= 5_000 for one in result["at_once"]), "a rack fails"
    assert {one["hosts"] for one in result["failures"]} >= {10, 100, 1000}


@pytest.mark.slow
def test_control_plane_models_run_whole() -> None:
    small = control_scale.catch_up(2_000, 12)
    assert small["snapshot_bytes"] > 2_000 * 50 and all(value >= 0 for value in small["steps"].values())
    failed = control_scale.failover(2_000, 12, 300)
    assert failed["leaders"] >= 300 and failed["record_bytes"] > 1_000 and failed["update_bytes"] > 1_000
    assert control_scale.heartbeats(2_000, 12)["heartbeat_us"] > 0


def test_the_model_cluster_is_consistent() -> None:
    state = control_scale.cluster(3_000, 15)
    state.check()
    assert state.partition_count == 3_000
    assert all(len(set(partition.replicas)) == 3 for topic in state.topics.values() for partition in topic.partitions)


def test_the_control_plane_meets_the_pages_claims() -> None:
    result = json.loads(scale.RESULT.read_text())
    assert scale.control_page(
        result
    ).strip() in scale.PAGE.read_text() and scale.CATCH_UP_CHART.read_text() == scale.catch_up_chart(result)
    assert next(one for one in result["control"]["catch_up"] if one["partitions"] == 200_000)["total_s"] <= 10
    assert all(one["total_s"] <= 3 for one in result["control"]["failover"] if one["partitions"] == 200_000)
