"""The scaling page from fake measurements, and the costs shipped with `mqd size` from real ones."""

import json
import math
import xml.etree.ElementTree as ElementTree

import pytest

from mqd.cli.sizing import SHIPPED_FIGURES, shipped_figures
from perf import scaling, sizing, usl
from perf.__main__ import HISTORY


def fake_measurements(cores: int = 2) -> dict:
    """The clients of one worker follow a simple law; a record costs a worker 2 µs, and 10 % more
    for each further worker.
    """

    def values(rate: float, cost: float) -> dict[str, list[float]]:
        spread = (0.99, 1.0, 1.01)
        return {
            "records_per_s": [rate * factor for factor in spread],
            "cpu_us_per_record": [cost * factor for factor in spread],
            "client_cpu_us_per_record": [1.0] * 3,
            "worker_cores": [0.5] * 3,
            "seconds": [1.0] * 3,
        }

    return {
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"cpu": "a CPU", "kernel": "6.1", "disturbed": "0 of 9"},
        "cores": cores,
        "batch_bytes": 16384,
        "records_per_batch": 16,
        "curves": {
            "clients": {str(n): values(usl.law(n, 1e5, 0.2, 0.01), 2.0) for n in scaling.CLIENTS},
            "workers": {str(n): values(3e5, 2.0 * (1 + 0.1 * (n - 1))) for n in (1, 2, 3, 4)},
        },
        "memory_bytes_by_workers": {str(n): 80_000_000 + 30_000_000 * n for n in (1, 2, 3, 4)},
    }


def test_workers_are_compared_by_their_cost_per_record():
    found = usl.fit(scaling.by_workers(fake_measurements()), resamples=50)
    assert (found.rate, found.contention, found.coherency) == pytest.approx((5e5, 0.1, 0.0), rel=0.02, abs=1e-6)
    clients = usl.fit(scaling.by_clients(fake_measurements()), resamples=50)
    assert (clients.contention, clients.coherency) == pytest.approx((0.2, 0.01), rel=0.02)


def test_memory_is_split_between_the_broker_and_its_workers():
    assert scaling.memory_of(fake_measurements()) == (80_000_000, 30_000_000)
    assert scaling.memory_of({"memory_bytes_by_workers": {"1": 110_000_000}}) == (110_000_000, 0)


def test_the_page_marks_measurements_that_shared_cores():
    text = scaling.page(fake_measurements(cores=2))
    assert "| 2 | " in text and "| 3 * | " in text and "| 4 * | " in text
    assert "**not** measured" in text and "| 32 |" in text and "| 2 | 9" not in text.split("**not** measured")[1]
    assert " * |" not in scaling.page(fake_measurements(cores=8))


def test_the_chart_has_both_curves_and_a_dashed_extrapolation():
    root = ElementTree.fromstring(scaling.chart(fake_measurements()))
    lines = [one for one in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert len(lines) == 3 and [bool(one.get("stroke-dasharray")) for one in lines] == [False, False, True]


@pytest.mark.parametrize(
    ("cores", "counts"),
    [
        (1, [1, 2, 3, 4]),
        (2, [1, 2, 3, 4]),
        (6, [1, 2, 3, 4, 6]),
        (16, [1, 2, 3, 4, 8, 16]),
        (24, [1, 2, 3, 4, 8, 16, 24]),
    ],
)
def test_there_are_more_points_than_parameters(cores, counts):
    assert scaling.worker_counts(cores) == counts


def history() -> list[dict]:
    return [json.loads(line) for line in HISTORY.read_text().splitlines() if line.strip()]


def test_the_shipped_costs_are_those_of_a_recorded_run():
    shipped = shipped_figures()
    run = next(
        run for run in reversed(history()) if run["commit"][:10] in shipped.source and run["date"][:10] == shipped.date
    )
    made = sizing.figures(run, json.loads(scaling.RESULT.read_text()))
    assert SHIPPED_FIGURES.read_text() == sizing.to_text(made), "python -m perf --figures writes it again"


def test_differences_made_negative_by_noise_do_not_count():
    run = history()[0]
    run["figures"][sizing.FORWARD[1024]]["median"] = 0.2
    run["figures"][sizing.FORWARD[16384]]["median"] = -3.5
    found = sizing.figures(run, fake_measurements())
    assert found.forward_cpu_us == {1024: 0.2, 16384: 0.2} and all(
        math.isfinite(cost) and cost > 0 for cost in found.append_cpu_us.values()
    )
    assert (found.workers_measured, found.broker_memory_bytes) == (2, 80_000_000)
