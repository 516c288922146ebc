"""The cost of a replicated record, and the resulting capacity of a cluster: the arithmetic, and the
page with the results.
"""

from __future__ import annotations

import pytest

from mqd.cli.sizing import shipped_figures, speedup
from perf import replication_model as model
from perf.replication import _median_turn, block, summary
from perf.replication_model import Roles
from perf.report import number

BATCHED = Roles(0.8, 1.2, 0.7)
SINGLE = Roles(2.3, 4.2, 1.0)


def test_both_measured_points_are_on_the_line() -> None:
    costs = model.costs_from(SINGLE, BATCHED, 16)
    for batch_records, roles in ((1, SINGLE), (16, BATCHED)):
        assert costs.record(1, batch_records, 1.0) == pytest.approx(roles.alone)
        assert costs.record(3, batch_records, 1.0) == pytest.approx(roles.leader + 2 * roles.follower)
    assert costs.record(2, 16, 1.0) == pytest.approx(1.0 + 0.7)  # one follower: half of the leader's cost for two


def test_compression_only_reduces_bytes() -> None:
    costs = model.costs_from(SINGLE, BATCHED, 16)
    assert costs.record(1, 16, 0.0) == pytest.approx(costs.fixed.alone / 16) == pytest.approx(0.1)
    assert costs.record(1, 16, 0.5) == pytest.approx(0.45)


@pytest.mark.parametrize(("single", "batched"), [(0.5, 0.8), (9.0, 0.1)])
def test_noise_makes_no_part_negative(single: float, batched: float) -> None:
    costs = model.costs_from(Roles(single, single, single), Roles(batched, batched, batched), 16)
    assert min(costs.fixed + costs.per_record) >= 0
    assert costs.record(1, 16, 1.0) == pytest.approx(batched), (
        "what is measured at the larger batch stays, whatever becomes of the line"
    )


def test_load_is_shared_by_hosts_and_slowed_by_workers() -> None:
    costs, figures = model.costs_from(SINGLE, BATCHED, 16), shipped_figures()
    one = model.cores_rate(costs, figures, hosts=5)
    assert one == pytest.approx(5e6 / 2.6) and model.cores_rate(costs, figures, hosts=10) == pytest.approx(2 * one)
    assert model.cores_rate(costs, figures, hosts=5, workers=2) == pytest.approx(one * speedup(figures, 2))
    assert model.cores_rate(costs, figures, hosts=5, replicas=1) == pytest.approx(5e6 / 0.8)


def test_every_copy_has_to_arrive() -> None:
    assert model.network_rate(5, 3, 1.0) == pytest.approx(5 * 1.25e9 / (1.05 * 1024 * 3))
    assert model.network_rate(10, 3, 0.5) == pytest.approx(4 * model.network_rate(5, 3, 1.0))


def _result() -> dict:
    def turn(roles: Roles) -> dict:
        return {
            "alone": roles.alone,
            "leader": roles.leader,
            "followers": [roles.follower - 0.1, roles.follower + 0.1],
            "rate": 100_000.0,
            "waited": [0.1, 1.0, 1.0],
        }

    disturbed = turn(Roles(0.8, 3.0, 2.0))
    points = [
        {
            "share": 0.5,
            "rate": 60_000,
            "p50_us": 2000,
            "p99_us": 4900,
            "p999_us": 9000,
            "late_p99_us": 100,
            "running": 0.9,
            "waiting": 0.4,
        }
    ]
    return {
        "date": "2026-11-21T20:00:00",
        "cpus": "0,0,0",
        "machine": {"cpu": "a CPU", "cores": 2, "tcp_congestion_control": "bbr"},
        "turns": {
            "16 records a batch": [turn(BATCHED), disturbed, turn(BATCHED)],
            "one record a batch": [turn(SINGLE)] * 3,
        },
        "paced": points,
        "latency": {"maximum": 120_000.0, "points": points},
    }


def test_the_medians_count_and_the_followers_mean() -> None:
    found = summary(_result()["turns"]["16 records a batch"])
    assert (found.alone, found.leader, found.follower) == (0.8, 1.2, pytest.approx(0.7))


def test_the_page_has_results_and_conclusions() -> None:
    page = block(_result(), shipped_figures())
    assert "| three replicas: leader, 16 records a batch | 1.2 | 1.2–3 | 1.50 (1.50–3.75) | ≤ 1.4: missed |" in page
    assert (
        "| three replicas: each follower, 16 records a batch | 0.7 | 0.7–2 | 0.87 (0.87–2.50) | ≤ 1.2: not in every run |"
        in page
    )
    assert "| three replicas: leader, one record a batch | 4.2 | 4.2–4.2 | 1.83 (1.83–1.83) | ≤ 1.4: missed |" in page
    assert "| 1/2 | 60,000 | 2 | 4.9 | 9 | 0.1 | 90 % | 40 % |" in page
    assert "(target at 1/2: p99 ≤ 5 ms: reached)" in " ".join(page.split())
    turns = {
        **_result(),
        "paced": [
            _median_turn([{**_result()["paced"][0], "p99_us": p99_us} for p99_us in (40_000.0, 3_000.0, 5_100.0)])
        ],
    }
    assert "| 1/2 | 60,000 | 2 | 5.1 (3–40) | 9 | 0.1 | 90 % | 40 % |" in block(turns, shipped_figures())
    assert "(target at 1/2: p99 ≤ 5 ms: missed)" in " ".join(block(turns, shipped_figures()).split())
    assert "librdkafka" not in block(
        {name: value for name, value in _result().items() if name != "latency"}, shipped_figures()
    )
    two = 2e6 / (1.2 + 2 * 0.7)
    assert f"**{100 * two / 500_000:.0f} %** of the target" in page
    assert (
        f"| 5 | not compressed | {number(5e6 / 2.6)} | {number(5e6 / 2.6 * speedup(shipped_figures(), 2))} |"
        f" {number(model.network_rate(5, 3, 1.0))} |" in page
    )
    assert "| 10 | compressed to 25 % |" in page
